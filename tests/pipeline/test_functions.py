"""Functions of users when they are declared: schemas, keys, time, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import (
    BadSchema,
    NoFingerprint,
    NotSupported,
    PlanError,
    StreamOnly,
    UnfitColumn,
    UnknownColumn,
)

SCHEMA = (
    "id BIGINT, tags ARRAY<STRING>, sizes MAP<STRING, INT>,"
    " parts ARRAY<STRUCT<n: INT, s: STRING>>, at TIMESTAMP"
)
RATE = 2


@hr.udf("BIGINT", name="test_rated", each_row=True)
def rated(number: int) -> int:
    return RATE * number


def orders() -> Any:
    return hr.Pipeline("shop").topic("orders", schema=SCHEMA, key="id", event_time="at")


def test_columns_for_calls_are_gone_in_the_result() -> None:
    stream = orders()
    assert stream.with_columns(x="test_rated(id)").schema.names == [*stream.schema.names, "x"]
    assert stream.select("*", "test_rated(id) AS x").schema.names == [*stream.schema.names, "x"]
    assert stream.where("test_rated(id) > 1").schema == stream.schema
    table = stream.to_table("id")
    assert table.with_columns(x="test_rated(id + 1)").key == ("id",)
    assert table.where("test_rated(id) > 1").key == ("id",)
    named = stream.group_by(twice="test_rated(id)").aggregate(n=hr.agg.count())
    assert named.key == ("twice",)


def test_an_edit_of_a_function_is_an_edit_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before = orders().with_columns(x="test_rated(id)").step.lineage
    assert before == orders().with_columns(x="test_rated(id)").step.lineage
    monkeypatch.setitem(globals(), "RATE", 3)
    assert before != orders().with_columns(x="test_rated(id)").step.lineage


def test_the_event_time_goes_on_where_its_column_does() -> None:
    stream = orders()
    kept = stream.map_batches(lambda rows: rows, "id BIGINT, at TIMESTAMP")
    assert kept.window(hr.tumbling("1 minute")).group_by("id").aggregate(n=hr.agg.count())
    lost = stream.flat_map(lambda row: [row], "id BIGINT")
    with pytest.raises(PlanError, match="event time"):
        lost.window(hr.tumbling("1 minute"))
    with pytest.raises(UnfitColumn, match="'at'"):
        stream.map_batches(lambda rows: rows, "id BIGINT, at STRING")


@pytest.mark.parametrize(
    ("arguments", "options", "names"),
    [
        (("tags",), {}, ["id", "sizes", "parts", "at", "tags"]),
        (("tags", "tag"), {"position": "n"}, ["id", "sizes", "parts", "at", "n", "tag"]),
        (("sizes",), {}, ["id", "tags", "parts", "at", "key", "value"]),
        (("sizes", "k", "v"), {}, ["id", "tags", "parts", "at", "k", "v"]),
        (("parts",), {}, ["id", "tags", "sizes", "at", "n", "s"]),
        (("parts", "part"), {}, ["id", "tags", "sizes", "at", "part"]),
    ],
)
def test_what_a_list_becomes(
    arguments: tuple[str, ...], options: dict[str, Any], names: list[str]
) -> None:
    exploded = orders().explode(*arguments, **options)
    assert exploded.schema.names == names
    assert exploded.key == ("id",)


def test_lists_become_rows_under_the_names_that_spark_has() -> None:
    stream = orders()
    assert stream.posexplode("tags", "tag").schema.names[-2:] == ["pos", "tag"]
    assert stream.posexplode("sizes").schema.names[-3:] == ["pos", "key", "value"]
    assert stream.inline("parts").schema.names[-2:] == ["n", "s"]
    one = hr.Pipeline("one").topic("one", schema="id BIGINT, only ARRAY<STRUCT<n: INT>>")
    assert one.explode("only", "m").schema.field("m").type == pa.struct([("n", pa.int32())])
    assert one.inline("only", "m").schema.field("m").type == pa.int32()
    with pytest.raises(UnfitColumn, match=r"orders\.inline .* ARRAY<STRING>"):
        stream.inline("tags")


def test_a_sample_that_could_not_be_taken_is_refused() -> None:
    stream = orders()
    for fraction in (0, -1, 1.5, True, "0.1", float("nan")):
        with pytest.raises(PlanError, match="keeps .* of the rows"):
            stream.sample(fraction)
    with pytest.raises(UnknownColumn):
        stream.sample(0.1, by="user")
    with pytest.raises(BadSchema, match="'tags'"):
        stream.sample(0.1, by="tags")
    with pytest.raises(PlanError, match="would come and go"):
        stream.to_table("id").sample(0.1, by="at")
    with pytest.raises(PlanError, match="seed=None"):
        stream.sample(0.1, seed=None)
    assert stream.to_table("id").sample(0.1).key == ("id",)
    lineages = {stream.sample(0.1, seed=seed).step.lineage for seed in (0, 1)}
    assert len(lineages) == 2


def test_what_cannot_be_exploded_is_refused() -> None:
    stream = orders()
    with pytest.raises(UnknownColumn):
        stream.explode("tag")
    with pytest.raises(UnfitColumn, match="BIGINT"):
        stream.explode("id")
    with pytest.raises(PlanError, match="names 3 columns for 2"):
        stream.explode("sizes", "a", "b", "c")
    with pytest.raises(PlanError, match="twice"):
        stream.explode("tags", "id")


def test_rows_of_a_table_are_not_mapped() -> None:
    table = orders().to_table("id")
    for operation, arguments in (
        ("map_batches", (lambda rows: rows, "id BIGINT")),
        ("flat_map", (lambda row: [row], "id BIGINT")),
        ("explode", ("tags",)),
        ("posexplode", ("tags",)),
        ("inline", ("parts",)),
    ):
        with pytest.raises(StreamOnly, match="no key by which they could be retracted"):
            getattr(table, operation)(*arguments)


def test_what_cannot_be_mapped_is_refused() -> None:
    stream, lock = orders(), threading.Lock()
    with pytest.raises(PlanError, match="was given a int"):
        stream.map_batches(3, "id BIGINT")
    with pytest.raises(PlanError, match="'_row'"):
        stream.map_batches(lambda rows: rows, "id BIGINT, _row BIGINT")
    with pytest.raises(PlanError, match="errors='null'"):
        stream.flat_map(lambda row: [row], "id BIGINT", errors="null")
    with pytest.raises(NoFingerprint, match="lock"):
        stream.map_batches(lambda rows: lock.acquire() and rows, "id BIGINT")
    assert stream.map_batches(
        lambda rows: lock.acquire() and rows, "id BIGINT", version="3"
    ).step.functions == (("<lambda>", "version 3"),)


def test_a_function_is_named_in_the_plan() -> None:
    stream = orders().with_columns(x="test_rated(id)")
    stream.pipeline.write("out", stream)
    assert "__call_0 = test_rated(id)" in str(stream.pipeline.plan())
    assert isinstance(stream.schema, pa.Schema)


def test_a_data_frame_of_rows_that_a_function_made_is_refused_for_what_it_is(
    tmp_path: Path,
) -> None:
    from headrace.pipeline.dataframes import dataframe

    stream = orders().with_columns(x="test_rated(id)").where("x > 1")
    spark: Any = object()
    with pytest.raises(NotSupported, match=r"\(call\) runs in Headrace's tasks, not in Spark SQL"):
        dataframe(stream, spark, f"file:{tmp_path}", {})
