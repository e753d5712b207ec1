"""The sink `iceberg`, with an SQL catalogue: the contract, and a table that others write to, tend,
expire and roll back.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError, SinkFenced, TargetMismatch
from headrace.sinks.checkpoint import new_owner
from headrace.testing.sink_contract import (
    SinkContract,
    account,
    assert_equal_to_log,
    caught_up,
    next_batch,
    no_dead_letters,
    rows_of,
)
from headrace.testing.strikes import StrikePoint

pytest.importorskip("pyiceberg")
from pyiceberg.catalog import load_catalog

from headrace.sinks import iceberg_target
from headrace.sinks.iceberg_target import IcebergTarget, stored_type


def properties(directory: Path) -> dict[str, str]:
    directory.mkdir(exist_ok=True)
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory / 'catalog.db'}",
        "warehouse": f"file://{directory}",
    }


def iceberg(directory: Path, **settings: Any) -> hr.sinks.Sink:
    return hr.sinks.iceberg("lake", properties=properties(directory), **settings)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Any]:
    catalog = load_catalog("lake", **properties(tmp_path / "lake"))
    yield catalog
    catalog.close()


@pytest.fixture
def sink(tmp_path: Path) -> hr.sinks.Sink:
    return iceberg(tmp_path / "lake")


class TestIceberg(SinkContract):
    points = (
        StrikePoint(IcebergTarget, "_write_files", "after", 1),
        StrikePoint(IcebergTarget, "_commit", "before", 1),
        StrikePoint(IcebergTarget, "_commit", "after", 1),
    )

    @pytest.fixture
    def sink(self, tmp_path: Path) -> hr.sinks.Sink:
        return iceberg(tmp_path / "lake")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, name STRING, amount DECIMAL(12, 2)", key="id")
        log.create_topic("payments", "id BIGINT, name STRING")
        with log.producer("accounts") as producer:
            producer.upsert([account(number) for number in range(10)])
        yield log


def opened(sink: hr.sinks.Sink, log: hr.Log) -> IcebergTarget:
    target = sink.open(sink.shape_for(log.topic("accounts")), log)
    assert isinstance(target, IcebergTarget)
    target.prepare()
    return target


def test_a_takeover_while_a_commit_is_under_way_is_noticed(
    sink: hr.sinks.Sink, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that repeats a refused commit on top of the newest snapshot would let an older
    owner write.
    """
    with opened(sink, log) as older, opened(sink, log) as newer:
        batch = next_batch(log, older, older.begin(new_owner()))
        write_files = IcebergTarget._write_files

        def take_over_meanwhile(target: IcebergTarget, *arguments: Any) -> Any:
            monkeypatch.undo()
            written = write_files(target, *arguments)
            newer.begin(new_owner())
            assert newer.apply(batch, no_dead_letters)
            return written

        monkeypatch.setattr(IcebergTarget, "_write_files", take_over_meanwhile)
        with pytest.raises(hr.errors.TargetUnavailable, match="meanwhile"):
            older.apply(batch, no_dead_letters)
        with pytest.raises(SinkFenced):
            older.begin(older.owner, resume=True)
    assert_equal_to_log(sink, log, "accounts")


