"""The writer of the embedded view store. The runner of a pipeline declares its views here and
commits their changes; readers, in any process, use `reader.py`. `file.py` describes the database.

A commit is one SQL transaction over all views and the ticks they show, so views that are read
together never contradict each other. Repeating a commit after a crash changes nothing: changes of
ticks that a view already shows are dropped.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import (
    CHANGE_TYPE,
    CHANGE_TYPES,
    DELETE,
    INSERT,
    TICK,
    UPDATE_PREIMAGE,
)
from headrace.errors import (
    BadName,
    BadSchema,
    BugError,
    ConfigurationError,
    FencedError,
    IncompatibleChange,
    UnknownView,
)
from headrace.names import check_name
from headrace.types.ddl import check_duplicates
from headrace.types.schema import check_key, schema_to_bytes, to_ddl
from headrace.types.sqlite_codec import to_values
from headrace.views.changes import MAX_CHANGES, last_of_each_key, retain_changes
from headrace.views.file import (
    ViewInfo,
    ViewTable,
    delete_rebuild,
    delete_rows,
    hidden_name,
    new_generation,
    open_for_writing,
    read_view,
    read_views,
    rebuild_tick,
    translate_errors,
    visible_name,
)
from headrace.views.reader import ViewReader

MAX_STREAM_ROWS = 100_000
_CELLS_PER_STATEMENT = 512
_ROWS_PER_SLICE = 1 << 16


class ViewStore:
    """The views in one file. A store without a connection only reads."""

    def __init__(self, path: Path, db: sqlite3.Connection | None, max_changes: int) -> None:
        self.path = path
        self.max_changes = max_changes
        self._db = db
        self._declared: dict[str, ViewTable] = {}
        self._max_changes_by_view: dict[str, int] = {}
        self._lock = threading.Lock()
        self.reader = ViewReader(path)

    @classmethod
    def open(cls, path: Path, *, write: bool = True, max_changes: int = MAX_CHANGES) -> ViewStore:
        """Open the store in a file.

        Args:
            path: The file; it is created if it is missing.
            write: False to read only.
            max_changes: How many of its newest changes each view retains for subscribers.
        """
        path = Path(path)
        return cls(path, open_for_writing(path) if write else None, max_changes)

    def close(self) -> None:
        self.reader.close()
        if self._db is not None:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Declarations

    def declare(
        self,
        view: str,
        schema: pa.Schema,
        key: tuple[str, ...] = (),
        *,
        max_rows: int = MAX_STREAM_ROWS,
        max_changes: int | None = None,
    ) -> ViewInfo:
        """Create a view, or check that the existing one has these columns and this key.

        Args:
            view: The view's name.
            schema: Its columns.
            key: The columns of its key; without a key the view is a stream.
            max_rows: How many of its newest rows a stream retains.
            max_changes: How many of its changes to retain, if not the store's `max_changes`.

        Raises:
            IncompatibleChange: The view exists with other columns or another key.

        """
        _check_declaration(view, schema, key)
        with self._transaction() as db:
            stored = {info.name.lower(): info for info in read_views(db)}.get(view.lower())
            if stored is None:
                _create(db, view, schema, key, max_rows)
            else:
                _check_compatible(stored, view, schema, key)
                fields = [  # a column that was nullable stays nullable
                    new.with_nullable(new.nullable or old.nullable)
                    for old, new in zip(stored.schema, schema, strict=True)
                ]
                db.execute(
                    "UPDATE _views SET schema = ?, most_rows = ? WHERE name IN (?, ?)",
                    (
                        schema_to_bytes(pa.schema(fields, schema.metadata)),
                        None if key else max_rows,
                        view,
                        hidden_name(view),
                    ),
                )
            info = read_view(db, view)
        self._declared[view] = ViewTable(info)
        self._max_changes_by_view[view.lower()] = max_changes or self.max_changes
        return info

    def rebuild(self, views: Collection[str], epoch: int, at_tick: int | None) -> list[str]:
        """Begin to build some views again, before their first commit: because they were lost, or
        because their rows have another meaning. Returns the names of those that have old rows.

        Readers see the old rows, at their tick, until the new ones have reached that tick and
        `at_tick`; the commit that does so replaces them. A view without rows is built in place, and
        so are all if `at_tick` is None: no commit has been completed since they were begun.
        """
        with_rows = []
        with self._transaction() as db:
            self._claim_epoch(db, epoch)
            for name in views:
                self._table(name)
                delete_rebuild(db, name)
                info = read_view(db, name)
                if info.tick == 0 or at_tick is None:
                    db.execute(f"DELETE FROM {ViewTable(info).table}")  # noqa: S608
                    db.execute("DELETE FROM _changes WHERE view = ?", (info.number,))
                    db.execute(
                        "UPDATE _views SET tick = 0, kept_after = 0, kept_rows = 0,"
                        " kept_bytes = 0, generation = ? WHERE number = ?",
                        (new_generation(), info.number),
                    )
                    continue
                hidden = hidden_name(name)
                _insert_view(db, hidden, info.schema, info.key, info.max_rows)
                db.execute(ViewTable(read_view(db, hidden)).create())
                row = (name, max(at_tick, info.tick))
                db.execute("INSERT INTO _rebuilds (view, at_tick) VALUES (?, ?)", row)
                with_rows.append(name)
        return with_rows

    # Commits

    def fence(self, epoch: int) -> None:
        """Refuse commits of earlier epochs from now on."""
        with self._transaction() as db:
            self._claim_epoch(db, epoch)

    def commit(
        self,
        tick: int,
        epoch: int,
        changes: Mapping[str, pa.Table],
        *,
        views: Collection[str] | None = None,
    ) -> None:
        """Advance all declared views, or those named, to `tick` in one transaction. The steps:

        1. check the columns, order and ticks of the changes; if one is wrong, nothing is written
        2. take the database's write lock, and refuse a run that a newer one has fenced
        3. for each view: drop the changes of ticks it already shows, apply the others, retain them
           for subscribers, and set the view's tick
        4. commit: either everything is on disk, or nothing is

        If step 4 fails, its outcome is unknown. Repeating the commit is correct in both cases.
        """
        moved = list(self._declared if views is None else views)
        checked = {}
        for name, rows in changes.items():  # 1
            checked[name] = _check_changes(self._table(name), rows, tick)
        if unmoved := sorted(checked.keys() - set(moved)):
            raise BugError(
                f"A commit has changes of the view {unmoved[0]!r}, but does not advance it."
            )
        with self._transaction() as db:  # 2, 4
            self._claim_epoch(db, epoch)
            for name in moved:  # 3
                self._advance(db, name, tick, checked.get(name))

    def _claim_epoch(self, db: sqlite3.Connection, epoch: int) -> None:
        (stored,) = db.execute("SELECT epoch FROM _ledger").fetchone()
        if epoch < stored:
            raise FencedError(
                f"A newer run (epoch {stored}) writes the views in {self.path}; this one has epoch"
                f" {epoch}.",
                fix=(
                    "stop this run: the newer one continues where it stopped. Nothing of this"
                    " commit was stored."
                ),
            )
        if epoch > stored:
            db.execute("UPDATE _ledger SET epoch = ?", (epoch,))

    def _advance(
        self, db: sqlite3.Connection, name: str, tick: int, changes: pa.Table | None
    ) -> None:
        self._table(name)
        rebuilt_at = rebuild_tick(db, name)
        info = read_view(db, name if rebuilt_at is None else hidden_name(name))
        if tick <= info.tick:
            return
        if changes is not None:
            ticks = changes[TICK].to_numpy()  # in order
            new_changes = changes.slice(int(np.searchsorted(ticks, info.tick, side="right")))
            if new_changes.num_rows:
                self._write(db, info, new_changes)
        db.execute("UPDATE _views SET tick = ? WHERE number = ?", (tick, info.number))
        if rebuilt_at is not None and tick >= rebuilt_at:
            _replace_rows(db, name)

    def _write(self, db: sqlite3.Connection, info: ViewInfo, changes: pa.Table) -> None:
        table = ViewTable(info)
        if info.is_stream:
            append_rows(db, table, changes)
        else:
            if not info.null_keys and any(changes[name].null_count for name in info.key):
                db.execute("UPDATE _views SET null_keys = 1 WHERE number = ?", (info.number,))
            apply_changes(db, table, changes)
        max_changes = self._max_changes_by_view[visible_name(info.name).lower()]
        retained = retain_changes(db, info, changes, max_changes)
        db.execute(
            "UPDATE _views SET kept_after = ?, kept_rows = ?, kept_bytes = ? WHERE number = ?",
            (retained.after_tick, retained.rows, retained.size_bytes, info.number),
        )

    def _table(self, name: str) -> ViewTable:
        if name not in self._declared:
            raise UnknownView(name, self._declared)
        return self._declared[name]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the write lock from the start, so nothing changes between a
        check and the write that relies on it.
        """
        if self._db is None:
            raise ConfigurationError(
                f"{self.path} was opened for reading only.",
                fix="open it with ViewStore.open(path).",
            )
        with self._lock, translate_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


