"""Staged rows: rows that a Spark task writes for a transaction of the driver, one Arrow file per
partition, on storage that both can access.

Kafka cannot store rows that are invisible until another process commits them. So tasks write them
durably to files, and the driver's transaction sends them. The files hold keys and values as Kafka
stores them: the tasks encode them in parallel, and the driver only passes them on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import HEADERS_COLUMN
from headrace.errors import LogUnavailable, NewerFormat, TransactionTimedOut
from headrace.log.kafka.config import DEFAULT_MAX_BYTES
from headrace.log.kafka.producer import append_batch
from headrace.log.kafka.records import record_columns, record_parts
from headrace.log.kafka.sender import RecordBlock
from headrace.log.partitioning import PartitionAssigner
from headrace.log.values import Staged, TopicInfo
from headrace.names import check_name

FORMAT_KEY, FORMAT = b"headrace.staged", b"2"
MAX_BATCH_ROWS = 50_000


class StagedFileWriter:
    """Writes batches of one topic into one file per partition. The format's version is in the
    metadata of each file.
    """

    def __init__(
        self,
        info: TopicInfo,
        directory: str | None,
        group: str | None,
        partition: int | None,
        max_bytes: int,
    ) -> None:
        self._info, self._partition, self._max_bytes = info, partition, max_bytes
        self._directory = _group_directory(group, directory) / uuid.uuid4().hex
        self._assigner = PartitionAssigner()
        self._files: dict[int, tuple[Path, pa.RecordBatchFileWriter, int]] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        numbers = self._assigner.assign(self._info, batch, self._partition)
        columns = record_columns(self._info, batch, self._max_bytes)
        for number in np.unique(numbers).tolist():
            part = columns.filter(pa.array(numbers == number))
            path, writer, rows = self._files.get(number) or self._begin(number, columns.schema)
            writer.write_batch(part)
            self._files[number] = (path, writer, rows + part.num_rows)

    def _begin(self, number: int, schema: pa.Schema) -> tuple[Path, pa.RecordBatchFileWriter, int]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LogUnavailable(
                f"Rows cannot be staged in {self._directory}: {error.strerror}.",
                fix="name a directory that can be written.",
            ) from None
        path = self._directory / f"{self._info.name}.{number}.arrow"
        return path, pa.ipc.new_file(path, schema.with_metadata({FORMAT_KEY: FORMAT})), 0

    def finish(self) -> Staged:
        for path, writer, _ in self._files.values():
            writer.close()
            _sync(path)
        if self._files:
            _sync(self._directory)
        partitions = {number: (str(path), rows) for number, (path, _, rows) in self._files.items()}
        return Staged(self._info.name, partitions, sum(rows for _, rows in partitions.values()))

    def abandon(self) -> None:
        """Remove what was written, since no transaction will adopt it."""
        for _, writer, _ in self._files.values():
            writer.close()
        discard(
            Staged(
                self._info.name,
                {number: (str(path), rows) for number, (path, _, rows) in self._files.items()},
                0,
            )
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _group_directory(group: str | None, directory: str | None) -> Path:
    """The directory of a group's staged rows. Each task has a directory of its own in it."""
    base = Path(directory or Path(tempfile.gettempdir()) / "headrace-staging")
    return base if group is None else base / check_name(group, what="group")


def stage(
    info: TopicInfo,
    batches: Iterable[pa.RecordBatch],
    directory: str | None,
    group: str | None = None,
    *,
    partition: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Staged:
    """Write rows to staging files. If that fails, nothing is left."""
    writer = StagedFileWriter(info, directory, group, partition, max_bytes)
    try:
        for batch in batches:
            for first in range(0, batch.num_rows, MAX_BATCH_ROWS):
                writer.write(_check_batch(batch.slice(first, MAX_BATCH_ROWS), info))
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _check_batch(batch: pa.RecordBatch, info: TopicInfo) -> pa.RecordBatch:
    """A batch that fits the topic. It may have a column `_headers`."""
    at = batch.schema.get_field_index(HEADERS_COLUMN)
    if at < 0:
        return append_batch(batch, info, None)
    rows = append_batch(batch.remove_column(at), info, None)
    return rows.append_column(batch.schema.field(at), batch.column(at))


def check_staged(staged: Staged) -> None:
    """TransactionTimedOut if staged files are gone."""
    for file, _ in staged.partitions.values():
        if not Path(file).exists():
            raise TransactionTimedOut(
                f"Rows that were staged in {file} are gone.",
                fix="run the batch again; stage on storage that all machines share.",
            )


def staged_blocks(staged: Staged) -> Iterator[RecordBlock]:
    """The staged records, a bounded block at a time."""
    check_staged(staged)
    for number, (file, _) in sorted(staged.partitions.items()):
        with pa.OSFile(file) as source, pa.ipc.open_file(source) as reader:
            _check_format(file, reader.schema.metadata or {})
            for index in range(reader.num_record_batches):
                yield RecordBlock(staged.topic, number, *record_parts(reader.get_batch(index)))


def _check_format(file: str, metadata: Mapping[bytes, bytes]) -> None:
    if metadata.get(FORMAT_KEY) != FORMAT:
        raise NewerFormat(
            f"{file} is not a staged file that this version reads.",
            fix="use one version of headrace on all machines.",
        )


def discard(staged: Staged) -> None:
    """Remove staged files, and their directories once empty."""
    files = [Path(file) for file, _ in staged.partitions.values()]
    for file in files:
        file.unlink(missing_ok=True)
    for directory in {file.parent for file in files}:
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def discard_group(group: str, directory: str | None) -> None:
    """Remove everything that was staged under a group's name."""
    shutil.rmtree(_group_directory(group, directory), ignore_errors=True)
