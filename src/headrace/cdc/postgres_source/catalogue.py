"""What is asked of a Postgres database: connections, tables and their columns, and the publication
and replication slot of a capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from headrace.cdc.base import SkippedTables
from headrace.cdc.postgres_source.relations import PostgresRelation, ddl_type, table_shape
from headrace.errors import ConfigurationError, HeadraceError, MissingExtra, RetryError, nearest
from headrace.types.schema import quote_identifier

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
SELECT a.attname FROM pg_index i
CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(attnum, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = %s AND {which} ORDER BY k.place
"""
_TYPE = "SELECT typname, typtype, typbasetype, typtypmod FROM pg_type WHERE oid = %s"
_ESTIMATE = """
SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_class c
WHERE c.oid = %s::regclass OR c.oid IN (SELECT relid FROM pg_partition_tree(%s::regclass))
"""


class PostgresCatalogue:
    """Queries the catalogue over one connection. Types are cached: an oid never changes its
    meaning.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._skipped = SkippedTables()
        self._types: dict[int, tuple[str, str, int, int]] = {}

    def query(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(query, values)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

    def type_name(self, number: int, mod: int) -> str:
        """Return the type of a topic's column. A domain has the type that it is based on."""
        if number not in self._types:
            rows = self.query(_TYPE, number)
            self._types[number] = rows[0] if rows else ("unknown", "b", 0, -1)
        name, kind, base, base_mod = self._types[number]
        return self.type_name(base, base_mod) if kind == "d" else ddl_type(name, mod)

    def relations(self, wanted: Sequence[str]) -> list[PostgresRelation]:
        """Return the tables that are wanted, by name or pattern; all, if none is named. Tables that
        nobody named and that cannot be captured are skipped.
        """
        existing = {
            name: (oid, identity, kind) for oid, name, identity, kind in self.query(_TABLES)
        }
        relations = []
        for name in choose_tables(list(existing), wanted):
            try:
                relations.append(self._relation(name, *existing[name]))
            except ConfigurationError as error:
                if name in wanted or name.removeprefix("public.") in wanted:
                    raise
                self._skipped.warn(name, error)
        return relations

    def _relation(self, name: str, oid: int, identity: str, kind: str) -> PostgresRelation:
        columns = self.query(_COLUMNS, oid)
        key = self.key(oid, identity)
        if not key and (identity != "f" or kind == "p"):
            raise ConfigurationError(
                f"The table {name} has no primary key, so its rows cannot be identified.",
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
        shape, indices = table_shape(
            name,
            [column for column, _, _ in columns],
            [self.type_name(kind_, mod) for _, kind_, mod in columns],
            key,
        )
        return PostgresRelation(oid, shape, indices)

    def key(self, oid: int, identity: str) -> list[str]:
        which = "i.indisreplident" if identity == "i" else "i.indisprimary"
        return [name for (name,) in self.query(_KEY.format(which=which), oid)]

    def column_names(self, table: str) -> list[tuple[str, str]]:
        """Return a table's columns under its own names, with their full types."""
        return [
            (name, kind)
            for name, kind in self.query(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid"
                " = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY"
                " attnum",
                quoted_table(table),
            )
        ]

    def estimate(self, table: str) -> int:
        name = quoted_table(table)
        return int(self.query(_ESTIMATE, name, name)[0][0])


def choose_tables(existing: list[str], wanted: Sequence[str]) -> list[str]:
    """Return the existing tables that names and patterns (`sales.*`) choose. A name without a
    schema is in `public`.
    """
    if not wanted:
        return existing
    tables: list[str] = []
    for pattern in wanted:
        full = pattern if "." in pattern else f"public.{pattern}"
        matching = [name for name in existing if name == full or fnmatchcase(name, full)]
        if not matching and not set(full) & set("*?["):
            raise ConfigurationError(
                f"There is no table {pattern!r} in the database: {nearest(full, existing)}",
                fix="name tables that exist, as schema.table.",
            )
        tables += [name for name in matching if name not in tables]
    return tables


def quoted_table(table: str) -> str:
    schema, name = table.split(".", 1)
    return f"{quote_identifier(schema)}.{quote_identifier(name)}"


# Connections

# Values are written as text in the same way, whatever the server's or the user's settings are.
_SETTINGS = (
    "-c timezone=UTC -c datestyle=ISO -c intervalstyle=iso_8601 -c extra_float_digits=3 -c"
    " bytea_output=hex -c synchronous_commit=local -c statement_timeout=0 -c"
    " idle_in_transaction_session_timeout=0"
)
_TEMPORARY_STATES = ("53", "57", "08", "40", "55P03")
"""Classes of SQLSTATE that pass by themselves: resources, an operator's intervention, connections,
serialization, a lock.
"""


def drivers() -> Any:
    """Import psycopg2 and return it."""
    try:
        import psycopg2
        import psycopg2.extras
    except ImportError:
        raise MissingExtra("psycopg2", "postgres") from None
    return psycopg2


def connect(url: str, *, replication: bool = False) -> Any:
    """Return a connection in autocommit mode; with `replication`, one that speaks the replication
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
    with driver_errors():
        connection = psycopg2.connect(url, **options)
    if not replication:
        connection.autocommit = True
    return connection


@contextmanager
def driver_errors() -> Iterator[None]:
    """Translate the driver's errors by what can be done about them."""
    psycopg2 = drivers()
    try:
        yield
    except psycopg2.Error as error:
        raise _to_headrace_error(error) from error


def _to_headrace_error(error: Any) -> HeadraceError:
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
            "The publication was dropped, and the server does not know what changed until it was"
            f" created again: {text}. Changes made meanwhile may be missing.",
            fix=(
                "run it once with --start-over: it reads all tables again, and deletes rows that"
                " are"
                " not there any more."
            ),
        )
    if code == "55006":
        return RetryError(
            f"The replication slot is in use: {text}",
            fix="stop whoever reads from it; SELECT active_pid FROM pg_replication_slots says who.",
        )
    if code.startswith(_TEMPORARY_STATES) or (not code and not _is_refusal(text)):
        return RetryError(
            f"Postgres cannot be reached: {text}",
            fix="see that the server runs; the capture tries again by itself.",
        )
    return ConfigurationError(
        f"Postgres refuses: {text}", fix="check the address, the user and the database's settings."
    )


