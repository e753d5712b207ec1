"""Reads a query: SELECT with its clauses, WITH, UNION, ORDER BY … LIMIT, and what stands in FROM.

    query   [WITH name AS (query), …] part [UNION [ALL] part …] [ORDER BY … LIMIT n]
    part    SELECT … | (query)
    FROM    name | (query) | TUMBLE(…) | HOP(…) | SESSION(…) | SLIDE(…) | CHANGES OF name
            | SEARCH(documents, queries, …) | item MATCH_RECOGNIZE (…)

Behind HAVING stand EMIT CHANGES | FINAL and LATE CORRECT INTERVAL … | DROP | DIVERT TO topic.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal
from headrace.sql.script import NUMBER, QUOTED, STRING, WORD, Span
from headrace.sql.syntax import (
    ChangedRows,
    DerivedRows,
    ExplodeClause,
    FromItem,
    JoinClause,
    LateClause,
    MatchedRows,
    NamedRows,
    OrderItem,
    QueryTree,
    SearchedRows,
    Select,
    SelectItem,
    Union,
    WindowCall,
)

MAX_NESTED = 40
"""How many queries may be nested."""
MAX_COLUMNS = 2_000
MAX_JOINS = 50
MAX_TABLES = 100
"""How many tables one WITH may name."""
WINDOW_FUNCTIONS = {"TUMBLE": 1, "HOP": 2, "SESSION": 1, "SLIDE": 1}
"""The windows, and how many durations each takes."""
_JOIN_WORDS = frozenset({"JOIN", "INNER", "LEFT", "RIGHT", "FULL", "CROSS", "LATERAL", "NATURAL"})
_CLAUSES = (
    "FROM",
    "WHERE",
    "GROUP",
    "HAVING",
    "QUALIFY",
    "WINDOW",
    "EMIT",
    "LATE",
    "UNION",
    "INTERSECT",
    "EXCEPT",
    "MINUS",
    "ORDER",
    "LIMIT",
    "OFFSET",
)
_ENDS = frozenset(_CLAUSES)
_NO_ALIAS = _ENDS | _JOIN_WORDS | {"ON", "USING", "FOR", "MATCH_RECOGNIZE", "AS", "TABLESAMPLE"}
_ENDS_AN_EXPRESSION = frozenset({")", "]", "END", "TRUE", "FALSE", "NULL"})


def parse_query(span: Span) -> QueryTree:
    """Read a query that is the whole of a span."""
    cursor = Cursor(span)
    query = _Parser(cursor).query()
    cursor.finish("the end of the query", known=_CLAUSES)
    return query


def read_query(cursor: Cursor) -> QueryTree:
    """Read a query from a cursor, and leave the cursor behind it."""
    return _Parser(cursor).query()


class _Parser:
    def __init__(self, cursor: Cursor, depth: int = 0) -> None:
        self.cursor = cursor
        self.depth = depth
        if depth > MAX_NESTED:
            raise SqlRefusal(
                cursor.offset,
                f"More than {MAX_NESTED} queries are nested here.",
                "name them: WITH name AS (SELECT …), or CREATE TEMPORARY VIEW.",
            )

    def _inside(self, span: Span) -> QueryTree:
        """The query in brackets."""
        cursor = Cursor(span)
        if cursor.is_done:
            cursor.fail("SELECT")
        query = _Parser(cursor, self.depth + 1).query()
        cursor.finish("the end of the query in brackets", known=_CLAUSES)
        return query

    # Queries

    def query(self) -> QueryTree:
        cursor, first = self.cursor, self.cursor.at
        tables = []
        if cursor.take("WITH"):
            if cursor.sees("RECURSIVE"):
                raise SqlRefusal(
                    cursor.offset,
                    "WITH RECURSIVE has no incremental meaning here: a row would have to be"
                    " retracted along paths that are not kept.",
                    "join a bounded number of levels: JOIN edges AS e1 … JOIN edges AS e2 ….",
                )
            while True:
                name = cursor.name("the name of a common table expression")
                cursor.expect("AS", fix="write WITH name AS (SELECT …) SELECT … FROM name.")
                tables.append((name, self._inside(cursor.brackets("(SELECT …)"))))
                if len(tables) > MAX_TABLES:
                    raise SqlRefusal(
                        cursor.offset,
                        f"This WITH names more than {MAX_TABLES} tables.",
                        "declare some of them before: CREATE TEMPORARY VIEW name AS SELECT ….",
                    )
                if not cursor.take(","):
                    break
        body = self._union()
        order = self._order()
        limit_offset = cursor.offset
        limit = cursor.integer("the number of rows") if cursor.take("LIMIT") else None
        if cursor.sees("OFFSET"):
            raise SqlRefusal(
                cursor.offset,
                "OFFSET has no incremental meaning: every row that comes would move all rows"
                " behind it.",
                "keep the first rows with ORDER BY … LIMIT n, and skip some when you read them.",
            )
        span = Span(cursor.script, first, cursor.at)
        return QueryTree(span, body, tuple(tables), order, limit, limit_offset)

    def _union(self) -> Select | Union | QueryTree:
        cursor, first = self.cursor, self.cursor.at
        parts = [self._part()]
        kinds: set[bool] = set()
        while True:
            offset = cursor.offset
            if word := cursor.take_one(("INTERSECT", "EXCEPT", "MINUS")):
                exists = "EXISTS" if word == "INTERSECT" else "NOT EXISTS"
                raise SqlRefusal(
                    offset,
                    f"{word} compares whole rows, for which there is no step.",
                    f"say by what columns: {exists} (…), with b.id = a.id in its WHERE.",
                )
            if not cursor.take("UNION"):
                break
            is_all = cursor.take("ALL")
            if not is_all:
                cursor.take("DISTINCT")
            kinds.add(not is_all)
            if len(kinds) > 1:
                raise SqlRefusal(
                    offset,
                    "UNION and UNION ALL are mixed.",
                    "put one of them in brackets: (SELECT … UNION SELECT …) UNION ALL SELECT ….",
                )
            parts.append(self._part())
        if len(parts) == 1:
            return parts[0]
        span = Span(cursor.script, first, cursor.at)
        return Union(
            span,
            tuple(
                part if isinstance(part, QueryTree) else QueryTree(part.span, part)
                for part in parts
            ),
            is_distinct=True in kinds,
        )

    def _part(self) -> Select | QueryTree:
        cursor = self.cursor
        if cursor.token.text == "(":
            return self._inside(cursor.brackets())
        if cursor.sees("VALUES"):
            raise SqlRefusal(
                cursor.offset,
                "VALUES are rows that no topic has.",
                "write them to a topic, with INSERT INTO topic VALUES (…), and read that.",
            )
        if cursor.sees("TABLE") and cursor.peek().kind in {WORD, QUOTED}:
            cursor.at += 1
            item = self._named()
            everything = SelectItem(item.span, is_star=True)
            return Select(item.span, (everything,), is_distinct=False, source=item)
        return self._select()

    def _order(self) -> tuple[OrderItem, ...]:
        cursor = self.cursor
        if not cursor.take("ORDER"):
            return ()
        cursor.expect("BY")
        return order_items(cursor.until({"LIMIT", "OFFSET", "UNION"}))

    def _select(self) -> Select:
        cursor, first = self.cursor, self.cursor.at
        cursor.expect("SELECT", fix="write SELECT columns FROM rows.")
        is_distinct = cursor.take("DISTINCT")
        if not is_distinct:
            cursor.take("ALL")
        first_item = cursor.at
        cursor.until(_ENDS)
        while cursor.sees("EXCEPT", "(") and cursor.peek(-1).text == "*":  # of `* EXCEPT (a, b)`
            cursor.at += 1
            cursor.until(_ENDS)
        list_span = Span(cursor.script, first_item, cursor.at)
        if not list_span:
            cursor.fail("a column", fix="name the columns, or write * for all.")
        parts = list_span.split()
        if len(parts) > MAX_COLUMNS:
            raise SqlRefusal(
                parts[MAX_COLUMNS].start,
                f"This SELECT has {len(parts):,} columns, and may have {MAX_COLUMNS:,}.",
                "split it; a list or a map has any number of values.",
            )
        items = tuple(_select_item(part) for part in parts)
        if not cursor.take("FROM"):
            cursor.fail(
                "FROM", known=_CLAUSES, fix="say which rows: SELECT … FROM a topic, table or view."
            )
        source = self._from_item()
        joins = self._joins()
        clauses: dict[str, Span] = {}
        group: tuple[Span, ...] | None = None
        groups_all = False
        windows: tuple[tuple[str, Span], ...] = ()
        emit, emit_offset, late = None, 0, None
        while word := cursor.take_one(
            ("WHERE", "GROUP", "HAVING", "QUALIFY", "WINDOW", "EMIT", "LATE")
        ):
            offset = cursor.script.tokens[cursor.at - 1].start
            if word in clauses or (word == "EMIT" and emit) or (word == "LATE" and late):
                raise SqlRefusal(offset, f"{word} is there twice.", "leave one of them out.")
            if word == "GROUP":
                cursor.expect("BY")
                group_span = cursor.until(_ENDS)
                groups_all = len(group_span) == 1 and group_span.tokens[0].upper == "ALL"
                group = () if groups_all else _groups(group_span)
                clauses[word] = group_span
            elif word == "WINDOW":
                windows = self._named_windows()
            elif word == "EMIT":
                emit = cursor.expect_one(
                    ("CHANGES", "FINAL"),
                    fix=(
                        "EMIT FINAL emits a window once it is complete, EMIT CHANGES at every"
                        " change."
                    ),
                ).lower()
                emit_offset = offset
            elif word == "LATE":
                late = self._late(offset)
            else:
                clauses[word] = cursor.until(_ENDS)
                if not clauses[word]:
                    cursor.fail("a condition")
        return Select(
            span=Span(cursor.script, first, cursor.at),
            items=items,
            is_distinct=is_distinct,
            source=source,
            joins=joins,
            where=clauses.get("WHERE"),
            group=group,
            groups_all=groups_all,
            having=clauses.get("HAVING"),
            qualify=clauses.get("QUALIFY"),
            emit=emit,
            emit_offset=emit_offset,
            late=late,
            windows=windows,
        )

    def _named_windows(self) -> tuple[tuple[str, Span], ...]:
        """The windows of a WINDOW clause: WINDOW w AS (PARTITION BY …)."""
        cursor, windows = self.cursor, []
        while True:
            name = cursor.name("the window's name")
            cursor.expect("AS")
            windows.append((name.lower(), cursor.brackets()))
            if not cursor.take(","):
                return tuple(windows)

    def _late(self, offset: int) -> LateClause:
        cursor = self.cursor
        fix = "write LATE CORRECT INTERVAL '1' HOUR, LATE DROP or LATE DIVERT TO topic."
        word = cursor.expect_one(("CORRECT", "DROP", "DIVERT"), fix=fix)
        if word == "CORRECT":
            return LateClause(offset, "correct", cursor.interval())
        if word == "DIVERT":
            cursor.expect("TO", fix=fix)
            return LateClause(offset, "divert", cursor.path("a topic"))
        return LateClause(offset, "drop")

    # FROM

    def _joins(self) -> tuple[JoinClause | ExplodeClause, ...]:
        cursor = self.cursor
        joins: list[JoinClause | ExplodeClause] = []
        while True:
            first = cursor.at
            if len(joins) > MAX_JOINS:
                raise SqlRefusal(
                    cursor.offset,
                    f"This SELECT has more than {MAX_JOINS} joins.",
                    "join some of them before: CREATE TEMPORARY VIEW name AS SELECT … JOIN ….",
                )
            if cursor.take(","):
                item = self._from_item()
                joins.append(JoinClause(Span(cursor.script, first, cursor.at), "cross", item))
                continue
            if cursor.sees("LATERAL", "VIEW"):
                joins.append(self._explode())
                continue
            kind = self._join_kind()
            if kind is None:
                return tuple(joins)
            item = self._from_item()
            on: Span | None = None
            using: tuple[str, ...] = ()
            if cursor.take("ON"):
                on = cursor.until(_ENDS | _JOIN_WORDS | {","})
                if not on:
                    cursor.fail("a condition")
            elif cursor.take("USING"):
                using = tuple(cursor.names_in_brackets())
            elif kind != "cross":
                cursor.fail(
                    "ON or USING",
                    fix="say what is equal on both sides: ON a.id = b.id, USING (id).",
                )
            joins.append(JoinClause(Span(cursor.script, first, cursor.at), kind, item, on, using))

    def _join_kind(self) -> str | None:
        cursor = self.cursor
        if cursor.sees("NATURAL"):
            raise SqlRefusal(
                cursor.offset,
                "NATURAL JOIN would join other columns when one is added.",
                "name the columns: JOIN … USING (id).",
            )
        if cursor.take("JOIN") or cursor.take("INNER", "JOIN"):
            return "inner"
        if cursor.take("CROSS", "JOIN"):
            return "cross"
        for word in ("LEFT", "RIGHT", "FULL"):
            if cursor.take(word):
                kind = word.lower()
                if word == "LEFT" and (part := cursor.take_one(("SEMI", "ANTI"))):
                    kind = part.lower()
                else:
                    cursor.take("OUTER")
                cursor.expect("JOIN")
                return kind
        return None

    def _explode(self) -> ExplodeClause:
        cursor, first = self.cursor, self.cursor.at
        cursor.expect("LATERAL", "VIEW")
        is_outer = cursor.take("OUTER")
        fix = "write LATERAL VIEW [OUTER] explode(column) name AS element."
        function = cursor.expect_one(("EXPLODE", "POSEXPLODE"), fix=fix)
        column = cursor.brackets()
        alias = "" if cursor.sees("AS") else cursor.name("a name for the rows")
        names: list[str] = []
        if cursor.take("AS"):
            names.append(cursor.name())
            while cursor.take(","):
                names.append(cursor.name())
        span = Span(cursor.script, first, cursor.at)
        return ExplodeClause(
            span, column, tuple(names), function == "POSEXPLODE", is_outer, alias or "explode"
        )

    def _from_item(self) -> FromItem:
        first = self.cursor.at
        item = self.plain_item()
        while self.cursor.take("MATCH_RECOGNIZE"):
            body = self.cursor.brackets("'(' behind MATCH_RECOGNIZE")
            alias = self._alias() or item.alias
            item = MatchedRows(Span(self.cursor.script, first, self.cursor.at), item, body, alias)
        return item

    def plain_item(self) -> FromItem:
        cursor, first = self.cursor, self.cursor.at

        def span() -> Span:
            return Span(cursor.script, first, cursor.at)

        if cursor.token.text == "(":
            query = self._inside(cursor.brackets())
            return DerivedRows(span(), query, self._alias())
        if cursor.sees("TABLE", "("):  # TABLE(TUMBLE(TABLE rows, DESCRIPTOR(time), …))
            cursor.at += 1
            inner = Cursor(cursor.brackets())
            item = _Parser(inner, self.depth + 1).plain_item()
            inner.finish("')'")
            return _with_alias(item, self._alias())
        if cursor.take("CHANGES", "OF"):
            rows = self.plain_item()
            return ChangedRows(span(), rows, rows.alias)
        if cursor.peek().text == "(":
            function = cursor.token.upper
            if function in WINDOW_FUNCTIONS:
                return self._windowed(function)
            if function == "SEARCH":
                return self._searched()
            raise SqlRefusal(
                cursor.offset,
                f"There is no table function {cursor.token.text!r}.",
                f"there is {', '.join(WINDOW_FUNCTIONS)} and SEARCH.",
            )
        return self._named()

    def _named(self) -> NamedRows:
        cursor, first = self.cursor, self.cursor.at
        cursor.take("STREAM")
        name = cursor.path("a topic, table or view, or a query in brackets")
        as_of = None
        if cursor.take("FOR"):
            cursor.expect(
                "SYSTEM_TIME",
                "AS",
                "OF",
                fix="write JOIN prices FOR SYSTEM_TIME AS OF orders.placed_at ON ….",
            )
            as_of = self._time_of()
        alias = self._alias() or name.rpartition(".")[2]
        return NamedRows(Span(cursor.script, first, cursor.at), name, alias, as_of)

    def _time_of(self) -> Span:
        """The column behind AS OF."""
        cursor, first = self.cursor, self.cursor.at
        cursor.path("a column with a time")
        return Span(cursor.script, first, cursor.at)

    def _alias(self) -> str:
        cursor = self.cursor
        if cursor.take("AS"):
            return cursor.name("a name")
        token = cursor.token
        if token.kind == QUOTED or (token.kind == WORD and token.upper not in _NO_ALIAS):
            return cursor.name()
        return ""

    def _argument(self, cursor: Cursor) -> FromItem:
        """Rows that are the argument of a table function."""
        cursor.take("TABLE")
        return _Parser(cursor, self.depth + 1).plain_item()

    def _windowed(self, function: str) -> WindowCall:
        cursor, first = self.cursor, self.cursor.at
        cursor.at += 1
        fix = {
            "HOP": "write HOP(orders, placed_at, INTERVAL '1' MINUTE, INTERVAL '10' MINUTE): how"
            " often a window begins, and how long it is.",
        }.get(function, f"write {function}(orders, placed_at, INTERVAL '10' MINUTE).")
        inner = Cursor(cursor.brackets())
        rows = self._argument(inner)
        inner.expect(",", fix=fix)
        time = inner.brackets() if inner.take("DESCRIPTOR") else inner.until({","})
        durations = []
        for _ in range(WINDOW_FUNCTIONS[function]):
            inner.expect(",", fix=fix)
            durations.append(_duration(inner, fix))
        options = _options(inner)
        inner.finish("')'")
        alias = self._alias() or rows.alias
        span = Span(cursor.script, first, cursor.at)
        return WindowCall(span, function, rows, time, tuple(durations), options, alias)

    def _searched(self) -> SearchedRows:
        cursor, first = self.cursor, self.cursor.at
        cursor.at += 1
        inner = Cursor(cursor.brackets())
        documents = self._argument(inner)
        inner.expect(",", fix="write SEARCH(documents, queries, query => query, text => title).")
        queries = self._argument(inner)
        options = _options(inner)
        inner.finish("')'")
        alias = self._alias() or documents.alias
        span = Span(cursor.script, first, cursor.at)
        return SearchedRows(span, documents, queries, options, alias)


def _with_alias(item: FromItem, alias: str) -> FromItem:
    return replace(item, alias=alias) if alias else item


def _duration(cursor: Cursor, fix: str) -> str:
    if cursor.token.kind == STRING:
        return cursor.string()
    if not cursor.sees("INTERVAL"):
        cursor.fail("a duration", fix=fix)
    return cursor.interval()


def _options(cursor: Cursor) -> tuple[tuple[str, object], ...]:
    """The named arguments behind others: , name => value."""
    options = []
    while cursor.take(","):
        name = cursor.name("an option").lower()
        if not cursor.take("=>"):
            cursor.expect("=", fix="write options as name => value.")
        options.append((name, cursor.value()))
    return tuple(options)


def _groups(span: Span) -> tuple[Span, ...]:
    """The expressions of GROUP BY."""
    first = span.tokens[0].upper if span else ""
    if first in {"GROUPING", "ROLLUP", "CUBE"} or any(
        token.upper in {"ROLLUP", "CUBE"} for token in span.tokens
    ):
        raise SqlRefusal(
            span.start,
            "Grouping sets would be several tables with different keys in one.",
            "write a query for each, and put them together with UNION ALL and a column that says"
            " which it is.",
        )
    parts = span.split()
    for part in parts:
        if not part:
            raise SqlRefusal(part.start, "An expression was expected here.", "remove the comma.")
    return tuple(part.unwrapped() for part in parts)


def order_items(span: Span) -> tuple[OrderItem, ...]:
    """The columns of an ORDER BY. Null comes last, whichever way."""
    items = []
    for part in span.split():
        tokens = part.tokens
        if not tokens:
            raise SqlRefusal(part.start, "A column was expected here.")
        stop = part.stop
        if len(tokens) > 2 and [each.upper for each in tokens[-2:]] == ["NULLS", "LAST"]:
            stop -= 2
        elif len(tokens) > 2 and [each.upper for each in tokens[-2:]] == ["NULLS", "FIRST"]:
            raise SqlRefusal(
                tokens[-2].start,
                "Rows without a value come last, and NULLS FIRST asks for them first.",
                "leave it out, or order by a column without nulls: coalesce(x, 0) AS x.",
            )
        last = part.script.tokens[stop - 1].upper
        is_descending = last == "DESC"
        if last in {"ASC", "DESC"}:
            stop -= 1
        items.append(OrderItem(Span(part.script, part.first, stop), is_descending))
    return tuple(items)


def _select_item(span: Span) -> SelectItem:
    tokens = span.tokens
    if not tokens:
        raise SqlRefusal(
            span.start, "A column was expected here.", "name one, or remove the comma."
        )
    star = _star(span)
    if star is not None:
        return star
    words = [at for at in span.top_level() if span.script.tokens[at].upper == "AS"]
    if words:
        cursor = Cursor(Span(span.script, words[-1] + 1, span.stop))
        name = cursor.name("a column's name")
        cursor.finish("',' or FROM")
        return SelectItem(Span(span.script, span.first, words[-1]), name)
    last = tokens[-1]
    before = tokens[-2] if len(tokens) > 1 else None
    if (
        before is not None
        and last.kind in {WORD, QUOTED}
        and last.upper not in _ENDS_AN_EXPRESSION
        and last.depth == tokens[0].depth
        and (
            before.upper in _ENDS_AN_EXPRESSION
            or before.kind == QUOTED
            or (before.kind == WORD and before.upper not in _OPERATORS)
            or (before.kind in {NUMBER, STRING} and last.upper.removesuffix("S") not in _TIME_UNITS)
        )
    ):
        return SelectItem(Span(span.script, span.first, span.stop - 1), last.name)
    return SelectItem(span)


_OPERATORS = frozenset({"AND", "OR", "NOT", "IS", "LIKE", "RLIKE", "IN", "BETWEEN", "CASE", "WHEN"})
_TIME_UNITS = frozenset(
    {"YEAR", "MONTH", "WEEK", "DAY", "HOUR", "MINUTE", "SECOND", "MILLISECOND", "MICROSECOND"}
)


def _star(span: Span) -> SelectItem | None:
    """`*` or `name.*`, with EXCEPT (…); None if the item is something else."""
    cursor = Cursor(span)
    star_of = None
    if cursor.token.kind in {WORD, QUOTED} and cursor.peek().text == ".":
        if cursor.peek(2).text != "*":
            return None
        star_of = cursor.name()
        cursor.at += 1
    if not cursor.take("*"):
        return None
    left_out: tuple[str, ...] = ()
    if cursor.take_one(("EXCEPT", "EXCLUDE")):
        left_out = tuple(cursor.names_in_brackets())
    if not cursor.is_done:
        cursor.fail("',' or FROM", fix="write * alone, or * EXCEPT (a, b).")
    return SelectItem(span, is_star=True, star_of=star_of, left_out=left_out)
