"""Writing a stream into a topic, exactly once: `df.writeStream.format("headrace").option("writer",
"a name of its own")`.

Each batch is one transaction of the log: its rows, and two notes. One says which batch of this
writer came last and what its rows were (its digest); the other, which run of a query writes under
this name. Spark repeats a batch after a crash, and numbers batches anew with a new checkpoint. So:

    a higher number than the last     is new, and stored the last number, the same rows    is a
    repeat, and skipped anything else                     means another checkpoint, and is refused:
    skipping it would lose rows, storing it would double them

Of two queries that write under one name, the newer goes on and the older is refused at its next
batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from headrace.columnar.buffers import compact_offsets, list_elements, map_entries
from headrace.errors import (
    BatchConflict,
    ConfigurationError,
    NewerFormat,
    NoteConflict,
    TransactionFenced,
)
from headrace.log.api import Log
from headrace.log.rows import to_batch
from headrace.log.spark.columns import with_default_change
from headrace.log.spark.options import WriteOptions, close_shared_log, shared_log
from headrace.log.values import Staged, TopicInfo

# What the rows of a batch are, in a few bytes: the same for the same rows, whatever their order and
# however they were split into tasks.
#
# The stream writer stores it with each batch, and so knows a batch that Spark repeats from one that
# has the same number by accident. Every row gets a 64-bit hash, computed column by column with
# numpy; a batch's digest is the number of rows and two sums over their hashes. A null counts
# nothing, so that a column added to the topic meanwhile does not change the digest of older rows.
# It is no protection against someone who looks for collisions.


Hashes = npt.NDArray[np.uint64]
types = pa.types
_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7)
_KEEP_BYTES = np.array([_MASK, *((1 << (8 * count)) - 1 for count in range(1, 8))], np.uint64)
"""For a length modulo 8: which bits of a value's last word belong to it."""


@dataclass(frozen=True)
class Digest:
    """Digests of parts add up to the digest of the whole."""

    rows: int = 0
    sums: tuple[int, int] = (0, 0)

    def __add__(self, other: Digest) -> Digest:
        first, second = (sum(pair) & _MASK for pair in zip(self.sums, other.sums, strict=True))
        return Digest(self.rows + other.rows, (first, second))

    @property
    def text(self) -> str:
        return "".join(f"{each:016x}" for each in self.sums)


def digest(batch: pa.RecordBatch) -> Digest:
    rows = _combined(
        {field.name: column for field, column in zip(batch.schema, batch.columns, strict=True)},
        batch.num_rows,
    )
    first, second = (int(_mixed(rows + salt).sum(dtype=np.uint64)) for salt in (_FIRST, _SECOND))
    return Digest(batch.num_rows, (first, second))


def _combined(columns: dict[str, pa.Array], count: int) -> Hashes:
    """One hash for each row of several columns. Which value stands in which column matters; a null
    adds nothing.
    """
    total = np.zeros(count, np.uint64)
    for name, column in columns.items():
        hashes = _hashes(column)
        total += np.where(hashes == 0, hashes, _mixed(hashes + _seed(name)))
    return total


def _seed(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))


def _mixed(values: Hashes) -> Hashes:
    """Spreads every bit over all others (the finalizer of splitmix64). Works in place: give it an
    array of its own.
    """
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _hashes(array: pa.Array) -> Hashes:
    """A hash for each value; 0 for a null, and for practically nothing else."""
    if array.null_count == len(array):
        return np.zeros(len(array), np.uint64)
    hashes = _values(array)
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _values(array: pa.Array) -> Hashes:
    """A hash for each value; anything for a null."""
    kind = array.type
    if types.is_struct(kind):
        parts = dict(zip((child.name for child in kind), array.flatten(), strict=True))
        return _mixed(_combined(parts, len(array)) + _STEP)
    if types.is_map(kind):
        keys, items = map_entries(array)
        return _sequences(
            _combined({"key": keys, "value": items}, len(keys)), compact_offsets(array)
        )
    if types.is_list(kind):
        return _sequences(_hashes(list_elements(array)), compact_offsets(array))
    if types.is_string(kind) or types.is_binary(kind):
        return _texts(array)
    if types.is_boolean(kind):
        return _mixed(array.cast(pa.uint8()).fill_null(0).to_numpy().astype(np.uint64) + _STEP)
    return _fixed(array)