# Declarations


def declared_tick(path: Path, view: str, schema: pa.Schema, key: tuple[str, ...]) -> int:
    """The last tick that was written to a view, or -1 if it does not exist. IncompatibleChange if
    it exists with other columns or another key.
    """
    if not path.exists():
        return -1
    with ViewReader(path) as reader:
        stored = {info.name.lower(): info for info in reader.views()}.get(view.lower())
        if stored is None:
            return -1
        _check_compatible(stored, view, schema, key)
        return reader.written_tick(view)


def _check_declaration(view: str, schema: pa.Schema, key: tuple[str, ...]) -> None:
    check_name(view, what="view")
    if view.startswith("_") or view.lower().startswith("sqlite_"):
        raise BadName(
            f"{view!r} cannot be a view.",
            fix="choose a name that starts with neither '_' nor 'sqlite_'.",
        )
    to_ddl(schema)
    check_duplicates(list(schema), where=f"The view {view!r}")
    if reserved := [name for name in schema.names if name.lower() in {TICK, CHANGE_TYPE}]:
        raise BadSchema(
            f"The view {view!r} has the column {reserved[0]!r}, a name that is reserved.",
            fix="rename it with select.",
        )
    check_key(schema, key, where=f"the view {view!r}")


def _create(
    db: sqlite3.Connection, view: str, schema: pa.Schema, key: tuple[str, ...], max_rows: int
) -> None:
    _insert_view(db, view, schema, key, None if key else max_rows)
    db.execute(ViewTable(read_view(db, view)).create())


