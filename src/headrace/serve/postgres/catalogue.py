"""Postgres's catalogue of the views: the tables of `pg_catalog` and `information_schema` that
clients ask what there is, and the functions that go with them.

    written for Postgres   SELECT relname FROM pg_class WHERE relname OPERATOR(pg_catalog.~) '^(r)$'
    run by DuckDB          SELECT relname FROM _pg.pg_class WHERE regexp_matches(relname, '^(r)$')

A view is a table of the schema `public`; its key is a primary key, with an index. `rewrite` in
`catalogue_query` turns a query into DuckDB's SQL over tables of the schemas `_pg` and `_is`, which
the query's own process makes before it runs: `Catalogue.script` has the statements, for those that
the query names.

Tables that have nothing to say of views (triggers, extensions, …) are there, and empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from headrace.serve.postgres import values
from headrace.serve.postgres.catalogue_query import MACROS, CatalogueQuery, literal
from headrace.serve.postgres.catalogue_tables import (
    COLUMNS,
    EMPTY,
    EMPTY_INFORMATION,
    INFORMATION,
    SQL_NAMES,
    TABLES,
    TYPES,
)
from headrace.views.file import ViewInfo

PUBLIC, PG_CATALOG, INFORMATION_SCHEMA = 2_200, 11, 13_000
_OWNER, _DATABASE, _HEAP, _BTREE = 10, 16_384, 2, 403
_FIRST_OID, _OIDS_A_VIEW = 20_000, 4


@dataclass(frozen=True)
class Catalogue:
    """What a role sees: its views, and names of the session."""

    database: str
    user: str
    views: Sequence[ViewInfo]
    settings: Mapping[str, str] = field(default_factory=dict)
    process: int = 0

    def script(self, query: CatalogueQuery) -> list[str]:
        """The statements that make the tables and functions of a query."""
        statements = ["CREATE SCHEMA _pg", "CREATE SCHEMA _is"]
        for name in sorted(query.tables):
            columns = COLUMNS.get(name) or EMPTY[name]
            statements += _table(f"_pg.{name}", columns, self._rows(name))
        for name in sorted(query.information):
            columns = INFORMATION.get(name) or EMPTY_INFORMATION[name]
            statements += _table(f"_is.{name}", columns, self._rows(f"information.{name}"))
        return statements + self._macros(query.functions)

    def _rows(self, table: str) -> Iterable[Sequence[Any]]:
        make = _ROWS.get(table)
        return make(self) if make is not None else ()

    def _macros(self, functions: Iterable[str]) -> list[str]:
        user, database = literal(self.user), literal(self.database)
        own = {
            "current_database": f"() AS {database}",
            "current_catalog": f"() AS {database}",
            "current_user": f"() AS {user}",
            "session_user": f"() AS {user}",
            "user": f"() AS {user}",
            "pg_get_userbyid": f"(a) AS {user}",
            "pg_backend_pid": f"() AS {self.process}",
            "current_setting": self._setting_macro(),
        }
        return [
            f"CREATE OR REPLACE MACRO {name}{own.get(name) or MACROS[name]}"
            for name in [*own, *MACROS]  # those that others use are first
            if name in functions
        ]

    def _setting_macro(self) -> str:
        cases = " ".join(
            f"WHEN {literal(name.lower())} THEN {literal(value)}"
            for name, value in self.settings.items()
        )
        body = f"CASE lower(a) {cases} ELSE NULL END" if cases else "NULL::VARCHAR"
        return f"(a) AS {body}, (a, b) AS {body}"


def relation_oid(info: ViewInfo) -> int:
    return _FIRST_OID + _OIDS_A_VIEW * info.number


def _table(name: str, columns: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    statements = [f"CREATE TABLE {name} ({columns})"]
    lines = [f"({', '.join(map(literal, row))})" for row in rows]
    if lines:
        statements.append(f"INSERT INTO {name} VALUES {', '.join(lines)}")  # noqa: S608 - literals
    return statements


def _namespaces(_: Catalogue) -> Iterable[Sequence[Any]]:
    for oid, name in ((PG_CATALOG, "pg_catalog"), (PUBLIC, "public")):
        yield (oid, name, _OWNER, None)
    yield (INFORMATION_SCHEMA, "information_schema", _OWNER, None)


def _classes(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        oid, columns = relation_oid(info), len(info.schema)
        yield _class(oid, info.name, "r", columns, has_index=bool(info.key))
        if info.key:
            yield _class(oid + 1, _key_name(info), "i", len(info.key), has_index=False)
    for name in sorted(TABLES):
        oid = 1_000 + sorted(TABLES).index(name)
        yield _class(oid, name, "r", 0, has_index=False, namespace=PG_CATALOG)


def _class(
    oid: int, name: str, kind: str, columns: int, *, has_index: bool, namespace: int = PUBLIC
) -> Sequence[Any]:
    method = _BTREE if kind == "i" else _HEAP
    return (
        oid, name, namespace, oid + 3 if kind == "r" else 0, 0, _OWNER, method, oid, 0, 0, -1.0, 0,
        0, has_index, False, "p", kind, columns, 0, False, False, False, False, False, True, "d",
        False, 0, 0, 0, False, None, None, None,
    )  # fmt: skip


def _key_name(info: ViewInfo) -> str:
    return f"{info.name}_pkey"


def _attributes(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        oid = relation_oid(info)
        for number, column in enumerate(info.schema, 1):
            is_required = column.name in info.key and not info.null_keys
            yield _attribute(oid, number, column, is_required=is_required or not column.nullable)
        for number, name in enumerate(info.key, 1):
            yield _attribute(oid + 1, number, info.schema.field(name), is_required=False)


def _attribute(oid: int, number: int, column: pa.Field, *, is_required: bool) -> Sequence[Any]:
    kind = values.postgres_type(column.type)
    dimensions = 1 if kind.oid in values.ARRAY_ELEMENTS else 0
    collation = 100 if kind.oid == values.TEXT_OID else 0
    return (
        oid, column.name, kind.oid, -1, kind.size, number, dimensions, -1, kind.modifier,
        kind.size > 0, "i", "x" if kind.size < 0 else "p", "", is_required, False, False, "", "",
        False, True, 0, collation, None, None, None, None,
    )  # fmt: skip


def _types(_: Catalogue) -> Iterable[Sequence[Any]]:
    for row in TYPES:
        array = next((each.oid for each in TYPES if each.element == row.oid), 0)
        name = "array_{}" if row.element else f"{row.name}{{}}"
        functions = [name.format(part) for part in ("in", "out", "recv", "send")]
        yield (
            row.oid, row.name, PG_CATALOG, _OWNER, row.size, 0 < row.size <= 8, "b", row.category,
            row.oid in {values.TEXT_OID, values.FLOAT8, values.BOOL, values.TIMESTAMPTZ}, True, ",",
            0, "-", row.element, array, *functions, "-", "-", "-", "i", "p", False, 0, -1, 0,
            100 if row.category == "S" else 0, None, None, None,
        )  # fmt: skip


def _indexes(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        if not info.key:
            continue
        oid, count = relation_oid(info), len(info.key)
        numbers = [info.schema.names.index(name) + 1 for name in info.key]
        yield (
            oid + 1, oid, count, count, True, False, True, False, True, False, True, False, True,
            True, False, numbers, [0] * count, [0] * count, [0] * count, None, None,
        )  # fmt: skip


def _constraints(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        if info.key:
            oid = relation_oid(info)
            numbers = [info.schema.names.index(name) + 1 for name in info.key]
            yield (
                oid + 2, _key_name(info), PUBLIC, "p", False, False, True, oid, 0, oid + 1, 0, 0,
                " ", " ", " ", True, 0, True, numbers, None, None, None, None, None, None, None,
                None,
            )  # fmt: skip


def _databases(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    yield (
        _DATABASE, catalogue.database, _OWNER, 6, "c", False, True, -1, 0, 0, 1_663, "C.UTF-8",
        "C.UTF-8", None, None, None,
    )  # fmt: skip


def _roles(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    flags = (False, True, False, False, True, False)
    yield (_OWNER, catalogue.user, *flags, -1, "********", None, False, None)


def _users(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    yield (catalogue.user, _OWNER, False, False, False, False, "********", None, None)


def _settings(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for name, value in sorted(catalogue.settings.items()):
        yield (
            name, value, None, "Settings", None, None, "user", "string", "session", None, None,
            None, value, value, None, None, False,
        )  # fmt: skip


def _methods(_: Catalogue) -> Iterable[Sequence[Any]]:
    yield (_HEAP, "heap", "heap_tableam_handler", "t")
    yield (_BTREE, "btree", "bthandler", "i")


def _tables(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        yield ("public", info.name, catalogue.user, None, bool(info.key), False, False, False)


def index_definition(info: ViewInfo) -> str:
    columns = ", ".join(_identifier(name) for name in info.key)
    return (
        f"CREATE UNIQUE INDEX {_identifier(_key_name(info))} ON public.{_identifier(info.name)}"
        f" USING btree ({columns})"
    )


def _identifier(name: str) -> str:
    is_plain = name.isidentifier() and name == name.lower() and name.isascii()
    return name if is_plain else '"' + name.replace('"', '""') + '"'


def _index_list(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        if info.key:
            yield ("public", info.name, _key_name(info), None, index_definition(info))


def _table_statistics(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        yield (relation_oid(info), "public", info.name, *[0] * 9, *[None] * 4)


def _schemata(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for name in ("information_schema", "pg_catalog", "public"):
        yield (catalogue.database, name, catalogue.user, None, None, None, None)


def _information_tables(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        yield (
            catalogue.database, "public", info.name, "BASE TABLE", None, None, None, None, None,
            "NO", "NO", None,
        )  # fmt: skip


def _information_columns(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        for number, column in enumerate(info.schema, 1):
            kind = values.postgres_type(column.type)
            is_array = kind.oid in values.ARRAY_ELEMENTS
            bits = {values.INT2: 16, values.INT4: 32, values.INT8: 64}.get(kind.oid)
            precision, scale = bits, 0 if bits else None
            if pa.types.is_decimal(column.type):
                precision, scale = column.type.precision, column.type.scale
            is_time = kind.oid in {values.TIMESTAMP, values.TIMESTAMPTZ, values.TIME}
            name = next(row.name for row in TYPES if row.oid == kind.oid)
            is_key = column.name in info.key and not info.null_keys
            radix = None if precision is None else 2 if bits else 10
            yield (
                catalogue.database, "public", info.name, column.name, number, None,
                "NO" if is_key or not column.nullable else "YES",
                "ARRAY" if is_array else SQL_NAMES[kind.oid], None,
                1 << 30 if kind.oid == values.TEXT_OID else None, precision, radix, scale,
                6 if is_time else 0 if kind.oid == values.DATE else None, None, None, None, None,
                None, catalogue.database, "pg_catalog", name, str(number), "NO", "NO", None,
                "NEVER", None, "NO",
            )  # fmt: skip


def _information_keys(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        if info.key:
            key, table = (catalogue.database, "public"), (catalogue.database, "public", info.name)
            yield (*key, _key_name(info), *table, "PRIMARY KEY", "NO", "NO", "YES")


def _information_key_columns(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        for number, name in enumerate(info.key, 1):
            key = (catalogue.database, "public", _key_name(info))
            yield (*key, catalogue.database, "public", info.name, name, number, None)


def _information_used_columns(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        for name in info.key:
            table = (catalogue.database, "public", info.name, name)
            yield (*table, catalogue.database, "public", _key_name(info))


def _privileges(catalogue: Catalogue) -> Iterable[Sequence[Any]]:
    for info in catalogue.views:
        table = (catalogue.database, "public", info.name)
        yield (catalogue.user, catalogue.user, *table, "SELECT", "NO", "NO")


_ROWS: Mapping[str, Callable[[Catalogue], Iterable[Sequence[Any]]]] = {
    "pg_namespace": _namespaces,
    "pg_class": _classes,
    "pg_attribute": _attributes,
    "pg_type": _types,
    "pg_index": _indexes,
    "pg_constraint": _constraints,
    "pg_database": _databases,
    "pg_roles": _roles,
    "pg_user": _users,
    "pg_settings": _settings,
    "pg_am": _methods,
    "pg_tables": _tables,
    "pg_indexes": _index_list,
    "pg_stat_user_tables": _table_statistics,
    "information.schemata": _schemata,
    "information.tables": _information_tables,
    "information.columns": _information_columns,
    "information.table_constraints": _information_keys,
    "information.key_column_usage": _information_key_columns,
    "information.constraint_column_usage": _information_used_columns,
    "information.table_privileges": _privileges,
}