def _fixed(array: pa.Array) -> Hashes:
    """Numbers and times, by their bits."""
    width = array.type.bit_width // 8
    if width == 16:  # a decimal
        words = np.frombuffer(array.buffers()[1], np.uint64, 2 * len(array), 16 * array.offset)
        return _mixed(words[0::2] + _STEP) + _mixed(words[1::2] + _FIRST)
    bits = np.frombuffer(array.buffers()[1], f"u{width}", len(array), width * array.offset)
    return _mixed(bits.astype(np.uint64) + _STEP)


def _sequences(hashes: Hashes, offsets: pa.Array) -> Hashes:
    """Lists of things that have hashes already; the order within a list matters."""
    bounds = offsets.to_numpy().astype(np.int64)
    lengths = np.diff(bounds)
    places = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    return _summed(hashes, places, bounds, lengths)


def _summed(
    hashes: Hashes,
    places: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> Hashes:
    """For each sequence the sum over its things, each mixed with its place, mixed with the
    length.
    """
    placed = _mixed(hashes + (places.astype(np.uint64) + np.uint64(1)) * _STEP)
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(placed, dtype=np.uint64)])
    return _mixed(
        running[bounds[1:]]
        - running[bounds[:-1]]
        + (lengths.astype(np.uint64) + np.uint64(1)) * _FIRST
    )


def _texts(array: pa.Array) -> Hashes:
    """Texts and bytes, eight bytes at a time."""
    offsets = np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset).astype(
        np.int64
    )
    lengths = np.diff(offsets)
    counts = (lengths + 7) // 8
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    places = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
    words = _words(
        array.buffers()[2],
        int(offsets[0]),
        int(offsets[-1]),
        np.repeat(offsets[:-1], counts) + 8 * places,
    )
    has_words = counts > 0
    words[bounds[1:][has_words] - 1] &= _KEEP_BYTES[lengths[has_words] % 8]
    return _summed(words, places, bounds, lengths)


def _words(
    data: pa.Buffer | None, start: int, stop: int, positions: npt.NDArray[np.int64]
) -> Hashes:
    """Eight bytes from each position on, wherever it lies; behind the end there are zeros."""
    padded = np.zeros(stop - start + 8, np.uint8)
    if data is not None:
        padded[: stop - start] = np.frombuffer(data, np.uint8, stop - start, start)
    sliding: Hashes = np.ndarray((stop - start + 1,), np.dtype("<u8"), padded, strides=(1,))
    return sliding[positions - start]


# What a task of a writing query does: it checks its rows against the topic and puts them aside in
# the log, where nobody sees them.
#
# What it returns is small and goes to the driver, which makes the rows of all tasks visible in one
# transaction. All tasks of a job put their rows aside under one group's name, by which the driver
# discards what is left in the end, also by tasks that failed or were killed. What a task leaves
# that outlives even that is swept a day later.


RUN_PROPERTY, QUERY_PROPERTY, BATCH_PROPERTY = (
    "spark.jobGroup.id",
    "sql.streaming.queryId",
    "streaming.sql.batchId",
)
"""How Spark tells a task which streaming query it works for: a query's jobs are in a group that is
named after its run.
"""


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """The rows of one task. `run` and `query` are Spark's ids of the streaming query, if it is
    one.
    """

    staged: Staged
    digest: Digest
    run: str | None = None
    query: str | None = None


def check_staging(options: WriteOptions) -> None:
    if options.staging_directory is not None and not options.address.log.startswith("kafka://"):
        raise ConfigurationError(
            "The option 'stagingDirectory' is for a log on Kafka; the embedded log puts rows aside"
            " in itself.",
            fix="leave it out.",
        )


def task_property(name: str) -> str | None:
    task = TaskContext.get()
    return task.getLocalProperty(name) if task is not None else None


def stage_rows(
    options: WriteOptions, batches: Iterable[pa.RecordBatch], *, group: str, digested: bool
) -> TaskResult:
    """Put a task's rows aside; returns what the driver needs to make them visible."""
    log = shared_log(options.address)
    info = log.topic(options.topic)
    digests: list[Digest] = []
    rows = _fitted(batches, info, digests if digested else None)
    staged = log.stage(options.topic, rows, directory=options.staging_directory, group=group)
    return TaskResult(
        staged, sum(digests, Digest()), task_property(RUN_PROPERTY), task_property(QUERY_PROPERTY)
    )


