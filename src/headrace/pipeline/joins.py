"""Joins in a plan: `rows.join(other, …)`, the step it makes, and what is checked when it is
declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.columnar.columns import CHANGE_TYPE
from headrace.durations import to_us
from headrace.errors import PlanError, StreamOnly
from headrace.pipeline.aggregates import settled
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.join_steps import CORRECT, WAIT, DistinctStep, HistoryStep, JoinStep, NewestStep
from headrace.plan.plan import AggregateStep, KeyByStep, Step, TopicStep, ToTableStep, time_column
from headrace.types.schema import type_name

if TYPE_CHECKING:
    from headrace.operators.joins.sides import ResultColumn, Side


# What is checked when a join is declared: how far apart rows may be, what can be joined with what,
# on which columns, and what the result's are called.


Duration = str | timedelta


@dataclass(frozen=True)
class Bounds:
    """How far apart rows of two streams may be, as it was declared."""

    within: Duration | None = None
    before: Duration | None = None
    after: Duration | None = None

    def given(self) -> bool:
        return self.within is not None or self.before is not None or self.after is not None

    def us(self, *, where: str) -> tuple[int, int]:
        if not self.given():
            raise PlanError(
                f"The step {where} joins two streams without a bound: every row would have to be"
                " kept for ever.",
                fix='say how far apart rows may be: within="1 hour", or before= and after=.',
            )
        if self.within is not None and (self.before is not None or self.after is not None):
            raise PlanError(
                f"The step {where} has within= and before= or after=.",
                fix="give within=, or the two others.",
            )
        if self.within is not None:
            within_us = to_us(self.within, what=f"within of the step {where}")
            return within_us, within_us
        given = {"before": self.before, "after": self.after}
        before_us, after_us = (
            0 if each is None else _signed_us(each, what=f"{name} of the step {where}")
            for name, each in given.items()
        )
        if before_us + after_us < 0:
            raise PlanError(
                f"The step {where} joins rows from {self.before} before to {self.after} after: no"
                " two are.",
                fix="let before= and after= leave some time between them.",
            )
        return before_us, after_us


def _signed_us(given: Duration, *, what: str) -> int:
    """A bound may lie on the other side of the left row: after="-1 second" means that right rows
    end a second before it.
    """
    if isinstance(given, timedelta):
        return to_us(given, what=what) if given >= timedelta(0) else -to_us(-given, what=what)
    text = str(given).strip()
    return (
        -to_us(text.removeprefix("-"), what=what)
        if text.startswith("-")
        else to_us(given, what=what)
    )


def check_kinds(left: Step, right: Step, how: str, bounds: Bounds, *, where: str) -> None:
    from headrace.operators.joins.sides import HOWS

    if how not in HOWS:
        raise PlanError(
            f"The step {where} joins how={how!r}.",
            fix=f"choose one of {', '.join(map(repr, HOWS))}.",
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
            f"The step {where} joins a stream with a table how={how!r}: rows of the table would"
            " have to be told at no particular time.",
            fix='choose how="inner" or how="left".',
        )
    if bounds.given() and (left.is_table or right.is_table):
        raise PlanError(
            f"The step {where} has a time bound, but a table has no end.",
            fix="leave out within=, before= and after=.",
        )


def on_columns(
    left: Step, right: Step, names: Any, left_on: Any, right_on: Any, *, where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of either side that must be equal."""
    if (names is None) == (left_on is None and right_on is None) or (left_on is None) != (
        right_on is None
    ):
        raise PlanError(
            f"The step {where} does not say on what to join.",
            fix='write on="customer_id", or left_on= and right_on= where names differ.',
        )
    mine = cols.key(names if names is not None else left_on, left.schema, where=where)
    other = cols.key(names if names is not None else right_on, right.schema, where=where)
    if len(mine) != len(other):
        raise PlanError(
            f"The step {where} joins {len(mine)} columns with {len(other)}.",
            fix="name as many in left_on= as in right_on=.",
        )
    for a, b in zip(mine, other, strict=True):
        types = left.schema.field(a).type, right.schema.field(b).type
        if types[0] != types[1]:
            raise PlanError(
                f"The step {where} joins {a!r}, which is {type_name(types[0])}, with {b!r}, which"
                f" is {type_name(types[1])}.",
                fix=(
                    f"make them alike first: with_columns({b}='CAST({b} AS"
                    f" {type_name(types[0])})')."
                ),
            )
    return mine, other


def result_columns(
    left: Side, right: Side, how: str, suffix: str | None, *, where: str
) -> tuple[ResultColumn, ...]:
    """The left's columns, then the right's; of a pair that is joined on under one name, one."""
    both = how in {"right", "full"}
    found: list[ResultColumn] = []
    for name in left.schema.names:
        kind = (
            "time"
            if both and name == left.time and right.time
            else "key"
            if both and name in left.on
            else "left"
        )
        found.append((kind, name, name))
    shared = {b for a, b in zip(left.on, right.on, strict=True) if a == b}
    others = [name for name in right.schema.names if name not in shared]
    return (
        *found,
        *(
            (
                "right",
                name,
                _told_apart(name, left.schema.names, right.schema.names, suffix, where=where),
            )
            for name in others
        ),
    )


