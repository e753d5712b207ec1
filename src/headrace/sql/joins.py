"""JOIN: what ON, USING and WHERE say of two sides, as `stream.join` and `table.join` take it.

    ON o.id = p.order_id                              left_on="id", right_on="order_id"
    AND p.paid_at BETWEEN o.placed_at                 before="0 seconds"
                      AND o.placed_at + INTERVAL 1 HOUR   after="1 hour"
    AND p.paid_at <= o.expires                        until="expires"
    AND p.amount > 0                                  where(…), behind an inner join

Two streams need such a bound. A stream with a table is looked up as of each row's tick, and two
tables are joined with every change of either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import BadDuration, PlanError, StreamOnly
from headrace.expressions.expression import parse_expression
from headrace.expressions.literals import quoted_name
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.scope import Compiled, QueryRows, VisibleColumn, unused_name
from headrace.sql.script import Span
from headrace.sql.subqueries import refuse_subqueries
from headrace.sql.syntax import JoinClause
from headrace.types.schema import type_name

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table

_COMPARISONS = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "==": "=="}
"""The comparisons, and what each is with its sides exchanged."""
_WIDTHS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_NAMES = ("TINYINT", "SMALLINT", "INT", "BIGINT")


@dataclass
class JoinCondition:
    """What is said of the rows of both sides."""

    left_on: list[Compiled]
    right_on: list[Compiled]
    lower_us: int | None = None
    """The right row is at least this much later than the left one."""
    upper_us: int | None = None
    since: str | None = None
    until: str | None = None
    behind: list[Span] | None = None
    """Conditions that are checked of the joined rows."""
    of_left: list[Span] | None = None
    of_right: list[Span] | None = None


def join(
    left: QueryRows, clause: JoinClause, right: QueryRows, where: list[Span], query: Span
) -> QueryRows:
    """Join two sides.

    Args:
        left: What was there before.
        clause: The join.
        right: The rows behind JOIN.
        where: The conditions of WHERE. Those that this join uses are removed.
        query: The SELECT, for the names that it reads.
    """
    for side, name in ((left, "left"), (right, "right")):
        if side.window is not None:
            raise SqlRefusal(
                side.window.span.start,
                f"The {name} side of the join is windows that are not aggregated.",
                "aggregate them in a query of their own: FROM (SELECT … GROUP BY window_start,"
                " window_end) AS w JOIN ….",
                PlanError,
            )
    kind = "inner" if clause.kind == "cross" else clause.kind
    if left.is_table and not right.is_table:
        swapped = {"inner": "inner", "right": "left"}.get(kind)
        if swapped is None:
            raise SqlRefusal(
                clause.span.start,
                f"A table is joined with a stream, {kind.upper()}: rows of the table alone have no"
                " time at which they are emitted.",
                "begin with the stream: FROM the stream LEFT JOIN the table; or make a table of the"
                " stream with GROUP BY, or ROW_NUMBER() OVER (…) = 1.",
                StreamOnly,
            )
        joined = join(right, replace(clause, kind=swapped), left, where, query)
        first = {(each.table, each.name) for each in left.columns}
        columns = sorted(joined.columns, key=lambda each: (each.table, each.name) not in first)
        return replace(joined, columns=tuple(columns))
    if not left.is_table and right.is_table and kind in {"right", "full"}:
        raise SqlRefusal(
            clause.span.start,
            f"A stream is joined with a table, {kind.upper()}: rows of the table alone have no time"
            " at which they are emitted.",
            "use JOIN or LEFT JOIN; or make a table of the stream with GROUP BY.",
            StreamOnly,
        )
    condition = _condition(left, clause, right, where, kind)
    left, right = _filtered(left, condition.of_left), _filtered(right, condition.of_right)
    if not condition.left_on:
        raise SqlRefusal(
            clause.span.start,
            "No column of one side is equal to one of the other, so that every row would meet every"
            " other one.",
            "say what is equal: JOIN … ON a.id = b.id.",
            PlanError,
        )
    left, right, copies = _with_copies(left, right, condition, kind, query)
    options = _bounds(left, right, condition, clause)
    left_on, right_on = _comparable(left, right, condition, clause)
    suffix, columns = _result_columns(left, right, (left_on, right_on), clause)
    other: Any = right.rows
    as_of = getattr(clause.item, "as_of", None)
    if as_of is not None:
        other = _as_of(left, right, as_of)
    with located(clause.span):
        rows: Stream | Table = left.rows.join(
            other,
            left_on=left_on,
            right_on=right_on,
            how=kind,
            suffix=suffix,
            **options,
        )
    names = {name.lower(): name for name in rows.schema.names}
    visible = tuple(each for each in columns if each.actual.lower() in names)
    frame = QueryRows(rows, visible, copies={**left.copies, **copies})
    for span in condition.behind or ():
        with located(span):
            frame = frame.with_rows(frame.rows.where(frame.compiled(span).text))
    return frame


def _filtered(side: QueryRows, conditions: Sequence[Span] | None) -> QueryRows:
    for span in conditions or ():
        with located(span):
            side = side.with_rows(side.rows.where(side.compiled(span).text))
    return side


# Conditions


def _condition(
    left: QueryRows, clause: JoinClause, right: QueryRows, where: list[Span], kind: str
) -> JoinCondition:
    condition = JoinCondition([], [], behind=[], of_left=[], of_right=[])
    for name in clause.using:
        left_name = left.resolve(name, None, clause.span.start)
        right_name = right.resolve(name, None, clause.span.start)
        condition.left_on.append(_plain(left_name))
        condition.right_on.append(_plain(right_name))
    of_streams = not left.is_table and not right.is_table
    for span in clause.on.conjuncts() if clause.on is not None else ():
        refuse_subqueries(span)
        if _equality(span, left, right, condition):
            continue
        if of_streams and _bound(span, left, right, condition):
            continue
        _residual(span, left, right, condition, kind)
    if kind == "inner":
        for span in list(where):
            taken = (
                clause.on is None and not clause.using and _equality(span, left, right, condition)
            )
            if taken or (of_streams and _bound(span, left, right, condition)):
                where.remove(span)
    return condition


def _plain(column: VisibleColumn) -> Compiled:
    return Compiled(column.actual, frozenset({column.actual}), column.actual, column.name)


def _residual(
    span: Span, left: QueryRows, right: QueryRows, condition: JoinCondition, kind: str
) -> None:
    """A condition that is neither an equality nor a bound."""
    if kind == "inner":
        assert condition.behind is not None
        condition.behind.append(span)
        return
    if kind == "left" and _tried(right, span) is not None:
        assert condition.of_right is not None
        condition.of_right.append(span)
        return
    if kind == "right" and _tried(left, span) is not None:
        assert condition.of_left is not None
        condition.of_left.append(span)
        return
    for side in (left, right):  # raises for names that are on neither side
        if _tried(side, span) is not None:
            break
    raise SqlRefusal(
        span.start,
        f"{span.text()!r} is a condition of a {kind.upper()} JOIN that is neither an equality nor a"
        " bound of time: whether a row has a partner would have to be found by comparing all.",
        "filter a side before: JOIN (SELECT … FROM … WHERE …) AS x ON …; or use an inner join.",
        PlanError,
    )


def _tried(frame: QueryRows, span: Span) -> Compiled | None:
    """The expression over a side, if the side has all that it reads."""
    try:
        return frame.compiled(span)
    except SqlRefusal:
        return None


def _comparison(span: Span) -> tuple[Span, str, Span] | None:
    """The two sides of a comparison, and its sign."""
    span = span.unwrapped()
    tokens = span.script.tokens
    signs = [at for at in span.top_level() if tokens[at].text in _COMPARISONS]
    if len(signs) != 1:
        return None
    at = signs[0]
    return Span(span.script, span.first, at), tokens[at].text, Span(span.script, at + 1, span.stop)


def _equality(span: Span, left: QueryRows, right: QueryRows, condition: JoinCondition) -> bool:
    """Take note of what is equal on both sides, if the condition says that."""
    sides = _comparison(span)
    if sides is None or sides[1] not in {"=", "=="} or not sides[0] or not sides[2]:
        return False
    for a, b in ((sides[0], sides[2]), (sides[2], sides[0])):
        of_left, of_right = _tried(left, a), _tried(right, b)
        if of_left is not None and of_right is not None and of_left.reads and of_right.reads:
            if _tried(right, a) is not None or _tried(left, b) is not None:
                _refuse_ambiguous(a, b, left, right)
            condition.left_on.append(of_left)
            condition.right_on.append(of_right)
            return True
    return False


def _refuse_ambiguous(a: Span, b: Span, left: QueryRows, right: QueryRows) -> None:
    """Raise if a side of an equality could belong to either side of the join."""
    for span in (a, b):
        if _tried(left, span) is not None and _tried(right, span) is not None:
            raise SqlRefusal(
                span.start,
                f"{span.text()!r} could belong to either side of the join.",
                "say which: a.id = b.id, or USING (id).",
                PlanError,
            )


# Bounds of time


def _bound(span: Span, left: QueryRows, right: QueryRows, condition: JoinCondition) -> bool:
    """Take note of how far apart rows may be in time, if the condition says that."""
    span = span.unwrapped()
    tokens = span.script.tokens
    top = span.top_level()
    between = [at for at in top if tokens[at].upper == "BETWEEN"]
    if between:
        ands = [at for at in top if tokens[at].upper == "AND" and at > between[0]]
        if len(between) != 1 or len(ands) != 1 or tokens[between[0] - 1].upper == "NOT":
            return False
        value = Span(span.script, span.first, between[0])
        low = Span(span.script, between[0] + 1, ands[0])
        high = Span(span.script, ands[0] + 1, span.stop)
        noted = replace(condition)
        if _compared(value, ">=", low, left, right, noted) and _compared(
            value, "<=", high, left, right, noted
        ):
            vars(condition).update(vars(noted))
            return True
        return False
    sides = _comparison(span)
    if sides is None or sides[1] in {"=", "=="}:
        return False
    return _compared(*sides, left, right, condition)


def _compared(
    a: Span, sign: str, b: Span, left: QueryRows, right: QueryRows, condition: JoinCondition
) -> bool:
    """Take note of a bound `a sign b`. Returns whether it is one."""
    a_time, a_shift = _shifted(a)
    b_time, b_shift = _shifted(b)
    for of_right, of_left, comparison, shift in (
        (a_time, b_time, sign, b_shift - a_shift),
        (b_time, a_time, _COMPARISONS[sign], a_shift - b_shift),
    ):
        if not _is_time(right, of_right, left):
            continue
        if _is_time(left, of_left, right):
            distance = shift + right.time_shift_us - left.time_shift_us
            if comparison in {">", ">="}:
                lower = distance + (1 if comparison == ">" else 0)
                condition.lower_us = max(lower, condition.lower_us or lower)
            else:
                upper = distance - (1 if comparison == "<" else 0)
                condition.upper_us = (
                    upper if condition.upper_us is None else min(upper, condition.upper_us)
                )
            return True
        other = b if of_right is a_time else a
        shifted = a_shift if of_right is a_time else b_shift
        expression = _tried(left, other)
        if expression is None or not expression.reads or shifted or comparison not in {"<=", ">="}:
            continue
        argument = "since" if comparison == ">=" else "until"
        if getattr(condition, argument) is not None:
            continue
        setattr(condition, argument, expression.text)
        return True
    return False


def _shifted(span: Span) -> tuple[Span, int]:
    """A time and what is added to it: `t + INTERVAL 1 HOUR` is t, and an hour in microseconds."""
    span = span.unwrapped()
    tokens = span.script.tokens
    shift = 0
    while True:
        starts = [
            at
            for at in span.top_level()
            if tokens[at].text in {"+", "-"}
            and at > span.first
            and at + 1 < span.stop
            and tokens[at + 1].upper == "INTERVAL"
        ]
        if not starts:
            return span.unwrapped(), shift
        cursor = Cursor(Span(span.script, starts[-1] + 1, span.stop))
        try:
            us = to_us(cursor.interval())
        except (SqlRefusal, BadDuration):
            return span, shift
        if not cursor.is_done:
            return span, shift
        shift += us if tokens[starts[-1]].text == "+" else -us
        span = Span(span.script, span.first, starts[-1]).unwrapped()


def _is_time(frame: QueryRows, span: Span, other: QueryRows) -> bool:
    """Whether an expression is the event time of a side, and of no other."""
    if frame.time is None:
        return False
    compiled = _tried(frame, span)
    if compiled is None or compiled.column != frame.time:
        return False
    return _tried(other, span) is None


def _bounds(
    left: QueryRows, right: QueryRows, condition: JoinCondition, clause: JoinClause
) -> dict[str, Any]:
    """The bounds as `stream.join` takes them."""
    if left.is_table or right.is_table:
        return {}
    since, until = condition.since, condition.until
    has_low = condition.lower_us is not None
    has_high = condition.upper_us is not None or until is not None
    if not has_low or not has_high:
        a, b = _alias(left), _alias(right)
        left_time, right_time = left.time or "time", right.time or "time"
        missing = "bound" if not has_low and not has_high else "earliest" if has_high else "latest"
        reason = (
            "Two streams are joined without a bound of time: every row would have to be kept for"
            " ever."
            if missing == "bound"
            else f"The join of two streams has no {missing} time for the right row: rows would have"
            " to be kept for ever."
        )
        for side, time in ((left, left.time), (right, right.time)):
            if time is None:
                raise SqlRefusal(
                    clause.span.start,
                    f"Two streams are joined, and {side.rows.step.path} has no event time.",
                    "declare it: CREATE TOPIC … WITH (event_time = 'placed_at'), and keep that"
                    " column in queries in FROM.",
                    PlanError,
                )
        raise SqlRefusal(
            clause.span.start,
            reason,
            f"add AND {b}.{right_time} BETWEEN {a}.{left_time} - INTERVAL 1 HOUR AND"
            f" {a}.{left_time} + INTERVAL 1 HOUR; or join a table, which keeps its newest rows.",
            PlanError,
        )
    options: dict[str, Any] = {"before": _duration(-(condition.lower_us or 0))}
    if condition.upper_us is not None:
        options["after"] = _duration(condition.upper_us)
    if since is not None:
        options["since"] = since
    if until is not None:
        options["until"] = until
    return options


def _duration(us: int) -> str:
    return f"{'-' if us < 0 else ''}{abs(us)} microseconds"


def _alias(frame: QueryRows) -> str:
    return next((each.table for each in frame.columns if each.table), "a")


# Columns


def _comparable(
    left: QueryRows, right: QueryRows, condition: JoinCondition, clause: JoinClause
) -> tuple[list[str], list[str]]:
    """What is equal on both sides, as texts of one type. Whole numbers are widened."""
    lefts, rights = [], []
    for of_left, of_right in zip(condition.left_on, condition.right_on, strict=True):
        with located(clause.span):
            a = parse_expression(of_left.text, left.rows.schema, where="join").type
            b = parse_expression(of_right.text, right.rows.schema, where="join").type
        a_text, b_text = of_left.text, of_right.text
        if a != b:
            if a in _WIDTHS and b in _WIDTHS:
                if _WIDTHS.index(a) < _WIDTHS.index(b):
                    a_text = f"CAST({_quoted(of_left)} AS {_NAMES[_WIDTHS.index(b)]})"
                else:
                    b_text = f"CAST({_quoted(of_right)} AS {_NAMES[_WIDTHS.index(a)]})"
            elif a is not None and b is not None:
                raise SqlRefusal(
                    clause.span.start,
                    f"{of_left.text!r}, which is {type_name(a)}, is compared with"
                    f" {of_right.text!r}, which is {type_name(b)}.",
                    f"convert one of them: ON CAST({of_left.text} AS {type_name(b)}) = ….",
                    PlanError,
                )
        lefts.append(a_text)
        rights.append(b_text)
    return lefts, rights


def _quoted(compiled: Compiled) -> str:
    return compiled.text if compiled.column is None else quoted_name(compiled.column)


def _with_copies(
    left: QueryRows, right: QueryRows, condition: JoinCondition, kind: str, query: Span
) -> tuple[QueryRows, QueryRows, dict[tuple[str, str], str]]:
    """Both sides of an outer join, with copies of columns that the join merges with those of the
    other side although the query reads them by their side: `b.id IS NULL` finds rows without a
    partner.
    """
    copies: dict[tuple[str, str], str] = {}
    pairs = list(zip(condition.left_on, condition.right_on, strict=True))
    merged_right = [b.column for a, b in pairs if a.column is not None and a.column == b.column]
    merged_left: list[str | None] = []
    renamed: set[str] = set()
    if kind in {"right", "full"}:
        merged_left = [a.column for a, _ in pairs]
        # The join's column has the other side's value where a row has no partner, and SQL's has
        # none: under one name they are one column, as with USING; under two, each is its own.
        renamed = {a.column for a, b in pairs if a.column is not None and a.column != b.column}
        if not left.is_table:
            merged_left.append(left.time)
    if kind not in {"left", "full"}:
        merged_right = []
    for columns, is_left in ((merged_left, True), (merged_right, False)):
        side = left if is_left else right
        for column in dict.fromkeys(each for each in columns if each is not None):
            for visible in [each for each in side.columns if each.actual == column]:
                is_own = is_left and column in renamed
                if not is_own and not (visible.table and _is_qualified(query, visible)):
                    continue
                name = unused_name(
                    f"{visible.table}_{column}",
                    [*left.rows.schema.names, *right.rows.schema.names],
                )
                rows = side.rows.with_columns(f"{quoted_name(column)} AS {quoted_name(name)}")
                side = side.with_rows(rows)
                if is_own:
                    own = replace(visible, actual=name)
                    columns_of_side = (own if each is visible else each for each in side.columns)
                    side = replace(side, columns=tuple(columns_of_side))
                copies[visible.table.lower(), visible.name.lower()] = name
        if is_left:
            left = side
        else:
            right = side
    return left, right, copies


def _is_qualified(query: Span, column: VisibleColumn) -> bool:
    """Whether a query reads a column by its table's name, but in a join's own condition."""
    tokens = query.tokens
    in_on = False
    for at in range(len(tokens) - 2):
        word = tokens[at].upper
        if word == "ON":
            in_on = True
        elif word in {"WHERE", "GROUP", "HAVING", "SELECT", "JOIN", "QUALIFY"}:
            in_on = False
        if (
            not in_on
            and tokens[at + 1].text == "."
            and tokens[at].name.lower() == column.table.lower()
            and tokens[at + 2].name.lower() == column.name.lower()
        ):
            return True
    return False


def _result_columns(
    left: QueryRows, right: QueryRows, on: tuple[list[str], list[str]], clause: JoinClause
) -> tuple[str | None, list[VisibleColumn]]:
    """The suffix of columns of the right side whose names the left one has, too, and the visible
    columns of the result. A pair that is joined on under one name is one column.
    """
    shared = {b for a, b in zip(*on, strict=True) if a == b and b in right.rows.schema.names}
    left_names = {name.lower() for name in left.rows.schema.names}
    right_names = [name for name in right.rows.schema.names if name not in shared]
    clashing = [name for name in right_names if name.lower() in left_names]
    suffix = None
    if clashing:
        suffix = f"_{clause.item.alias}" if clause.item.alias else "_right"
        taken = left_names | {name.lower() for name in right_names}
        while any(f"{name}{suffix}".lower() in taken for name in clashing):
            suffix += "_"
    renamed = {name: f"{name}{suffix}" for name in clashing}
    of_right = (
        replace(each, actual=renamed.get(each.actual, each.actual)) for each in right.columns
    )
    return suffix, [*left.columns, *of_right]


def _as_of(left: QueryRows, right: QueryRows, span: Span) -> Any:
    """The table as of the stream's event time."""
    column = left.column_of(span, "the stream's event time")
    if left.is_table or column != left.time:
        raise SqlRefusal(
            span.start,
            f"FOR SYSTEM_TIME AS OF {span.text()}: a table is looked up as of the event time of the"
            f" stream before it, which is {left.time or 'none'}.",
            f"write AS OF {_alias(left)}.{left.time}."
            if left.time
            else "declare an event time: CREATE TOPIC … WITH (event_time = …).",
            PlanError,
        )
    if not right.is_table:
        raise SqlRefusal(
            span.start,
            "Only a table has versions, and this is a stream.",
            "declare it with CREATE TABLE … WITH (event_time = …, history = '30 days').",
            StreamOnly,
        )
    table: Any = right.rows
    with located(span):
        return table.as_of(column)
