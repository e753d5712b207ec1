"""State that expires: behind windows nothing grows for ever, and a key with a ttl lives as long as
its rows come, however ticks are grouped into calls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headrace as hr
from headrace.columnar.columns import CHANGE_TYPE, TICK
from headrace.errors import PlanError, StreamOnly
from headrace.operators.kernel import TimedKernel, Watermarks
from headrace.testing.kernels import KernelTest, MemoryState

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
Rows = list[dict[str, Any]]


def clicks(pipeline: hr.Pipeline, name: str = "clicks") -> hr.Stream:
    schema = "k STRING, v BIGINT, at TIMESTAMP"
    return pipeline.topic(name, schema=schema, event_time=hr.EventTime("at"))


def minutes(pipeline: hr.Pipeline, name: str = "clicks") -> hr.Table:
    rows = clicks(pipeline, name).window(hr.tumbling("1 minute"), late=hr.late.correct("5 minutes"))
    return rows.group_by("k").aggregate(n=hr.agg.count())


def behind_windows() -> dict[str, tuple[hr.Table, int]]:
    """Steps that keep state by windows, with their numbers of inputs."""
    shop = hr.Pipeline("shop")
    first, second = minutes(shop), minutes(shop, "views")
    other = second.select("k", "window_start", "window_end", "n AS views")
    on = ["k", "window_start", "window_end"]
    return {
        "top": (first.top(2, by="n", per=["window_start", "window_end"]), 1),
        "aggregate": (first.group_by("window_end").aggregate(largest=hr.agg.max("n")), 1),
        "top by start": (first.top(2, by="n", per="window_start"), 1),
        "aggregate by start": (first.group_by("window_start").aggregate(n=hr.agg.sum("n")), 1),
        "copied": (first.with_columns(until="window_end").top(2, by="n", per="until"), 1),
        "join by start": (
            first.join(
                second.select("k", "window_start", "window_end AS until", "n AS views"),
                on=["k", "window_start"],
            ),
            2,
        ),
        "distinct": (first.distinct("window_end", "n"), 1),
        "join": (first.join(other, on=on), 2),
        "left join": (first.join(other, on=on, how="left"), 2),
        "full join": (first.join(other, on=on, how="full"), 2),
        "renamed": (
            first.select("k", "window_start", "window_end AS until", "n").distinct("until", "k"),
            1,
        ),
    }


def window_rows(number: int, schema: pa.Schema, kind: str = "insert") -> Rows:
    start = NOON + timedelta(minutes=number)
    times = {"window_start": start, "window_end": start + timedelta(minutes=1)}
    times["until"] = times["window_end"]
    return [
        {
            **{name: times[name] for name in schema.names if name in times},
            **{name: n for name in schema.names if name in {"n", "views"}},
            "k": f"key-{n}",
            CHANGE_TYPE: kind,
        }
        for n in range(5)
    ]


def state_bytes(state: MemoryState) -> int:
    return sum(len(key) + len(value) for key, value in state.values.items())


@pytest.mark.parametrize("name", list(behind_windows()))
def test_state_behind_windows_grew_with_every_window(name: str) -> None:
    table, inputs = behind_windows()[name]
    step = table.step
    while step.operation == "settle" or not step.keeps_state:
        step = step.input
    test = KernelTest(hr.pipeline.stream.Table(table.pipeline, step))
    sizes = []
    for number in range(200):
        start = NOON + timedelta(minutes=number)
        rows = [window_rows(number, source.schema) for source in step.inputs]
        assert len(rows) == inputs
        test.tick(*rows, watermark=start + timedelta(minutes=1), horizon=start)
        sizes.append(state_bytes(test.state))
    assert max(sizes[20:]) <= max(sizes[:20]), "10 times as many windows take no more"
    test.tick(*[[] for _ in step.inputs], watermark=NOON + timedelta(days=1))
    assert state_bytes(test.state) == 0


def test_a_window_is_corrected_until_the_horizon_has_passed_it() -> None:
    table, _ = behind_windows()["top"]
    step = table.step
    while step.operation != "top":
        step = step.input
    test = KernelTest(hr.pipeline.stream.Table(table.pipeline, step))
    (source,) = step.inputs
    first = window_rows(0, source.schema)
    end = NOON + timedelta(minutes=1)
    assert len(test.tick(first, watermark=end, horizon=NOON)) == 2
    second = test.tick(
        [{**first[4], CHANGE_TYPE: "delete"}], horizon=end - timedelta(microseconds=1)
    )
    assert {(row[CHANGE_TYPE], row["n"]) for row in second} == {("delete", 4), ("insert", 2)}
    third = test.tick([{**first[3], CHANGE_TYPE: "delete"}], horizon=end)
    assert {(row[CHANGE_TYPE], row["n"]) for row in third} == {("delete", 3), ("insert", 1)}
    assert test.state.values == {}
    assert test.tick([first[3]]) == []
    assert getattr(test.kernel, "counts", None) == {"late": 1}


def test_a_join_on_other_columns_than_the_window_keeps_its_rows() -> None:
    shop = hr.Pipeline("shop")
    names = shop.table("names", schema="k STRING, name STRING", key="k")
    joined = minutes(shop).join(names, on="k")
    assert list(joined.step.settled_keys()) == []


# A ttl: an oracle that goes through ticks one by one


TTL_S = 10


def expected(ticks: Sequence[tuple[int, Rows]], by: str) -> list[dict[str, Any]]:
    """The changes of a table with a ttl, by tick: the obvious computation."""
    live: dict[str, tuple[int, dict[str, Any]]] = {}
    changes = []
    for tick, (now, rows) in enumerate(ticks, 1):
        before = {key: row for key, (_, row) in live.items()}
        live = {key: each for key, each in live.items() if each[0] + TTL_S > now}
        for row in rows:
            key = row["k"]
            if by == "aggregate":
                old = live[key][1]["n"] if key in live else 0
                live[key] = now, {"k": key, "n": old + 1}
            else:
                live[key] = now, row
        after = {key: row for key, (_, row) in live.items()}
        for key in sorted(before.keys() | after.keys()):
            old, new = before.get(key), after.get(key)
            if old == new:
                continue
            if old is not None:
                kind = "delete" if new is None else "update_preimage"
                changes.append({**old, CHANGE_TYPE: kind, TICK: tick})
            if new is not None:
                kind = "insert" if old is None else "update_postimage"
                changes.append({**new, CHANGE_TYPE: kind, TICK: tick})
    return changes


def run(declared: hr.Table, ticks: Sequence[tuple[int, Rows]], cuts: Sequence[int]) -> Any:
    """What a step emits if ticks are cut into calls, and how large its state is at the end."""
    test = KernelTest(declared)
    kernel, emitted = test.kernel, list[dict[str, Any]]()
    assert isinstance(kernel, TimedKernel)
    schema = test.step.inputs[0].schema.append(pa.field(TICK, pa.int64()))
    for start, stop in zip([0, *cuts], [*cuts, len(ticks)], strict=True):
        part = ticks[start:stop]
        rows = [{**row, TICK: start + at} for at, (_, fed) in enumerate(part, 1) for row in fed]
        times = np.array([now * 1_000_000 for now, _ in part], np.int64)
        watermarks = Watermarks(
            ticks=np.arange(start + 1, stop + 1), times_us=times, watermark=times, horizon=times
        )
        table = pa.Table.from_pylist(rows, schema)
        emitted += kernel.step_timed(test.state, [table], [watermarks]).to_pylist()
        test.state = test.state.copy()
    return emitted, len(test.state.values)


@pytest.mark.parametrize("by", ["aggregate", "to_table"])
@pytest.mark.parametrize("seed", range(8))
def test_keys_expire_in_the_same_ticks_under_any_batching(by: str, seed: int) -> None:
    chance = random.Random(seed)
    shop = hr.Pipeline("shop")
    rows = shop.topic("rows", schema="k STRING, v BIGINT")
    declared = (
        rows.group_by("k").aggregate(n=hr.agg.count(), ttl=f"{TTL_S} seconds")
        if by == "aggregate"
        else rows.to_table("k", ttl=f"{TTL_S} seconds")
    )
    now, ticks = 0, list[tuple[int, Rows]]()
    for _ in range(40):
        now += chance.choice([0, 1, 1, 3, 9, 10, 25])
        count = chance.choice([0, 0, 1, 3])
        ticks.append(
            (now, [{"k": chance.choice("abc"), "v": chance.randrange(3)} for _ in range(count)])
        )
    wanted = expected(ticks, by)
    for cuts in ([], range(1, 40), sorted(chance.sample(range(1, 40), 5))):
        emitted, _ = run(declared, ticks, list(cuts))
        assert sorted(map(str, emitted)) == sorted(map(str, wanted))
        assert [row[TICK] for row in emitted] == sorted(row[TICK] for row in emitted)
    ticks.append((now + TTL_S, []))
    assert run(declared, ticks, [20])[1] == 0, "nothing stays behind"


@pytest.mark.parametrize("by", ["aggregate", "to_table"])
def test_keys_that_never_come_back_stayed_for_ever(by: str) -> None:
    shop = hr.Pipeline("shop")
    rows = shop.topic("rows", schema="k STRING, v BIGINT")
    ttl = {"ttl": f"{TTL_S} seconds"}
    declared = (
        rows.group_by("k").aggregate(n=hr.agg.count(), **ttl)  # type: ignore[arg-type]
        if by == "aggregate"
        else rows.to_table("k", ttl=ttl["ttl"])
    )
    sizes = [
        run(declared, [(now, [{"k": f"{now}", "v": 1}]) for now in range(count)], [count // 2])[1]
        for count in (30, 300)
    ]
    assert sizes[0] == sizes[1]


def test_a_ttl_of_a_table_is_refused() -> None:
    shop = hr.Pipeline("shop")
    table = shop.table("rows", schema="k STRING, v BIGINT", key="k")
    with pytest.raises(StreamOnly, match="as long as the table has rows"):
        table.group_by("v").aggregate(n=hr.agg.count(), ttl="1 day")
    rows = shop.topic("others", schema="k STRING, v BIGINT")
    with pytest.raises(PlanError, match="is zero"):
        rows.to_table("k", ttl="0 seconds")
