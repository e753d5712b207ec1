"""A query as a chain of the operations that users write in Python: `compile_query` returns the rows
and their visible columns.

In this order, as SQL has it: FROM and JOIN, WHERE, GROUP BY with windows, HAVING, functions OVER
rows, SELECT, DISTINCT, UNION, ORDER BY … LIMIT. A clause that says nothing adds no step, so that
the plan is the one of the Python spelling.

A table's key tells its rows apart. A subquery may leave it out, and then keeps it where no name
reaches it; the last SELECT must have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import PlanError, StreamOnly
from headrace.sql.calls import (
    function_calls,
)
from headrace.sql.groups import grouped
from headrace.sql.joins import join
from headrace.sql.outputs import output_columns, projected, refuse_hidden_key, selected, united
from headrace.sql.over import (
    framed_rows,
    limit_of,
    numbered_item,
    numbered_rows,
)
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.query_parser import parse_query
from headrace.sql.scope import QueryRows, VisibleColumn, check_size
from headrace.sql.script import Span
from headrace.sql.subqueries import (
    SubqueryFilter,
    filtered,
    refuse_subqueries,
    semi_join,
    subquery_filter,
)
from headrace.sql.syntax import (
    ChangedRows,
    DerivedRows,
    ExplodeClause,
    FromItem,
    JoinClause,
    MatchedRows,
    NamedRows,
    QueryTree,
    SearchedRows,
    Select,
    SelectItem,
    Union,
    WindowCall,
)
from headrace.sql.windows import BOUNDS, refuse_window_clauses, windowed

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table

FindRows = Callable[[str, int], "Stream | Table"]


@dataclass
class QueryScope:
    """The tables that a query can name: those of the catalog, and common table expressions."""

    find: FindRows
    parent: QueryScope | None = None
    tables: dict[str, QueryTree] = field(default_factory=dict)
    frames: dict[str, QueryRows] = field(default_factory=dict)

    def table(self, name: str) -> tuple[QueryScope, QueryTree] | None:
        """A common table expression, and the scope that declares it."""
        scope: QueryScope | None = self
        while scope is not None:
            if name.lower() in scope.tables:
                return scope, scope.tables[name.lower()]
            scope = scope.parent
        return None


def compile_query(span: Span, find: FindRows) -> Stream | Table:
    """The rows of a query.

    Args:
        span: The query's text.
        find: Gets a stream or table by name; the offset is for errors.

    Raises:
        SqlRefusal: The query cannot be used.
    """
    return rows_of(parse_query(span), find)


def rows_of(query: QueryTree, find: FindRows) -> Stream | Table:
    """The rows of a query that was read."""
    return _query(query, QueryScope(find), is_final=True).rows


def _query(query: QueryTree, scope: QueryScope, *, is_final: bool) -> QueryRows:
    if query.tables:
        scope = QueryScope(scope.find, scope)
        for name, table in query.tables:
            if name.lower() in scope.tables:
                raise SqlRefusal(
                    table.span.start,
                    f"WITH names {name!r} twice.",
                    "rename one of them.",
                    PlanError,
                )
            # What a table is made of must be declared before it: it sees the ones so far.
            scope = QueryScope(scope.find, scope, {name.lower(): table})
    body = query.body
    is_last = is_final and query.limit is None
    if isinstance(body, Select):
        frame = _select(body, scope, is_final=is_last)
    elif isinstance(body, Union):
        parts = [_query(part, scope, is_final=False) for part in body.parts]
        frame = united(body, parts, is_final=is_last)
    else:
        frame = _query(body, scope, is_final=is_last)
    if query.order or query.limit is not None:
        frame = _limited(query, frame)
        if is_final:
            refuse_hidden_key(frame, query.span)
    return frame


def _limited(query: QueryTree, frame: QueryRows) -> QueryRows:
    """ORDER BY … LIMIT n: the first rows of a table."""
    if query.limit is None:
        raise SqlRefusal(
            query.order[0].span.start,
            "A view has no order: its rows are ordered when they are read.",
            "leave out ORDER BY; or add LIMIT, for the first rows.",
            PlanError,
        )
    if not query.order:
        raise SqlRefusal(
            query.limit_offset,
            "LIMIT without ORDER BY would keep any rows.",
            "say which come first: ORDER BY … LIMIT n.",
            PlanError,
        )
    if not frame.is_table:
        raise SqlRefusal(
            query.limit_offset,
            "LIMIT of a stream would keep rows that later ones replace.",
            "keep them with their number: SELECT * FROM (SELECT *, ROW_NUMBER() OVER (ORDER BY …)"
            " AS rank FROM …) WHERE rank <= 10.",
            StreamOnly,
        )
    by = [
        f"{frame.column_of(item.span)} {'DESC' if item.is_descending else 'ASC'}"
        for item in query.order
    ]
    rows: Any = frame.rows
    with located(query.order[0].span):
        return frame.with_rows(rows.top(query.limit, by=by))


# SELECT


def _select(
    select: Select,
    scope: QueryScope,
    *,
    is_final: bool,
    limit: tuple[SelectItem, int, bool] | None = None,
) -> QueryRows:
    """The rows of a SELECT.

    Args:
        select: The SELECT.
        scope: The tables that it can name.
        is_final: Whether its rows are those of the whole query.
        limit: Its item with the row's number, how many rows are kept, and whether the number is
            read outside.
    """
    where = []
    if select.where is not None:
        check_size(select.where)
        where = select.where.conjuncts()
    kinds = [clause.kind if isinstance(clause, JoinClause) else "" for clause in select.joins]
    # WHERE is checked behind all joins. What it says of one side can be used before only if no
    # join adds rows in which that side is missing.
    frame = _from(select.source, scope, select, [] if {"right", "full"} & {*kinds} else where)
    for at, clause in enumerate(select.joins):
        if isinstance(clause, ExplodeClause):
            frame = _exploded(frame, clause)
            continue
        stays = not {"right", "full"} & {*kinds[at + 1 :]}
        of_join = where if stays and clause.kind in {"inner", "cross"} else []
        right = _from(clause.item, scope, select, of_join)
        if clause.kind in {"semi", "anti"}:
            frame = semi_join(frame, clause, right)
            continue
        frame = join(frame, clause, right, of_join, select.span)
    frame, behind_windows = _where(frame, select, where, scope)
    if frame.window is None:
        refuse_window_clauses(select)
    frame, replaced = grouped(frame, select)
    for span in behind_windows:
        with located(span):
            frame = frame.with_rows(frame.rows.where(frame.compiled(span).text))
    if select.having is not None:
        refuse_subqueries(select.having)
        if not replaced and select.group is None and not select.groups_all:
            raise SqlRefusal(
                select.having.start,
                "HAVING is for groups, and there are none.",
                "use WHERE.",
                PlanError,
            )
        with located(select.having):
            condition = frame.compiled(select.having, replaced).text
            frame = frame.with_rows(frame.rows.where(condition))
    items = select.items
    frame, items, filters = numbered_rows(frame, select, items, replaced, limit)
    frame = framed_rows(frame, select, items, filters, replaced)
    for span in filters:
        with located(span):
            frame = frame.with_rows(frame.rows.where(frame.compiled(span, replaced).text))
    return projected(frame, select, items, replaced, is_final=is_final)


def _where(
    frame: QueryRows, select: Select, where: list[Span], scope: QueryScope
) -> tuple[QueryRows, list[Span]]:
    """The rows that WHERE keeps, and the conditions of windows, which are checked behind them."""
    if select.where is None:
        return frame, []
    behind: list[Span] = []
    plain: list[Span] = []
    filters: list[SubqueryFilter] = []
    for span in where:
        found = subquery_filter(span)
        if found is not None:
            filters.append(found)
            continue
        refuse_subqueries(span)
        for call in function_calls(span):
            what = "a function OVER rows" if call.is_over else "an aggregate"
            raise SqlRefusal(
                call.span.start,
                f"WHERE is checked of each row before {what} is computed.",
                "use QUALIFY, or a query in FROM." if call.is_over else "use HAVING.",
                PlanError,
            )
        compiled = frame.compiled(span, what="a condition")
        of_windows = frame.window is not None and bool(set(BOUNDS) & compiled.reads)
        (behind if of_windows else plain).append(span)
    if plain:
        everything = len(plain) == len(select.where.conjuncts())
        with located(plain[0]):
            if everything:
                condition = frame.compiled(select.where).text
            elif len(plain) == 1:
                condition = frame.compiled(plain[0]).text
            else:
                condition = " AND ".join(_bracketed(frame, span) for span in plain)
            frame = frame.with_rows(frame.rows.where(condition))
    for each in filters:
        frame = filtered(frame, each, lambda query: _query(query, scope, is_final=False))
    return frame, behind


def _bracketed(frame: QueryRows, span: Span) -> str:
    """A condition as a part of AND."""
    text = frame.compiled(span).text
    tokens = span.script.tokens
    has_or = any(tokens[at].upper == "OR" for at in span.top_level())
    return f"({text})" if has_or else text


# FROM


def _from(item: FromItem, scope: QueryScope, select: Select, where: list[Span]) -> QueryRows:
    if isinstance(item, NamedRows):
        found = scope.table(item.name)
        if found is None:
            rows = QueryRows.of(scope.find(item.name, item.span.start), item.alias)
            if rows.is_file and item is select.source:
                raise SqlRefusal(
                    item.span.start,
                    f"{item.name!r} is a constant table in a file, which streams are joined with.",
                    "begin with the stream: FROM orders JOIN the file's table ON ….",
                    PlanError,
                )
            return rows
        home, query = found
        numbered = _limited_query(query, home.parent or home, item.alias, select, where, item.span)
        if numbered is not None:
            return numbered.under(item.alias)
        key = item.name.lower()
        if key not in home.frames:
            home.frames[key] = _query(query, home.parent or home, is_final=False)
        return home.frames[key].under(item.alias)
    if isinstance(item, DerivedRows):
        numbered = _limited_query(item.query, scope, item.alias, select, where, item.span)
        frame = numbered or _query(item.query, scope, is_final=False)
        return frame.under(item.alias)
    if isinstance(item, WindowCall):
        return windowed(_from(item.rows, scope, select, []), item)
    if isinstance(item, ChangedRows):
        return _changes(_from(item.rows, scope, select, []), item)
    if isinstance(item, SearchedRows):
        return _searched(item, scope, select)
    return _matched(item, scope, select)


def _limited_query(
    query: QueryTree, scope: QueryScope, alias: str, select: Select, where: list[Span], own: Span
) -> QueryRows | None:
    """The first rows of each group, where a query numbers its rows and WHERE outside of it keeps
    the first numbers. The condition is removed from `where`.
    """
    while isinstance(query.body, QueryTree) and not query.tables and not query.order:
        query = query.body
    body = query.body
    if not isinstance(body, Select) or query.order or query.limit is not None:
        return None
    numbered = numbered_item(body)
    if numbered is None:
        return None
    item = numbered[0]
    name = str(item.name)
    for span in where:
        kept = limit_of(span, name, alias)
        if kept is None:
            continue
        where.remove(span)
        if query.tables:
            scope = QueryScope(scope.find, scope)
            for table_name, table in query.tables:
                scope = QueryScope(scope.find, scope, {table_name.lower(): table})
        if kept < 1:
            raise SqlRefusal(span.start, "This keeps no rows.", "keep one at least.", PlanError)
        is_read = _is_read(name, select, own, span)
        frame = _select(body, scope, is_final=False, limit=(item, kept, is_read))
        return frame if is_read else replace(frame, unread=name.lower())
    return None


def _is_read(name: str, select: Select, own: Span, condition: Span) -> bool:
    """Whether a SELECT reads a row's number, besides by the condition on it."""
    inside = [(own.first, own.stop), (condition.first, condition.stop)]
    for item in select.items:
        if item.is_star and name.lower() not in [each.lower() for each in item.left_out]:
            return True
        if item.is_star:
            inside.append((item.span.first, item.span.stop))
    return any(
        token.name.lower() == name.lower()
        for at, token in enumerate(select.span.tokens, select.span.first)
        if not any(first <= at < stop for first, stop in inside)
    )


