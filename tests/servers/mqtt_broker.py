"""A real MQTT broker for tests: mosquitto, without persistence. Like this:

with MqttBroker() as broker:
source = hr.sources.from_url(f"mqtt://127.0.0.1:{broker.port}/rows", topic="rows")
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from tests.servers.database_server import DatabaseServer, ServerUnavailable


class MqttBroker(DatabaseServer):
    kind = "mosquitto"
    user = "mosquitto"

    def __init__(self, *, users: str = "") -> None:
        """With `users`, as in `ada:secret`, only that user may connect."""
        super().__init__()
        self._users = users

    def prepare(self, data: Path) -> None:
        data.mkdir()
        if self.owner is not None:
            shutil.chown(data, self.owner)
        access = "allow_anonymous true"
        if self._users:
            file = data / "users"
            name, _, password = self._users.partition(":")
            self.run(["mosquitto_passwd", "-b", "-c", str(file), name, password])
            access = f"allow_anonymous false\npassword_file {file}"
        (data / "mosquitto.conf").write_text(
            f"listener {self.port} 127.0.0.1\n{access}\npersistence false\n"
            "max_queued_messages 0\nmax_inflight_messages 100\n"
        )

    def command(self, data: Path) -> list[str]:
        program = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")
        if program is None:
            raise ServerUnavailable("Mosquitto is not installed. To fix: apt-get install mosquitto")
        return [program, "-c", str(data / "mosquitto.conf")]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False
