"""What a query says, as values: `query_parser` makes them of tokens, `query` compiles them.

Expressions stay spans of the text, which the layers below parse and check.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.sql.script import Span


@dataclass(frozen=True)
class SelectItem:
    """One column of a SELECT list: an expression, `*`, or `name.*`, with what EXCEPT leaves out."""

    span: Span
    name: str | None = None
    is_star: bool = False
    star_of: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedRows:
    """A topic, table, view or common table expression by its name; with FOR SYSTEM_TIME AS OF, as
    of a time.
    """

    span: Span
    name: str
    alias: str
    as_of: Span | None = None


@dataclass(frozen=True)
class DerivedRows:
    """A query in brackets."""

    span: Span
    query: QueryTree
    alias: str


@dataclass(frozen=True)
class WindowCall:
    """TUMBLE, HOP, SESSION or SLIDE over rows: the columns of the rows, window_start and
    window_end.
    """

    span: Span
    function: str
    rows: FromItem
    time: Span
    durations: tuple[str, ...]
    options: tuple[tuple[str, object], ...]
    alias: str


@dataclass(frozen=True)
class ChangedRows:
    """CHANGES OF a table."""

    span: Span
    rows: FromItem
    alias: str


@dataclass(frozen=True)
class SearchedRows:
    """SEARCH(documents, queries, …)."""

    span: Span
    documents: FromItem
    queries: FromItem
    options: tuple[tuple[str, object], ...]
    alias: str


@dataclass(frozen=True)
class MatchedRows:
    """Rows with MATCH_RECOGNIZE ( … ) behind them."""

    span: Span
    rows: FromItem
    body: Span
    alias: str


FromItem = NamedRows | DerivedRows | WindowCall | ChangedRows | SearchedRows | MatchedRows


@dataclass(frozen=True)
class JoinClause:
    """A join with what was there before it. `kind` is inner, left, right, full, cross, semi or
    anti.
    """

    span: Span
    kind: str
    item: FromItem
    on: Span | None = None
    using: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExplodeClause:
    """LATERAL VIEW [OUTER] explode(column) alias AS names."""

    span: Span
    column: Span
    names: tuple[str, ...]
    has_position: bool
    is_outer: bool
    alias: str


@dataclass(frozen=True)
class LateClause:
    """LATE CORRECT INTERVAL '1' HOUR, LATE DROP or LATE DIVERT TO topic."""

    offset: int
    kind: str
    value: str = ""


@dataclass(frozen=True)
class OrderItem:
    """A column of ORDER BY, and whether the largest comes first."""

    span: Span
    is_descending: bool


@dataclass(frozen=True)
class Select:
    """One SELECT."""

    span: Span
    items: tuple[SelectItem, ...]
    is_distinct: bool
    source: FromItem
    joins: tuple[JoinClause | ExplodeClause, ...] = ()
    where: Span | None = None
    group: tuple[Span, ...] | None = None
    groups_all: bool = False
    having: Span | None = None
    qualify: Span | None = None
    emit: str | None = None
    emit_offset: int = 0
    late: LateClause | None = None
    windows: tuple[tuple[str, Span], ...] = ()


@dataclass(frozen=True)
class Union:
    """Queries that UNION or UNION ALL puts together."""

    span: Span
    parts: tuple[QueryTree, ...]
    is_distinct: bool


@dataclass(frozen=True)
class QueryTree:
    """A query: common table expressions, a SELECT or a union, and ORDER BY … LIMIT."""

    span: Span
    body: Select | Union | QueryTree
    tables: tuple[tuple[str, QueryTree], ...] = ()
    order: tuple[OrderItem, ...] = ()
    limit: int | None = None
    limit_offset: int = 0
