"""What Postgres's catalogue says about the tables to be captured: columns, keys, types, how many
rows. And what a table must have to be captured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from headrace.cdc.base import Skipped
from headrace.cdc.postgres_source.relations import Relation, ddl_type, make_shape
from headrace.errors import ConfigurationError, HeadraceError, MissingExtra, RetryError, nearest
from headrace.types.schema import quoted

_TABLES = """
SELECT c.oid, n.nspname || '.' || c.relname, c.relreplident, c.relkind
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%%'
ORDER BY 2
"""
_COLUMNS = """
SELECT attname, atttypid, atttypmod FROM pg_attribute
WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
"""
_KEY = """
SELECT a.attname FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(attnum, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = %s AND {which} ORDER BY k.place
"""
_TYPE = "SELECT typname, typtype, typbasetype, typtypmod FROM pg_type WHERE oid = %s"
_ESTIMATE = """
SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_class c
WHERE c.oid = %s::regclass OR c.oid IN (SELECT relid FROM pg_partition_tree(%s::regclass))
"""


class Catalogue:
    """Asked over one connection. Types are remembered: a number never means another type."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._skipped = Skipped()
        self._types: dict[int, tuple[str, str, int, int]] = {}

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(query, values)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

    def type_name(self, number: int, mod: int) -> str:
        """The type of a topic's column. A domain is what it is made of."""
        if number not in self._types:
            rows = self.ask(_TYPE, number)
            self._types[number] = rows[0] if rows else ("unknown", "b", 0, -1)
        name, kind, base, base_mod = self._types[number]
        return self.type_name(base, base_mod) if kind == "d" else ddl_type(name, mod)

    def relations(self, wanted: Sequence[str]) -> list[Relation]:
        """The tables that are wanted, by name or pattern; all, if none are."""
        there = {name: (oid, identity, kind) for oid, name, identity, kind in self.ask(_TABLES)}
        found = []
        for name in chosen(list(there), wanted):
            try:
                found.append(self._relation(name, *there[name]))
            except ConfigurationError as error:
                if name in wanted or name.removeprefix("public.") in wanted:
                    raise
                self._skipped(name, error)
        return found

    def _relation(self, name: str, oid: int, identity: str, kind: str) -> Relation:
        columns = self.ask(_COLUMNS, oid)
        key = self.key(oid, identity)
        if not key and (identity != "f" or kind == "p"):
            raise ConfigurationError(
                f"The table {name} has no primary key, so its changes cannot be told apart.",
                fix=(
                    f"ALTER TABLE {name} ADD PRIMARY KEY (…); or ALTER TABLE {name} REPLICA"
                    " IDENTITY FULL; or leave it out of tables=[…]."
                ),
            )
        if identity == "n":
            raise ConfigurationError(
                f"The table {name} has REPLICA IDENTITY NOTHING.",
                fix=f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT.",
            )
        shape, places = make_shape(
            name,
            [each for each, _, _ in columns],
            [self.type_name(kind_, mod) for _, kind_, mod in columns],
            key,
        )
        return Relation(oid, shape, places)

    def key(self, oid: int, identity: str) -> list[str]:
        which = "i.indisreplident" if identity == "i" else "i.indisprimary"
        return [name for (name,) in self.ask(_KEY.format(which=which), oid)]

    def column_names(self, table: str) -> list[tuple[str, str]]:
        """A table's columns in its own names, with their full types."""
        return [
            (name, kind)
            for name, kind in self.ask(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid"
                " = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY"
                " attnum",
                quoted_table(table),
            )
        ]

    def estimate(self, table: str) -> int:
        name = quoted_table(table)
        return int(self.ask(_ESTIMATE, name, name)[0][0])


def chosen(there: list[str], wanted: Sequence[str]) -> list[str]:
    """Names and patterns (`sales.*`); a name without a schema is in `public`."""
    if not wanted:
        return there
    found: list[str] = []
    for each in wanted:
        full = each if "." in each else f"public.{each}"
        matching = [name for name in there if name == full or fnmatchcase(name, full)]
        if not matching and not set(full) & set("*?["):
            raise ConfigurationError(
                f"There is no table {each!r} in the database: {nearest(full, there)}",
                fix="name tables that are there, as schema.table.",
            )
        found += [name for name in matching if name not in found]
    return found


def quoted_table(table: str) -> str:
    schema, name = table.split(".", 1)
    return f"{quoted(schema)}.{quoted(name)}"


# Connections to Postgres, and its errors as ours.


# How values are written as text: always the same, whatever the server's or the user's settings are.
_SETTINGS = (
    "-c timezone=UTC -c datestyle=ISO -c intervalstyle=iso_8601 -c extra_float_digits=3 -c"
    " bytea_output=hex -c synchronous_commit=local -c statement_timeout=0 -c"
    " idle_in_transaction_session_timeout=0"
)
_PASSING = ("53", "57", "08", "40", "55P03")
"""Classes of SQLSTATE that may be well later: resources, an operator's intervention, connections,
serialization, a lock.
"""


def drivers() -> Any:
    try:
        import psycopg2
        import psycopg2.extras
    except ImportError:
        raise MissingExtra("psycopg2", "postgres") from None
    return psycopg2


def connect(url: str, *, replication: bool = False) -> Any:
    """A connection in autocommit mode; with `replication`, one that speaks the replication
    protocol.
    """
    psycopg2 = drivers()
    options: dict[str, Any] = {
        "options": _SETTINGS,
        "application_name": "headrace",
        "client_encoding": "UTF8",
        "connect_timeout": 10,
    }
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
        return ConfigurationError(
            f"Postgres refuses: {text}",
            fix=(
                "GRANT what is missing to this user (see docs/concepts/change-capture.md,"
                " privileges), or use another one."
            ),
        )
    if "publication" in text and "does not exist" in text:
        return ConfigurationError(
            "The publication was dropped, and the server cannot tell what changed until it was"
            f" there again: {text}. Changes made meanwhile may be missing.",
            fix=(
                "run it once with --start-over: it reads all tables again, and deletes what it does"
                " not meet."
            ),
        )
    if code == "55006":
        return RetryError(
            f"The replication slot is in use: {text}",
            fix="stop whoever reads from it; SELECT active_pid FROM pg_replication_slots says who.",
        )
    if code.startswith(_PASSING) or (not code and not _is_refusal(text)):
        return RetryError(
            f"Postgres cannot be reached: {text}",
            fix="it is tried again; see that the server runs.",
        )
    return ConfigurationError(
        f"Postgres refuses: {text}", fix="check the address, the user and the database's settings."
    )


def _is_refusal(text: str) -> bool:
    """What libpq says itself has no SQLSTATE: a lost connection, mostly; but these will not be well
    by themselves.
    """
    return any(
        each in text
        for each in (
            "authentication failed",
            "does not exist",
            "no pg_hba.conf entry",
            "no password supplied",
            "must be superuser or replication role",
        )
    )


# The publication and the replication slot of a capture: made, checked, and never made again in
# silence when they are lost.


_SLOT = """
SELECT plugin, database, active_pid, wal_status, confirmed_flush_lsn - '0/0'::pg_lsn, pg_current_wal_lsn() - restart_lsn, pg_current_wal_lsn() - confirmed_flush_lsn
FROM pg_replication_slots WHERE slot_name = %s
"""
OLDEST_VERSION = 140_000
START_OVER = (
    "run it once with --start-over: it makes a new slot, reads all tables again, and deletes what"
    " it does not meet; what changed twice in between is seen once."
)


def database_name(capture: str) -> str:
    """What slot and publication are called: Postgres allows small letters, digits and
    underscores.
    """
    return "headrace_" + re.sub(r"[^a-z0-9_]", "_", capture.lower())[:50]


def check_server(catalogue: Catalogue) -> None:
    """What must be so before anything can be captured."""
    ((version, shown),) = catalogue.ask(
        "SELECT current_setting('server_version_num')::int, current_setting('server_version')"
    )
    if version < OLDEST_VERSION:
        raise ConfigurationError(
            f"The server is Postgres {shown}; change capture needs 14 or newer.",
            fix="upgrade the server.",
        )
    ((level,),) = catalogue.ask("SHOW wal_level")
    if level != "logical":
        raise ConfigurationError(
            f"The server's wal_level is {level!r}; change capture needs 'logical'.",
            fix="ALTER SYSTEM SET wal_level = 'logical'; then restart the server.",
        )
    ((allowed, user),) = catalogue.ask(
        "SELECT rolreplication OR rolsuper, rolname FROM pg_roles WHERE rolname = current_user"
    )
    if not allowed:
        raise ConfigurationError(
            f"The user {user!r} may not replicate.",
            fix=f"ALTER ROLE {quoted(user)} REPLICATION; as a superuser.",
        )


def publish(catalogue: Catalogue, name: str, tables: Sequence[str]) -> list[str]:
    """Make the publication, or add to it what is missing. Returns what was."""
    if not catalogue.ask("SELECT 1 FROM pg_publication WHERE pubname = %s", name):
        _do(
            catalogue, f"CREATE PUBLICATION {quoted(name)} WITH (publish_via_partition_root = true)"
        )
    query = "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s"
    published = {table for (table,) in catalogue.ask(query, name)}
    if missing := [table for table in tables if table not in published]:
        _do(
            catalogue,
            f"ALTER PUBLICATION {quoted(name)} ADD TABLE {', '.join(map(quoted_table, missing))}",
        )
    return missing


def _do(catalogue: Catalogue, command: str) -> None:
    with catalogue.connection.cursor() as cursor:
        try:
            cursor.execute(command)
        except Exception as error:
            if getattr(error, "pgcode", None) != "42501":
                raise
            mend = (
                "make this user an owner of the table"
                if "must be owner" in str(error)
                else "GRANT CREATE ON DATABASE to this user"
            )
            raise ConfigurationError(
                f"This user may not do what capture needs: {str(error).strip()}.",
                fix=f"as the tables' owner or a superuser: {command}; or {mend}.",
            ) from error


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
        raise ConfigurationError(
            f"The replication slot {name!r} is gone: it was dropped. Changes made since"
            f" {lsn(position)} may be missing.",
            fix=START_OVER,
        )
    plugin, _, pid, wal_status, confirmed, *_ = rows[0]
    if wal_status == "lost" or confirmed is None:
        raise ConfigurationError(
            f"The replication slot {name!r} has lost its WAL: it was behind by more than"
            f" max_slot_wal_keep_size. Changes made since {lsn(position)} may be missing.",
            fix=f"{START_OVER} Then raise max_slot_wal_keep_size.",
        )
    if plugin != "pgoutput":
        raise ConfigurationError(
            f"The replication slot {name!r} is of the plugin {plugin!r}, not ours.",
            fix="drop it, or give the capture another name.",
        )
    if int(confirmed) > position:
        raise ConfigurationError(
            f"Somebody else has read from the replication slot {name!r}: it stands at"
            f" {lsn(int(confirmed))}, and the log has changes up to {lsn(position)}. What lies"
            " between may be missing.",
            fix=START_OVER,
        )
    if pid is not None:
        raise RetryError(
            f"The replication slot {name!r} is in use by the server's process {pid}.",
            fix=f"stop whoever reads from it, or SELECT pg_terminate_backend({pid}).",
        )


def drop_slot(catalogue: Catalogue, name: str) -> None:
    catalogue.ask(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND"
        " active_pid IS NOT NULL",
        name,
    )
    catalogue.ask(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
        name,
    )


def slot_status(catalogue: Catalogue, name: str) -> dict[str, Any]:
    rows = catalogue.ask(_SLOT, name)
    if not rows:
        return {"slot": "gone"}
    return {
        "wal_status": rows[0][3],
        "retained_bytes": int(rows[0][5] or 0),
        "behind_bytes": int(rows[0][6] or 0),
    }


def lsn(position: int) -> str:
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
