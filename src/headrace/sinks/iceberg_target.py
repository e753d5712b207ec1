"""The target `iceberg`: a table of an Iceberg catalogue.

A batch is one snapshot. The checkpoint is a property of the snapshot, so that a table that is
rolled back has the checkpoint of its rows; and a property of the table, for when the snapshot is
expired. A commit is made on top of exactly the snapshot that was read, and fails if there is a
newer one by then, whoever made it. Then the table is read again: a sink that is not the owner any
more ends, another one repeats its batch.

Upserts copy on write: files with rows of changed keys are written without them, and the new rows
are added. Small files that are rewritten anyway become one.

    before   a.parquet  id 1, 2, 3        b.parquet  id 4, 5
    batch    upsert id 2, 9
    after    c.parquet  id 1, 3, 2, 9     b.parquet  id 4, 5
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import (
    ConfigurationError,
    InputError,
    MissingExtra,
    TargetMismatch,
    TargetUnavailable,
    nearest,
)
from headrace.sinks.base import READ_ROWS, Refusal, SinkSpec, Target
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.sinks.files.parquet_target import damage_of, filter_by_keys

try:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import (
        CommitFailedException,
        CommitStateUnknownException,
        ForbiddenError,
        NoSuchTableError,
        NotInstalledError,
        OAuthError,
        RESTError,
        TableAlreadyExistsError,
        UnauthorizedError,
        ValidationException,
    )
    from pyiceberg.expressions import (
        AlwaysTrue,
        And,
        BooleanExpression,
        GreaterThanOrEqual,
        LessThanOrEqual,
        Reference,
    )
    from pyiceberg.io.pyarrow import ArrowScan, _dataframe_to_data_files, schema_to_pyarrow
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.transforms import IdentityTransform
except ImportError as error:
    raise MissingExtra("pyiceberg", "iceberg") from error

_CHECKPOINT = "headrace.checkpoint"
_SEQUENCE = "headrace.sequence"
_FIRST_SEQUENCE = 1
"""The sequence number of a table's first snapshot."""
_SMALL_BYTES = 8 << 20
_MAX_SMALL_FILES = 32
_COMPACTED_BYTES = 32 << 20
_WRITTEN_BYTES = 256 << 20
"""Bytes of rows in memory that are written as one file."""
_NEW_TABLE = {
    "format-version": "2",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
_CATALOGUE_FIX = (
    "configure the catalogue {name!r} in ~/.pyiceberg.yaml, or by the environment:"
    " PYICEBERG_CATALOG__{upper}__URI and PYICEBERG_CATALOG__{upper}__WAREHOUSE; or pass"
    " properties={{'uri': …, 'warehouse': …}}."
)


@contextmanager
def _driver_errors() -> Iterator[None]:
    try:
        yield
    except (CommitFailedException, ValidationException) as error:
        raise TargetUnavailable(
            f"Someone else has written to the Iceberg table meanwhile: {error}.",
            fix="nothing: the table is read again.",
        ) from error
    except CommitStateUnknownException as error:
        raise TargetUnavailable(
            f"The catalogue did not say whether the commit took effect: {error}.",
            fix="nothing: the table is read again.",
        ) from error
    except (UnauthorizedError, ForbiddenError, OAuthError) as error:
        raise TargetMismatch(
            f"The catalogue refuses access: {error}.",
            fix="correct the catalogue's credentials, in its configuration or environment.",
        ) from error
    except FileNotFoundError as error:
        raise TargetMismatch(
            f"A file of the Iceberg table is missing: {error}.",
            fix=(
                "bring it back from a backup, or roll the table back to a snapshot that does not"
                " have it. Or choose another table with table=… (--table …), which gets what the"
                " topic has now."
            ),
        ) from error
    except (RESTError, OSError) as error:
        raise TargetUnavailable(
            f"Iceberg: {error}.", fix="see that the catalogue and the warehouse can be reached."
        ) from error
    except Exception as error:
        if not type(error).__module__.startswith("sqlalchemy."):
            raise
        raise TargetUnavailable(
            f"The SQL catalogue failed: {error}.", fix="see that its database can be reached."
        ) from error


class IcebergTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self._catalog_name: str = sink.options["catalog"]
        self._identifier = (*sink.options["namespace"].split("."), self.table)
        self._schema = pa.schema(
            [pa.field(field.name, stored_type(field.type, field.name)) for field in shape.schema]
        )
        self._catalog: Any = None
        self._table: Any = None
        self._batch: SinkBatch | None = None
        self._is_cleared = False
        self._next_checkpoint: SinkCheckpoint | None = None
        self._appends = 0
        """Commits since small files were last looked for."""

    def close(self) -> None:
        self._table = None
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    @property
    def _name(self) -> str:
        return ".".join(self._identifier)

    def prepare(self) -> None:
        with _driver_errors():
            self._catalog = self._load_catalog()
            try:
                table = self._catalog.load_table(self._identifier)
            except NoSuchTableError as error:
                if not self.sink.create:
                    raise TargetMismatch(
                        f"There is no Iceberg table {self._name} in the catalogue"
                        f" {self._catalog_name!r}.",
                        fix="create=True (leave out --no-create), or create it.",
                    ) from error
                table = self._create()
            self._fit_columns(table)

    def _load_catalog(self) -> Any:
        try:
            return load_catalog(self._catalog_name, **self.sink.options["properties"])
        except (ValueError, KeyError, NotInstalledError) as error:
            upper = self._catalog_name.upper()
            raise ConfigurationError(
                f"The Iceberg catalogue {self._catalog_name!r} cannot be opened: {error}.",
                fix=_CATALOGUE_FIX.format(name=self._catalog_name, upper=upper),
            ) from error

    def _create(self) -> Any:
        self._catalog.create_namespace_if_not_exists(self._identifier[:-1])
        try:
            table = self._catalog.create_table(
                self._identifier, self._schema, properties=_NEW_TABLE
            )
        except TableAlreadyExistsError:
            return self._catalog.load_table(self._identifier)
        if self.sink.options["partition_by"]:
            with table.update_spec() as spec:
                for name in self.sink.options["partition_by"]:
                    if name not in self._schema.names:
                        raise InputError(
                            f"The topic {self.shape.topic!r} has no column {name!r} to partition"
                            f" by: {nearest(name, self._schema.names)}"
                        )
                    spec.add_field(name, IdentityTransform())
        return table

    def _fit_columns(self, table: Table) -> None:
        """Add columns that the table does not have, and compare the types of the others."""
        existing = {field.name: field.type for field in schema_to_pyarrow(table.schema())}
        for field in self._schema:
            if field.name in existing and _plain(existing[field.name]) != _plain(field.type):
                raise TargetMismatch(
                    f"The column {field.name!r} of the Iceberg table {self._name} has the type"
                    f" {existing[field.name]}; the topic's is stored as {field.type}.",
                    fix="change the column's type, or choose another table with table=….",
                )
        missing = [field for field in self._schema if field.name not in existing]
        if missing and not self.sink.create:
            raise TargetMismatch(
                f"The Iceberg table {self._name} has no column {missing[0].name!r}:"
                f" {nearest(missing[0].name, existing)}",
                fix="create=True (leave out --no-create), or add it.",
            )
        if missing:
            with table.update_schema() as update:
                update.union_by_name(pa.schema(missing))

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with _driver_errors():
            self._begin_commit()
            yield
            if self._next_checkpoint is not None:
                self._commit(self._next_checkpoint)

    def _begin_commit(self) -> None:
        self._table = self._catalog.load_table(self._identifier)
        self._batch = None
        self._is_cleared = False
        self._next_checkpoint = None

    def read_checkpoint(self) -> SinkCheckpoint | None:
        """Return the checkpoint of the newest snapshot that has one. Other writers' snapshots, such
        as of a compaction, have none.
        """
        metadata = self._table.metadata
        snapshot = metadata.current_snapshot()
        if snapshot is None:
            return None
        while snapshot.summary is None or snapshot.summary.get(_CHECKPOINT) is None:
            parent = None
            if snapshot.parent_snapshot_id is not None:
                parent = metadata.snapshot_by_id(snapshot.parent_snapshot_id)
            if parent is None:  # it was expired, or there was none
                return self._checkpoint_of_table(snapshot.sequence_number)
            snapshot = parent
        return SinkCheckpoint.from_json(snapshot.summary[_CHECKPOINT])

    def _checkpoint_of_table(self, oldest: int) -> SinkCheckpoint | None:
        """Return the checkpoint in the table's properties, if the snapshot that it belongs to is
        older than the oldest one that is left.
        """
        properties = self._table.metadata.properties
        if _CHECKPOINT not in properties or oldest <= _FIRST_SEQUENCE:
            return None
        if int(properties[_SEQUENCE]) >= oldest:
            raise TargetMismatch(
                f"The Iceberg table {self._name} was rolled back to a snapshot of which it is not"
                " known what the sink had applied, since snapshots before it are expired.",
                fix=(
                    "roll it back to a snapshot with the property headrace.checkpoint. Or choose"
                    " another table with table=… (--table …); --start-over fills this one again,"
                    " and removes the rows that it has now."
                ),
            )
        return SinkCheckpoint.from_json(properties[_CHECKPOINT])

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._next_checkpoint = checkpoint

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        self._batch = batch
        return []

    def clear(self) -> None:
        self._is_cleared = True

    def _commit(self, checkpoint: SinkCheckpoint) -> None:
        """Write data files, and make the snapshot that has them.

        1. Write the files, and list those that they replace.
        2. Add them, remove the replaced ones, and store the checkpoint, in one transaction.
        3. If it was certainly refused, delete the files that were written.
        """
        table = self._table
        removed, added = self._write_files(table, self._batch)  # 1
        # A commit that is repeated by the library would be made on top of what another owner has
        # written. This changes the setting in memory only.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        text = checkpoint.to_json()
        try:
            with table.transaction() as transaction:  # 2
                update = transaction.update_snapshot(snapshot_properties={_CHECKPOINT: text})
                with update.overwrite() if removed else update.merge_append() as snapshot:
                    for file in removed:
                        snapshot.delete_data_file(file)
                    for file in added:
                        snapshot.append_data_file(file)
                sequence = str(table.metadata.next_sequence_number())
                transaction.set_properties({_CHECKPOINT: text, _SEQUENCE: sequence})
        except (CommitFailedException, ValidationException):
            for file in added:  # 3
                table.io.delete(file.file_path)
            raise

    def _write_files(self, table: Table, batch: SinkBatch | None) -> tuple[list[Any], list[Any]]:
        """Return the data files that a commit removes, and those that it adds."""
        if self._is_cleared:
            return [task.file for task in table.scan().plan_files()], []
        if batch is None or not batch.rows:
            return [], []
        writer = _FileWriter(table)
        upserts = self._stored_rows(batch.upserts)
        removed = self._rewrite_changed(table, batch, writer) if self.shape.is_merge else []
        removed += self._compact(table, writer, {file.file_path for file in removed})
        writer.add(upserts)
        return removed, writer.finish()

    def _rewrite_changed(self, table: Table, batch: SinkBatch, writer: _FileWriter) -> list[Any]:
        """Write files that have rows of changed keys without these rows. Returns the files."""
        key = list(self.shape.key)
        changed = pa.concat_tables(
            [self._stored_keys(batch.upserts), self._stored_keys(batch.deletes)]
        )
        removed: list[Any] = []
        for task in table.scan(row_filter=self._range_filter(changed)).plan_files():
            if filter_by_keys(self._scan(task, key), changed, key, keep=True).num_rows:
                rows = self._scan(task)
                writer.add(filter_by_keys(rows, changed, key, keep=False))
                removed.append(task.file)
        return removed

    def _compact(self, table: Table, writer: _FileWriter, removed: set[str]) -> list[Any]:
        """Merge small files, after many commits. Returns the files that are replaced, which are
        none of those that the commit removes anyway.
        """
        self._appends += 1
        if self._appends < _MAX_SMALL_FILES:
            return []
        self._appends = 0
        small = [
            task
            for task in table.scan().plan_files()
            if task.file.file_size_in_bytes < _SMALL_BYTES and task.file.file_path not in removed
        ]
        return self._merge_small(small, writer) if len(small) > 1 else []

    def _merge_small(self, tasks: Sequence[FileScanTask], writer: _FileWriter) -> list[Any]:
        merged: list[Any] = []
        size = 0
        for task in tasks:
            writer.add(self._scan(task))
            merged.append(task.file)
            size += task.file.file_size_in_bytes
            if size >= _COMPACTED_BYTES:
                break
        return merged

    def _range_filter(self, keys: pa.Table) -> BooleanExpression:
        """Return a filter by which files are left out whose statistics exclude all keys."""
        name = self.shape.key[0]
        kind = keys.schema.field(name).type
        is_comparable = pa.types.is_integer(kind) or pa.types.is_string(kind)
        if not is_comparable or "." in name:
            return AlwaysTrue()
        bounds = pc.min_max(keys[name]).as_py()
        return And(
            GreaterThanOrEqual(term=Reference(name), value=bounds["min"]),
            LessThanOrEqual(term=Reference(name), value=bounds["max"]),
        )

    def _scan(self, task: FileScanTask, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a file that are not deleted, as the table has them."""
        schema = self._table.schema()
        if columns is not None:
            schema = schema.select(*columns)
        scan = ArrowScan(self._table.metadata, self._table.io, schema, AlwaysTrue())
        return _plain_rows(scan.to_table([task]))

    def _stored_rows(self, rows: pa.Table) -> pa.Table:
        """Return rows with all columns of the table, in its order and types."""
        arrays = []
        fields = [
            pa.field(field.name, _plain(field.type))
            for field in schema_to_pyarrow(self._table.schema(), include_field_ids=False)
        ]
        for field in fields:
            if field.name in rows.column_names:
                arrays.append(rows[field.name].cast(field.type))
            else:
                arrays.append(pa.nulls(rows.num_rows, field.type))
        return pa.table(arrays, schema=pa.schema(fields))

    def _stored_keys(self, rows: pa.Table) -> pa.Table:
        fields = [self._schema.field(name) for name in self.shape.key]
        return rows.select(list(self.shape.key)).cast(pa.schema(fields))

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with _driver_errors():
            self._table = self._catalog.load_table(self._identifier)
            tasks = list(self._table.scan().plan_files())
            return self.read_checkpoint(), self._read_chunks(tasks)

    def _read_chunks(self, tasks: list[FileScanTask]) -> Iterator[pa.Table]:
        with _driver_errors():
            for task in tasks:
                try:
                    rows = self._scan(task, self.shape.schema.names)
                except (OSError, pa.ArrowInvalid) as error:
                    if (damage := damage_of(error)) is None:
                        raise
                    self.unreadable.add(f"the file {task.file.file_path} {damage}")
                    continue
                for start in range(0, rows.num_rows, READ_ROWS):
                    yield self._restored(rows.slice(start, READ_ROWS))

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _driver_errors():
            self._table = self._catalog.load_table(self._identifier)
            key = list(self.shape.key)
            stored_keys = self._stored_keys(keys)
            parts = [self.shape.schema.empty_table()]
            for task in self._table.scan(row_filter=self._range_filter(stored_keys)).plan_files():
                rows = self._scan(task, self.shape.schema.names)
                parts.append(self._restored(filter_by_keys(rows, stored_keys, key, keep=True)))
            return pa.concat_tables(parts)

    def _restored(self, rows: pa.Table) -> pa.Table:
        return rows.select(self.shape.schema.names).cast(self.shape.schema)


class _FileWriter:
    """Writes rows to data files of a table, many at a time."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._rows: list[pa.Table] = []
        self._bytes = 0
        self._files: list[Any] = []
        self._uuid = uuid.uuid4()
        self._numbers = count()

    def add(self, rows: pa.Table) -> None:
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _WRITTEN_BYTES:
            self._flush()

    def _flush(self) -> None:
        rows = pa.concat_tables(self._rows) if self._rows else None
        if rows is not None and rows.num_rows:
            self._files += _dataframe_to_data_files(
                self._table.metadata,
                rows,
                self._table.io,
                write_uuid=self._uuid,
                counter=self._numbers,
            )
        self._rows = []
        self._bytes = 0

    def finish(self) -> list[Any]:
        """Write what is left, and return all data files."""
        self._flush()
        return self._files


# Types


def stored_type(kind: pa.DataType, name: str) -> pa.DataType:
    """Return the type in which a column is stored in Iceberg, which has no integers of 8 and 16
    bits and no durations: these are stored as `int` and as microseconds.

    Raises:
        InputError: Iceberg has no such type.
    """
    if pa.types.is_int8(kind) or pa.types.is_int16(kind):
        return pa.int32()
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct(
            [
                pa.field(field.name, stored_type(field.type, f"{name}.{field.name}"))
                for field in kind
            ]
        )
    if pa.types.is_map(kind):
        return pa.map_(stored_type(kind.key_type, name), stored_type(kind.item_type, name))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(stored_type(kind.value_type, name))
    is_same = (
        pa.types.is_int32(kind)
        or pa.types.is_int64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_date32(kind)
        or kind == pa.time64("us")
        or (pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz in {None, "UTC"})
    )
    if not is_same:
        raise InputError(
            f"Iceberg has no type for the column {name!r}, whose type is {kind}.",
            fix="leave the column out with columns=…, or follow a topic that has another type.",
        )
    return kind


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type without differences that make none in Iceberg: large offsets, names of items,
    which values may be null.
    """
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


def _plain_rows(rows: pa.Table) -> pa.Table:
    return rows.cast(pa.schema([pa.field(field.name, _plain(field.type)) for field in rows.schema]))
