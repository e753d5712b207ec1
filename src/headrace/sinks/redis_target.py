"""The target `redis`: one hash, or one JSON text, a row.

Rows and checkpoint are written in one MULTI, which fails if the checkpoint was changed meanwhile. A
row of the table `accounts` with the key 7 is under `accounts:7`; several key columns are a JSON
array, as in the log. In a hash every column is a field, in the form that the view store uses
(`types.sqlite_codec`: booleans are 1 and 0, times ISO 8601, nested values JSON); a null has no
field.

Redis does not undo a command that fails inside MULTI. So rows are written by scripts that count
themselves, and the checkpoint is written only if all have run; otherwise the batch is applied
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import (
    ConfigurationError,
    MissingExtra,
    TargetMismatch,
    TargetUnavailable,
)
from headrace.log.partitioning import key_bytes
from headrace.sinks.base import (
    READ_ROWS,
    Refusal,
    SinkSpec,
    Target,
    convert_readable,
    refuse_unreadable,
    rows_to_json,
    upsert_in_chunks,
)
from headrace.sinks.batch import SinkBatch, TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.types.json_codec import decode_rows
from headrace.types.sqlite_codec import from_values, to_values

try:
    import redis
    from redis import exceptions
except ImportError as error:
    raise MissingExtra("redis", "redis") from error

HASH, JSON = "hash", "json"
_CHUNK_ROWS = 500
_SCAN = 1000
_UNAVAILABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.WatchError,
)
# KEYS[1] counts the scripts that have run. ARGV has the number of columns and their names, then for
# field row its key, a string of 0 and 1 that says which columns are null ("" if none is), and the
# values.
_SET_HASHES = """
local width = tonumber(ARGV[1])
local at = width + 2
while at <= #ARGV do
  local row, n = {}, 0
  local nulls = ARGV[at + 1]
  for column = 1, width do
    if nulls == '' or string.sub(nulls, column, column) == '0' then
      row[n + 1], row[n + 2] = ARGV[column + 1], ARGV[at + 1 + column]
      n = n + 2
    end
  end
  redis.call('UNLINK', ARGV[at])
  redis.call('HSET', ARGV[at], unpack(row))
  at = at + width + 2
end
redis.call('INCR', KEYS[1])
"""
_SET_TEXTS = (
    "for at = 1, #ARGV, 2 do redis.call('SET', ARGV[at], ARGV[at + 1]) end redis.call('INCR',"
    " KEYS[1])"
)
_UNLINK = "for at = 1, #ARGV do redis.call('UNLINK', ARGV[at]) end redis.call('INCR', KEYS[1])"
_FINISH = """
local ran = redis.call('GET', KEYS[1]) or '0'
redis.call('DEL', KEYS[1])
if ran ~= ARGV[1] then
  return redis.error_reply('ERR only ' .. ran .. ' of ' .. ARGV[1] .. ' scripts have run')
