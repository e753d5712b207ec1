"""A real Redis for tests, without persistence. Like this:

with RedisServer() as server:
sink = hr.sinks.redis(server.url)
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from tests.servers.database_server import DatabaseServer, ServerUnavailable


class RedisServer(DatabaseServer):
    kind = "redis"
    user = "redis"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def prepare(self, data: Path) -> None:
        data.mkdir()
        if self.owner is not None:
            shutil.chown(data, self.owner)

    def command(self, data: Path) -> list[str]:
        program = shutil.which("redis-server")
        if program is None:
            raise ServerUnavailable("Redis is not installed. To fix: apt-get install redis-server")
        return [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(data),
        ]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
