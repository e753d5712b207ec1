"""Queries of Postgres's catalogue, turned into DuckDB's SQL: `rewrite`, and the functions that they
may call.

    pg_catalog.pg_class              _pg.pg_class
    'orders'::regclass               _to_regclass('orders')
    a OPERATOR(pg_catalog.~) b       regexp_matches(a, b)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.errors import BadQuery
from headrace.serve.postgres import values
from headrace.serve.postgres.catalogue_tables import (
    INFORMATION_TABLES,
    SQL_NAMES,
    TABLES,
    VERSION_TEXT,
)
from headrace.serve.postgres.errors import SYNTAX_ERROR, UNDEFINED_TABLE, SqlError
from headrace.serve.postgres.lexer import split


def literal(value: Any) -> str:
    """A value in DuckDB's SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return "'" + str(value).replace("'", "''") + "'"


# Functions


_NAME_OF_TYPE = "CASE a {} ELSE '???' END".format(
    " ".join(f"WHEN {oid} THEN {literal(name)}" for oid, name in SQL_NAMES.items())
)
_FORMATTED = (
    f"CASE WHEN a IS NULL THEN NULL WHEN a = {values.NUMERIC} AND b > 4 THEN"
    " 'numeric(' || ((b - 4) >> 16) || ',' || ((b - 4) & 2047) || ')'"
    f" ELSE {_NAME_OF_TYPE} END"
)
_RELATION = (
    "SELECT _oid FROM (SELECT oid AS _oid, relname AS _name, relnamespace AS _space"
    " FROM _pg.pg_class) WHERE _name = {} ORDER BY _space DESC LIMIT 1"
)
_UNQUOTED = "replace(split_part(n, '.', -1), '\"', '')"


def _one(table: str, column: str, wanted: str) -> str:
    """A function that looks a value up. The names within it are its own: what it is called with is
    put in as text, and would be taken for a column of the table.
    """
    return (
        f"(a) AS (SELECT _wanted FROM (SELECT {column} AS _column, {wanted} AS _wanted"  # noqa: S608
        f" FROM _pg.{table}) WHERE _column = a)"
    )