end
redis.call('SET', KEYS[2], ARGV[2])
"""


_OTHER_TYPE_FIX = (
    "see which program wrote it, and rename the key (RENAME) if it is still needed; or choose"
    " another name with table=… (--table …)."
)


@contextmanager
def _driver_errors() -> Iterator[None]:
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise ConfigurationError(
            f"Redis refuses the connection: {error}",
            fix=(
                "check user and password in the URL; the sink needs EVAL, MULTI, GET, SET, SCAN and"
                " UNLINK."
            ),
        ) from error
    except _UNAVAILABLE as error:
        raise TargetUnavailable(
            f"Redis: {error}", fix="see that the server runs, can be reached and has memory left."
        ) from error
    except exceptions.ResponseError as error:
        if "WRONGTYPE" in str(error):  # of the count; keys of rows are replaced, whatever they are
            raise TargetMismatch(
                f"Redis: a key of the sink has another type than the sink gives it: {error}",
                fix=_OTHER_TYPE_FIX,
            ) from error
        if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
            raise ConfigurationError(
                f"Redis refuses the connection: {error}", fix="give user and password in the URL."
            ) from error
        raise TargetUnavailable(
            f"Redis: {error}", fix="see what the server's log says about it."
        ) from error


class RedisTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self._encoding: str = sink.options["encoding"]
        self._checkpoint_key = f"headrace:sink:{self.table}"
        self._count_key = f"headrace:sink:{self.table}:count"
        self._redis: Any = redis.Redis.from_url(
            sink.options["url"], socket_connect_timeout=10, socket_timeout=60
        )
        self._pipe: Any = None
        self._scripts = 0

    def close(self) -> None:
        self._redis.close()

    def prepare(self) -> None:
        """Check the connection. There is nothing to create: a key is created when it is set."""
        with _driver_errors():
            self._redis.ping()

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with _driver_errors():
            self._pipe, self._scripts = self._redis.pipeline(transaction=True), 0
            try:
                self._pipe.watch(self._checkpoint_key)
                yield
                self._pipe.execute()
            finally:
                self._pipe.reset()
                self._pipe = None

    def read_checkpoint(self) -> SinkCheckpoint | None:
        try:
            text = (self._redis if self._pipe is None else self._pipe).get(self._checkpoint_key)
        except exceptions.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            kind = self._redis.type(self._checkpoint_key).decode()
            raise TargetMismatch(
                f"The key {self._checkpoint_key!r} of Redis is a {kind}, and not the checkpoint of"
                " this sink, which is a string.",
                fix=_OTHER_TYPE_FIX,
            ) from error
        if self._pipe is not None:
            self._pipe.multi()  # from here on commands are queued until `execute`
        return None if text is None else SinkCheckpoint.from_json(text)

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._pipe.eval(
            _FINISH,
            2,
            self._count_key,
            self._checkpoint_key,
            str(self._scripts),
            checkpoint.to_json(),
        )

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        for chunk in _chunks(batch.deletes):
            self._script(_UNLINK, self._keys(chunk))
        return upsert_in_chunks(batch, self._upsert, chunk_rows=_CHUNK_ROWS)

    def _upsert(self, rows: pa.Table) -> None:
        (chunk,) = _chunks(rows)
        if self._encoding == JSON:
            self._script(_SET_TEXTS, _interleave([self._keys(chunk), rows_to_json(chunk)]))
        else:
            self._script(_SET_HASHES, self._hash_arguments(chunk))

    def clear(self) -> None:
        keys = list(self._scan_keys())
        for start in range(0, len(keys), _CHUNK_ROWS):
            self._script(_UNLINK, keys[start : start + _CHUNK_ROWS])

    def _script(self, text: str, arguments: list[Any]) -> None:
        self._scripts += 1
        self._pipe.eval(text, 1, self._count_key, *arguments)

    def _keys(self, rows: pa.RecordBatch) -> list[bytes]:
        prefix = f"{self.table}:".encode()
        keys: list[bytes] = pc.binary_join_element_wise(
            prefix, key_bytes(rows, self.shape.key), b""
        ).to_pylist()
        return keys

    def _hash_arguments(self, rows: pa.RecordBatch) -> list[Any]:
        """Return the arguments of the script `_SET_HASHES`."""
        if any(column.null_count for column in rows.columns):
            nulls = pc.binary_join_element_wise(
                *[column.is_null().cast(pa.int8()).cast(pa.string()) for column in rows.columns], ""
            ).to_pylist()
        else:
            nulls = [""] * rows.num_rows
        return [
            rows.num_columns,
            *rows.schema.names,
            *_interleave([self._keys(rows), nulls, *map(_field_values, rows.columns)]),
        ]

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        """Return checkpoint and rows. Redis has no snapshots: while a sink writes, rows may be
        newer than the checkpoint.
        """
        with _driver_errors():
            return self.read_checkpoint(), self._read_chunks()

    def _read_chunks(self) -> Iterator[pa.Table]:
        with _driver_errors():
            all_keys = self._scan_keys()
            while keys := list(islice(all_keys, READ_ROWS)):
                yield self._table(keys, self.unreadable.add)

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _driver_errors():
            wanted = [key for chunk in _chunks(keys) for key in self._keys(chunk)]
            return self._table(wanted, refuse_unreadable)

    def _scan_keys(self) -> Iterator[bytes]:
        pattern = "".join(f"\\{char}" if char in "*?[]\\^" else char for char in self.table) + ":*"
        yield from dict.fromkeys(self._redis.scan_iter(match=pattern, count=_SCAN))

    def _table(self, keys: list[bytes], on_unreadable: Callable[[str], None]) -> pa.Table:
        """Return the rows under some keys; keys that do not have a row are `on_unreadable`."""
        stored: list[tuple[bytes, Any]] = []
        for start in range(0, len(keys), _CHUNK_ROWS):
            pipe = self._redis.pipeline(transaction=False)
            chunk = keys[start : start + _CHUNK_ROWS]
            for key in chunk:
                _ = pipe.get(key) if self._encoding == JSON else pipe.hgetall(key)
            for key, value in zip(chunk, pipe.execute(raise_on_error=False), strict=True):
                if isinstance(value, exceptions.ResponseError) and "WRONGTYPE" in str(value):
                    on_unreadable(
                        f"the key {key.decode(errors='replace')!r} does not have the type of"
                        f" encoding={self._encoding!r}"
                    )
                elif isinstance(value, Exception):
                    raise value
                elif value:
                    stored.append((key, value))
        return convert_readable(stored, self._converted, on_unreadable)

    def _converted(self, stored: Sequence[tuple[bytes, Any]]) -> pa.Table:
        values = [value for _, value in stored]
        if self._encoding == JSON:
            decoded = decode_rows(values, self.shape.schema)
            if decoded.misfits:
                raise ValueError(next(iter(decoded.misfits.values())))
            return pa.Table.from_batches([decoded.batch])
        arrays = [
            _from_fields([value.get(field.name.encode()) for value in values], field.type)
            for field in self.shape.schema
        ]
        return pa.table(arrays, schema=self.shape.schema)


def _chunks(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows.num_rows, _CHUNK_ROWS):
        yield from rows.slice(start, _CHUNK_ROWS).combine_chunks().to_batches()


def _interleave(columns: list[list[Any]]) -> list[Any]:
    """Return the values of columns row by row, without a loop over rows."""
    flat: list[Any] = [None] * (len(columns) * len(columns[0]))
    for position, column in enumerate(columns):
        flat[position :: len(columns)] = column
    return flat


def _field_values(array: pa.Array) -> list[Any]:
    """Return a column's values for the script, which leaves nulls out."""
    kind = array.type
    if pa.types.is_string(kind):
        texts: list[Any] = pc.fill_null(array.cast(pa.binary()), b"").to_pylist()
        return texts
    if pa.types.is_integer(kind):
        return _field_values(array.cast(pa.string()))
    return ["" if value is None else value for value in to_values(array)]


def _from_fields(values: list[bytes | None], kind: pa.DataType) -> pa.Array:
    if pa.types.is_binary(kind):
        return pa.array(values, kind)
    if pa.types.is_floating(kind):
        return pa.array(
            [None if value is None else float(value) for value in values],
            pa.float64(),
            from_pandas=False,
        ).cast(kind)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return from_values([None if value is None else int(value) for value in values], kind)
    return from_values([None if value is None else value.decode() for value in values], kind)