def group_name(*parts: object) -> str:
    """A name for what is staged together: short, and the same wherever it is asked for."""
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def _fitted(
    batches: Iterable[pa.RecordBatch], info: TopicInfo, digests: list[Digest] | None
) -> Iterator[pa.RecordBatch]:
    for rows in batches:
        batch = to_batch(with_default_change(rows, info), info.arrow_schema, topic=info.name)
        if digests is not None:
            digests.append(digest(batch))
        yield batch


def task_results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """What the tasks that succeeded wrote, in the order of the tasks: so a partition's rows keep
    their order.
    """
    return [message for message in messages if isinstance(message, TaskResult)]


def discard_staged(options: WriteOptions, group: str) -> None:
    """Remove what a job put aside and no transaction took."""
    shared_log(options.address).discard_group(group, directory=options.staging_directory)


# Writing a DataFrame into a topic: `df.write.format("headrace").mode("append")`. All of its rows
# become visible at once, or none.


COMMIT_TIMEOUT = "10 minutes"
"""How long the driver's transaction may take. It begins when all rows are staged, so that only on
Kafka, where rows are then sent, it takes long.
"""
TRANSACTION_IDS = 16
"""Concurrent writes need different transaction ids, and a log remembers every id it has seen: so
there are a few, taken at random.
"""
ATTEMPTS = 5


