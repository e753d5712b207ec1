"""What a SELECT gives: its columns, SELECT DISTINCT, and the rows of several in a UNION, as
`select(…)`, `distinct(…)` and `union(…)` take them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError, PlanError, StreamOnly, nearest
from headrace.expressions.literals import quoted_name
from headrace.sql.groups import EVERYTHING, counted_rows
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.scope import QueryRows, Replaced, VisibleColumn, plain_name, unused_name
from headrace.sql.script import Span
from headrace.sql.subqueries import refuse_subqueries
from headrace.sql.syntax import Select, SelectItem, Union


@dataclass(frozen=True)
class OutputColumn:
    """A column of the result: its name, its text, and the column that it is, if it is one."""

    name: str
    text: str
    column: str | None
    span: Span | None = None

    def item(self) -> str:
        if self.column == self.name:
            return self.name
        return f"{self.text} AS {quoted_name(self.name)}"


def projected(
    frame: QueryRows,
    select: Select,
    items: Sequence[SelectItem],
    replaced: Replaced,
    *,
    is_final: bool,
) -> QueryRows:
    outputs = output_columns(frame, items, replaced)
    if not select.is_distinct:
        return selected(frame, outputs, select.span, is_final=is_final)
    names = [each.name for each in outputs]
    rows: Any = frame.rows
    with located(select.span):
        if not frame.is_table:
            texts = [each.item() for each in outputs]
            table: Any = rows.group_by(*texts).aggregate(**counted_rows(names)).select(*names)
        elif all(each.column == each.name for each in outputs):
            table = rows.distinct(*names)
        else:
            inner = selected(frame, outputs, select.span, is_final=False)
            distinct: Any = inner.rows
            table = distinct.distinct(*names)
    return QueryRows(table, tuple(VisibleColumn(name, name) for name in names))


def output_columns(
    frame: QueryRows, items: Sequence[SelectItem], replaced: Mapping[int, tuple[int, str]]
) -> list[OutputColumn]:
    outputs: list[OutputColumn] = []
    for item in items:
        if item.is_star:
            outputs += _star(frame, item)
            continue
        refuse_subqueries(item.span)
        compiled = frame.compiled(item.span, replaced, what="a column")
        name = item.name or compiled.name or _implied_name(item, compiled.column)
        outputs.append(OutputColumn(name, compiled.text, compiled.column, item.span))
    seen: dict[str, OutputColumn] = {}
    for item_output in outputs:
        if item_output.name.lower() in seen:
            raise SqlRefusal(
                items[0].span.start if len(items) == 1 else _item_of(items, item_output.name),
                f"Two columns of the SELECT are called {item_output.name!r}.",
                f"rename one: … AS {item_output.name}_2; of a join, name the columns instead of *.",
                PlanError,
            )
        seen[item_output.name.lower()] = item_output
    return outputs


def _item_of(items: Sequence[SelectItem], name: str) -> int:
    """Where the last item stands that has a name."""
    for item in reversed(items):
        if not item.is_star and (
            item.name == name or item.span.tokens[-1].name.lower() == name.lower()
        ):
            return item.span.start
    return items[0].span.start


def _implied_name(item: SelectItem, column: str | None) -> str:
    """The name of a column without AS: that of the aggregate that it is."""
    if column is not None:
        return column
    raise SqlRefusal(
        item.span.start,
        f"{item.span.text()[:60]!r} has no name.",
        "give it one: … AS name.",
        PlanError,
    )


def _star(frame: QueryRows, item: SelectItem) -> list[OutputColumn]:
    if item.star_of is not None and item.star_of.lower() not in frame.tables:
        raise SqlRefusal(
            item.span.start,
            f"There is no table {item.star_of!r} in this query:"
            f" {nearest(item.star_of, frame.tables)}",
            kind=PlanError,
        )
    columns = [
        each
        for each in frame.columns
        if item.star_of is None or each.table.lower() == item.star_of.lower()
    ]
    if frame.refused:
        raise SqlRefusal(
            item.span.start,
            "* has columns that are neither in GROUP BY nor in an aggregate.",
            "name the columns of GROUP BY, and the aggregates.",
            PlanError,
        )
    for name in item.left_out:
        if name.lower() == frame.unread:
            continue
        frame.resolve(name, item.star_of, item.span.start)
    left_out = {name.lower() for name in item.left_out}
    outputs = []
    seen = set()
    for each in columns:
        if each.name.lower() in left_out or each.actual in seen:
            continue
        seen.add(each.actual)
        # Of two columns with one name, * has the second one under the name that the join gave it.
        names = [other.name.lower() for other in columns if other.actual != each.actual]
        name = each.actual if each.name.lower() in names else each.name
        outputs.append(OutputColumn(name, plain_name(each.actual), each.actual))
    return outputs


def selected(
    frame: QueryRows, outputs: Sequence[OutputColumn], span: Span, *, is_final: bool
) -> QueryRows:
    """Rows with these columns. A subquery that leaves out columns of a table's key keeps them
    without a name.
    """
    if not outputs:
        raise SqlRefusal(span.start, "This SELECT has no columns.", "name one.", PlanError)
    names = frame.rows.schema.names
    plain = [each.name for each in outputs if each.column == each.name]
    visible = tuple(VisibleColumn(each.name, each.name) for each in outputs)
    if plain == names and len(outputs) == len(names):
        return QueryRows(frame.rows, visible)
    kept = {each.column for each in outputs}
    missing = [name for name in frame.rows.key if name not in kept] if frame.is_table else []
    texts = [each.item() for each in outputs]
    if missing == [EVERYTHING] and EVERYTHING not in [each.name.lower() for each in outputs]:
        if [EVERYTHING, *plain] == names:
            return QueryRows(frame.rows, visible)
        texts.insert(0, EVERYTHING)
        missing = []
    if missing and is_final:
        raise key_left_out(missing, span)
    taken = [each.name for each in outputs]
    for name in missing:
        hidden = unused_name(name, taken)
        taken.append(hidden)
        texts.append(OutputColumn(hidden, plain_name(name), name).item())
    rows: Any = frame.rows
    with located(span):
        try:
            return QueryRows(rows.select(*texts), visible)
        except HeadraceError:
            _find_wrong(rows, outputs)
            raise


def _find_wrong(rows: Any, outputs: Sequence[OutputColumn]) -> None:
    """Raise at the place of the column that cannot be computed."""
    for each in outputs:
        if each.column is None and each.span is not None:
            with located(each.span):
                name = unused_name("value", rows.schema.names)
                rows.with_columns(f"{each.text} AS {quoted_name(name)}")


def refuse_hidden_key(frame: QueryRows, span: Span) -> None:
    """Raise if the key of a query's rows is not among its columns."""
    kept = {each.actual for each in frame.columns}
    missing = [name for name in frame.rows.key if name not in kept] if frame.is_table else []
    if missing and missing != [EVERYTHING]:
        raise key_left_out(missing, span)


def key_left_out(missing: Sequence[str], span: Span) -> SqlRefusal:
    names = ", ".join(map(repr, missing))
    return SqlRefusal(
        span.start,
        f"SELECT leaves out {names}, by which the rows of this table are told apart: when one"
        " changes, nothing would say which.",
        f"add {', '.join(missing)} to the SELECT; or make one row of several: SELECT DISTINCT …, or"
        " GROUP BY ….",
        PlanError,
    )


# UNION


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
