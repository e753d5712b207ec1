"""GROUP BY: groups, windows and aggregates, as `group_by(…)` and `aggregate(…)` take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import PlanError
from headrace.expressions.literals import quoted_name
from headrace.sql.calls import (
    SqlCall,
    aggregate_spec,
    default_name,
    function_calls,
    refuse_unknown_aggregates,
)
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.scope import QueryRows, Replaced, VisibleColumn, normal_text, unused_name
from headrace.sql.script import NUMBER, Span
from headrace.sql.subqueries import refuse_subqueries
from headrace.sql.syntax import Select, SelectItem
from headrace.sql.windows import BOUNDS, late_rows, window_spec

EVERYTHING = "everything"
"""The key of an aggregate over all rows."""
_ARGUMENT_NAMES = frozenset({"name", "errors", "ttl"})
"""Arguments of `aggregate`, which are no columns there."""


def grouped(frame: QueryRows, select: Select) -> tuple[QueryRows, Replaced]:
    """Aggregated rows, and which calls became which columns. Rows that are not aggregated stay."""
    calls = list(_aggregate_calls(select))
    has_groups = select.group is not None or select.groups_all
    if not calls and not has_groups:
        if frame.window is not None:
            raise SqlRefusal(
                frame.window.span.start,
                f"{frame.window.function} puts rows into windows, and nothing is computed of them.",
                "aggregate: SELECT window_start, window_end, count(*) AS n FROM …"
                " GROUP BY window_start, window_end.",
                PlanError,
            )
        return frame, {}
    groups, replaced, bounds = _groups(frame, select)
    if frame.window is not None and not bounds:
        raise SqlRefusal(
            frame.window.span.start,
            f"{frame.window.function} puts rows into windows, and GROUP BY has no window.",
            "write GROUP BY window_start, window_end, and other columns behind them.",
            PlanError,
        )
    specs: dict[str, Any] = {}
    aggregated: dict[Any, str] = {}
    taken = {*(group.name for group in groups), *BOUNDS, EVERYTHING}
    aliases = _call_aliases(select)
    for call in calls:
        spec = aggregate_spec(call, frame)
        same = repr(spec)
        key = (same, aliases.get(call.span.first))
        name = aggregated.get(key) or (aggregated.get((same, None)) if key[1] is None else None)
        if name is None and key[1] is None:
            name = next((known for (other, _), known in aggregated.items() if other == same), None)
        if name is None:
            wanted = aliases.get(call.span.first) or default_name(call)
            while wanted in _ARGUMENT_NAMES or wanted.startswith("_"):
                wanted = f"{wanted}_".lstrip("_") or "value"
            name = unused_name(wanted, [*taken, *specs])
            specs[name] = spec
            aggregated[key] = name
        replaced[call.span.first] = (call.span.stop, name)
    return _aggregated(frame, select, groups, specs, bounds), replaced


@dataclass(frozen=True)
class _Group:
    """A column of GROUP BY: its name in the result, what the query calls it, and its text."""

    name: str
    text: str
    visible: VisibleColumn


def _groups(frame: QueryRows, select: Select) -> tuple[list[_Group], Replaced, bool]:
    """The columns that make a group, the items of SELECT that are one of them, and whether windows
    are among them.
    """
    spans: list[tuple[Span, SelectItem | None]] = []
    if select.groups_all:
        spans += [
            (each.span.unwrapped(), each)
            for each in select.items
            if not each.is_star and not any(True for _ in function_calls(each.span))
        ]
    spans += [_group_item(frame, span, select) for span in select.group or ()]
    groups: list[_Group] = []
    replaced: Replaced = {}
    bounds = False
    for span, item in spans:
        for call in function_calls(span):
            raise SqlRefusal(
                call.span.start,
                "GROUP BY goes by values of single rows, not by aggregates.",
                "compute the aggregate in a query in FROM, and group by its column.",
                PlanError,
            )
        refuse_subqueries(span)
        compiled = frame.compiled(span, what="a column")
        if frame.window is not None and compiled.column in BOUNDS:
            bounds = True
            continue
        if compiled.column is not None:
            name = compiled.column
            visible = _visible(frame, name, compiled.name or name)
            text = name
        else:
            same = [
                each
                for each in select.items
                if not each.is_star and normal_text(each.span) == normal_text(span)
            ]
            of_group = item or next(iter(same), None)
            name = (of_group and of_group.name) or f"group_{len(groups) + 1}"
            name = unused_name(name, [group.name for group in groups])
            visible = VisibleColumn(name, name)
            text = f"{compiled.text} AS {quoted_name(name)}"
            for each in same:
                replaced[each.span.first] = (each.span.stop, name)
        if name not in [group.name for group in groups]:
            groups.append(_Group(name, text, visible))
    return groups, replaced, bounds


def _visible(frame: QueryRows, column: str, name: str) -> VisibleColumn:
    """How a query names a column that it groups by."""
    tables = [each.table for each in frame.columns if each.actual == column]
    tables += [table for (table, _), copy in frame.copies.items() if copy == column]
    return VisibleColumn(name, column, tables[0] if tables else "")


def _group_item(frame: QueryRows, span: Span, select: Select) -> tuple[Span, SelectItem | None]:
    """What a part of GROUP BY is: an expression, or the name or the number of an item of SELECT."""
    tokens = span.tokens
    if len(tokens) == 1 and tokens[0].kind == NUMBER:
        number = int(tokens[0].text) if tokens[0].text.isdigit() else 0
        if not 1 <= number <= len(select.items):
            raise SqlRefusal(
                span.start,
                f"GROUP BY {tokens[0].text}: SELECT has {len(select.items)} columns.",
                kind=PlanError,
            )
        item = select.items[number - 1]
        return item.span.unwrapped(), item
    if len(tokens) == 1 and not frame.find(tokens[0].name):
        for item in select.items:
            if item.name is not None and item.name.lower() == tokens[0].name.lower():
                return item.span.unwrapped(), item
    return span, None


def _aggregate_calls(select: Select) -> Iterator[SqlCall]:
    """The aggregates of a SELECT, also those that functions OVER rows go by."""
    spans = [item.span for item in select.items if not item.is_star]
    spans += [span for span in (select.having, select.qualify) if span is not None]
    for span in spans:
        refuse_unknown_aggregates(span)
        yield from _plain_calls(span)


def _plain_calls(span: Span) -> Iterator[SqlCall]:
    for call in function_calls(span):
        if not call.is_over:
            yield call
        else:
            for inside in (call.arguments, call.over):
                if inside:
                    yield from _plain_calls(inside)


def _call_aliases(select: Select) -> dict[int, str]:
    """The names of aggregates that are a column of SELECT by themselves, by their first token."""
    aliases: dict[int, str] = {}
    for item in select.items:
        span = item.span.unwrapped()
        if item.name is None or item.is_star:
            continue
        for call in function_calls(span):
            if (call.span.first, call.span.stop) == (span.first, span.stop):
                aliases[call.span.first] = item.name
    return aliases


def _aggregated(
    frame: QueryRows, select: Select, groups: Sequence[_Group], specs: dict[str, Any], bounds: bool
) -> QueryRows:
    """The aggregate, and what can be named behind it."""
    texts = [group.text for group in groups]
    names = [group.name for group in groups]
    rows: Any = frame.rows
    window = frame.window
    with located(select.span if window is None else window.span):
        if window is None and not specs and frame.is_table and texts == names:
            table = rows.distinct(*names)
        elif window is None:
            specs = specs or counted_rows(names)
            table = (rows.group_by(*texts) if texts else rows).aggregate(**specs)
        else:
            windows = rows.window(
                window_spec(window), late=late_rows(select.late), emit=select.emit or "final"
            )
            windows = windows.group_by(*texts) if texts else windows
            table = windows.aggregate(**(specs or counted_rows([*names, *BOUNDS])))
    visible = [group.visible for group in groups]
    visible += [VisibleColumn(name, name) for name in specs]
    if window is not None and bounds:
        visible += [VisibleColumn(name, name, window.alias) for name in BOUNDS]
    reachable = {each.name.lower() for each in visible}
    refused = {
        each.name.lower(): f"{each.name!r} is neither in GROUP BY nor in an aggregate."
        for each in frame.columns
        if each.name.lower() not in reachable
    }
    return QueryRows(table, tuple(visible), refused=refused)


def counted_rows(names: Sequence[str]) -> dict[str, Any]:
    """What is computed of groups of which only the columns are read."""
    from headrace.operators.aggregates import functions as agg

    return {unused_name("count", names): agg.count()}