def _insert_view(
    db: sqlite3.Connection,
    view: str,
    schema: pa.Schema,
    key: tuple[str, ...],
    max_rows: int | None,
) -> None:
    db.execute(
        "INSERT INTO _views (name, schema, key, most_rows, generation, tick, null_keys, kept_after,"
        " kept_rows, kept_bytes) VALUES (?, ?, ?, ?, ?, 0, 0, 0, 0, 0)",
        (view, schema_to_bytes(schema), json.dumps(key), max_rows, new_generation()),
    )


def _replace_rows(db: sqlite3.Connection, view: str) -> None:
    """Replace the rows of a view by those that were built again. No subscriber can go on from an
    earlier tick: it gets a snapshot of the new rows.
    """
    delete_rows(db, read_view(db, view))
    info = read_view(db, hidden_name(view))
    db.execute("DELETE FROM _changes WHERE view = ?", (info.number,))
    db.execute(
        "UPDATE _views SET name = ?, kept_after = tick, kept_rows = 0, kept_bytes = 0"
        " WHERE number = ?",
        (view, info.number),
    )
    db.execute("DELETE FROM _rebuilds WHERE view = ?", (view,))


def _check_compatible(stored: ViewInfo, view: str, schema: pa.Schema, key: tuple[str, ...]) -> None:
    if stored.name != view:
        raise BadName(
            f"There is a view {stored.name!r} already, and names in SQL ignore case.",
            fix=f"choose another name than {view!r}.",
        )
    if differences := list(_differences(stored, schema, key)):
        raise IncompatibleChange(
            f"The view {view!r} was created with other columns or another key than its step has"
            f" now: {'; '.join(differences)}.",
            fix=(
                "undo the change, or build a new version next to the old one with `headrace replay"
                " FILE --as VERSION`."
            ),
        )


def _differences(stored: ViewInfo, schema: pa.Schema, key: tuple[str, ...]) -> Iterator[str]:
    before = {field.name: field for field in stored.schema}
    after = {field.name: field for field in schema}
    yield from (f"{name!r} is gone" for name in before if name not in after)
    yield from (f"{name!r} is new" for name in after if name not in before)
    for name in before.keys() & after.keys():
        if not before[name].type.equals(after[name].type):
            old, new = (
                to_ddl(pa.schema([fields[name].with_nullable(True).with_metadata(None)]))
                for fields in (before, after)
            )
            yield f"{old!r} is now {new!r}"
    if stored.key != key:
        yield f"the key was ({', '.join(stored.key)}) and is now ({', '.join(key)})"
    elif before.keys() == after.keys() and stored.schema.names != schema.names:
        yield f"the order of the columns was {', '.join(stored.schema.names)}"


# Changes


