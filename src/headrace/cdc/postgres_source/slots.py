"""The publication and the replication slot of a capture: made, checked, and never made again in silence when they are lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.cdc.postgres_source.catalogue import Catalogue, quoted_table
from headrace.errors import ConfigurationError, RetryError
from headrace.sql_names import quoted

_SLOT = """
SELECT plugin, database, active_pid, wal_status, confirmed_flush_lsn - '0/0'::pg_lsn, pg_current_wal_lsn() - restart_lsn, pg_current_wal_lsn() - confirmed_flush_lsn
FROM pg_replication_slots WHERE slot_name = %s
"""
OLDEST_VERSION = 140_000
START_OVER = "run it once with --start-over: it makes a new slot, reads all tables again, and deletes what it does not meet; what changed twice in between is seen once."


def database_name(capture: str) -> str:
    """What slot and publication are called: Postgres allows small letters, digits and underscores."""
    return "headrace_" + re.sub(r"[^a-z0-9_]", "_", capture.lower())[:50]


def check_server(catalogue: Catalogue) -> None:
    """What must be so before anything can be captured."""
    ((version, shown),) = catalogue.ask("SELECT current_setting('server_version_num')::int, current_setting('server_version')")
    if version < OLDEST_VERSION:
        raise ConfigurationError(f"The server is Postgres {shown}; change capture needs 14 or newer.", fix="upgrade the server.")
    ((level,),) = catalogue.ask("SHOW wal_level")
    if level != "logical":
        raise ConfigurationError(
            f"The server's wal_level is {level!r}; change capture needs 'logical'.", fix="ALTER SYSTEM SET wal_level = 'logical'; then restart the server."
        )
    ((allowed, user),) = catalogue.ask("SELECT rolreplication OR rolsuper, rolname FROM pg_roles WHERE rolname = current_user")
    if not allowed:
        raise ConfigurationError(f"The user {user!r} may not replicate.", fix=f"ALTER ROLE {quoted(user)} REPLICATION; as a superuser.")


def publish(catalogue: Catalogue, name: str, tables: Sequence[str]) -> list[str]:
    """Make the publication, or add to it what is missing. Returns what was."""
    if not catalogue.ask("SELECT 1 FROM pg_publication WHERE pubname = %s", name):
        _do(catalogue, f"CREATE PUBLICATION {quoted(name)} WITH (publish_via_partition_root = true)")
    query = "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s"
    published = {table for (table,) in catalogue.ask(query, name)}
    if missing := [table for table in tables if table not in published]:
        _do(catalogue, f"ALTER PUBLICATION {quoted(name)} ADD TABLE {', '.join(map(quoted_table, missing))}")
    return missing


def _do(catalogue: Catalogue, command: str) -> None:
    with catalogue.connection.cursor() as cursor:
        try:
            cursor.execute(command)
        except Exception as error:
            if getattr(error, "pgcode", None) != "42501":
                raise
            mend = "make this user an owner of the table" if "must be owner" in str(error) else "GRANT CREATE ON DATABASE to this user"
            raise ConfigurationError(f"This user may not do what capture needs: {str(error).strip()}.", fix=f"as the tables' owner or a superuser: {command}; or {mend}.") from error


def ensure_slot(catalogue: Catalogue, name: str, position: int | None, *, afresh: bool) -> int:
    """The slot, checked or made. Returns where to start."""
    rows = catalogue.ask(_SLOT, name)
    if afresh and rows:
        drop_slot(catalogue, name)
        rows = []
    if position is not None:
        _check(name, rows, position)
        return position
    if not rows:
        catalogue.ask("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)
        rows = catalogue.ask(_SLOT, name)
    return int(rows[0][4])


def _check(name: str, rows: list[tuple[Any, ...]], position: int) -> None:
    if not rows:
        raise ConfigurationError(f"The replication slot {name!r} is gone: it was dropped. Changes made since {lsn(position)} may be missing.", fix=START_OVER)
    plugin, _, pid, wal_status, confirmed, *_ = rows[0]
    if wal_status == "lost" or confirmed is None:
        raise ConfigurationError(
            f"The replication slot {name!r} has lost its WAL: it was behind by more than max_slot_wal_keep_size. Changes made since {lsn(position)} may be missing.",
            fix=f"{START_OVER} Then raise max_slot_wal_keep_size.",
        )
    if plugin != "pgoutput":
        raise ConfigurationError(f"The replication slot {name!r} is of the plugin {plugin!r}, not ours.", fix="drop it, or give the capture another name.")
    if int(confirmed) > position:
        raise ConfigurationError(
            f"Somebody else has read from the replication slot {name!r}: it stands at {lsn(int(confirmed))}, and the log has changes up to {lsn(position)}. What lies between may be missing.",
            fix=START_OVER,
        )
    if pid is not None:
        raise RetryError(f"The replication slot {name!r} is in use by the server's process {pid}.", fix=f"stop whoever reads from it, or SELECT pg_terminate_backend({pid}).")


def drop_slot(catalogue: Catalogue, name: str) -> None:
    catalogue.ask("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active_pid IS NOT NULL", name)
    catalogue.ask("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", name)


def slot_status(catalogue: Catalogue, name: str) -> dict[str, Any]:
    rows = catalogue.ask(_SLOT, name)
    if not rows:
        return {"slot": "gone"}
    return {"wal_status": rows[0][3], "retained_bytes": int(rows[0][5] or 0), "behind_bytes": int(rows[0][6] or 0)}


def lsn(position: int) -> str:
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
