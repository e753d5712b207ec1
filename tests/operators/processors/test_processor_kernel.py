"""Processors against the obvious computation, one row and one timer after the other, whatever the
batches; and what becomes of methods that fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.columnar.columns import CHANGE_TYPE
from headrace.errors import NewerFormat, PlanError, ProcessorFailed
from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.operators.processors import kernel as kernel_module
from headrace.operators.processors.kernel import ProcessorInput, ProcessorKernel
from headrace.operators.processors.processor import Processor, read_declaration
from headrace.testing.kernels import MemoryState

Row = dict[str, Any]
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
ROWS = SCHEMA.append(pa.field("_tick", pa.int64()))
GAP_US = 10


def at(us: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)


def us(moment: datetime) -> int:
    return (moment - at(0)) // timedelta(microseconds=1)


class ColumnSums(hr.Processor):
    """Sums what came since the key was last quiet for a time; emits at each call."""

    output = "k STRING, what STRING, total BIGINT, at TIMESTAMP"
    total = hr.state("BIGINT", default=0)
    seen = hr.state("ARRAY<INT>")
    quiet = hr.timer()

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx["total"] = pc.add(ctx["total"], ctx.per_key(rows["v"], "sum"))
        ctx["seen"] = ctx.per_key(rows["v"], "list")
        newest = pc.add(ctx.per_key(rows["at"], "max").cast(pa.int64()), GAP_US)
        ctx["quiet"] = newest.cast(pa.timestamp("us", "UTC"))
        return self.emitted(ctx, "row", ctx["quiet"])

    def on_timer(self, keys: pa.Table, ctx: Any) -> pa.Table:
        emitted = self.emitted(ctx, ctx.timer, ctx.fired_at)
        assert keys.column_names == ["k"]
        ctx.forget(pc.greater(ctx["total"], 3))
        return emitted

    def emitted(self, ctx: Any, what: str, times: pa.Array) -> pa.Table:
        return pa.table(
            {
                "k": ctx.keys["k"],
                "what": pa.repeat(what, len(ctx)),
                "total": ctx["total"],
                "at": times,
            }
        )


class KeySums(hr.Processor, each_key=True):
    """The sums of `ColumnSums`, added and emitted a row at a time."""

    output = ColumnSums.output
    total = hr.state("BIGINT", default=0)
    seen = hr.state("ARRAY<INT>")
    quiet = hr.timer()

    def on_row(self, row: Row, ctx: Any) -> Iterator[Row]:
        ctx["total"] += row["v"]
        ctx["seen"] = [*(ctx["seen"] or []), row["v"]]
        ctx["quiet"] = row["at"] + timedelta(microseconds=GAP_US)
        yield {**ctx.key, "what": "row", "total": ctx["total"], "at": ctx["quiet"]}

    def on_timer(self, key: Row, ctx: Any) -> None:
        ctx.emit(key, what=ctx.timer, total=ctx["total"], at=ctx.fired_at)
        if ctx["total"] > 3:
            ctx.forget()


def kernel_of(
    processor: Processor,
    *inputs: ProcessorInput,
    key: Sequence[str] = ("k",),
    ttl_us: int | None = None,
    diverts: bool = False,
) -> ProcessorKernel:
    sources = inputs or (ProcessorInput(None, SCHEMA, is_table=False),)
    names = [source.name for source in sources[1:] if source.name]
    return ProcessorKernel(
        "step",
        processor,
        read_declaration(processor, names, where="step"),
        sources,
        key,
        ttl_us=ttl_us,
        diverts=diverts,
    )


def table(rows: Sequence[Row], schema: pa.Schema = ROWS) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema)


def moments(ticks: Sequence[int], watermark: Sequence[int], before: int = UNSTARTED) -> Watermarks:
    """Ticks whose time is ten times their number."""
    numbers, marks = np.array(ticks, np.int64), np.array(watermark, np.int64)
    return Watermarks(numbers, numbers * 10, marks, marks, before, before)


def simulated(rows: Sequence[Row], watermarks: Sequence[int], *, by_row: bool) -> list[Row]:
    """The sums, tick by tick, over dictionaries."""
    totals: dict[Any, int] = {}
    timers: dict[Any, int] = {}
    emitted = []
    for tick, watermark in enumerate(watermarks):
        out = []
        here = [row for row in rows if row["_tick"] == tick]
        for key in {row["k"] for row in here}:
            own = [row for row in here if row["k"] == key]
            for calls in [[row] for row in own] if by_row else [own]:
                totals[key] = totals.get(key, 0) + sum(row["v"] for row in calls)
                timers[key] = max(us(row["at"]) for row in calls) + GAP_US
                out.append((key, "row", totals[key], timers[key]))
        for key in [key for key, time in timers.items() if time <= watermark]:
            out.append((key, "quiet", totals[key], timers.pop(key)))
            if totals[key] > 3:
                del totals[key]
        out.sort(key=lambda row: (row[0] is not None, row[0] or ""))
        emitted += [
            {"k": key, "what": what, "total": total, "at": at(time), "_tick": tick}
            for key, what, total, time in out
        ]
    return emitted


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Row], list[int]]:
    ticks = draw(st.integers(1, 8))
    keys = st.sampled_from(["a", "b", "long " * 100, "", None])
    rows = []
    for tick in range(ticks):
        for _ in range(draw(st.integers(0, 4))):
            row = {
                "k": draw(keys),
                "v": draw(st.integers(0, 3)),
                "at": at(draw(st.integers(0, 60))),
            }
            rows.append({**row, "_tick": tick})
    steps = draw(st.lists(st.sampled_from([0, 1, 9, 10, 25]), min_size=ticks, max_size=ticks))
    return rows, np.cumsum(steps).tolist()


@given(histories(), st.booleans(), st.data())
def test_rows_and_timers_are_processed_whatever_the_batches(
    history: tuple[list[Row], list[int]], by_row: bool, data: st.DataObject
) -> None:
    rows, watermarks = history
    ticks = len(watermarks)
    cuts = sorted({0, ticks, *data.draw(st.lists(st.integers(0, ticks), max_size=3))})
    state, found, before = MemoryState(), [], UNSTARTED
    for first, stop in pairwise(cuts):
        kernel = kernel_of(KeySums() if by_row else ColumnSums())
        state = state.copy()
        of_batch = table([row for row in rows if first <= row["_tick"] < stop])
        marks = moments(range(first, stop), watermarks[first:stop], before)
        emitted = kernel.step_timed(state, [of_batch], [marks])
        emitted.validate(full=True)
        found += emitted.to_pylist()
        before = watermarks[stop - 1]
    assert found == simulated(rows, watermarks, by_row=by_row)
    timers = [name for name in state.values if name.startswith(b"t")]
    due = kernel_of(ColumnSums()).due(state)
    assert (due is None) == (not timers)
    assert due is None or due > watermarks[-1]


class Reading(hr.Processor, each_key=True):
    output = "k STRING, v INT"
    kept = hr.state("INT")

    def on_row(self, row: Row, ctx: Any) -> Row | None:
        if row["v"] == 13:
            ctx["kept"] = 13
            raise ValueError("unlucky")
        if row["v"] == 14:
            return {"k": row["k"], "v": "fourteen"}
        before, ctx["kept"] = ctx["kept"], row["v"]
        return {"k": row["k"], "v": before}


class ColumnReading(hr.Processor):
    output = "k STRING, v INT"
    kept = hr.state("INT")

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        if 13 in rows["v"].to_pylist():
            raise ValueError("unlucky")
        before, ctx["kept"] = ctx["kept"], ctx.per_key(rows["v"], "last")
        return pa.table({"v": before, "k": ctx.keys["k"]})


def step(kernel: ProcessorKernel, state: MemoryState, tick: int, *rows: tuple[Any, int]) -> Any:
    of_tick = table([{"k": key, "v": v, "at": at(0), "_tick": tick} for key, v in rows])
    marks = moments([tick], [UNSTARTED])
    emitted = kernel.step_timed(state, [of_tick], [marks] * len(kernel.inputs))
    return [(row["k"], row["v"]) for row in emitted.to_pylist()]


def test_a_row_that_fails_is_a_dead_letter_and_leaves_its_key_as_it_was() -> None:
    kernel, state = kernel_of(Reading(), diverts=True), MemoryState()
    assert step(kernel, state, 1, ("a", 1), ("b", 2)) == [("a", None), ("b", None)]
    rows = [("a", 13), ("b", 3), ("a", 14), ("a", 5)]
    assert step(kernel, state, 2, *rows) == [("a", 1), ("b", 2)]
    dead = kernel.dead_letters.take().to_pylist()
    assert [(row["k"], row["v"]) for row in dead] == [("a", 13), ("a", 14)]
    assert dead[0]["_reason"] == "on_row: ValueError: unlucky"
    assert "'v': " in dead[1]["_reason"]
    assert step(kernel, state, 3, ("a", 6)) == [("a", 5)]


def test_keys_beside_one_that_fails_are_processed() -> None:
    kernel, state = kernel_of(ColumnReading(), diverts=True), MemoryState()
    keys = [f"k{number}" for number in range(20)]
    assert len(step(kernel, state, 1, *((key, 1) for key in keys))) == 20
    rows = [(key, 13 if number in {3, 17} else 2) for number, key in enumerate(keys)]
    found = step(kernel, state, 2, *rows, ("k3", 4))
    assert found == sorted((key, 1) for number, key in enumerate(keys) if number not in {3, 17})
    dead = [(row["k"], row["v"]) for row in kernel.dead_letters.take().to_pylist()]
    assert dead == [("k3", 13), ("k17", 13), ("k3", 4)]
    assert step(kernel, state, 3, ("k3", 5), ("k4", 5)) == [("k3", 1), ("k4", 2)]


@pytest.mark.parametrize("processor", [Reading(), ColumnReading()], ids=["row", "columns"])
def test_a_failure_names_the_method_the_row_and_the_line(processor: Processor) -> None:
    kernel = kernel_of(processor)
    with pytest.raises(ProcessorFailed, match=r"Reading\.on_row.*ValueError: unlucky") as caught:
        step(kernel, MemoryState(), 1, ("a", 1), ("b", 13))
    assert caught.value.row is not None
    assert caught.value.row["k"] == "b"
    assert 'raise ValueError("unlucky")' in str(caught.value)


class Emitting(hr.Processor, each_key=True):
    output = "k STRING, v INT NOT NULL"

    def __init__(self, emitted: Any) -> None:
        self.emitted = emitted

    def on_row(self, row: Row, ctx: Any) -> Any:
        return self.emitted


class EmittingColumns(hr.Processor):
    output = "k STRING, v INT NOT NULL"

    def __init__(self, emitted: Any) -> None:
        self.emitted = emitted

    def on_rows(self, rows: pa.Table, ctx: Any) -> Any:
        return self.emitted


@pytest.mark.parametrize(
    ("emitted", "message"),
    [
        ({"k": "b", "v": 1}, "a row of the key {'k': 'b'} in a call for {'k': 'a'}"),
        ({"k": "a"}, "without the column 'v'"),
        ({"k": "a", "v": 1, "w": 2}, "emitted a column 'w'"),
        ({"k": "a", "v": None}, "it is null, but the column is NOT NULL"),
        ({"k": "a", "v": "1"}, "'1' is a str"),
        ({"k": "a", "v": 2**31}, "'v'"),
        (3, "it returned a int, not a dictionary or dictionaries"),
        ("a", "it returned a str"),
        ([3], "it emitted a int, not a dictionary"),
    ],
)
def test_what_does_not_fit_the_output_is_refused(emitted: Any, message: str) -> None:
    with pytest.raises(ProcessorFailed) as caught:
        step(kernel_of(Emitting(emitted)), MemoryState(), 1, ("a", 1))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("emitted", "message"),
    [
        (pa.table({"k": ["b"], "v": [1]}), "a row of a key that the call is not about"),
        (pa.table({"k": ["a"]}), "without the column 'v'"),
        (pa.table({"k": ["a"], "v": [1], "w": [2]}), "emitted a column 'w'"),
        (pa.table({"k": ["a"], "v": pa.array([None], pa.int32())}), "it is null"),
        (pa.table({"k": ["a"], "v": ["1"]}), "'v'"),
        (pa.table({"k": ["a"], "v": [2**31]}), "'v'"),
        (3, "it returned a int, not an Arrow table"),
    ],
)
def test_columns_that_do_not_fit_the_output_are_refused(emitted: Any, message: str) -> None:
    with pytest.raises(ProcessorFailed) as caught:
        step(kernel_of(EmittingColumns(emitted)), MemoryState(), 1, ("a", 1))
    assert message in str(caught.value)


class Setting(hr.Processor):
    output = "k STRING"
    value = hr.state("TINYINT")
    soon = hr.timer()

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value_to_set = name, value

    def on_rows(self, rows: pa.Table, ctx: Any) -> None:
        ctx[self.name] = self.value_to_set

    def on_timer(self, keys: pa.Table, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("value", [1, 2], "'value' was set to 2 values for 1 keys"),
        ("value", pa.array([300]), "300"),
        ("value", "x", "'x' is a str"),
        ("soon", "tomorrow", "'tomorrow' is a str"),
        ("late", 1, "There is no value or timer 'late'"),
    ],
)
def test_what_does_not_fit_the_state_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ProcessorFailed) as caught:
        step(kernel_of(Setting(name, value)), MemoryState(), 1, ("a", 1))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [7, np.array([7]), pa.scalar(7), [7], pa.chunked_array([[7]])],
    ids=lambda value: type(value).__name__,
)
def test_state_is_set_from_many_kinds_of_values(value: Any) -> None:
    kernel, state = kernel_of(Setting("value", value)), MemoryState()
    step(kernel, state, 1, ("a", 1))
    frame = kernel._load(state, pa.array([b"\x01a"]), None).frame
    assert frame.columns["value"].to_pylist() == [7]
    assert frame.keys.to_pylist() == [{"k": "a"}]


class Chain(hr.Processor, each_key=True):
    """A timer that sets itself again, by steps."""

    output = "k STRING, at TIMESTAMP"
    next = hr.timer()

    def __init__(self, step_us: int) -> None:
        self.step_us = step_us

    def on_row(self, row: Row, ctx: Any) -> None:
        ctx["next"] = row["at"]

    def on_timer(self, key: Row, ctx: Any) -> None:
        ctx.emit(key, at=ctx.fired_at)
        ctx["next"] = ctx.fired_at + timedelta(microseconds=self.step_us)


def chain(step_us: int, ticks: Sequence[int], watermarks: Sequence[int]) -> list[tuple[int, int]]:
    rows = table([{"k": "a", "v": 1, "at": at(0), "_tick": 1}])
    marks = moments(ticks, watermarks)
    emitted = kernel_of(Chain(step_us)).step_timed(MemoryState(), [rows], [marks])
    return [(row["_tick"], us(row["at"])) for row in emitted.to_pylist()]


def test_a_timer_that_sets_itself_fires_for_each_step_of_the_time_that_passed() -> None:
    assert chain(5, [1, 2], [12, 20]) == [(1, 0), (1, 5), (1, 10), (2, 15), (2, 20)]


@pytest.mark.parametrize("step_us", [0, -5])
def test_a_timer_that_is_set_to_the_past_fires_once_a_tick(step_us: int) -> None:
    assert chain(step_us, [1, 2, 3], [12, 20, 20]) == [(n + 1, n * step_us) for n in range(3)]


def test_timers_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "MAX_ROUNDS", 50)
    with pytest.raises(ProcessorFailed, match="fired 50 times in one tick") as caught:
        chain(1, [1], [10**9])
    assert caught.value.row == {"k": "a"}


class Keeping(hr.Processor, each_key=True):
    """Changes what it has emitted, and lets all keys begin with one list."""

    output = "k STRING, values ARRAY<INT>"
    values = hr.state("ARRAY<INT>")
    counts = hr.state("MAP<STRING, INT>", default={})
    FIRST: ClassVar[list[int]] = []

    def on_row(self, row: Row, ctx: Any) -> Iterator[Row]:
        if ctx["values"] is None:
            ctx["values"] = self.FIRST
        ctx["values"].append(row["v"])
        ctx["counts"]["rows"] = ctx["counts"].get("rows", 0) + 1
        emitted = {"k": row["k"], "values": ctx["values"]}
        for value in (-1, -2):
            emitted["values"] = [*ctx["values"], value]
            yield emitted
        ctx.emit(k=row["k"], values=ctx["values"])


def test_what_was_emitted_does_not_change_with_the_state_and_keys_share_nothing() -> None:
    rows = [("a", 1), ("b", 2), ("a", 3)]
    of_tick = table([{"k": key, "v": v, "at": at(0), "_tick": 1} for key, v in rows])
    state = MemoryState()
    for _ in range(2):  # another worker, which has seen other rows, does the same
        kernel, state = kernel_of(Keeping()), MemoryState()
        emitted = kernel.step_timed(state, [of_tick], [moments([1], [0])])
        found = [(row["k"], row["values"]) for row in emitted.to_pylist()]
        assert found == [
            ("a", [1]), ("a", [1, -1]), ("a", [1, -2]),
            ("a", [1, 3]), ("a", [1, 3, -1]), ("a", [1, 3, -2]),
            ("b", [2]), ("b", [2, -1]), ("b", [2, -2]),
        ]  # fmt: skip
    assert Keeping.FIRST == []


class Aside(hr.Processor, each_key=True):
    output = "k STRING, n INT"
    table_key = ("k", "n")
    odd = hr.side_output("k STRING, why STRING")

    def on_row(self, row: Row, ctx: Any) -> None:
        if row["v"] == 13:
            ctx.emit_to("odd", k=row["k"], why="unlucky")
            ctx.emit_to("odd", k=row["k"], why=3)
        elif row["v"] == 14:
            ctx.emit_to("ood", k=row["k"], why="misspelt")
        elif row["v"] == 15:
            ctx.delete(k=row["k"], n=1, m=2)
        elif row["v"] == 16:
            ctx.emit({"k": row["k"], "n": 1, "_change_type": "remove"})
        elif row["v"] < 0:
            ctx.delete(k=row["k"], n=-row["v"])
            ctx.emit_to("odd", k=row["k"], why="fewer than none")
        else:
            ctx.emit(k=row["k"], n=row["v"])


class ColumnAside(hr.Processor):
    output = "k STRING, n INT"
    odd = hr.side_output("k STRING, why STRING")

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx.emit_to("odd", pa.table({"k": ctx.keys["k"], "why": pa.repeat("all", len(ctx))}))
        ctx.emit(pa.table({"k": ctx.keys["k"], "n": ctx.per_key(rows["v"], "count")}))
        return pa.table({"k": ctx.keys["k"], "n": ctx.per_key(rows["v"], "sum")})


def test_rows_of_side_outputs_and_changes_are_marked() -> None:
    rows = [("a", 1), ("a", -1), ("b", 13), ("c", 14), ("c", 15), ("c", 16), ("c", 2)]
    of_tick = table([{"k": key, "v": v, "at": at(0), "_tick": 1} for key, v in rows])
    kernel = kernel_of(Aside(), diverts=True)
    emitted = kernel.step_timed(MemoryState(), [of_tick], [moments([1], [0])])
    assert emitted.schema == kernel.output.append(pa.field("_tick", pa.int64(), nullable=False))
    assert [tuple(row.values())[:-1] for row in emitted.to_pylist()] == [
        ("a", 1, None, None, "insert"),
        ("a", 1, None, None, "delete"),
        ("a", None, "fewer than none", "odd", "insert"),
        ("c", 2, None, None, "insert"),
    ]
    dead = {row["v"]: row["_reason"] for row in kernel.dead_letters.take().to_pylist()}
    assert sorted(dead) == [13, 14, 15, 16]
    assert "'why': " in dead[13]
    assert "a row to the side output 'ood': did you mean 'odd'?" in dead[14]
    assert "a column 'm': there is 'k', 'n'." in dead[15]
    assert "the _change_type 'remove': " in dead[16]
    by_columns = kernel_of(ColumnAside()).step_timed(MemoryState(), [of_tick], [moments([1], [0])])
    assert [tuple(row.values())[:-1] for row in by_columns.to_pylist()][:3] == [
        ("a", None, "all", "odd"),
        ("a", 2, None, None),
        ("a", 0, None, None),
    ]


class TwoTimers(hr.Processor, each_key=True):
    output = "k STRING, what STRING"
    first = hr.timer(clock="processing")
    second = hr.timer(clock="processing")

    def on_row(self, row: Row, ctx: Any) -> None:
        ctx["first"] = ctx.now + timedelta(microseconds=row["v"])
        ctx["second"] = ctx.now + timedelta(microseconds=20)

    def on_timer(self, key: Row, ctx: Any) -> None:
        ctx.emit(key, what=ctx.timer)
        if ctx.timer == "second":
            ctx["first"] = None


@pytest.mark.parametrize(("delay", "order"), [(5, ["first", "second"]), (25, ["second"])])
def test_timers_of_processing_time_fire_in_the_order_of_their_times(
    delay: int, order: list[str]
) -> None:
    rows = table([{"k": "a", "v": delay, "at": at(0), "_tick": 1}])
    kernel, state = kernel_of(TwoTimers()), MemoryState()
    emitted = kernel.step_timed(state, [rows], [moments([1, 9], [UNSTARTED, UNSTARTED])])
    assert [(row["_tick"], row["what"]) for row in emitted.to_pylist()] == [(9, w) for w in order]
    assert not state.values


def test_a_key_without_rows_for_its_ttl_is_forgotten_and_begins_anew() -> None:
    kernel, state = kernel_of(Reading(), ttl_us=100), MemoryState()
    assert step(kernel, state, 1, ("a", 1), ("b", 2)) == [("a", None), ("b", None)]
    assert step(kernel, state, 8, ("a", 3)) == [("a", 1)]
    assert kernel.due(state) == 110
    assert step(kernel, state, 11, ("b", 4)) == [("b", None)], "its time was up with this tick"
    assert step(kernel, state, 17, ("a", 5)) == [("a", 3)], "it was used meanwhile"
    assert step(kernel, state, 60) == []
    assert kernel.counts["expired"] == 2
    assert not state.values


class Joined(hr.Processor, each_key=True):
    output = "k STRING, what STRING"
    paid = hr.state("MAP<STRING, INT>", default={})

    def on_row(self, row: Row, ctx: Any) -> Row:
        return {"k": row["k"], "what": f"{row['v']}: {ctx['paid']}"}

    def on_payments(self, row: Row, ctx: Any) -> None:
        ctx["paid"][row["_change_type"]] = row["sum"]


def test_another_input_has_its_own_method_and_tables_give_changes() -> None:
    payments = pa.schema([("sum", pa.int32()), ("k", pa.string())])
    kernel = kernel_of(
        Joined(),
        ProcessorInput(None, SCHEMA, is_table=False),
        ProcessorInput("payments", payments, is_table=True),
    )
    changes = payments.append(pa.field(CHANGE_TYPE, pa.string()))
    paid = table(
        [
            {"k": "a", "sum": 5, CHANGE_TYPE: "insert", "_tick": 1},
            {"k": "a", "sum": 6, CHANGE_TYPE: "update_postimage", "_tick": 2},
        ],
        changes.append(pa.field("_tick", pa.int64())),
    )
    rows = table([{"k": "a", "v": v, "at": at(0), "_tick": v} for v in (1, 2, 3)])
    marks = moments([1, 2, 3], [0, 0, 0])
    emitted = kernel.step_timed(MemoryState(), [rows, paid], [marks, marks])
    assert emitted["what"].to_pylist() == [
        "1: {}",
        "2: {'insert': 5}",
        "3: {'insert': 5, 'update_postimage': 6}",
    ]


class Dice(hr.Processor, each_key=True):
    output = "k STRING, v DOUBLE"

    def on_row(self, row: Row, ctx: Any) -> Row:
        return {"k": row["k"], "v": ctx.random.random()}


class ColumnDice(hr.Processor):
    output = "k STRING, v DOUBLE"

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        first, second = ctx.random(), ctx.random()
        assert (first != second).all()
        assert ((first >= 0) & (first < 1)).all()
        return ctx.keys.append_column("v", pa.array(first))


@pytest.mark.parametrize("dice", [Dice(), ColumnDice()], ids=["row", "columns"])
def test_random_numbers_depend_on_key_and_tick_alone(dice: Processor) -> None:
    keys = [f"k{number}" for number in range(50)]
    together = step(kernel_of(dice), MemoryState(), 1, *((key, 0) for key in keys))
    alone = [step(kernel_of(dice), MemoryState(), 1, (key, 0))[0] for key in keys]
    assert sorted(together) == sorted(alone)
    assert len({value for _, value in together}) == 50
    assert step(kernel_of(dice), MemoryState(), 2, ("k1", 0))[0] not in alone


def test_random_numbers_of_a_key_do_not_depend_on_the_rows_between() -> None:
    """They did: each row behind another key's began the numbers anew, and which keys a shard has
    depends on the number of shards.
    """
    alone = step(kernel_of(Dice()), MemoryState(), 1, ("a", 0), ("a", 0))
    between = step(kernel_of(Dice()), MemoryState(), 1, ("a", 0), ("b", 0), ("a", 0))
    assert [row for row in between if row[0] == "a"] == alone
    assert len(set(between)) == 3


class InputDice(hr.Processor, each_key=True):
    output = "k STRING, v DOUBLE"
    often = hr.timer()

    def on_row(self, row: Row, ctx: Any) -> Row:
        ctx["often"] = at(1)
        return {"k": row["k"], "v": ctx.random.random()}

    def on_more(self, row: Row, ctx: Any) -> Row:
        return {"k": row["k"], "v": ctx.random.random()}

    def on_timer(self, key: Row, ctx: Any) -> Row:
        if ctx.fired_at < at(4):
            ctx["often"] = ctx.fired_at + timedelta(microseconds=1)
        return {"k": key["k"], "v": ctx.random.random()}


class ColumnInputDice(hr.Processor):
    output = "k STRING, v DOUBLE"
    often = hr.timer()

    def on_rows(self, rows: pa.Table, ctx: Any) -> pa.Table:
        ctx["often"] = at(1)
        return ctx.keys.append_column("v", pa.array(ctx.random()))

    def on_more(self, rows: pa.Table, ctx: Any) -> pa.Table:
        return ctx.keys.append_column("v", pa.array(ctx.random()))

    def on_timer(self, keys: pa.Table, ctx: Any) -> pa.Table:
        if ctx.fired_at[0].as_py() < at(4):
            ctx["often"] = ctx.fired_at[0].as_py() + timedelta(microseconds=1)
        return keys.append_column("v", pa.array(ctx.random()))


@pytest.mark.parametrize("dice", [InputDice(), ColumnInputDice()], ids=["row", "columns"])
def test_each_input_and_each_time_that_a_timer_fires_has_other_random_numbers(
    dice: Processor,
) -> None:
    sources = (
        ProcessorInput(None, SCHEMA, is_table=False),
        ProcessorInput("more", SCHEMA, is_table=False),
    )
    row = table([{"k": "a", "v": 1, "at": at(0), "_tick": 1}])
    marks = [moments([1], [10])] * 2
    emitted = kernel_of(dice, *sources).step_timed(MemoryState(), [row, row], marks)
    assert len(emitted) == len(set(emitted["v"].to_pylist())) == 6


def test_a_default_takes_no_room_and_null_forgets() -> None:
    kernel, state = kernel_of(ColumnSums()), MemoryState()
    rows = table([{"k": "a", "v": 0, "at": at(0), "_tick": 1}])
    kernel.step_timed(state, [rows], [moments([1], [0])])
    assert len(state.values) == 2, "the list and the timer"
    kernel.step_timed(state, [rows.slice(0, 0)], [moments([2], [20], 0)])
    (value,) = state.values.values()
    assert value.startswith(b"\x01")


def test_state_of_a_newer_version_is_refused() -> None:
    kernel, state = kernel_of(Reading()), MemoryState()
    step(kernel, state, 1, ("a", 1))
    state.values = {name: b"\x02" + value[1:] for name, value in state.values.items()}
    with pytest.raises(NewerFormat, match="newer Headrace"):
        step(kernel, state, 2, ("a", 1))


def test_a_clock_must_be_one_of_two() -> None:
    with pytest.raises(PlanError, match="clock 'wall'"):
        hr.timer(clock="wall")


class Debounced(hr.Processor, each_key=True):
    output = "k STRING, at TIMESTAMP"
    quiet = hr.timer()
    other = hr.timer()

    def on_row(self, row: Row, ctx: Any) -> None:
        if row["v"] == 0:
            ctx["quiet"] = None
        elif row["v"] == 1:
            ctx["quiet"] = row["at"]
        else:
            ctx["other"] = row["at"]

    def on_timer(self, key: Row, ctx: Any) -> None:
        ctx.emit(key, at=ctx.fired_at)


def test_a_timer_that_moves_to_later_times_moves_its_entry_once() -> None:
    kernel, state = kernel_of(Debounced()), MemoryState()

    def tick(number: int, *rows: tuple[str, int, int], watermark: int = 0) -> list[tuple[Any, int]]:
        of_tick = table([{"k": k, "v": v, "at": at(us), "_tick": number} for k, v, us in rows])
        emitted = kernel.step_timed(state, [of_tick], [moments([number], [watermark])])
        return [(row["k"], us(row["at"])) for row in emitted.to_pylist()]

    def timers_put() -> int:
        return sum(name.startswith(b"t") for name in state.take_changes())

    assert tick(1, ("a", 1, 10), ("b", 1, 10)) == []
    assert timers_put() == 2
    assert tick(2, ("a", 1, 20), ("b", 1, 30), ("b", 2, 15)) == []
    assert timers_put() == 1  # `other` of b
    assert kernel.due(state) == 10
    assert tick(3, watermark=12) == []  # both are due, and are later by now
    assert kernel.due(state) == 15
    assert tick(4, ("b", 1, 14), watermark=14) == [("b", 14)]  # earlier than its entry
    assert tick(5, watermark=15) == [("b", 15)]
    assert tick(6, ("a", 0, 0), watermark=15) == []
    assert kernel.due(state) is None
    assert not state.values


def test_two_timers_of_a_key_that_were_due_at_once_fired_one_a_tick() -> None:
    kernel, state = kernel_of(Debounced()), MemoryState()
    rows = [{"k": "b", "v": which, "at": at(27), "_tick": 1} for which in (1, 2)]
    emitted = kernel.step_timed(state, [table(rows)], [moments([1], [27])])
    assert [us(row["at"]) for row in emitted.to_pylist()] == [27, 27]
    assert kernel.due(state) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 40), st.integers(0, 9)),
        max_size=12,
    )
)
def test_timers_fire_whatever_times_they_were_moved_to(
    rows: list[tuple[str, int, int, int]],
) -> None:
    kernel, state, watermark = kernel_of(Debounced()), MemoryState(), 0
    timers: dict[tuple[str, int], int] = {}
    for tick, (key, which, time, step_us) in enumerate(rows):
        watermark += step_us
        if which == 0:
            timers.pop((key, 1), None)
        else:
            timers[key, which] = time
        of_tick = table([{"k": key, "v": which, "at": at(time), "_tick": tick}])
        emitted = kernel.step_timed(state, [of_tick], [moments([tick], [watermark])])
        due = {timer: time for timer, time in timers.items() if time <= watermark}
        for timer in due:
            del timers[timer]
        assert sorted((row["k"], us(row["at"])) for row in emitted.to_pylist()) == sorted(
            (key, time) for (key, _), time in due.items()
        )
    assert kernel.due(state) is None or timers
