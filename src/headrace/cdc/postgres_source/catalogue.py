"""What is asked of a Postgres database: connections, tables and their columns, and the publication
and replication slot of a capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from headrace.cdc.base import PositionLost, SkippedTables, TableStorage
from headrace.cdc.postgres_source.position import START_OVER, format_lsn
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
SELECT a.attname, i.indimmediate FROM pg_index i
CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(attnum, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = %s AND {which} AND k.place <= i.indnkeyatts ORDER BY k.place
"""
_LEAVES = """
SELECT leaf.oid, leaf.oid::regclass::text, leaf.relreplident, leaf.relpersistence
FROM pg_partition_tree(%s::regclass) tree JOIN pg_class leaf ON leaf.oid = tree.relid
WHERE tree.isleaf
"""
# A row of the catalogue that was written anew has another xmin: a partition that was detached and
# attached again, a column that was altered. So has the row of a table's type when the table is
# renamed or goes to another schema, and that of the publication when its settings are altered.
_STORAGE = """
SELECT n.nspname || '.' || c.relname,
concat_ws(' ', c.oid, p.oid, (SELECT bool_and(i.indimmediate) FROM pg_index i
 WHERE i.indrelid = c.oid AND i.indisprimary)),
c.relfilenode::text,
(SELECT md5(string_agg(a.attnum || ' ' || a.xmin::text, ',' ORDER BY a.attnum))
 FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0),
(SELECT array_agg(ARRAY[concat_ws(' ', l.oid, l.relfilenode, i.xmin),
 (pg_relation_size(l.oid) = 0)::text])
 FROM pg_partition_tree(c.oid) t JOIN pg_class l ON l.oid = t.relid
 JOIN pg_inherits i ON i.inhrelid = l.oid WHERE c.relkind = 'p' AND t.isleaf),
concat_ws(' ', (SELECT t.xmin FROM pg_type t WHERE t.oid = c.reltype), published.xmin)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_publication published ON published.pubname = %s
LEFT JOIN pg_publication_rel p ON p.prrelid = c.oid AND p.prpubid = published.oid
WHERE c.oid = ANY(%s::oid[])
"""
_TYPE = "SELECT typname, typtype, typbasetype, typtypmod FROM pg_type WHERE oid = %s"
_ESTIMATE = """
SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint FROM pg_class c
WHERE c.oid = %s::regclass OR c.oid IN (SELECT relid FROM pg_partition_tree(%s::regclass))
"""


@dataclass(frozen=True)
class FoundTables:
    """The tables that are to be captured, and what is wrong with others that were named."""

    relations: list[PostgresRelation]
    problems: dict[str, ConfigurationError]
    missing: dict[str, ConfigurationError]
    """Those that do not exist."""


