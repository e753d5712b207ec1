"""`headrace consume`: where it begins and stops, what it prints, and what it commits for a
group.
"""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

import headrace as hr
from tests.cli.conftest import Run

AT = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@pytest.fixture
def six(log: hr.Log) -> str:
    """A topic with one partition and the orders 0 to 5."""
    log.create_topic("six", "order_id BIGINT, note STRING, data BINARY")
    with log.producer("six") as producer:
        producer.append(
            [
                {"order_id": n, "note": None if n == 3 else f"[n{n}]", "data": b"\x00"}
                for n in range(6)
            ]
        )
    return "six"


def ids(ran_lines: list[dict[str, Any]]) -> list[Any]:
    return [line["order_id"] for line in ran_lines]


def test_json_lines_hold_the_row_and_its_offset(run: Run, six: str) -> None:
    lines = run("consume", six, "--json").lines
    assert ids(lines) == list(range(6))
    assert {name: lines[3][name] for name in ("note", "data", "_partition", "_offset")} == {
        "note": None,
        "data": "AA==",
        "_partition": 0,
        "_offset": 3,
    }
    assert abs(datetime.fromisoformat(lines[0]["_timestamp"]) - datetime.now(UTC)) < timedelta(
        minutes=5
    )


def test_a_table_for_people(run: Run, six: str) -> None:
    said = run("consume", six).out
    assert "order_id" in said
    assert "[n5]" in said


@pytest.mark.parametrize("options", [(), ("--group", "billing")])
def test_partitions_share_a_table(
    run: Run, log: hr.Log, orders: str, options: tuple[str, ...]
) -> None:
    with log.producer(orders) as producer:
        for partition in (0, 1):
            producer.append(
                {"order_id": 70 + partition, "customer_id": 1, "amount": 1.0, "placed_at": AT},
                partition=partition,
            )
    said = run("consume", orders, *options).out
    assert said.count("order_id") == 1
    assert "70" in said
    assert "71" in said
    assert "2026-01-31 12:00:00Z" in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), [0, 1, 2, 3, 4, 5]),
        (("--from", 4), [4, 5]),
        (("--from", "latest"), []),
        (("--max", 2), [0, 1]),
    ],
)
def test_where_it_begins_and_stops(
    run: Run, six: str, options: tuple[object, ...], expected: list[int]
) -> None:
    assert ids(run("consume", six, "--json", *options).lines) == expected


def test_from_a_time(run: Run, six: str) -> None:
    long_ago, tomorrow = AT - timedelta(days=365 * 20), datetime.now(UTC) + timedelta(days=1)
    assert len(run("consume", six, "--json", "--from", long_ago.isoformat()).lines) == 6
    assert run("consume", six, "--json", "--from", tomorrow.date()).lines == []


def test_a_place_that_is_none_is_wrong_usage(run: Run, six: str) -> None:
    assert "earliest" in run("consume", six, "--from", "somewhen", code=2).err


def test_one_partition(run: Run, log: hr.Log, orders: str) -> None:
    with log.producer(orders) as producer:
        for partition in (0, 1):
            producer.append(
                {"order_id": partition, "customer_id": 1, "amount": 1.0, "placed_at": AT},
                partition=partition,
            )
    assert ids(run("consume", orders, "--json", "--partition", 1).lines) == [1]
    run("consume", orders, "--partition", 2, code=2)


def test_headers_are_shown_when_asked_for(run: Run, log: hr.Log, six: str) -> None:
    with log.producer(six) as producer:
        producer.append({"order_id": 6, "note": "", "data": None}, headers=[[("trace", b"7")]])
    (line,) = run("consume", six, "--json", "--headers", "--from", 6).lines
    assert line["_headers"] == [{"key": "trace", "value": "Nw=="}]


def test_at_the_end_there_is_nothing_yet(run: Run, six: str) -> None:
    assert run("consume", six, "--json", "--from", 6).lines == []


def test_a_group_goes_on_where_it_stopped(run: Run, log: hr.Log, six: str) -> None:
    arguments = "consume", six, "--group", "billing", "--json"
    assert ids(run(*arguments, "--max", 2).lines) == [0, 1]
    assert log.committed("billing")[six] == {0: 2}
    assert ids(run(*arguments).lines) == [2, 3, 4, 5]
    assert log.committed("billing")[six] == {0: 6}
    assert run(*arguments).lines == []


def test_two_groups_do_not_disturb_each_other(run: Run, six: str) -> None:
    run("consume", six, "--group", "a", "--max", 5, "--json")
    assert len(run("consume", six, "--group", "b", "--json").lines) == 6
    assert ids(run("consume", six, "--group", "a", "--json").lines) == [5]


def test_a_group_reads_several_partitions_to_their_ends(run: Run, log: hr.Log, orders: str) -> None:
    with log.producer(orders) as producer:
        producer.append(
            [{"order_id": n, "customer_id": n, "amount": 1.0, "placed_at": AT} for n in range(50)]
        )
    first = ids(run("consume", orders, "--group", "g", "--json", "--max", 30).lines)
    rest = ids(run("consume", orders, "--group", "g", "--json").lines)
    assert len(first) == 30
    assert sorted([*first, *rest]) == list(range(50))


