"""The proof: a value is found in every kind of file, whatever hides it, and is not found where it
is not.
"""

import gzip
import sqlite3
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headrace as hr
from headrace.events.privacy.scan import scan

EMAIL = 'ada "the countess" lovelace@example.com'


def found(path: Path) -> list[str]:
    return [each.file.name for each in scan([path], [EMAIL])]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_batches_in_segments_and_in_the_journal(tmp_path: Path, compression: str) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}", durability="os") as log:
        log.create_topic("mails", "address STRING", compression=compression)
        with log.producer("mails") as producer:
            producer.append([{"address": "someone"}] * 5)
            assert found(tmp_path) == []
            producer.append([{"address": "x" * 500 + EMAIL * 3}])
        names = found(tmp_path)
    assert any(name.endswith(".segment") for name in names)
    assert any(name.endswith(".journal") for name in names)


def test_quarantined_damaged_bytes_are_scanned(tmp_path: Path) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}", durability="os") as log:
        log.create_topic("mails", "address STRING", compression="zstd")
        with log.producer("mails") as producer:
            producer.append([{"address": "x" * 500 + EMAIL}])
    (segment,) = (tmp_path / "log" / "topics").rglob("*.segment")
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "bytes").write_bytes(b"shifted" + segment.read_bytes())
    assert "bytes" in found(tmp_path)


def database(path: Path, *, wal: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA page_size = 512")
    db.execute(f"PRAGMA journal_mode = {'WAL' if wal else 'DELETE'}")
    db.execute("PRAGMA secure_delete = OFF")
    db.execute("CREATE TABLE t (x TEXT)")
    return db


@pytest.mark.parametrize("padding", range(0, 512, 37))
def test_rows_that_were_deleted_from_sqlite(tmp_path: Path, padding: int) -> None:
    """In a long text a value may be cut over two pages, which are free then."""
    db = database(tmp_path / "views.db")
    db.execute("INSERT INTO t VALUES (?)", ("a" * (2000 + padding) + EMAIL + "b" * 1500,))
    assert found(tmp_path) == ["views.db"]
    db.execute("DELETE FROM t")
    assert found(tmp_path) == ["views.db"]
    db.execute("PRAGMA secure_delete = ON")
    db.execute("VACUUM")
    assert found(tmp_path) == []
    db.close()


def test_a_write_ahead_log(tmp_path: Path) -> None:
    db = database(tmp_path / "views.db", wal=True)
    for padding in range(0, 512, 37):
        db.execute("INSERT INTO t VALUES (?)", ("a" * (2000 + padding) + EMAIL + "b" * 1500,))
        db.execute("DELETE FROM t")
    assert "views.db-wal" in found(tmp_path)
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert found(tmp_path) == []
    db.close()


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "dump.gz").write_bytes(gzip.compress(EMAIL.encode()))
    (tmp_path / "wide.txt").write_bytes(EMAIL.encode("utf-16-le"))
    (tmp_path / "escaped.json").write_text('{"x":"ada \\"the countess\\" lovelace@example.com"}')
    (tmp_path / "nothing.txt").write_text("nothing")
    pq.write_table(pa.table({"email": [EMAIL]}), tmp_path / "old.parquet", compression="zstd")
    (tmp_path / "archive.zst").write_bytes(b"\x28\xb5\x2f\xfd packed")
    assert found(tmp_path) == ["archive.zst", "dump.gz", "escaped.json", "old.parquet", "wide.txt"]
    assert [each.reason for each in scan([tmp_path / "archive.zst"], [EMAIL])] == [
        "is packed (zstd) and cannot be looked into"
    ]