class PostgresCatalogue:
    """Queries the catalogue over one connection. Types are cached: an oid never changes its
    meaning.
    """

    def __init__(self, connection: Any, publication: str | None = None) -> None:
        self.connection = connection
        self.publication = publication
        """Somebody else's publication, which says which tables, columns and rows there are."""
        self.skipped = SkippedTables()
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

    def relations(self, wanted: Sequence[str]) -> FoundTables:
        """Return the tables that are wanted, by name or pattern; all, if none is named. Tables that
        nobody named and that cannot be captured are skipped.
        """
        existing = {
            name: (oid, identity, kind) for oid, name, identity, kind in self.query(_TABLES)
        }
        names, missing = choose_tables(list(existing), wanted)
        relations = []
        problems: dict[str, ConfigurationError] = {}
        if self.publication is not None:
            published = published_tables(self, self.publication)
            for name in [name for name in names if name not in published]:
                names.remove(name)
                if {name, name.removeprefix("public.")} & {*wanted}:
                    problems[name] = _unpublished(name, self.publication)
        for name in names:
            try:
                relations.append(self._relation(name, *existing[name]))
            except ConfigurationError as error:
                if name in wanted or name.removeprefix("public.") in wanted:
                    problems[name] = error
                else:
                    self.skipped.warn(name, error)
        return FoundTables(relations, problems, missing)

    def storage(self, publication: str, numbers: Sequence[int]) -> dict[str, TableStorage]:
        """Return where the rows of tables are, by name, given their oids."""
        storage = {}
        for name, own, files, definition, leaves, published in self.query(
            _STORAGE, publication, list(numbers)
        ):
            storage[name] = TableStorage(
                parts=(own, *(leaf for leaf, _ in leaves or ())),
                empty_parts=tuple(leaf for leaf, is_empty in leaves or () if is_empty == "true"),
                files=files,
                definition=definition or "",
                published=published,
            )
        return storage

    def relation(self, name: str) -> PostgresRelation | None:
        """Return one table; None if it does not exist. Raises ConfigurationError if it cannot be
        captured.
        """
        for oid, existing, identity, kind in self.query(_TABLES):
            if existing == name:
                return self._relation(name, oid, identity, kind)
        return None

    def _relation(self, name: str, oid: int, identity: str, kind: str) -> PostgresRelation:
        published = self._published(name)
        columns = [column for column in self.query(_COLUMNS, oid) if published.has(column[0])]
        key, has_deferrable_key = self.key(oid, identity)
        self._check_identity(name, identity, kind, key, has_deferrable_key=has_deferrable_key)
        shape, indices = table_shape(
            name,
            [column for column, _, _ in columns],
            [self.type_name(kind_, mod) for _, kind_, mod in columns],
            key,
        )
        return PostgresRelation(oid, shape, indices, has_deferrable_key)

    def _check_identity(
        self,
        name: str,
        identity: str,
        kind: str,
        key: list[str],
        *,
        has_deferrable_key: bool,
    ) -> None:
        """Raise ConfigurationError if the server would not send of a deleted row which one it is.
        Of a table that is published like this, it refuses updates and deletes.
        """
        is_partitioned = kind == "p"
        if not key and (identity != "f" or is_partitioned):
            raise ConfigurationError(
                f"The table {name} has no primary key, so its rows cannot be identified.",
                fix=(
                    f"ALTER TABLE {name} ADD PRIMARY KEY (…); or ALTER TABLE {name} REPLICA"
                    " IDENTITY FULL; or leave it out of tables=[…]."
                    if not is_partitioned
                    else f"ALTER TABLE {name} ADD PRIMARY KEY (…); or leave it out of tables=[…]."
                ),
            )
        if identity == "n":
            raise ConfigurationError(
                f"The table {name} has REPLICA IDENTITY NOTHING.",
                fix=f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT.",
            )
        tables = [(name, identity)]
        if is_partitioned:
            tables = [
                (leaf, leafs) for _, leaf, leafs, _ in self.query(_LEAVES, quoted_table(name))
            ]
        for table, its_identity in tables:
            if has_deferrable_key and its_identity != "f":
                raise ConfigurationError(
                    f"The primary key of {table} is deferrable, so it cannot be the replica"
                    " identity: once the table is published, the server refuses its updates and"
                    " deletes.",
                    fix=f"ALTER TABLE {table} REPLICA IDENTITY FULL.",
                )
            if is_partitioned and its_identity in "ni":
                raise ConfigurationError(
                    f"The partition {table} of {name} has a replica identity of its own, so the"
                    " server does not send the key of its deleted rows.",
                    fix=f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT.",
                )

    def key(self, oid: int, identity: str) -> tuple[list[str], bool]:
        """Return the columns that identify a row, and whether two rows may have the same ones until
        their transaction ends.
        """
        which = "i.indisreplident" if identity == "i" else "i.indisprimary"
        columns = self.query(_KEY.format(which=which), oid)
        return [name for name, _ in columns], not all(is_immediate for _, is_immediate in columns)

    def is_partitioned(self, number: int) -> bool:
        rows = self.query("SELECT relkind FROM pg_class WHERE oid = %s", number)
        return bool(rows) and rows[0][0] == "p"

    def _published(self, table: str) -> PublishedTable:
        if self.publication is None:
            return PublishedTable()
        return published_tables(self, self.publication).get(table, PublishedTable())

    def row_filter(self, table: str) -> str | None:
        """Return the condition under which somebody else's publication has a row."""
        return self._published(table).row_filter

    def column_names(self, table: str) -> list[tuple[str, str]]:
        """Return a table's columns under its own names, with their full types."""
        published = self._published(table)
        return [
            (name, kind)
            for name, kind in self.query(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid"
                " = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY"
                " attnum",
                quoted_table(table),
            )
            if published.has(name)
        ]

    def estimate(self, table: str) -> int:
        name = quoted_table(table)
        return int(self.query(_ESTIMATE, name, name)[0][0])


