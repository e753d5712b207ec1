"""UNION and UNION ALL, as `union(…)` and `distinct(…)` take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.errors import PlanError, StreamOnly
from headrace.sql.groups import counted_rows
from headrace.sql.outputs import OutputColumn, key_left_out
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.scope import QueryRows, VisibleColumn, plain_name, unused_name
from headrace.sql.script import Span
from headrace.sql.syntax import Union


def united(union: Union, frames: list[QueryRows], *, is_final: bool) -> QueryRows:
    """Rows of several queries in one.

    Args:
        union: The union.
        frames: The rows of its queries.
        is_final: Whether they are the rows of the whole query.
    """
    kinds = {frame.is_table for frame in frames}
    if len(kinds) > 1 and union.is_distinct:
        frames = [
            frame if frame.is_table else _distinct_rows(frame, part.span)
            for part, frame in zip(union.parts, frames, strict=True)
        ]
        kinds = {True}
    first = frames[0]
    if len(kinds) > 1:
        at = next(
            part.span.start
            for part, frame in zip(union.parts, frames, strict=True)
            if frame.is_table != first.is_table
        )
        raise SqlRefusal(
            at,
            "A stream and a table are put together: a table changes rows, a stream only inserts.",
            "use FROM CHANGES OF the table, or make a table of the stream with GROUP BY.",
            StreamOnly,
        )
    names = [each.name for each in first.columns]
    for part, frame in zip(union.parts, frames, strict=True):
        if len(frame.columns) != len(names):
            raise SqlRefusal(
                part.span.start,
                f"The queries of this UNION have {len(names)} and {len(frame.columns)} columns.",
                "give all of them the same columns.",
                PlanError,
            )
    if first.is_table and union.is_distinct and not _share_a_key(frames):
        frames = [
            _distinct_rows(frame, part.span)
            for part, frame in zip(union.parts, frames, strict=True)
        ]
    if first.is_table:
        rows_of_all = _union_of_tables(
            union, frames, names, is_final=is_final and not union.is_distinct
        )
    else:
        rows_of_all = _union_of_streams(union, frames, names)
    if not union.is_distinct:
        return rows_of_all
    rows: Any = rows_of_all.rows
    with located(union.span):
        if first.is_table:
            rows = rows.distinct(*names)
        else:
            rows = rows.group_by(*names).aggregate(**counted_rows(names)).select(*names)
    return QueryRows(rows, rows_of_all.columns)


def _share_a_key(frames: Sequence[QueryRows]) -> bool:
    """Whether tables have their keys among their columns, at the same positions."""
    positions = set()
    for frame in frames:
        at = {each.actual: index for index, each in reversed([*enumerate(frame.columns)])}
        if any(name not in at for name in frame.rows.key):
            return False
        positions.add(frozenset(at[name] for name in frame.rows.key))
    return len(positions) == 1


def _distinct_rows(frame: QueryRows, span: Span) -> QueryRows:
    """The different rows of a stream or table, as a table."""
    names = [each.name for each in frame.columns]
    if frame.is_table:
        hidden = [
            name for name in frame.rows.key if name not in {each.actual for each in frame.columns}
        ]
        renamed = [
            OutputColumn(unused_name(name, names), plain_name(name), name) for name in hidden
        ]
        distinct: Any = _renamed(frame, names, span, renamed).rows
        with located(span):
            unique = distinct.distinct(*names)
        return QueryRows(unique, tuple(VisibleColumn(name, name) for name in names))
    rows: Any = _renamed(frame, names, span).rows
    with located(span):
        table = rows.group_by(*names).aggregate(**counted_rows(names)).select(*names)
    return QueryRows(table, tuple(VisibleColumn(name, name) for name in names))


def _union_of_streams(union: Union, frames: Sequence[QueryRows], names: Sequence[str]) -> QueryRows:
    parts = [
        _renamed(frame, names, part.span) for part, frame in zip(union.parts, frames, strict=True)
    ]
    rows: Any = parts[0].rows
    with located(union.span):
        return QueryRows(rows.union(*(part.rows for part in parts[1:])), parts[0].columns)


def _renamed(
    frame: QueryRows, names: Sequence[str], span: Span, more: Sequence[OutputColumn] = ()
) -> QueryRows:
    """Rows with exactly these columns, by position, and more."""
    outputs = [
        OutputColumn(name, plain_name(each.actual), each.actual)
        for name, each in zip(names, frame.columns, strict=True)
    ]
    actual = [each.actual for each in frame.columns]
    if not more and actual == list(names) == frame.rows.schema.names:
        return QueryRows(frame.rows, tuple(VisibleColumn(name, name) for name in names))
    rows: Any = frame.rows
    with located(span):
        selected = rows.select(*(each.item() for each in (*outputs, *more)))
    return QueryRows(selected, tuple(VisibleColumn(name, name) for name in names))


def _union_of_tables(
    union: Union, frames: Sequence[QueryRows], names: Sequence[str], *, is_final: bool
) -> QueryRows:
    """Tables put together. A number says from which of them a row is, so that rows with one key
    stay apart; or a column that is another literal in each.
    """
    keys: list[list[int]] = []
    for part, frame in zip(union.parts, frames, strict=True):
        at = {each.actual: index for index, each in reversed([*enumerate(frame.columns)])}
        missing = [name for name in frame.rows.key if name not in at]
        if missing:
            raise key_left_out(missing, part.span)
        keys.append([at[name] for name in frame.rows.key])
    if any(sorted(key) != sorted(keys[0]) for key in keys):
        raise SqlRefusal(
            union.span.start,
            "The tables of this UNION have different keys.",
            "let the columns that tell rows apart stand at the same positions of each SELECT.",
            PlanError,
        )
    mark = _marks(frames)
    key = [names[index] for index in keys[0]]
    parts = []
    for number, (part, frame) in enumerate(zip(union.parts, frames, strict=True)):
        more: list[OutputColumn] = []
        if mark is None:
            if is_final:
                raise SqlRefusal(
                    union.span.start,
                    "Rows of the tables of this UNION ALL can have the same key, and nothing says"
                    " which is whose.",
                    "add a column that is another literal in each: SELECT 'north' AS side, …"
                    " UNION ALL SELECT 'south' AS side, …; or use UNION, which keeps different"
                    " rows once.",
                    PlanError,
                )
            more.append(OutputColumn(unused_name("union_part", names), str(number), None))
        renamed = _renamed(frame, names, part.span, more)
        tables: Any = renamed.rows
        extra = more[0].name if more else names[mark or 0]
        with located(part.span):
            parts.append(tables.key_by(*key, *([] if extra in key else [extra])))
    with located(union.span):
        rows = parts[0].union(*parts[1:], disjoint=True)
    return QueryRows(rows, tuple(VisibleColumn(name, name) for name in names))


def _marks(frames: Sequence[QueryRows]) -> int | None:
    """The position of a column that is another literal in each part; None if there is none."""
    from headrace.plan.plan import SelectStep

    constants: list[dict[int, str]] = []
    for frame in frames:
        step = frame.rows.step
        if not isinstance(step, SelectStep):
            return None
        texts = dict(step.columns)
        constants.append(
            {
                index: texts[each.actual]
                for index, each in enumerate(frame.columns)
                if _is_literal(texts.get(each.actual, ""))
            }
        )
    for index in constants[0]:
        values = [each.get(index) for each in constants]
        if None not in values and len(set(values)) == len(values):
            return index
    return None


def _is_literal(text: str) -> bool:
    return re.fullmatch(r"'[^'\\]*'|-?\d+", text.strip()) is not None
