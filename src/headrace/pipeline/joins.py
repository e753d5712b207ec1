"""Joins when they are declared: what `stream.join(…)`, `table.join(…)`, `table.as_of(…)` and
`table.history(…)` check, and the steps they add to the plan.

The steps are in `headrace.plan.join_steps`, the kernels that run them in
`headrace.operators.joins`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE
from headrace.durations import to_us
from headrace.error_policy import NULL
from headrace.errors import PlanError, StreamOnly, UnfitColumn
from headrace.expressions.expression import parse_expression
from headrace.expressions.function_calls import is_call_column
from headrace.expressions.literals import quoted_name
from headrace.pipeline.aggregates import settle_step
from headrace.pipeline.functions import with_calls
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.join_steps import (
    CORRECT,
    UNBOUNDED_US,
    WAIT,
    HistoryStep,
    JoinStep,
    LookupStep,
    NewestStep,
)
from headrace.plan.plan import KeyByStep, SelectStep, Step, TopicStep, time_column
from headrace.types.schema import type_name

if TYPE_CHECKING:
    from headrace.operators.file_table import FileTable
    from headrace.operators.joins.sides import ResultColumn, Side


Duration = str | timedelta
Names = str | Sequence[str]


@dataclass(frozen=True)
class Bounds:
    """How far apart rows of two streams may be, as declared."""

    within: Duration | None = None
    before: Duration | None = None
    after: Duration | None = None
    since: str | None = None
    until: str | None = None

    @property
    def is_declared(self) -> bool:
        return self.has_row_bounds or not (self.within is self.before is self.after is None)

    @property
    def has_row_bounds(self) -> bool:
        """Whether bounds are columns or expressions of the left rows."""
        return self.since is not None or self.until is not None

    def to_us(self, *, where: str) -> tuple[int, int]:
        """Microseconds before and after the left row."""
        if not self.is_declared:
            raise PlanError(
                f"The step {where} joins two streams without a bound: every row would have to be"
                " kept for ever.",
                fix=(
                    'say how far apart rows may be: within="1 hour", or before= and after=, or'
                    ' until="expires", a column.'
                ),
            )
        if self.within is not None:
            if self.before is not None or self.after is not None:
                raise PlanError(
                    f"The step {where} has within= and before= or after=.",
                    fix="give within=, or the two others.",
                )
            within_us = to_us(self.within, what=f"within of the step {where}")
            return within_us, within_us
        before_us = _signed_us(self.before, what=f"before of the step {where}")
        after_us = _signed_us(self.after, what=f"after of the step {where}")
        if self.until is not None and self.after is None:
            after_us = UNBOUNDED_US
        if before_us + after_us < 0:
            raise PlanError(
                f"The step {where} joins rows from {self.before} before to {self.after} after: no"
                " two are.",
                fix="let before= and after= leave some time between them.",
            )
        return before_us, after_us


def _signed_us(duration: Duration | None, *, what: str) -> int:
    """A bound may lie on the other side of the left row: after="-1 second" means that right rows
    end a second before it.
    """
    if duration is None:
        return 0
    if isinstance(duration, timedelta):
        return (
            to_us(duration, what=what) if duration >= timedelta(0) else -to_us(-duration, what=what)
        )
    text = str(duration).strip()
    if text.startswith("-"):
        return -to_us(text.removeprefix("-"), what=what)
    return to_us(duration, what=what)


@dataclass(frozen=True)
class AsOf:
    """A table as of the time in a stream's column, as `table.as_of(column)` returns it for
    `stream.join`.
    """

    table: Relation
    column: str
    history_us: int


def as_of(table: Relation, column: str, history: Duration | None, *, where: str) -> AsOf:
    """Check `table.as_of(…)`."""
    return AsOf(table, column, _history_us(table.step, history, where=where))


def history_step(
    table: Relation, kept: Duration | None, valid_to: str, name: str | None
) -> HistoryStep:
    """Check `table.history(…)`, and make its step."""
    where = table.step_label("history", name)
    if valid_to in table.schema.names:
        raise PlanError(
            f"The step {where} would have two columns {valid_to!r}.",
            fix="name another: history(valid_to='until').",
        )
    valid_from = _valid_from(table.step, where=where)
    time_type = table.schema.field(valid_from).type
    schema = cols.check_columns(
        table.schema.append(pa.field(valid_to, time_type)), where=f"The step {where}"
    )
    return HistoryStep(
        name=name or "",
        inputs=(table.step,),
        schema=schema,
        key=(*table.key, valid_from),
        is_table=True,
        valid_from=valid_from,
        valid_to=valid_to,
        history_us=_history_us(table.step, kept, where=where),
    )


def join_step(
    left: Relation,
    other: Any,
    *,
    on: Names | None,
    left_on: Names | None,
    right_on: Names | None,
    how: str,
    bounds: Bounds,
    suffix: str | None,
    late_versions: str,
    name: str | None,
) -> Step:
    """Check `left.join(other, …)`, and make its steps: the join, and behind it a step that settles
    its changes where one key's changes may come from several shards.
    """
    where = left.step_label("join", name)
    from headrace.operators.file_table import FileTable

    if isinstance(other, FileTable):
        keys = _chosen_columns(on, left_on, right_on, where=where)
        plain = not bounds.is_declared and late_versions == WAIT
        return _lookup_step(left, other, keys, how, suffix, name, where=where, plain=plain)
    versions = other if isinstance(other, AsOf) else None
    right = versions.table if versions is not None else other
    if not isinstance(right, Relation):
        raise PlanError(
            f"The step {where} was given a {type(right).__name__}.",
            fix="give it a stream or a table.",
        )
    if right.pipeline is not left.pipeline:
        raise PlanError(
            f"The step {where} joins rows of two pipelines.",
            fix="write one of them to a topic, and read that topic here.",
        )
    _check_kinds(left.step, right.step, how, bounds, where=where)
    left_on, right_on = _chosen_columns(on, left_on, right_on, where=where)
    left_step, left_columns = _with_key_columns(left.step, left_on, where=where)
    right_step, right_columns = _with_key_columns(right.step, right_on, where=where)
    _check_join_columns(
        left_step.schema, right_step.schema, left_columns, right_columns, where=where
    )
    if versions is None and late_versions != WAIT:
        raise PlanError(
            f"The step {where} has late_versions={late_versions!r}, and no versions.",
            fix='join a table as of a time: table.as_of("placed_at").',
        )
    of_streams = not left.step.is_table and not right.step.is_table
    before_us, after_us = bounds.to_us(where=where) if of_streams else (0, 0)
    left_step, row_bounds = _row_bounds(left_step, how, bounds, where=where)
    left_side = _side(left_step, left_columns, needs_time=of_streams, where=where)
    right_side = _side(right_step, right_columns, needs_time=of_streams, where=where)
    if of_streams and how in {"right", "full"} and left_side.shift_us != right_side.shift_us:
        raise PlanError(
            f"The step {where} joins windows with rows how={how!r}: a result's event time would"
            " be a window's last microsecond or a row's own time.",
            fix='join how="inner" or how="left".',
        )
    corrects = versions is not None and late_versions == CORRECT
    if versions is not None:
        _check_versions(
            left.step, right.step, left_side, right_side, versions, late_versions, where=where
        )
        left_side = replace(left_side, key=left.step.key)
        right_side = replace(right_side, time=_valid_from(right.step, where=where))
    step = JoinStep(
        name=name or "",
        inputs=(left_step, right_step),
        schema=pa.schema([]),
        key=(),
        is_table=left.step.is_table or corrects,
        left=left_side,
        right=right_side,
        columns=tuple(
            column
            for column in _result_columns(left_side, right_side, how, suffix, where=where)
            if column[1] in (right if column[0] == "right" else left).schema.names
        ),
        how=how,
        before_us=before_us,
        after_us=after_us,
        since=row_bounds.get("since"),
        until=row_bounds.get("until"),
        history_us=None if versions is None else versions.history_us,
        late_versions=late_versions,
    )
    step = _with_result_schema(step, where=where)
    if versions is not None and corrects:
        return NewestStep(
            inputs=(step,),
            schema=step.schema,
            key=step.key,
            is_table=True,
            own=tuple(left.schema.names),
            row_time=versions.column,
        )
    if step.kind == "table-table" and not _join_key_is_in_result_key(step):
        return settle_step(step)
    return step


def _lookup_step(
    left: Relation,
    file: FileTable,
    keys: tuple[Names, Names],
    how: str,
    suffix: str | None,
    name: str | None,
    *,
    where: str,
    plain: bool,
) -> Step:
    """The step of a join with a table in a file."""
    from headrace.operators.joins.sides import JoinColumns, Side

    if left.step.is_table:
        raise StreamOnly(
            f"The step {where} joins the table {left.step.path} with a file.",
            fix="join the stream that the table is made of, before it becomes a table.",
        )
    if how not in {"inner", "left"} or not plain:
        raise PlanError(
            f"The step {where} joins a file with how={how!r}, a time bound or late_versions.",
            fix='choose how="inner" or how="left"; a file has no time.',
        )
    left_step, left_on = _with_key_columns(left.step, keys[0], where=where)
    right_on = cols.key_columns(keys[1], file.schema, where=where)
    _check_join_columns(left_step.schema, file.schema, left_on, right_on, where=where)
    if set(right_on) != set(file.key):
        raise PlanError(
            f"The step {where} joins {file.path} on {', '.join(right_on)}, and its key is"
            f" {', '.join(file.key)}.",
            fix="join on the file's whole key, or declare it with another.",
        )
    sides = Side(left_step.schema, left_on), Side(file.schema, right_on)
    columns = tuple(
        column
        for column in _result_columns(*sides, how, suffix, where=where)
        if column[0] == "right" or column[1] in left.schema.names
    )
    by_key = dict(zip(right_on, left_on, strict=True))
    schema = JoinColumns(where, *sides, columns, how).schema
    return LookupStep(
        name=name or "",
        inputs=(left_step,),
        schema=cols.check_columns(schema, where=f"The step {where}"),
        key=left.key,
        file=file,
        on=tuple(by_key[column] for column in file.key),
        columns=columns,
        how=how,
    )


# Checks of both sides


def _check_kinds(left: Step, right: Step, how: str, bounds: Bounds, *, where: str) -> None:
    from headrace.operators.joins.sides import JOIN_TYPES

    if how not in JOIN_TYPES:
        raise PlanError(
            f"The step {where} joins how={how!r}.",
            fix=f"choose one of {', '.join(map(repr, JOIN_TYPES))}.",
        )
    if left.is_table and not right.is_table:
        raise StreamOnly(
            f"The step {where} joins the table {left.path} with the stream {right.path}.",
            fix=(
                "turn it round: stream.join(table). Or make a table of the stream with"
                " to_table(key)."
            ),
        )
    if not left.is_table and right.is_table and how not in {"inner", "left"}:
        raise PlanError(
            f"The step {where} joins a stream with a table how={how!r}: rows of the table alone"
            " would have no time at which to be emitted.",
            fix='choose how="inner" or how="left".',
        )
    if bounds.is_declared and (left.is_table or right.is_table):
        raise PlanError(
            f"The step {where} has a time bound, but a table has no end.",
            fix="leave out within=, before=, after=, since= and until=.",
        )


def _chosen_columns(
    on: Names | None, left_on: Names | None, right_on: Names | None, *, where: str
) -> tuple[Names, Names]:
    """The columns of either side that must be equal, as they were written."""
    if on is not None and left_on is None and right_on is None:
        left_on = right_on = on
    elif on is not None or left_on is None or right_on is None:
        raise PlanError(
            f"The step {where} does not say on what to join.",
            fix='write on="customer_id", or left_on= and right_on= where names differ.',
        )
    return left_on, right_on


def _with_key_columns(step: Step, on: Names, *, where: str) -> tuple[Step, tuple[str, ...]]:
    """A side with the columns that it is joined on, and their names. An expression becomes a
    column, which the result does not have.
    """
    names: list[str] = []
    computed: list[str] = []
    texts = [on] if isinstance(on, str) else on
    step, texts, _ = with_calls(step, texts, {}, errors=NULL, where=where)
    for text in texts:
        if text in step.schema.names or not cols.is_expression(text):
            names.append(text)
            continue
        expression = parse_expression(text, step.schema, where=f"{where}, on {text!r}")
        name = expression.column
        if name is None or is_call_column(name):
            name = f"on_{len(names)}"
            while name in step.schema.names:
                name += "_"
            computed.append(f"{text} AS {quoted_name(name)}")
        names.append(name)
    if computed:
        selection = cols.add_columns(step, computed, {}, where=where)
        step = SelectStep(
            inputs=(step,),
            schema=selection.schema,
            key=step.key,
            is_table=step.is_table,
            columns=selection.columns,
        )
    return step, cols.key_columns(names, step.schema, where=where)


def _check_join_columns(
    left: pa.Schema,
    right: pa.Schema,
    left_columns: tuple[str, ...],
    right_columns: tuple[str, ...],
    *,
    where: str,
) -> None:
    """Raise if the columns of both sides cannot be compared."""
    if len(left_columns) != len(right_columns):
        raise PlanError(
            f"The step {where} joins {len(left_columns)} columns with {len(right_columns)}.",
            fix="name as many in left_on= as in right_on=.",
        )
    for left_name, right_name in zip(left_columns, right_columns, strict=True):
        left_type = left.field(left_name).type
        right_type = right.field(right_name).type
        if left_type != right_type:
            raise PlanError(
                f"The step {where} joins {left_name!r}, which is {type_name(left_type)}, with"
                f" {right_name!r}, which is {type_name(right_type)}.",
                fix=(
                    f"make them alike first: with_columns({right_name}='CAST({right_name} AS"
                    f" {type_name(left_type)})')."
                ),
            )


def _row_bounds(left: Step, how: str, bounds: Bounds, *, where: str) -> tuple[Step, dict[str, str]]:
    """The left rows with the columns of their own bounds, and the names of these by argument. A
    bound that is an expression becomes a column, which the result does not have.
    """
    if not bounds.has_row_bounds:
        return left, {}
    if how != "inner":
        raise PlanError(
            f"The step {where} has since= or until=, and joins how={how!r}.",
            fix='leave out how= (it is "inner"), or bound all rows alike with before= and after=.',
        )
    declared = {"since": bounds.since, "until": bounds.until}
    texts = {argument: text for argument, text in declared.items() if text is not None}
    left, _, texts = with_calls(left, (), texts, errors=NULL, where=where)
    time = time_column(left)
    names: dict[str, str] = {}
    computed: list[str] = []
    for argument, text in texts.items():
        expression = parse_expression(text, left.schema, where=f"{where}, {argument}=")
        kind = expression.type
        if time is not None and kind != (expected := left.schema.field(time.name).type):
            found = "of unknown type" if kind is None else type_name(kind)
            raise UnfitColumn(
                f"{argument}={text!r} of the step {where} is {found}, and the event time"
                f" {time.name!r} is {type_name(expected)}.",
                fix=f"give a {type_name(expected)}, such as a column or {time.name} + INTERVAL 1"
                " HOUR.",
            )
        name = expression.column
        if name is None or is_call_column(name):
            name = f"{argument}_of"
            while name in left.schema.names:
                name += "_"
            computed.append(f"{text} AS {quoted_name(name)}")
        names[argument] = name
    if not computed:
        return left, names
    selection = cols.add_columns(left, computed, {}, where=where)
    step = SelectStep(
        inputs=(left,), schema=selection.schema, key=left.key, columns=selection.columns
    )
    return step, names


def _side(step: Step, on: tuple[str, ...], *, needs_time: bool, where: str) -> Side:
    from headrace.operators.joins.sides import Side

    time = time_column(step)
    if time is None and needs_time:
        raise PlanError(
            f"The step {where} joins two streams, and {step.path} has no event time.",
            fix='declare its topic with event_time=hr.EventTime("placed_at").',
        )
    if time is None or step.is_table:
        return Side(step.schema, on, step.key if step.is_table else ())
    return Side(step.schema, on, (), time.name, time.shift_us)


# Columns and key of the result


def _result_columns(
    left: Side, right: Side, how: str, suffix: str | None, *, where: str
) -> tuple[ResultColumn, ...]:
    """The left side's columns, then the right side's; a pair that is joined on under one name is
    one column.
    """
    either_may_miss = how in {"right", "full"}
    columns: list[ResultColumn] = []
    for name in left.schema.names:
        if either_may_miss and name == left.time and right.time:
            kind = "time"
        elif either_may_miss and name in left.on:
            kind = "key"
        else:
            kind = "left"
        columns.append((kind, name, name))
    shared = {b for a, b in zip(left.on, right.on, strict=True) if a == b}
    for name in right.schema.names:
        if name not in shared:
            result = _suffixed(name, left.schema.names, right.schema.names, suffix, where=where)
            columns.append(("right", name, result))
    return tuple(columns)


def _suffixed(
    name: str, left: Sequence[str], right: Sequence[str], suffix: str | None, *, where: str
) -> str:
    """What a right column is called in the result: with the suffix, if the left side has its
    name. Spark does not distinguish case.
    """
    taken = {column.lower() for column in left}
    if name.lower() not in taken:
        return name
    if suffix is None:
        raise PlanError(
            f"Both sides of the step {where} have a column {name!r}.",
            fix='tell them apart with suffix="_right", or select or rename one first.',
        )
    suffixed = f"{name}{suffix}"
    if suffixed.lower() in taken | {column.lower() for column in right}:
        raise PlanError(
            f"The step {where} would have two columns {suffixed!r}.", fix="choose another suffix=."
        )
    return suffixed


def _with_result_schema(step: JoinStep, *, where: str) -> JoinStep:
    """The step with the schema and key of its kernel's output."""
    kernel = step.kernel()
    schema = cols.check_columns(
        pa.schema([field for field in kernel.output if field.name != CHANGE_TYPE]),
        where=f"The step {where}",
    )
    key = tuple(getattr(kernel, "key", ())) if step.is_table else _stream_key(step)
    return replace(step, schema=schema, key=key)