_NONE, _ONE, _TWO = "NULL::VARCHAR", "(a) AS NULL::VARCHAR", "(a, b) AS NULL::VARCHAR"
MACROS = {
    "_key_text": "(a) AS (SELECT 'PRIMARY KEY (' || string_agg(_name, ', ' ORDER BY"
    " list_position(_keys, _number)) || ')' FROM (SELECT k.oid AS _oid, k.conkey AS _keys,"
    " t.attname AS _name, t.attnum AS _number FROM _pg.pg_constraint k JOIN _pg.pg_attribute t"
    " ON t.attrelid = k.conrelid AND list_contains(k.conkey, t.attnum)) WHERE _oid = a)",
    "_index_text": "(a) AS (SELECT 'CREATE UNIQUE INDEX ' || min(_index) || ' ON public.' ||"
    " min(_table) || ' USING btree (' || string_agg(_name, ', ' ORDER BY _number) || ')'"
    " FROM (SELECT i.indexrelid AS _oid, ci.relname AS _index, c.relname AS _table,"
    " t.attname AS _name, t.attnum AS _number FROM _pg.pg_index i"
    " JOIN _pg.pg_class c ON c.oid = i.indrelid JOIN _pg.pg_class ci ON ci.oid = i.indexrelid"
    " JOIN _pg.pg_attribute t ON t.attrelid = i.indexrelid) WHERE _oid = a)",
    "_index_column": "(a, b) AS CASE WHEN b = 0 THEN _index_text(a) ELSE (SELECT _name FROM"
    " (SELECT attrelid AS _oid, attname AS _name, attnum AS _number FROM _pg.pg_attribute)"
    " WHERE _oid = a AND _number = b) END",
    "version": f"() AS {literal(VERSION_TEXT)}",
    "format_type": f"(a, b) AS {_FORMATTED}",
    "_to_regclass": f"(n) AS ({_RELATION.format(_UNQUOTED)})",
    "to_regclass": f"(n) AS ({_RELATION.format(_UNQUOTED)})",
    "_regclass_name": _one("pg_class", "oid", "relname"),
    "_regtype_name": f"(a) AS {_NAME_OF_TYPE}",
    "_to_regtype": _one("pg_type", "typname", "oid"),
    "to_regtype": _one("pg_type", "typname", "oid"),
    "_to_regnamespace": _one("pg_namespace", "nspname", "oid"),
    "_regnamespace_name": _one("pg_namespace", "oid", "nspname"),
    "current_schema": "() AS 'public'",
    "current_schemas": "(a) AS CASE WHEN a THEN ['pg_catalog', 'public'] ELSE ['public'] END",
    "pg_table_is_visible": "(a) AS true",
    "pg_type_is_visible": "(a) AS true",
    "pg_function_is_visible": "(a) AS true",
    "pg_collation_is_visible": "(a) AS true",
    "pg_operator_is_visible": "(a) AS true",
    "pg_opclass_is_visible": "(a) AS true",
    "pg_ts_config_is_visible": "(a) AS true",
    "pg_get_expr": f"{_TWO}, (a, b, c) AS {_NONE}",
    "pg_get_constraintdef": "(a) AS _key_text(a), (a, b) AS _key_text(a)",
    "pg_get_indexdef": "(a) AS _index_text(a), (a, b, c) AS _index_column(a, b)",
    "pg_get_viewdef": f"{_ONE}, {_TWO}",
    "pg_get_ruledef": f"{_ONE}, {_TWO}",
    "pg_get_triggerdef": f"{_ONE}, {_TWO}",
    "pg_get_functiondef": _ONE,
    "pg_get_function_result": _ONE,
    "pg_get_function_arguments": _ONE,
    "pg_get_function_identity_arguments": _ONE,
    "pg_get_partkeydef": _ONE,
    "pg_get_serial_sequence": _TWO,
    "pg_get_statisticsobjdef_columns": _ONE,
    "pg_get_keywords": "() AS NULL::VARCHAR",
    "obj_description": f"{_ONE}, {_TWO}",
    "col_description": _TWO,
    "shobj_description": _TWO,
    "pg_encoding_to_char": "(a) AS CASE a WHEN 6 THEN 'UTF8' ELSE '' END",
    "pg_char_to_encoding": "(a) AS 6",
    "pg_tablespace_location": "(a) AS ''",
    "pg_relation_is_publishable": "(a) AS false",
    "pg_relation_size": "(a) AS 0::BIGINT, (a, b) AS 0::BIGINT",
    "pg_table_size": "(a) AS 0::BIGINT",
    "pg_total_relation_size": "(a) AS 0::BIGINT",
    "pg_indexes_size": "(a) AS 0::BIGINT",
    "pg_database_size": "(a) AS 0::BIGINT",
    "pg_size_pretty": "(a) AS a || ' bytes'",
    "pg_is_in_recovery": "() AS false",
    "pg_is_wal_replay_paused": "() AS false",
    "pg_postmaster_start_time": "() AS NULL::TIMESTAMPTZ",
    "pg_conf_load_time": "() AS NULL::TIMESTAMPTZ",
    "pg_my_temp_schema": "() AS 0::BIGINT",
    "pg_is_other_temp_schema": "(a) AS false",
    "pg_blocking_pids": "(a) AS []::INTEGER[]",
    "pg_listening_channels": "() AS NULL::VARCHAR",
    "txid_current": "() AS 1::BIGINT",
    "txid_current_if_assigned": "() AS NULL::BIGINT",
    "pg_current_xact_id": "() AS 1::BIGINT",
    "has_table_privilege": "(a, b) AS b ILIKE 'select%', (a, b, c) AS c ILIKE 'select%'",
    "has_any_column_privilege": "(a, b) AS b ILIKE 'select%', (a, b, c) AS c ILIKE 'select%'",
    "has_column_privilege": "(a, b, c) AS c ILIKE 'select%', (a, b, c, d) AS d ILIKE 'select%'",
    "has_schema_privilege": "(a, b) AS b ILIKE 'usage%', (a, b, c) AS c ILIKE 'usage%'",
    "has_database_privilege": "(a, b) AS b ILIKE 'connect%', (a, b, c) AS c ILIKE 'connect%'",
    "has_function_privilege": "(a, b) AS true, (a, b, c) AS true",
    "has_sequence_privilege": "(a, b) AS false, (a, b, c) AS false",
    "has_type_privilege": "(a, b) AS true, (a, b, c) AS true",
    "pg_has_role": "(a, b) AS true, (a, b, c) AS true",
    "row_security_active": "(a) AS false",
    "set_config": "(a, b, c) AS b",
    "array_upper": "(a, b) AS len(a)",
    "array_lower": "(a, b) AS 1",
    "quote_ident": "(a) AS CASE WHEN regexp_full_match(a, '[a-z_][a-z0-9_]*') THEN a"
    " ELSE '\"' || replace(a, '\"', '\"\"') || '\"' END",
    "quoteliteral": "(a) AS '''' || replace(a, '''', '''''') || ''''",
    "inet_server_addr": "() AS NULL::VARCHAR",
    "inet_server_port": "() AS NULL::INTEGER",
    "inet_client_addr": "() AS NULL::VARCHAR",
    "pg_stat_get_numscans": "(a) AS 0::BIGINT",
}
_SESSION_FUNCTIONS = {
    "current_database",
    "current_catalog",
    "current_user",
    "session_user",
    "user",
    "pg_backend_pid",
    "pg_get_userbyid",
    "current_setting",
}
FUNCTIONS = frozenset(MACROS) | _SESSION_FUNCTIONS
_USES = {
    "_to_regclass": ({"pg_class"}, set()),
    "to_regclass": ({"pg_class"}, set()),
    "_regclass_name": ({"pg_class"}, set()),
    "_to_regtype": ({"pg_type"}, set()),
    "to_regtype": ({"pg_type"}, set()),
    "_to_regnamespace": ({"pg_namespace"}, set()),
    "_regnamespace_name": ({"pg_namespace"}, set()),
    "pg_get_constraintdef": ({"pg_constraint", "pg_attribute"}, {"_key_text"}),
    "pg_get_indexdef": (
        {"pg_index", "pg_class", "pg_attribute"},
        {"_index_text", "_index_column"},
    ),
}
"""The tables and functions that a function uses in turn."""