def _told_apart(
    name: str, left: Sequence[str], right: Sequence[str], suffix: str | None, *, where: str
) -> str:
    taken = {each.lower() for each in left}
    if name.lower() not in taken:  # Spark does not tell case apart
        return name
    if suffix is None:
        raise PlanError(
            f"Both sides of the step {where} have a column {name!r}.",
            fix='tell them apart with suffix="_right", or select or rename one first.',
        )
    renamed = f"{name}{suffix}"
    if renamed.lower() in taken | {each.lower() for each in right}:
        raise PlanError(
            f"The step {where} would have two columns {renamed!r}.", fix="choose another suffix=."
        )
    return renamed


@dataclass(frozen=True)
class AsOf:
    """What `table.as_of(column)` gives, for `stream.join`: the table's versions, looked up at the
    time in the stream's column.
    """

    table: Relation
    column: str
    history_us: int


def as_of(table: Relation, column: str, history: Duration | None, *, where: str) -> AsOf:
    return AsOf(table, column, _history_us(table.step, history, where=where))


def history(table: Relation, kept: Duration | None, valid_to: str, name: str | None) -> HistoryStep:
    """`table.history()`, checked."""
    where = table.step_label("history", name)
    if valid_to in table.schema.names:
        raise PlanError(
            f"The step {where} would have two columns {valid_to!r}.",
            fix="name another: history(valid_to='until').",
        )
    valid_from = _valid_from(table.step, where=where)
    kind = table.schema.field(valid_from).type
    schema = cols.check_columns(
        table.schema.append(pa.field(valid_to, kind)), where=f"The step {where}"
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


def _valid_from(table: Step, *, where: str) -> str:
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
            f"The step {where} needs every version, and {table.path} has only what each tick left"
            " of its rows.",
            fix=(
                "use the table as it is declared, and select or filter behind this step; where a"
                " topic's rows are the versions, declare it with table(…)."
            ),
        )
    return time.name


def _history_us(table: Step, given: Duration | None, *, where: str) -> int:
    """For how long versions are kept: as it is said here, or where the table is declared."""
    declared = dict(table.settings).get("history") if isinstance(table, TopicStep) else None
    chosen = given if given is not None else declared
    if chosen is None:
        raise PlanError(
            f"The step {where} would keep every version of {table.path} for ever.",
            fix=(
                'say how far back rows may look: as_of(column, history="30 days"), or table(…,'
                ' history="30 days").'
            ),
        )
    return to_us(chosen, what=f"history of the step {where}")


def joined(
    left: Relation,
    right: Any,
    names: Any,
    left_on: Any,
    right_on: Any,
    how: str,
    bounds: Bounds,
    suffix: str | None,
    name: str | None,
    late_versions: str = WAIT,
) -> Step:
    """`left.join(right, …)`, checked."""
    where = left.step_label("join", name)
    versions = right if isinstance(right, AsOf) else None
    right = versions.table if versions is not None else right
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
    check_kinds(left.step, right.step, how, bounds, where=where)
    mine, other = on_columns(left.step, right.step, names, left_on, right_on, where=where)
    if versions is None and late_versions != WAIT:
        raise PlanError(
            f"The step {where} has late_versions={late_versions!r}, and no versions.",
            fix='join a table as of a time: table.as_of("placed_at").',
        )
    of_streams = not left.step.is_table and not right.step.is_table
    before_us, after_us = bounds.us(where=where) if of_streams else (0, 0)
    sides = (
        _side(left.step, mine, needs_time=of_streams, where=where),
        _side(right.step, other, needs_time=of_streams, where=where),
    )
    if versions is not None:
        sides = _versioned(left.step, right.step, sides, versions, late_versions, where=where)
    columns = result_columns(*sides, how, suffix, where=where)
    step = JoinStep(
        name=name or "",
        inputs=(left.step, right.step),
        schema=pa.schema([]),
        key=(),
        is_table=left.step.is_table or (versions is not None and late_versions == CORRECT),
        left=sides[0],
        right=sides[1],
        columns=columns,
        how=how,
        before_us=before_us,
        after_us=after_us,
        history_us=None if versions is None else versions.history_us,
        late_versions=late_versions,
    )
    complete = _completed(step, where=where)
    _check_null_keys(complete, where=where)
    if versions is not None and late_versions == CORRECT:
        return NewestStep(
            inputs=(complete,),
            schema=complete.schema,
            key=complete.key,
            is_table=True,
            own=tuple(left.schema.names),
            row_time=versions.column,
        )
    return (
        settled(complete)
        if complete.kind == "table-table" and not _on_in_key(complete)
        else complete
    )


