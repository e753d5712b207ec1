"""`headrace topic` against the embedded log."""

from pathlib import Path

import pytest

import headrace as hr
from tests.cli.conftest import ORDERS, Run


def test_create_makes_the_topic_as_described(run: Run, log: hr.Log) -> None:
    said = run(
        "topic",
        "create",
        "orders",
        "--schema",
        ORDERS,
        "--key",
        "customer_id",
        "--partitions",
        4,
        "--retention",
        "7 days",
        "--segment-bytes",
        1 << 20,
    )
    info = log.topic("orders")
    assert (info.key, info.partitions, info.retention_us, info.segment_bytes) == (
        ("customer_id",),
        4,
        7 * 86_400_000_000,
        1 << 20,
    )
    assert "Created topic orders" in said.out


def test_create_makes_a_table_with_a_primary_key(run: Run, log: hr.Log) -> None:
    (shown,) = run(
        "topic",
        "create",
        "prices",
        "--schema",
        "shop STRING, item STRING, price DECIMAL(9,2)",
        "--primary-key",
        "shop, item",
        "--json",
    ).lines
    info = log.topic("prices")
    assert info.is_table
    assert info.key == ("shop", "item")
    assert (shown["kind"], shown["key"], shown["history_us"]) == ("table", ["shop", "item"], None)


