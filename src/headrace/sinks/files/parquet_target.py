"""The target `parquet`: files of a directory or an object store, and a manifest that says which of
them form the table.

In append mode each commit adds a file to each partition, and many small files become a large one
now and then. In merge mode the rows of a partition are spread over buckets by their key, one file
each, and a commit rewrites the files whose keys it touches. Data files are written first; the
manifest, which also contains the checkpoint, is the commit (`manifest.commit`).

A file's name begins with the number of the manifest that it was written for. A process that takes
over removes the files up to its own number that its manifest does not name: whoever wrote them was
killed before its commit, or can no longer commit. Files with larger numbers may be a successor's.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import TargetMismatch, TargetUnavailable
from headrace.log.partitioning import partitions_by_key
from headrace.sinks.base import READ_ROWS, Refusal, SinkSpec, Target, refusals
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.sinks.files.file_store import FileStore, LocalFileStore
from headrace.sinks.files.manifest import (
    FOLDER,
    DataFile,
    Manifest,
    Slot,
    TableLayout,
    commit,
    read_manifest,
)
from headrace.sinks.files.partition_folders import (
    check_partition_columns,
    folder_values,
    split_by_folder,
)

_READ_ATTEMPTS = 10
_MAX_OPEN_FILES = 500
_SMALL_BYTES = 8 << 20
_MAX_SMALL_FILES = 32
_COMPACTED_BYTES = 32 << 20
_SUFFIX = ".parquet"
_DATA_FILE = re.compile(r"([^/=]+=[^/]*/)*(?P<number>\d{12})-[0-9a-f]{12}\.parquet")
_ANY_FILE = re.compile(r"([^/=]+=[^/]*/)*[^/]+\.parquet")
_REFUSED_FOLDER = "the values of its partition_by columns are too long for the name of a folder"


def open_store(place: str, table: str | None) -> FileStore:
    """Return the place of a table's files: a directory, or a prefix of an object store."""
    if "://" in place:
        from headrace.sinks.files.object_store import ObjectFileStore

        return ObjectFileStore("/".join([place.rstrip("/"), *([table] if table else [])]))
    return LocalFileStore(Path(place) / table if table else Path(place))


def filter_by_keys(rows: pa.Table, keys: pa.Table, key: list[str], *, keep: bool) -> pa.Table:
    """Return the rows that have one of some keys, or with `keep=False` those that have none of
    them, in their order.

    Row numbers are joined instead of rows, since Arrow cannot join nested columns.
    """
    numbered = rows.select(key).append_column("__n", pa.array(np.arange(rows.num_rows)))
    numbers = numbered.join(
        keys.select(key).cast(rows.select(key).schema),
        key,
        join_type="left semi" if keep else "left anti",
    )["__n"]
    return rows.take(pa.array(np.sort(numbers.to_numpy())))


def damage_of(error: Exception) -> str | None:
    """Return what an error says of a Parquet file: that it "is missing", or "is damaged: …". None
    if the error is not the file's, such as a full disk or a lost connection.
    """
    if isinstance(error, FileNotFoundError):
        return "is missing"
    is_content = isinstance(error, pa.ArrowInvalid) or any(
        word in str(error) for word in ("ecompress", "hecksum", "orrupt", "hrift", "nexpected end")
    )
    return f"is damaged: {error}" if is_content else None