@pytest.mark.parametrize("options", [("--from", 3), ("--from", "2026-01-01"), ("--partition", 0)])
def test_a_group_takes_no_start_offset(run: Run, six: str, options: tuple[object, ...]) -> None:
    assert "group" in run("consume", six, "--group", "g", *options, code=2).err.lower()


def test_an_unknown_topic(run: Run, six: str) -> None:
    assert "did you mean 'six'?" in run("consume", "sx", code=1).err
    assert "did you mean 'six'?" in run("consume", "sx", "--group", "g", code=1).err


def test_an_offset_past_the_end_printed_nothing_and_said_nothing(run: Run, six: str) -> None:
    failed = run("consume", six, "--from", "99", "--json", code=1)
    assert "Offset 99 of six[0] does not exist yet; the end is 6." in failed.err
    said = run("consume", six, "--from", "2099-01-01T00:00:00Z", "--json")
    assert (said.out, said.err) == (
        "",
        "six has no rows there: partition 0 has the offsets 0 to 6.\n",
    )


def test_an_offset_past_the_end_of_one_partition_reads_the_others(
    run: Run, log: hr.Log, orders: str
) -> None:
    with log.producer(orders) as producer:
        for number, partition in enumerate((0, 0, 0, 1)):
            row = {"order_id": number, "customer_id": 1, "amount": 1.0, "placed_at": AT}
            producer.append(row, partition=partition)
    assert ids(run("consume", orders, "--from", 2, "--json").lines) == [2]


def test_the_last_rows(run: Run, log: hr.Log, orders: str) -> None:
    with log.producer(orders) as producer:
        for number in range(10):
            row = {"order_id": number, "customer_id": 1, "amount": 1.0, "placed_at": AT}
            producer.append(row, partition=number % 2)
    log.append_control(orders, 0, b"x")
    assert ids(run("consume", orders, "--last", 4, "--json").lines) == [6, 7, 8, 9]
    assert ids(run("consume", orders, "--last", 2, "--partition", 0, "--json").lines) == [6, 8]
    assert len(ids(run("consume", orders, "--last", 99, "--json").lines)) == 10
    run("consume", orders, "--last", 1, "--from", 1, code=2)
    run("consume", orders, "--last", 1, "--group", "g", code=2)


def test_until_an_offset_or_a_time(run: Run, log: hr.Log, six: str) -> None:
    assert ids(run("consume", six, "--from", 1, "--until", 4, "--json").lines) == [1, 2, 3]
    assert ids(run("consume", six, "--until", "1 day ago", "--json").lines) == []
    assert len(run("consume", six, "--until", "2099-01-01T00:00:00Z", "--json").lines) == 6
    assert ids(run("consume", six, "--until", 4, "--last", 1, "--json").lines) == [3]
    run("consume", six, "--until", 4, "--follow", code=2)


def test_rows_by_a_condition(run: Run, log: hr.Log, six: str) -> None:
    where = "order_id > 1 AND note IS NOT NULL"
    assert ids(run("consume", six, "--where", where, "--json").lines) == [2, 4, 5]
    assert ids(run("consume", six, "--where", where, "--max", 2, "--json").lines) == [2, 4]
    assert ids(run("consume", six, "--where", "_offset = 3", "--json").lines) == [3]
    lines = run("consume", six, "--where", where, "--group", "g", "--json").lines
    assert (ids(lines), log.committed("g")["six"]) == ([2, 4, 5], {0: 6})
    assert "did you mean 'order_id'?" in run("consume", six, "--where", "orderid > 1", code=1).err
    assert "cannot be used" in run("consume", six, "--where", "order_id >", code=1).err


def test_conditions_over_every_type(run: Run, log: hr.Log) -> None:
    log.create_topic(
        "t",
        "order_id BIGINT, price DECIMAL(9,2), at TIMESTAMP, yes BOOLEAN, place STRUCT<x: INT>, tags"
        " ARRAY<STRING>, data BINARY, name STRING",
    )
    with log.producer("t") as producer:
        producer.append(
            [
                {
                    "order_id": n,
                    "price": Decimal(f"{n}.50"),
                    "at": AT + timedelta(days=n),
                    "yes": n % 2 == 0,
                    "place": {"x": n},
                    "tags": [str(n)],
                    "data": b"x",
                    "name": f"n{n}",
                }
                for n in range(12)
            ]
        )
    for where, expected in (
        ("price > 9.5 AND price < 11", [10]),
        ("at >= '2026-02-10'", [10, 11]),
        ("yes AND order_id > 8", [10]),
        ("place ->> 'x' = 3", [3]),
        ("tags ->> 0 = '4'", [4]),
        ("name LIKE 'n1%'", [1, 10, 11]),
        ("order_id % 5 = 0 -- a comment", [0, 5, 10]),
        ("_timestamp > '2099'", []),
        # Times were compared as texts, of which those with fractions come before those without.
        (f"at = '{AT + timedelta(days=3):%Y-%m-%dT%H:%M:%SZ}'", [3]),
        (f"at < '{AT + timedelta(days=2):%Y-%m-%dT%H:%M:%SZ}'", [0, 1]),
        (f"at <= '{AT + timedelta(days=1, hours=2):%Y-%m-%dT%H:%M:%S+02:00}'", [0, 1]),
        ("_timestamp < '1 hour ago'", []),
    ):
        assert ids(run("consume", "t", "--where", where, "--json").lines) == expected