@dataclass
class CatalogueQuery:
    """A query of the catalogue in DuckDB's SQL, and what it needs."""

    text: str
    tables: set[str] = field(default_factory=set)
    information: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)


def rewrite(text: str, database: str) -> CatalogueQuery:
    """Turn a query that is written for Postgres into one that DuckDB runs.

    Raises:
        SqlError: It cannot be parsed, or names a table that the catalogue does not have.
    """
    from sqlglot import parse_one
    from sqlglot.errors import SqlglotError

    query = CatalogueQuery("")
    try:
        tree = parse_one(_with_plain_arrays(text), read="postgres")
        for node in reversed(list(tree.dfs())):  # what is inside comes first
            changed = _rewritten(node, query, database)
            if changed is not node and node is not tree:
                node.replace(changed)
        query.text = tree.sql(dialect="duckdb")
    except (SqlglotError, RecursionError) as error:
        first_line = str(error).partition("\n")[0][:300] or type(error).__name__
        raise SqlError(SYNTAX_ERROR, f"The query cannot be read: {first_line}.") from None
    for name in list(query.functions):
        tables, functions = _USES.get(name, (set(), set()))
        query.tables |= tables
        query.functions |= functions
    return query


def _with_plain_arrays(text: str) -> str:
    """A query whose arrays of `oid` and `name`, which sqlglot does not read, are of plain types."""
    parts, at = [], 0
    for statement in split(text):
        for number, token in enumerate(statement.tokens[:-2]):
            brackets = [each.text for each in statement.tokens[number + 1 : number + 3]]
            if token.lowered in {"oid", "name", "regtype", "regclass"} and brackets == ["[", "]"]:
                start = statement.start + token.start
                parts += [text[at:start], "text" if token.lowered == "name" else "bigint"]
                at = statement.start + token.end
    return "".join([*parts, text[at:]])