def _stream_key(step: JoinStep) -> tuple[str, ...]:
    """A stream stays keyed as its left side is, if the result has the key's columns."""
    names = {column: name for kind, column, name in step.columns if kind in {"left", "key", "time"}}
    left_key = step.inputs[0].key
    return tuple(names[each] for each in left_key) if set(left_key) <= set(names) else ()


def _join_key_is_in_result_key(step: JoinStep) -> bool:
    """Whether the result's key contains everything that is joined on. If not, a row may leave one
    join key and enter another in the same tick.

    A column of a side that may be missing does not count: it is null for rows without a partner,
    whatever their join key.
    """
    names = {(kind, column): name for kind, column, name in step.columns}

    def is_in_key(left_name: str, right_name: str) -> bool:
        columns = [("key", left_name)]
        if step.how in {"inner", "left"}:
            columns.append(("left", left_name))
        if step.how in {"inner", "right"}:
            columns.append(("right", right_name))
        return any(names.get(column) in step.key for column in columns if column in names)

    return all(map(is_in_key, step.left.on, step.right.on))


# Versions of a table


def _check_versions(
    left: Step,
    right: Step,
    left_side: Side,
    right_side: Side,
    versions: AsOf,
    late_versions: str,
    *,
    where: str,
) -> None:
    """Raise if a stream cannot be joined with these versions of a table."""
    if left.is_table:
        raise StreamOnly(
            f"The step {where} joins the table {left.path} as of a time.",
            fix="join a stream, or its changes(), as of a time.",
        )
    if late_versions not in {WAIT, CORRECT}:
        raise PlanError(
            f"The step {where} has late_versions={late_versions!r}.",
            fix='choose "wait" or "correct".',
        )
    if left_side.time != versions.column or left_side.shift_us:
        raise PlanError(
            f"The step {where} looks up as of {versions.column!r}, and the event time of"
            f" {left.path} is {left_side.time!r}.",
            fix="look up at the stream's event time, or declare that column as its event time.",
        )
    if set(right_side.on) != set(right.key):
        raise PlanError(
            f"The step {where} joins versions of {right.path} on {', '.join(right_side.on)}, and"
            f" its key is {', '.join(right.key)}.",
            fix="join on the table's whole key.",
        )
    if late_versions == CORRECT and not left.key:
        raise PlanError(
            f"The step {where} corrects rows that it has emitted, so rows must have a key, and"
            f" {left.path} has none.",
            fix='say what identifies a row: key_by("order_id").join(…).',
        )


