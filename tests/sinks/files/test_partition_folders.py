"""Partitioned files: the contract, rows that move between folders, and what other programs read."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import headrace as hr
from headrace.errors import InputError, TargetMismatch, UnknownColumn
from headrace.log.dead_letters import read_dead_letters
from headrace.sinks.files.parquet_target import ParquetTarget
from headrace.sinks.files.partition_folders import folder_values, split_by_folder
from headrace.testing.sink_contract import (
    SinkContract,
    assert_equal_to_log,
    caught_up,
    rows_of,
)
from headrace.testing.strikes import StrikePoint


class TestPartitionedParquet(SinkContract):
    points = (StrikePoint(ParquetTarget, "_write", "after", 1),)

    @pytest.fixture
    def sink(self, tmp_path: Path) -> hr.sinks.Sink:
        return hr.sinks.parquet(tmp_path / "files", partition_by="name", buckets=2)

    def test_every_type_comes_back_as_it_was(self, sink: hr.sinks.Sink, log: hr.Log) -> None:
        columns = ("day", "flag", "small", "words")
        sink = replace(sink, options={**sink.options, "partition_by": columns})
        super().test_every_type_comes_back_as_it_was(sink, log)


class TestFolders:
    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_table("orders", "id BIGINT, dt DATE, country STRING, amount INT", key="id")
            yield log

    def order(self, number: int, day: int | None, country: str | None) -> dict[str, Any]:
        dt = None if day is None else date(2026, 3, day)
        return {"id": number, "dt": dt, "country": country, "amount": number}

    def test_rows_move_between_folders(self, log: hr.Log, tmp_path: Path) -> None:
        sink = hr.sinks.parquet(tmp_path / "files", partition_by=["dt", "country"])
        with log.producer("orders") as producer:
            producer.upsert([self.order(number, number % 3 + 1, "no") for number in range(30)])
        caught_up(sink, log, "orders")
        with log.producer("orders") as producer:
            producer.upsert([self.order(number, 9, "se") for number in range(0, 30, 3)])
            producer.upsert([self.order(1, None, None), self.order(2, 2, "a/b=c%")])
            producer.delete([4])
        caught_up(sink, log, "orders")
        assert_equal_to_log(sink, log, "orders")
        folders = {
            path.parent.relative_to(tmp_path / "files").as_posix()
            for path in (tmp_path / "files").rglob("*.parquet")
        }
        assert folders == {
            "dt=2026-03-02/country=no",
            "dt=2026-03-03/country=no",
            "dt=2026-03-09/country=se",
            "dt=2026-03-02/country=a%2Fb%3Dc%25",
            "dt=__HIVE_DEFAULT_PARTITION__/country=__HIVE_DEFAULT_PARTITION__",
        }

    def test_other_programs_read_the_folders_as_columns(self, log: hr.Log, tmp_path: Path) -> None:
        sink = hr.sinks.parquet(tmp_path / "files", partition_by=["dt", "country"])
        with log.producer("orders") as producer:
            producer.upsert(
                [self.order(1, 1, "no"), self.order(2, 2, "a/b=c%"), self.order(3, None, "ü 🦆")]
            )
        caught_up(sink, log, "orders")
        expected = rows_of(sink, log, "orders")
        hive = ds.partitioning(
            pa.schema([("dt", pa.date32()), ("country", pa.string())]), flavor="hive"
        )
        names = ["id", "dt", "country", "amount"]
        found = ds.dataset(tmp_path / "files", partitioning=hive).to_table(columns=names)
        assert found.sort_by("id").to_pylist() == expected
        pattern = tmp_path / "files" / "*" / "*" / "*.parquet"
        query = f"SELECT id, dt, country, amount FROM read_parquet('{pattern}') ORDER BY id"
        assert duckdb.sql(query).fetchall() == [tuple(row.values()) for row in expected]

    def test_a_value_that_cannot_name_a_folder_is_a_dead_letter(
        self, log: hr.Log, tmp_path: Path
    ) -> None:
        sink = hr.sinks.parquet(tmp_path / "files", partition_by="country")
        with log.producer("orders") as producer:
            producer.upsert([self.order(1, 1, "x" * 300), self.order(2, 1, "no")])
        assert caught_up(sink, log, "orders").status.refused == 1
        assert [row["id"] for row in rows_of(sink, log, "orders")] == [2]
        (dead_letter,) = read_dead_letters(log, "orders.parquet")
        assert "too long for the name of a folder" in dead_letter["reason"]

    def test_columns_that_cannot_name_folders_are_refused(
        self, log: hr.Log, tmp_path: Path
    ) -> None:
        log.create_table("points", "id BIGINT, x DOUBLE", key="id")
        with pytest.raises(InputError, match="'x', whose type is double"):
            caught_up(hr.sinks.parquet(tmp_path / "a", partition_by="x"), log, "points")
        with pytest.raises(UnknownColumn, match="did you mean 'country'"):
            caught_up(hr.sinks.parquet(tmp_path / "a", partition_by="contry"), log, "orders")
        with log.producer("points") as producer:
            producer.upsert(pa.table({"id": range(3000), "x": [0.5] * 3000}))
        with pytest.raises(TargetMismatch, match="3,000 partitions by id"):
            caught_up(hr.sinks.parquet(tmp_path / "a", partition_by="id"), log, "points")

    def test_other_columns_for_an_existing_table_are_refused(
        self, log: hr.Log, tmp_path: Path
    ) -> None:
        with log.producer("orders") as producer:
            producer.upsert([self.order(1, 1, "no")])
        caught_up(hr.sinks.parquet(tmp_path / "a", partition_by="dt"), log, "orders")
        other = hr.sinks.parquet(tmp_path / "a", partition_by="country")
        with pytest.raises(TargetMismatch, match=r"partition_by=\['dt'\]"):
            caught_up(other, log, "orders")


@pytest.mark.parametrize(
    "text",
    ["", " ", ".", "..", "a/b", "a%2Fb", "__HIVE_DEFAULT_PARTITION__", "null", "ü", "\n", "a\x00b"],
)
def test_every_text_comes_back_from_its_folder(text: str) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.string())])
    rows = pa.table({"a": [text, None], "b": [None, text]}, schema=schema)
    found = {
        folder: indices.tolist() for folder, indices in split_by_folder(rows, ["a", "b"]) if folder
    }
    assert len(found) == 2
    for folder, (index,) in found.items():
        values = {name: value.as_py() for name, value in folder_values(folder, schema).items()}
        assert values == rows.to_pylist()[index]
