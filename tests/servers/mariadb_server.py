"""A real MariaDB for tests, with a row binlog. Like this:

with MariadbServer() as server:
    capture = hr.cdc.mariadb(server.url, tables=["orders"])
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.servers.binlog_server import BinlogServer
from tests.servers.database_server import ServerUnavailable

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
_MISSING = "MariaDB is not installed. To fix: apt-get install mariadb-server"


class MariadbServer(BinlogServer):
    kind = "mariadb"
    standard = SETTINGS

    def program(self) -> str:
        found = shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")
        if found is None:
            raise ServerUnavailable(_MISSING)
        return found

    def install(self, data: Path) -> None:
        install = shutil.which("mariadb-install-db")
        if install is None:
            raise ServerUnavailable(_MISSING)
        self.run(
            [
                install,
                "--no-defaults",
                f"--datadir={data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--innodb-log-file-size=16M",
            ]
        )
