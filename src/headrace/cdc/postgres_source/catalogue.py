"""What Postgres's catalogue says about the tables to be captured: columns, keys, types, how many rows. And what a table must have to be captured."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from headrace.cdc.postgres_source.relations import Relation, make_shape
from headrace.cdc.postgres_source.types import ddl_type
from headrace.cdc.source import Skipped
from headrace.errors import ConfigurationError, nearest
from headrace.sql_names import quoted

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
                fix=f"ALTER TABLE {name} ADD PRIMARY KEY (…); or ALTER TABLE {name} REPLICA IDENTITY FULL; or leave it out of tables=[…].",
            )
        if identity == "n":
            raise ConfigurationError(f"The table {name} has REPLICA IDENTITY NOTHING.", fix=f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT.")
        shape, places = make_shape(name, [each for each, _, _ in columns], [self.type_name(kind_, mod) for _, kind_, mod in columns], key)
        return Relation(oid, shape, places)

    def key(self, oid: int, identity: str) -> list[str]:
        which = "i.indisreplident" if identity == "i" else "i.indisprimary"
        return [name for (name,) in self.ask(_KEY.format(which=which), oid)]

    def column_names(self, table: str) -> list[tuple[str, str]]:
        """A table's columns in its own names, with their full types."""
        return [(name, kind) for name, kind in self.ask(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum", quoted_table(table)
        )]  # fmt: skip

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
            raise ConfigurationError(f"There is no table {each!r} in the database: {nearest(full, there)}", fix="name tables that are there, as schema.table.")
        found += [name for name in matching if name not in found]
    return found


def quoted_table(table: str) -> str:
    schema, name = table.split(".", 1)
    return f"{quoted(schema)}.{quoted(name)}"
