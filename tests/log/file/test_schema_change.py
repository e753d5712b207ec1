"""Columns that change in the embedded log: old segments through compaction, restarts, backups and
readers that know an older schema; what older programs do with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import BadRows, NewerFormat, RetryError
from headrace.log.file import checkpoint, state
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.log.file.reader import FileBatches


def altered_table(log: FileLog) -> None:
    """A compacted table with rows of each of its three schemas, in many segments."""
    log.create_table(
        "t",
        "k INT, v STRING, fax STRING, n INT NOT NULL",
        key="k",
        segment_bytes=1500,
        history="0 seconds",
    )
    with log.producer("t") as producer:
        for number in range(40):
            producer.upsert({"k": number % 8, "v": f"a{number}", "fax": "f", "n": number})
        log.alter_topic("t", rename_columns={"v": "w"}, add_columns="extra STRING")
        for number in range(40, 60):
            producer.upsert({"k": number % 5, "v": f"b{number}", "fax": "f", "n": number})
        log.alter_topic("t", drop_columns="fax", alter_columns="n BIGINT")
        for number in range(60, 70):
            producer.upsert({"k": number % 3, "w": f"c{number}", "n": number << 40, "extra": "x"})
        producer.delete([7])


def newest(log: FileLog) -> dict[int, tuple[Any, ...] | None]:
    rows: dict[int, tuple[Any, ...] | None] = {}
    for row in log.read("t").to_pylist():
        is_deleted = row["_change_type"] == "delete"
        rows[row["k"]] = None if is_deleted else (row["w"], row["n"], row["extra"])
    return rows


def test_old_rows_read_right_after_compaction_a_restart_and_a_backup(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        altered_table(log)
        before = newest(log)
        assert before == {
            0: ("c69", 69 << 40, "x"),
            1: ("c67", 67 << 40, "x"),
            2: ("c68", 68 << 40, "x"),
            3: ("b58", 58, None),
            4: ("b59", 59, None),
            5: ("a37", 37, None),
            6: ("a38", 38, None),
            7: None,
        }
        whole = log.read("t").to_pylist()
        assert [row["n"] for row in whole[:60]] == list(range(60))
        create_checkpoint(log)
        assert log.maintain("t")
        assert len(log.read("t").to_pylist()) < len(whole)
        assert newest(log) == before
        log.maintain("t")
        log.backup(tmp_path / "copy")
        assert {finding.kind for finding in log.verify()} <= {"ok"}
    for path in (tmp_path / "log", tmp_path / "copy"):
        with FileLog.open(path) as again:
            assert newest(again) == before
            assert again.topic("t").schema == "k INT, w STRING, n BIGINT, extra STRING"


def test_a_float_reads_as_the_double_that_it_is(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("t", "f FLOAT")
        log.producer("t").append({"f": 0.1})
        log.alter_topic("t", alter_columns="f DOUBLE")
        assert log.read("t", columns=["f"]).to_pylist() == [{"f": 0.10000000149011612}]


def test_a_reader_with_an_older_schema_does_not_take_newer_rows_for_null(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("t", "n INT, a STRING, b STRING")
        old = log.topic("t")
        log.alter_topic("t", rename_columns={"a": "c"}, drop_columns="b", alter_columns="n BIGINT")
        log.producer("t").append([{"n": 1, "c": "x"}])
        log.producer("t").append([{"n": 1 << 40, "c": "y"}])
        reader = log.partition_reader(log.topic_state("t"), 0)
        (batch,) = FileBatches(old, [(reader, 0, 1)], columns=["n", "a"])
        assert batch.to_pylist() == [{"n": 1, "a": "x"}]
        with pytest.raises(RetryError, match="'b' was dropped"):
            list(FileBatches(old, [(reader, 0, 1)]))
        with pytest.raises(RetryError, match="type of the column 'n' was changed"):
            list(FileBatches(old, [(reader, 1, 2)], columns=["n"]))


def test_rows_on_their_way_when_a_column_is_dropped_are_refused_with_their_values(
    tmp_path: Path,
) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("t", "n INT, a STRING")
        producer, tx = log.producer("t"), log.transaction("tx")
        tx.append("t", {"n": 1, "a": "kept?"})
        log.alter_topic("t", drop_columns="a")
        with pytest.raises(BadRows, match="'a' was dropped"):
            producer.append({"n": 2, "a": "kept?"})
        with pytest.raises(BadRows, match="'a' was dropped"):
            tx.commit()
        producer.append({"n": 3, "a": None})
        assert log.read("t", columns=["n"]).to_pylist() == [{"n": 3}]


def test_an_older_program_refuses_a_log_whose_columns_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog.open(tmp_path / "plain") as log:
        log.create_topic("t", "n INT")
        create_checkpoint(log)
    for name in ("journal", "checkpoint"):
        with FileLog.open(tmp_path / name) as log:
            log.create_topic("t", "n INT, a STRING")
            log.alter_topic("t", rename_columns={"a": "b"})
            if name == "checkpoint":
                create_checkpoint(log)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_VERSION", 2)
    monkeypatch.delitem(state._APPLY, "evolve")
    for name in ("journal", "checkpoint"):
        with pytest.raises(NewerFormat):
            FileLog.open(tmp_path / name).topics()
    with FileLog.open(tmp_path / "plain") as log:
        assert log.topics() == ["t"]


def test_a_definition_that_was_lost_comes_back_with_its_history(tmp_path: Path) -> None:
    with FileLog.open(tmp_path / "log") as log:
        log.create_topic("t", "n INT, a STRING")
        log.producer("t").append({"n": 1, "a": "x"})
        log.alter_topic("t", rename_columns={"a": "b"})
        log.producer("t").append({"n": 2, "b": "y"})
        settings = checkpoint.topic_settings(
            log.store.disk, log.store.root / "topics" / log.topic("t").id
        )
        assert settings is not None
        info = state.topic_info("t", settings, log.topic("t").id)
        assert info == log.topic("t")
        assert info.arrow_schema == pa.schema([("n", pa.int32()), ("b", pa.string())])