_ONE_ROW_FUNCTIONS = {"string_to_array", "current_schemas", "regexp_split_to_array"}
_OTHER_NAMES = {
    "json_build_object": "json_object",
    "jsonb_build_object": "json_object",
    "json_build_array": "json_array",
    "json_agg": "json_group_array",
    "jsonb_agg": "json_group_array",
    "btrim": "trim",
    "char_length": "length",
}
"""Functions that DuckDB has under another name."""
_REG_TYPES = {"regclass", "regtype", "regnamespace", "regproc", "regprocedure", "regrole"}
_TEXT_TYPES = {
    "name",
    "char",
    "regproc",
    "sql_identifier",
    "character_data",
    "yes_or_no",
    "cstring",
}
_NUMBER_TYPES = {"oid", "xid", "cid", "xid8", "cardinal_number"}


def _rewritten(node: Any, query: CatalogueQuery, database: str) -> Any:
    from sqlglot import exp

    if isinstance(node, exp.Table):
        return _table_node(node, query, database)
    if isinstance(node, exp.Dot) and isinstance(node.expression, exp.Func):
        return node.expression  # pg_catalog.f(…): the function is looked at by itself
    if isinstance(node, exp.Collate):
        return node.this
    if isinstance(node, exp.Operator):
        return _operator(node)
    if isinstance(node, exp.Cast):
        return _cast(node, query)
    if isinstance(node, exp.Anonymous):
        name = str(node.this).lower()
        if name == "_pg_expandarray":
            return _expanded(node)
        name = _OTHER_NAMES.get(name, name)
        if name in FUNCTIONS:
            query.functions.add(name)
        return exp.Anonymous(this=name, expressions=node.expressions)
    for kind, name in (
        (exp.CurrentSchema, "current_schema"),
        (exp.CurrentUser, "current_user"),
        (exp.SessionUser, "session_user"),
        (exp.CurrentCatalog, "current_catalog"),
        (exp.CurrentDatabase, "current_database"),
        (exp.CurrentVersion, "version"),
    ):
        if isinstance(node, kind):
            query.functions.add(name)
            return exp.Anonymous(this=name, expressions=[])
    if isinstance(node, exp.Column) and node.args.get("db") is not None:
        node.set("db", None)  # pg_catalog.pg_class.relname
        node.set("catalog", None)
        return node
    if isinstance(node, exp.Column) and not node.table and node.this.sql().lower() == "user":
        query.functions.add("user")
        return exp.Anonymous(this="user", expressions=[])
    return node


def _table_node(node: Any, query: CatalogueQuery, database: str) -> Any:
    from sqlglot import exp

    name, schema, catalog = node.name, node.db.lower(), node.catalog
    if not isinstance(node.this, exp.Identifier):  # a function that gives rows
        if schema == "pg_catalog":
            node.set("db", None)
        alias = node.args.get("alias")
        if alias is None:
            return node
        function = node.this.name if isinstance(node.this, exp.Anonymous) else node.this.sql_name()
        if str(function).lower() in _ONE_ROW_FUNCTIONS:
            value = exp.alias_(node.this, alias.this.name)
            return exp.Subquery(this=exp.select(value), alias=alias)
        if not alias.args.get("columns"):  # it names the column too
            alias.set("columns", [alias.this.copy()])
        return node
    if catalog and catalog != database:
        return node
    lowered = name.lower()
    if schema == "information_schema":
        if lowered not in INFORMATION_TABLES:
            raise _no_table(f"information_schema.{name}")
        query.information.add(lowered)
        return _renamed(node, "_is", lowered)
    if schema == "pg_catalog" or (not schema and lowered in TABLES):
        if lowered not in TABLES:
            raise _no_table(f"pg_catalog.{name}")
        query.tables.add(lowered)
        return _renamed(node, "_pg", lowered)
    if schema == "public":
        return _renamed(node, None, name)
    return node


