"""The sink `mirror`: a topic of another log with the same rows at the same offsets."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import InputError, TargetMismatch
from headrace.sinks.mirror_target import MirrorTarget
from headrace.testing.sink_contract import SinkContract, assert_equal_to_log, caught_up
from headrace.testing.strikes import StrikePoint

POINTS = tuple(
    StrikePoint(MirrorTarget, method, when)
    for method in ("_commit", "_copy")
    for when in ("before", "after")
)


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'standby'}") as log:
        yield log


@pytest.fixture
def sink(standby: hr.Log) -> hr.sinks.Sink:
    return hr.sinks.mirror(standby.address)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, name STRING", key="id", partitions=2)
        yield log


def copies(log: hr.Log, topic: str) -> list[dict[str, Any]]:
    """Rows of a topic with all that a mirror keeps."""
    rows = log.read(topic, headers=True).to_pylist()
    return [{name: row[name] for name in row if name != "_timestamp"} for row in rows]


class TestContract(SinkContract):
    points = POINTS
    merges = False

    @pytest.fixture
    def sink(self, standby: hr.Log) -> hr.sinks.Sink:
        return hr.sinks.mirror(standby.address)


def test_offsets_are_kept_where_the_topic_has_gaps(
    sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log
) -> None:
    """Of compaction and of control records."""
    log.create_topic(
        "clicks", "user STRING, n INT", key="user", compact=True, partitions=2, segment_bytes=8192
    )
    with log.producer("clicks") as producer:
        for n in range(200):
            producer.append([{"user": f"u{n % 7}", "n": n}], headers=[{"n": str(n).encode()}])
            if n % 50 == 20:
                with log.transaction("tests") as transaction:
                    transaction.append_control("clicks", n % 2, b'{"n":%d}' % n)
    log.maintain("clicks")
    caught_up(sink, log, "clicks")
    assert copies(standby, "clicks") == copies(log, "clicks")
    assert len(copies(log, "clicks")) < 200
    assert standby.end_offsets("clicks") == log.end_offsets("clicks")
    for partition in range(2):
        kept, copied = (
            [
                (control.offset, control.payload)
                for control in each.read_control("clicks", partition)
            ]
            for each in (log, standby)
        )
        assert kept == copied
    assert_equal_to_log(sink, log, "clicks")
    standby.maintain("clicks")  # compacts what has gaps already
    assert copies(standby, "clicks") == copies(log, "clicks")
    assert not standby.verify()


def test_offsets_are_kept_where_retention_has_removed_the_beginning(
    sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log
) -> None:
    log.create_topic("clicks", "n INT", retention_bytes=20_000, segment_bytes=8192)
    with log.producer("clicks") as producer:
        for n in range(300):
            producer.append({"n": n})
    log.maintain("clicks")
    (first,) = log.start_offsets("clicks").values()
    assert first > 0
    caught_up(sink, log, "clicks")
    assert copies(standby, "clicks") == copies(log, "clicks")
    assert standby.read("clicks", 0, first).to_pylist()[0]["n"] == first
    assert_equal_to_log(sink, log, "clicks")


def test_a_group_goes_on_in_the_mirror_where_it_was(
    sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log
) -> None:
    log.create_topic("jobs", "n INT")
    with log.producer("jobs") as producer:
        for n in range(10):
            producer.append({"n": n})
    with log.transaction("tests") as transaction:
        transaction.commit_offsets("workers", {"jobs": {0: 6}})
    caught_up(sink, log, "jobs")
    rows = standby.read("jobs", 0, log.committed("workers")["jobs"][0]).to_pylist()
    assert [row["n"] for row in rows] == [6, 7, 8, 9]


def test_what_is_appended_goes_on_to_be_copied_and_columns_and_partitions_too(
    sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log
) -> None:
    log.create_topic("jobs", "n INT")
    with log.producer("jobs") as producer:
        producer.append({"n": 1})
        caught_up(sink, log, "jobs")
        log.alter_topic("jobs", add_columns="city STRING", partitions=3)
        for n in range(9):
            producer.append({"n": n, "city": "Oslo"})
    caught_up(sink, log, "jobs")
    assert copies(standby, "jobs") == copies(log, "jobs")
    log.alter_topic("jobs", rename_columns={"city": "town"})
    with pytest.raises(TargetMismatch, match="headrace topic alter"):
        caught_up(sink, log, "jobs")
    standby.alter_topic("jobs", rename_columns={"city": "town"})
    caught_up(sink, log, "jobs")
    assert_equal_to_log(sink, log, "jobs")


def test_a_mirror_that_somebody_appends_to_is_noticed(
    sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log
) -> None:
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": "x"} for n in range(20)])
        caught_up(sink, log, "accounts")
        with standby.producer("accounts") as stranger:
            stranger.upsert([{"id": n, "name": "stranger"} for n in range(20)])
        producer.upsert([{"id": n, "name": "y"} for n in range(20)])
    with pytest.raises(TargetMismatch, match=r"somebody else appends[\s\S]*--start-over"):
        caught_up(sink, log, "accounts")
    caught_up(sink, log, "accounts", start_over=True)
    assert copies(standby, "accounts") == copies(log, "accounts")


def test_a_topic_that_has_rows_already_is_no_mirror(
    sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log
) -> None:
    standby.create_table("accounts", "id BIGINT, name STRING", key="id", partitions=2)
    with standby.producer("accounts") as producer:
        producer.upsert({"id": 1, "name": "x"})
    with pytest.raises(TargetMismatch, match="did not write"):
        caught_up(sink, log, "accounts")


def test_a_mirror_that_was_deleted_is_filled_again(
    sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log
) -> None:
    with log.producer("accounts") as producer:
        producer.upsert([{"id": n, "name": "x"} for n in range(20)])
    caught_up(sink, log, "accounts")
    standby.delete_topic("accounts")
    caught_up(sink, log, "accounts")
    assert copies(standby, "accounts") == copies(log, "accounts")


def test_it_follows_while_rows_come(sink: hr.sinks.Sink, log: hr.Log, standby: hr.Log) -> None:
    stop = threading.Event()
    running = threading.Thread(
        target=sink.run, args=("accounts",), kwargs={"log": log.address, "stop": stop}
    )
    running.start()
    with log.producer("accounts") as producer:
        for n in range(30):
            producer.upsert([{"id": n % 5, "name": f"{n}"}])
            producer.delete([(n + 1) % 5])
    stop.set()
    running.join(30)
    caught_up(sink, log, "accounts")
    assert copies(standby, "accounts") == copies(log, "accounts")


def test_what_a_mirror_cannot_be(log: hr.Log) -> None:
    with pytest.raises(InputError, match="embedded log alone"):
        hr.sinks.from_url("mirror:kafka://localhost")
    with pytest.raises(InputError, match="no key"):
        hr.sinks.mirror("file:x", key="id")
    with pytest.raises(InputError, match="its own mirror"):
        caught_up(hr.sinks.mirror(log.address), log, "accounts")
