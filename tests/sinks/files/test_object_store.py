"""Parquet files in an object store: the contract, against a server that speaks the protocol of S3;
a server without conditional requests; and what is said if there is no bucket or no access.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import TargetMismatch, TargetUnavailable
from headrace.sinks.files.manifest import FOLDER, read_manifest
from headrace.sinks.files.parquet_target import ParquetTarget, current_files, open_store
from headrace.testing.sink_contract import (
    SinkContract,
    account,
    assert_equal_to_log,
    caught_up,
    rows_of,
)
from headrace.testing.strikes import StrikePoint

obstore = pytest.importorskip("obstore")
from headrace.sinks.files.object_store import ObjectFileStore  # noqa: E402

pytestmark = pytest.mark.server


class TestParquetOnS3(SinkContract):
    points = (
        StrikePoint(ParquetTarget, "_write", "after", 0),
        StrikePoint(ParquetTarget, "_publish", "before", 1),
        StrikePoint(ParquetTarget, "_publish", "after", 1),
        StrikePoint(ObjectFileStore, "delete", "before", 2),
    )

    @pytest.fixture
    def sink(self, s3_url: str) -> hr.sinks.Sink:
        return hr.sinks.parquet(s3_url, buckets=4)

    def test_only_the_files_of_the_manifest_stay(
        self, sink: hr.sinks.Sink, log: hr.Log, s3_url: str
    ) -> None:
        for amount in range(4):
            with log.producer("accounts") as producer:
                producer.upsert([account(number, amount) for number in range(20)])
            caught_up(sink, log, "accounts")
        with open_store(s3_url, None) as store:
            store.publish("000000000002-0123456789ab.parquet", b"half a file")
            caught_up(sink, log, "accounts")
            assert store.names(suffix=".parquet") == sorted(read_manifest(store).names)
            assert len(store.names(FOLDER, suffix="")) <= 4
            assert current_files(s3_url) == [
                f"{s3_url}/{name}" for name in read_manifest(store).names
            ]
        assert_equal_to_log(sink, log, "accounts")

    def test_a_check_reads_files_that_are_replaced_meanwhile(
        self, sink: hr.sinks.Sink, log: hr.Log
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(number) for number in range(20)])
        caught_up(sink, log, "accounts")
        with sink.open(sink.shape_for(log.topic("accounts")), log) as target:
            target.prepare()
            _, chunks = target.contents()
            with log.producer("accounts") as producer:
                producer.upsert([account(number, 7) for number in range(20)])
            caught_up(sink, log, "accounts")
            assert {row["amount"] for chunk in chunks for row in chunk.to_pylist()} == {1}

    def test_a_missing_object_ends_the_sync_with_what_to_do(
        self, sink: hr.sinks.Sink, log: hr.Log, s3_url: str
    ) -> None:
        with log.producer("accounts") as producer:
            producer.upsert([account(number) for number in range(20)])
        caught_up(sink, log, "accounts")
        with open_store(s3_url, None) as store:
            store.delete(read_manifest(store).names[:1])
        with log.producer("accounts") as producer:
            producer.upsert([account(number, 2) for number in range(20)])
        compared = sink.check("accounts", log=log.address)
        assert (compared.unreadable, compared.is_equal) == (1, False)
        with pytest.raises(TargetMismatch, match=r"is missing[\s\S]*from a backup"):
            caught_up(sink, log, "accounts")

    def test_partitions_are_prefixes(self, log: hr.Log, s3_url: str) -> None:
        sink = hr.sinks.parquet(s3_url, partition_by="name", table="parts")
        for name in ("ada", "a/b ü", "eve"):
            with log.producer("accounts") as producer:
                producer.upsert([account(1, name=name), account(2)])
            caught_up(sink, log, "accounts")
        assert [row["name"] for row in rows_of(sink, log, "accounts")] == ["eve", "ada"]
        assert_equal_to_log(sink, log, "accounts")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, name STRING", key="id")
        with log.producer("accounts") as producer:
            producer.upsert([{"id": 1, "name": "ada"}])
        yield log


def begin(sink: hr.sinks.Sink, log: hr.Log) -> None:
    with sink.open(sink.shape_for(log.topic("accounts")), log) as target:
        target.prepare()
        target.begin(1)


def test_a_server_that_ignores_conditions_is_refused(
    s3_url: str, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = obstore.put

    def put_unconditionally(store: Any, name: str, content: Any, **options: Any) -> Any:
        return put(store, name, content, **{**options, "mode": "overwrite"})

    monkeypatch.setattr(obstore, "put", put_unconditionally)
    with pytest.raises(TargetMismatch, match="ignores the condition If-None-Match"):
        caught_up(hr.sinks.parquet(s3_url), log, "accounts")


def test_a_commit_whose_response_was_lost_and_that_was_sent_again_is_no_conflict(
    s3_url: str,
) -> None:
    with open_store(s3_url, None) as store:
        assert store.publish("one", b"ours")
        assert store.publish("one", b"ours")
        assert not store.publish("one", b"another's")


def test_a_bucket_that_is_not_there(s3_url: str, log: hr.Log) -> None:
    sink = hr.sinks.parquet("s3://no-such-bucket-of-ours/lake")
    with pytest.raises(TargetMismatch, match=r"no bucket[\s\S]*create the bucket"):
        caught_up(sink, log, "accounts")


def test_a_server_that_is_away_is_tried_again(
    s3_url: str, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TargetUnavailable, match=r"s3://[\s\S]*can be reached"):
        begin(hr.sinks.parquet(s3_url), log)


def test_missing_credentials_say_where_they_belong(
    s3_url: str, log: hr.Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TargetUnavailable, match=r"credentials[\s\S]*AWS_ACCESS_KEY_ID"):
        begin(hr.sinks.parquet(s3_url), log)


def test_credentials_of_a_profile(
    s3_url: str, log: hr.Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text("[lake]\naws_access_key_id = someone\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    sink = hr.sinks.parquet(s3_url)
    caught_up(sink, log, "accounts")
    assert sink.check("accounts", log=log.address).is_equal
