"""A pipeline with a bit of everything that runs without Spark SQL, and what must come out of it,
computed plainly from the log and the recorded ticks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

import headrace as hr
from headrace.columnar.columns import CHANGE_TYPE
from headrace.columnar.keys import encode_keys, key_groups
from headrace.engine.ticks import Tick
from headrace.log.api import Log
from headrace.log.dead_letters import read_dead_letters
from headrace.pipeline.view import View
from headrace.testing.pipelines import PipelineTest
from headrace.views.reader import ViewReader
from tests.operators.oracle import Oracle

Row = dict[str, Any]
Changes = list[tuple[int, Row]]  # a tick, and what changed in it
Place = tuple[int | None, int | None]  # partition and offset; of a row that a stage made, neither
ORDERS = "k BIGINT, v BIGINT, note STRING"
PEOPLE = "id BIGINT, city STRING, age INT"


class Some(hr.Pipeline):
    """A pipeline without some of its outputs."""

    def __init__(self, name: str, without: Collection[str]) -> None:
        super().__init__(name)
        self.without = without

    def write(self, name: str, rows: Any, **options: Any) -> None:
        if name not in self.without:
            super().write(name, rows, **options)

    def view(self, name: str, rows: Any, **options: Any) -> View:
        return View(self, name) if name in self.without else super().view(name, rows, **options)


def everything(without: Collection[str] = ()) -> hr.Pipeline:
    """Two inputs of one kind and a table; a stage behind a stage; a stage with several consumers;
    unions; aggregates that see the order of rows.
    """
    pipeline = Some("all", without)
    orders = pipeline.topic("orders", schema=ORDERS, partitions=2)
    late_orders = pipeline.topic("late_orders", schema=ORDERS)
    people = pipeline.table("people", schema=PEOPLE, key="id", partitions=2)
    totals = orders.group_by("k").aggregate(
        n=hr.agg.count(),
        s=hr.agg.sum("v"),
        first=hr.agg.first("v"),
        last=hr.agg.last("note"),
        all=hr.agg.collect("v", max_values=1000),
        name="totals",
    )
    pipeline.write("totals", totals, partitions=3)
    pipeline.view("by_key", totals)
    pipeline.view(
        "by_count",
        totals.group_by("n").aggregate(
            keys=hr.agg.count(), highest=hr.agg.max("s"), name="by_count"
        ),
    )
    pipeline.write(
        "counted",
        orders.group_by("note").aggregate(n=hr.agg.count(), lowest=hr.agg.min("v"), name="counted"),
        partitions=2,
    )
    pipeline.view(
        "cities",
        people.group_by("city").aggregate(
            n=hr.agg.count(), oldest=hr.agg.max("age"), name="cities"
        ),
    )
    pipeline.view("newest", orders.union(late_orders).to_table("k", name="newest"))
    both = [
        each.group_by("k").aggregate(n=hr.agg.count(), name=name).changes()
        for name, each in (("first", orders), ("second", late_orders))
    ]
    pipeline.view(
        "story",
        both[0]
        .union(both[1])
        .group_by("k")
        .aggregate(emitted=hr.agg.collect("n", max_values=1000), name="story"),
    )
    return pipeline


KEYS = {
    "totals": "k",
    "by_key": "k",
    "by_count": "n",
    "counted": "note",
    "cities": "city",
    "newest": "k",
    "story": "k",
}
VIEWS, TOPICS = ("by_key", "by_count", "cities", "newest", "story"), ("totals", "counted")


@dataclass
class Expected:
    """What each output must tell, tick by tick, and which rows of which step must become dead
    letters: those without a primary key. Null is a group like others.
    """

    emitted: dict[str, Changes]
    diverted: dict[str, list[Place]]


def expected(log: Log, ticks: Iterable[Tick]) -> Expected:
    plan = everything().plan()
    steps = {step.name: step for step in plan.steps()}

    def oracle(name: str, **options: Any) -> Oracle:
        step: Any = steps[name]
        return Oracle(step.input.schema, step.by, step.aggregates, **options)

    totals, counted, by_count, cities = (
        oracle("totals"),
        oracle("counted"),
        oracle("by_count", row_key=["k"]),
        oracle("cities", row_key=["id"]),
    )
    first, second, story = oracle("first"), oracle("second"), oracle("story")
    people, newest = Latest("id"), Latest("k")
    emitted: dict[str, Changes] = defaultdict(list)
    diverted: dict[str, list[Place]] = defaultdict(list)
    for number, rows in rows_by_tick(log, ("late_orders", "orders", "people"), ticks):
        orders, late = rows["orders"], rows["late_orders"]
        changed = totals.tick(number, orders)
        for name, made in {
            "totals": changed,
            "by_key": changed,
            "by_count": by_count.tick(number, changed),
            "counted": counted.tick(number, orders),
            "cities": cities.tick(number, people.tick(rows["people"])),
            "newest": newest.tick(with_key([*late, *orders], "k", diverted["newest"])),
            "story": story.tick(
                number,
                as_rows(
                    [
                        *first.tick(number, orders),
                        *second.tick(number, late),
                    ]
                ),
            ),
        }.items():
            emitted[name] += [
                (number, {column: value for column, value in row.items() if column != "_tick"})
                for row in made
            ]
    return Expected(emitted, diverted)


def as_rows(changes: list[Row]) -> list[Row]:
    """What `changes()` makes of a table."""
    return [
        {"k": change["k"], "n": change["n"], "change_type": change[CHANGE_TYPE]}
        for change in changes
    ]


def with_key(rows: list[Row], key: str, without: list[Place]) -> list[Row]:
    """Rows without a key are dead-lettered when they are inserted, not again when deleted."""
    come = [row for row in rows if row.get(CHANGE_TYPE) not in {"update_preimage", "delete"}]
    without += [(row.get("_partition"), row.get("_offset")) for row in come if row[key] is None]
    return [row for row in rows if row[key] is not None]


class Latest:
    """The newest row of each key."""

    def __init__(self, key: str) -> None:
        self.key, self.rows = key, dict[Any, Row]()

    def tick(self, rows: list[Row]) -> list[Row]:
        before = dict(self.rows)
        for row in rows:
            plain = {name: value for name, value in row.items() if not name.startswith("_")}
            if row.get(CHANGE_TYPE) == "delete":
                self.rows.pop(row[self.key], None)
            else:
                self.rows[row[self.key]] = plain
        touched = sorted({row[self.key] for row in rows})
        return [
            change
            for key in touched
            for change in self._emitted(before.get(key), self.rows.get(key))
        ]

    @staticmethod
    def _emitted(was: Row | None, now: Row | None) -> list[Row]:
        if was == now:
            return []
        if was is None or now is None:
            return (
                [{**now, CHANGE_TYPE: "insert"}]
                if now
                else [{**(was or {}), CHANGE_TYPE: "delete"}]
            )
        return [{**was, CHANGE_TYPE: "update_preimage"}, {**now, CHANGE_TYPE: "update_postimage"}]


def rows_by_tick(
    log: Log, topics: Iterable[str], ticks: Iterable[Tick]
) -> Iterator[tuple[int, dict[str, list[Row]]]]:
    """Rows in the pipeline's order: tick, topic, partition, offset."""
    found = {
        topic: sorted(
            log.read(topic).to_pylist(), key=lambda row: (row["_partition"], row["_offset"])
        )
        for topic in topics
    }
    before = Tick(0, 0, {})
    for tick in ticks:
        inside = {
            topic: [
                row
                for row in rows
                if before.end(topic, row["_partition"])
                <= row["_offset"]
                < tick.end(topic, row["_partition"])
            ]
            for topic, rows in found.items()
        }
        yield tick.number, inside
        before = tick


