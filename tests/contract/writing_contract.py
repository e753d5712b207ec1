"""Appending: what is refused, where rows go, headers, control batches, idempotent producers,
tables.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from headrace.log.partitioning import partitions_by_key
from tests.contract.base import ORDERS, ContractBase, MakeName, append, event, order, rows_of

# From Kafka 4.3's Java client: Utils.toPositive(Utils.murmur2(key)) % 7.
JAVA_PARTITIONS = {
    "a": 5,
    "customer-7": 6,
    "42": 3,
    "-1": 6,
    '[1,"x"]': 1,
    "true": 6,
    "äöü": 5,
    "2024-01-01": 2,
    "1.5": 1,
    "": 2,
}


class WritingContract(ContractBase):
    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            ({"n": 1}, "'text'"),
            ({"n": 1, "text": "x", "txet": "y"}, "did you mean 'text'"),
            ({"n": "one", "text": "x"}, "column 'n'"),
            ({"n": 2**63, "text": "x"}, "column 'n'"),
            ({"n": 1, "text": 5}, "column 'text'"),
        ],
    )
    def test_rows_that_do_not_fit_are_refused_whole(
        self, log: hr.Log, events: str, bad: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(errors.BadRows, match="ow 2") as refused:
            append(log, events, [event(0), event(1), bad])
        assert words in str(refused.value)
        assert log.end_offsets(events) == {0: 0}

    def test_a_null_where_none_may_be_is_refused(self, log: hr.Log, name: MakeName) -> None:
        topic = log.create_topic(name("strict"), "n BIGINT NOT NULL, text STRING").name
        with pytest.raises(errors.BadRows, match="NOT NULL"):
            append(log, topic, [event(1), {"n": None, "text": "x"}])
        assert rows_of(log, topic) == []

    def test_an_append_says_where_it_went(self, log: hr.Log, orders: str) -> None:
        position = append(log, orders, [order(n, customer=n) for n in range(40)])
        spans = position.partitions(orders)
        assert position.partitions() == spans
        assert not position.duplicate
        for partition, span in spans.items():
            rows = log.read(orders, partition, span.start, span.stop).to_pylist()
            assert len(rows) == len(span)
        assert sum(map(len, spans.values())) == 40
        assert (position.commit is not None) == self.has_global_order

    def test_offsets_are_ordered_and_rows_stay_in_order(self, log: hr.Log, events: str) -> None:
        with log.producer(events) as producer:
            for first in range(0, 30, 10):
                producer.append([event(n) for n in range(first, first + 10)])
        table = log.read(events).to_table()
        assert table.column("n").to_pylist() == list(range(30))
        offsets = table.column("_offset").to_pylist()
        assert offsets == sorted(set(offsets))
        times = table.column("_timestamp").to_pylist()
        assert times == sorted(times)

    def test_an_empty_append_stores_nothing(self, log: hr.Log, events: str) -> None:
        position = append(log, events, [])
        assert not any(position.partitions(events).values())
        assert log.end_offsets(events) == {0: 0}

    def test_a_closed_producer_is_refused(self, log: hr.Log, events: str) -> None:
        producer = log.producer(events)
        producer.close()
        with pytest.raises(errors.InputError, match="closed"):
            producer.append(event(1))

    # Partitions

    @pytest.mark.parametrize(
        ("schema", "key", "keys"),
        [
            (
                "k STRING",
                "k",
                [{"k": text} for text in JAVA_PARTITIONS if not text.startswith("[")],
            ),
            ("k BIGINT", "k", [{"k": 42}, {"k": -1}]),
            ("k BOOLEAN", "k", [{"k": True}]),
            ("k DOUBLE", "k", [{"k": 1.5}]),
            ("k BIGINT, s STRING", ("k", "s"), [{"k": 1, "s": "x"}]),
        ],
    )
    def test_keys_go_where_kafkas_java_client_sends_them(
        self, log: hr.Log, name: MakeName, schema: str, key: Any, keys: list[dict[str, Any]]
    ) -> None:
        topic = log.create_topic(name("keyed"), schema, key=key, partitions=7).name
        append(log, topic, keys)
        found = {_key_text(row): row["_partition"] for row in log.read(topic).to_pylist()}
        assert found == {text: JAVA_PARTITIONS[text] for text in found}
        assert len(found) == len(keys)

    def test_many_keys_agree_with_the_shared_hash(self, log: hr.Log, orders: str) -> None:
        rows = [order(n, customer=n * 7919) for n in range(500)]
        append(log, orders, rows)
        table = log.read(orders).to_table()
        batch = table.select(["order_id", "customer_id", "amount"]).combine_chunks().to_batches()[0]
        assert (
            partitions_by_key(batch, ("customer_id",), 4).tolist()
            == table.column("_partition").to_pylist()
        )
        assert sorted(table.column("order_id").to_pylist()) == list(range(500))

    def test_without_a_key_rows_go_round(self, log: hr.Log, name: MakeName) -> None:
        topic = log.create_topic(name("turns"), "n BIGINT, text STRING", partitions=3).name
        with log.producer(topic) as producer:
            for n in range(3):
                producer.append(event(n))
            producer.append([event(n) for n in range(3, 9)])
        found = {row["n"]: row["_partition"] for row in log.read(topic).to_pylist()}
        assert [sorted(n for n in found if found[n] == found[first]) for first in range(3)] == [
            [0, 3, 6],
            [1, 4, 7],
            [2, 5, 8],
        ]

    def test_a_function_or_a_number_chooses_the_partition(self, log: hr.Log, orders: str) -> None:
        def by_amount(batch: pa.RecordBatch, partitions: int) -> Any:
            return np.array(batch.column("amount").to_pylist()).astype(int) % partitions

        with log.producer(orders, partitioner=by_amount) as producer:
            producer.append([order(n, amount=float(n)) for n in range(8)])
        append(log, orders, order(100), partition=2)
        found = {row["order_id"]: row["_partition"] for row in log.read(orders).to_pylist()}
        assert found == {n: n % 4 for n in range(8)} | {100: 2}

    def test_partitions_that_are_not_there_are_refused(self, log: hr.Log, orders: str) -> None:
        with pytest.raises(errors.BadPartition, match="0 to 3"):
            append(log, orders, order(1), partition=4)
        with pytest.raises(errors.BadPartition):
            log.read(orders, 9)
        for wrong in ([7], [0, 0], [-1]):
            with (
                log.producer(orders, partitioner=_always(wrong)) as producer,
                pytest.raises(errors.BadPartition),
            ):
                producer.append(order(1))
        assert sum(log.end_offsets(orders).values()) == 0

    # Headers and control batches

    def test_headers_ride_along(self, log: hr.Log, events: str) -> None:
        headers: Any = [[("trace", b"7"), ("trace", b"8"), ("empty", None)], None, {"one": b""}]
        append(log, events, [event(n) for n in range(3)], headers=headers)
        append(log, events, event(3))
        table = log.read(events, headers=True).to_table()
        shown = [
            [(pair["key"], pair["value"]) for pair in pairs or []]
            for pairs in table.column("_headers").to_pylist()
        ]
        assert shown == [
            [("trace", b"7"), ("trace", b"8"), ("empty", None)],
            [],
            [("one", b"")],
            [],
        ]
        assert "_headers" not in log.read(events).schema.names
        with pytest.raises(errors.BadRows, match="headers"):
            append(log, events, event(1), headers=[None, None])

    def test_control_batches_take_an_offset_and_are_skipped(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(0))
        first = log.append_control(events, 0, b"tick 1").partitions(events)[0]
        append(log, events, event(1))
        second = log.append_control(events, 0, b"\x00\xff").partitions(events)[0]
        assert (len(first), len(second)) == (1, 1)
        assert [row["n"] for row in log.read(events).to_pylist()] == [0, 1]
        assert log.end_offsets(events)[0] == second.stop
        controls = other.read_control(events, 0)
        assert [(control.partition, control.offset, control.payload) for control in controls] == [
            (0, first.start, b"tick 1"),
            (0, second.start, b"\x00\xff"),
        ]
        assert [control.payload for control in log.read_control(events, 0, first.stop)] == [
            b"\x00\xff"
        ]
        assert log.read_control(events, 0, 0, first.start) == []
        with log.consumer(events, group=name("g")) as consumer:
            assert [
                n
                for batch in consumer.poll(timeout="5 seconds")
                for n in batch.column("n").to_pylist()
            ] == [0, 1]
        with pytest.raises(errors.BadPartition):
            log.append_control(events, 5, b"")

    # Idempotent producers

    def test_a_repeated_number_is_acknowledged_and_not_stored(
        self, log: hr.Log, orders: str
    ) -> None:
        rows = [order(n, customer=n) for n in range(10)]
        with log.producer(orders, id="till-7") as producer:
            assert producer.last_sequence == -1
            first = producer.append(rows, sequence=0)
            again = producer.append(rows, sequence=0)
            assert (again.duplicate, first.duplicate) == (True, False)
            assert again.partitions(orders) == first.partitions(orders)
            assert producer.append(order(10)).duplicate is False
            assert producer.last_sequence == 1
            producer.append(order(11), sequence=40)
            assert producer.last_sequence == 40
            with pytest.raises(errors.OutOfOrder, match="the number 39"):
                producer.append(order(12), sequence=39)
            assert producer.last_sequence == 40
        assert sorted(row["order_id"] for row in rows_of(log, orders)) == list(range(12))

    def test_numbers_survive_restarts(self, log: hr.Log, other: hr.Log, events: str) -> None:
        with log.producer(events, id="p") as producer:
            stored = producer.append([event(1), event(2)], sequence=3)
        with other.producer(events, id="p") as producer:
            assert producer.last_sequence == 3
            again = producer.append([event(1), event(2)], sequence=3)
            assert (again.duplicate, again.partitions(events)) == (True, stored.partitions(events))
            producer.append(event(3), sequence=4)
        assert [row["n"] for row in rows_of(log, events)] == [1, 2, 3]

    def test_ids_do_not_mix(self, log: hr.Log, events: str, orders: str) -> None:
        with (
            log.producer(events, id="a") as one,
            log.producer(events, id="b") as two,
            log.producer(orders, id="a") as three,
        ):
            one.append(event(1), sequence=0)
            two.append(event(2), sequence=0)
            three.append(order(3), sequence=0)
        assert [row["n"] for row in rows_of(log, events)] == [1, 2]
        assert len(rows_of(log, orders)) == 1

    def test_a_zombie_is_refused(self, log: hr.Log, other: hr.Log, events: str) -> None:
        old = log.producer(events, id="p")
        old.append(event(1), sequence=0)
        new = other.producer(events, id="p")
        assert new.epoch > old.epoch
        with pytest.raises(errors.ProducerFenced):
            old.append(event(2), sequence=1)
        with pytest.raises(errors.ProducerFenced):
            old.append(event(1), sequence=0)
        with pytest.raises(errors.ProducerFenced):
            old.append(event(3))
        new.append(event(4), sequence=1)
        old.close()
        new.close()
        assert [row["n"] for row in rows_of(log, events)] == [1, 4]

    def test_a_refused_append_leaves_the_number_free(self, log: hr.Log, events: str) -> None:
        with log.producer(events, id="p") as producer:
            with pytest.raises(errors.BadRows):
                producer.append([event(0), {"n": 1}], sequence=0)
            assert producer.last_sequence == -1
            assert not producer.append(event(0), sequence=0).duplicate
        with log.producer(events) as anonymous, pytest.raises(errors.InputError, match="id"):
            anonymous.append(event(1), sequence=0)
        assert [row["n"] for row in rows_of(log, events)] == [0]

    def test_a_number_below_the_newest_that_was_never_stored_is_no_duplicate(
        self, log: hr.Log, events: str
    ) -> None:
        with log.producer(events, id="loader") as producer:
            producer.append(event(5), sequence=5)
            with pytest.raises(errors.OutOfOrder, match="has stored 5 since") as refused:
                producer.append(event(3), sequence=3)
            assert "producer.last_sequence + 1" in str(refused.value)
            assert producer.append(event(5), sequence=5).duplicate
        with log.producer(events, id="loader") as producer, pytest.raises(errors.OutOfOrder):
            producer.append(event(3), sequence=3)
        assert [row["n"] for row in log.read(events).to_pylist()] == [5]

    def test_of_threads_with_numbers_of_one_producer_every_acknowledged_row_is_stored(
        self, log: hr.Log, events: str
    ) -> None:
        with log.producer(events, id="loader") as producer:

            def append(number: int) -> int | None:
                try:
                    producer.append(event(number), sequence=number)
                except errors.OutOfOrder:
                    return None
                return number

            with ThreadPoolExecutor(8) as pool:
                numbers = random.Random(3).sample(range(40), 40)
                acknowledged = [
                    number for number in pool.map(append, numbers) if number is not None
                ]
            stored = [row["n"] for row in log.read(events).to_pylist()]
            assert sorted(stored) == sorted(acknowledged) != []
            assert all(producer.append(event(n), sequence=n).duplicate for n in acknowledged)

    def test_an_append_of_nothing_does_not_move_the_newest_number(
        self, log: hr.Log, events: str
    ) -> None:
        with log.producer(events, id="loader") as producer:
            producer.append(event(0), sequence=0)
            assert not producer.append([], sequence=9).duplicate
            assert producer.last_sequence == 0
            assert not producer.append(event(1), sequence=1).duplicate
            assert producer.last_sequence == 1
        assert [row["n"] for row in log.read(events).to_pylist()] == [0, 1]

    def test_numbers_with_many_gaps_are_duplicates_or_refused_but_never_lost(
        self, log: hr.Log, events: str
    ) -> None:
        with log.producer(events, id="loader") as producer:
            for number in range(0, 30, 3):
                producer.append(event(number), sequence=number)
        with log.producer(events, id="loader") as producer:
            for number in range(28):
                if number % 3:
                    with pytest.raises(errors.OutOfOrder):
                        producer.append(event(number), sequence=number)
                else:
                    assert producer.append(event(number), sequence=number).duplicate
        assert [row["n"] for row in log.read(events).to_pylist()] == list(range(0, 30, 3))

    def test_an_invalid_sequence_number_is_refused(self, log: hr.Log, events: str) -> None:
        with log.producer(events, id="q") as producer:
            for sequence in (-1, "x", 1.0, True, 1 << 63):
                with pytest.raises(errors.InputError, match=f"not {sequence!r}"):
                    producer.append(event(1), sequence=sequence)  # type: ignore[arg-type]
            producer.append(event(2), sequence=1 << 62)
            producer.append(event(3))
        assert [row["n"] for row in rows_of(log, events)] == [2, 3]

    # Tables

    def test_a_table_stores_changes(self, log: hr.Log, name: MakeName) -> None:
        info = log.create_table(
            name("customers"), "id BIGINT, name STRING NOT NULL", key="id", partitions=2
        )
        assert (info.is_table, info.key, info.history_us) == (True, ("id",), None)
        with log.producer(info.name) as producer:
            producer.upsert([{"id": 1, "name": "Ada"}, {"id": 2, "name": "Bob"}])
            producer.upsert({"id": 1, "name": "Ada L."}, headers=[{"by": b"me"}])
            producer.delete(2)
            producer.delete([{"id": 3}])
        changes = [
            (row["id"], row["name"], row["_change_type"]) for row in log.read(info.name).to_pylist()
        ]
        by_key = {key: [change for change in changes if change[0] == key] for key in (1, 2, 3)}
        assert by_key[1] == [(1, "Ada", "update_postimage"), (1, "Ada L.", "update_postimage")]
        assert by_key[2] == [(2, "Bob", "update_postimage"), (2, None, "delete")]
        assert by_key[3] == [(3, None, "delete")]

    def test_every_kind_of_change_survives(self, log: hr.Log, name: MakeName) -> None:
        info = log.create_table(name("wide"), "a STRING, b INT, v DOUBLE", key=("a", "b"))
        kinds = ["insert", "update_preimage", "update_postimage"]
        append(
            log,
            info.name,
            [
                {"a": "x", "b": 1, "v": float(n), "_change_type": kind}
                for n, kind in enumerate(kinds)
            ],
        )
        with log.producer(info.name) as producer:
            producer.delete(("x", 1))
        rows = rows_of(log, info.name)
        assert [(row["_change_type"], row["v"]) for row in rows] == [
            *((kind, float(n)) for n, kind in enumerate(kinds)),
            ("delete", None),
        ]
        assert all((row["a"], row["b"]) == ("x", 1) for row in rows)

    def test_a_deletion_may_come_as_a_row(self, log: hr.Log, name: MakeName) -> None:
        info = log.create_table(name("t"), "id BIGINT, v STRING", key="id")
        append(log, info.name, {"id": 1, "v": "last words", "_change_type": "delete"})
        kept = "last words" if self.keeps_deleted_values else None
        assert rows_of(log, info.name) == [{"id": 1, "v": kept, "_change_type": "delete"}]

    @pytest.mark.parametrize(
        ("kind", "key"),
        [
            ("STRING", "ä/1"),
            ("BINARY", b"\x00\xff"),
            ("INT", -5),
            ("DATE", "2026-01-31"),
            ("DECIMAL(10,2)", "1.50"),
            ("BOOLEAN", False),
        ],
    )
    def test_a_tombstone_keeps_its_key(
        self, log: hr.Log, name: MakeName, kind: str, key: Any
    ) -> None:
        info = log.create_table(name("keys"), f"k {kind}, v STRING", key="k")
        value = pa.array([key]).cast(info.arrow_schema.field("k").type)
        with log.producer(info.name) as producer:
            producer.delete(value)
        assert rows_of(log, info.name) == [
            {"k": value[0].as_py(), "v": None, "_change_type": "delete"}
        ]

    def test_rows_that_a_table_refuses(self, log: hr.Log, name: MakeName, events: str) -> None:
        info = log.create_table(name("strict"), "id BIGINT, name STRING NOT NULL", key="id")
        with log.producer(info.name) as producer:
            for wrong in ({"id": None, "name": "x"}, {"id": 1, "name": None}, {"id": 1}):
                with pytest.raises(errors.BadRows):
                    producer.upsert([{"id": 9, "name": "fine"}, wrong])
            with pytest.raises(errors.BadRows, match="did you mean 'insert'"):
                producer.append({"id": 1, "name": "x", "_change_type": "insrt"})
        with (
            log.producer(events) as producer,
            pytest.raises(errors.InputError, match="create_table"),
        ):
            producer.upsert(event(1))
        assert rows_of(log, info.name) == []
        with pytest.raises(errors.InputError):
            log.create_table(name("keyless"), ORDERS, key=())


def _always(chosen: list[int]) -> Callable[[pa.RecordBatch, int], Any]:
    return lambda _batch, _partitions: chosen


def _key_text(row: dict[str, Any]) -> str:
    """The key's bytes, as they are defined for the types of this test."""
    values = [value for name, value in row.items() if not name.startswith("_")]
    if len(values) == 2:
        return f'[{values[0]},"{values[1]}"]'
    return str(values[0]).lower() if isinstance(values[0], bool) else str(values[0])
