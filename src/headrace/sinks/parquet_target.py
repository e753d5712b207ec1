"""The target `parquet`: a directory of Parquet files, and a manifest that says which of them are
the table.

In append mode each commit adds a file. In merge mode rows are spread over buckets by their key, one
file each, and a commit writes those anew whose keys it touches. Data files are written and synced
first; the manifest is the commit. A file that no manifest names is removed at the next start.
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
from headrace.sinks.base import PIECE_ROWS, Applied, Batch, Refusal, Shape, SinkSpec, Target

# The manifest of a directory of Parquet files: which files are the table, and the sink's ledger.
# Each commit is a new one, under the next number.
#
# A manifest appears whole or not at all, and a number can be taken once: so whoever writes from an
# older state is refused, and there is nothing to lock.


VERSION = 1
DIRECTORY = "_headrace"
_KEPT = 3


@dataclass(frozen=True)
class Manifest:
    """`files` are the data files by bucket (in append mode there is one bucket, with many
    files).
    """

    number: int = 0
    applied: Applied | None = None
    files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "applied": self.applied.to_json() if self.applied else None,
                "files": {str(bucket): names for bucket, names in self.files.items()},
            }
        )


def _path(directory: Path, number: int) -> Path:
    return directory / DIRECTORY / f"{number:012d}.json"


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in (directory / DIRECTORY).glob("*.json"))


def read(directory: Path) -> Manifest:
    """The newest one."""
    numbers = _numbers(directory)
    if not numbers:
        return Manifest()
    stored = json.loads(_path(directory, numbers[-1]).read_text())
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"The manifest in {directory} was written by a newer Headrace.", fix="upgrade Headrace."
        )
    files = {int(bucket): tuple(names) for bucket, names in stored["files"].items()}
    return Manifest(
        numbers[-1], Applied.from_json(stored["applied"]) if stored["applied"] else None, files
    )


def publish(directory: Path, manifest: Manifest) -> None:
    """Make a manifest the newest, if its number is free."""
    waiting = directory / DIRECTORY / f"{uuid.uuid4().hex}.tmp"
    with waiting.open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(waiting, _path(directory, manifest.number))
    except FileExistsError:
        raise TargetUnavailable(
            "Another process has written to the directory meanwhile.",
            fix="nothing: it is looked at again.",
        ) from None
    finally:
        waiting.unlink()
    sync_directory(directory / DIRECTORY)


def forget_older(directory: Path) -> None:
    """A few stay, so that whoever just found one can read it."""
    for number in _numbers(directory)[:-_KEPT]:
        _path(directory, number).unlink(missing_ok=True)
    for left in (directory / DIRECTORY).glob("*.tmp"):
        left.unlink(missing_ok=True)


# Rows by key, in Arrow: those that have one of some keys, or none of them.


def having(rows: pa.Table, keys: pa.Table, key: list[str], *, wanted: bool) -> pa.Table:
    """By number, since Arrow joins no nested columns; in their order."""
    numbered = rows.select(key).append_column("__n", pa.array(np.arange(rows.num_rows)))
    found = numbered.join(
        keys.select(key).cast(rows.select(key).schema),
        key,
        join_type="left semi" if wanted else "left anti",
    )["__n"]
    return rows.take(pa.array(np.sort(found.to_numpy())))


_ATTEMPTS = 10


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TargetUnavailable(
            f"The files cannot be written or read: {error}.",
            fix="see that the disk is there and has room.",
        ) from error


class ParquetTarget(Target):
    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
        super().__init__(sink, shape)
        self.directory = Path(sink.options["path"])
        if sink.table:
            self.directory /= sink.table
        self._buckets: int = sink.options["buckets"] if shape.is_merge else 1
        self._before = self._next = Manifest()

    def close(self) -> None:
        """Nothing is kept open."""

    def prepare(self) -> None:
        with _translated():
            if not self.directory.is_dir() and not self.sink.create:
                raise TargetMismatch(
                    f"There is no directory {self.directory}.",
                    fix="create=True (leave out --no-create), or make it.",
                )
            (self.directory / DIRECTORY).mkdir(parents=True, exist_ok=True)

    def begin(self, owner: int, *, resume: bool = False, start_over: bool = False) -> Applied:
        mine = super().begin(owner, resume=resume, start_over=start_over)
        with _translated():
            self._tidy_up()
        return mine

    def _tidy_up(self) -> None:
        """Files that were replaced, or that a process left which was killed before its commit.
        Nobody else writes now; one that does is not the newest, and its file is of no use.
        """
        named = set(read(self.directory).names)
        for path in self.directory.glob("*.parquet"):
            if path.name not in named:
                path.unlink(missing_ok=True)
        forget_older(self.directory)

    # A commit

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with _translated():
            self._before = read(self.directory)
            self._next = replace(self._before, number=self._before.number + 1)
            yield
            if self._next.applied != self._before.applied or self._next.files != self._before.files:
                self._publish()

    def _publish(self) -> None:
        sync_directory(self.directory)
        publish(self.directory, self._next)
        for name in set(self._before.names) - set(self._next.names):
            (self.directory / name).unlink(missing_ok=True)
        forget_older(self.directory)

    def read_applied(self) -> Applied | None:
        return self._before.applied

    def write_applied(self, applied: Applied) -> None:
        self._next = replace(self._next, applied=applied)

    def clear(self) -> None:
        self._next = replace(self._next, files={})

    def merge(self, batch: Batch) -> list[Refusal]:
        files = dict(self._next.files)
        if not self.shape.is_merge:
            if batch.upserts.num_rows:
                files[0] = (*files.get(0, ()), self._write(batch.upserts))
        else:
            for bucket in np.unique(
                np.concatenate([self._bucket_of(batch.upserts), self._bucket_of(batch.deletes)])
            ):
                files[int(bucket)] = self._merged(int(bucket), batch, files.get(int(bucket), ()))
        self._next = replace(
            self._next, files={bucket: names for bucket, names in files.items() if names}
        )
        return []

    def _bucket_of(self, rows: pa.Table) -> npt.NDArray[np.int32]:
        if not rows.num_rows:
            return np.empty(0, np.int32)
        (whole,) = rows.select(list(self.shape.key)).combine_chunks().to_batches()
        return partitions_by_key(whole, self.shape.key, self._buckets)

    def _merged(self, bucket: int, batch: Batch, names: tuple[str, ...]) -> tuple[str, ...]:
        """The rows of a bucket, without those that have changed, and with what they are now."""
        upserts, deletes = (
            rows.filter(pa.array(self._bucket_of(rows) == bucket))
            for rows in (batch.upserts, batch.deletes)
        )
        key = list(self.shape.key)
        changed = pa.concat_tables(
            [upserts.select(key), deletes.select(key).cast(upserts.select(key).schema)]
        )
        rows = pa.concat_tables([having(self._read(names), changed, key, wanted=False), upserts])
        return (self._write(rows),) if rows.num_rows else ()

    def _write(self, rows: pa.Table) -> str:
        name = f"{self._next.number:012d}-{uuid.uuid4().hex[:12]}.parquet"
        path = self.directory / name
        pq.write_table(rows, path, compression="zstd")
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return name

    # Reading back

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        """A file that a sink which runs meanwhile replaces is still there for who has it open, so
        all are opened at once.
        """
        with _translated():
            for attempt in range(_ATTEMPTS):
                manifest = read(self.directory)
                try:
                    files = [pq.ParquetFile(self.directory / name) for name in manifest.names]
                except FileNotFoundError:  # one that was just replaced
                    if attempt == _ATTEMPTS - 1:
                        raise
                    continue
                return manifest.applied, self._pieces(files)
        raise AssertionError

    def _pieces(self, files: list[pq.ParquetFile]) -> Iterator[pa.Table]:
        with _translated():
            for file in files:
                with file:
                    for batch in file.iter_batches(batch_size=PIECE_ROWS):
                        yield self._fitted(pa.Table.from_batches([batch]))

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _translated():
            return having(
                self._read(read(self.directory).names), keys, list(self.shape.key), wanted=True
            )

    def _read(self, names: tuple[str, ...] | list[str]) -> pa.Table:
        tables = [
            self._fitted(pq.read_table(self.directory / name, partitioning=None)) for name in names
        ]
        return pa.concat_tables([self.shape.schema.empty_table(), *tables])

    def _fitted(self, rows: pa.Table) -> pa.Table:
        """Columns that the topic gained since are null."""
        arrays = [
            (
                rows[each.name]
                if each.name in rows.column_names
                else pa.nulls(rows.num_rows, each.type)
            )
            for each in self.shape.schema
        ]
        return pa.table(arrays, names=self.shape.schema.names).cast(self.shape.schema)