# What came out


def check(test: PipelineTest) -> None:
    """Every output against the oracle, tick by tick and row by row; every diverted row once."""
    ticks = list(test.runner.journal.between(0, test.runner.tick))
    right = expected(test.log, ticks)
    for topic in TOPICS:
        check_topic(test, topic, right.emitted[topic])
    with ViewReader(test.root / "state" / "views.db") as reader:
        for view in VIEWS:
            emitted = [
                (tick, row)
                for tick, table in reader.changes_since(view, 0)
                for row in table.to_pylist()
            ]
            assert emitted == in_groups(right.emitted[view], view), f"the view {view}"
            assert {row[KEYS[view]]: row for row in reader.table(view).to_pylist()} == folded(
                right.emitted[view], KEYS[view]
            )
    for topic in TOPICS:
        right.diverted[f"{topic}.topic"] = [(None, None)] * sum(
            row[KEYS[topic]] is None and row[CHANGE_TYPE] in {"insert", "update_postimage"}
            for _, row in right.emitted[topic]
        )
    for step, offsets in right.diverted.items():
        found = read_dead_letters(test.log, step) if offsets else []
        assert Counter(
            (dead_letter["source_partition"], dead_letter["source_offset"]) for dead_letter in found
        ) == Counter(offsets), f"dead letters of {step}"
    check_counts(test, right.diverted)


