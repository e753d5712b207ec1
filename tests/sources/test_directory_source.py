"""The files of a directory: each row once, through restarts, kills and what happens to files."""

import gzip
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError
from headrace.log.dead_letters import read_dead_letters
from headrace.sources import Source
from headrace.testing.source_contract import ROWS, SourceContract, numbered
from tests.waits import wait_until


def incoming(path: Path, **settings: Any) -> Source:
    path.mkdir(exist_ok=True)
    given = {"topic": "rows", "schema": ROWS, "every": "20 ms", "settle": "300 ms", **settings}
    return hr.sources.directory(path, name="incoming", **given)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{row['id']},{row['name']}\n" for row in rows)


class GrowingFile:
    """One file of CSV or JSON lines that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".csv":
            path.write_text("id,name\n")

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self.path.open("a") as file:
            if self.path.suffix == ".csv":
                file.write(csv_text(rows))
            else:
                file.write("".join(json.dumps(row) + "\n" for row in rows))

    def add_bad(self) -> None:
        self.add([{"id": "x", "name": "bad"}])


class ManyFiles:
    """A file for each addition, one format after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.count += 1
        stem = self.path / f"{self.count:03}"
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        match self.count % 4:
            case 0:
                finished(stem.with_suffix(".jsonl"), lines.encode())
            case 1:
                finished(stem.with_suffix(".csv"), f"id,name\n{csv_text(rows)}".encode())
            case 2:
                finished(stem.with_suffix(".jsonl.gz"), gzip.compress(lines.encode()))
            case 3:
                sink = pa.BufferOutputStream()
                pq.write_table(pa.Table.from_pylist(list(rows)), sink)
                finished(stem.with_suffix(".parquet"), sink.getvalue().to_pybytes())

    def add_bad(self) -> None:
        self.count += 1
        finished(self.path / f"{self.count:03}.jsonl", b'{"id": "x", "name": "bad"}\n')