def _valid_from(table: Step, *, where: str) -> str:
    """The column that says when a version of a table's row began to be valid: its event time."""
    time = time_column(table)
    if time is None or time.shift_us:
        raise PlanError(
            f"The step {where} needs the versions of {table.path}, which has no event time.",
            fix='declare the table with event_time=hr.EventTime("valid_from").',
        )
    while isinstance(table, KeyByStep):
        table = table.input
    if not isinstance(table, TopicStep):
        raise PlanError(
            f"The step {where} needs every version, and {table.path} has only the last version of"
            " each tick.",
            fix=(
                "use the table as it is declared, and select or filter behind this step; where a"
                " topic's rows are the versions, declare it with table(…)."
            ),
        )
    return time.name


def _history_us(table: Step, history: Duration | None, *, where: str) -> int:
    """How long versions are kept: as this step says, or the declaration of the table."""
    declared = dict(table.settings).get("history") if isinstance(table, TopicStep) else None
    chosen = history if history is not None else declared
    if chosen is None:
        raise PlanError(
            f"The step {where} would keep every version of {table.path} for ever.",
            fix=(
                'say how far back rows may look: as_of(column, history="30 days"), or table(…,'
                ' history="30 days").'
            ),
        )
    return to_us(chosen, what=f"history of the step {where}")