def _on_in_key(step: JoinStep) -> bool:
    """Whether the result's key holds all that is joined on: else a row may leave one join key and
    come under another in the same tick.

    A column of a side that may be missing does not count: it is null for rows that are alone,
    whatever their join key.
    """
    names = {(kind, column): name for kind, column, name in step.columns}

    def held(mine: str, other: str) -> bool:
        always = [
            ("key", mine),
            *([("left", mine)] if step.how in {"inner", "left"} else []),
            *([("right", other)] if step.how in {"inner", "right"} else []),
        ]
        return any(names.get(each) in step.key for each in always if each in names)

    return all(held(mine, other) for mine, other in zip(step.left.on, step.right.on, strict=True))


def _check_null_keys(step: JoinStep, *, where: str) -> None:
    """Rows with a null in their join key meet nothing. Where that key is the result's too, one of
    either side would have the same.
    """
    merged = {name for kind, _, name in step.columns if kind == "key"}
    if (
        step.kind == "table-table"
        and step.how == "full"
        and set(step.key) <= merged
        and all(_has_null_keys(each) for each in step.inputs)
    ):
        raise PlanError(
            f"The step {where} joins tables in whose keys there can be nulls, which meet nothing:"
            " of either side there could be a row with the same key.",
            fix='choose how="left", or join tables whose keys have no nulls.',
        )


def _has_null_keys(step: Step) -> bool:
    """Whether a table's key can have nulls: of distinct values, or of a side that is missing in an
    outer join.
    """
    if isinstance(step, DistinctStep):
        return True
    if isinstance(step, JoinStep) and step.kind == "table-table":
        missing = {"inner": set(), "left": {"right"}, "right": {"left"}, "full": {"left", "right"}}[
            step.how
        ]
        if any(kind in missing and name in step.key for kind, _, name in step.columns):
            return True
    return not isinstance(step, AggregateStep | ToTableStep | HistoryStep) and any(
        map(_has_null_keys, step.inputs)
    )


def _completed(step: JoinStep, *, where: str) -> JoinStep:
    """With the schema and the key that its kernel gives."""
    kernel = step.kernel()
    schema = cols.check_columns(
        pa.schema([field for field in kernel.output if field.name != CHANGE_TYPE]),
        where=f"The step {where}",
    )
    key = tuple(getattr(kernel, "key", ())) if step.is_table else _stream_key(step)
    return replace(step, schema=schema, key=key)


def _stream_key(step: JoinStep) -> tuple[str, ...]:
    """A stream stays keyed as its left side was, if those columns are still there under their
    names.
    """
    names = {column: name for kind, column, name in step.columns if kind in {"left", "key", "time"}}
    return (
        tuple(names[each] for each in step.inputs[0].key)
        if all(each in names for each in step.inputs[0].key)
        else ()
    )


def _side(step: Step, on: tuple[str, ...], *, needs_time: bool, where: str) -> Side:
    from headrace.operators.joins.sides import Side

    time = time_column(step)
    if time is None and needs_time:
        raise PlanError(
            f"The step {where} joins two streams, and {step.path} has no event time.",
            fix='declare its topic with event_time=hr.EventTime("placed_at").',
        )
    if time is not None and time.shift_us and not step.is_table:
        raise PlanError(
            f"The step {where} joins {step.path}, whose event time is computed.",
            fix="write it to a topic and read that with an event time.",
        )
    return Side(
        step.schema,
        on,
        step.key if step.is_table else (),
        None if time is None or step.is_table else time.name,
    )


def _versioned(
    left: Step,
    right: Step,
    sides: tuple[Side, Side],
    versions: AsOf,
    late_versions: str,
    *,
    where: str,
) -> tuple[Side, Side]:
    """The sides of a join with versions: rows look at their own time, versions are valid from
    theirs.
    """
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
    if sides[0].time != versions.column:
        raise PlanError(
            f"The step {where} looks up as of {versions.column!r}, and the event time of"
            f" {left.path} is {sides[0].time!r}.",
            fix="look up at the stream's event time, or declare that column as its event time.",
        )
    if set(sides[1].on) != set(right.key):
        raise PlanError(
            f"The step {where} joins versions of {right.path} on {', '.join(sides[1].on)}, and its"
            f" key is {', '.join(right.key)}.",
            fix="join on the table's whole key.",
        )
    if late_versions == CORRECT and not left.key:
        raise PlanError(
            f"The step {where} corrects what it told, so it must know rows again, and {left.path}"
            " has no key.",
            fix='say what identifies a row: key_by("order_id").join(…).',
        )
    return replace(sides[0], key=left.key), replace(sides[1], time=_valid_from(right, where=where))
