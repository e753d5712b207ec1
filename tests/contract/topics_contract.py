"""Topics: created, listed, changed, deleted; schemas of every type; names and changes that are
refused.
"""

import time
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import inf, isnan, nan
from typing import Any

import pyarrow as pa
import pytest

import headrace as hr
from headrace import errors
from tests.contract.base import ORDERS, ContractBase, MakeName, append, event, order, rows_of

EVERY_TYPE = """flag BOOLEAN, tiny TINYINT, small SMALLINT, whole INT, big BIGINT, single FLOAT,
    double DOUBLE, money DECIMAL(20,4), label STRING, bytes BINARY, day DATE, moment TIMESTAMP,
    wall TIMESTAMP_NTZ, span INTERVAL DAY TO SECOND, list ARRAY<STRING>,
    nested STRUCT<id: BIGINT NOT NULL, tags: ARRAY<STRUCT<name: STRING, at: TIMESTAMP>>,
    price: DECIMAL(5,2)>,
    by_name MAP<STRING, DOUBLE>, by_number MAP<INT, BINARY>"""

FULL_ROW: dict[str, Any] = {
    "flag": True,
    "tiny": -128,
    "small": 32767,
    "whole": -(2**31),
    "big": 2**63 - 1,
    "single": 0.10000000149011612,
    "double": 0.1,
    "money": Decimal("-1234567890123456.7891"),
    "label": 'quote " backslash \\ newline \n null \x00 ünïcödé 🌊',
    "bytes": bytes(range(256)),
    "day": date(1969, 12, 31),
    "moment": datetime(2026, 2, 28, 23, 59, 59, 999999, tzinfo=UTC),
    "wall": datetime.fromisoformat("0001-01-01T00:00:00.000001"),
    "span": timedelta(days=-3, microseconds=5),
    "list": ["a", None, ""],
    "nested": {
        "id": 7,
        "tags": [
            {"name": "x", "at": datetime(2026, 1, 1, tzinfo=UTC)},
            {"name": None, "at": None},
            None,
        ],
        "price": Decimal("1.50"),
    },
    "by_name": [("one", 1.0), ("none", None)],
    "by_number": [(1, b"\x00\xff"), (2, None)],
}