def _changes(frame: QueryRows, item: ChangedRows) -> QueryRows:
    if not frame.is_table:
        raise SqlRefusal(
            item.span.start,
            "A stream only inserts, so it is its own changes.",
            "leave out CHANGES OF.",
            StreamOnly,
        )
    with located(item.span):
        rows: Any = _visible_rows(frame, item.span).rows
        return QueryRows.of(rows.changes(), item.alias)


def _searched(item: SearchedRows, scope: QueryScope, select: Select) -> QueryRows:
    documents = _visible_rows(_from(item.documents, scope, select, []), item.span)
    queries = _visible_rows(_from(item.queries, scope, select, []), item.span)
    options = dict(item.options)
    for needed in ("query", "text"):
        if needed not in options:
            raise SqlRefusal(
                item.span.start,
                f"SEARCH has no {needed} =>.",
                "write SEARCH(documents, queries, query => query, text => (title, body)): the"
                " column with the queries' texts, and the columns that are searched.",
                PlanError,
            )
    rows: Any = documents.rows
    with located(item.span):
        try:
            return QueryRows.of(rows.search(queries.rows, **options), item.alias)
        except TypeError as error:
            raise SqlRefusal(
                item.span.start,
                f"SEARCH cannot be called so: {str(error).partition('() ')[2] or error}.",
                "its options are those of Stream.search.",
                PlanError,
            ) from None


