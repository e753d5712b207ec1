"""Tables in DuckDB that follow the views of one store, so that SQL over views has every type that
views have. `query_process.py` holds the replicas of a process and runs queries on them.

A view is loaded when a query first mentions it, a slice at a time, and then follows the store's
retained changes from tick to tick:

    the store at tick 9                    the replica
    counts    retains ticks 2 to 9         counts at tick 7: applies 8 and 9
    sales     retains tick 9 alone         sales at tick 7: is loaded again

All views of a query are brought to one snapshot of the store, which is one commit. The replica is
kept in memory and bounded in bytes: the views that were queried longest ago are evicted first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import (
    CHANGE_TYPE,
    DELETE,
    INSERT,
    TICK,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.errors import ChangesGone, InputError
from headrace.types.schema import quote_identifier
from headrace.views.changes import last_of_each_key
from headrace.views.file import ViewInfo, ViewTable
from headrace.views.reader import Snapshot, ViewReader

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "threads": 1,  # a process with other threads cannot be forked safely
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
}
_SETTINGS = (
    "SET temp_directory = ''",  # a forked process must not write into its parent's spilled blocks
    "SET enable_external_access = false",
    "SET python_enable_replacements = false",
    "SET TimeZone = 'UTC'",
    "SET default_null_order = 'nulls_first_on_asc_last_on_desc'",  # as in Spark
    "SET ieee_floating_point_ops = false",  # a division by zero is null, whatever its types
)
_BATCH = "_batch"
_KEYS = "_keys"
_ROW = "_row"
_MIN_GARBAGE_ROWS = 100_000


@dataclass
class LoadedView:
    """A view in the replica: its table, as of `tick`."""

    info: ViewInfo
    table: str
    tick: int
    rows: int
    next_row: int
    """The number of the next row of a stream, whose oldest rows are deleted."""
    used_at: float
    garbage_rows: int = 0
    """Rows that were deleted or replaced since the table was written."""


class ViewReplica:
    """The replica of one view store, for one thread."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.reader = ViewReader(path)
        self.db = duckdb.connect(":memory:", config=_CONFIG)
        for statement in (*_SETTINGS, f"SET memory_limit = '{max_bytes * 5 // 4}B'"):
            self.db.execute(statement)
        self.views: dict[str, LoadedView] = {}
        self._tables = 0

    def close(self) -> None:
        self.reader.close()
        self.db.close()

    def memory_bytes(self) -> int:
        """The bytes that the replica takes."""
        row = self.db.execute(
            "SELECT coalesce(sum(memory_usage_bytes), 0)::BIGINT FROM duckdb_memory()"
        ).fetchone()
        assert row is not None
        return int(row[0])

    # Loading

    def load(self, name: str) -> Iterator[int]:
        """Load a view as of now, a slice at each step, which gives the rows loaded so far.
        InputError if it is larger than the replica may be.
        """
        self.forget(name)
        self._tables += 1
        table, rows = f"_rows_{self._tables}", 0
        try:
            with self.reader.snapshot() as snap:
                info = snap.view(name)
                empty = _physical(ViewTable(info).schema.empty_table(), info)
                numbers = f"0::BIGINT AS {_ROW}, " if info.is_stream else ""
                self._with_batch(empty, f"CREATE TABLE {table} AS SELECT {numbers}* FROM {_BATCH}")  # noqa: S608
                for batch in snap.batches(name):
                    self._insert(table, info, pa.Table.from_batches([batch]), rows)
                    rows += batch.num_rows
                    self._make_room(name)
                    yield rows
        except (duckdb.OutOfMemoryException, MemoryError):
            self.db.execute(f"DROP TABLE IF EXISTS {table}")
            raise self._too_large(name) from None
        except BaseException:
            self.db.execute(f"DROP TABLE IF EXISTS {table}")
            raise
        self.views[name] = LoadedView(
            info=info,
            table=table,
            tick=info.tick,
            rows=rows,
            next_row=rows,
            used_at=time.monotonic(),
        )
        self._create_view(self.views[name])

    def forget(self, name: str) -> None:
        """Evict a view, if it is loaded."""
        loaded = self.views.pop(name, None)
        if loaded is not None:
            self.db.execute(f"DROP VIEW {quote_identifier(loaded.info.name)}")
            self.db.execute(f"DROP TABLE {loaded.table}")

    def _make_room(self, loading: str) -> None:
        while self.memory_bytes() > self.max_bytes:
            if not self.views:
                raise self._too_large(loading)
            self.forget(min(self.views, key=lambda name: self.views[name].used_at))

    def _too_large(self, name: str) -> InputError:
        return InputError(
            f"The view {name!r} takes more than the {self.max_bytes >> 20:,} MiB that SQL may hold"
            " of views.",
            fix=(
                "read it by key or by range, make a smaller view of it in the pipeline, or set"
                " HEADRACE_SQL_VIEWS_MB to more."
            ),
        )

    def _create_view(self, loaded: LoadedView) -> None:
        info = loaded.info
        columns = [
            f"c{position} AS {quote_identifier(name)}"
            for position, name in enumerate(info.schema.names)
        ]
        ticks = [TICK] if info.is_stream else []
        self.db.execute(
            f"CREATE OR REPLACE VIEW {quote_identifier(info.name)} AS"  # noqa: S608
            f" SELECT {', '.join([*ticks, *columns])} FROM {loaded.table}"
        )

    # Following

    def outdated(self, snap: Snapshot, names: Collection[str]) -> list[str]:
        """Bring views to a snapshot of the store, in one transaction. Returns the names of those
        that are not loaded, or whose changes since then are not retained: they must be loaded.
        """
        missing = []
        self.db.execute("BEGIN")
        try:
            for name in names:
                info, loaded = snap.view(name), self.views.get(name)
                if loaded is None or not self._follow(snap, info, loaded):
                    missing.append(name)
                else:
                    loaded.used_at = time.monotonic()
            self.db.execute("COMMIT")
        except BaseException:
            self.db.execute("ROLLBACK")
            for name in names:  # what they show and what they should show may differ now
                self.forget(name)
            raise
        for name in names:
            if name not in missing:
                self._compact(self.views[name])
        return missing

    def _follow(self, snap: Snapshot, info: ViewInfo, loaded: LoadedView) -> bool:
        """Apply the changes since the replica's tick. False if the view was emptied or created
        again, or if some of the changes are gone.
        """
        if (info.number, info.generation) != (loaded.info.number, loaded.info.generation):
            return False
        if info.tick == loaded.tick:
            return True
        try:
            changes = list(snap.changes_since(info.name, loaded.tick))
        except ChangesGone:
            return False
        if info.is_stream:
            for tick, rows in changes:
                appended = rows.drop_columns([CHANGE_TYPE]).append_column(
                    TICK, pa.repeat(tick, rows.num_rows).cast(pa.int64())
                )
                self._insert(loaded.table, info, appended, loaded.next_row)
                loaded.next_row += rows.num_rows
                loaded.rows += rows.num_rows
            if changes:
                self._trim(info, loaded)
        elif changes:
            rows = pa.concat_tables([rows for _, rows in changes])
            final = last_of_each_key(
                rows.filter(pc.not_equal(rows[CHANGE_TYPE], UPDATE_PREIMAGE)), info.key
            )
            replaced = self._delete_keys(loaded.table, info, final)
            written = final.filter(pc.not_equal(final[CHANGE_TYPE], DELETE))
            self._insert(loaded.table, info, written.select(info.schema.names), 0)
            loaded.garbage_rows += replaced
            loaded.rows += written.num_rows - replaced
        loaded.tick, loaded.info = info.tick, info
        return True

    def _trim(self, info: ViewInfo, loaded: LoadedView) -> None:
        """Delete the oldest rows of a stream beyond those that its view keeps."""
        surplus = loaded.rows - (info.max_rows or 0)
        if surplus > 0:
            first = loaded.next_row - (info.max_rows or 0)
            self.db.execute(f"DELETE FROM {loaded.table} WHERE {_ROW} < {first}")  # noqa: S608
            loaded.rows -= surplus
            loaded.garbage_rows += surplus

    def _compact(self, loaded: LoadedView) -> None:
        """Write a table again once most of what it holds are rows that are gone."""
        if loaded.garbage_rows < max(_MIN_GARBAGE_ROWS, loaded.rows):
            return
        self._tables += 1
        old, loaded.table = loaded.table, f"_rows_{self._tables}"
        order = f" ORDER BY {_ROW}" if loaded.info.is_stream else ""
        self.db.execute(f"CREATE TABLE {loaded.table} AS SELECT * FROM {old}{order}")  # noqa: S608
        self._create_view(loaded)
        self.db.execute(f"DROP TABLE {old}")
        loaded.garbage_rows = 0

    # An earlier tick

    def past_changes(
        self, snap: Snapshot, ticks: Mapping[str, int]
    ) -> list[tuple[LoadedView, int, pa.Table]]:
        """The changes to undo before views show earlier ticks. ChangesGone if they are gone."""
        undone = []
        for name, tick in ticks.items():
            loaded = self.views[name]
            changes = [rows for _, rows in snap.changes_since(name, tick)]
            if changes:
                undone.append((loaded, tick, pa.concat_tables(changes)))
        return undone

    def undo(self, past: Sequence[tuple[LoadedView, int, pa.Table]]) -> None:
        """Undo changes. Only a forked process does so, on its own copy of the replica."""
        for loaded, tick, changes in past:
            info = loaded.info
            if info.is_stream:  # it only grows, so later rows are left out
                self.db.execute(f"DELETE FROM {loaded.table} WHERE {TICK} > {tick}")  # noqa: S608
                continue
            # The first change of a key says what the key was.
            first = last_of_each_key(
                changes.take(pa.array(range(changes.num_rows - 1, -1, -1), pa.int64())), info.key
            )
            self._delete_keys(loaded.table, info, first)
            existed = first.filter(
                pc.invert(pc.is_in(first[CHANGE_TYPE], pa.array([INSERT, UPDATE_POSTIMAGE])))
            )
            self._insert(loaded.table, info, existed.select(info.schema.names), 0)

    # Statements

    def _insert(self, table: str, info: ViewInfo, rows: pa.Table, first_row: int) -> None:
        if not rows.num_rows:
            return
        numbers = ""
        if info.is_stream:
            numbers = f"{first_row} + row_number() OVER () - 1 AS {_ROW}, "
        self._with_batch(
            _physical(rows, info),
            f"INSERT INTO {table} BY NAME SELECT {numbers}* FROM {_BATCH}",  # noqa: S608
        )

    def _delete_keys(self, table: str, info: ViewInfo, rows: pa.Table) -> int:
        """Delete the rows with the keys of `rows`: null equals null, and NaN equals NaN. Returns
        how many there were.
        """
        columns = [f"c{info.schema.get_field_index(name)}" for name in info.key]
        same = " AND ".join(f"{table}.{name} IS NOT DISTINCT FROM b.{name}" for name in columns)
        keys = rows.select(list(info.key)).rename_columns(columns)
        # Not on the Arrow data itself: DuckDB filters its scans by a join's keys, and loses NaN.
        statement = f"CREATE OR REPLACE TABLE {_KEYS} AS SELECT * FROM {_BATCH}"  # noqa: S608
        self._with_batch(keys, statement)
        deleted = self.db.execute(
            f"DELETE FROM {table} WHERE EXISTS (SELECT 1 FROM {_KEYS} b WHERE {same})"  # noqa: S608
        ).fetchall()
        return int(deleted[0][0])

    def _with_batch(self, rows: pa.Table, statement: str) -> list[Any]:
        self.db.register(_BATCH, rows)
        try:
            return self.db.execute(statement).fetchall()
        finally:
            self.db.unregister(_BATCH)


def _physical(rows: pa.Table, info: ViewInfo) -> pa.Table:
    """Rows under the names of the replica's columns, without metadata."""
    names = [
        name if name == TICK else f"c{info.schema.get_field_index(name)}"
        for name in rows.schema.names
    ]
    return rows.rename_columns(names).replace_schema_metadata(None)
