"""A real MySQL for tests, with a row binlog and GTIDs, where there is one: Debian's stable releases have MariaDB in its place.

`HEADRACE_MYSQLD` names its program; otherwise `mysqld` is taken, if it is MySQL's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from headrace.testing.database_server import DatabaseServer, ServerUnavailable

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
USER = "shop"


@cache
def program() -> str | None:
    found = os.environ.get(PROGRAM_VARIABLE) or shutil.which("mysqld") or shutil.which("mysqld", path="/usr/sbin")
    if found is None:
        return None
    told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return None if "MariaDB" in told or not told else found


class MysqlServer(DatabaseServer):
    kind = "mysql"
    user = "mysql"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.settings = {**SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        return self.url_of("shop")

    def url_of(self, database: str) -> str:
        return f"mysql://{USER}@127.0.0.1:{self.port}/{database}"

    def prepare(self, data: Path) -> None:
        if program() is None:
            raise ServerUnavailable(f"There is no MySQL here. To fix: install one, or name its program in {PROGRAM_VARIABLE}.")
        self.run([str(program()), "--no-defaults", "--initialize-insecure", f"--datadir={data}", "--secure-file-priv="])
        first = f"CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '';\nGRANT ALL ON *.* TO '{USER}'@'%' WITH GRANT OPTION;\nCREATE DATABASE IF NOT EXISTS shop;\n"
        (data / "first.sql").write_text(first)

    def command(self, data: Path) -> list[str]:
        options = [f"--{name}={value}" for name, value in self.settings.items()]
        places = [f"--datadir={data}", f"--port={self.port}", f"--socket={data / 'socket'}", f"--pid-file={data / 'pid'}", f"--init-file={data / 'first.sql'}"]
        return [str(program()), "--no-defaults", *places, *options]

    def answers(self) -> bool:
        return self.is_open()