def _matched(item: MatchedRows, scope: QueryScope, select: Select) -> QueryRows:
    from headrace.sql.matches import matches

    source = _visible_rows(_from(item.rows, scope, select, []), item.span)
    if source.is_table:
        raise SqlRefusal(
            item.span.start,
            "Patterns are sequences of events, and a table's row that changes is not one.",
            "match its changes: FROM CHANGES OF name MATCH_RECOGNIZE (…).",
            StreamOnly,
        )
    return QueryRows.of(matches(source.rows, item), item.alias)  # type: ignore[arg-type]


def _visible_rows(frame: QueryRows, span: Span) -> QueryRows:
    """Rows with the visible columns and no others, which an operation over whole rows needs."""
    if frame.window is not None:
        raise SqlRefusal(
            span.start,
            "Rows in windows are aggregated before anything else: GROUP BY window_start,"
            " window_end.",
            kind=PlanError,
        )
    names = frame.rows.schema.names
    if [each.actual for each in frame.columns] == names == [each.name for each in frame.columns]:
        return frame
    item = SelectItem(span, is_star=True)
    columns = output_columns(frame, (item,), {})
    return selected(frame, columns, span, is_final=True)


def _exploded(frame: QueryRows, clause: ExplodeClause) -> QueryRows:
    column = frame.column_of(clause.column, "a column with a list or a map")
    position = None
    names = clause.names
    if clause.has_position:
        position, names = (names[0], names[1:]) if names else ("pos", ())
    rows: Any = frame.rows
    with located(clause.span):
        exploded = rows.explode(column, *names, position=position, outer=clause.is_outer)
    kept = tuple(each for each in frame.columns if each.actual in exploded.schema.names)
    known = {each.actual for each in kept}
    added = tuple(
        VisibleColumn(name, name, clause.alias)
        for name in exploded.schema.names
        if name not in known and name not in frame.rows.schema.names
    )
    return replace(frame, rows=exploded, columns=(*kept, *added))
