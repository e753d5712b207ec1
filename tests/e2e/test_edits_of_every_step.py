"""Random edits of pipelines with every kind of step: whatever is edited, and while rows come, each
view has the rows that the newest definition has over the same ticks from the first one on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

import headrace as hr
from headrace.errors import IncompatibleChange, PlanChanged
from headrace.testing.pipelines import PipelineTest

pytestmark = pytest.mark.usefixtures("no_syncs")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SCHEMA = "id BIGINT NOT NULL, k BIGINT, v BIGINT, w BIGINT, at TIMESTAMP, till TIMESTAMP"
Rows = Any
"""A stream or a table."""


@dataclass(frozen=True)
class Definition:
    """A view: the kind of its last steps, and settings of which each kind uses some."""

    kind: str
    condition: str
    aggregate: str
    column: str
    key: str
    size: str
    window: str
    late: str
    emit: str
    n: int
    how: str
    after: str
    measure: str
    history: str
    ttl: str | None
    is_table: bool

    def spec(self) -> hr.agg.AggregateSpec:
        if self.aggregate == "count":
            return hr.agg.count()
        spec: hr.agg.AggregateSpec = getattr(hr.agg, self.aggregate)(self.column)
        return spec

    def windows(self, rows: Rows) -> Rows:
        gap = "20 seconds" if self.size == "1 minute" else "40 seconds"
        window: dict[str, Any] = {
            "tumbling": hr.tumbling(self.size),
            "hopping": hr.hopping(self.size, every="30 seconds"),
            "session": hr.session(gap),
            "sliding": hr.sliding(self.size),
        }
        late = hr.late.drop() if self.late == "drop" else hr.late.correct(self.late)
        return rows.window(window[self.window], late=late, emit=self.emit).group_by(self.key)

    def folded(self, rows: Rows) -> Rows:
        """A stream as a table."""
        if self.is_table:
            return rows.to_table(self.key, by="_arrival")
        return rows.group_by(self.key).aggregate(x=self.spec())


OPTIONS: dict[str, list[Any]] = {
    "condition": ["v >= 0", "v > 2", "w < 3"],
    "aggregate": ["count", "sum", "max", "first", "last", "count_distinct"],
    "column": ["v", "w"],
    "key": ["k", "w"],
    "size": ["1 minute", "2 minutes"],
    "window": ["tumbling", "hopping", "session", "sliding"],
    "late": ["drop", "1 minute", "5 minutes"],
    "emit": ["final", "changes"],
    "n": [1, 2],
    "how": ["inner", "left"],
    "after": ["skip past last row", "skip to next row"],
    "measure": ["first(v)", "last(w)"],
    "history": ["1 minute", "1 day"],
    "ttl": [None, "20 milliseconds", "1 hour"],
    "is_table": [False, True],
}


@dataclass(frozen=True)
class Inputs:
    """The other inputs of a pipeline."""

    others: hr.Stream
    items: hr.Table
    rules: hr.Table


def as_of(definition: Definition, rows: Rows, inputs: Inputs) -> Rows:
    items = inputs.items.as_of("at", history=definition.history)
    return rows.join(items, left_on="v", right_on="id", how=definition.how, suffix="_r")


def matched(definition: Definition, rows: Rows) -> Rows:
    define = {"m": "v > 1", "n": "w > m.v" if definition.n == 1 else "w >= 0"}
    return rows.match(
        "m n+",
        define=define,
        measures={"x": definition.measure},
        within=definition.size,
        after_match=definition.after,
    )


def framed(definition: Definition, rows: Rows) -> Rows:
    frame: dict[str, Any] = (
        {"rows": definition.n} if definition.is_table else {"range": definition.size}
    )
    late = hr.late.drop()
    results = rows.over(definition.key, order_by=["id", "v"], late=late, **frame)
    return results.aggregate(x=definition.spec(), before=hr.over.lag(definition.column))


class Sums(hr.Processor, each_key=True):
    """The sum of a key's values, emitted with each row and once more when event time is there."""

    output = "k BIGINT, x BIGINT"
    total = hr.state("BIGINT", default=0)
    due = hr.timer()

    def __init__(self, column: str, seconds: int) -> None:
        self.column, self.seconds = column, seconds

    def on_row(self, row: Any, ctx: Any) -> None:
        ctx["total"] += row[self.column] or 0
        ctx["due"] = row["at"] + timedelta(seconds=self.seconds)
        ctx.emit(k=row["k"], x=ctx["total"])

    def on_timer(self, key: Any, ctx: Any) -> None:
        ctx.emit(k=key["k"], x=-ctx["total"])


