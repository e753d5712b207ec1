"""The sink `parquet`: the contract, and a directory in which a process was killed between its files
and its manifest.
"""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import InputError, SinkFenced, TargetMismatch, TargetUnavailable
from headrace.sinks.checkpoint import new_owner
from headrace.sinks.files.manifest import FOLDER
from headrace.sinks.files.parquet_target import ParquetTarget, current_files
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


class TestParquet(SinkContract):
    points = (
        StrikePoint(ParquetTarget, "_write", "after", 0),
        StrikePoint(ParquetTarget, "_publish", "before", 1),
        StrikePoint(ParquetTarget, "_publish", "after", 1),
    )

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "files"

    @pytest.fixture
    def sink(self, directory: Path) -> hr.sinks.Sink:
        return hr.sinks.parquet(directory, buckets=4)

    def test_the_files_are_plain_parquet_and_no_others_stay(
        self, sink: hr.sinks.Sink, log: hr.Log, directory: Path
    ) -> None:
        for amount in range(5):
            with log.producer("accounts") as producer:
                producer.upsert([account(number, amount) for number in range(20)])
            caught_up(sink, log, "accounts")
        (directory / "000000000001-0123456789ab.parquet").write_bytes(b"half a file")
        caught_up(sink, log, "accounts")
        assert sorted(
            (row["id"], row["amount"]) for row in pq.read_table(directory).to_pylist()
        ) == [(number, 4) for number in range(20)]
        assert len(list(directory.glob("*.parquet"))) <= 4
        assert sorted(current_files(directory)) == sorted(map(str, directory.glob("*.parquet")))
        assert len(list((directory / FOLDER).iterdir())) <= 4
        assert_equal_to_log(sink, log, "accounts")

    def test_a_directory_that_must_be_there(self, log: hr.Log, tmp_path: Path) -> None:
        with pytest.raises(TargetMismatch, match="no directory"):
            caught_up(hr.sinks.parquet(tmp_path / "nowhere", create=False), log, "accounts")


def test_buckets_within_reason() -> None:
    with pytest.raises(InputError, match="0 buckets"):
        hr.sinks.parquet("x", buckets=0)


