"""Sending: few delivery reports, reused clients and staged records, and no record is lost
silently.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.kafka.records import record_columns, record_parts
from headrace.log.kafka.sender import Record, group_by_partition
from headrace.log.values import Staged
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka
Names = Callable[[str], str]


def test_a_record_that_is_refused_between_two_that_are_reported_fails_the_commit(
    kafka_broker: KafkaBroker, name: Names
) -> None:
    """Only the ends of what is sent are reported; each record is a request of its own here, so that
    the broker refuses just the one in the middle.
    """
    with hr.open_log(kafka_broker.address, **{"batch.num.messages": 1}) as log:
        topic = log.create_topic(name("t"), "text STRING").name
        internals: Any = log
        internals._connection.admin.configure_topic(topic, {"max.message.bytes": "1000"})
        tx = log.transaction(name("job"))
        tx.append(topic, [{"text": text} for text in ("a", "x" * 5_000, "b")])
        with pytest.raises(errors.HeadraceError):
            tx.commit()
        with tx.next() as again:
            again.append(topic, {"text": "c"})
        assert [row["text"] for row in log.read(topic).to_pylist()] == ["c"]


def test_records_keep_their_order_within_a_partition() -> None:
    records = [Record("t", n % 2, None, b"%d" % n) for n in range(5)] + [
        Record("u", 0, b"k", None, [("h", b"1")])
    ]
    assert [(each.topic, each.partition, each.values) for each in group_by_partition(records)] == [
        ("t", 0, [b"0", b"2", b"4"]),
        ("t", 1, [b"1", b"3"]),
        ("u", 0, [None]),
    ]


def test_columns_say_what_records_say(log: hr.Log, name: Names) -> None:
    info = log.create_table(name("t"), "id BIGINT, v STRING", key="id")
    changes = ["insert", "update_preimage", "update_postimage", "delete"]
    batch = pa.RecordBatch.from_pydict(
        {"id": [1, 1, 1, 2], "v": ["a", "a", "b", "c"], "_change_type": changes},
        schema=info.arrow_schema,
    )
    keys, values, headers = record_parts(record_columns(info, batch, 1_000_000))
    assert keys == [b"1", b"1", b"1", b"2"]
    assert values == [b'{"id":1,"v":"a"}', b'{"id":1,"v":"a"}', b'{"id":1,"v":"b"}', None]
    assert list(headers) == [
        [("headrace.change", b"insert")],
        [("headrace.change", b"update_preimage")],
        None,
        None,
    ]


def test_staged_files_of_another_format_are_refused(
    log: hr.Log, name: Names, tmp_path: Path
) -> None:
    topic = log.create_topic(name("t"), "text STRING").name
    file = tmp_path / "foreign.arrow"
    with pa.ipc.new_file(str(file), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.RecordBatch.from_pydict({"text": ["a"]}))
    tx = log.transaction(name("job"))
    tx.adopt(Staged(topic, {0: (str(file), 1)}, 1))
    with pytest.raises(errors.NewerFormat):
        tx.commit()
    lost = tx.next()
    with pytest.raises(errors.TransactionTimedOut, match="gone"):
        lost.adopt(Staged(topic, {0: (str(tmp_path / "nowhere.arrow"), 1)}, 1))
    lost.abort()
    assert log.read(topic).to_pylist() == []


def test_fetchers_are_reused_between_reads_and_find_new_topics(
    kafka_broker: KafkaBroker, name: Names
) -> None:
    with hr.open_log(kafka_broker.address) as log:
        internals: Any = log
        fetchers = internals._connection.admin.fetchers
        for number in range(3):
            topic = log.create_topic(name(f"t{number}"), "n BIGINT").name
            with log.producer(topic) as producer:
                producer.append([{"n": number}] * 3)
            assert [row["n"] for row in log.read(topic).to_pylist()] == [number] * 3
        (idle,) = fetchers._idle
        next(iter(log.read(topic)))  # not read to its end: that reader is not used again
        assert idle not in fetchers._idle
    assert fetchers._idle == []
