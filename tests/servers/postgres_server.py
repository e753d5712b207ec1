"""A real Postgres for tests, with logical replication switched on. Like this:

with PostgresServer() as server:
capture = hr.cdc.postgres(server.url, tables=["orders"])
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.servers.database_server import DatabaseServer, ServerUnavailable

# A test loses no power, so it need not wait for disks.
SETTINGS = {
    "wal_level": "logical",
    "fsync": "off",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "64MB",
    "autovacuum": "off",
}


def find_program(name: str) -> str:
    """Debian keeps the server's programs out of the PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3])
    )
    program = str(found[-1]) if found else shutil.which(name)
    if program is None:
        raise ServerUnavailable("Postgres is not installed. To fix: apt-get install postgresql")
    return program


class PostgresServer(DatabaseServer):
    kind = "postgres"
    user = "postgres"
    last_signal = "INT"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.settings = {**SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def prepare(self, data: Path) -> None:
        self.run(
            [
                find_program("initdb"),
                "-D",
                str(data),
                "-U",
                "postgres",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C.UTF-8",
                "--no-sync",
            ]
        )
        with (data / "postgresql.conf").open("a") as config:
            config.writelines(f"{name} = '{value}'\n" for name, value in self.settings.items())

    def command(self, data: Path) -> list[str]:
        return [find_program("postgres"), "-D", str(data), "-p", str(self.port), "-k", str(data)]

    def answers(self) -> bool:
        if not self.is_open():
            return False
        ready = subprocess.run(
            [find_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)],
            check=False,
            timeout=10,
        )
        return ready.returncode == 0

    def stop_process(self, how: signal.Signals = signal.SIGINT) -> None:
        """Postgres's fast shutdown, by default: it does not wait for its clients."""
        super().stop_process(how)