def current_files(place: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the files that form a table now.

    Args:
        place: The directory or URL of the table, with the setting `table` as its last part.

    Returns:
        Paths, or URLs of an object store, for any program that reads Parquet files. A sink that
        runs may replace them.

    Raises:
        TargetUnavailable: The place cannot be read.

    Example:
        >>> from headrace.sinks.files.parquet_target import current_files
        >>> pq.read_table(current_files("lake/orders"))  # doctest: +SKIP
    """
    with open_store(os.fspath(place), None) as store, store.errors():
        return [f"{store.url}/{name}" for name in read_manifest(store).names]


def _setting_text(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


class ParquetTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self.store = open_store(sink.options["path"], sink.table)
        self._partition_by: tuple[str, ...] = sink.options["partition_by"]
        check_partition_columns(shape, self._partition_by)
        self._layout = TableLayout.of(
            shape, buckets=sink.options["buckets"], partition_by=self._partition_by
        )
        self._buckets = self._layout.buckets
        self._is_folder_fixed = set(self._partition_by) <= set(shape.key)
        """Whether a key is always in the same folder."""
        self._first_number = 0
        """Number of the last manifest that there may have been, if there is none now."""
        self._current = self._next = Manifest()

    def close(self) -> None:
        self.store.close()

    def prepare(self) -> None:
        with self.store.errors():
            self.store.prepare(create=self.sink.create)

    def begin(
        self, owner: int, *, resume: bool = False, start_over: bool = False
    ) -> SinkCheckpoint:
        with self.store.errors():
            manifest = read_manifest(self.store)
            if not manifest.number:
                self._check_files_without_manifest(start_over=start_over)
            elif not start_over:
                self._check_layout(manifest)
            if not resume:
                self.store.check_publishing(FOLDER)
        checkpoint = super().begin(owner, resume=resume, start_over=start_over)
        with self.store.errors():
            self._remove_orphans()
        return checkpoint

    def _check_files_without_manifest(self, *, start_over: bool) -> None:
        """Raise TargetMismatch if there are files, which may be somebody else's."""
        names = [name for name in self.store.names(suffix=_SUFFIX) if _ANY_FILE.fullmatch(name)]
        ours = [match for name in names if (match := _DATA_FILE.fullmatch(name))]
        if len(ours) < len(names) or (ours and not start_over):
            raise TargetMismatch(
                f"{self.store.url} has {len(names):,} Parquet files, such as {names[0]}, and no"
                f" manifest in {FOLDER} that says what they are.",
                fix=(
                    "choose another directory with table=… (--table …)."
                    if len(ours) < len(names)
                    else f"bring {FOLDER} back from a backup. Or choose another directory with"
                    " table=… (--table …); --start-over fills this one again, and removes the"
                    " files."
                ),
            )
        self._first_number = max((int(match["number"]) for match in ours), default=0)

    def _check_layout(self, manifest: Manifest) -> None:
        """Raise TargetMismatch if the files are arranged in another way than the sink's."""
        stored = manifest.layout
        if stored is None:
            if not self._has_moved_keys(manifest):
                return
            differences = "another number of buckets"
        elif stored == self._layout or not manifest.files:
            return
        else:
            differences = ", ".join(
                f"{name}={_setting_text(getattr(stored, name))}, and the sink is declared with"
                f" {_setting_text(getattr(self._layout, name))}"
                for name in ("mode", "key", "buckets", "partition_by")
                if getattr(stored, name) != getattr(self._layout, name)
            )
        raise TargetMismatch(
            f"The files in {self.store.url} are written with {differences}.",
            fix=(
                "declare the sink as it was; or choose another directory with table=…"
                " (--table …). --start-over arranges this one anew, and removes the rows that it"
                " has now."
            ),
        )

    def _has_moved_keys(self, manifest: Manifest) -> bool:
        """Return whether keys are not in the buckets where the sink would look for them, in a
        manifest of version 1, which does not have the number of buckets.
        """
        return self.shape.is_merge and any(
            slot.bucket >= self._buckets
            or np.any(
                self._buckets_of(self.store.read_rows(files[0].name, self.shape.key)) != slot.bucket
            )
            for slot, files in manifest.files.items()
        )

    def _remove_orphans(self) -> None:
        manifest = self._current
        named = set(manifest.names)
        self.store.delete(
            [
                name
                for name in self.store.names(suffix=_SUFFIX)
                if name not in named
                and (match := _DATA_FILE.fullmatch(name))
                and int(match["number"]) <= manifest.number
            ]
        )
        self.store.delete(self.store.names(FOLDER, suffix=".tmp"))

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with self.store.errors():
            self._current = read_manifest(self.store)
            if not self._current.number:
                self._current = Manifest(self._first_number)
            self._next = replace(self._current, number=self._current.number + 1)
            yield
            if replace(self._next, number=self._current.number) != self._current:
                self._publish()

    def _publish(self) -> None:
        self._next = replace(self._next, layout=self._layout)
        commit(self.store, self._current, self._next)
        self._current = self._next

    def read_checkpoint(self) -> SinkCheckpoint | None:
        return self._current.checkpoint

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._next = replace(self._next, checkpoint=checkpoint)

    def clear(self) -> None:
        self._next = replace(self._next, files={})

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        files = dict(self._next.files)
        refused: list[Refusal] = []
        folders: dict[str, npt.NDArray[np.intp]] = {}
        for folder, indices in split_by_folder(batch.upserts, self._partition_by):
            if folder is None:
                refused += refusals(batch.upsert_offsets.take(pa.array(indices)), _REFUSED_FOLDER)
            else:
                folders[folder] = indices
        if self.shape.is_merge:
            self._merge_rows(batch, folders, files)
        else:
            for folder, indices in folders.items():
                slot = Slot(folder, 0)
                added = self._write(batch.upserts.take(pa.array(indices)), folder)
                files[slot] = self._compacted(slot, (*files.get(slot, ()), added))
        self._next = replace(
            self._next, files={slot: written for slot, written in files.items() if written}
        )
        return refused

    def _merge_rows(
        self,
        batch: SinkBatch,
        folders: dict[str, npt.NDArray[np.intp]],
        files: dict[Slot, tuple[DataFile, ...]],
    ) -> None:
        """Rewrite the files of each bucket that the batch touches: the old rows of changed keys
        leave the folder where they were, the new ones go where their values say.
        """
        buckets = self._buckets_of(batch.upserts)
        delete_buckets = self._buckets_of(batch.deletes)
        key = list(self.shape.key)
        for bucket in np.unique(np.concatenate([buckets, delete_buckets])).tolist():
            upserts = {
                folder: batch.upserts.take(pa.array(indices[buckets[indices] == bucket]))
                for folder, indices in folders.items()
            }
            deletes = batch.deletes.filter(pa.array(delete_buckets == bucket))
            empty = batch.upserts.select(key).schema.empty_table()
            changed = pa.concat_tables(
                [
                    empty,
                    *(rows.select(key) for rows in upserts.values()),
                    deletes.cast(empty.schema),
                ]
            )
            existing = {slot.folder for slot in files if slot.bucket == bucket}
            if self._is_folder_fixed:
                existing &= {
                    *(folder for folder, rows in upserts.items() if rows.num_rows),
                    *(folder for folder, _ in split_by_folder(deletes, self._partition_by)),
                }
            for folder in sorted(existing | upserts.keys()):
                slot = Slot(folder, bucket)
                added = upserts.get(folder, batch.upserts.slice(0, 0))
                files[slot] = self._rewrite(slot, files.get(slot, ()), changed, added)

    def _rewrite(
        self, slot: Slot, files: tuple[DataFile, ...], changed: pa.Table, added: pa.Table
    ) -> tuple[DataFile, ...]:
        """Write a slot's rows without those of changed keys and with the added ones. Returns the
        new file; the old ones if nothing changes, and nothing if no row is left.
        """
        key = list(self.shape.key)
        if self._partition_by and files and not added.num_rows:
            keys = self._read(files, slot.folder, key)
            if not filter_by_keys(keys, changed, key, keep=True).num_rows:
                return files
        before = self._read(files, slot.folder)
        unchanged = filter_by_keys(before, changed, key, keep=False)
        if not added.num_rows and unchanged.num_rows == before.num_rows:
            return files
        rows = pa.concat_tables([unchanged, added])
        return (self._write(rows, slot.folder),) if rows.num_rows else ()

    def _compacted(self, slot: Slot, files: tuple[DataFile, ...]) -> tuple[DataFile, ...]:
        """Merge small files into one, once there are many."""
        small = [file for file in files if file.size is not None and file.size < _SMALL_BYTES]
        if len(small) < _MAX_SMALL_FILES:
            return files
        total = np.cumsum([file.size for file in small])
        chosen = small[: max(2, int(np.searchsorted(total, _COMPACTED_BYTES)) + 1)]
        merged = self._write(self._read(chosen, slot.folder), slot.folder)
        return (*(file for file in files if file not in chosen), merged)

    def _buckets_of(self, rows: pa.Table) -> npt.NDArray[np.int32]:
        if not rows.num_rows:
            return np.empty(0, np.int32)
        (whole,) = rows.select(list(self.shape.key)).combine_chunks().to_batches()
        return partitions_by_key(whole, self.shape.key, self._buckets)

    def _write(self, rows: pa.Table, folder: str) -> DataFile:
        name = f"{self._next.number:012d}-{uuid.uuid4().hex[:12]}{_SUFFIX}"
        if folder:
            name = f"{folder}/{name}"
        size = self.store.write_rows(name, rows.drop_columns(list(self._partition_by)))
        return DataFile(name, size)

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        """Return checkpoint and rows. A file that a running sink replaces can still be read once it
        is open; so all are opened now, unless there are very many.
        """
        with self.store.errors():
            opened: dict[str, pq.ParquetFile] = {}
            for _ in range(_READ_ATTEMPTS):
                manifest = read_manifest(self.store)
                problems = self._open_files(manifest, opened)
                if not problems or read_manifest(self.store).number == manifest.number:
                    break  # what is missing was not just replaced
            for problem in problems:
                self.unreadable.add(problem)
            return manifest.checkpoint, self._read_chunks(manifest, opened)

    def _open_files(self, manifest: Manifest, opened: dict[str, pq.ParquetFile]) -> list[str]:
        """Open the files of a manifest that are not open, and close the others. Returns what is
        wrong with those that cannot be opened.
        """
        for name in opened.keys() - set(manifest.names):
            opened.pop(name).close()
        problems: list[str] = []
        for name in manifest.names[:_MAX_OPEN_FILES]:
            if name in opened:
                continue
            try:
                opened[name] = self.store.open_rows(name)
            except (OSError, pa.ArrowInvalid) as error:
                if (damage := damage_of(error)) is None:
                    raise
                problems.append(f"the file {self.store.url}/{name} {damage}")
        return problems

    def _read_chunks(
        self, manifest: Manifest, opened: dict[str, pq.ParquetFile]
    ) -> Iterator[pa.Table]:
        with self.store.errors():
            for index, (slot, data_file) in enumerate(
                (slot, file) for slot, files in manifest.files.items() for file in files
            ):
                if data_file.name not in opened and index < _MAX_OPEN_FILES:
                    continue  # it could not be opened
                try:
                    file = opened.pop(data_file.name, None) or self.store.open_rows(data_file.name)
                    with file:
                        for batch in file.iter_batches(batch_size=READ_ROWS):
                            yield self._with_shape(pa.Table.from_batches([batch]), slot.folder)
                except (OSError, pa.ArrowInvalid) as error:
                    if (damage := damage_of(error)) is None:
                        raise
                    if index >= _MAX_OPEN_FILES and self._is_replaced(data_file.name):
                        raise TargetUnavailable(
                            "A running sink has replaced files while they were read.",
                            fix="stop the sink for as long as its target is compared.",
                        ) from error
                    self.unreadable.add(f"the file {self.store.url}/{data_file.name} {damage}")

    def _is_replaced(self, name: str) -> bool:
        return name not in read_manifest(self.store).names

    def lookup(self, keys: pa.Table) -> pa.Table:
        with self.store.errors():
            self._current = read_manifest(self.store)
            buckets = set(self._buckets_of(keys).tolist())
            rows = [
                self._read(files, slot.folder)
                for slot, files in self._current.files.items()
                if slot.bucket in buckets
            ]
            all_rows = pa.concat_tables([self.shape.schema.empty_table(), *rows])
            return filter_by_keys(all_rows, keys, list(self.shape.key), keep=True)

    def _read(
        self, files: Sequence[DataFile], folder: str, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return the rows of some files of a folder, or some of their columns."""
        names = self.shape.schema.names if columns is None else list(columns)
        stored = [name for name in names if name not in self._partition_by]
        tables = [pa.schema([self.shape.schema.field(name) for name in names]).empty_table()]
        for file in files:
            try:
                rows = self.store.read_rows(file.name, None if columns is None else stored)
                tables.append(self._with_shape(rows, folder).select(names))
            except (OSError, pa.ArrowInvalid) as error:
                if (damage := damage_of(error)) is None:
                    raise
                if read_manifest(self.store).number > self._current.number:
                    raise TargetUnavailable(
                        f"Another process has written to {self.store.url} meanwhile.",
                        fix="nothing: its manifest is read again.",
                    ) from error
                raise TargetMismatch(
                    f"The manifest in {self.store.url}/{FOLDER} names the file {file.name}, which"
                    f" {damage}.",
                    fix=(
                        "bring the file back from a backup. Or choose another directory with"
                        " table=… (--table …), or fill this one again with --start-over: both get"
                        " what the topic has now."
                    ),
                ) from error
        return pa.concat_tables(tables)

    def _with_shape(self, rows: pa.Table, folder: str) -> pa.Table:
        """Return rows with the shape's columns: those that the folder stands for, and nulls for
        those that the topic gained later.
        """
        values = folder_values(folder, self.shape.schema)
        arrays = []
        for column in self.shape.schema:
            if column.name in values:
                arrays.append(pa.repeat(values[column.name], rows.num_rows))
            elif column.name in rows.column_names:
                arrays.append(rows[column.name])
            else:
                arrays.append(pa.nulls(rows.num_rows, column.type))
        return pa.table(arrays, names=self.shape.schema.names).cast(self.shape.schema)
