"""A view taken out of its store, with its rows and kept changes. `headrace view drop` does it, when nothing keeps or serves the view any more."""

from __future__ import annotations

import contextlib
from pathlib import Path

from headrace.sinks.view_file import open_for_writing, read_view, translated
from headrace.sinks.view_table import ViewTable
from headrace.sql_names import quoted


def drop_view(path: Path, name: str) -> None:
    """All of it in one transaction. UnknownView if there is none."""
    with contextlib.closing(open_for_writing(path)) as db, translated(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            info = read_view(db, name)
            db.execute(f"DROP VIEW {quoted(info.name)}")
            db.execute(f"DROP TABLE {ViewTable(info).table}")
            db.execute("DELETE FROM _changes WHERE view = ?", (info.number,))
            db.execute("DELETE FROM _views WHERE number = ?", (info.number,))
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
