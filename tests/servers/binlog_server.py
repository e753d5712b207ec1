"""What the test servers with a binlog have in common: MariaDB and MySQL take the same options, and
the same user is made in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.servers.database_server import DatabaseServer

_USER = "shop"


class BinlogServer(DatabaseServer):
    """A database `shop`, and a user without a password who may do everything."""

    user = "mysql"
    standard: ClassVar[Mapping[str, str]] = {}

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.settings = {**self.standard, **(settings or {})}

    @property
    def url(self) -> str:
        return self.url_of("shop")

    def url_of(self, database: str) -> str:
        return f"{self.kind}://{_USER}@127.0.0.1:{self.port}/{database}"

    # What each of the two says

    def program(self) -> str:
        raise NotImplementedError

    def install(self, data: Path) -> None:
        raise NotImplementedError

    # The same for both

    def prepare(self, data: Path) -> None:
        self.program()
        self.install(data)
        made = [
            f"CREATE USER IF NOT EXISTS '{_USER}'@'%'",
            f"GRANT ALL ON *.* TO '{_USER}'@'%' WITH GRANT OPTION",
            "CREATE DATABASE IF NOT EXISTS shop",
        ]
        (data / "first.sql").write_text("".join(f"{statement};\n" for statement in made))

    def command(self, data: Path) -> list[str]:
        options = [f"--{name}={value}" for name, value in self.settings.items()]
        directories = [
            f"--datadir={data}",
            f"--port={self.port}",
            f"--socket={data / 'socket'}",
            f"--pid-file={data / 'pid'}",
            f"--init-file={data / 'first.sql'}",
        ]
        return [self.program(), "--no-defaults", *directories, *options]

    def answers(self) -> bool:
        return self.is_open()