class TopicsContract(ContractBase):
    def test_a_topic_is_as_it_was_declared(
        self, log: hr.Log, other: hr.Log, name: MakeName
    ) -> None:
        topic = name("declared")
        made = log.create_topic(
            topic,
            ORDERS,
            key="customer_id",
            partitions=3,
            retention="7 days",
            retention_bytes=1 << 30,
        )
        assert made == log.topic(topic) == other.topic(topic)
        assert (made.schema, made.key, made.partitions, made.is_table) == (
            ORDERS,
            ("customer_id",),
            3,
            False,
        )
        assert (made.retention_us, made.retention_bytes, made.compact) == (
            7 * 24 * 3600 * 1_000_000,
            1 << 30,
            False,
        )
        assert made.arrow_schema.types == [pa.int64(), pa.int64(), pa.float64()]
        assert topic in log.topics()
        assert topic in other.topics()
        assert log.start_offsets(topic) == log.end_offsets(topic) == {0: 0, 1: 0, 2: 0}
        assert rows_of(log, topic) == []

    def test_a_topic_that_is_made_again_is_another(
        self, log: hr.Log, other: hr.Log, name: MakeName
    ) -> None:
        topic = name("again")
        first = log.create_topic(topic, ORDERS).id
        assert first
        assert (
            log.alter_topic(topic, add_columns="note STRING").id == first == other.topic(topic).id
        )
        log.delete_topic(topic)
        assert log.create_topic(topic, ORDERS).id != first

    def test_creating_twice_is_refused_unless_it_is_the_same(
        self, log: hr.Log, orders: str
    ) -> None:
        with pytest.raises(errors.TopicExists, match="exist_ok"):
            log.create_topic(orders, ORDERS, key="customer_id", partitions=4)
        assert log.create_topic(
            orders, ORDERS, key="customer_id", partitions=4, exist_ok=True
        ) == log.topic(orders)
        with pytest.raises(errors.TopicExists, match="another schema"):
            log.create_topic(orders, "something_else STRING", exist_ok=True)
        with pytest.raises(errors.TopicExists, match="another schema or key"):
            log.create_topic(orders, ORDERS, key="order_id", exist_ok=True)

    def test_a_deleted_topic_is_gone_and_its_name_is_free(self, log: hr.Log, events: str) -> None:
        with log.producer(events, id="p") as producer:
            producer.append(event(1), sequence=5)
        log.delete_topic(events)
        assert events not in log.topics()
        with pytest.raises(errors.UnknownTopic):
            log.read(events)
        with pytest.raises(errors.UnknownTopic):
            log.delete_topic(events)
        log.create_topic(events, "n BIGINT, text STRING")
        assert rows_of(log, events) == []
        with log.producer(events, id="p") as producer:
            assert producer.last_sequence == -1
            producer.append(event(2), sequence=0)
        assert rows_of(log, events) == [event(2)]

    def test_an_unknown_topic_names_the_nearest(self, log: hr.Log, orders: str) -> None:
        wrong = orders.replace("orders", "ordres")
        for use in (
            log.topic,
            log.read,
            log.producer,
            log.end_offsets,
            log.delete_topic,
            lambda topic: log.consumer(topic, group="g"),
        ):
            with pytest.raises(errors.UnknownTopic, match=f"did you mean '{orders}'"):
                use(wrong)

    @pytest.mark.parametrize("bad", ["", "with space", "a/b", "x" * 201, ".", ".."])
    def test_a_bad_name_is_refused(self, log: hr.Log, bad: str) -> None:
        with pytest.raises(errors.BadName):
            log.create_topic(bad, ORDERS)

    def test_a_bad_declaration_is_refused(self, log: hr.Log, name: MakeName) -> None:
        topic = name("refused")
        with pytest.raises(errors.BadSchema):
            log.create_topic(topic, "a NOTATYPE")
        with pytest.raises(errors.BadSchema, match="reserved"):
            log.create_topic(topic, "_offset BIGINT")
        with pytest.raises(errors.UnknownColumn, match="did you mean 'customer_id'"):
            log.create_topic(topic, ORDERS, key="custmer_id")
        with pytest.raises(errors.InputError):
            log.create_topic(topic, ORDERS, partitions=0)
        with pytest.raises(errors.InputError, match="key"):
            log.create_topic(topic, ORDERS, compact=True)
        with pytest.raises(errors.InputError, match="did you mean 'retention'"):
            log.create_topic(topic, ORDERS, retentoin="1 day")  # type: ignore[call-arg]
        assert topic not in log.topics()

    # Schemas

    def test_every_type_survives(self, log: hr.Log, name: MakeName) -> None:
        info = log.create_topic(name("types"), EVERY_TYPE)
        empty = dict.fromkeys(FULL_ROW)
        lists = empty | {
            "list": [],
            "nested": {"id": 1, "tags": [], "price": None},
            "by_name": [],
            "by_number": [],
        }
        append(log, info.name, [FULL_ROW, empty, lists])
        table = log.read(info.name, columns=info.columns).to_table()
        assert table.schema.equals(info.arrow_schema, check_metadata=True)
        assert table.to_pylist() == [FULL_ROW, empty, lists]

    def test_numbers_that_are_none(self, log: hr.Log, name: MakeName) -> None:
        info = log.create_topic(name("floats"), "d DOUBLE, f FLOAT, l ARRAY<DOUBLE>")
        append(
            log,
            info.name,
            [
                {"d": nan, "f": nan, "l": [nan, inf]},
                {"d": inf, "f": -inf, "l": None},
                {"d": -0.0, "f": 5e-324, "l": [1e308]},
            ],
        )
        first, second, third = rows_of(log, info.name)
        assert [isnan(value) for value in (first["d"], first["f"], *first["l"])] == [
            True,
            True,
            True,
            False,
        ]
        assert (second["d"], second["f"], second["l"]) == (inf, -inf, None)
        assert (str(third["d"]), third["f"], third["l"]) == ("-0.0", 0.0, [1e308])

    def test_arrow_and_pandas_rows_are_taken(self, log: hr.Log, events: str) -> None:
        table = pa.table({"n": [1, 2], "text": ["a", None]})
        append(log, events, table)
        append(log, events, table.to_batches()[0])
        append(log, events, table.to_pandas())
        append(log, events, {"n": 3, "text": "c"})
        append(log, events, (event(n) for n in (4, 5)))
        assert [row["n"] for row in rows_of(log, events)] == [1, 2, 1, 2, 1, 2, 3, 4, 5]

    # Changes

    def test_added_columns_are_null_in_old_rows(
        self, log: hr.Log, other: hr.Log, events: str
    ) -> None:
        append(log, events, event(1))
        changed = log.alter_topic(events, add_columns="extra DOUBLE, more STRUCT<a: INT>")
        assert changed.columns == ["n", "text", "extra", "more"]
        append(other, events, event(2) | {"extra": 2.5, "more": {"a": 1}})
        expected = [
            event(1) | {"extra": None, "more": None},
            event(2) | {"extra": 2.5, "more": {"a": 1}},
        ]
        assert rows_of(log, events) == rows_of(other, events) == expected

    def test_an_open_producer_learns_of_added_columns(
        self, log: hr.Log, other: hr.Log, events: str
    ) -> None:
        with log.producer(events) as producer:
            producer.append(event(1))
            other.alter_topic(events, add_columns="extra BIGINT")
            producer.append(event(2) | {"extra": 7})
        assert rows_of(log, events)[-1] == event(2) | {"extra": 7}

    def test_an_open_consumer_goes_on_after_a_column_was_added(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        append(log, events, event(1))
        with log.consumer(events, group=name("g")) as consumer:
            assert sum(batch.num_rows for batch in consumer.poll(timeout="10 seconds")) == 1
            other.alter_topic(events, add_columns="extra BIGINT")
            append(other, events, event(2) | {"extra": 7})
            (batch,) = consumer.poll(timeout="10 seconds")
            assert batch.column("extra").to_pylist() == [7]

    def test_a_producer_that_was_opened_before_a_column_was_added_goes_on(
        self, log: hr.Log, other: hr.Log, events: str
    ) -> None:
        with log.producer(events, id="old") as producer:
            producer.append(event(1))
            other.alter_topic(events, add_columns="extra BIGINT")
            assert log.topic(events).columns == ["n", "text", "extra"]
            producer.append(event(2))
            producer.append([event(3), event(4) | {"extra": 7}])
            producer.append(pa.table({"n": [5], "text": ["x"]}))
            producer.append(pa.table({"text": ["x"], "n": [6]}).to_pandas())
            with pytest.raises(errors.BadRows, match="no column 'extar': did you mean 'extra'"):
                producer.append(event(7) | {"extar": 7})
            with pytest.raises(errors.BadRows, match="'text' is missing"):
                producer.append({"n": 8, "extra": 1})
        with other.transaction(f"{events}.tx") as tx:
            tx.append(events, event(9))
        expected = [event(n) | {"extra": 7 if n == 4 else None} for n in (1, 2, 3, 4, 5, 6, 9)]
        assert rows_of(log, events) == rows_of(other, events) == expected

    def test_a_program_may_declare_a_topic_as_it_was_before_it_changed(
        self, log: hr.Log, events: str
    ) -> None:
        changed = log.alter_topic(
            events, add_columns="extra BIGINT", rename_columns={"text": "words"}
        )
        assert log.create_topic(events, "n BIGINT, text STRING", exist_ok=True) == changed
        with pytest.raises(errors.TopicExists, match="another schema"):
            log.create_topic(events, "n BIGINT", exist_ok=True)

    def test_old_rows_have_the_wider_types(
        self, log: hr.Log, other: hr.Log, name: MakeName
    ) -> None:
        topic = log.create_topic(
            name("wide"), "id INT NOT NULL, f FLOAT, d DECIMAL(5,2), v VARCHAR(2), l ARRAY<INT>"
        ).name
        old = {"id": 1, "f": 1.5, "d": Decimal("123.45"), "v": "ab", "l": [1, None]}
        new = {"id": 2**40, "f": 1e300, "d": Decimal("1234.5678"), "v": "abc", "l": [2**40]}
        with log.producer(topic) as producer:
            producer.append(old)
            with pytest.raises(errors.BadRows):
                producer.append(new)
            other.alter_topic(
                topic,
                alter_columns="id BIGINT, f DOUBLE, d DECIMAL(20,4), v STRING, l ARRAY<BIGINT>",
            )
            producer.append([new, dict.fromkeys(old)])
            producer.append(old)
        for reader in (log, other):
            assert rows_of(reader, topic) == [old, new, dict.fromkeys(old), old]
            types = reader.read(topic, columns=["id", "f", "d"]).schema.types
            assert types == [pa.int64(), pa.float64(), pa.decimal128(20, 4)]

    def test_integers_become_decimals_and_doubles(self, log: hr.Log, events: str) -> None:
        log.alter_topic(events, add_columns="i INT, j SMALLINT")
        append(log, events, event(-5) | {"i": 3, "j": 4})
        log.alter_topic(events, alter_columns="n DECIMAL(21,2), i DOUBLE, j INT")
        assert rows_of(log, events) == [
            {"n": Decimal(-5), "text": "x", "i": 3.0, "j": 4},
        ]

    def test_a_renamed_column_keeps_its_values_and_answers_to_its_former_name(
        self, log: hr.Log, other: hr.Log, events: str, name: MakeName
    ) -> None:
        with log.producer(events) as producer:
            producer.append(event(1, "a"))
            other.alter_topic(events, rename_columns={"text": "words"})
            producer.append(event(2, "b"))
            producer.append({"n": 3, "words": "c"})
            other.alter_topic(events, rename_columns={"words": "sentence"})
            producer.append([event(4, "d"), {"n": 5, "words": "e"}, {"n": 6, "sentence": "f"}])
            with pytest.raises(errors.BadRows, match="'text' and 'sentence' are one column"):
                producer.append(event(7) | {"sentence": "g"})
        expected = [{"n": n, "sentence": text} for n, text in enumerate("abcdef", 1)]
        assert rows_of(log, events) == rows_of(other, events) == expected
        former = log.read(events, columns=["text", "n"]).to_table()
        assert former.column_names == ["text", "n"]
        assert former.column("text").to_pylist() == list("abcdef")
        with pytest.raises(errors.IncompatibleChange, match="had another column 'text'"):
            log.alter_topic(events, add_columns="text STRING")
        with log.consumer(events, group=name("g")) as consumer:
            found: list[str] = []
            while len(found) < 6:
                for batch in consumer.poll(timeout="10 seconds"):
                    found += batch.column("sentence").to_pylist()
            other.alter_topic(events, rename_columns={"sentence": "line"})
            append(other, events, event(7, "g"))
            (batch,) = consumer.poll(timeout="10 seconds")
            assert batch.column("line").to_pylist() == ["g"]
        other.alter_topic(events, rename_columns={"line": "text"})
        append(other, events, event(8, "h"))
        assert [row["text"] for row in rows_of(other, events)] == list("abcdefgh")
        assert found == list("abcdef")

    def test_a_dropped_column_is_gone_and_its_values_are_refused(
        self, log: hr.Log, other: hr.Log, events: str
    ) -> None:
        with log.producer(events) as producer:
            producer.append(event(1, "secret"))
            other.alter_topic(events, drop_columns=["text"])
            log.topic(events)
            producer.append({"n": 2})
            producer.append([event(3, None), {"n": 4}])
            producer.append(pa.table({"n": [5], "text": pa.nulls(1, pa.string())}))
            for rows in (event(6), pa.table({"n": [6], "text": ["x"]})):
                with pytest.raises(errors.BadRows, match="'text' was dropped"):
                    producer.append(rows)
        assert rows_of(log, events) == rows_of(other, events) == [{"n": n} for n in range(1, 6)]
        with pytest.raises(errors.UnknownColumn, match="text"):
            log.read(events, columns=["text"])
        with pytest.raises(errors.IncompatibleChange, match="had another column 'text'"):
            log.alter_topic(events, add_columns="text BIGINT")

    def test_a_table_changes_its_columns_but_not_its_key(
        self, log: hr.Log, other: hr.Log, name: MakeName
    ) -> None:
        table = log.create_table(
            name("people"), "id INT, name STRING NOT NULL, fax STRING, age INT", key="id"
        ).name
        with log.producer(table) as producer:
            producer.upsert([{"id": n, "name": f"p{n}", "fax": "1", "age": n} for n in (1, 2)])
            other.alter_topic(
                table,
                rename_columns={"name": "full_name"},
                drop_columns="fax",
                alter_columns="age BIGINT",
                add_columns="city STRING",
            )
            log.topic(table)
            producer.upsert({"id": 3, "name": "p3", "age": 3})
            producer.upsert({"id": 4, "full_name": "p4", "age": 2**40, "city": "Bonn"})
            producer.delete([2])
            with pytest.raises(errors.BadRows, match="NOT NULL"):
                producer.upsert({"id": 5, "full_name": None, "age": 1})
        rows = [
            (row["id"], row["full_name"], row["age"], row["city"], row["_change_type"])
            for row in rows_of(other, table)
        ]
        assert rows == [
            (1, "p1", 1, None, "update_postimage"),
            (2, "p2", 2, None, "update_postimage"),
            (3, "p3", 3, None, "update_postimage"),
            (4, "p4", 2**40, "Bonn", "update_postimage"),
            (2, None, None, None, "delete"),
        ]
        refused: list[dict[str, Any]] = [
            {"alter_columns": "id BIGINT"},
            {"drop_columns": "id"},
            {"rename_columns": {"id": "number"}},
        ]
        for what in refused:
            with pytest.raises(errors.IncompatibleChange, match="decides in which partition"):
                log.alter_topic(table, **what)

    def test_staged_rows_of_the_schema_before_a_change_are_adopted(
        self, log: hr.Log, other: hr.Log, events: str
    ) -> None:
        batch = pa.RecordBatch.from_pylist([event(1, "a")], log.topic(events).arrow_schema)
        staged = log.stage(events, [batch])
        other.alter_topic(events, rename_columns={"text": "words"}, add_columns="extra INT")
        with log.transaction(f"{events}.tx") as tx:
            tx.adopt(staged)
            tx.append(events, event(2, "b"))
        expected = [{"n": n, "words": text, "extra": None} for n, text in ((1, "a"), (2, "b"))]
        assert sorted(rows_of(other, events), key=lambda row: row["n"]) == expected

    def test_a_dry_run_changes_nothing(self, log: hr.Log, other: hr.Log, events: str) -> None:
        before = log.topic(events)
        wanted = log.alter_topic(
            events, rename_columns={"text": "words"}, partitions=2, retention="1 day", dry_run=True
        )
        assert (wanted.columns, wanted.partitions) == (["n", "words"], 2)
        assert log.topic(events) == other.topic(events) == before
        with pytest.raises(errors.IncompatibleChange, match="BIGINT"):
            log.alter_topic(events, alter_columns="n INT", dry_run=True)

    def test_changes_that_break_readers_are_refused(self, log: hr.Log, events: str) -> None:
        with pytest.raises(errors.IncompatibleChange, match="already"):
            log.alter_topic(events, add_columns="n STRING")
        with pytest.raises(errors.IncompatibleChange, match="NOT NULL"):
            log.alter_topic(events, add_columns="extra BIGINT NOT NULL")
        with pytest.raises(errors.IncompatibleChange, match="lost"):
            log.alter_topic(events, partitions=0)
        with pytest.raises(errors.IncompatibleChange, match="not every value"):
            log.alter_topic(events, alter_columns="n INT")
        with pytest.raises(errors.UnknownColumn, match="did you mean 'text'"):
            log.alter_topic(events, drop_columns="txt")
        with pytest.raises(errors.InputError, match="did you mean 'retention'"):
            log.alter_topic(events, retension="1 day")
        assert log.topic(events).columns == ["n", "text"]

    def test_partitions_are_added_to_a_keyed_topic_only_by_name(
        self, log: hr.Log, orders: str, events: str
    ) -> None:
        assert log.alter_topic(events, partitions=3).partitions == 3
        assert log.end_offsets(events) == {0: 0, 1: 0, 2: 0}
        with pytest.raises(errors.IncompatibleChange, match="allow_moving_keys"):
            log.alter_topic(orders, partitions=8)
        assert log.alter_topic(orders, partitions=8, allow_moving_keys=True).partitions == 8
        append(log, orders, [order(n, customer=n) for n in range(50)])
        assert len({row["_partition"] for row in log.read(orders).to_pylist()}) > 4

    def test_settings_can_be_changed(self, log: hr.Log, other: hr.Log, orders: str) -> None:
        log.alter_topic(
            orders, retention="2 days", retention_bytes=5 << 20, compact=True, tombstones="1 hour"
        )
        info = other.topic(orders)
        assert (info.retention_us, info.retention_bytes, info.compact, info.tombstone_us) == (
            172_800_000_000,
            5 << 20,
            True,
            3_600_000_000,
        )
        assert log.alter_topic(orders, retention=None, compact=False).retention_us is None

    def test_stats_and_verify(self, log: hr.Log, orders: str) -> None:
        append(log, orders, [order(n, customer=n) for n in range(20)])
        (stats,) = log.stats(orders)
        assert (stats.name, stats.partitions, stats.end) == (orders, 4, log.end_offsets(orders))
        assert 20 <= stats.rows <= (24 if self.markers_take_offsets else 20)
        assert [finding for finding in log.verify(orders) if finding.kind != "ok"] == []
        assert isinstance(log.maintain(orders), dict)
        assert len(rows_of(log, orders)) == 20

    def test_all_topics_are_described_at_once(self, log: hr.Log, orders: str, events: str) -> None:
        infos = log.topic_infos()
        assert infos[orders] == log.topic(orders)
        assert infos[events] == log.topic(events)

    def test_a_topic_can_be_trimmed(self, log: hr.Log, orders: str, name: MakeName) -> None:
        for number in range(40):
            append(log, orders, order(number, customer=number))
        ends = log.end_offsets(orders)
        assert log.trim_topic(orders, 3, partitions=[1])[1] == 3
        assert log.start_offsets(orders) == {0: 0, 1: 3, 2: 0, 3: 0}
        assert next(row["_offset"] for row in log.read(orders, 1).to_pylist()) == 3
        with pytest.raises(errors.OffsetOutOfRange):
            log.read(orders, 1, 2).to_pylist()
        with pytest.raises(errors.OffsetOutOfRange):
            log.trim_topic(orders, 1_000)
        with pytest.raises(errors.BadPartition):
            log.trim_topic(orders, 1, partitions=[9])
        assert log.trim_topic(orders, 2)[1] == 3  # a start never goes back
        assert log.trim_topic(orders, "latest") == ends
        assert rows_of(log, orders) == []
        append(log, orders, order(7))
        assert [row["order_id"] for row in rows_of(log, orders)] == [7]
        assert log.verify(orders) == []
        with pytest.raises(errors.UnknownTopic):
            log.trim_topic(name("none"), 1)

    def test_a_topic_can_be_trimmed_by_time(self, log: hr.Log, events: str) -> None:
        append(log, events, event(1))
        (first,) = log.read(events).to_pylist()
        time.sleep(0.01)
        append(log, events, event(2))
        log.trim_topic(events, first["_timestamp"] + timedelta(milliseconds=1))
        assert [row["n"] for row in rows_of(log, events)] == [2]

    def test_a_topic_that_is_strict_says_so(self, log: hr.Log, name: MakeName) -> None:
        topic = log.create_topic(name("strict"), "n BIGINT", strict=True).name
        append(log, topic, {"n": 1})
        assert log.alter_topic(topic, strict=False).strict is False
