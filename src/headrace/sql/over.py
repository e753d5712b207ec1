"""Functions OVER rows: the first rows of each group, by ROW_NUMBER() OVER (…) <= n, and functions
over frames of a stream's rows.

    ROW_NUMBER() OVER (PARTITION BY region ORDER BY amount DESC) <= 3    top(3, by=…, per="region")
    ROW_NUMBER() OVER (PARTITION BY user ORDER BY placed_at DESC) = 1    last(per="user")
    SUM(amount) OVER (PARTITION BY user ORDER BY placed_at
                      RANGE BETWEEN INTERVAL 1 HOUR PRECEDING AND CURRENT ROW)
        over("user", range="1 hour").aggregate(…)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import PlanError, StreamOnly
from headrace.operators import row_functions
from headrace.operators.aggregates import functions as agg
from headrace.sql.calls import AGGREGATES, SqlCall, aggregate_spec, function_calls
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.query_parser import order_items
from headrace.sql.scope import QueryRows, Replaced, normal_text, unused_name
from headrace.sql.script import NUMBER, Span
from headrace.sql.syntax import OrderItem, Select, SelectItem

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table

_RANKS = frozenset({"ROW_NUMBER", "RANK", "DENSE_RANK"})
_FUNCTIONS = _RANKS | {"LAG", "LEAD", "FIRST_VALUE", "LAST_VALUE"}


@dataclass(frozen=True)
class OverClause:
    """What stands in the brackets of OVER."""

    span: Span
    partition: tuple[Span, ...] = ()
    order: tuple[OrderItem, ...] = ()
    rows: int | None = None
    range: str | None = None
    has_frame: bool = False


@dataclass(frozen=True)
class RankLimit:
    """A condition that keeps the first rows: what was counted, and how many are kept."""

    call: SqlCall
    count: int
    name: str | None
    """The column with the row's number, if the query reads it elsewhere, too."""


def over_clause(call: SqlCall, named: Sequence[tuple[str, Span]]) -> OverClause:
    """Read OVER (PARTITION BY … ORDER BY … frame)."""
    span = call.over
    if span is None:
        windows = dict(named)
        name = str(call.over_name).lower()
        if name not in windows:
            raise SqlRefusal(
                call.span.start,
                f"There is no window {call.over_name!r}.",
                "declare it: WINDOW w AS (PARTITION BY … ORDER BY …) behind FROM and WHERE.",
                PlanError,
            )
        span = windows[name]
    cursor = Cursor(span)
    partition: tuple[Span, ...] = ()
    order: tuple[OrderItem, ...] = ()
    if cursor.take("PARTITION"):
        cursor.expect("BY")
        partition = tuple(cursor.until({"ORDER", "ROWS", "RANGE"}).split())
    if cursor.take("ORDER"):
        cursor.expect("BY")
        order = order_items(cursor.until({"ROWS", "RANGE"}))
    offset = cursor.offset
    kind = cursor.take_one(("ROWS", "RANGE"))
    if kind is None:
        cursor.finish("PARTITION BY, ORDER BY, ROWS or RANGE", ("PARTITION", "ORDER", "ROWS"))
        return OverClause(span, partition, order)
    rows, range_ = _frame(cursor, kind, offset)
    return OverClause(span, partition, order, rows, range_, has_frame=True)


def _frame(cursor: Cursor, kind: str, offset: int) -> tuple[int | None, str | None]:
    """The rows of a frame, or how far back in time it goes. Both are None for all rows so far."""
    fix = (
        "write ROWS BETWEEN 9 PRECEDING AND CURRENT ROW, or RANGE BETWEEN INTERVAL 1 HOUR PRECEDING"
        " AND CURRENT ROW."
    )
    has_between = cursor.take("BETWEEN")
    rows: int | None = None
    range_: str | None = None
    is_unbounded = cursor.take("UNBOUNDED")
    if not is_unbounded:
        if kind == "ROWS":
            rows = cursor.integer("a number of rows") + 1
        else:
            range_ = cursor.interval()
    cursor.expect("PRECEDING", fix=fix)
    if has_between:
        cursor.expect("AND", fix=fix)
        if not cursor.take("CURRENT", "ROW"):
            raise SqlRefusal(
                cursor.offset,
                "A frame ends with the row itself: rows behind it are not there when it is"
                " emitted.",
                "end with AND CURRENT ROW; a row behind is read with lead(column, 1, within =>"
                " INTERVAL 1 HOUR).",
                PlanError,
            )
    cursor.finish("')'")
    if is_unbounded and kind == "RANGE":
        raise SqlRefusal(
            offset,
            "RANGE UNBOUNDED PRECEDING has all rows of one time at once, and rows are looked at one"
            " by one.",
            "write ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW.",
            PlanError,
        )
    return rows, range_