def _renamed(node: Any, schema: str | None, name: str) -> Any:
    from sqlglot import exp

    renamed = node.copy()
    renamed.set("this", exp.to_identifier(name, quoted=True))
    renamed.set("db", None if schema is None else exp.to_identifier(schema))
    renamed.set("catalog", None)
    if schema is not None and not renamed.alias:
        renamed.set("alias", exp.TableAlias(this=exp.to_identifier(name)))
    return renamed


def _no_table(name: str) -> SqlError:
    return SqlError(UNDEFINED_TABLE, f'relation "{name}" does not exist')


def _operator(node: Any) -> Any:
    """`a OPERATOR(pg_catalog.~) b`: the operator alone."""
    from sqlglot import exp

    symbol = str(node.args["operator"]).rpartition(".")[2].strip()
    left, right = node.this, node.expression
    kinds: dict[str, type[Any]] = {"=": exp.EQ, "<>": exp.NEQ, "<": exp.LT, ">": exp.GT}
    if symbol in {"~", "!~", "~*", "!~*"}:
        options = [exp.Literal.string("i")] if symbol.endswith("*") else []
        match = exp.Anonymous(this="regexp_matches", expressions=[left, right, *options])
        return exp.Not(this=match) if symbol.startswith("!") else match
    if symbol in {"~~", "!~~"}:
        like = exp.Like(this=left, expression=right)
        return like if symbol == "~~" else exp.Not(this=like)
    if symbol in kinds:
        return kinds[symbol](this=left, expression=right)
    raise BadQuery(f"The operator {symbol} is not known.")


def _cast(node: Any, query: CatalogueQuery) -> Any:
    from sqlglot import exp

    to = node.args["to"]
    text = to.sql(dialect="postgres").lower().replace('"', "")
    name = text.removeprefix("pg_catalog.").removeprefix("information_schema.")
    if name.endswith("[]") and name[:-2] in _TEXT_TYPES | _NUMBER_TYPES | _REG_TYPES:
        plain = "TEXT[]" if name[:-2] in _TEXT_TYPES else "UINTEGER[]"
        return exp.Cast(this=node.this, to=exp.DataType.build(plain, dialect="duckdb"))
    if name in _REG_TYPES:
        outer = node.parent
        is_number_wanted = isinstance(outer, exp.Cast) and "oid" in outer.args["to"].sql().lower()
        return _reg_cast(node.this, name, query, is_number_wanted=is_number_wanted)
    if name in _TEXT_TYPES:
        return exp.Cast(this=node.this, to=exp.DataType.build("TEXT", dialect="duckdb"))
    if name in _NUMBER_TYPES:
        return exp.Cast(this=node.this, to=exp.DataType.build("UINTEGER", dialect="duckdb"))
    if name in {"int2vector", "oidvector", "anyarray"}:
        return node.this
    if name != text:
        plain_type = exp.DataType.build(name, dialect="postgres")
        return exp.Cast(this=node.this, to=plain_type)
    return node


def _reg_cast(value: Any, name: str, query: CatalogueQuery, *, is_number_wanted: bool) -> Any:
    """A cast to `regclass` and the like: of a name its number, of a number its name."""
    from sqlglot import exp

    if name in {"regproc", "regprocedure", "regrole"}:
        return exp.Cast(this=value, to=exp.DataType.build("TEXT", dialect="duckdb"))
    is_name = isinstance(value, exp.Literal | exp.Parameter | exp.Placeholder) or (
        isinstance(value, exp.Cast) and value.args["to"].is_type("text", "varchar")
    )
    is_name = is_name or (is_number_wanted and isinstance(value, exp.Anonymous))
    function = f"_to_{name}" if is_name and not _is_number(value) else f"_{name}_name"
    query.functions.add(function)
    return exp.Anonymous(this=function, expressions=[value])


def _is_number(value: Any) -> bool:
    from sqlglot import exp

    return isinstance(value, exp.Literal) and not value.is_string


def _expanded(node: Any) -> Any:
    """`_pg_expandarray(keys)`: a row `(x, n)` for each element and its number."""
    from sqlglot import parse_one

    array = node.expressions[0].sql(dialect="duckdb")
    expanded = f"unnest(list_transform({array}, (v, i) -> struct_pack(x := v, n := i)))"
    return parse_one(expanded, read="duckdb")