def _is_refusal(text: str) -> bool:
    """Return whether an error without SQLSTATE will not pass by itself. Most errors of libpq itself
    are lost connections, but not these.
    """
    return any(
        phrase in text
        for phrase in (
            "authentication failed",
            "does not exist",
            "no pg_hba.conf entry",
            "no password supplied",
            "must be superuser or replication role",
        )
    )


# Publication and replication slot: created and checked. One that is lost is reported, never created
# again silently.

_SLOT = """
SELECT plugin, database, active_pid, wal_status, confirmed_flush_lsn - '0/0'::pg_lsn,
pg_current_wal_lsn() - restart_lsn, pg_current_wal_lsn() - confirmed_flush_lsn
FROM pg_replication_slots WHERE slot_name = %s
"""
OLDEST_VERSION = 140_000
START_OVER = (
    "run it once with --start-over: it creates a new slot, reads all tables again, and deletes rows"
    " that are not there any more. Of several changes of a row meanwhile, only the last is seen."
)


def slot_name(capture: str) -> str:
    """Return the name of a capture's slot and publication. Postgres allows lower-case letters,
    digits and underscores.
    """
    return "headrace_" + re.sub(r"[^a-z0-9_]", "_", capture.lower())[:50]


def check_server(catalogue: PostgresCatalogue) -> None:
    """Raise ConfigurationError unless the server can be captured."""
    ((version, shown),) = catalogue.query(
        "SELECT current_setting('server_version_num')::int, current_setting('server_version')"
    )
    if version < OLDEST_VERSION:
        raise ConfigurationError(
            f"The server is Postgres {shown}; change capture needs 14 or newer.",
            fix="upgrade the server.",
        )
    ((level,),) = catalogue.query("SHOW wal_level")
    if level != "logical":
        raise ConfigurationError(
            f"The server's wal_level is {level!r}; change capture needs 'logical'.",
            fix="ALTER SYSTEM SET wal_level = 'logical'; then restart the server.",
        )
    ((allowed, user),) = catalogue.query(
        "SELECT rolreplication OR rolsuper, rolname FROM pg_roles WHERE rolname = current_user"
    )
    if not allowed:
        raise ConfigurationError(
            f"The user {user!r} may not replicate.",
            fix=f"ALTER ROLE {quote_identifier(user)} REPLICATION; as a superuser.",
        )


