"""A real MariaDB for tests, with a row binlog. Like this:

with MariadbServer() as server:
    capture = hr.cdc.mariadb(server.url, tables=["orders"])
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from headrace.testing.database_server import DatabaseServer, ServerUnavailable

SETTINGS = {
    "log-bin": "binlog",
    "binlog-format": "ROW",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
    "server-id": "1",
    "bind-address": "127.0.0.1",
    "skip-name-resolve": "1",
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-buffer-pool-size": "64M",
    "innodb-log-file-size": "16M",
    "performance-schema": "0",
}
USER = "shop"


class MariadbServer(DatabaseServer):
    kind = "mariadb"
    user = "mysql"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.settings = {**SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        return self.url_of("shop")

    def url_of(self, database: str) -> str:
        return f"mariadb://{USER}@127.0.0.1:{self.port}/{database}"

    def prepare(self, data: Path) -> None:
        install = shutil.which("mariadb-install-db")
        if install is None or self._program() is None:
            raise ServerUnavailable("MariaDB is not installed. To fix: apt-get install mariadb-server")
        self.run([install, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-log-file-size=16M"])
        first = f"CREATE USER IF NOT EXISTS '{USER}'@'%'; GRANT ALL ON *.* TO '{USER}'@'%' WITH GRANT OPTION; CREATE DATABASE IF NOT EXISTS shop;"
        (data / "first.sql").write_text(first.replace("; ", ";\n"))

    @staticmethod
    def _program() -> str | None:
        return shutil.which("mariadbd") or next((str(path) for path in [Path("/usr/sbin/mariadbd")] if path.exists()), None)

    def command(self, data: Path) -> list[str]:
        program = self._program()
        assert program is not None
        options = [f"--{name}={value}" for name, value in self.settings.items()]
        places = [f"--datadir={data}", f"--port={self.port}", f"--socket={data / 'socket'}", f"--pid-file={data / 'pid'}", f"--init-file={data / 'first.sql'}"]
        return [program, "--no-defaults", *places, *options]

    def answers(self) -> bool:
        return self.is_open()
