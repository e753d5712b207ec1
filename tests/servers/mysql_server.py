"""A real MySQL for tests, with a row binlog and GTIDs, where there is one: Debian's stable releases
have MariaDB in its place.

`HEADRACE_MYSQLD` names its program; otherwise `mysqld` is taken, if it is MySQL's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.servers.binlog_server import BinlogServer
from tests.servers.database_server import ServerUnavailable

SETTINGS = {
    "log-bin": "binlog",
    "binlog-row-metadata": "FULL",
    "gtid-mode": "ON",
    "enforce-gtid-consistency": "ON",
    "server-id": "1",
    "bind-address": "127.0.0.1",
    "mysqlx": "OFF",
    "secure-file-priv": "",
    "innodb-flush-log-at-trx-commit": "0",
    "sync-binlog": "0",
    "innodb-buffer-pool-size": "64M",
}
PROGRAM_VARIABLE = "HEADRACE_MYSQLD"


@cache
def program() -> str | None:
    found = (
        os.environ.get(PROGRAM_VARIABLE)
        or shutil.which("mysqld")
        or shutil.which("mysqld", path="/usr/sbin")
    )
    if found is None:
        return None
    version_text = subprocess.run(
        [found, "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    return None if "MariaDB" in version_text or not version_text else found


class MysqlServer(BinlogServer):
    kind = "mysql"
    standard = SETTINGS

    def program(self) -> str:
        found = program()
        if found is None:
            raise ServerUnavailable(
                "There is no MySQL here. To fix: install one, or name its program in"
                f" {PROGRAM_VARIABLE}."
            )
        return found

    def install(self, data: Path) -> None:
        self.run(
            [
                self.program(),
                "--no-defaults",
                "--initialize-insecure",
                f"--datadir={data}",
                "--secure-file-priv=",
            ]
        )