# The first rows


def numbered_item(select: Select) -> tuple[SelectItem, SqlCall] | None:
    """The item of a SELECT that is a ROW_NUMBER() OVER (…) with a name, if there is one."""
    for item in select.items:
        if item.name is None or item.is_star:
            continue
        calls = list(function_calls(item.span))
        if len(calls) == 1 and calls[0].is_over and calls[0].name in _RANKS:
            span = item.span.unwrapped()
            if (calls[0].span.first, calls[0].span.stop) == (span.first, span.stop):
                return item, calls[0]
    return None


def limit_of(condition: Span, name: str, table: str) -> int | None:
    """How many rows a condition such as `n <= 3` keeps; None if it is none of a row's number."""
    span = condition.unwrapped()
    tokens = list(span.tokens)
    if len(tokens) >= 3 and tokens[0].kind == NUMBER:  # 3 >= n
        flipped = {">=": "<=", ">": "<", "=": "=", "==": "="}.get(tokens[1].text)
        if flipped is None:
            return None
        number, sign, words = tokens[0], flipped, tokens[2:]
    elif len(tokens) >= 3 and tokens[-1].kind == NUMBER:
        number, sign, words = tokens[-1], tokens[-2].text, tokens[:-2]
    else:
        return None
    names = [token.name.lower() for token in words if token.text != "."]
    if names not in ([name.lower()], [table.lower(), name.lower()]) or not number.text.isdigit():
        return None
    return _count(sign, int(number.text))


def _count(sign: str, number: int) -> int | None:
    if sign == "<=":
        return number
    if sign == "<":
        return number - 1
    return 1 if sign in {"=", "=="} and number == 1 else None


def inline_limit(condition: Span) -> tuple[SqlCall, int] | None:
    """The call and the count of `ROW_NUMBER() OVER (…) <= 3` itself, as QUALIFY has it."""
    span = condition.unwrapped()
    calls = [call for call in function_calls(span) if call.is_over and call.name in _RANKS]
    if len(calls) != 1 or calls[0].span.first != span.first:
        return None
    rest = Span(span.script, calls[0].span.stop, span.stop).tokens
    if len(rest) != 2 or rest[1].kind != NUMBER or not rest[1].text.isdigit():
        return None
    count = _count(rest[0].text, int(rest[1].text))
    return None if count is None else (calls[0], count)


def first_rows(
    frame: QueryRows, limit: RankLimit, select: Select, replaced: Mapping[int, tuple[int, str]]
) -> QueryRows:
    """The first rows of each group of a frame; with their numbers if they are read."""
    call = limit.call
    if call.name != "ROW_NUMBER":
        raise SqlRefusal(
            call.span.start,
            f"{call.name}() <= {limit.count} keeps any number of rows that are equal.",
            "number them: ROW_NUMBER() OVER (…), with a further column in ORDER BY for rows that"
            " are equal.",
            PlanError,
        )
    clause = over_clause(call, select.windows)
    if not clause.order:
        raise SqlRefusal(
            call.span.start,
            "ROW_NUMBER() has no ORDER BY, so that any rows could be the first.",
            "write ROW_NUMBER() OVER (PARTITION BY … ORDER BY …).",
            PlanError,
        )
    frame, per = _columns(frame, clause.partition, replaced)
    frame, by = _columns(frame, [item.span for item in clause.order], replaced)
    ways = [item.is_descending for item in clause.order]
    texts = [f"{name} {'DESC' if way else 'ASC'}" for name, way in zip(by, ways, strict=True)]
    rows: Any = frame.rows
    with located(call.span):
        if frame.is_table:
            if limit.name is not None:
                raise SqlRefusal(
                    call.span.start,
                    "The number of a table's row is not kept: each row that comes in would change"
                    " those of all rows behind it.",
                    f"leave {limit.name!r} out of the outer SELECT, and order when you read.",
                    StreamOnly,
                )
            return frame.with_rows(rows.top(limit.count, by=texts, per=per or None))
        if limit.name is None and limit.count == 1 and per:
            if len(by) == 1 and ways[0]:
                return frame.with_rows(
                    rows.last(per=per, by=None if by[0] == frame.time else by[0])
                )
            single = by[0] == frame.time if len(by) == 1 else False
            ordered = by[0] if len(by) == 1 else texts
            return frame.with_rows(rows.first(per=per, by=None if single else ordered))
        name = limit.name or _unused(frame, "rank")
        top: Table = rows.top(limit.count, by=texts, per=per or None, rank=name)
    return frame.with_rows(top)


