"""Connections to Postgres, and its errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.errors import ConfigurationError, HeadraceError, MissingExtra, RetryError

# How values are written as text: always the same, whatever the server's or the user's settings are.
_SETTINGS = "-c timezone=UTC -c datestyle=ISO -c intervalstyle=iso_8601 -c extra_float_digits=3 -c bytea_output=hex -c synchronous_commit=local -c statement_timeout=0 -c idle_in_transaction_session_timeout=0"
_PASSING = ("53", "57", "08", "40", "55P03")
"""Classes of SQLSTATE that may be well later: resources, an operator's intervention, connections, serialization, a lock."""


def drivers() -> Any:
    try:
        import psycopg2
        import psycopg2.extras
    except ImportError:
        raise MissingExtra("psycopg2", "postgres") from None
    return psycopg2


def connect(url: str, *, replication: bool = False) -> Any:
    """A connection in autocommit mode; with `replication`, one that speaks the replication protocol."""
    psycopg2 = drivers()
    options: dict[str, Any] = {"options": _SETTINGS, "application_name": "headrace", "client_encoding": "UTF8", "connect_timeout": 10}
    if replication:
        options["connection_factory"] = psycopg2.extras.LogicalReplicationConnection
    with translated():
        connection = psycopg2.connect(url, **options)
    if not replication:
        connection.autocommit = True
    return connection


@contextmanager
def translated() -> Iterator[None]:
    """A server that goes away may come back; what it refuses, it will refuse again."""
    psycopg2 = drivers()
    try:
        yield
    except psycopg2.Error as error:
        raise _ours(error) from error


def _ours(error: Any) -> HeadraceError:
    code, text = error.pgcode or "", str(error).strip() or type(error).__name__
    if code == "42501":
        return ConfigurationError(f"Postgres refuses: {text}", fix="GRANT what is missing to this user (see docs/concepts/change-capture.md, privileges), or use another one.")
    if "publication" in text and "does not exist" in text:
        return ConfigurationError(
            f"The publication was dropped, and the server cannot tell what changed until it was there again: {text}. Changes made meanwhile may be missing.",
            fix="run it once with --start-over: it reads all tables again, and deletes what it does not meet.",
        )
    if code == "55006":
        return RetryError(f"The replication slot is in use: {text}", fix="stop whoever reads from it; SELECT active_pid FROM pg_replication_slots says who.")
    if code.startswith(_PASSING) or (not code and not _is_refusal(text)):
        return RetryError(f"Postgres cannot be reached: {text}", fix="it is tried again; see that the server runs.")
    return ConfigurationError(f"Postgres refuses: {text}", fix="check the address, the user and the database's settings.")


def _is_refusal(text: str) -> bool:
    """What libpq says itself has no SQLSTATE: a lost connection, mostly; but these will not be well by themselves."""
    return any(each in text for each in ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied", "must be superuser or replication role"))