def choose_tables(
    existing: list[str], wanted: Sequence[str]
) -> tuple[list[str], dict[str, ConfigurationError]]:
    """Return the existing tables that names and patterns (`sales.*`) choose, and an error for each
    name that no table has. A name without a schema is in `public`.
    """
    if not wanted:
        return existing, {}
    tables: list[str] = []
    missing: dict[str, ConfigurationError] = {}
    for pattern in wanted:
        full = pattern if "." in pattern else f"public.{pattern}"
        matching = [name for name in existing if name == full or fnmatchcase(name, full)]
        if not matching and not set(full) & set("*?["):
            missing[full] = ConfigurationError(
                f"There is no table {pattern!r} in the database: {nearest(full, existing)}",
                fix="name tables that exist, as schema.table.",
            )
        tables += [name for name in matching if name not in tables]
    return tables, missing


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
_TEMPORARY_STATES = ("53", "57", "08", "40", "55P03", "42P01", "42710")
"""Classes of SQLSTATE that pass by themselves: resources, an operator's intervention, connections,
serialization, a lock; a table that was dropped or renamed, or an object that was created, since the
catalogue was read, which is then read again.
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
        if code.startswith("42"):
            return RetryError(
                f"The catalogue changed while it was read: {text}",
                fix="nothing: the capture reads it again.",
            )
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


@dataclass(frozen=True)
class PublishedTable:
    """What of a table is published; everything by default."""

    columns: frozenset[str] | None = None
    row_filter: str | None = None

    def has(self, column: str) -> bool:
        return self.columns is None or column in self.columns


def published_tables(catalogue: PostgresCatalogue, name: str) -> dict[str, PublishedTable]:
    """Return the tables of somebody else's publication. Lists of columns and conditions came with
    Postgres 15.

    Raises:
        ConfigurationError: It does not exist, or does not publish all changes.
    """
    rows = catalogue.query(
        "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname ="
        " %s",
        name,
    )
    if not rows:
        raise ConfigurationError(
            f"There is no publication {name!r}.",
            fix=f"CREATE PUBLICATION {quote_identifier(name)} FOR TABLE …; or leave it out.",
        )
    if not all(rows[0]):
        raise ConfigurationError(
            f"The publication {name!r} does not publish all changes.",
            fix=(
                f"ALTER PUBLICATION {quote_identifier(name)} SET (publish = 'insert, update,"
                " delete, truncate')."
            ),
        )
    ((has_lists,),) = catalogue.query("SELECT current_setting('server_version_num')::int >= 150000")
    lists = "attnames::text[], rowfilter" if has_lists else "NULL, NULL"
    query = (
        f"SELECT schemaname || '.' || tablename, {lists} FROM pg_publication_tables WHERE pubname ="
        " %s"
    )
    return {
        table: PublishedTable(frozenset(columns) if columns else None, row_filter)
        for table, columns, row_filter in catalogue.query(query, name)
    }


def _unpublished(table: str, publication: str) -> ConfigurationError:
    return ConfigurationError(
        f"The table {table} is not in the publication {publication!r}.",
        fix=(
            f"ALTER PUBLICATION {quote_identifier(publication)} ADD TABLE {table}; of a partitioned"
            " table, the publication needs publish_via_partition_root = true."
        ),
    )


_PUBLISHED = """
SELECT n.nspname || '.' || c.relname FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE r.prpubid = (SELECT oid FROM pg_publication WHERE pubname = %s)
"""


_IS_WHOLE = """
SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AND (pubviaroot OR NOT EXISTS (
SELECT 1 FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid
WHERE r.prpubid = p.oid AND c.relkind = 'p'))
FROM pg_publication p WHERE pubname = %s
"""


def ensure_publication(
    catalogue: PostgresCatalogue, name: str, tables: Sequence[str]
) -> tuple[list[str], dict[str, ConfigurationError]]:
    """Create the publication, or add the tables that it lacks. Returns the tables that were added,
    and what is wrong with those that could not be.

    Tables are added without those that inherit from them: each is captured by itself.
    """
    if not catalogue.query("SELECT 1 FROM pg_publication WHERE pubname = %s", name):
        _execute_ddl(
            catalogue,
            f"CREATE PUBLICATION {quote_identifier(name)} WITH (publish_via_partition_root = true)",
        )
    problems = _narrowed(catalogue, name)
    published = {table for (table,) in catalogue.query(_PUBLISHED, name)}
    missing = [table for table in tables if table not in published]
    command = f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE "
    try:
        if missing:
            _execute_ddl(catalogue, command + ", ".join(f"ONLY {quoted_table(t)}" for t in missing))
    except ConfigurationError:
        for table in missing:
            try:
                _execute_ddl(catalogue, f"{command}ONLY {quoted_table(table)}")
            except ConfigurationError as error:
                problems[table] = error
    return [table for table in missing if table not in problems], problems


def _narrowed(catalogue: PostgresCatalogue, name: str) -> dict[str, ConfigurationError]:
    """Return the tables of our publication to which somebody has given a condition or a list of
    columns: other changes would be missing.

    Raises:
        ConfigurationError: Somebody has altered the publication itself so that changes are missing.
    """
    quoted = quote_identifier(name)
    ((is_whole,),) = catalogue.query(_IS_WHOLE, name)
    if not is_whole:
        raise ConfigurationError(
            f"The publication {name!r} of the capture was altered: it does not publish all changes"
            " any more.",
            fix=(
                f"ALTER PUBLICATION {quoted} SET (publish = 'insert, update, delete, truncate',"
                " publish_via_partition_root = true). The tables are then read again."
            ),
        )
    ((has_lists,),) = catalogue.query("SELECT current_setting('server_version_num')::int >= 150000")
    if not has_lists:
        return {}
    narrow = " AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)"
    return {
        table: ConfigurationError(
            f"In the publication {name!r} of the capture, the table {table} was given a condition"
            " or a list of columns: other changes are missing.",
            fix=(
                f"ALTER PUBLICATION {quoted} DROP TABLE {table}; the capture adds it again. Then"
                " request a snapshot of it. To leave out columns or rows, use exclude=[…] and"
                " where={…}."
            ),
        )
        for (table,) in catalogue.query(_PUBLISHED + narrow, name)
    }


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
    catalogue: PostgresCatalogue,
    name: str,
    position: int | None,
    *,
    start_over: bool,
    is_ours: bool = True,
) -> int:
    """Check the slot, or create it. Returns the position at which to start. Somebody else's slot is
    neither created nor dropped: without a position, it says itself where to start.
    """
    rows = catalogue.query(_SLOT, name)
    if not is_ours:
        if not rows:
            raise ConfigurationError(
                f"There is no replication slot {name!r}.",
                fix=(
                    f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput'), in the"
                    " database that is captured; or leave it out."
                ),
            )
        confirmed = int(rows[0][4] or 0)
        _check_slot(name, rows, position if position is not None else confirmed)
        return position if position is not None else confirmed
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
        raise PositionLost(
            f"The replication slot {name!r} was dropped. Changes made since"
            f" {format_lsn(position)} may be missing.",
            fix=START_OVER,
        )
    plugin, _, pid, wal_status, confirmed, *_ = rows[0]
    if wal_status == "lost" or confirmed is None:
        raise PositionLost(
            f"The replication slot {name!r} has lost its WAL: it was behind by more than"
            f" max_slot_wal_keep_size. Changes made since {format_lsn(position)} may be missing.",
            fix=f"{START_OVER} Then raise max_slot_wal_keep_size.",
        )
    if plugin != "pgoutput":
        raise ConfigurationError(
            f"The replication slot {name!r} is of the plugin {plugin!r}, not pgoutput.",
            fix="give the capture another name.",
        )
    if int(confirmed) > position:
        raise PositionLost(
            f"Another client has read from the replication slot {name!r}, or has created it anew:"
            f" it is at {format_lsn(int(confirmed))}, and the log has changes up to"
            f" {format_lsn(position)}. What is in between may be missing.",
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