def _unused(frame: QueryRows, wanted: str) -> str:
    return unused_name(wanted, frame.rows.schema.names)


def _columns(
    frame: QueryRows, spans: Sequence[Span], replaced: Mapping[int, tuple[int, str]]
) -> tuple[QueryRows, list[str]]:
    """The columns that expressions are; those that are none become columns."""
    from headrace.expressions.literals import quoted_name

    names = []
    for span in spans:
        compiled = frame.compiled(span, replaced)
        name = compiled.column
        if name is None:
            name = _unused(frame, "ordered_by")
            with located(span):
                rows = frame.rows.with_columns(f"{compiled.text} AS {quoted_name(name)}")
            frame = frame.with_rows(rows)
        names.append(name)
    return frame, names


# Functions over frames


def over_frames(
    frame: QueryRows, calls: Sequence[tuple[SqlCall, str | None]], select: Select
) -> tuple[QueryRows, Replaced]:
    """Rows with the results of functions over frames.

    Args:
        frame: The rows, which are a stream.
        calls: The calls, each with the name that its result has in the query, if any.
        select: The SELECT, for its named windows.

    Returns:
        The rows with these columns, and which call became which column.
    """
    replaced: Replaced = {}
    if frame.is_table:
        raise SqlRefusal(
            calls[0][0].span.start,
            "OVER is for streams: a row of a table that changes would change the results of all"
            " rows behind it.",
            "keep the first rows with ROW_NUMBER() OVER (…) <= n, or aggregate with GROUP BY; or go"
            " by the changes: FROM CHANGES OF name.",
            StreamOnly,
        )
    groups: dict[Any, list[tuple[SqlCall, str | None, OverClause]]] = {}
    for call, name in calls:
        clause = over_clause(call, select.windows)
        groups.setdefault(_frame_key(frame, clause, call), []).append((call, name, clause))
    for members in groups.values():
        frame = _with_frame(frame, members, replaced)
    return frame, replaced


def _frame_key(frame: QueryRows, clause: OverClause, call: SqlCall) -> Any:
    by = tuple(frame.column_of(span) for span in clause.partition)
    order = tuple((frame.column_of(item.span), item.is_descending) for item in clause.order)
    has_frame = call.name not in _FUNCTIONS or clause.has_frame
    return by, order, (clause.rows, clause.range) if has_frame else None


def _with_frame(
    frame: QueryRows,
    members: Sequence[tuple[SqlCall, str | None, OverClause]],
    replaced: Replaced,
) -> QueryRows:
    call, _, clause = members[0]
    by = [frame.column_of(span) for span in clause.partition]
    order = [(frame.column_of(item.span), item.is_descending) for item in clause.order]
    if not order:
        raise SqlRefusal(
            call.span.start,
            f"{call.name.lower()}(…) OVER has no ORDER BY, so that it would go by all rows of its"
            " partition, of which more will come.",
            f"order by the event time: ORDER BY {frame.time or 'placed_at'} ROWS BETWEEN UNBOUNDED"
            " PRECEDING AND CURRENT ROW; or aggregate with GROUP BY.",
            PlanError,
        )
    if frame.time is None or order[0] != (frame.time, False):
        raise SqlRefusal(
            clause.order[0].span.start,
            f"Rows are taken in the order of their event time, which is {frame.time or 'missing'}:"
            " a result by another order would change with every row that comes in before.",
            f"write ORDER BY {frame.time}, and further columns behind it."
            if frame.time
            else "declare an event time: CREATE TOPIC … WITH (event_time = …).",
            PlanError,
        )
    results: dict[str, Any] = {}
    names: list[tuple[SqlCall, str]] = []
    for each, wanted, own in members:
        name = _unused(frame, wanted or each.name.lower())
        while name in results or name in {"name", "errors"}:
            name += "_"
        results[name] = _function(each, own, frame)
        names.append((each, name))
    rows: Stream = frame.rows  # type: ignore[assignment]
    ties = [f"{name} desc" if descending else name for name, descending in order[1:]]
    with located(call.span):
        framed = rows.over(
            by or None, order_by=ties, rows=clause.rows, range=clause.range
        ).aggregate(**results)
    for each, name in names:
        replaced[each.span.first] = (each.span.stop, name)
    return frame.with_rows(framed)


