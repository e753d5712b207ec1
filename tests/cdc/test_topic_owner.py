"""A topic belongs to one capture and one table of it: others would delete its rows."""

from pathlib import Path

import pytest

import headrace as hr
from headrace.cdc.topic_owner import owner_name
from headrace.errors import ConfigurationError
from tests.cdc.captures import caught_up, check_two_that_start_at_once, do, folded, table

ORDERS = "CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT)"


def test_two_captures_of_tables_of_one_name_deleted_each_others_rows(
    tmp_path: Path, address: str
) -> None:
    east, west = tmp_path / "east.db", tmp_path / "west.db"
    do(east, ORDERS, "INSERT INTO orders VALUES (1, 'east'), (2, 'east')")
    do(west, ORDERS, "INSERT INTO orders VALUES (1, 'west'), (3, 'west')")
    with caught_up(hr.cdc.sqlite(east), address) as log:
        with pytest.raises(ConfigurationError, match=r"'east'[\s\S]*prefix='west\.'"):
            hr.cdc.sqlite(west).run(log=address, until_caught_up=True)
        assert folded(log, "orders") == table(east, "orders")
        caught_up(hr.cdc.sqlite(west, prefix="west."), address).close()
        do(east, "DELETE FROM orders WHERE id = 1")
        caught_up(hr.cdc.sqlite(east), address).close()
        assert folded(log, "orders") == table(east, "orders")
        assert folded(log, "west.orders") == table(west, "orders")


def test_two_tables_whose_names_become_one_topic_deleted_each_others_rows(
    tmp_path: Path, address: str
) -> None:
    path = tmp_path / "shop.db"
    do(
        path,
        'CREATE TABLE "a b" (id INTEGER PRIMARY KEY)',
        "CREATE TABLE a_b (id INTEGER PRIMARY KEY)",
    )
    do(path, 'INSERT INTO "a b" VALUES (1)', "INSERT INTO a_b VALUES (2)")
    with pytest.raises(ConfigurationError, match="a capture of its own"):
        hr.cdc.sqlite(path).run(log=address, until_caught_up=True)
    caught_up(hr.cdc.sqlite(path, tables=["a b"]), address).close()
    other = hr.cdc.sqlite(path, tables=["a_b"], name="shop2", prefix="shop2.")
    with caught_up(other, address) as log:
        assert folded(log, "a_b") == [(1,)]
        assert folded(log, "shop2.a_b") == [(2,)]


def test_two_captures_that_start_at_once_shared_a_topic(address: str) -> None:
    with hr.open_log(address) as log:
        check_two_that_start_at_once(log, "")


def test_a_topic_of_before_there_were_owners_belongs_to_the_capture_that_has_it(
    tmp_path: Path, address: str
) -> None:
    path, other = tmp_path / "shop.db", tmp_path / "other.db"
    do(path, ORDERS, "INSERT INTO orders VALUES (1, 'new')")
    do(other, ORDERS)
    with caught_up(hr.cdc.sqlite(path), address) as log:
        with log.transaction("as-before") as transaction:
            transaction.set_note(owner_name("orders"), None)
        with pytest.raises(ConfigurationError, match="'shop'"):
            hr.cdc.sqlite(other).run(log=address, until_caught_up=True)
        assert log.note(owner_name("orders")) is None
        do(path, "INSERT INTO orders VALUES (2, 'new')")
        caught_up(hr.cdc.sqlite(path), address).close()
        assert folded(log, "orders") == table(path, "orders")
        assert '"shop"' in (log.note(owner_name("orders")) or "")


def test_events_do_not_go_into_the_topic_of_a_table(tmp_path: Path, address: str) -> None:
    path, events = tmp_path / "shop.db", tmp_path / "events.db"
    do(path, ORDERS)
    do(
        events,
        "CREATE TABLE outbox (id INTEGER PRIMARY KEY, aggregate_type TEXT, aggregate_id TEXT,"
        " type TEXT, payload TEXT)",
        "INSERT INTO outbox VALUES (1, 'orders', '1', 'placed', '{}')",
    )
    caught_up(hr.cdc.sqlite(path), address).close()
    with pytest.raises(ConfigurationError, match=r"prefix='events\.'"):
        hr.cdc.sqlite(events, tables=["outbox"], outbox="outbox").run(
            log=address, until_caught_up=True
        )
