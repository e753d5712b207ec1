"""The target `delta`: a Delta table. A batch is one commit of Delta's log: an append, or a merge by
key, with the ledger in Delta's own transaction identifiers.

An identifier is a name and a number, kept by Delta for good: here the owner, the epoch and the
place in each partition. A commit is made for exactly the version that was looked at, and fails if
there is another by then; so an older owner cannot write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import MissingExtra, TargetMismatch, TargetUnavailable, nearest
from headrace.sinks.base import PIECE_ROWS, Applied, Batch, Refusal, Shape, SinkSpec, Target
from headrace.sinks.parquet_target import having
from headrace.views.types import is_time_text, time_array, time_text

try:
    import deltalake
    from deltalake.exceptions import CommitFailedError, DeltaError, SchemaMismatchError
except ImportError as error:
    raise MissingExtra("deltalake", "delta") from error

_APP = "headrace"
_GONE = "__gone"
_TOPIC_NAME = "headrace.topic"
_LATEST_LOOKED_AT = 100
_NUMBERS = ("epoch", "owner", "at_us", "topic", "topic_id", "partitions")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except CommitFailedError as error:
        raise TargetUnavailable(
            f"Someone else has written to the Delta table meanwhile: {error}.",
            fix="nothing: it is looked at again.",
        ) from error
    except SchemaMismatchError as error:
        raise TargetMismatch(
            f"Delta: {error}.",
            fix=(
                "choose another table; or, if nobody else needs it, remove it, and it is made anew."
            ),
        ) from error
    except (DeltaError, OSError) as error:
        raise TargetUnavailable(
            f"Delta: {error}.", fix="see that the table's files are there and that there is room."
        ) from error


class DeltaTarget(Target):
    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
        super().__init__(sink, shape)
        self._uri = (
            str(Path(sink.options["path"]) / sink.table) if sink.table else sink.options["path"]
        )
        self._schema = pa.schema(
            [pa.field(each.name, _stored_type(each.type)) for each in shape.schema]
        )
        self._table: Any = None
        self._batch: Batch | None = None
        self._is_cleared = False
        self._applied: Applied | None = None

    def close(self) -> None:
        self._table = None

    def prepare(self) -> None:
        with _translated():
            if not deltalake.DeltaTable.is_deltatable(self._uri):
                if not self.sink.create:
                    raise TargetMismatch(
                        f"There is no Delta table at {self._uri}.",
                        fix="create=True (leave out --no-create), or make it.",
                    )
                deltalake.DeltaTable.create(self._uri, deltalake.Schema.from_arrow(self._schema))
            table = self._opened()
            known = [each.name for each in table.schema().fields]
            missing = [each for each in self._schema if each.name not in known]
            if missing and not self.sink.create:
                raise TargetMismatch(
                    f"The Delta table has no column {missing[0].name!r}:"
                    f" {nearest(missing[0].name, known)}",
                    fix="create=True (leave out --no-create), or add it.",
                )
            if missing:
                table.alter.add_columns(deltalake.Schema.from_arrow(pa.schema(missing)).fields)

    def _opened(self) -> Any:
        return deltalake.DeltaTable(self._uri)

    # A commit

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with _translated():
            self._look()
            yield
            if self._applied is not None:
                self._commit(self._applied)

    def _look(self) -> None:
        """At the newest version, with nothing to be done yet."""
        self._table, self._batch, self._is_cleared, self._applied = (
            self._opened(),
            None,
            False,
            None,
        )

    def _commit(self, applied: Applied) -> None:
        properties = deltalake.CommitProperties(
            custom_metadata={_TOPIC_NAME: applied.topic},
            max_commit_retries=0,
            app_transactions=[
                deltalake.Transaction(f"{_APP}.{name}", number)
                for name, number in _numbers(applied).items()
            ],
        )
        before = self._table.version()
        if self._batch is not None and self._batch.rows:
            self._write(self._batch, properties)
        if (
            self._table.version() == before
        ):  # nothing to do is no commit for Delta, but the ledger is
            mode: Any = "overwrite" if self._is_cleared else "append"
            deltalake.write_deltalake(
                self._table, self._schema.empty_table(), mode=mode, commit_properties=properties
            )

    def _write(self, batch: Batch, properties: Any) -> None:
        rows = _stored(batch.upserts, self._schema)
        if not self.shape.is_merge:
            deltalake.write_deltalake(
                self._table, rows, mode="append", commit_properties=properties
            )
            return
        gone = pa.table(
            [_column(batch.deletes, each) for each in self._schema], schema=self._schema
        )
        flags = pa.array([False] * rows.num_rows + [True] * gone.num_rows)
        same = " AND ".join(f"target.`{name}` = source.`{name}`" for name in self.shape.key)
        merging = self._table.merge(
            pa.concat_tables([rows, gone]).append_column(_GONE, flags),
            same,
            source_alias="source",
            target_alias="target",
            commit_properties=properties,
        )
        merging = merging.when_matched_delete(predicate=f"source.{_GONE}").when_matched_update_all(
            except_cols=[_GONE]
        )
        merging.when_not_matched_insert_all(
            predicate=f"NOT source.{_GONE}", except_cols=[_GONE]
        ).execute()

    def read_applied(self) -> Applied | None:
        table = self._table
        numbers = {name: table.transaction_version(f"{_APP}.{name}") for name in _NUMBERS}
        if numbers["epoch"] is None:
            return None
        places = {
            partition: table.transaction_version(f"{_APP}.partition.{partition}")
            for partition in range(numbers["partitions"])
        }
        positions = {
            partition: place
            for partition, place in places.items()
            if place is not None and place >= 0
        }
        is_ours = numbers["topic"] == _digest(self.shape.topic)
        topic = self.shape.topic if is_ours else self._topic_of_history()
        topic_id = (
            self.shape.topic_id
            if numbers["topic_id"] == _digest(self.shape.topic_id)
            else "another"
        )
        return Applied(
            topic, topic_id, numbers["epoch"], numbers["owner"], positions, numbers["at_us"]
        )

    def _topic_of_history(self) -> str:
        return next(
            (
                str(entry[_TOPIC_NAME])
                for entry in self._table.history(_LATEST_LOOKED_AT)
                if _TOPIC_NAME in entry
            ),
            "(another)",
        )

    def write_applied(self, applied: Applied) -> None:
        self._applied = applied

    def merge(self, batch: Batch) -> list[Refusal]:
        self._batch = batch
        return []

    def clear(self) -> None:
        self._is_cleared = True

    # Reading back

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        with _translated():
            self._table = self._opened()
            return self.read_applied(), self._pieces()

    def _pieces(self) -> Iterator[pa.Table]:
        with _translated():
            for batch in self._table.to_pyarrow_dataset().to_batches(
                columns=self.shape.schema.names, batch_size=PIECE_ROWS
            ):
                yield self._restored(pa.Table.from_batches([batch]))

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _translated():
            self._table = self._opened()
            return having(self._rows(), keys, list(self.shape.key), wanted=True)

    def _rows(self) -> pa.Table:
        return self._restored(self._table.to_pyarrow_table(columns=self.shape.schema.names))

    def _restored(self, stored: pa.Table) -> pa.Table:
        arrays = [
            _restored(stored[each.name].combine_chunks(), each.type) for each in self.shape.schema
        ]
        return pa.table(arrays, schema=self.shape.schema)


def _numbers(applied: Applied) -> dict[str, int]:
    count = max(applied.positions, default=-1) + 1
    places = {
        f"partition.{partition}": applied.positions.get(partition, -1) for partition in range(count)
    }
    of_topic = {"topic": _digest(applied.topic), "topic_id": _digest(applied.topic_id)}
    return {
        "epoch": applied.epoch,
        "owner": applied.owner,
        "at_us": applied.at_us,
        "partitions": count,
        **of_topic,
        **places,
    }


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Delta has no times of day and no durations: they are text, and microseconds."""
    if pa.types.is_time(kind):
        return pa.string()
    return pa.int64() if pa.types.is_duration(kind) else kind


def _stored(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    return pa.table([_column(rows, each) for each in schema], schema=schema)


def _column(rows: pa.Table, column: pa.Field) -> pa.Array:
    if column.name not in rows.column_names:
        return pa.nulls(rows.num_rows, column.type)
    array = rows[column.name].combine_chunks()
    if pa.types.is_time(array.type):
        return time_text(array)
    return array.cast(column.type) if pa.types.is_duration(array.type) else array


def _restored(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_time(kind) and is_time_text(kind):
        return time_array(array, kind)
    return pc.cast(array, kind)
