"""The target `delta`: a Delta table.

A batch is one commit of Delta's log: an append, or a merge by key. The checkpoint is in Delta's
transaction identifiers, which are names with a number field: the owner, the epoch, and the next
offset of field partition. A commit is made on top of exactly the version that was read, and fails
if there is a newer one by then. So an older owner cannot write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import MissingExtra, TargetMismatch, TargetUnavailable, nearest
from headrace.sinks.base import READ_ROWS, Refusal, SinkSpec, Target
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.sinks.files.object_store_access import access_error, is_plain_http, shorten_message
from headrace.sinks.files.parquet_target import damage_of, filter_by_keys
from headrace.types.sqlite_codec import is_time_text, time_array, time_text

try:
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError, SchemaMismatchError
except ImportError as error:
    raise MissingExtra("deltalake", "delta") from error

_APP = "headrace"
_IS_DELETE = "__gone"
_TOPIC_NAME = "headrace.topic"
_HISTORY_LIMIT = 100
_IDENTIFIERS = ("epoch", "owner", "at_us", "topic", "topic_id", "partitions")


@contextmanager
def _driver_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except CommitFailedError as error:
        raise TargetUnavailable(
            f"Someone else has written to the Delta table meanwhile: {error}.",
            fix="nothing: the table is read again.",
        ) from error
    except SchemaMismatchError as error:
        raise TargetMismatch(
            f"Delta: {error}.",
            fix="choose another table with table=… (--table …).",
        ) from error
    except (DeltaError, OSError) as error:
        if (problem := access_error(uri, str(error))) is not None:
            raise problem from error
        if isinstance(error, FileNotFoundError) or "not found" in str(error):
            raise TargetMismatch(
                f"A file of the Delta table is missing: {error}.",
                fix=(
                    "bring it back from a backup, or restore an earlier version of the table. Or"
                    " choose another table with table=… (--table …), which gets what the topic has"
                    " now."
                ),
            ) from error
        raise TargetUnavailable(
            f"Delta: {shorten_message(str(error))}.",
            fix="see that the table's files are there and that there is room.",
        ) from error


class DeltaTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self._uri = sink.options["path"]
        if sink.table:
            self._uri = f"{self._uri.rstrip('/')}/{sink.table}"
        self._options = {"allow_http": "true"} if is_plain_http(self._uri) else {}
        self._schema = pa.schema(
            [pa.field(field.name, _stored_type(field.type)) for field in shape.schema]
        )
        self._table: Any = None
        self._batch: SinkBatch | None = None
        self._is_cleared = False
        self._next_checkpoint: SinkCheckpoint | None = None

    def close(self) -> None:
        self._table = None

    def prepare(self) -> None:
        with _driver_errors(self._uri):
            if not deltalake.DeltaTable.is_deltatable(self._uri, self._options):
                if not self.sink.create:
                    raise TargetMismatch(
                        f"There is no Delta table at {self._uri}.",
                        fix="create=True (leave out --no-create), or create it.",
                    )
                deltalake.DeltaTable.create(
                    self._uri,
                    deltalake.Schema.from_arrow(self._schema),
                    storage_options=self._options,
                )
            table = self._open()
            existing = [field.name for field in table.schema().fields]
            missing = [field for field in self._schema if field.name not in existing]
            if missing and not self.sink.create:
                raise TargetMismatch(
                    f"The Delta table has no column {missing[0].name!r}:"
                    f" {nearest(missing[0].name, existing)}",
                    fix="create=True (leave out --no-create), or add it.",
                )
            if missing:
                table.alter.add_columns(deltalake.Schema.from_arrow(pa.schema(missing)).fields)

    def _open(self) -> Any:
        return deltalake.DeltaTable(self._uri, storage_options=self._options)

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with _driver_errors(self._uri):
            self._begin_commit()
            yield
            if self._next_checkpoint is not None:
                self._commit(self._next_checkpoint)

    def _begin_commit(self) -> None:
        self._table = self._open()
        self._batch = None
        self._is_cleared = False
        self._next_checkpoint = None

    def _commit(self, checkpoint: SinkCheckpoint) -> None:
        properties = deltalake.CommitProperties(
            custom_metadata={_TOPIC_NAME: checkpoint.topic},
            max_commit_retries=0,
            app_transactions=[
                deltalake.Transaction(f"{_APP}.{name}", number)
                for name, number in _identifiers(checkpoint).items()
            ],
        )
        before = self._table.version()
        if self._batch is not None and self._batch.rows:
            self._write(self._batch, properties)
        if (
            self._table.version() == before
        ):  # Delta makes no commit without rows, but the checkpoint needs one
            mode: Any = "overwrite" if self._is_cleared else "append"
            deltalake.write_deltalake(
                self._table, self._schema.empty_table(), mode=mode, commit_properties=properties
            )

    def _write(self, batch: SinkBatch, properties: Any) -> None:
        rows = pa.table(
            [_stored_column(batch.upserts, field) for field in self._schema], schema=self._schema
        )
        if not self.shape.is_merge:
            deltalake.write_deltalake(
                self._table, rows, mode="append", commit_properties=properties
            )
            return
        deletes = pa.table(
            [_stored_column(batch.deletes, field) for field in self._schema], schema=self._schema
        )
        flags = pa.array([False] * rows.num_rows + [True] * deletes.num_rows)
        same = " AND ".join(f"target.`{name}` = source.`{name}`" for name in self.shape.key)
        merger = self._table.merge(
            pa.concat_tables([rows, deletes]).append_column(_IS_DELETE, flags),
            same,
            source_alias="source",
            target_alias="target",
            commit_properties=properties,
        )
        merger = merger.when_matched_delete(
            predicate=f"source.{_IS_DELETE}"
        ).when_matched_update_all(except_cols=[_IS_DELETE])
        merger.when_not_matched_insert_all(
            predicate=f"NOT source.{_IS_DELETE}", except_cols=[_IS_DELETE]
        ).execute()

    def read_checkpoint(self) -> SinkCheckpoint | None:
        table = self._table
        numbers = {name: table.transaction_version(f"{_APP}.{name}") for name in _IDENTIFIERS}
        if numbers["epoch"] is None:
            return None
        offsets = {
            partition: table.transaction_version(f"{_APP}.partition.{partition}")
            for partition in range(numbers["partitions"])
        }
        positions = {
            partition: offset
            for partition, offset in offsets.items()
            if offset is not None and offset >= 0
        }
        is_same_topic = numbers["topic"] == _digest(self.shape.topic)
        topic = self.shape.topic if is_same_topic else self._topic_in_history()
        topic_id = (
            self.shape.topic_id
            if numbers["topic_id"] == _digest(self.shape.topic_id)
            else "another"
        )
        return SinkCheckpoint(
            topic=topic,
            topic_id=topic_id,
            epoch=numbers["epoch"],
            owner=numbers["owner"],
            positions=positions,
            at_us=numbers["at_us"],
        )

    def _topic_in_history(self) -> str:
        """Return the topic that the table was last filled from; identifiers have its digest
        only.
        """
        return next(
            (
                str(entry[_TOPIC_NAME])
                for entry in self._table.history(_HISTORY_LIMIT)
                if _TOPIC_NAME in entry
            ),
            "(another)",
        )

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._next_checkpoint = checkpoint

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        self._batch = batch
        return []

    def clear(self) -> None:
        self._is_cleared = True

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with _driver_errors(self._uri):
            self._table = self._open()
            return self.read_checkpoint(), self._read_chunks()

    def _read_chunks(self) -> Iterator[pa.Table]:
        with _driver_errors(self._uri):
            dataset = self._table.to_pyarrow_dataset()
            for fragment in dataset.get_fragments():
                try:
                    for batch in fragment.to_batches(
                        schema=dataset.schema,
                        columns=self.shape.schema.names,
                        batch_size=READ_ROWS,
                    ):
                        yield self._restore(pa.Table.from_batches([batch]))
                except (OSError, pa.ArrowInvalid) as error:
                    if (damage := damage_of(error)) is None:
                        raise
                    self.unreadable.add(f"the file {fragment.path} {damage}")

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _driver_errors(self._uri):
            stored = self._open().to_pyarrow_table(columns=self.shape.schema.names)
            return filter_by_keys(self._restore(stored), keys, list(self.shape.key), keep=True)

    def _restore(self, stored: pa.Table) -> pa.Table:
        arrays = [
            _restored_column(stored[field.name].combine_chunks(), field.type)
            for field in self.shape.schema
        ]
        return pa.table(arrays, schema=self.shape.schema)


def _identifiers(checkpoint: SinkCheckpoint) -> dict[str, int]:
    """Return a checkpoint as transaction identifiers."""
    count = max(checkpoint.positions, default=-1) + 1
    offsets = {
        f"partition.{partition}": checkpoint.positions.get(partition, -1)
        for partition in range(count)
    }
    return {
        "epoch": checkpoint.epoch,
        "owner": checkpoint.owner,
        "at_us": checkpoint.at_us,
        "partitions": count,
        "topic": _digest(checkpoint.topic),
        "topic_id": _digest(checkpoint.topic_id),
        **offsets,
    }


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column in Delta, which has no times of day and no durations: they are
    stored as text and as microseconds.
    """
    if pa.types.is_time(kind):
        return pa.string()
    return pa.int64() if pa.types.is_duration(kind) else kind


def _stored_column(rows: pa.Table, column: pa.Field) -> pa.Array:
    if column.name not in rows.column_names:
        return pa.nulls(rows.num_rows, column.type)
    array = rows[column.name].combine_chunks()
    if pa.types.is_time(array.type):
        return time_text(array)
    return array.cast(column.type) if pa.types.is_duration(array.type) else array


def _restored_column(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_time(kind) and is_time_text(kind):
        return time_array(array, kind)
    return pc.cast(array, kind)