def ensure_publication(catalogue: PostgresCatalogue, name: str, tables: Sequence[str]) -> list[str]:
    """Create the publication, or add the tables that it lacks. Returns those tables."""
    if not catalogue.query("SELECT 1 FROM pg_publication WHERE pubname = %s", name):
        _execute_ddl(
            catalogue,
            f"CREATE PUBLICATION {quote_identifier(name)} WITH (publish_via_partition_root = true)",
        )
    query = "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s"
    published = {table for (table,) in catalogue.query(query, name)}
    if missing := [table for table in tables if table not in published]:
        _execute_ddl(
            catalogue,
            f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE"
            f" {', '.join(map(quoted_table, missing))}",
        )
    return missing


def _execute_ddl(catalogue: PostgresCatalogue, command: str) -> None:
    with catalogue.connection.cursor() as cursor:
        try:
            cursor.execute(command)
        except Exception as error:
            if getattr(error, "pgcode", None) != "42501":
                raise
            remedy = (
                "make this user an owner of the table"
                if "must be owner" in str(error)
                else "GRANT CREATE ON DATABASE to this user"
            )
            raise ConfigurationError(
                f"This user lacks a privilege that capture needs: {str(error).strip()}.",
                fix=f"as the tables' owner or a superuser: {command}; or {remedy}.",
            ) from error


def ensure_slot(
    catalogue: PostgresCatalogue, name: str, position: int | None, *, start_over: bool
) -> int:
    """Check the slot, or create it. Returns the position at which to start."""
    rows = catalogue.query(_SLOT, name)
    if start_over and rows:
        drop_slot(catalogue, name)
        rows = []
    if position is not None:
        _check_slot(name, rows, position)
        return position
    if not rows:
        catalogue.query("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)
        rows = catalogue.query(_SLOT, name)
    return int(rows[0][4])


def _check_slot(name: str, rows: list[tuple[Any, ...]], position: int) -> None:
    if not rows:
        raise ConfigurationError(
            f"The replication slot {name!r} was dropped. Changes made since"
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
            f"The replication slot {name!r} is of the plugin {plugin!r}, not pgoutput.",
            fix="give the capture another name.",
        )
    if int(confirmed) > position:
        raise ConfigurationError(
            f"Another client has read from the replication slot {name!r}: it is at"
            f" {lsn(int(confirmed))}, and the log has changes up to {lsn(position)}. What is in"
            " between may be missing.",
            fix=START_OVER,
        )
    if pid is not None:
        raise RetryError(
            f"The replication slot {name!r} is in use by the server's process {pid}.",
            fix=f"stop whoever reads from it, or SELECT pg_terminate_backend({pid}).",
        )


def drop_slot(catalogue: PostgresCatalogue, name: str) -> None:
    catalogue.query(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND"
        " active_pid IS NOT NULL",
        name,
    )
    catalogue.query(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
        name,
    )


def slot_status(catalogue: PostgresCatalogue, name: str) -> dict[str, Any]:
    rows = catalogue.query(_SLOT, name)
    if not rows:
        return {"slot": "gone"}
    return {
        "wal_status": rows[0][3],
        "retained_bytes": int(rows[0][5] or 0),
        "behind_bytes": int(rows[0][6] or 0),
    }


def lsn(position: int) -> str:
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
