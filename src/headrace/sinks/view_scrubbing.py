"""All rows of a view store removed for good: no free page, no write-ahead log has them any more. Its views stay declared, and are built again by the next run of their pipeline."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from headrace.errors import RetryError
from headrace.sinks.view_file import open_for_writing, read_views, translated
from headrace.sinks.view_table import ViewTable

_WAIT_S = 10.0


def scrub(path: Path) -> None:
    """The steps, each harmless when repeated: overwrite what is deleted, leave free pages out, empty the write-ahead log."""
    if not path.exists():
        return
    with contextlib.closing(open_for_writing(path)) as db, translated(path):
        db.execute("PRAGMA secure_delete = ON")
        db.execute("BEGIN IMMEDIATE")
        for info in read_views(db):
            db.execute(f"DELETE FROM {ViewTable(info).table}")  # noqa: S608 - a name of ours
            db.execute("UPDATE _views SET tick = 0, kept_after = 0, kept_rows = 0, kept_bytes = 0 WHERE number = ?", (info.number,))
        db.execute("DELETE FROM _changes")
        db.execute("COMMIT")
        db.execute("VACUUM")
        _empty_log(db, path)


def _empty_log(db: sqlite3.Connection, path: Path) -> None:
    """A reader in another process may be looking at an older moment, for a moment."""
    deadline = time.monotonic() + _WAIT_S
    while db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        if time.monotonic() > deadline:
            raise RetryError(f"Somebody is still reading an older moment of {path}, so its write-ahead log cannot be emptied.", fix="stop who reads it, and run this again.")
        time.sleep(0.05)
