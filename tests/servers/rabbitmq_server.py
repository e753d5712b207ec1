"""A real RabbitMQ for tests, on free ports, with nothing but AMQP. Like this:

with RabbitmqServer() as server:
gateway = hr.gateways.amqp("orders", url=server.url, queue="orders")
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.servers.database_server import DatabaseServer, ServerUnavailable, free_port

PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_GREETING = b"AMQP\x00\x00\x09\x01"


class RabbitmqServer(DatabaseServer):
    kind = "rabbitmq"
    user = "rabbitmq"

    def __init__(self) -> None:
        super().__init__()
        self._epmd_port = self._distribution_port = 0

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def prepare(self, data: Path) -> None:
        """Erlang's own port mapper gets a port too, so that nothing is shared with another RabbitMQ
        of this machine.
        """
        self._epmd_port, self._distribution_port = free_port(), free_port()
        data.mkdir()
        settings = (
            f"listeners.tcp.local = 127.0.0.1:{self.port}\nlog.file.level ="
            " error\nvm_memory_high_watermark.absolute = 512MB\ndisk_free_limit.absolute = 50MB\n"
        )
        (data / "rabbitmq.conf").write_text(settings)
        (data / "enabled_plugins").write_text("[].\n")
        if self.owner is not None:
            for path in (data, *data.iterdir()):
                shutil.chown(path, self.owner)

    def command(self, data: Path) -> list[str]:
        if not PROGRAM.exists():
            raise ServerUnavailable(
                "RabbitMQ is not installed. To fix: apt-get install rabbitmq-server"
            )
        return [str(PROGRAM)]

    @property
    def _environment(self) -> dict[str, str]:
        data = str(self.data)
        return {
            **os.environ,
            "HOME": data,
            "TMPDIR": data,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"headrace{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONFIG_FILE": f"{data}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{data}/enabled_plugins",
            "RABBITMQ_MNESIA_BASE": f"{data}/mnesia",
            "RABBITMQ_LOG_BASE": f"{data}/log",
            "RABBITMQ_PID_FILE": f"{data}/pid",
        }

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(_GREETING)
                return connection.recv(1) == b"\x01"
        except OSError:
            return False

    def stop(self) -> None:
        self.stop_process()
        if self.directory is not None and (epmd := shutil.which("epmd")):
            subprocess.run(
                [epmd, "-port", str(self._epmd_port), "-kill"],
                capture_output=True,
                check=False,
                env=self._environment,
                timeout=30,
            )
        super().stop()
