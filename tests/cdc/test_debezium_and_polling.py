"""The outbox, polling, and topics in Debezium's envelope."""

import json
import sqlite3
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.cdc.capture import CaptureStatus
from headrace.cdc.declaration import Capture
from headrace.cdc.topics import fold
from headrace.errors import ConfigurationError, InputError, UnknownColumn
from headrace.log.dead_letters import read_dead_letters, replay
from tests.cdc.captures import caught_up, do
from tests.cdc.conftest import Postgres


def rows(log: hr.Log, topic: str, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns) for row in log.read(topic).to_pylist()]


OUTBOX = (
    "CREATE TABLE outbox (id INTEGER PRIMARY KEY, aggregate_type TEXT, aggregate_id INTEGER, type"
    " TEXT, payload TEXT)"
)


def test_an_outbox_becomes_events_once(tmp_path: Path, address: str) -> None:
    path = tmp_path / "shop.db"
    do(
        path,
        OUTBOX,
        "CREATE TABLE orders (id INTEGER PRIMARY KEY)",
        "INSERT INTO outbox VALUES (1, 'order', 7, 'placed', '{}')",
    )
    capture = hr.cdc.sqlite(path, outbox="outbox", prefix="events.")
    caught_up(capture, address).close()
    do(
        path,
        "INSERT INTO orders VALUES (1)",
        "INSERT INTO outbox VALUES (2, 'order', 7, 'paid', '{\"a\": 1}'), (3, 'customer', 1,"
        " 'moved', NULL)",
        "DELETE FROM outbox",
    )
    with caught_up(capture, address) as log:
        assert rows(log, "events.order", "id", "aggregate_id", "type", "payload") == [
            (1, "7", "placed", "{}"),
            (2, "7", "paid", '{"a": 1}'),
        ]
        assert rows(log, "events.customer", "id", "type") == [(3, "moved")]
        assert "events.outbox" not in log.topics()
        assert log.topic("events.order").key == ("aggregate_id",)
        assert (
            log.read("events.orders").to_pylist()[0]["_timestamp"]
            == log.read("events.order").to_pylist()[1]["_timestamp"]
        )  # one transaction


def test_an_outbox_of_postgres(postgres: Postgres, address: str) -> None:
    postgres.do(
        "CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type text,"
        " aggregate_id text, type text, payload jsonb)"
    )
    capture = hr.cdc.postgres(postgres.url, name=postgres.name, outbox="public.outbox")
    capture.run(log=address, until_caught_up=True)
    postgres.do(
        "INSERT INTO outbox (aggregate_type, aggregate_id, type, payload) VALUES ('order', 'a',"
        " 'placed', '{\"n\": 1}')",
        "DELETE FROM outbox",
    )
    with caught_up(capture, address) as log:
        assert rows(log, "order", "aggregate_id", "type", "payload") == [
            ("a", "placed", '{"n": 1}')
        ]


def test_an_outbox_must_look_like_one(tmp_path: Path, address: str) -> None:
    do(tmp_path / "shop.db", "CREATE TABLE outbox (id INTEGER PRIMARY KEY)")
    with pytest.raises(ConfigurationError, match="aggregate_type"):
        hr.cdc.sqlite(tmp_path / "shop.db", outbox="outbox").run(log=address, until_caught_up=True)


def polled(path: Path, **changed: Any) -> Capture:
    settings = {
        "column": "changed",
        "key": "id",
        "schema": "id BIGINT, v STRING, changed BIGINT",
        **changed,
    }
    return hr.cdc.polling(lambda: sqlite3.connect(path), "items", **settings)