def test_commits_of_another_writer_neither_stop_the_sink_nor_double_rows(
    sink: hr.sinks.Sink, log: hr.Log, catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught_up(sink, log, "accounts")
    write_files = IcebergTarget._write_files
    calls: list[int] = []

    def write_while_another_does(target: IcebergTarget, *arguments: Any) -> Any:
        written = write_files(target, *arguments)
        calls.append(1)
        if len(calls) == 2:  # the first is the takeover
            table = catalog.load_table("headrace.accounts")
            others = {"id": [100], "name": ["other"], "amount": [None]}
            table.append(pa.table(others, schema=table.schema().as_arrow()))
        return written

    monkeypatch.setattr(IcebergTarget, "_write_files", write_while_another_does)
    with log.producer("accounts") as producer:
        producer.upsert([account(number, 2) for number in range(5)])
    caught_up(sink, log, "accounts")
    assert len(calls) == 3
    rows = rows_of(sink, log, "accounts")
    assert [(row["id"], row["amount"]) for row in rows] == [
        *((number, 2) for number in range(5)),
        *((number, 1) for number in range(5, 10)),
        (100, None),
    ]


def test_expired_snapshots_do_not_take_the_checkpoint_along(
    sink: hr.sinks.Sink, log: hr.Log, catalog: Any
) -> None:
    caught_up(sink, log, "accounts")
    table = catalog.load_table("headrace.accounts")
    table.append(table.scan().to_arrow().slice(0, 0))
    table = catalog.load_table("headrace.accounts")
    ours = [snapshot.snapshot_id for snapshot in table.metadata.snapshots][:-1]
    table.maintenance.expire_snapshots().by_ids(ours).commit()
    assert caught_up(sink, log, "accounts").status.rows == 0
    assert_equal_to_log(sink, log, "accounts")


def test_a_table_that_is_rolled_back_is_filled_from_there(
    sink: hr.sinks.Sink, log: hr.Log, catalog: Any
) -> None:
    caught_up(sink, log, "accounts")
    before = catalog.load_table("headrace.accounts").current_snapshot().snapshot_id
    with log.producer("accounts") as producer:
        producer.upsert([account(3, 9)])
        producer.delete([4])
    caught_up(sink, log, "accounts")
    table = catalog.load_table("headrace.accounts")
    table.manage_snapshots().rollback_to_snapshot(before).commit()
    assert caught_up(sink, log, "accounts").status.rows == 2
    assert_equal_to_log(sink, log, "accounts")


@pytest.mark.parametrize("key", [(), ("id",)])
def test_small_files_become_one(
    log: hr.Log,
    catalog: Any,
    tmp_path: Path,
    key: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iceberg_target, "_MAX_SMALL_FILES", 5)
    sink = replace(iceberg(tmp_path / "lake"), batch_rows=1, key=key)
    with log.producer("payments") as producer:
        producer.append([{"id": number, "name": "x"} for number in range(12)])
    caught_up(sink, log, "payments")
    assert len(list(catalog.load_table("headrace.payments").scan().plan_files())) <= 5
    assert_equal_to_log(sink, log, "payments")


def test_a_partitioned_table(log: hr.Log, catalog: Any, tmp_path: Path) -> None:
    sink = iceberg(tmp_path / "lake", partition_by="name")
    with log.producer("accounts") as producer:
        producer.upsert([account(1, name="eve"), account(2, name="a/b"), account(3, name="eve")])
        caught_up(sink, log, "accounts")
        producer.upsert([account(1, name="ada")])
        producer.delete([2])
    caught_up(sink, log, "accounts")
    assert_equal_to_log(sink, log, "accounts")
    files = catalog.load_table("headrace.accounts").scan(row_filter="name = 'eve'").plan_files()
    assert [task.file.record_count for task in files] == [1]


def test_other_programs_read_the_table(sink: hr.sinks.Sink, log: hr.Log, catalog: Any) -> None:
    caught_up(sink, log, "accounts")
    found = catalog.load_table("headrace.accounts").scan(row_filter="id < 3").to_arrow()
    assert sorted(found["id"].to_pylist()) == [0, 1, 2]


def test_a_column_of_another_type_is_refused(
    sink: hr.sinks.Sink, log: hr.Log, catalog: Any
) -> None:
    catalog.create_namespace("headrace")
    catalog.create_table("headrace.accounts", pa.schema([("id", pa.string())]))
    with pytest.raises(TargetMismatch, match="'id' of the Iceberg table headrace.accounts has"):
        caught_up(sink, log, "accounts")


def test_a_table_that_must_be_there(log: hr.Log, tmp_path: Path) -> None:
    with pytest.raises(TargetMismatch, match="no Iceberg table headrace.accounts"):
        caught_up(iceberg(tmp_path / "lake", create=False), log, "accounts")


def test_a_missing_file_is_reported_and_ends_the_sync(
    sink: hr.sinks.Sink, log: hr.Log, tmp_path: Path
) -> None:
    caught_up(sink, log, "accounts")
    for file in (tmp_path / "lake").rglob("*.parquet"):
        file.unlink()
    compared = sink.check("accounts", log=log.address)
    assert (compared.unreadable, compared.counts["missing"]) == (1, 10)
    with log.producer("accounts") as producer:
        producer.upsert([account(1, 2)])
    with pytest.raises(TargetMismatch, match=r"missing[\s\S]*backup"):
        caught_up(sink, log, "accounts")


def test_a_catalogue_that_is_not_configured(log: hr.Log) -> None:
    with pytest.raises(ConfigurationError, match="PYICEBERG_CATALOG__NOWHERE__URI"):
        caught_up(hr.sinks.from_url("iceberg:nowhere/shop"), log, "accounts")


def test_a_url_names_catalogue_and_namespace() -> None:
    options = hr.sinks.from_url("iceberg:lake/shop.eu", table="orders").options
    assert (options["catalog"], options["namespace"]) == ("lake", "shop.eu")
    with pytest.raises(InputError, match="iceberg:CATALOG/NAMESPACE"):
        hr.sinks.from_url("iceberg:lake/")


def test_a_type_that_iceberg_does_not_have() -> None:
    nested = pa.struct([("a", pa.list_(pa.int8())), ("b", pa.duration("us"))])
    assert stored_type(nested, "x") == pa.struct([("a", pa.list_(pa.int32())), ("b", pa.int64())])
    with pytest.raises(InputError, match=r"'x.a', whose type is month_day_nano"):
        stored_type(pa.struct([("a", pa.month_day_nano_interval())]), "x")