class TestMissingAndDamagedFiles:
    """A file that the manifest names and that is gone was tried again for ever."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_table("accounts", "id BIGINT, name STRING", key="id")
            with log.producer("accounts") as producer:
                producer.upsert([{"id": number, "name": f"n{number}"} for number in range(100)])
            yield log

    @pytest.fixture
    def sink(self, tmp_path: Path, log: hr.Log) -> hr.sinks.Sink:
        sink = hr.sinks.parquet(tmp_path / "files", buckets=4)
        caught_up(sink, log, "accounts")
        return sink

    def files(self, tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "files").glob("*.parquet"))

    def test_a_missing_file_ends_the_sync_with_what_to_do(
        self, sink: hr.sinks.Sink, log: hr.Log, tmp_path: Path
    ) -> None:
        self.files(tmp_path)[0].unlink()
        with log.producer("accounts") as producer:
            producer.upsert([{"id": number, "name": "new"} for number in range(100)])
        with pytest.raises(TargetMismatch, match=r"is missing[\s\S]*from a backup"):
            caught_up(sink, log, "accounts")
        caught_up(sink, log, "accounts", start_over=True)
        assert sink.check("accounts", log=log.address).is_equal

    def test_a_check_goes_on_with_the_other_files(
        self, sink: hr.sinks.Sink, log: hr.Log, tmp_path: Path
    ) -> None:
        gone, damaged, *whole = self.files(tmp_path)
        left = sum(pq.read_metadata(file).num_rows for file in whole)
        gone.unlink()
        damaged.write_bytes(b"half a file")
        compared = sink.check("accounts", log=log.address)
        assert compared.counts == {"missing": 100 - left, "extra": 0, "different": 0}
        assert (compared.unreadable, compared.is_equal) == (2, False)
        descriptions = " ".join(compared.unreadable_examples)
        assert f"{gone.name} is missing" in descriptions
        assert f"{damaged.name} is damaged" in descriptions


class TestLateProcesses:
    """A process that was paused removed files that its successors needed."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_table("accounts", "id BIGINT, name STRING", key="id")
            with log.producer("accounts") as producer:
                producer.upsert([{"id": number, "name": "old"} for number in range(100)])
            yield log

    @pytest.fixture
    def sink(self, tmp_path: Path, log: hr.Log) -> hr.sinks.Sink:
        sink = hr.sinks.parquet(tmp_path / "files", buckets=4)
        caught_up(sink, log, "accounts")
        return sink

    def opened(self, sink: hr.sinks.Sink, log: hr.Log) -> ParquetTarget:
        target = sink.open(sink.shape_for(log.topic("accounts")), log)
        assert isinstance(target, ParquetTarget)
        target.prepare()
        return target

    def test_one_that_publishes_under_a_number_that_became_free_deletes_nothing(
        self, sink: hr.sinks.Sink, log: hr.Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = self.opened(sink, log)
        began = late.begin(new_owner())
        with log.producer("accounts") as producer:
            producer.upsert([{"id": number, "name": "new"} for number in range(100)])
        batch = next_batch(log, late, began)

        publish = ParquetTarget._publish

        def publish_much_later(target: ParquetTarget) -> None:
            monkeypatch.undo()
            for _ in range(4):  # each is a manifest, and the first of them are removed again
                self.opened(sink, log).begin(new_owner())
            publish(target)

        monkeypatch.setattr(ParquetTarget, "_publish", publish_much_later)
        with pytest.raises(TargetUnavailable, match="meanwhile"):
            late.apply(batch, no_dead_letters)
        with pytest.raises(SinkFenced):
            late.begin(late.owner, resume=True)
        assert sink.check("accounts", log=log.address).is_equal
        caught_up(sink, log, "accounts")
        assert_equal_to_log(sink, log, "accounts")

    def test_one_that_cleans_up_late_leaves_the_files_of_its_successor(
        self, sink: hr.sinks.Sink, log: hr.Log, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = self.opened(sink, log)
        with monkeypatch.context() as patch:
            patch.setattr(ParquetTarget, "_remove_orphans", lambda _target: None)
            late.begin(new_owner())
        with log.producer("accounts") as producer:
            producer.upsert([{"id": number, "name": "new"} for number in range(100)])
        caught_up(sink, log, "accounts")
        late._remove_orphans()
        assert_equal_to_log(sink, log, "accounts")


class TestOthersFiles:
    """A sink removed Parquet files that it had not written."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_table("accounts", "id BIGINT, name STRING", key="id")
            with log.producer("accounts") as producer:
                producer.upsert([{"id": number, "name": "ada"} for number in range(9)])
            yield log

    @pytest.mark.parametrize("start_over", [False, True])
    def test_a_directory_with_files_of_somebody_else_is_refused(
        self, log: hr.Log, tmp_path: Path, start_over: bool
    ) -> None:
        directory = tmp_path / "files"
        directory.mkdir()
        pq.write_table(pa.table({"x": [1]}), directory / "part-0.parquet")
        with pytest.raises(TargetMismatch, match=r"part-0.parquet, and no manifest"):
            caught_up(hr.sinks.parquet(directory), log, "accounts", start_over=start_over)
        assert pq.read_table(directory / "part-0.parquet").num_rows == 1

    def test_files_without_their_manifest_are_replaced_only_if_one_says_so(
        self, log: hr.Log, tmp_path: Path
    ) -> None:
        sink = hr.sinks.parquet(tmp_path / "files", buckets=2)
        for _ in range(3):
            caught_up(sink, log, "accounts", start_over=True)
        for manifest in (tmp_path / "files" / FOLDER).iterdir():
            manifest.unlink()
        with pytest.raises(TargetMismatch, match=r"no manifest[\s\S]*backup[\s\S]*--start-over"):
            caught_up(sink, log, "accounts")
        caught_up(sink, log, "accounts", start_over=True)
        assert pq.read_table(tmp_path / "files").num_rows == 9
        assert_equal_to_log(sink, log, "accounts")

    def test_a_table_in_a_directory_of_another_one_keeps_its_files(
        self, log: hr.Log, tmp_path: Path
    ) -> None:
        inner = hr.sinks.parquet(tmp_path / "files", table="inner")
        outer = hr.sinks.parquet(tmp_path / "files")
        caught_up(inner, log, "accounts")
        for _ in range(5):
            caught_up(outer, log, "accounts")
        assert_equal_to_log(inner, log, "accounts")
        assert_equal_to_log(outer, log, "accounts")


class TestLayout:
    """With another number of buckets, keys were looked for where they were not: rows doubled."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Iterator[hr.Log]:
        with hr.open_log(f"file:{tmp_path / 'log'}") as log:
            log.create_table("accounts", "id BIGINT, name STRING", key="id")
            with log.producer("accounts") as producer:
                producer.upsert([{"id": number, "name": "old"} for number in range(20)])
            yield log

    @pytest.mark.parametrize("version", [1, 2])
    @pytest.mark.parametrize("buckets", [2, 8])
    def test_another_number_of_buckets_is_refused(
        self, log: hr.Log, tmp_path: Path, version: int, buckets: int
    ) -> None:
        sink = hr.sinks.parquet(tmp_path / "files", buckets=4)
        caught_up(sink, log, "accounts")
        if version == 1:
            self.make_version_1(tmp_path / "files")
        other = hr.sinks.parquet(tmp_path / "files", buckets=buckets)
        with pytest.raises(TargetMismatch, match=r"buckets[\s\S]*declare the sink as it was"):
            caught_up(other, log, "accounts")
        caught_up(sink, log, "accounts")
        caught_up(other, log, "accounts", start_over=True)
        assert_equal_to_log(other, log, "accounts")

    def make_version_1(self, directory: Path) -> None:
        newest = max((directory / FOLDER).glob("*.json"))
        stored = json.loads(newest.read_text())
        files = {str(bucket): [name] for _, bucket, name, _ in stored["files"]}
        text = json.dumps({"version": 1, "applied": stored["applied"], "files": files})
        newest.write_text(text)

    def test_another_mode_is_refused(self, log: hr.Log, tmp_path: Path) -> None:
        sink = hr.sinks.parquet(tmp_path / "files")
        caught_up(sink, log, "accounts")
        with pytest.raises(TargetMismatch, match="mode='merge', and the sink is declared with"):
            caught_up(replace(sink, mode="append"), log, "accounts")

    def test_a_damaged_manifest_says_so(self, log: hr.Log, tmp_path: Path) -> None:
        sink = hr.sinks.parquet(tmp_path / "files")
        caught_up(sink, log, "accounts")
        max((tmp_path / "files" / FOLDER).glob("*.json")).write_text('{"version": 2')
        with pytest.raises(TargetMismatch, match=r"manifest[\s\S]*damaged[\s\S]*backup"):
            caught_up(sink, log, "accounts")

    def test_many_small_files_become_a_large_one(self, log: hr.Log, tmp_path: Path) -> None:
        log.create_topic("payments", "id BIGINT")
        with log.producer("payments") as producer:
            producer.append([{"id": number} for number in range(40)])
        sink = replace(hr.sinks.parquet(tmp_path / "files"), batch_rows=1)
        caught_up(sink, log, "payments")
        assert len(list((tmp_path / "files").glob("*.parquet"))) < 32
        assert [row["id"] for row in rows_of(sink, log, "payments")] == list(range(40))
        assert_equal_to_log(sink, log, "payments")


def test_commits_of_a_sink_that_keeps_up_are_apart(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("payments", "id BIGINT")
        sink = hr.sinks.parquet(tmp_path / "files", commit_interval="1 hour")
        with log.producer("payments") as producer:
            producer.append([{"id": 1}])
            stop = threading.Event()
            thread = threading.Thread(
                target=lambda: sink.run("payments", log=log.address, stop=stop)
            )
            thread.start()
            deadline = time.monotonic() + 60
            while not list((tmp_path / "files").glob("*.parquet")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            producer.append([{"id": 2}])
            time.sleep(0.3)
            stop.set()
            thread.join(30)
        assert not thread.is_alive()
        assert [row["id"] for row in rows_of(sink, log, "payments")] == [1]
        caught_up(sink, log, "payments")
        assert [row["id"] for row in rows_of(sink, log, "payments")] == [1, 2]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ftp://host/x", "cannot write to ftp"),
        ("s4://bucket/x", "did you mean 's3'"),
        (Path("s3://bucket/x"), "pass it as a text"),
    ],
)
def test_a_url_does_not_become_a_directory(path: str | Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hr.sinks.parquet(path)


def test_a_directory_may_be_given_as_file() -> None:
    assert hr.sinks.from_url("parquet:file:lake").options["path"] == "lake"
    assert hr.sinks.from_url("parquet:file:///data/lake").options["path"] == "/data/lake"
