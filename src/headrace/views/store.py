"""The embedded view store: all views of a pipeline in one SQLite database, written by its runner.
Readers, in any process, open `view_reader.py`.

A commit is one SQL transaction over all views with the tick they show, so that views read together
never contradict each other, and a commit that is repeated after a crash changes nothing: rows of
ticks that a view has are dropped. `view_file.py` says what the database looks like.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, CHANGE_TYPES, DELETE, INSERT, TICK, UPDATE_BEFORE
from headrace.errors import (
    BadName,
    BadSchema,
    BugError,
    ConfigurationError,
    FencedError,
    IncompatibleChange,
    UnknownView,
)
from headrace.log.topic_config import check_name
from headrace.types.ddl import refuse_duplicates
from headrace.types.schema import check_key, quoted, schema_to_bytes, to_ddl
from headrace.views.changes import MAX_CHANGES, keep
from headrace.views.file import (
    ViewInfo,
    ViewTable,
    open_for_writing,
    read_view,
    read_views,
    translated,
)
from headrace.views.reader import ViewReader
from headrace.views.types import to_values

# A commit's changes, applied to the rows of one view. Used by `views.py` inside its transaction.
#
# What a key's row becomes is decided by its last change, so each key is written at most once a
# commit, in the order of the keys: neighbours in SQLite's tree are written together (measured:
# twice as fast as in random order). Many rows go into one statement, because a statement costs more
# than a row.


_CELLS_A_STATEMENT = 512
_ROWS_A_SLICE = 1 << 16


def apply_changes(db: sqlite3.Connection, view: ViewTable, changes: pa.Table) -> None:
    """Bring a table's rows to where the last changes leave them."""
    final = _last_of_each_key(
        changes.filter(pc.not_equal(changes[CHANGE_TYPE], UPDATE_BEFORE)), view.info.key
    )
    goes = pc.equal(final[CHANGE_TYPE], DELETE)
    _delete(db, view, final.filter(goes))
    for batch in (
        final.filter(pc.invert(goes))
        .select(view.info.schema.names)
        .to_batches(max_chunksize=_ROWS_A_SLICE)
    ):
        cells = [
            view.key_values(array) if name in view.info.key else to_values(array)
            for name, array in zip(batch.schema.names, batch.columns, strict=True)
        ]
        _insert(db, "INSERT OR REPLACE", view, cells)


def append_rows(db: sqlite3.Connection, view: ViewTable, rows: pa.Table) -> None:
    """Add a stream's rows behind those that are there, and let go of the oldest beyond the
    bound.
    """
    most = view.info.max_rows or 0
    kept = rows.slice(max(0, rows.num_rows - most))
    for batch in kept.select([TICK, *view.info.schema.names]).to_batches(
        max_chunksize=_ROWS_A_SLICE
    ):
        _insert(db, "INSERT", view, [to_values(array) for array in batch.columns])
    db.execute(
        f"DELETE FROM {view.table} WHERE _row <= (SELECT max(_row) FROM {view.table}) - ?",  # noqa: S608
        (most,),
    )