def _check_changes(table: ViewTable, changes: pa.Table, tick: int) -> pa.Table:
    """The changes with exactly the view's columns, `_tick` and `_change_type`. BugError if a column
    is missing or has another type, or if ticks are out of order: the engine computed them wrongly.
    """
    info = table.info
    where = f"Changes for the view {info.name!r}"
    if missing := [name for name in [*info.schema.names, TICK] if name not in changes.schema.names]:
        raise BugError(f"{where} lack the column {missing[0]!r}.")
    for field in info.schema:
        if not changes.schema.field(field.name).type.equals(field.type):
            raise BugError(f"{where} have {changes.schema.field(field.name)}, not {field}.")
    ticks = changes[TICK].to_numpy()
    if len(ticks) and (ticks[-1] > tick or (np.diff(ticks) < 0).any()):
        raise BugError(f"{where} are not in the order of their ticks, or go beyond tick {tick}.")
    if CHANGE_TYPE in changes.schema.names:
        kinds = changes[CHANGE_TYPE].cast(pa.string())
    elif info.is_stream:
        kinds = pa.repeat(INSERT, changes.num_rows)
    else:
        raise BugError(f"{where} lack the column {CHANGE_TYPE!r}.")
    unknown = set(pc.unique(kinds).to_pylist()) - set([INSERT] if info.is_stream else CHANGE_TYPES)
    if unknown:
        raise BugError(f"{where} have the change {unknown.pop()!r}.")
    return changes.select([*info.schema.names, TICK]).append_column(CHANGE_TYPE, kinds)


# Writing rows
#
# Only the last change of a key decides its row, so each key is written at most once a commit, in
# key order: neighbours in SQLite's tree are written together (measured: twice as fast as in random
# order). Many rows go into one statement, because a statement costs more than a row.


def apply_changes(db: sqlite3.Connection, view: ViewTable, changes: pa.Table) -> None:
    """Write the final row of each key that changed, and delete the keys whose last change is a
    delete.
    """
    final = last_of_each_key(
        changes.filter(pc.not_equal(changes[CHANGE_TYPE], UPDATE_PREIMAGE)), view.info.key
    )
    is_delete = pc.equal(final[CHANGE_TYPE], DELETE)
    matches = " AND ".join(f"{name} = ?" for name in view.key_columns)
    deletes = final.filter(is_delete).select(list(view.info.key))
    for batch in deletes.to_batches(max_chunksize=_ROWS_PER_SLICE):
        db.executemany(
            f"DELETE FROM {view.table} WHERE {matches}",  # noqa: S608
            zip(*(view.key_values(array) for array in batch.columns), strict=True),
        )
    upserts = final.filter(pc.invert(is_delete)).select(view.info.schema.names)
    for batch in upserts.to_batches(max_chunksize=_ROWS_PER_SLICE):
        cells = [
            view.key_values(array) if name in view.info.key else to_values(array)
            for name, array in zip(batch.schema.names, batch.columns, strict=True)
        ]
        _insert(db, "INSERT OR REPLACE", view, cells)


def append_rows(db: sqlite3.Connection, view: ViewTable, rows: pa.Table) -> None:
    """Append rows to a stream, and delete its oldest rows beyond `max_rows`."""
    max_rows = view.info.max_rows or 0
    newest = rows.slice(max(0, rows.num_rows - max_rows)).select([TICK, *view.info.schema.names])
    for batch in newest.to_batches(max_chunksize=_ROWS_PER_SLICE):
        _insert(db, "INSERT", view, [to_values(array) for array in batch.columns])
    db.execute(
        f"DELETE FROM {view.table} WHERE _row <= (SELECT max(_row) FROM {view.table}) - ?",  # noqa: S608
        (max_rows,),
    )


def _insert(db: sqlite3.Connection, verb: str, view: ViewTable, cells: list[list[Any]]) -> None:
    """Insert rows, given as one list of values per column, many to a statement."""
    width, count = len(cells), len(cells[0])
    rows_per_statement = max(1, _CELLS_PER_STATEMENT // width)
    flat: list[Any] = [None] * (width * count)
    for index, column in enumerate(cells):
        flat[index::width] = column
    rest = (count - count % rows_per_statement) * width
    db.executemany(
        _insert_statement(verb, view, rows_per_statement),
        _slices(flat, 0, rest, rows_per_statement * width),
    )
    db.executemany(_insert_statement(verb, view, 1), _slices(flat, rest, count * width, width))


def _insert_statement(verb: str, view: ViewTable, rows: int) -> str:
    columns = view.inserted_columns
    row = f"({', '.join('?' * len(columns))})"
    return f"{verb} INTO {view.table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)}"


def _slices(flat: list[Any], start: int, stop: int, step: int) -> Iterator[list[Any]]:
    return (flat[first : first + step] for first in range(start, stop, step))