def _function(call: SqlCall, clause: OverClause, frame: QueryRows) -> Any:
    with located(call.span):
        if call.name in _RANKS:
            return getattr(row_functions, call.name.lower())()
        if call.name in {"LAG", "LEAD"}:
            return _neighbour(call, frame)
        if call.name not in AGGREGATES:
            raise SqlRefusal(
                call.span.start,
                f"{call.name.lower()} is no function over rows.",
                f"there is {', '.join(sorted(_FUNCTIONS)).lower()}, and every aggregate.",
                PlanError,
            )
        if not clause.has_frame and call.name not in {"FIRST_VALUE", "FIRST"}:
            raise SqlRefusal(
                call.span.start,
                f"{call.name.lower()}(…) OVER has no frame: without one, SQL takes all rows of one"
                " time at once, and rows are looked at one by one.",
                "add ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW, for all rows so far.",
                PlanError,
            )
        if call.name in {"FIRST_VALUE", "LAST_VALUE", "FIRST", "LAST"}:
            text = frame.compiled(call.arguments).text
            make = agg.first if call.name.startswith("FIRST") else agg.last
            return make(text, ignore_nulls=call.ignores_nulls)
        return aggregate_spec(call, frame)


def _neighbour(call: SqlCall, frame: QueryRows) -> Any:
    """lag(column[, offset]) and lead(column[, offset], within => INTERVAL …)."""
    parts = call.arguments.split()
    column = frame.compiled(parts[0]).text
    offset, within = 1, None
    for part in parts[1:]:
        cursor = Cursor(part)
        if cursor.sees("WITHIN", "=>"):
            cursor.at += 2
            within = cursor.value()
        else:
            offset = cursor.integer("how many rows away")
        cursor.finish("')'")
    if call.name == "LAG":
        return row_functions.lag(column, offset)
    if within is None:
        raise SqlRefusal(
            call.span.start,
            "lead(…) waits for a row that may never come.",
            "say how long: lead(column, 1, within => INTERVAL 1 HOUR).",
            PlanError,
        )
    return row_functions.lead(column, offset, within=within)


# In a SELECT


def numbered_rows(
    frame: QueryRows,
    select: Select,
    items: tuple[SelectItem, ...],
    replaced: Replaced,
    limit: tuple[SelectItem, int, bool] | None,
) -> tuple[QueryRows, tuple[SelectItem, ...], list[Span]]:
    """The first rows of each group, where a query outside or QUALIFY keeps these; and the other
    conditions of QUALIFY.
    """
    filters = [] if select.qualify is None else select.qualify.conjuncts()
    if limit is not None:
        item, kept, is_read = limit
        (call,) = function_calls(item.span)
        frame = first_rows(
            frame, RankLimit(call, kept, item.name if is_read else None), select, replaced
        )
        if is_read:
            replaced[call.span.first] = (call.span.stop, str(item.name))
            return frame, items, filters
        items = tuple(each for each in items if each is not item)
        return frame, items, filters
    numbered = numbered_item(select)
    for span in list(filters):
        inline = inline_limit(span)
        if inline is not None:
            call, kept = inline
            name = None
            if numbered is not None and normal_text(numbered[1].span) == normal_text(call.span):
                name = str(numbered[0].name)
        elif numbered is not None and (found := limit_of(span, str(numbered[0].name), "")):
            call, kept, name = numbered[1], found, str(numbered[0].name)
        else:
            continue
        filters.remove(span)
        frame = first_rows(frame, RankLimit(call, kept, name), select, replaced)
        if name is not None and numbered is not None:
            replaced[numbered[1].span.first] = (numbered[1].span.stop, name)
        break
    return frame, items, filters


def framed_rows(
    frame: QueryRows,
    select: Select,
    items: Sequence[SelectItem],
    filters: Sequence[Span],
    replaced: Replaced,
) -> QueryRows:
    """Rows with the results of functions over frames."""
    calls: list[tuple[SqlCall, str | None]] = []
    for item in items:
        if item.is_star:
            continue
        span = item.span.unwrapped()
        for call in function_calls(span):
            if call.is_over and call.span.first not in replaced:
                is_whole = (call.span.first, call.span.stop) == (span.first, span.stop)
                calls.append((call, item.name if is_whole else None))
    for span in filters:
        calls += [(call, None) for call in function_calls(span) if call.is_over]
    if not calls:
        return frame
    for call, _ in calls:
        over_clause(call, select.windows)
    frame, added = over_frames(frame, calls, select)
    replaced.update(added)
    return frame