class TopicWriter(DataSourceArrowWriter):
    """Made once for a query, then copied to its tasks and back to the driver."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options
        self.group = group_name(uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return stage_rows(self.options, iterator, group=self.group, digested=False)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        parts = [part for part in task_results(messages) if part.staged.rows]
        try:
            if parts:
                self._commit(shared_log(self.options.address), parts)
        except BaseException:
            close_shared_log(self.options.address)
            raise
        discard_staged(self.options, self.group)

    def _commit(self, log: Log, parts: list[TaskResult]) -> None:
        """One transaction. Another write that took the same id at the same moment is no reason to
        fail: nothing was stored, so it is tried again.
        """
        for attempt in range(ATTEMPTS):
            try:
                with log.transaction(
                    f"spark-batch.{random.randrange(TRANSACTION_IDS)}",  # noqa: S311
                    timeout=COMMIT_TIMEOUT,
                ) as transaction:
                    for part in parts:
                        transaction.adopt(part.staged)
            except TransactionFenced:
                if attempt + 1 == ATTEMPTS:
                    raise
            else:
                return

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        discard_staged(self.options, self.group)


VERSION = 1
PAST_RUNS = 16
"""So many runs are remembered as replaced by a newer one."""


@dataclass(frozen=True)
class WriterBatch:
    """The note of a writer and topic: the last batch stored."""

    batch: int
    rows: int
    digest: str
    query: str | None = None
    version: int = VERSION


@dataclass(frozen=True)
class WriterOwner:
    """The note of a writer: the run that writes under this name, and those before it."""

    run: str
    past: tuple[str, ...] = ()
    version: int = VERSION


class TopicStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions) -> None:
        if options.writer is None:
            raise ConfigurationError(
                "A streaming write needs the option 'writer'.",
                fix=(
                    "give each query a name of its own, as in .option('writer', 'large-orders'),"
                    " and keep it: by it a repeated batch is recognised."
                ),
            )
        self.options, self.name = options, options.writer
        self.batch_note = f"spark-writer.{self.name}.{options.topic}"
        self.owner_note = f"spark-owner.{self.name}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return stage_rows(
            self.options, iterator, group=self._group(task_property(BATCH_PROPERTY)), digested=True
        )

    def _group(self, batch: int | str | None) -> str:
        return group_name(self.options.address.log, self.options.topic, self.name, batch)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - Spark's names
        discard_staged(self.options, self._group(batchId))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """The commit, step by step:

        1. read what is stored of this writer
        2. refuse an older run and a number that is neither new nor a repeat; skip a repeat
        3. in one transaction: the rows of all tasks, the batch's note, the owner's note, each note
           on condition that it is still as read
        4. if that failed and nobody can say whether it happened, look: the note says it
        5. discard what was staged and not taken; if the commit failed, Spark calls `abort`, which
           does it
        """
        parts, log = task_results(messages), shared_log(self.options.address)
        batch = WriterBatch(batchId, *_total(parts), next((part.query for part in parts), None))
        last, owner = log.note(self.batch_note), log.note(self.owner_note)  # 1
        new_owner = self._owned(owner, next((part.run for part in parts), None))  # 2
        if not self._is_repeat(batch, last):
            self._store(
                log,
                parts,
                batch,
                {self.batch_note: (last, _dump(batch)), self.owner_note: (owner, new_owner)},
            )
        discard_staged(self.options, self._group(batchId))  # 5

    def _store(
        self,
        log: Log,
        parts: list[TaskResult],
        batch: WriterBatch,
        notes: dict[str, tuple[str | None, str | None]],
    ) -> None:
        try:
            with log.transaction(self.name, timeout=COMMIT_TIMEOUT) as transaction:  # 3
                for part in parts:
                    if part.staged.rows:
                        transaction.adopt(part.staged)
                for name, (before, after) in notes.items():
                    transaction.set_note(name, after, expect=before)
        except (NoteConflict, TransactionFenced) as error:
            raise TransactionFenced(
                f"Another query wrote as {self.name!r} at the same moment. Nothing of this batch is"
                " stored.",
                fix="stop one of the two queries, or give each its own writer.",
            ) from error
        except BaseException:
            close_shared_log(self.options.address)
            if not self._happened(batch):  # 4
                raise

    def _owned(self, owner: str | None, run: str | None) -> str | None:
        """The owner's note after this commit. TransactionFenced if this run was replaced."""
        known = WriterOwner(**_load(owner)) if owner is not None else None
        if run is None or (known is not None and known.run == run):
            return owner
        if known is not None and run in known.past:
            raise TransactionFenced(
                f"A newer query writes as {self.name!r}; this one (run {run}) was replaced by it"
                f" (run {known.run}). Nothing of this batch is stored.",
                fix="stop one of the two queries, or give each its own writer.",
            )
        return _dump(
            WriterOwner(run, (known.run, *known.past)[:PAST_RUNS] if known is not None else ())
        )

    def _is_repeat(self, batch: WriterBatch, stored: str | None) -> bool:
        """Whether the batch is stored already. BatchConflict if its number is taken by other rows,
        or was passed long ago.
        """
        if stored is None:
            return False
        last = WriterBatch(**_load(stored))
        if batch.batch > last.batch:
            return False
        if (batch.batch, batch.rows, batch.digest) == (last.batch, last.rows, last.digest):
            return True
        raise self._conflict(batch, last)

    def _conflict(self, batch: WriterBatch, last: WriterBatch) -> BatchConflict:
        where = f"as {self.name!r} into {self.options.topic!r}"
        if batch.batch < last.batch:
            found = (
                f"The query writes batch {batch.batch} {where}, but batch {last.batch} is stored"
                " already: it runs with another checkpoint than before."
            )
        else:
            found = (
                f"Batch {batch.batch} {where} is stored already, with other rows ({last.rows} rows,"
                f" digest {last.digest}) than the query has now ({batch.rows} rows, digest"
                f" {batch.digest}): it runs with another checkpoint, or does not give the same rows"
                " when it is repeated."
            )
        return BatchConflict(
            f"{found} Nothing of this batch is stored.",
            fix=(
                "restore the old checkpoint; or, if rows may be written again from where the query"
                " starts now, give it another writer name. A query that is repeated must not depend"
                " on chance or on the present time."
            ),
        )

    def _happened(self, batch: WriterBatch) -> bool:
        """Whether a commit that failed was stored after all."""
        return shared_log(self.options.address).note(self.batch_note) == _dump(batch)


def _total(parts: list[TaskResult]) -> tuple[int, str]:
    total = sum((part.digest for part in parts), Digest())
    return total.rows, total.text


def _dump(note: WriterBatch | WriterOwner) -> str:
    return json.dumps(asdict(note))


def _load(note: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(note)
    if stored["version"] != VERSION:
        raise NewerFormat(
            f"A streaming writer's note has format {stored['version']}; this Headrace knows"
            f" {VERSION}.",
            fix="upgrade Headrace.",
        )
    return stored