def finished(path: Path, content: bytes) -> None:
    """Write a file as one should: under a hidden name, which is changed at the end."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(content)
    hidden.rename(path)


class TestGrowingCsv(SourceContract):
    name = "rows.csv"

    @pytest.fixture
    def outside(self, tmp_path: Path) -> GrowingFile:
        return GrowingFile(tmp_path / "in" / self.name)

    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        return incoming(tmp_path / "in")


class TestGrowingLines(TestGrowingCsv):
    name = "rows.jsonl"


class TestManyFiles(SourceContract):
    @pytest.fixture
    def outside(self, tmp_path: Path) -> ManyFiles:
        return ManyFiles(tmp_path / "in")

    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        return incoming(tmp_path / "in")


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        yield opened


def read(source: Source, log: hr.Log) -> list[int]:
    """The ids after a run that catches up."""
    source.run(log=log.address, until_caught_up=True)
    return [row["id"] for row in log.read("rows").to_pylist()]


def reasons(log: hr.Log) -> list[str]:
    return [letter["reason"] for letter in read_dead_letters(log, "rows")]


def test_half_a_line_is_not_read_before_its_end_comes(tmp_path: Path, log: hr.Log) -> None:
    source = incoming(tmp_path / "in", settle="1 hour")
    path = tmp_path / "in" / "a.csv"
    path.write_text("id,name\n1,one\n2,tw")
    stop = threading.Event()
    running = threading.Thread(target=source.run, kwargs={"log": log.address, "stop": stop})
    running.start()
    wait_until(lambda: "rows" in log.topics() and log.end_offsets("rows")[0] == 1)
    time.sleep(0.1)
    with path.open("a") as file:
        file.write("o\n3,")
    wait_until(lambda: log.end_offsets("rows")[0] == 2)
    stop.set()
    running.join(30)
    assert [row["name"] for row in log.read("rows").to_pylist()] == ["one", "two"]


def test_a_last_line_without_an_end_is_read_when_the_file_has_settled(
    tmp_path: Path, log: hr.Log
) -> None:
    source = incoming(tmp_path / "in")
    (tmp_path / "in" / "a.csv").write_text("id,name\n1,one\n2,two")
    (tmp_path / "in" / "b.jsonl").write_text('{"id": 3}')
    assert sorted(read(source, log)) == [1, 2, 3]
    with (tmp_path / "in" / "a.csv").open("a") as file:
        file.write("\n4,four\n")  # the line was whole
    with (tmp_path / "in" / "b.jsonl").open("a") as file:
        file.write('5}\n{"id": 6}\n')  # this one was not
    assert sorted(read(source, log)) == [1, 2, 3, 4]
    assert [
        "b.jsonl: Its line 1 was read before it was whole" in each for each in reasons(log)
    ] == [True]


def test_a_quoted_line_end_does_not_cut_a_record(tmp_path: Path, log: hr.Log) -> None:
    source = incoming(tmp_path / "in")
    path = tmp_path / "in" / "a.csv"
    path.write_text('id,name\n1,"one\nand')
    stop = threading.Event()
    running = threading.Thread(target=source.run, kwargs={"log": log.address, "stop": stop})
    running.start()
    time.sleep(0.1)
    with path.open("a") as file:
        file.write(' a half"\n2,two\n')
    wait_until(lambda: "rows" in log.topics() and log.end_offsets("rows")[0] == 2)
    stop.set()
    running.join(30)
    assert [row["name"] for row in log.read("rows").to_pylist()] == ["one\nand a half", "two"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("b.parquet", b"PAR1 and no more"),
        ("b.jsonl.gz", gzip.compress(b'{"id": 7}\n' * 50, mtime=0)[:-9]),
        ("b.csv", b'id,name\n7,"never closed\n'),
        ("b.csv", b"id,colour\n7,red\n"),
        ("b.csv", b"id,id\n7,7\n"),
    ],
    ids=["parquet", "gzip", "quotes", "unknown column", "one column twice"],
)
def test_a_file_that_is_not_whole_is_told_once_and_others_are_read(
    tmp_path: Path, log: hr.Log, name: str, content: bytes
) -> None:
    source = incoming(tmp_path / "in")
    (tmp_path / "in" / "a.csv").write_text("id,name\n1,one\n")
    (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "c.csv").write_text("id,name\n2,two\n")
    for _ in range(2):
        assert {1, 2} <= set(read(source, log))
        assert [name in reason for reason in reasons(log)] == [True]


def test_a_parquet_file_that_is_being_written_is_read_when_it_is_whole(
    tmp_path: Path, log: hr.Log
) -> None:
    source = incoming(tmp_path / "in", settle="1 hour")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": list(range(1_000))}), sink)
    whole = sink.getvalue().to_pybytes()
    path = tmp_path / "in" / "a.parquet"
    path.write_bytes(whole[: len(whole) // 2])
    stop = threading.Event()
    running = threading.Thread(target=source.run, kwargs={"log": log.address, "stop": stop})
    running.start()
    time.sleep(0.15)
    with path.open("ab") as file:
        file.write(whole[len(whole) // 2 :])
    wait_until(lambda: "rows" in log.topics() and log.end_offsets("rows")[0] == 1_000)
    stop.set()
    running.join(30)
    assert "rows.dead" not in log.topics()


@pytest.mark.parametrize(
    "change", ["shorter", "other beginning", "other end", "other file", "whole"]
)
def test_a_file_that_changes_after_it_was_read_is_told(
    tmp_path: Path, log: hr.Log, change: str
) -> None:
    source = incoming(tmp_path / "in")
    path = tmp_path / "in" / ("a.parquet" if change == "whole" else "a.jsonl")
    lines = [b'{"id": %d}\n' % number for number in range(1_000)]
    if change == "whole":
        pq.write_table(pa.table({"id": list(range(1_000))}), path)
    else:
        path.write_bytes(b"".join(lines))
    assert len(read(source, log)) == 1_000
    match change:
        case "shorter":
            path.write_bytes(b"".join(lines[:10]))
        case "other beginning":
            path.write_bytes(b'{"id": 5}\n' + b"".join(lines[1:]) + b'{"id": 5}\n')
        case "other end":
            path.write_bytes(b"".join(lines[:-1]) + b'{"id": 998}\n{"id": 5}\n')
        case "other file":
            finished(path, b'{"id": -1}\n' + b"".join(lines))
        case "whole":
            pq.write_table(pa.table({"id": list(range(2_000))}), path)
    for _ in range(2):
        assert len(read(source, log)) == 1_000
        (reason,) = reasons(log)
        assert "It changed after it was read" in reason
    statuses: list[Any] = []
    source.run(log=log.address, until_caught_up=True, on_status=statuses.append)
    assert statuses[-1].source["changed_files"] == 1


def test_a_file_whose_time_changes_is_not_read_again(tmp_path: Path, log: hr.Log) -> None:
    source = incoming(tmp_path / "in")
    ManyFiles(tmp_path / "in").add(numbered(0, 3))
    (tmp_path / "in" / "a.jsonl").write_text('{"id": 3}\n')
    assert sorted(read(source, log)) == [0, 1, 2, 3]
    for path in (tmp_path / "in").iterdir():
        os.utime(path, (1, 1))
    assert sorted(read(source, log)) == [0, 1, 2, 3]
    assert "rows.dead" not in log.topics()


def test_only_files_of_the_pattern_and_of_known_formats_are_read(
    tmp_path: Path, log: hr.Log
) -> None:
    source = incoming(tmp_path / "in", pattern="**/*s.*")
    (tmp_path / "in" / "deep").mkdir()
    for name in ("rows.jsonl", "other.jsonl", ".hiddens.jsonl", "notes.txt", "deep/rows.jsonl"):
        (tmp_path / "in" / name).write_bytes(b'{"id": %d}\n' % len(name))
    assert sorted(read(source, log)) == [10, 15]


def test_rows_of_csv_that_are_none_are_dead_letters_with_their_line(
    tmp_path: Path, log: hr.Log
) -> None:
    source = incoming(tmp_path / "in")
    content = b"\xef\xbb\xbfname;id\none;1\n\nonly\ntw\xff;2\nx;x\nfour;4\n"
    (tmp_path / "in" / "a.csv").write_bytes(content)
    assert read(source, log) == [1, 4]
    assert [reason.split(":")[0] for reason in reasons(log)] == [
        "a.csv, line 4",
        "a.csv, line 5",
        "a.csv, line 6, column 'id'",
    ]


def test_large_files_are_read_in_parts_and_resumed(
    tmp_path: Path, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.sources import directory_source

    monkeypatch.setattr(directory_source, "BLOCK_BYTES", 200)
    monkeypatch.setattr(directory_source, "PARQUET_ROWS", 7)
    source = incoming(tmp_path / "in")
    outside = ManyFiles(tmp_path / "in")
    for part in range(4):
        outside.add(numbered(part * 100, part * 100 + 100))
    assert sorted(read(source, log)) == list(range(400))


def test_a_directory_that_is_missing_is_told(tmp_path: Path, log: hr.Log) -> None:
    source = incoming(tmp_path / "in")
    (tmp_path / "in").rmdir()
    with pytest.raises(ConfigurationError, match="does not exist"):
        source.run(log=log.address, until_caught_up=True)


def test_impossible_settings_are_refused() -> None:
    for settings, says in (
        ({"pattern": "../*"}, "leaves the directory"),
        ({"format": "xml"}, "no format 'xml'"),
        ({"colour": "red"}, "no setting 'colour'"),
    ):
        with pytest.raises(InputError, match=says):
            hr.sources.directory("in", topic="rows", **settings)


def test_a_url_names_directory_and_pattern() -> None:
    source = hr.sources.from_url("dir:in/2026/**/*.csv", topic="rows", every="5 seconds")
    assert isinstance(source, Source)
    assert (source.options["path"], source.options["pattern"]) == ("in/2026", "**/*.csv")
    assert source.options["every_s"] == 5
    with pytest.raises(InputError, match="--topic"):
        hr.sources.from_url("dir:in")
