"""Comparing a target with its topic: in pieces however small, with rows that take over values from
others, and with little memory.
"""

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.columnar.columns import HIDDEN_DDL
from headrace.sinks import check, sqlite_target
from headrace.testing.sink_contract import caught_up

UNCHANGED = '{"body": {"unchanged": true}}'


def row(
    number: int, body: str | None, at: tuple[int, int], change: str = "insert"
) -> dict[str, Any]:
    hidden = {
        "_position": 1,
        "_committed_at": None,
        "_transaction": at[0],
        "_order": at[1],
        "_marks": UNCHANGED if body is None and change != "delete" else None,
    }
    return {"id": number, "body": body, **hidden, "_change_type": change}


@pytest.mark.parametrize("partitions", [1, 3])
def test_in_pieces_however_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """Keys change, and large values go along: the two rows stand in different partitions, and yet
    in one piece.
    """
    monkeypatch.setattr(check, "CHUNK_ROWS", 1)
    monkeypatch.setattr(sqlite_target, "READ_ROWS", 3)
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table(
            "documents",
            f"id BIGINT, body STRING, {HIDDEN_DDL}",
            key="id",
            partitions=partitions,
        )
        with log.producer("documents") as producer:
            for number in range(20):
                producer.append(
                    [
                        row(number, f"long {number}", (number, 0)),
                        row(number + 500, "other", (number, 1)),
                    ]
                )
            for number in range(20):
                producer.append(
                    [
                        row(number, None, (100 + number, 0), "delete"),
                        row(number + 1000, None, (100 + number, 0)),
                    ]
                )
        sink = hr.sinks.sqlite(tmp_path / "target.db")
        caught_up(sink, log, "documents")
        compared = sink.check("documents", log=log.address)
        assert compared.is_equal, compared.examples
        assert compared.rows == 40
        with sqlite3.connect(tmp_path / "target.db") as db:
            assert db.execute("SELECT count(*) FROM documents WHERE body IS NULL").fetchone() == (
                0,
            )
            db.execute("UPDATE documents SET body = 'x' WHERE id IN (1003, 1004, 502)")
            db.execute("DELETE FROM documents WHERE id >= 1015")
            db.execute("INSERT INTO documents (id) VALUES (7777)")
        compared = sink.check("documents", log=log.address)
        assert compared.counts == {"missing": 5, "extra": 1, "different": 3}
        found = [(each.kind, each.key["id"]) for each in compared.examples]
        assert found == [("missing", n) for n in range(1015, 1020)] + [("extra", 7777)] + [
            ("different", n) for n in (1003, 1004, 502)
        ]
        assert (compared.examples[-3].log or {})["body"] == "long 3"


def test_a_row_that_stands_there_twice_is_one_too_many(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_table("accounts", "id BIGINT, born DATE", key="id")
        with log.producer("accounts") as producer:
            producer.upsert(
                pa.table(
                    {"id": [1, 2], "born": pa.array([4_000_000, 5], pa.int32()).cast(pa.date32())}
                )
            )  # one of them beyond the year 9999
        sink = hr.sinks.parquet(tmp_path / "files", buckets=1)
        caught_up(sink, log, "accounts")
        assert sink.check("accounts", log=log.address).is_equal
        (file,) = (tmp_path / "files").glob("*.parquet")
        rows = pq.read_table(file)
        pq.write_table(pa.concat_tables([rows, rows.slice(0, 1)]), file)
        compared = sink.check("accounts", log=log.address)
        assert (compared.counts, compared.examples[0].key) == (
            {"missing": 0, "extra": 1, "different": 0},
            {"id": 1},
        )


MEMORY = """
import resource, sys
import pyarrow as pa
import headrace as hr
address, rows = sys.argv[1], int(sys.argv[2])
with hr.open_log(address) as log:
    log.create_table("accounts", "id BIGINT, name STRING", key="id")
    with log.producer("accounts") as producer:
        for start in range(0, rows, 50_000):
            ids = list(range(start, start + 50_000))
            producer.upsert(pa.table({"id": ids, "name": [f"name {n:060d}" for n in ids]}))
sink = hr.sinks.sqlite(sys.argv[3])
sink.run("accounts", log=address, until_caught_up=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sink.check("accounts", log=address).is_equal
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """Twice the rows of about 130 bytes, 800,000 of them, are some 200 MiB as text on both
    sides.
    """
    command = [
        sys.executable,
        "-c",
        MEMORY,
        f"file:{tmp_path / 'log'}",
        "800000",
        str(tmp_path / "target.db"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) / 1024 < 150