def processed(definition: Definition, rows: Rows) -> Rows:
    seconds = 20 if definition.size == "1 minute" else 60
    sums = rows.process(Sums(definition.column, seconds), key="k", ttl=definition.ttl)
    return sums.to_table("k", by="_arrival")


def repeated(definition: Definition, rows: Rows) -> Rows:
    times = definition.n

    def repeats(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"k": row["k"], "w": row["w"], "v": row["v"] + n} for n in range(times)]

    return definition.folded(rows.flat_map(repeats, "k BIGINT, w BIGINT, v BIGINT"))


def until(definition: Definition, rows: Rows, inputs: Inputs) -> Rows:
    seconds = f"{10 * definition.n} seconds"
    pairs = rows.join(inputs.others, on="k", until="till", before=seconds, suffix="_r")
    return definition.folded(pairs)


WINDOWED = ("condition", "aggregate", "column", "size", "late", "emit")
FOLDED = ("condition", "aggregate", "column")
KINDS: dict[str, tuple[Callable[[Definition, Rows, Inputs], Rows], tuple[str, ...]]] = {
    "aggregate": (
        lambda d, rows, _: rows.group_by(d.key).aggregate(x=d.spec()),
        ("condition", "aggregate", "column"),
    ),
    "newest": (
        lambda d, rows, _: rows.to_table("k", by=d.column if d.is_table else None),
        ("condition", "column", "is_table"),
    ),
    "window": (lambda d, rows, _: d.windows(rows).aggregate(x=d.spec()), WINDOWED),
    "window of table": (
        lambda d, rows, _: d.windows(rows.to_table("id")).aggregate(x=d.spec()),
        WINDOWED,
    ),
    "top of windows": (
        lambda d, rows, _: d.windows(rows).aggregate(x=d.spec()).top(d.n, by="x", per="window_end"),
        (*WINDOWED, "n"),
    ),
    "compare": (
        lambda d, rows, _: (
            rows.window(hr.tumbling("1 minute")).group_by("k").aggregate(x=d.spec()).compare(d.size)
        ),
        ("condition", "aggregate", "column", "size"),
    ),
    "top": (
        lambda d, rows, _: rows.to_table("id").top(d.n, by=d.column, per=d.key),
        ("condition", "n", "column"),
    ),
    "rank": (
        lambda d, rows, _: rows.top(d.n, by=[d.column, "id"], per="k"),
        ("condition", "n", "column"),
    ),
    "distinct": (
        lambda d, rows, _: rows.to_table("id").distinct("k", "w"),
        ("condition",),
    ),
    "first": (
        lambda d, rows, _: rows.first(per=d.key, by=d.column if d.is_table else None),
        ("condition", "column", "is_table"),
    ),
    "last": (
        lambda d, rows, _: rows.last(per=d.key, by=d.column if d.is_table else None),
        ("condition", "column", "is_table"),
    ),
    "frames": (
        lambda d, rows, _: framed(d, rows).to_table("k", by="_arrival"),
        ("condition", "aggregate", "column", "key", "n", "size"),
    ),
    "process": (lambda d, rows, _: processed(d, rows), ("condition", "column", "size", "ttl")),
    "flat map": (lambda d, rows, _: repeated(d, rows), (*FOLDED, "n")),
    "until": (until, (*FOLDED, "n")),
    "ttl": (
        lambda d, rows, _: rows.group_by("k").aggregate(x=d.spec(), ttl=d.ttl),
        (*FOLDED, "ttl"),
    ),
    "newest for a time": (
        lambda d, rows, _: rows.to_table("k", ttl=d.ttl),
        ("condition", "ttl"),
    ),
    "newest of repeats": (
        lambda d, rows, _: d.folded(rows.dedupe(on=[d.column], within=d.size, keep="last")),
        (*FOLDED, "size"),
    ),
    "union": (
        lambda d, rows, inputs: d.folded(rows.union(inputs.others)),
        FOLDED,
    ),
    "dedupe": (
        lambda d, rows, _: d.folded(rows.dedupe(on=[d.column], within=d.size)),
        (*FOLDED, "size"),
    ),
    "streams": (
        lambda d, rows, inputs: d.folded(
            rows.join(inputs.others, on="k", within=d.size, how=d.how, suffix="_r")
        ),
        (*FOLDED, "size", "how"),
    ),
    "stream and table": (
        lambda d, rows, inputs: d.folded(
            rows.join(inputs.items, left_on="v", right_on="id", how=d.how, suffix="_r")
        ),
        (*FOLDED, "how"),
    ),
    "tables": (
        lambda d, rows, inputs: rows.to_table("id").join(
            inputs.items.where(d.condition), on="id", how=d.how, suffix="_r"
        ),
        ("condition", "how"),
    ),
    "as of": (
        lambda d, rows, inputs: d.folded(as_of(d, rows, inputs)),
        (*FOLDED, "how", "history"),
    ),
    "history": (lambda d, _, inputs: inputs.items.history(kept=d.history), ("history",)),
    "changes": (
        lambda d, _, inputs: d.folded(inputs.items.changes().where(d.condition)),
        FOLDED,
    ),
    "match": (
        lambda d, rows, _: matched(d, rows).to_table("k", by="_arrival"),
        ("condition", "n", "measure", "size", "after"),
    ),
    "rules": (
        lambda d, rows, inputs: rows.match(
            inputs.rules, measures={"x": d.measure}, within=d.size, after_match=d.after
        ).to_table("k", by="_arrival"),
        ("condition", "measure", "size", "after"),
    ),
}
"""The last steps of a view, and those of its settings that leave its columns as they are."""