READS = {
    "totals": ["orders"],
    "counted": ["orders"],
    "newest": ["orders", "late_orders"],
    "first": ["orders"],
    "second": ["late_orders"],
}


def check_counts(test: PipelineTest, diverted: dict[str, list[Place]]) -> None:
    """Rows in are rows used and rows diverted, exactly, as the ledger has counted them since the
    beginning.
    """
    counts = test.runner.leading.entry.counts
    for step, topics in READS.items():
        rows = sum(sum(test.log.end_offsets(topic).values()) for topic in topics)
        assert counts.get(f"{step}.diverted", 0) == len(diverted[step]), (
            f"rows diverted from {step}"
        )
        assert counts.get(f"{step}.rows_in", 0) + counts.get(f"{step}.diverted", 0) == rows, (
            f"rows of {step}"
        )


def check_topic(test: PipelineTest, topic: str, emitted: Changes) -> None:
    """A topic's rows in each partition are those of the oracle in their order, but for those with a
    null key, which a table's topic cannot have; and the partition is the key's.
    """
    info, key = test.log.topic(topic), KEYS[topic]
    rows = test.log.read(topic).to_pylist()
    partition_of = {row[key]: row["_partition"] for row in rows}
    for partition in range(info.partitions):
        inside = sorted(
            (row for row in rows if row["_partition"] == partition), key=lambda row: row["_offset"]
        )
        plain = [
            {
                name: value
                for name, value in row.items()
                if name in {*info.arrow_schema.names, CHANGE_TYPE}
            }
            for row in inside
        ]
        assert plain == [
            row
            for _, row in emitted
            if row[key] is not None and partition_of.get(row[key], 0) == partition
        ], f"{topic}[{partition}]"


def in_groups(emitted: Changes, view: str) -> Changes:
    """A view keeps the changes of a tick by key group, and in it by key."""
    if not emitted:
        return emitted
    kind = pa.string() if KEYS[view] in {"note", "city"} else pa.int64()
    key = pa.array([row[KEYS[view]] for _, row in emitted], kind)
    groups = key_groups(encode_keys(pa.table({"key": key}), ["key"])).tolist()
    return [
        change
        for _, _, change in sorted(
            ((change[0], group, change) for change, group in zip(emitted, groups, strict=True)),
            key=lambda each: each[:2],
        )
    ]


def folded(emitted: Changes, key: str) -> dict[Any, Row]:
    """What changes amount to. No row is retracted that is not there, and there are never two for a
    key.
    """
    state: dict[Any, Row] = {}
    for _, change in emitted:
        row = {name: value for name, value in change.items() if name != CHANGE_TYPE}
        kind = change[CHANGE_TYPE]
        if kind == "insert":
            assert row[key] not in state
        else:
            assert row[key] in state
        if kind in {"delete", "update_preimage"}:
            assert state[row[key]] == row
        if kind == "delete":
            del state[row[key]]
        elif kind != "update_preimage":
            state[row[key]] = row
    return state
