"""Conditions with a query in them: IN and EXISTS, which are semi-joins.

WHERE customer_id IN (SELECT customer_id FROM vips)
    join(vips.distinct("customer_id"), on="customer_id")
WHERE NOT EXISTS (SELECT 1 FROM returns_of r WHERE r.order_id = o.order_id)
    join(…with_columns(found="true"), how="left").where("found IS NULL")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.errors import PlanError, StreamOnly
from headrace.expressions.literals import quoted_name
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.query_parser import parse_query
from headrace.sql.scope import Compiled, QueryRows, unused_name
from headrace.sql.script import Span
from headrace.sql.syntax import JoinClause, QueryTree, Select, SelectItem

if TYPE_CHECKING:
    from headrace.pipeline.stream import Table

_STARTS = frozenset({"SELECT", "WITH"})


@dataclass(frozen=True)
class SubqueryFilter:
    """A condition that is `value [NOT] IN (query)` or `[NOT] EXISTS (query)`."""

    span: Span
    query: QueryTree | None
    value: Span | None
    is_negated: bool


def subquery_filter(span: Span) -> SubqueryFilter | None:
    """The condition as a filter by a query; None if it is none."""
    span = span.unwrapped()
    cursor = Cursor(span)
    is_negated = cursor.take("NOT")
    if cursor.take("EXISTS"):
        inside = cursor.brackets()
        if not cursor.is_done:
            return None
        return SubqueryFilter(span, parse_query(inside), None, is_negated)
    tokens = span.script.tokens
    for at in span.top_level():
        if tokens[at].upper != "IN" or at + 2 >= span.stop:
            continue
        if tokens[at + 1].text != "(" or tokens[at + 2].upper not in _STARTS:
            continue
        stop = at
        if tokens[at - 1].upper == "NOT":
            is_negated, stop = True, at - 1
        behind = Cursor(Span(span.script, at + 1, span.stop))
        inside = behind.brackets()
        if not behind.is_done:
            return None
        value = Span(span.script, span.first, stop)
        return SubqueryFilter(span, parse_query(inside), value, is_negated)
    return None


def refuse_subqueries(span: Span) -> None:
    """Raise if an expression has a query in it, other than a condition of its own."""
    tokens = span.script.tokens
    for at in range(span.first, span.stop - 1):
        if tokens[at].text == "(" and tokens[at + 1].upper in _STARTS:
            raise SqlRefusal(
                tokens[at].start,
                "A query stands inside an expression, which is computed of one row.",
                "join it: FROM … JOIN (SELECT …) AS x ON …; IN and EXISTS can stand in WHERE,"
                " connected by AND.",
                PlanError,
            )


def filtered(
    frame: QueryRows, filter_: SubqueryFilter, compile_: Callable[[QueryTree], QueryRows]
) -> QueryRows:
    """The rows of a frame that have a partner in a query, or none."""
    if frame.window is not None:
        raise SqlRefusal(
            filter_.span.start,
            "Rows are filtered by a query before they are put into windows.",
            "filter them in a query of their own: TUMBLE((SELECT … WHERE …), time, …).",
            PlanError,
        )
    if filter_.value is not None:
        if filter_.is_negated:
            raise SqlRefusal(
                filter_.span.start,
                "NOT IN (SELECT …) is true of no row as soon as the query has a null.",
                "say what is meant with NOT EXISTS (SELECT 1 FROM … WHERE inner.id = outer.id).",
                PlanError,
            )
        assert filter_.query is not None
        inner = compile_(filter_.query)
        if len(inner.columns) != 1:
            raise SqlRefusal(
                filter_.query.span.start,
                f"IN compares one column, and this query has {len(inner.columns)}.",
                "select one; or use EXISTS.",
                PlanError,
            )
        outer_on = [frame.compiled(filter_.value)]
        column = inner.columns[0].actual
        inner_on = [Compiled(column, frozenset({column}), column, column)]
    else:
        inner, outer_on, inner_on = _correlated(frame, filter_, compile_)
    partners, names = _partners(frame, inner, inner_on, filter_)
    return _semi_joined(frame, partners, outer_on, names, filter_)


def semi_join(frame: QueryRows, clause: JoinClause, right: QueryRows) -> QueryRows:
    """LEFT SEMI JOIN and LEFT ANTI JOIN: the rows that have a partner, or none."""
    filter_ = SubqueryFilter(clause.span, None, None, clause.kind == "anti")
    outer_on: list[Compiled] = []
    inner_on: list[Compiled] = []
    for name in clause.using:
        for side, on in ((frame, outer_on), (right, inner_on)):
            column = side.resolve(name, None, clause.span.start).actual
            on.append(Compiled(column, frozenset({column}), column, column))
    for span in clause.on.conjuncts() if clause.on is not None else ():
        try:
            condition = right.compiled(span)
        except SqlRefusal as refusal:
            outer, own = _compared(frame, right, span, refusal)
            outer_on.append(outer)
            inner_on.append(own)
        else:
            with located(span):
                right = right.with_rows(right.rows.where(condition.text))
    if not outer_on:
        raise SqlRefusal(
            clause.span.start,
            "No column of one side is equal to one of the other.",
            "say what is equal: LEFT SEMI JOIN … ON a.id = b.id.",
            PlanError,
        )
    partners, names = _partners(frame, right, inner_on, filter_)
    return _semi_joined(frame, partners, outer_on, names, filter_)


def _correlated(
    frame: QueryRows, filter_: SubqueryFilter, compile_: Callable[[QueryTree], QueryRows]
) -> tuple[QueryRows, list[Compiled], list[Compiled]]:
    """The rows of the query of EXISTS without its conditions on the outer row, and what these
    compare: expressions of the outer row, and of the inner one.
    """
    query = filter_.query
    assert query is not None
    body = query.body
    if (
        not isinstance(body, Select)
        or query.order
        or query.limit is not None
        or body.group is not None
        or body.groups_all
        or body.having is not None
        or body.qualify is not None
    ):
        raise SqlRefusal(
            query.span.start,
            "EXISTS takes a plain SELECT … FROM … WHERE ….",
            "put what it computes into a query in its FROM.",
            PlanError,
        )
    everything = SelectItem(body.span, is_star=True)
    bare = replace(body, items=(everything,), where=None, is_distinct=False)
    inner = compile_(replace(query, body=bare))
    alias = getattr(body.source, "alias", "")
    if not body.joins:
        inner = inner.under(alias)
    outer_on: list[Compiled] = []
    inner_on: list[Compiled] = []
    for span in body.where.conjuncts() if body.where is not None else ():
        refuse_subqueries(span)
        try:
            condition = inner.compiled(span)
        except SqlRefusal as refusal:
            outer, own = _compared(frame, inner, span, refusal)
            outer_on.append(outer)
            inner_on.append(own)
        else:
            with located(span):
                inner = inner.with_rows(inner.rows.where(condition.text))
    if not outer_on:
        raise SqlRefusal(
            query.span.start,
            "This query does not depend on the row outside, so that all rows would come and go at"
            " once.",
            "compare a column of each: WHERE inner.id = outer.id.",
            PlanError,
        )
    return inner, outer_on, inner_on


def _compared(
    frame: QueryRows, inner: QueryRows, span: Span, refusal: SqlRefusal
) -> tuple[Compiled, Compiled]:
    """The outer and the inner side of an equality."""
    span = span.unwrapped()
    tokens = span.script.tokens
    signs = [at for at in span.top_level() if tokens[at].text in {"=", "=="}]
    if len(signs) == 1:
        a = Span(span.script, span.first, signs[0])
        b = Span(span.script, signs[0] + 1, span.stop)
        for outer_span, inner_span in ((a, b), (b, a)):
            try:
                return frame.compiled(outer_span), inner.compiled(inner_span)
            except SqlRefusal:
                continue
        raise refusal
    try:
        _joined_names(frame, inner).compiled(span)
    except SqlRefusal:
        raise refusal from None
    raise SqlRefusal(
        span.start,
        "The rows of EXISTS are found by what is equal, and this compares otherwise.",
        "compare columns of both with =, and others with a JOIN.",
        PlanError,
    )


def _joined_names(frame: QueryRows, inner: QueryRows) -> QueryRows:
    return replace(inner, columns=(*inner.columns, *frame.columns))


def _partners(
    frame: QueryRows, inner: QueryRows, on: list[Compiled], filter_: SubqueryFilter
) -> tuple[Table, list[str]]:
    """The different values by which the rows of a query are found, as a table, and its columns."""
    if not inner.is_table and not frame.is_table:
        raise SqlRefusal(
            filter_.span.start,
            "A stream is filtered by another stream, of which rows may still come: whether a row"
            " has a partner is never certain.",
            "join them with a bound of time, or make a table of the other one: GROUP BY, or"
            " ROW_NUMBER() OVER (…) = 1.",
            StreamOnly,
        )
    rows: Any = inner.rows
    names = []
    with located(filter_.span):
        for number, compiled in enumerate(on):
            name = compiled.column
            if name is None:
                name = unused_name(f"in_{number}", rows.schema.names)
                rows = rows.with_columns(f"{compiled.text} AS {quoted_name(name)}")
            names.append(name)
        unique = list(dict.fromkeys(names))
        if not inner.is_table:
            from headrace.operators.aggregates import functions as agg

            counted = {unused_name("count", unique): agg.count()}
            return rows.group_by(*unique).aggregate(**counted).select(*unique), names
        return rows.distinct(*unique), names


def _semi_joined(
    frame: QueryRows,
    partners: Any,
    outer_on: list[Compiled],
    names: list[str],
    filter_: SubqueryFilter,
) -> QueryRows:
    rows: Any = frame.rows
    taken = {name.lower() for name in rows.schema.names}
    with located(filter_.span):
        found = unused_name("found", [*taken, *partners.schema.names])
        if filter_.is_negated:
            partners = partners.with_columns(f"true AS {quoted_name(found)}")
        shared = {b for a, b in zip(outer_on, names, strict=True) if a.column == b}
        clashing = [
            name for name in partners.schema.names if name not in shared and name.lower() in taken
        ]
        suffix = None
        if clashing:
            suffix = "_in"
            while any(f"{name}{suffix}".lower() in taken for name in clashing):
                suffix += "_"
        joined = rows.join(
            partners,
            left_on=[each.text for each in outer_on],
            right_on=names,
            how="left" if filter_.is_negated else "inner",
            suffix=suffix,
        )
        if filter_.is_negated:
            joined = joined.where(f"{quoted_name(found)} IS NULL")
    return frame.with_rows(joined)
