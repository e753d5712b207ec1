"""Reading without a group: ranges, columns, ends, times, snapshots."""

import time
from datetime import UTC, datetime

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.columnar.columns import SYSTEM_FIELDS
from tests.contract.base import ContractBase, MakeName, append, event, order, rows_of


class ReadingContract(ContractBase):
    def test_a_range_is_read_from_start_to_stop(self, log: hr.Log, events: str) -> None:
        append(log, events, [event(n) for n in range(20)])
        assert [row["n"] for row in log.read(events, 0, 5, 9).to_pylist()] == [5, 6, 7, 8]
        assert [row["n"] for row in log.read(events, 0, 15).to_pylist()] == list(range(15, 20))
        assert [row["n"] for row in log.read(events, 0, stop=3).to_pylist()] == [0, 1, 2]
        assert log.read(events, 0, 7, 7).to_pylist() == log.read(events, 0, 20).to_pylist() == []
        assert [row["n"] for row in log.read(events, 0, 18, 1000).to_pylist()] == [18, 19]

    def test_an_offset_that_is_not_there_is_refused(self, log: hr.Log, events: str) -> None:
        append(log, events, event(1))
        with pytest.raises(errors.OffsetOutOfRange) as refused:
            log.read(events, 0, 50).to_table()
        assert (refused.value.offset, refused.value.earliest, refused.value.end) == (50, 0, 1)

    def test_batches_have_the_systems_columns_behind_the_topics(
        self, log: hr.Log, events: str
    ) -> None:
        before = datetime.now(UTC)
        append(log, events, [event(n) for n in range(3)])
        after = datetime.now(UTC)
        lazy = log.read(events)
        table = lazy.to_table()
        assert (
            lazy.schema
            == table.schema
            == pa.schema([*log.topic(events).arrow_schema, *SYSTEM_FIELDS])
        )
        assert table.column("_partition").to_pylist() == [0, 0, 0]
        assert table.column("_offset").to_pylist() == [0, 1, 2]
        for moment in table.column("_timestamp").to_pylist():
            assert (
                before.timestamp() - 0.001 <= moment.timestamp() <= after.timestamp()
            )  # a log's clock may have milliseconds only
        assert [batch.num_rows for batch in lazy] == [batch.num_rows for batch in lazy], (
            "a read can be repeated"
        )

    def test_columns_can_be_chosen(self, log: hr.Log, events: str) -> None:
        append(log, events, event(1, "a"))
        assert log.read(events, columns=["text", "_offset"]).to_pylist() == [
            {"text": "a", "_offset": 0}
        ]
        assert log.read(events, columns=["text"]).schema.names == ["text"]
        with pytest.raises(errors.UnknownColumn, match="did you mean 'text'"):
            log.read(events, columns=["texd"])

    def test_all_partitions_are_read_one_after_the_other(self, log: hr.Log, orders: str) -> None:
        append(log, orders, [order(n, customer=n) for n in range(100)])
        rows = log.read(orders).to_pylist()
        assert sorted(row["order_id"] for row in rows) == list(range(100))
        positions = [(row["_partition"], row["_offset"]) for row in rows]
        assert positions == sorted(positions)
        for partition in range(4):
            assert log.read(orders, partition).to_pylist() == [
                row for row in rows if row["_partition"] == partition
            ]

    def test_ends_say_how_far_one_can_read(self, log: hr.Log, other: hr.Log, orders: str) -> None:
        append(log, orders, [order(n, customer=n) for n in range(30)])
        ends = other.end_offsets(orders)
        assert list(ends) == [0, 1, 2, 3]
        read = {
            partition: log.read(orders, partition, 0, end).to_table().num_rows
            for partition, end in ends.items()
        }
        assert sum(read.values()) == 30
        extra = 1 if self.markers_take_offsets else 0
        assert all(
            ends[partition] == count + (extra if count else 0) for partition, count in read.items()
        )

    def test_rows_appended_later_are_not_part_of_a_read(self, log: hr.Log, events: str) -> None:
        append(log, events, event(1))
        lazy = log.read(events)
        append(log, events, event(2))
        assert [row["n"] for row in lazy.to_pylist()] == [1]

    def test_rows_are_whole_from_where_retention_and_compaction_left_them(
        self, log: hr.Log, name: MakeName
    ) -> None:
        topic = name("aging")
        log.create_topic(topic, "id BIGINT", segment_bytes=max(512, self.smallest_segment_bytes))
        for number in range(20):
            append(log, topic, {"id": number})
        assert log.whole_from(topic) == log.start_offsets(topic) == {0: 0}
        self.forget_old_rows(log, topic)
        assert log.whole_from(topic) == log.start_offsets(topic) != {0: 0}
        compacted = name("compacted")
        log.create_table(compacted, "id BIGINT, v STRING", key="id", history="1 hour")
        with log.producer(compacted) as producer:
            producer.upsert([{"id": 1, "v": "a"}])
        assert log.whole_from(compacted) == {0: 0}

    def test_a_snapshot_has_the_ends_of_several_topics(
        self, log: hr.Log, orders: str, events: str
    ) -> None:
        append(log, events, [event(1), event(2)])
        append(log, orders, order(1))
        snapshot = log.snapshot([events, orders])
        append(log, events, event(3))
        assert dict(snapshot) == {events: {0: 2}, orders: log.end_offsets(orders)}
        assert [row["n"] for row in log.read(events, 0, 0, snapshot[events][0]).to_pylist()] == [
            1,
            2,
        ]
        with pytest.raises(errors.UnknownTopic):
            log.snapshot([events, "no-such-topic"])

    def test_offsets_at_a_time(self, log: hr.Log, events: str) -> None:
        append(log, events, [event(1), event(2)])
        time.sleep(0.05)
        between = datetime.now(UTC)
        time.sleep(0.05)
        append(log, events, event(3))
        assert log.offsets_at(events, between) == {0: 2}
        assert log.offsets_at(events, between.isoformat()) == {0: 2}
        assert log.offsets_at(events, between.timestamp()) == {0: 2}
        assert log.offsets_at(events, "2000-01-01T00:00:00Z") == {0: 0}
        assert log.offsets_at(events, datetime(2100, 1, 1, tzinfo=UTC)) == {0: 3}
        third = log.read(events, 0, 2).to_pylist()[0]["_timestamp"]
        assert log.offsets_at(events, third) == {0: 2}, "at or after"

    def test_reading_is_bounded_by_batches(self, log: hr.Log, events: str) -> None:
        with log.producer(events) as producer:
            for first in range(0, 30_000, 10_000):
                producer.append(
                    pa.table(
                        {"n": range(first, first + 10_000), "text": ["some text of a row"] * 10_000}
                    )
                )
        batches = list(log.read(events))
        assert [n for batch in batches for n in batch.column("n").to_pylist()] == list(
            range(30_000)
        )
        assert max(batch.nbytes for batch in batches) < 8 << 20

    def test_the_same_rows_from_another_handle(
        self, log: hr.Log, other: hr.Log, events: str
    ) -> None:
        append(log, events, event(1))
        assert rows_of(other, events) == [event(1)]
        append(other, events, event(2))
        assert rows_of(log, events) == [event(1), event(2)]
