"""`headrace produce`: three formats and standard input, typed by the topic's schema, with errors
that name the line.
"""

import gzip
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from tests.cli.conftest import Run

AT = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
AT_TEXT = "2026-01-31T12:00:00.123456Z"
EVERYTHING = (
    "i INT, big BIGINT, d DOUBLE, f FLOAT, yes BOOLEAN, s STRING, b BINARY, price DECIMAL(10,2),"
    " day DATE, at TIMESTAMP, local TIMESTAMP_NTZ, tags ARRAY<STRING>, place STRUCT<x: INT, at:"
    " TIMESTAMP>, props MAP<STRING, DECIMAL(5,1)>"
)


def order(number: int) -> dict[str, object]:
    return {
        "order_id": number,
        "customer_id": number % 3,
        "amount": number / 2,
        "placed_at": AT_TEXT,
    }


def jsonl(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def stored(log: hr.Log, topic: str = "orders") -> list[int]:
    return sorted(log.read(topic).to_table()["order_id"].to_pylist())


def test_json_lines_from_standard_input(run: Run, log: hr.Log, orders: str) -> None:
    said = run("produce", orders, stdin=jsonl([order(n) for n in range(10)]))
    assert "Stored 10 rows in orders." in said.out
    assert stored(log) == list(range(10))
    assert log.read(orders).to_table()["placed_at"][0].as_py() == AT


def test_every_type_can_be_written_as_json(run: Run, log: hr.Log) -> None:
    log.create_topic("t", EVERYTHING)
    row = {
        "i": -5,
        "big": "9007199254740993",
        "d": 1,
        "f": "NaN",
        "yes": True,
        "s": "ü",
        "b": "AP8=",
        "price": 12.30,
        "day": "2026-01-31",
        "at": "2026-01-31T13:00:00.123456+01:00",
        "local": "2026-01-31T13:00:00",
        "tags": ["a", None],
        "place": {"x": 1, "at": AT_TEXT},
        "props": {"w": "1.5", "h": 2},
    }
    run("produce", "t", stdin=jsonl([row, dict.fromkeys(row)]))
    first, second = log.read("t").to_pylist()
    assert (first["big"], first["d"], first["b"], first["price"], first["at"]) == (
        9007199254740993,
        1.0,
        b"\x00\xff",
        Decimal("12.30"),
        AT,
    )
    assert first["f"] != first["f"]
    assert (first["local"], first["tags"], first["place"]["at"]) == (
        datetime(2026, 1, 31, 13, 0),  # noqa: DTZ001
        ["a", None],
        AT,
    )
    assert dict(first["props"]) == {"w": Decimal("1.5"), "h": Decimal("2.0")}
    assert {second[name] for name in row} == {None}


def test_csv_with_empty_fields_and_quoted_newlines(run: Run, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", EVERYTHING)
    file = tmp_path / "rows.csv"
    file.write_text(
        '\ufeffs,i,big,d,f,yes,b,price,day,at,local,tags,place,props\n"two\nlines",1,2,3.5,4.5,TRUE,AA==,5.50,2026-01-31,2026-01-31T12:00:00.123456,2026-01-31T13:00:00,"[""x""]","{""x"":'
        ' 1, ""at"": null}","{""w"": 1.5}"\n,,,,,,,,,,,,,\n'
    )
    run("produce", "t", file)
    first, second = log.read("t").to_pylist()
    assert (first["s"], first["i"], first["yes"], first["price"], first["at"]) == (
        "two\nlines",
        1,
        True,
        Decimal("5.50"),
        AT,
    )
    assert (first["tags"], first["place"], dict(first["props"])) == (
        ["x"],
        {"x": 1, "at": None},
        {"w": Decimal("1.5")},
    )
    assert second["s"] is None


def test_parquet_files_with_wider_and_narrower_types(
    run: Run, log: hr.Log, orders: str, tmp_path: Path
) -> None:
    rows = pa.table(
        {
            "placed_at": pa.array([AT, AT], pa.timestamp("ns", tz="UTC")),
            "order_id": pa.array([1, 2], pa.int32()),
            "customer_id": pa.array([1, 2]),
            "amount": [1.0, None],
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    run("produce", orders, tmp_path / "a.parquet", "--batch-rows", 1)
    assert stored(log) == [1, 2]
    assert set(log.read(orders).to_table()["placed_at"].to_pylist()) == {AT}


def test_what_consume_prints_can_be_produced_again(run: Run, log: hr.Log, orders: str) -> None:
    run("produce", orders, stdin=jsonl([order(n) for n in range(5)]))
    log.create_topic("copy", log.topic(orders).schema)
    run("produce", "copy", stdin=run("consume", orders, "--json").out)
    assert stored(log, "copy") == stored(log)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"order_id": 1', "is not JSON"),
        ("[1]", "holds a list, not an object"),
        (json.dumps({**order(1), "amont": 1}), "no column 'amont': did you mean 'amount'?"),
        ('{"order_id": 1, "customer_id": 1, "amount": 2}', "the column 'placed_at' is missing"),
        (json.dumps({**order(1), "amount": "much"}), "column 'amount': 'much' is not a number"),
        (json.dumps({**order(1), "order_id": 1.5}), "column 'order_id'"),
        (json.dumps({**order(1), "order_id": 1 << 70}), "column 'order_id'"),
        (
            json.dumps({**order(1), "placed_at": "yesterday"}),
            "column 'placed_at': 'yesterday' is not a time such as",
        ),
        (
            json.dumps({**order(1), "placed_at": "2026-01-31T12:00:00.1234567Z"}),
            "column 'placed_at'",
        ),
    ],
)
def test_a_bad_line_is_named_and_nothing_of_its_append_is_stored(
    run: Run, log: hr.Log, orders: str, line: str, expected: str
) -> None:
    failed = run(
        "produce", orders, stdin=jsonl([order(0)]) + "\n" + line + "\n" + jsonl([order(2)]), code=1
    )
    assert "standard input, line 3" in failed.err
    assert expected in failed.err
    assert "Nothing was stored." in failed.err
    assert stored(log) == []


def test_a_bad_line_says_what_was_stored_before_it(
    run: Run, log: hr.Log, orders: str, tmp_path: Path
) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_text(jsonl([order(n) for n in range(6)]) + "oops\n")
    failed = run("produce", orders, file, "--batch-rows", 2, code=1)
    assert "line 7" in failed.err
    assert "The 6 rows of earlier appends were stored." in failed.err
    assert "Run the command again: it skips what is stored and goes on behind line 6." in failed.err
    assert stored(log) == list(range(6))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("order_id,customer_id,amount\n1,2,3\n", "line 2: the column 'placed_at' is missing"),
        (
            "order_id,customer_id,amount,placed_at\n1,2\n",
            "line 2 has 2 fields, but the heading has 4",
        ),
        ("order_id,order_id\n1,2\n", "names the column 'order_id' twice"),
        (
            'order_id,customer_id,amount,placed_at\n1,2,3,\n"a\nb",2,3,\n',
            "line 4, column 'order_id'",
        ),
    ],
)
def test_bad_csv_is_named(
    run: Run, log: hr.Log, orders: str, tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "orders.csv"
    file.write_text(text)
    assert expected in run("produce", orders, file, code=1).err
    assert stored(log) == []


def test_files_that_cannot_be_read(run: Run, orders: str, tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text("")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    assert (
        "did you mean 'orders.csv'?" in run("produce", orders, tmp_path / "order.csv", code=1).err
    )
    assert "--format" in run("produce", orders, tmp_path / "orders.txt", code=1).err
    assert "Parquet" in run("produce", orders, tmp_path / "broken.parquet", code=1).err
    assert "standard input" in run("produce", orders, "--format", "parquet", code=1).err


def test_numbered_appends_can_be_repeated(run: Run, log: hr.Log, orders: str) -> None:
    text = jsonl([order(n) for n in range(10)])
    arguments = "produce", orders, "--id", "loader", "--sequence", 0, "--batch-rows", 4, "--json"
    (first,) = run(*arguments, stdin=text).lines
    (again,) = run(*arguments, stdin=text).lines
    assert (first["rows"], first["appends"], first["duplicates"]) == (10, 3, 0)
    assert (again["rows"], again["appends"], again["duplicates"]) == (0, 3, 3)
    assert stored(log) == list(range(10))
    assert sum(each["stop"] - each["start"] for each in first["partitions"].values()) == 10
    assert first["position"] == ",".join(
        f"{first['topic']}:{number}:{each['stop']}"
        for number, each in sorted(first["partitions"].items())
    )


def test_without_a_number_the_next_one_is_used(run: Run, log: hr.Log, orders: str) -> None:
    for _ in range(2):
        run("produce", orders, "--id", "loader", stdin=jsonl([order(7)]))
    assert stored(log) == [7, 7]
    with log.producer(orders, id="loader") as producer:
        assert producer.last_sequence == 1


def test_a_number_without_an_id_is_wrong_usage(run: Run, orders: str) -> None:
    run("produce", orders, "--sequence", 1, stdin="", code=2)


def test_a_chosen_partition(run: Run, log: hr.Log, orders: str) -> None:
    run("produce", orders, "--partition", 1, stdin=jsonl([order(n) for n in range(4)]))
    assert log.end_offsets(orders) == {0: 0, 1: 4}


def test_rows_of_a_table_are_upserts_unless_they_say_otherwise(run: Run, log: hr.Log) -> None:
    log.create_table("customers", "customer_id BIGINT, name STRING NOT NULL", key="customer_id")
    run("produce", "customers", stdin=jsonl([{"customer_id": 1, "name": "a"}]))
    run(
        "produce",
        "customers",
        stdin=jsonl(
            [
                {"customer_id": 2, "name": "b", "_change_type": "insert"},
                {"customer_id": 1, "_change_type": "delete"},
            ]
        ),
    )
    changes = [
        (row["customer_id"], row["name"], row["_change_type"])
        for row in log.read("customers").to_pylist()
    ]
    assert changes == [(1, "a", "update_postimage"), (2, "b", "insert"), (1, None, "delete")]


def test_a_wrong_change_type_is_refused(run: Run, log: hr.Log) -> None:
    log.create_table("customers", "customer_id BIGINT, name STRING", key="customer_id")
    failed = run(
        "produce",
        "customers",
        stdin=jsonl([{"customer_id": 1, "name": "a", "_change_type": "delet"}]),
        code=1,
    )
    assert "did you mean 'delete'?" in failed.err
    assert log.read("customers").to_pylist() == []


def test_nothing_to_produce_is_fine(run: Run, log: hr.Log, orders: str) -> None:
    assert "Stored 0 rows" in run("produce", orders, stdin="\n\n").out
    assert stored(log) == []


# Files that are stored once


def test_a_file_corrected_as_advised_doubled_its_rows(
    run: Run, log: hr.Log, orders: str, tmp_path: Path
) -> None:
    file = tmp_path / "orders.jsonl"
    rows = [order(n) for n in range(2_500)]
    file.write_text(jsonl(rows[:2_100]) + "oops\n" + jsonl(rows[2_101:]))
    run("produce", orders, file, "--batch-rows", 1_000, code=1)
    assert stored(log) == list(range(2_000))
    file.write_text(jsonl(rows))
    said = run("produce", orders, file, "--batch-rows", 700)
    assert "Stored 500 rows in orders; 2,000 rows of the files were stored before" in said.out
    assert stored(log) == list(range(2_500))


def test_a_file_corrected_before_its_bad_row_too_doubled_its_rows(
    run: Run, log: hr.Log, orders: str, tmp_path: Path
) -> None:
    file = tmp_path / "orders.jsonl"
    good = jsonl([order(n) for n in range(20)])
    file.write_text(good.replace('"order_id": 15', '"order_id": oops'))
    run("produce", orders, file, "--batch-rows", 10, code=1)
    assert stored(log) == list(range(10))
    file.write_text(good.replace(": 0.5", ": 0.50"))  # as by an editor, from the first line on
    for _ in range(2):
        refused = run("produce", orders, file, code=1)
        assert "does not begin with the 10 rows" in refused.err
        assert stored(log) == list(range(10))
    file.write_text(good)
    assert "Stored 10 rows in orders; 10 rows" in run("produce", orders, file).out
    assert stored(log) == list(range(20))
    file.write_text(jsonl([order(20)]))  # another file of that name, now that the first is whole
    run("produce", orders, file)
    assert stored(log) == list(range(21))


def test_another_file_in_place_of_one_that_stopped_is_stored_when_it_is_said(
    run: Run, log: hr.Log, orders: str, tmp_path: Path
) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_text(jsonl([order(n) for n in range(10)]) + "oops\n")
    run("produce", orders, file, "--batch-rows", 5, code=1)
    file.write_text(jsonl([order(n) for n in range(10, 13)]))
    run("produce", orders, file, code=1)
    run("produce", orders, file, "--again")
    assert stored(log) == list(range(13))
    file.write_text(jsonl([order(n) for n in range(13, 15)]))
    run("produce", orders, file)
    assert stored(log) == list(range(15))


@pytest.mark.parametrize("name", ["o.jsonl", "o.json", "o.csv", "o.csv.gz", "o.parquet"])
def test_running_again_stored_a_file_twice(
    run: Run, log: hr.Log, orders: str, tmp_path: Path, name: str
) -> None:
    file = tmp_path / name
    rows = [order(n) for n in range(20)]
    lines = [",".join(str(each) for each in row.values()) + "\n" for row in rows]
    table = "order_id,customer_id,amount,placed_at\n" + "".join(lines)
    if name == "o.parquet":
        typed = [{**row, "placed_at": AT} for row in rows]
        pq.write_table(pa.Table.from_pylist(typed), file)
    elif name == "o.csv.gz":
        file.write_bytes(gzip.compress(table.encode()))
    else:
        file.write_text({"o.json": json.dumps(rows), "o.csv": table}.get(name, jsonl(rows)))
    for batch_rows in (6, 7):
        run("produce", orders, file, "--batch-rows", batch_rows)
    assert stored(log) == list(range(20))
    (again,) = run("produce", orders, file, "--json").lines
    assert (again["rows"], again["stored_before"]) == (0, 20)
    run("produce", orders, file, "--again")
    assert stored(log) == sorted([*range(20), *range(20)])


def test_a_topic_that_was_made_again_gets_the_file_again(
    run: Run, log: hr.Log, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"order_id": 1}\n')
    for _ in range(2):
        log.create_topic("t", "order_id BIGINT")
        run("produce", "t", file)
        assert stored(log, "t") == [1]
        log.delete_topic("t")


def test_other_files_of_the_same_name_are_stored(run: Run, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", "order_id BIGINT")
    for number in (1, 2, 1, 2):
        (tmp_path / str(number)).mkdir(exist_ok=True)
        file = tmp_path / str(number) / "rows.jsonl"
        file.write_text(f'{{"order_id": {number}}}\n')
        run("produce", "t", file)
    assert stored(log, "t") == [1, 2]


def test_a_file_that_grows_is_stored_from_where_it_ended(
    run: Run, log: hr.Log, tmp_path: Path
) -> None:
    log.create_topic("t", "order_id BIGINT, name STRING")
    file = tmp_path / "rows.csv"
    file.write_text("order_id,name\n1,ab")
    run("produce", "t", file)
    file.write_text("order_id,name\n1,ab\n2,c\n")
    run("produce", "t", file)
    assert stored(log, "t") == [1, 2]
    file.write_text("order_id,name\n1,abc\n3,d\n")  # not what was stored
    run("produce", "t", file)
    assert stored(log, "t") == [1, 1, 2, 3]


@pytest.mark.slow
def test_a_killed_command_left_a_part_of_the_file_and_the_next_one_doubled_it(
    address: str, log: hr.Log, orders: str, tmp_path: Path
) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_text(jsonl([order(n) for n in range(20_000)]))
    command = [sys.executable, "-m", "headrace.cli", "produce", orders, str(file)]
    command += ["--batch-rows", "50", "--log", address]
    with subprocess.Popen(command) as first:
        while sum(log.end_offsets(orders).values()) < 1_000:
            time.sleep(0.01)
        first.kill()
    assert 0 < len(stored(log)) < 20_000
    subprocess.run(command, check=True, timeout=300)
    assert stored(log) == list(range(20_000))


# Bad rows


def test_bad_rows_can_be_skipped(run: Run, log: hr.Log, orders: str, tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    bad = ["oops\n", jsonl([{**order(1), "amount": "much"}]), "[1]\n"]
    file.write_text(jsonl([order(0)]) + bad[0] + jsonl([order(3)]) + bad[1] + bad[2])
    failed = run("produce", orders, file, "--skip-bad", 2, code=1)
    assert "line 5" in failed.err
    assert stored(log) == []
    said = run("produce", orders, file, "--skip-bad", 3)
    assert "Stored 2 rows in orders; 3 bad rows skipped." in said.out
    assert [f"line {number}" in said.err for number in (1, 2, 3, 4, 5)] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert stored(log) == [0, 3]


def test_a_bad_row_of_parquet_is_found_before_anything_is_stored(
    run: Run, log: hr.Log, tmp_path: Path
) -> None:
    log.create_topic("t", "order_id BIGINT NOT NULL")
    numbers = [*range(100), None, *range(100, 110)]
    pq.write_table(pa.table({"order_id": pa.array(numbers, pa.int64())}), tmp_path / "t.parquet")
    failed = run("produce", "t", tmp_path / "t.parquet", "--batch-rows", 10, code=1)
    assert "Nothing was stored." in failed.err
    assert stored(log, "t") == []
    said = run("produce", "t", tmp_path / "t.parquet", "--batch-rows", 10, "--skip-bad", 1)
    assert said.err.count("Skipped: ") == 1
    assert stored(log, "t") == list(range(110))


def test_csv_with_bytes_that_are_no_text(run: Run, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", "order_id BIGINT, name STRING")
    file = tmp_path / "rows.csv"
    file.write_bytes(b'order_id,name\n1,a\n2,\xff\n3,"b"x\n4,c\n')
    said = run("produce", "t", file, "--skip-bad", 2)
    assert "line 3 is not UTF-8" in said.err
    assert "line 4 is not CSV" in said.err
    assert stored(log, "t") == [1, 4]


def test_a_quote_that_was_not_closed_swallowed_the_rows_behind_it(
    run: Run, log: hr.Log, tmp_path: Path
) -> None:
    log.create_topic("t", "order_id BIGINT, name STRING")
    file = tmp_path / "rows.csv"
    file.write_text('order_id,name\n1,a\n2,"b\n3,c\n4,d\n')
    failed = run("produce", "t", file, "--skip-bad", 3, code=1)
    assert "The row begins at line 3." in failed.err
    assert stored(log, "t") == []
    file.write_text('order_id,name\n1,"' + "a" * 200_000 + '"\n')
    run("produce", "t", file)
    assert stored(log, "t") == [1]


# Other forms of files


def test_a_byte_order_mark_is_no_json(run: Run, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", "order_id BIGINT")
    for text in ('{"order_id": 1}\n', '[{"order_id": 2}]'):
        (tmp_path / "rows.json").write_text("\ufeff" + text)
        run("produce", "t", tmp_path / "rows.json")
    assert stored(log, "t") == [1, 2]


def test_a_pipe_is_read_once(run: Run, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", "order_id BIGINT")
    os.mkfifo(tmp_path / "rows.jsonl")
    for number in (1, 1):
        writer = Thread(
            target=(tmp_path / "rows.jsonl").write_text, args=[f'{{"order_id": {number}}}\n']
        )
        writer.start()
        run("produce", "t", tmp_path / "rows.jsonl")
        writer.join(20)
    assert stored(log, "t") == [1, 1]


def test_arrays_of_json(run: Run, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", "order_id BIGINT, name STRING")
    rows = [{"order_id": n, "name": "ü" * 50_000 if n == 3 else "{"} for n in range(2_000)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    run("produce", "t", tmp_path / "rows.json", "--batch-rows", 300)
    assert stored(log, "t") == list(range(2_000))
    assert log.read("t").to_pylist()[3]["name"] == "ü" * 50_000
    log.create_topic("u", "order_id BIGINT, name STRING")
    run("produce", "u", stdin=json.dumps(rows[:5]))
    assert stored(log, "u") == list(range(5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"order_id": 1},\n{"order_id": }]', "line 2: this element of the array is not JSON"),
        ('[{"order_id": 1}', "line 1: this element of the array is not JSON"),
        ('[{"order_id": 1}]\n[]', "line 2: there is more behind the end of the array"),
        ('[{"order_id": 1}, 7]', "is not JSON"),
    ],
)
def test_bad_arrays_of_json(
    run: Run, log: hr.Log, tmp_path: Path, text: str, expected: str
) -> None:
    log.create_topic("t", "order_id BIGINT")
    (tmp_path / "rows.json").write_text(text)
    failed = run("produce", "t", tmp_path / "rows.json", code=1)
    assert expected in failed.err or "holds a int, not an object" in failed.err
    assert stored(log, "t") == []


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_csv_is_found_in_the_heading(
    run: Run, log: hr.Log, tmp_path: Path, delimiter: str
) -> None:
    log.create_topic("t", "order_id BIGINT, name STRING")
    (tmp_path / "rows.csv").write_text(f"order_id{delimiter}name\n7{delimiter}a b\n")
    run("produce", "t", tmp_path / "rows.csv")
    run("produce", "t", tmp_path / "rows.csv", "--again", "--delimiter", delimiter)
    assert stored(log, "t") == [7, 7]
    run("produce", "t", "--delimiter", "ab", stdin="", code=2)


def test_compressed_files(run: Run, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", "order_id BIGINT")
    parts = [jsonl([{"order_id": n}]).encode() for n in (1, 2)]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    frames = [pa.compress(part, "zstd", asbytes=True) for part in (parts[0] * 3, parts[1])]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))
    run("produce", "t", tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.zst")
    assert stored(log, "t") == [1, 1, 1, 1, 2, 2]
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(parts[0] * 100)[:-10])
    assert "cannot be read to its end" in run("produce", "t", tmp_path / "c.jsonl.gz", code=1).err


@pytest.mark.parametrize(
    ("unit", "number"),
    [("s", 1769860800.123456), ("ms", "1769860800123.456"), ("us", 1769860800123456)],
)
def test_times_as_numbers(run: Run, log: hr.Log, unit: str, number: object) -> None:
    log.create_topic("t", "at TIMESTAMP, local TIMESTAMP_NTZ, order_id BIGINT")
    row = {"at": number, "local": number, "order_id": 1}
    assert "--epoch" in run("produce", "t", stdin=jsonl([row]), code=1).err
    run("produce", "t", "--epoch", unit, stdin=jsonl([row, {**row, "at": AT_TEXT}]))
    first, second = log.read("t").to_pylist()
    assert (first["at"], second["at"], first["local"]) == (AT, AT, AT.replace(tzinfo=None))
    far = jsonl([{**row, "at": 10**18}])
    assert "1 to 9999" in run("produce", "t", "--epoch", "s", stdin=far, code=1).err


def test_nanoseconds_are_cut_to_microseconds(run: Run, log: hr.Log) -> None:
    log.create_topic("t", "at TIMESTAMP")
    run("produce", "t", "--epoch", "ns", stdin='{"at": 1769860800123456789}\n')
    assert log.read("t").to_pylist()[0]["at"] == AT


def test_headers_are_produced(run: Run, log: hr.Log) -> None:
    log.create_topic("t", "order_id BIGINT")
    run("produce", "t", "--header", "trace=7", "--header", "a=b=c", stdin='{"order_id": 1}\n')
    printed = run("consume", "t", "--headers", "--json").out
    run("produce", "t", "--header", "copy=1", stdin=printed)
    rows = log.read("t", headers=True).to_pylist()
    first = [{"key": "trace", "value": b"7"}, {"key": "a", "value": b"b=c"}]
    assert [row["_headers"] for row in rows] == [first, [*first, {"key": "copy", "value": b"1"}]]
    run("produce", "t", "--header", "x", stdin="", code=2)
