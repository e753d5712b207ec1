"""The columns of a SELECT, and SELECT DISTINCT, as `select(…)` and `distinct(…)` take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError, PlanError, nearest
from headrace.expressions.literals import quoted_name
from headrace.sql.groups import EVERYTHING, counted_rows
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.scope import QueryRows, Replaced, VisibleColumn, plain_name, unused_name
from headrace.sql.script import Span
from headrace.sql.subqueries import refuse_subqueries
from headrace.sql.syntax import Select, SelectItem


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
