"""Selections of subscribers, evaluated for all at once, against one row at a time in Python; and
the event loop, which many of them must not hold up.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.serve.channels import Hub, SourceReset, StreamEvent
from headrace.serve.requests import Limits, row_objects
from headrace.serve.selections import RowSelection, evaluate, parse_selection
from headrace.types.schema import parse_schema
from tests.views.store_contract import changes, update

SCHEMA = parse_schema("k DOUBLE, g STRING, n BIGINT")
KEY = ("k", "g")
Row = tuple[Any, ...]


def selection(texts: Sequence[str] = (), where: str | None = None) -> RowSelection:
    chosen = parse_selection("v", SCHEMA, KEY, texts, where)
    assert chosen is not None
    return chosen


# The obvious computation


def rank(value: float) -> tuple[bool, float]:
    """The order of floats: NaN equals itself and is larger than all numbers."""
    return math.isnan(value), 0.0 if math.isnan(value) else value


def holds(value: Any, operator: str, wanted: Any) -> bool:
    if value is None or wanted is None:
        same = value is None and wanted is None
        return (same if operator == "=" else not same) if wanted is None else False
    left, right = (rank(value), rank(wanted)) if type(wanted) is float else (value, wanted)
    return bool(
        {"=": left == right, "!=": left != right, "<": left < right, ">=": left >= right}[operator]
    )


def expected(
    rows: list[tuple[str, Row]], comparisons: list[tuple[str, str, Any]]
) -> list[tuple[str, Row]]:
    """Each change whose row meets all comparisons; half an update is an insert or a delete."""

    def meets(row: Row) -> bool:
        return all(
            holds(row[SCHEMA.get_field_index(column)], operator, wanted)
            for column, operator, wanted in comparisons
        )

    chosen = []
    for index, (kind, row) in enumerate(rows):
        if not meets(row):
            continue
        if kind == "update_preimage" and not meets(rows[index + 1][1]):
            chosen.append(("delete", row))
        elif kind == "update_postimage" and not meets(rows[index - 1][1]):
            chosen.append(("insert", row))
        else:
            chosen.append((kind, row))
    return chosen


VALUES: dict[str, list[Any]] = {
    "k": [0.0, -0.0, 1.5, math.nan, None, math.inf],
    "g": ["a", "b", "it's", None],
    "n": [1, 2, 3, None],
}


def random_row(chance: random.Random) -> Row:
    return tuple(chance.choice(values) for values in VALUES.values())


def written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else "Infinity" if math.isinf(value) else repr(value)
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


@pytest.mark.parametrize("seed", range(20))
def test_all_at_once_is_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    listed: list[tuple[int, str, Row]] = []
    for _ in range(chance.randrange(1, 60)):
        if chance.random() < 0.6:
            listed += update(1, random_row(chance), random_row(chance))
        else:
            listed.append((1, chance.choice(["insert", "delete"]), random_row(chance)))
    rows = changes(*listed, schema=SCHEMA).drop_columns(["_tick"])
    comparisons: dict[RowSelection, list[tuple[str, str, Any]]] = {}
    for _ in range(60):
        chosen = [
            (column, operator, value)
            for column in chance.sample(list(VALUES), chance.randrange(1, 4))
            for operator in [chance.choice(["=", "=", "!=", "<", ">="])]
            for value in [chance.choice(VALUES[column])]
            if (value is not None or operator in {"=", "!="}) and (column != "g" or value)
        ]
        if chosen:
            where = " and ".join(f"{c} {op} {written(value)}" for c, op, value in chosen)
            comparisons[selection(where=where)] = chosen
    found = evaluate(rows, list(comparisons), row_objects)
    pairs = [(kind, row) for _, kind, row in listed]
    for chosen_selection, of in comparisons.items():
        wanted = expected(pairs, of)
        (one_by_one,) = (row_objects(chosen_selection(rows)),)
        assert found.get(chosen_selection, []) == one_by_one, of
        got = [json.loads(text) for text in one_by_one]
        assert [(row["_change_type"], row["g"], row["n"]) for row in got] == [
            (kind, row[1], row[2]) for kind, row in wanted
        ], of


def test_nan_was_no_key_of_a_subscriber() -> None:
    rows = changes((1, "insert", (math.nan, "a", 1)), (1, "insert", (1.0, "a", 2)), schema=SCHEMA)
    assert selection(["NaN"])(rows)["n"].to_pylist() == [1]
    assert selection(where="k >= 5")(rows)["n"].to_pylist() == [1]
    assert selection(where="k < NaN")(rows)["n"].to_pylist() == [2]


# Ten thousand subscribers


class TableSource:
    """A source whose events are tables that a test puts into `pending`."""

    def __init__(self) -> None:
        self.pending: list[pa.Table] = []
        self.position = 0

    def start(self) -> int:
        return 0

    def read(self, _after: int) -> tuple[int, list[StreamEvent]]:
        events = []
        while self.pending:
            rows = self.pending.pop(0)
            self.position += 1
            data = self.encode("", self.objects(rows))
            events.append(StreamEvent(str(self.position), rows, data))
        return self.position, events

    def read_missed(self, _after: int, _up_to: int) -> Iterator[StreamEvent]:
        raise SourceReset

    def is_behind(self, position: int, target: int) -> bool:
        return position < target

    def id(self, position: int) -> str:
        return str(position)

    def objects(self, rows: pa.Table) -> list[str]:
        return row_objects(rows)

    def heartbeat(self, _id: str) -> bytes:
        return b""

    def encode(self, _id: str, objects: Sequence[str]) -> bytes:
        return f"[{','.join(objects)}]".encode()


def large_tick(count: int) -> pa.Table:
    numbers = np.arange(count)
    table = pa.table({"k": numbers * 1.0, "g": pa.repeat("a", count), "n": numbers}).cast(SCHEMA)
    return table.append_column("_change_type", pa.repeat("insert", count))


async def longest_block(selections: list[RowSelection], rows: pa.Table) -> tuple[float, list[int]]:
    """Publish some rows to subscribers: the longest that the event loop was busy, and how many rows
    came to each.
    """
    hub, source = Hub(Limits(ring_bytes=1 << 30)), TableSource()
    hub.start()
    channel = await hub.channel("x", lambda: source)
    received = [-1] * len(selections)

    async def follow(number: int) -> None:
        with hub.subscribed(channel):
            async for data in hub.follow(channel, 0, selections[number]):
                received[number] = data.count(b'"n":')

    tasks = [asyncio.create_task(follow(number)) for number in range(len(selections))]
    while channel.subscribers < len(selections):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    longest = 0.0
    source.pending.append(rows)
    deadline = time.monotonic() + 60
    while -1 in received and time.monotonic() < deadline:
        before = time.perf_counter()
        await asyncio.sleep(0)
        longest = max(longest, time.perf_counter() - before)
        await asyncio.sleep(0.0005)
    await hub.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    return longest, received


@pytest.mark.parametrize("kind", ["equal", "by key", "many conditions"])
def test_filters_were_evaluated_on_the_event_loop_for_each_subscriber(kind: str) -> None:
    """10,000 filters over 100,000 changes took 36 s of the event loop; a tenth of that is here."""
    texts = {
        "equal": ["n >= 9990"] * 1_000,
        "by key": [f"k = {number}" for number in range(1_000)],
        "many conditions": [f"n >= {9_000 + number % 20}" for number in range(1_000)],
    }
    longest, received = asyncio.run(
        longest_block([selection(where=text) for text in texts[kind]], large_tick(10_000))
    )
    if kind == "many conditions":
        assert received == [1_000 - number % 20 for number in range(1_000)]
    else:
        assert received == ([10] if kind == "equal" else [1]) * 1_000
    assert longest < 0.25, "3.6 s before; a few milliseconds on a quiet machine"


def test_a_subscriber_of_a_quiet_key_is_not_dropped_when_the_ring_moves_on() -> None:
    async def follow() -> list[bytes]:
        hub, source = Hub(Limits(ring_events=4, poll_s=0.001)), TableSource()
        hub.start()
        channel = await hub.channel("x", lambda: source)
        got: list[bytes] = []

        async def listen() -> None:
            with hub.subscribed(channel):
                async for data in hub.follow(channel, 0, selection(where="n = 7")):
                    got.append(data)  # noqa: PERF401 - it is read meanwhile

        task = asyncio.create_task(listen())
        await asyncio.sleep(0.05)
        for number in range(20):
            source.pending.append(large_tick(5 if number < 19 else 8))
            while source.pending:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        while not got:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await hub.close()
        await asyncio.gather(task, return_exceptions=True)
        return got

    (data,) = asyncio.run(asyncio.wait_for(follow(), 10))
    assert [row["n"] for row in json.loads(data)] == [7]