def test_polling_sees_what_grows_once(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cdc.polling_source.POLL_ROWS", 10)
    path = tmp_path / "shop.db"
    do(
        path,
        "CREATE TABLE items (id INTEGER PRIMARY KEY, v TEXT, changed INTEGER)",
        *(f"INSERT INTO items VALUES ({n}, 'v', {n // 30})" for n in range(100)),
    )
    capture = polled(path)
    with caught_up(capture, address) as log:
        assert sorted(rows(log, "items", "id", "v")) == [(n, "v") for n in range(100)]
    do(
        path,
        "INSERT INTO items VALUES (200, 'same value', 3), (201, NULL, 4)",
        "UPDATE items SET v = 'new', changed = 5 WHERE id = 7",
        "DELETE FROM items WHERE id = 8",
    )
    with caught_up(capture, address) as log:
        assert rows(log, "items", "id", "v")[100:] == [(200, "same value"), (201, None), (7, "new")]
        assert len(fold(log, "items")) == 102  # the limit: deletes are not seen


def test_polling_says_what_is_wrong(tmp_path: Path, address: str) -> None:
    do(tmp_path / "shop.db", "CREATE TABLE other (id INTEGER)")
    with pytest.raises(ConfigurationError, match="no such table"):
        polled(tmp_path / "shop.db").run(log=address, until_caught_up=True)
    with pytest.raises(UnknownColumn, match="changd"):
        polled(tmp_path / "shop.db", column="changd").run(log=address, until_caught_up=True)


SCHEMA = (
    "id BIGINT, name STRING, amount DECIMAL(10,2), day DATE, at TIMESTAMP, raw BINARY, extra STRING"
)
ROW = {
    "id": 1,
    "name": "a",
    "amount": "MDk=",
    "day": 20000,
    "at": 1700000000123456,
    "raw": "AP8=",
    "extra": {"n": [1]},
}


def envelope(op: str, before: Any = None, after: Any = None, *, wrapped: bool = False) -> str:
    payload = {
        "op": op,
        "before": before,
        "after": after,
        "ts_ms": 5,
        "source": {"lsn": 42, "txId": 9, "ts_ms": 1000},
    }
    return json.dumps({"schema": {"type": "struct"}, "payload": payload} if wrapped else payload)


@pytest.mark.parametrize("wrapped", [False, True])
def test_debeziums_envelope_becomes_a_table(address: str, wrapped: bool) -> None:
    def put(*values: str | None) -> None:
        with hr.open_log(address) as log, log.producer("db.public.items") as producer:
            producer.append([{"value": value} for value in values])

    with hr.open_log(address) as log:
        log.create_topic("db.public.items", "value STRING")
    capture = hr.cdc.debezium("db.public.items", schema=SCHEMA, key="id", log=address)
    put(
        envelope("r", None, ROW, wrapped=wrapped),
        envelope(
            "c",
            None,
            {**ROW, "id": 2, "amount": "1.50", "at": "2026-01-01T00:00:00Z"},
            wrapped=wrapped,
        ),
    )
    capture.run(until_caught_up=True)
    put(
        envelope("u", {**ROW, "id": 2}, {**ROW, "id": 3}, wrapped=wrapped),
        envelope("u", None, {"id": 1, "name": "new"}, wrapped=wrapped),
        envelope("d", {"id": 3}, wrapped=wrapped),
        None,
    )
    with caught_up(capture, address) as log:
        first, second, *_ = log.read("items").to_pylist()
        assert (first["amount"], first["day"], first["raw"], first["extra"]) == (
            Decimal("123.45"),
            date(2024, 10, 4),
            b"\x00\xff",
            '{"n": [1]}',
        )
        assert first["at"] == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
        assert (first["_position"], first["_transaction"], first["_committed_at"]) == (
            42,
            9,
            datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        )
        assert (second["amount"], second["at"]) == (
            Decimal("1.50"),
            datetime(2026, 1, 1, tzinfo=UTC),
        )
        assert rows(log, "items", "id", "_change_type")[2:] == [
            (2, "delete"),
            (3, "insert"),
            (1, "update_postimage"),
            (3, "delete"),
        ]
        assert [row["name"] for row in fold(log, "items").to_pylist()] == ["new"]
    put(envelope("t", wrapped=wrapped), envelope("c", None, {**ROW, "id": 9}, wrapped=wrapped))
    with caught_up(capture, address) as log:
        assert [row["id"] for row in fold(log, "items").to_pylist()] == [9]


BAD = [
    ("no json", "not an envelope"),
    ('{"op": "x"}', "operation is 'x'"),
    ('{"op": "c"}', "no row after"),
    ("[1]", "not an envelope"),
    (envelope("c", None, {"id": None, "name": "x"}), "no 'id'"),
    (envelope("c", None, {"id": 7, "name": "x", "at": "yesterday"}), "'at' is not a timestamp"),
]


@pytest.mark.parametrize(("value", "why"), BAD)
def test_a_record_that_is_no_change_can_end_it(address: str, value: str, why: str) -> None:
    with hr.open_log(address) as log:
        log.create_topic("raw", "value STRING")
        with log.producer("raw") as producer:
            producer.append([{"value": value}])
    with pytest.raises(InputError, match=f"offset 0 of 'raw'.*{why}"):
        hr.cdc.debezium("raw", schema=SCHEMA, key="id", log=address, table="t", errors="stop").run(
            until_caught_up=True
        )


def test_records_that_are_no_changes_become_dead_letters_and_can_be_replayed(address: str) -> None:
    with hr.open_log(address) as log:
        log.create_topic("raw", "value STRING")
        with log.producer("raw") as producer:
            producer.append(
                [
                    {"value": value}
                    for pair in BAD
                    for value in (pair[0], envelope("c", None, {**ROW, "id": BAD.index(pair)}))
                ]
            )
    capture = hr.cdc.debezium("raw", schema=SCHEMA, key="id", log=address, table="t")
    statuses: list[CaptureStatus] = []
    capture.run(until_caught_up=True, on_status=statuses.append)
    assert statuses[-1].dead_letters == len(BAD)
    with hr.open_log(address) as log:
        assert [row["id"] for row in log.read("t").to_pylist()] == list(range(len(BAD)))
        found = read_dead_letters(log, "raw")
        assert [dead_letter["source_offset"] for dead_letter in found] == [
            2 * number for number in range(len(BAD))
        ]
        assert all(
            why in dead_letter["reason"] for dead_letter, (_, why) in zip(found, BAD, strict=True)
        )
        assert replay(log, "raw").replayed == len(BAD)
    with caught_up(capture, address) as log:
        assert len(read_dead_letters(log, "raw")) == 2 * len(BAD)
        assert len(log.read("t").to_pylist()) == len(BAD)


def test_large_values_that_debezium_does_not_have_are_marked(address: str) -> None:
    with hr.open_log(address) as log:
        log.create_topic("raw", "value STRING")
        with log.producer("raw") as producer:
            new = {
                "id": 1,
                "name": "__debezium_unavailable_value",
                "raw": "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
                "day": 5,
            }
            producer.append(
                [{"value": envelope("c", None, ROW)}, {"value": envelope("u", None, new)}]
            )
    with caught_up(
        hr.cdc.debezium("raw", schema=SCHEMA, key="id", log=address, table="t"), address
    ) as log:
        (row,) = fold(log, "t").to_pylist()
        assert (row["name"], row["raw"], row["day"]) == ("a", b"\x00\xff", date(1970, 1, 6))
        assert json.loads(log.read("t").to_pylist()[1]["_marks"]) == {
            "name": {"unchanged": True},
            "raw": {"unchanged": True},
        }


@pytest.mark.parametrize("settings", [{"errors": "divrt"}, {"decimals": "precize"}])
def test_settings_that_are_misspelt(settings: dict[str, str]) -> None:
    with pytest.raises(InputError, match="did you mean"):
        hr.cdc.debezium("raw", schema="id BIGINT", key="id", log="file:x", **settings)
