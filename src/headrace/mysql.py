"""Addresses of MariaDB and MySQL, for the captures that read a binlog (`cdc.mysql_source`) and the
sink that writes a table (`sinks.mysql_target`).
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from headrace.errors import ConfigurationError, nearest

_TLS = ("ssl_ca", "ssl_cert", "ssl_key", "ssl_verify_cert", "ssl_verify_identity")


def connection_settings(url: str) -> dict[str, Any]:
    """Return pymysql's arguments for `mariadb://USER@HOST:PORT/DATABASE`. The password may be in
    the environment's MYSQL_PWD, as for MariaDB's own programs.
    """
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if not database:
        raise ConfigurationError(
            f"The address of {parts.hostname} names no database.",
            fix="write mariadb://USER@HOST:PORT/DATABASE.",
        )
    settings: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "charset": "utf8mb4",
    }
    password = unquote(parts.password) if parts.password else os.environ.get("MYSQL_PWD")
    return {
        **settings,
        "database": database,
        **({"password": password} if password else {}),
        **_tls(parts.query),
    }


def _tls(query: str) -> dict[str, Any]:
    """Return the TLS options of a URL's query, `?ssl_ca=PATH&ssl_verify_identity=true`."""
    options = dict(parse_qsl(query))
    for name in options:
        if name not in _TLS:
            raise ConfigurationError(
                f"An address of MariaDB or MySQL has no option {name!r}: {nearest(name, _TLS)}",
                fix="leave it out.",
            )
    return {
        name: value.lower() in {"1", "true", "yes"} if name.startswith("ssl_verify") else value
        for name, value in options.items()
    }
