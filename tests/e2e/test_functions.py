"""Users' functions in whole pipelines: whatever the batches, where they fail, and on Spark."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import headrace as hr
from headrace.errors import FunctionFailed, NotSerializable, PlanChanged
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark

pytestmark = pytest.mark.usefixtures("no_syncs")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SPARK: Any = PlainSpark()
Row = dict[str, Any]


@hr.udf("BIGINT", name="test_squared")
def squared(n: pa.Array) -> pa.Array:
    return pc.multiply(n, n)


@hr.udf("STRING", name="test_spelled", each_row=True)
def spelled(n: int | None, suffix: str | None) -> str | None:
    if n == 13:
        raise ValueError("unlucky")
    return None if n is None else f"{n}{suffix}"


def divisors(row: Row) -> Iterator[Row]:
    for divisor in range(1, (row["n"] or 0) + 1):
        if row["n"] % divisor == 0:
            yield {"id": row["id"], "divisor": divisor, "at": row["at"]}


def of_each_word(rows: pa.Table) -> pa.Table:
    words = rows["words"].combine_chunks()
    return pa.table(
        {
            "id": rows["id"].take(pc.list_parent_indices(words)),
            "word": pc.list_flatten(words),
            "_row": pc.list_parent_indices(words),
        }
    )


def pipeline(errors: str = "null", *, spark: bool = False) -> hr.Pipeline:
    """With `spark`, of expressions that Spark must compute."""
    shop = hr.Pipeline("shop")
    rows = shop.topic(
        "rows",
        schema="id BIGINT, n BIGINT, words ARRAY<STRING>, at TIMESTAMP",
        key="id",
        partitions=2,
        event_time="at",
    )
    called = rows.with_columns(
        square="test_squared(n + 1) - 1" if spark else "test_squared(test_squared(n))",
        text="test_spelled(n, lower('A'))" if spark else "test_spelled(n, 'a')",
        errors=errors,
    )
    shop.write("called", called)
    shop.write("large", rows.where("test_squared(n) > 20"))
    shop.write("divisors", rows.flat_map(divisors, "id BIGINT, divisor BIGINT, at TIMESTAMP"))
    shop.write("words", rows.explode("words", "word", position="place", outer=True))
    shop.write("same_words", rows.map_batches(of_each_word, "id BIGINT, word STRING"))
    newest = rows.to_table("id", by="_arrival")
    texts = newest.with_columns(text="test_spelled(n, 'x')").where("test_squared(n) < 100")
    shop.view("texts", texts.select("id", "text"))
    minutes = rows.flat_map(divisors, "id BIGINT, divisor BIGINT, at TIMESTAMP", name="again")
    windows = minutes.window(hr.tumbling("1 minute")).group_by("divisor")
    shop.view("counts", windows.aggregate(n=hr.agg.count()))
    return shop


def fed(chance: random.Random) -> list[list[Row]]:
    return [
        [
            {
                "id": chance.randrange(5),
                "n": chance.choice([None, 2, 4, 6, 12, 13]),
                "words": chance.choice([None, [], ["a"], ["b", None, "c"]]),
                "at": NOON + timedelta(seconds=20 * tick + chance.randrange(20)),
            }
            for _ in range(chance.randrange(6))
        ]
        for tick in range(8)
    ]


def outputs(test: PipelineTest) -> list[list[Any]]:
    topics = [
        [row[1:] for row in sorted(test.rows(name), key=str)]
        for name in ("called", "large", "divisors", "words", "same_words")
    ]
    return [*topics, sorted(test.view("texts"), key=str), sorted(test.view("counts"), key=str)]


def expected(rows: list[Row]) -> list[list[Any]]:
    """The outputs, row by row."""

    def sort(rows: list[Any]) -> list[Any]:
        return sorted(rows, key=str)

    called = [
        (
            *row.values(),
            None if row["n"] is None else row["n"] ** 4,
            None if row["n"] in (None, 13) else f"{row['n']}a",
        )
        for row in rows
    ]
    large = [tuple(row.values()) for row in rows if row["n"] and row["n"] ** 2 > 20]
    small = [tuple(each.values()) for row in rows for each in divisors(row)]
    words = [
        (row["id"], row["n"], row["at"], place if row["words"] else None, word)
        for row in rows
        for place, word in enumerate(row["words"] or [None])
    ]
    same = [(row["id"], word) for row in rows for word in row["words"] or []]
    newest = {row["id"]: row["n"] for row in rows}
    texts = [
        {"id": key, "text": f"{n}x"} for key, n in newest.items() if n is not None and n**2 < 100
    ]
    return [*(sort(each) for each in (called, large, small, words, same)), sort(texts)]


@pytest.mark.parametrize("seed", range(2))
def test_functions_give_the_same_whatever_the_batches(tmp_path: Path, seed: int) -> None:
    ticks = fed(random.Random(seed))
    found = []
    for max_ticks in (1, 3):
        with PipelineTest(pipeline(), tmp_path / f"{max_ticks}", SPARK, shards=max_ticks) as test:
            for rows in ticks:
                if rows:
                    test.feed("rows", rows)
                test.cut(forced=True)
            while test.step(max_ticks):
                continue
            test.settle(final=True)
            found.append(outputs(test))
            counts = test.runner.leading.entry.counts
            unlucky = sum(row["n"] == 13 for rows in ticks for row in rows)
            assert counts.get("called.call.errors", 0) == unlucky
    assert found[0] == found[1]
    # Rows of one id keep their order within its partition, so the newest is known.
    assert found[0][:-1] == expected([row for rows in ticks for row in rows])


def test_rows_on_which_a_function_fails_are_dead_letters(tmp_path: Path) -> None:
    with PipelineTest(pipeline("divert"), tmp_path, SPARK) as test:
        rows: list[Row] = [{"id": n, "n": n, "words": [], "at": NOON} for n in (12, 13, 14)]
        test.feed("rows", rows)
        test.settle()
        assert sorted(row[1] for row in test.rows("called")) == [12, 14]
        counts = test.runner.leading.entry.counts
        assert counts["called.call.diverted"] == 1


@pytest.mark.parametrize("width", ["one", "wide"])
def test_a_failure_names_the_function_the_row_and_its_offset(tmp_path: Path, width: str) -> None:
    with PipelineTest(pipeline("stop"), tmp_path, SPARK, width=width) as test:
        test.feed("rows", [{"id": 1, "n": n, "words": [], "at": NOON} for n in (1, 13)])
        with pytest.raises(FunctionFailed) as caught:
            test.settle()
        text = str(caught.value)
        assert "test_spelled()" in text
        assert "'n': 13" in text
        assert "offset 1)" in text
        assert 'raise ValueError("unlucky")' in text
        assert "ValueError: unlucky" in text


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rows: rows.slice(0, 0), "without a column '_row'"),
        (lambda rows: rows.append_column("_row", [[9]]), "names rows that are not there"),
        (lambda rows: rows.append_column("x", [[9]]), "a column 'x'"),
        (lambda rows: 3, "returned a int, not a table"),
        (lambda rows: rows.drop_columns(["n"]), "without the column 'n'"),
        (lambda rows: pa.table({"n": ["a"]}), "'n'"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, function: Any, message: str) -> None:
    shop = hr.Pipeline("shop")
    rows = shop.topic("rows", schema="n BIGINT")
    shop.write("mapped", rows.map_batches(function, "n BIGINT"))
    with PipelineTest(shop, tmp_path, SPARK) as test:
        test.feed("rows", [{"n": 1}])
        with pytest.raises(FunctionFailed, match=message):
            test.settle()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda n: n.slice(1), "it returned 1 values for 2 rows"),
        (lambda n: 3, "it returned a int, not a column"),
        (lambda n: pa.array(["a"] * len(n)), "'a'"),
        (lambda n: n.to_pylist() / 0, "TypeError"),
    ],
)
def test_a_function_that_returns_what_does_not_fit_loses_no_row(
    tmp_path: Path, function: Any, message: str
) -> None:
    # One after the other: of a single row, some of these fit.
    hr.udf("BIGINT", name="test_unfit")(lambda n: function(n) if 13 in n.to_pylist() else n)
    shop = hr.Pipeline("shop")
    rows = shop.topic("rows", schema="n BIGINT")
    shop.write("diverted", rows.with_columns(x="test_unfit(n)", errors="divert", name="unfit"))
    shop.write("nulled", rows.with_columns(x="test_unfit(n)", name="null"))
    with PipelineTest(shop, tmp_path, SPARK) as test:
        test.feed("rows", [{"n": n} for n in (12, 13)])
        test.settle()
        dead = [row for name in test.log.topics() if name.endswith(".dead")
                for row in test.log.read(name).to_pylist()]  # fmt: skip
        kept = [row[1:] for row in test.rows("diverted")]
        assert [row["source_offset"] for row in dead] == [1] or "1 values" in message
        assert len(kept) + len(dead) == 2
        assert all("test_unfit()" in row["reason"] for row in dead)
        assert [row[1] for row in test.rows("nulled")] == [12, 13]


def test_a_function_that_was_changed_between_runs_is_an_edit(tmp_path: Path) -> None:
    def pipeline(factor: int, version: str | None = None) -> hr.Pipeline:
        hr.udf("BIGINT", name="test_changed", version=version)(lambda n: pc.multiply(n, factor))
        shop = hr.Pipeline("shop")
        rows = shop.topic("rows", schema="n BIGINT", key="n")
        shop.view("newest", rows.with_columns(x="test_changed(n)").to_table("n"))
        shop.write("all", rows.with_columns(x="test_changed(n)"))
        return shop

    with PipelineTest(pipeline(2), tmp_path, SPARK) as test:
        test.feed("rows", [{"n": 1}])
        test.settle()
        test.pipeline = pipeline(3)
        with pytest.raises(PlanChanged, match="'?all'?"):
            test.restart()
        test.restart(accept_edits=["all"])
        test.feed("rows", [{"n": 2}])
        test.settle()
        assert sorted((row["n"], row["x"]) for row in test.view("newest")) == [(1, 3), (2, 6)]
        assert [row[1:] for row in test.rows("all")] == [(1, 2), (2, 6)]


class Locked(hr.Processor, each_key=True):
    output = "n BIGINT"
    version = "1"

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def on_row(self, row: Row, ctx: Any) -> Row:
        return row


class LockedAggregate(hr.agg.CustomAggregate):
    state_type = result_type = pa.int64()

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, states: pa.Array, groups: pa.Array, values: pa.Array) -> pa.Array:
        return states

    def result(self, states: pa.Array) -> pa.Array:
        return states


@pytest.mark.parametrize("kind", ["function", "map", "processor", "aggregate"])
def test_code_that_cannot_be_sent_to_workers_is_refused_at_start(tmp_path: Path, kind: str) -> None:
    lock = threading.Lock()
    hr.udf("BIGINT", name="test_locked", version="1")(lambda n: lock.acquire() and n)
    shop = hr.Pipeline("shop")
    rows = shop.topic("rows", schema="n BIGINT", key="n")
    made: dict[str, Callable[[], Any]] = {
        "function": lambda: rows.where("test_locked(n) > 1"),
        "map": lambda: rows.map_batches(lambda t: lock.acquire() and t, "n BIGINT", version="1"),
        "processor": lambda: rows.process(Locked, key="n"),
        "aggregate": lambda: rows.group_by("n").aggregate(x=hr.agg.custom(LockedAggregate(), "n")),
    }
    shop.write("out", made[kind]())
    with pytest.raises(NotSerializable, match=r"which uses (self\._?)?lock: .*lock") as caught:
        PipelineTest(shop, tmp_path, SPARK)
    assert "the step 'out." in str(caught.value)


@pytest.mark.spark
def test_functions_run_on_spark(spark: Any, tmp_path: Path) -> None:
    ticks = fed(random.Random(5))
    with PipelineTest(pipeline(spark=True), tmp_path, spark, width="wide") as test:
        for rows in ticks:
            if rows:
                test.feed("rows", rows)
            test.cut(forced=True)
        test.settle(final=True)
        every = [row for rows in ticks for row in rows]
        found, wanted = outputs(test), expected(every)
        squares = sorted((row[0], row[1], row[4]) for row in found[0] if row[1] is not None)
        assert squares == sorted(
            (row["id"], row["n"], (row["n"] + 1) ** 2 - 1) for row in every if row["n"] is not None
        )
        assert sorted(row[5] for row in found[0] if row[5]) == sorted(
            row[5] for row in wanted[0] if row[5]
        )
        assert found[1:-1] == wanted[1:]
        assert test.runner.leading.entry.counts["called.call.errors"] == sum(
            row["n"] == 13 for row in every
        )
