"""Connections to MariaDB or MySQL, and their errors as ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from headrace.errors import ConfigurationError, HeadraceError, MissingExtra, RetryError, nearest

_PASSING = {1040, 1053, 1158, 1159, 1160, 1161, 1205, 1213, 1927, 2002, 2003, 2006, 2013, 2055}
_NOT_LET_IN = {1045, 1698}
_PRIVILEGES = {1044, 1142, 1143, 1227}
_LOST_BINLOG = 1236
_TLS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")


def drivers() -> tuple[Any, Any]:
    try:
        import pymysql
        import pymysqlreplication
    except ImportError:
        raise MissingExtra("mysql-replication", "mysql") from None
    return pymysql, pymysqlreplication


def settings_of(url: str) -> dict[str, Any]:
    """What pymysql wants, from mariadb://USER@HOST:PORT/DATABASE; the password is better in MYSQL_PWD, as MariaDB's own programs have it."""
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if not database:
        raise ConfigurationError(f"The address of {parts.hostname} names no database.", fix="write mariadb://USER@HOST:PORT/DATABASE.")
    found: dict[str, Any] = {"host": parts.hostname or "127.0.0.1", "port": parts.port or 3306, "user": unquote(parts.username or "root"), "charset": "utf8mb4"}
    password = unquote(parts.password) if parts.password else os.environ.get("MYSQL_PWD")
    return {**found, "database": database, **({"password": password} if password else {}), **_tls(parts.query)}


def _tls(query: str) -> dict[str, Any]:
    """`?ssl_ca=PATH&ssl_verify_identity=true`: as pymysql has them."""
    given = dict(parse_qsl(query))
    for name in given:
        if name not in _TLS:
            raise ConfigurationError(f"An address of MariaDB or MySQL has no option {name!r}: {nearest(name, _TLS)}", fix="leave it out.")
    return {name: value.lower() in {"1", "true", "yes"} if name.startswith("ssl_verify") else value for name, value in given.items()}


def connect(url: str) -> Any:
    pymysql, _ = drivers()
    with translated():
        return pymysql.connect(**settings_of(url), autocommit=True, connect_timeout=10, init_command="SET time_zone = '+00:00', sql_mode = ''")


@contextmanager
def translated() -> Iterator[None]:
    """A server that goes away may come back; what it refuses, it will refuse again."""
    pymysql, _ = drivers()
    try:
        yield
    except (pymysql.err.Error, OSError) as error:
        raise ours(error) from error
    except RuntimeError as error:  # MySQL's usual way to let somebody in, without TLS
        if "cryptography" not in str(error):
            raise
        raise ConfigurationError(f"The database asks for a password in a way that needs another package: {error}.", fix="pip install cryptography; or connect with TLS: …/DATABASE?ssl_ca=PATH.") from error


def ours(error: BaseException) -> HeadraceError:
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = str(error.args[-1]) if error.args else str(error)
    if code == _LOST_BINLOG:
        return lost_binlog(text)
    if code in _NOT_LET_IN:
        return ConfigurationError(f"The database does not let us in: {text}", fix="check the user; its password can stand in the environment's MYSQL_PWD.")
    if code in _PRIVILEGES:
        return ConfigurationError(
            f"The database refuses: {text}", fix="GRANT REPLICATION SLAVE, REPLICATION CLIENT, SLAVE MONITOR ON *.* and SELECT on the tables to this user."
        )
    if code in _PASSING or code == 0:
        return RetryError(f"The database cannot be reached: {text}", fix="it is tried again; see that the server runs.")
    return ConfigurationError(f"The database refuses: {text}", fix="check the address, the user and the database's settings.")


def lost_binlog(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"The server no longer has the binlog that follows what is in the log: {why}. Changes made meanwhile may be missing.",
        fix="run it once with --start-over, which reads all tables again and deletes what it does not meet; then keep binlogs for longer (binlog_expire_logs_seconds).",
    )