def pipeline_of(views: dict[str, Definition], delay: str) -> hr.Pipeline:
    pipeline = hr.Pipeline("edited")
    time = hr.EventTime("at", delay=delay)
    clicks = pipeline.topic("clicks", schema=SCHEMA, key="k", event_time=time, partitions=2)
    inputs = Inputs(
        others=pipeline.topic("others", schema=SCHEMA, key="k", event_time=time),
        items=pipeline.table("items", schema=SCHEMA, key="id", event_time=hr.EventTime("at")),
        rules=pipeline.table("rules", schema="name STRING, pattern STRING", key="name"),
    )
    for view, definition in views.items():
        rows = clicks.where(definition.condition)
        pipeline.view(view, KINDS[definition.kind][0](definition, rows, inputs))
    return pipeline


def random_definition(chance: Random) -> Definition:
    drawn: dict[str, Any] = {name: chance.choice(values) for name, values in OPTIONS.items()}
    return Definition(kind=chance.choice(list(KINDS)), **drawn)


def edited_views(views: dict[str, Definition], chance: Random) -> dict[str, Definition]:
    """One setting of each view is another, and some views have exchanged their names."""
    changed = {}
    for name, definition in views.items():
        setting = chance.choice(KINDS[definition.kind][1])
        others = [each for each in OPTIONS[setting] if each != getattr(definition, setting)]
        settings: dict[str, Any] = {setting: chance.choice(others)}
        changed[name] = replace(definition, **settings)
    names = list(changed)
    if chance.random() < 0.2:
        changed[names[0]], changed[names[1]] = changed[names[1]], changed[names[0]]
    return changed


def feed_tick(test: PipelineTest, chance: Random, number: int) -> None:
    """A few rows or none, of which some are late."""
    for topic in ("clicks", "others", "items"):
        rows: list[dict[str, Any]] = [
            {
                "id": chance.randrange(6),
                "k": chance.choice([None, 0, 1]),
                "v": chance.randrange(5),
                "w": chance.choice([None, 1, 2, 4]),
                "at": NOON + timedelta(seconds=30 * number + chance.randrange(-90, 30)),
            }
            for _ in range(chance.randrange(9))
        ]
        for row in rows:
            row["till"] = row["at"] + timedelta(seconds=10 * row["v"])
        if rows:
            test.feed(topic, rows)
    test.settle()


def check_against_a_replay(test: PipelineTest, views: dict[str, Definition]) -> None:
    calm = test.replay("calm")
    while calm.step():
        pass
    for name, definition in views.items():
        mine, theirs = (
            sorted(map(repr, rows)) for rows in (test.view(name), calm.view(f"{name}.calm"))
        )
        assert mine == theirs, definition
    calm.runner.close()


@pytest.mark.parametrize(
    "seed", [8, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(80) if seed != 8)]
)
def test_edits_of_every_step_leave_no_rows_of_another_definition(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    views = {name: random_definition(chance) for name in "xyz"}
    delay = "0 seconds"
    number = 0
    with PipelineTest(pipeline_of(views, delay), tmp_path, shards=2, width="one") as test:
        test.feed(
            "rules", [{"name": "two", "pattern": "m n"}, {"name": "run", "pattern": "m n+ o"}]
        )
        for _ in range(3):
            for _ in range(chance.randint(1, 2)):
                feed_tick(test, chance, number)
                number += 1
            wanted = edited_views(views, chance)
            wanted_delay = chance.choice([delay, delay, delay, "0 seconds", "1 minute"])
            test.pipeline = pipeline_of(wanted, wanted_delay)
            try:
                test.restart(shards=chance.randint(1, 3), lose_local_store=chance.random() < 0.3)
            except (PlanChanged, IncompatibleChange):  # with other columns, or a step's own state
                test.pipeline = pipeline_of(views, delay)
                test.restart()
            else:
                views, delay = wanted, wanted_delay
            feed_tick(test, chance, number)
            number += 1
        check_against_a_replay(test, views)