@pytest.mark.parametrize(
    "options",
    [
        ("--history", "1 day"),
        ("--primary-key", "id", "--key", "id"),
        ("--primary-key", "id", "--retention", "1 day"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(
    run: Run, log: hr.Log, options: tuple[str, ...]
) -> None:
    run("topic", "create", "t", "--schema", "id BIGINT", *options, code=2)
    assert log.topics() == []


def test_creating_it_twice_is_an_error_unless_missing_is_what_counts(run: Run, orders: str) -> None:
    again = run("topic", "create", orders, "--schema", ORDERS, code=1)
    assert "Error:" in again.err
    assert "Traceback" not in again.err
    run(
        "topic",
        "create",
        orders,
        "--schema",
        ORDERS,
        "--key",
        "customer_id",
        "--partitions",
        2,
        "--if-missing",
    )


def test_list_shows_topics_but_not_internal_ones(run: Run, log: hr.Log, orders: str) -> None:
    log.create_table("customers", "customer_id BIGINT, name STRING", key="customer_id")
    with log.producer(orders) as producer:
        producer.append({"order_id": 1, "customer_id": 1, "amount": 1.0, "placed_at": None})
    listed = run("topic", "list", "--json").lines
    assert [(each["name"], each["kind"], each["offsets"]) for each in listed] == [
        ("customers", "table", 0),
        ("orders", "topic", 1),
    ]
    assert "customers" in run("topic", "list").out


def test_an_empty_log_says_what_to_do(run: Run, log: hr.Log) -> None:
    assert log.topics() == []
    assert "headrace topic create" in run("topic", "list").out


def test_only_create_makes_a_log(run: Run, tmp_path: Path) -> None:
    for command in (("topic", "list"), ("produce", "orders"), ("lag",), ("log", "verify")):
        assert "Error:" in run(*command, stdin="", code=1).err
    assert list(tmp_path.iterdir()) == []
    run("topic", "create", "orders", "--schema", ORDERS)
    assert [each["name"] for each in run("topic", "list", "--json").lines] == ["orders"]


def test_a_topic_that_is_there_says_which_option_helps(run: Run, orders: str) -> None:
    create = "topic", "create", orders, "--schema", "a INT"
    assert "--if-missing" in run(*create, code=1).err


def test_show_names_columns_settings_and_offsets(run: Run, orders: str) -> None:
    (shown,) = run("topic", "show", orders, "--json").lines
    assert shown["offsets"] == [
        {"partition": 0, "earliest": 0, "end": 0},
        {"partition": 1, "earliest": 0, "end": 0},
    ]
    said = run("topic", "show", orders).out
    for expected in ("placed_at", "customer_id", "TIMESTAMP", "retention", "forever", "earliest"):
        assert expected in said


def test_an_unknown_topic_suggests_the_nearest(run: Run, orders: str) -> None:
    failed = run("topic", "show", "order", code=1)
    assert "did you mean 'orders'?" in failed.err
    assert "To fix:" in failed.err
    assert failed.out == ""


def test_alter_adds_columns_and_changes_retention(run: Run, log: hr.Log, orders: str) -> None:
    run(
        "topic",
        "alter",
        orders,
        "--add-columns",
        "note STRING",
        "--retention",
        "30 days",
        "--retention-bytes",
        1000,
    )
    info = log.topic(orders)
    assert info.columns[-1] == "note"
    assert (info.retention_us, info.retention_bytes) == (30 * 86_400_000_000, 1000)
    run("topic", "alter", orders, "--retention", "none", "--retention-bytes", "none")
    info = log.topic(orders)
    assert (info.retention_us, info.retention_bytes) == (None, None)


def test_adding_partitions_to_a_keyed_topic_must_be_asked_for_by_name(
    run: Run, log: hr.Log, orders: str
) -> None:
    run("topic", "alter", orders, "--partitions", 4, code=1)
    assert log.topic(orders).partitions == 2
    run("topic", "alter", orders, "--partitions", 4, "--allow-moving-keys")
    assert log.topic(orders).partitions == 4


def test_alter_changes_columns_and_wants_a_yes(run: Run, log: hr.Log, orders: str) -> None:
    before = log.topic(orders)
    change = ("--rename-columns", "amount=total", "--drop-columns", "placed_at")
    refused = run("topic", "alter", orders, *change, code=2)
    assert "--yes" in refused.err
    for said in ("rename amount to total", "drop placed_at TIMESTAMP", "Read by: no pipeline"):
        assert said in refused.out
    assert log.topic(orders) == before
    run("topic", "alter", orders, *change, "--yes")
    assert log.topic(orders).columns == ["order_id", "customer_id", "total"]
    failed = run("topic", "alter", orders, "--alter-columns", "customer_id INT", "--yes", code=1)
    assert "decides in which partition" in failed.err
    run("topic", "alter", orders, "--rename-columns", "total", "--yes", code=2)


def test_a_dry_run_shows_what_alter_would_do_and_does_nothing(
    run: Run, log: hr.Log, orders: str
) -> None:
    before = log.topic(orders)
    with log.consumer(orders, group="billing") as consumer:
        consumer.commit({orders: {0: 0}})
    change = (
        "--add-columns",
        "note STRING",
        "--retention",
        "1 day",
        "--partitions",
        4,
        "--allow-moving-keys",
        "--dry-run",
    )
    said = run("topic", "alter", orders, *change).out
    for expected in (
        "- add note STRING: it is null in stored rows, and producers may leave it out",
        "- partitions from 2 to 4, and most keys move to another one",
        "- retention from none to 1 day: rows beyond it are removed",
        "Read by: group billing",
    ):
        assert expected in said
    (shown,) = run("topic", "alter", orders, *change, "--json").lines
    assert (len(shown["effects"]), shown["readers"]) == (3, ["group billing"])
    assert log.topic(orders) == before


def test_produce_takes_files_of_the_schema_before_a_change(
    run: Run, log: hr.Log, orders: str, tmp_path: Path
) -> None:
    log.alter_topic(orders, add_columns="note STRING", rename_columns={"amount": "total"})
    file = tmp_path / "orders.jsonl"
    file.write_text(
        '{"order_id": 1, "customer_id": 1, "amount": 2.5, "placed_at": null}\n'
        '{"order_id": 2, "customer_id": 1, "total": 3.5, "placed_at": null, "note": "x"}\n'
    )
    run("produce", orders, file)
    rows = log.read(orders, columns=["order_id", "total", "note"]).to_pylist()
    assert sorted(rows, key=lambda row: row["order_id"]) == [
        {"order_id": 1, "total": 2.5, "note": None},
        {"order_id": 2, "total": 3.5, "note": "x"},
    ]


def test_alter_without_a_change_is_wrong_usage(run: Run, orders: str) -> None:
    run("topic", "alter", orders, code=2)


def test_delete_wants_a_yes(run: Run, log: hr.Log, orders: str) -> None:
    run("topic", "delete", orders, code=2)
    assert log.topics() == [orders]
    run("topic", "delete", orders, "--yes")
    assert log.topics() == []


def test_trim_removes_the_oldest_rows(run: Run, log: hr.Log) -> None:
    log.create_topic("t", "n BIGINT")
    with log.producer("t") as producer:
        producer.append([{"n": n} for n in range(10)])
    run("topic", "trim", "t", "--before", 4, code=2)  # there is no terminal to ask
    (said,) = run("topic", "trim", "t", "--before", 4, "--yes", "--json").lines
    assert said == {"trimmed": "t", "offsets": 4, "earliest": {"0": 4}}
    assert log.read("t", columns=["n"]).to_table()["n"].to_pylist() == [4, 5, 6, 7, 8, 9]
    assert "Removed 6 offsets of t." in run("topic", "trim", "t", "--before", "latest", "--yes").out


def test_a_new_log_can_be_shared_with_a_group(run: Run, tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'shared'}"
    run("topic", "create", "orders", "--schema", "n BIGINT", "--mode", "660", "--log", address)
    modes = {
        path.stat().st_mode & 0o777 for path in (tmp_path / "shared").rglob("*") if path.is_file()
    }
    assert modes == {0o660}
    refused = run(
        "topic", "create", "o", "--schema", "n BIGINT", "--mode", "rw", "--log", address, code=1
    )
    assert "in octal" in refused.err
