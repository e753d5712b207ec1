"""The target `parquet`: a directory of Parquet files, and a manifest that says which of them form
the table.

In append mode column commit adds a file. In merge mode rows are spread over buckets by their key,
one file column, and a commit rewrites the buckets whose keys it touches. Data files are written and
synced first; the manifest, which also contains the checkpoint, is the commit. A file that no
manifest names is removed at the next start.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.atomic_file import sync_directory
from headrace.errors import NewerFormat, TargetMismatch, TargetUnavailable
from headrace.log.partitioning import partitions_by_key
from headrace.sinks.base import READ_ROWS, Refusal, SinkSpec, Target
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint

# Manifests

VERSION = 1
DIRECTORY = "_headrace"
_RETAINED_MANIFESTS = 3


@dataclass(frozen=True)
class Manifest:
    """Which files form the table, and the sink's checkpoint. Each commit is a new manifest.

    A manifest appears completely or not at all, under a number that can be used once. So a process
    that commits from an older state is refused, and there is nothing to lock.
    """

    number: int = 0
    checkpoint: SinkCheckpoint | None = None
    files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The names of data files by bucket. In append mode there is one bucket with many files."""

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "applied": self.checkpoint.to_json() if self.checkpoint else None,
                "files": {str(bucket): names for bucket, names in self.files.items()},
            }
        )


def _manifest_path(directory: Path, number: int) -> Path:
    return directory / DIRECTORY / f"{number:012d}.json"


def _manifest_numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in (directory / DIRECTORY).glob("*.json"))


def read_manifest(directory: Path) -> Manifest:
    """Return the newest manifest, an empty one if there is none."""
    numbers = _manifest_numbers(directory)
    if not numbers:
        return Manifest()
    stored = json.loads(_manifest_path(directory, numbers[-1]).read_text())
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"The manifest in {directory} was written by a newer Headrace.", fix="upgrade Headrace."
        )
    files = {int(bucket): tuple(names) for bucket, names in stored["files"].items()}
    checkpoint = SinkCheckpoint.from_json(stored["applied"]) if stored["applied"] else None
    return Manifest(numbers[-1], checkpoint, files)


def publish_manifest(directory: Path, manifest: Manifest) -> None:
    """Make a manifest the newest, if its number is free.

    Raises:
        TargetUnavailable: Another process has published a manifest with that number.
    """
    temporary = directory / DIRECTORY / f"{uuid.uuid4().hex}.tmp"
    with temporary.open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, _manifest_path(directory, manifest.number))
    except FileExistsError:
        raise TargetUnavailable(
            "Another process has written to the directory meanwhile.",
            fix="nothing: its manifest is read again.",
        ) from None
    finally:
        temporary.unlink()
    sync_directory(directory / DIRECTORY)


def remove_old_manifests(directory: Path) -> None:
    """Remove all but a few of the newest manifests, which a reader may just have found."""
    for number in _manifest_numbers(directory)[:-_RETAINED_MANIFESTS]:
        _manifest_path(directory, number).unlink(missing_ok=True)
    for temporary in (directory / DIRECTORY).glob("*.tmp"):
        temporary.unlink(missing_ok=True)


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


_READ_ATTEMPTS = 10


@contextmanager
def _driver_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TargetUnavailable(
            f"The files cannot be written or read: {error}.",
            fix="see that the disk is mounted and has room.",
        ) from error


class ParquetTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self.directory = Path(sink.options["path"])
        if sink.table:
            self.directory /= sink.table
        self._buckets: int = sink.options["buckets"] if shape.is_merge else 1
        self._current = self._next = Manifest()

    def close(self) -> None:
        """Nothing is kept open."""

    def prepare(self) -> None:
        with _driver_errors():
            if not self.directory.is_dir() and not self.sink.create:
                raise TargetMismatch(
                    f"There is no directory {self.directory}.",
                    fix="create=True (leave out --no-create), or make it.",
                )
            (self.directory / DIRECTORY).mkdir(parents=True, exist_ok=True)

    def begin(
        self, owner: int, *, resume: bool = False, start_over: bool = False
    ) -> SinkCheckpoint:
        checkpoint = super().begin(owner, resume=resume, start_over=start_over)
        with _driver_errors():
            # Remove files that were replaced, or left behind by a process that was killed before
            # its commit. Another process that still writes is not the owner any more, and cannot
            # commit.
            named = set(read_manifest(self.directory).names)
            for path in self.directory.glob("*.parquet"):
                if path.name not in named:
                    path.unlink(missing_ok=True)
            remove_old_manifests(self.directory)
        return checkpoint

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with _driver_errors():
            self._current = read_manifest(self.directory)
            self._next = replace(self._current, number=self._current.number + 1)
            yield
            if replace(self._next, number=self._current.number) != self._current:
                self._publish()

    def _publish(self) -> None:
        sync_directory(self.directory)
        publish_manifest(self.directory, self._next)
        for name in set(self._current.names) - set(self._next.names):
            (self.directory / name).unlink(missing_ok=True)
        remove_old_manifests(self.directory)

    def read_checkpoint(self) -> SinkCheckpoint | None:
        return self._current.checkpoint

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._next = replace(self._next, checkpoint=checkpoint)

    def clear(self) -> None:
        self._next = replace(self._next, files={})

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        files = dict(self._next.files)
        if not self.shape.is_merge:
            if batch.upserts.num_rows:
                files[0] = (*files.get(0, ()), self._write(batch.upserts))
        else:
            touched = [self._buckets_of(batch.upserts), self._buckets_of(batch.deletes)]
            for bucket in np.unique(np.concatenate(touched)).tolist():
                files[bucket] = self._rewrite_bucket(bucket, batch, files.get(bucket, ()))
        self._next = replace(
            self._next, files={bucket: names for bucket, names in files.items() if names}
        )
        return []

    def _buckets_of(self, rows: pa.Table) -> npt.NDArray[np.int32]:
        if not rows.num_rows:
            return np.empty(0, np.int32)
        (whole,) = rows.select(list(self.shape.key)).combine_chunks().to_batches()
        return partitions_by_key(whole, self.shape.key, self._buckets)

    def _rewrite_bucket(
        self, bucket: int, batch: SinkBatch, names: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Write a bucket's rows with the batch applied. Returns the name of the new file, or
        nothing if no row is left.
        """
        upserts, deletes = (
            rows.filter(pa.array(self._buckets_of(rows) == bucket))
            for rows in (batch.upserts, batch.deletes)
        )
        key = list(self.shape.key)
        changed = pa.concat_tables(
            [upserts.select(key), deletes.select(key).cast(upserts.select(key).schema)]
        )
        unchanged = filter_by_keys(self._read(names), changed, key, keep=False)
        rows = pa.concat_tables([unchanged, upserts])
        return (self._write(rows),) if rows.num_rows else ()

    def _write(self, rows: pa.Table) -> str:
        name = f"{self._next.number:012d}-{uuid.uuid4().hex[:12]}.parquet"
        path = self.directory / name
        pq.write_table(rows, path, compression="zstd")
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return name

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        """Return checkpoint and rows. All files are opened at once: a file that a running sink
        replaces can still be read by those who have it open.
        """
        with _driver_errors():
            for attempt in range(_READ_ATTEMPTS):
                manifest = read_manifest(self.directory)
                try:
                    files = [pq.ParquetFile(self.directory / name) for name in manifest.names]
                except FileNotFoundError:  # it was just replaced
                    if attempt == _READ_ATTEMPTS - 1:
                        raise
                    continue
                return manifest.checkpoint, self._read_chunks(files)
        raise AssertionError

    def _read_chunks(self, files: list[pq.ParquetFile]) -> Iterator[pa.Table]:
        with _driver_errors():
            for file in files:
                with file:
                    for batch in file.iter_batches(batch_size=READ_ROWS):
                        yield self._with_shape(pa.Table.from_batches([batch]))

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _driver_errors():
            rows = self._read(read_manifest(self.directory).names)
            return filter_by_keys(rows, keys, list(self.shape.key), keep=True)

    def _read(self, names: tuple[str, ...] | list[str]) -> pa.Table:
        tables = [
            self._with_shape(pq.read_table(self.directory / name, partitioning=None))
            for name in names
        ]
        return pa.concat_tables([self.shape.schema.empty_table(), *tables])

    def _with_shape(self, rows: pa.Table) -> pa.Table:
        """Return rows with the shape's columns; those that the topic gained later are null."""
        arrays = [
            (
                rows[column.name]
                if column.name in rows.column_names
                else pa.nulls(rows.num_rows, column.type)
            )
            for column in self.shape.schema
        ]
        return pa.table(arrays, names=self.shape.schema.names).cast(self.shape.schema)