def _last_of_each_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key, in the order of the keys."""
    if rows.num_rows == 0:
        return rows
    rows = rows.take(
        pc.sort_indices(rows.select(list(key)), sort_keys=[(name, "ascending") for name in key])
    )  # stable: the last one stays the last
    ends = np.ones(rows.num_rows, np.bool_)
    ends[:-1] = np.logical_or.reduce(
        [_differs_from_next(rows[name].combine_chunks()) for name in key]
    )
    return rows if ends.all() else rows.filter(pa.array(ends))


def _differs_from_next(column: pa.Array) -> npt.NDArray[np.bool_]:
    """As SQLite compares what is stored: null is like null, NaN like NaN, -0.0 like 0.0."""
    left, right = column.slice(0, len(column) - 1), column.slice(1)
    alike = pc.fill_null(pc.equal(left, right), False)
    if column.null_count:
        alike = pc.or_(alike, pc.and_(left.is_null(), right.is_null()))
    if pa.types.is_floating(column.type):
        alike = pc.or_(alike, pc.fill_null(pc.and_(pc.is_nan(left), pc.is_nan(right)), False))
    return ~alike.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _delete(db: sqlite3.Connection, view: ViewTable, rows: pa.Table) -> None:
    statement = (
        f"DELETE FROM {view.table} WHERE {' AND '.join(f'{name} = ?' for name in view.key_columns)}"  # noqa: S608
    )
    for batch in rows.select(list(view.info.key)).to_batches(max_chunksize=_ROWS_A_SLICE):
        db.executemany(
            statement, zip(*(view.key_values(array) for array in batch.columns), strict=True)
        )


def _insert(db: sqlite3.Connection, verb: str, view: ViewTable, cells: list[list[Any]]) -> None:
    width, count = len(cells), len(cells[0])
    together = max(1, _CELLS_A_STATEMENT // width)
    flat: list[Any] = [None] * (width * count)
    for position, column in enumerate(cells):
        flat[position::width] = column
    whole = count - count % together
    db.executemany(_statement(verb, view, together), _cut(flat, 0, whole * width, together * width))
    db.executemany(_statement(verb, view, 1), _cut(flat, whole * width, count * width, width))


def _statement(verb: str, view: ViewTable, rows: int) -> str:
    one = f"({', '.join('?' * len(view.written))})"
    return f"{verb} INTO {view.table} ({', '.join(view.written)}) VALUES {', '.join([one] * rows)}"


def _cut(flat: list[Any], start: int, stop: int, step: int) -> Iterator[list[Any]]:
    return (flat[first : first + step] for first in range(start, stop, step))


def has_null_keys(changes: pa.Table, key: Iterable[str]) -> bool:
    return any(changes[name].null_count for name in key)


MAX_STREAM_ROWS = 100_000


class ViewStore:
    """Views in one file. With `write=False` it only reads. Of each view the newest `max_changes`
    changes are kept for those who follow it.
    """

    def __init__(self, path: Path, *, write: bool = True, max_changes: int = MAX_CHANGES) -> None:
        self.path, self.max_changes = Path(path), max_changes
        self._db = open_for_writing(self.path) if write else None
        self._declared: dict[str, ViewTable] = {}
        self._keeps: dict[str, int] = {}
        self._lock = threading.Lock()
        self.reader = ViewReader(self.path)

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

    # Declaring

    def declare(
        self,
        view: str,
        schema: pa.Schema,
        key: tuple[str, ...] = (),
        *,
        max_rows: int = MAX_STREAM_ROWS,
        max_changes: int | None = None,
    ) -> ViewInfo:
        """Make a view, or check that the one that is there fits. Without a key it is a stream, of
        which the newest `max_rows` rows are kept.

        `max_changes`: so many of its changes are kept, and not as many as of the others.
        IncompatibleChange if it was made with other columns or another key.
        """
        _check_declaration(view, schema, key)
        with self._transaction() as db:
            stored = {info.name.lower(): info for info in read_views(db)}.get(view.lower())
            if stored is None:
                _create(db, view, schema, key, max_rows)
            else:
                _check_same(stored, view, schema, key)
                db.execute(
                    "UPDATE _views SET schema = ?, most_rows = ? WHERE number = ?",
                    (
                        schema_to_bytes(_merged(stored.schema, schema)),
                        None if key else max_rows,
                        stored.number,
                    ),
                )
            info = read_view(db, view)
        self._declared[view] = ViewTable(info)
        self._keeps[view.lower()] = max_changes or self.max_changes
        return info

    def empty(self, views: Collection[str], epoch: int) -> None:
        """Begin some views anew, before anything of them is in the ledger: what they show is of
        another life, in which they meant something else.
        """
        with self._transaction() as db:
            self._take_epoch(db, epoch)
            for name in views:
                info = read_view(db, name)
                db.execute(f"DELETE FROM {self._table(name).table}")  # noqa: S608
                db.execute("DELETE FROM _changes WHERE view = ?", (info.number,))
                db.execute(
                    "UPDATE _views SET tick = 0, kept_after = 0, kept_rows = 0, kept_bytes = 0"
                    " WHERE number = ?",
                    (info.number,),
                )

    # Committing

    def fence(self, epoch: int) -> None:
        """Refuse commits of runs before `epoch` from now on."""
        with self._transaction() as db:
            self._take_epoch(db, epoch)

    def commit(
        self,
        tick: int,
        epoch: int,
        changes: Mapping[str, pa.Table],
        *,
        views: Collection[str] | None = None,
    ) -> None:
        """Bring declared views, all or those named, to `tick`, in one transaction. The steps:

        1. look at the changes: columns, order, ticks; nothing is written if they are not as they
           must be
        2. take the database's write lock, and refuse a run that a newer one has replaced
        3. for each view: drop changes of ticks it has, apply the others, keep them for followers,
           and set its tick
        4. commit: everything is there, and on disk, or nothing is

        If the last step fails its outcome is unknown; a repeated commit is right in both cases.
        """
        moving = list(self._declared if views is None else views)
        checked = {
            name: _checked(self._table(name), rows, tick) for name, rows in changes.items()
        }  # 1
        if left_out := sorted(checked.keys() - set(moving)):
            raise BugError(
                f"Changes of the view {left_out[0]!r} came with a commit that does not move it."
            )
        with self._transaction() as db:  # 2, 4
            self._take_epoch(db, epoch)
            for name in moving:  # 3
                self._advance(db, name, tick, checked.get(name))

    def _take_epoch(self, db: sqlite3.Connection, epoch: int) -> None:
        (stored,) = db.execute("SELECT epoch FROM _ledger").fetchone()
        if epoch < stored:
            raise FencedError(
                f"A newer run (epoch {stored}) writes the views in {self.path}; this one has epoch"
                f" {epoch}.",
                fix=(
                    "stop this run: the newer one goes on where it stopped. Nothing of this commit"
                    " was stored."
                ),
            )
        if epoch > stored:
            db.execute("UPDATE _ledger SET epoch = ?", (epoch,))

    def _advance(
        self, db: sqlite3.Connection, name: str, tick: int, changes: pa.Table | None
    ) -> None:
        self._table(name)
        info = read_view(db, name)
        if tick <= info.tick:
            return
        new = None if changes is None else _after(changes, info.tick)
        if new is not None and new.num_rows:
            self._write(db, info, new)
        db.execute("UPDATE _views SET tick = ? WHERE number = ?", (tick, info.number))

    def _write(self, db: sqlite3.Connection, info: ViewInfo, changes: pa.Table) -> None:
        table = ViewTable(info)
        if info.is_stream:
            append_rows(db, table, changes)
        else:
            if not info.null_keys and has_null_keys(changes, info.key):
                _show_null_keys(db, table)
            apply_changes(db, table, changes)
        kept = keep(db, info, changes, self._keeps[info.name.lower()])
        db.execute(
            "UPDATE _views SET kept_after = ?, kept_rows = ?, kept_bytes = ? WHERE number = ?",
            (kept.after, kept.rows, kept.size, info.number),
        )

    def _table(self, name: str) -> ViewTable:
        if name not in self._declared:
            raise UnknownView(name, self._declared)
        return self._declared[name]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The write lock from the start, so that nothing changes between a check and what rests on
        it.
        """
        if self._db is None:
            raise ConfigurationError(
                f"{self.path} was opened for reading only.", fix="open it with ViewStore(path)."
            )
        with self._lock, translated(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


# Declarations


def declared_tick(path: Path, view: str, schema: pa.Schema, key: tuple[str, ...]) -> int:
    """The tick that a view shows, or -1 if there is none; IncompatibleChange if there is one that
    was made with other columns or another key.
    """
    if not path.exists():
        return -1
    with ViewReader(path) as reader:
        stored = {info.name.lower(): info for info in reader.views()}.get(view.lower())
    if stored is None:
        return -1
    _check_same(stored, view, schema, key)
    return stored.tick


def _check_declaration(view: str, schema: pa.Schema, key: tuple[str, ...]) -> None:
    check_name(view, what="view")
    if view.startswith("_") or view.lower().startswith("sqlite_"):
        raise BadName(
            f"{view!r} cannot be a view.",
            fix="choose a name that starts with neither '_' nor 'sqlite_'.",
        )
    to_ddl(schema)
    refuse_duplicates(list(schema), where=f"The view {view!r}")
    if reserved := [name for name in schema.names if name.lower() in {TICK, CHANGE_TYPE}]:
        raise BadSchema(
            f"The view {view!r} has the column {reserved[0]!r}, a name that is reserved.",
            fix="rename it with select.",
        )
    check_key(schema, key, where=f"the view {view!r}")


def _create(
    db: sqlite3.Connection, view: str, schema: pa.Schema, key: tuple[str, ...], max_rows: int
) -> None:
    columns = "name, schema, key, most_rows, tick, null_keys, kept_after, kept_rows, kept_bytes"
    stored = (view, schema_to_bytes(schema), json.dumps(key), None if key else max_rows)
    db.execute(f"INSERT INTO _views ({columns}) VALUES (?, ?, ?, ?, 0, 0, 0, 0, 0)", stored)  # noqa: S608
    table = ViewTable(read_view(db, view))
    db.execute(table.create())
    db.execute(table.create_view(null_keys=False))


def _check_same(stored: ViewInfo, view: str, schema: pa.Schema, key: tuple[str, ...]) -> None:
    if stored.name != view:
        raise BadName(
            f"There is a view {stored.name!r} already, and SQL does not tell case apart.",
            fix=f"choose another name than {view!r}.",
        )
    if differences := list(_differences(stored, schema, key)):
        raise IncompatibleChange(
            f"The view {view!r} was made with other columns or another key than its step gives now:"
            f" {'; '.join(differences)}.",
            fix=(
                "undo the change, or build the view anew beside the old one with `headrace replay"
                " FILE --as VERSION`."
            ),
        )


def _differences(stored: ViewInfo, schema: pa.Schema, key: tuple[str, ...]) -> Iterator[str]:
    before, after = ({field.name: field for field in each} for each in (stored.schema, schema))
    yield from (f"{name!r} is gone" for name in before if name not in after)
    yield from (f"{name!r} is new" for name in after if name not in before)
    for name in before.keys() & after.keys():
        if not before[name].type.equals(after[name].type):
            old, new = (
                to_ddl(pa.schema([each[name].with_nullable(True).with_metadata(None)]))
                for each in (before, after)
            )
            yield f"{old!r} is now {new!r}"
    if stored.key != key:
        yield f"the key was ({', '.join(stored.key)}) and is now ({', '.join(key)})"
    elif before.keys() == after.keys() and stored.schema.names != schema.names:
        yield f"the order of the columns was {', '.join(stored.schema.names)}"


def _merged(stored: pa.Schema, declared: pa.Schema) -> pa.Schema:
    """Comments and the like as declared now; a column that could be null stays one that can."""
    fields = [
        new.with_nullable(new.nullable or old.nullable)
        for old, new in zip(stored, declared, strict=True)
    ]
    return pa.schema(fields, declared.metadata)


def _show_null_keys(db: sqlite3.Connection, table: ViewTable) -> None:
    """From now on SQL must turn back what stands for a null key."""
    db.execute("UPDATE _views SET null_keys = 1 WHERE number = ?", (table.info.number,))
    db.execute(f"DROP VIEW {quoted(table.info.name)}")
    db.execute(table.create_view(null_keys=True))


# Changes


def _checked(table: ViewTable, changes: pa.Table, tick: int) -> pa.Table:
    """The changes with exactly the view's columns, `_tick` and `_change_type`. What is not as
    promised is a fault of whoever computed it.
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
    return changes.select([*info.schema.names, TICK]).append_column(
        CHANGE_TYPE, _kinds(changes, info, where)
    )


def _kinds(changes: pa.Table, info: ViewInfo, where: str) -> pa.ChunkedArray | pa.Array:
    if CHANGE_TYPE not in changes.schema.names and info.is_stream:
        return pa.repeat(INSERT, changes.num_rows)
    if CHANGE_TYPE not in changes.schema.names:
        raise BugError(f"{where} lack the column {CHANGE_TYPE!r}.")
    kinds = changes[CHANGE_TYPE].cast(pa.string())
    unknown = set(pc.unique(kinds).to_pylist()) - set([INSERT] if info.is_stream else CHANGE_TYPES)
    if unknown:
        raise BugError(f"{where} have the change {unknown.pop()!r}.")
    return kinds


def _after(changes: pa.Table, tick: int) -> pa.Table:
    """The changes of later ticks; they are in order."""
    return changes.slice(int(np.searchsorted(changes[TICK].to_numpy(), tick, side="right")))
