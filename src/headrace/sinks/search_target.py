"""The target `search`: a full-text index in a directory, and the search in it.

The index is tantivy's. Every row is a document with three fields: `text` has all its strings,
`row` its columns (search `row.city:oslo`), and `_row` the row itself, exactly. The checkpoint is
another document, committed together with the rows. The index is locked for a commit only, and the
checkpoint is read under that lock, so that an older owner finds that it is not the owner any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InputError, MissingExtra, TargetMismatch, TargetUnavailable
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

try:
    import tantivy
except ImportError as error:
    raise MissingExtra("tantivy", "search") from error

CHECKPOINT_KEY = "ledger"
ROW_PREFIX = "row:"
_HEAP_BYTES = 64 << 20
_CHUNK_ROWS = 10_000


def index_schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("_key", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("text", stored=False)
    builder.add_json_field("row", stored=False, fast=True)  # for queries of ranges
    builder.add_bytes_field("_row", stored=True, indexed=False)
    return builder.build()


@contextmanager
def _driver_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, InputError | TargetMismatch):
            raise
        raise TargetUnavailable(
            f"The index cannot be used: {error}.",
            fix="see that no other process writes to it, and that the disk has room.",
        ) from error


class SearchTarget(Target):
    def __init__(self, sink: SinkSpec, shape: TargetShape) -> None:
        super().__init__(sink, shape)
        self.directory = Path(sink.options["path"])
        if sink.table:
            self.directory /= sink.table
        self._index: Any = None
        self._writer: Any = None
        self._is_changed = False

    def close(self) -> None:
        self._index = None

    def prepare(self) -> None:
        with _driver_errors():
            if not self.directory.is_dir():
                if not self.sink.create:
                    raise TargetMismatch(
                        f"There is no directory {self.directory}.",
                        fix="create=True (leave out --no-create), or make it.",
                    )
                self.directory.mkdir(parents=True)
            self._index = tantivy.Index(index_schema(), path=str(self.directory))

    # A commit

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with _driver_errors():
            self._writer, self._is_changed = self._index.writer(_HEAP_BYTES, 1), False
            try:
                yield
                if self._is_changed:
                    self._commit()
                    return
                self._writer.rollback()
            except BaseException:
                self._writer.rollback()
                raise
            finally:
                self._writer.wait_merging_threads()  # and gives the lock back
                self._writer = None

    def _commit(self) -> None:
        self._writer.commit()

    def read_checkpoint(self) -> SinkCheckpoint | None:
        query = tantivy.Query.term_query(self._index.schema, "_key", CHECKPOINT_KEY)
        documents = self._documents(query, limit=1)
        return SinkCheckpoint.from_json(documents[0][1].decode()) if documents else None

    def write_checkpoint(self, checkpoint: SinkCheckpoint) -> None:
        self._replace(CHECKPOINT_KEY, checkpoint.to_json().encode())
        self._is_changed = True

    def _replace(self, key: str, row: bytes, text: str | None = None) -> None:
        self._writer.delete_documents_by_term("_key", key)
        document = tantivy.Document()
        document.add_text("_key", key)
        document.add_bytes("_row", row)
        if text is not None:
            document.add_text("text", text)
            document.add_json("row", row.decode())
        self._writer.add_document(document)

    def merge(self, batch: SinkBatch) -> list[Refusal]:
        for chunk in _chunks(batch.deletes):
            for key in self._keys(chunk):
                self._writer.delete_documents_by_term("_key", key)
        return upsert_in_chunks(batch, self._upsert, chunk_rows=_CHUNK_ROWS)

    def _upsert(self, rows: pa.Table) -> None:
        (chunk,) = _chunks(rows)
        for key, row, text in zip(
            self._keys(chunk), rows_to_json(chunk), _texts(chunk), strict=True
        ):
            self._replace(key, row, text)

    def clear(self) -> None:
        self._writer.delete_all_documents()

    def _keys(self, rows: pa.RecordBatch) -> list[str]:
        return [
            ROW_PREFIX + key.decode("latin-1")
            for key in key_bytes(rows, self.shape.key).to_pylist()
        ]

    # Reading back

    def contents(self) -> tuple[SinkCheckpoint | None, Iterator[pa.Table]]:
        with _driver_errors():
            checkpoint = self.read_checkpoint()
            return checkpoint, self._read_chunks(self._index.searcher())

    def _read_chunks(self, searcher: Any) -> Iterator[pa.Table]:
        """Yield all rows that a searcher sees: those of one commit."""
        with _driver_errors():
            for start in range(0, searcher.num_docs, READ_ROWS):
                hits = searcher.search(tantivy.Query.all_query(), READ_ROWS, offset=start).hits
                documents = [_stored(searcher.doc(address)) for _, address in hits]
                yield self._table(documents, self.unreadable.add)

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _driver_errors():
            wanted = [key for chunk in _chunks(keys) for key in self._keys(chunk)]
            documents = [
                document
                for key in wanted
                for document in self._documents(
                    tantivy.Query.term_query(self._index.schema, "_key", key), limit=1
                )
            ]
            return self._table(documents, refuse_unreadable)

    def _documents(self, query: Any, *, limit: int) -> list[tuple[str, bytes]]:
        """Return the keys and rows of the documents that a query finds."""
        self._index.reload()
        searcher = self._index.searcher()
        return [_stored(searcher.doc(address)) for _, address in searcher.search(query, limit).hits]

    def _table(
        self, documents: list[tuple[str, bytes]], on_unreadable: Callable[[str], None]
    ) -> pa.Table:
        values = [row for key, row in documents if key != CHECKPOINT_KEY]
        return convert_readable(values, self._converted, on_unreadable)

    def _converted(self, values: Sequence[bytes]) -> pa.Table:
        decoded = decode_rows(values, self.shape.schema)
        if decoded.misfits:
            raise ValueError(next(iter(decoded.misfits.values())))
        return pa.Table.from_batches([decoded.batch], schema=self.shape.schema)


def _stored(document: Any) -> tuple[str, bytes]:
    """Return the key and the row of a document."""
    return str(document["_key"][0]), bytes(document["_row"][0])


def _chunks(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows.num_rows, _CHUNK_ROWS):
        yield from rows.slice(start, _CHUNK_ROWS).combine_chunks().to_batches()


def _texts(rows: pa.RecordBatch) -> list[str]:
    """Return all strings of each row, in lines."""
    strings = [
        pc.fill_null(column, "") for column in rows.columns if pa.types.is_string(column.type)
    ]
    texts: list[str] = (
        pc.binary_join_element_wise(*strings, "\n").to_pylist() if strings else [""] * rows.num_rows
    )
    return texts


def search(path: str | Path, query: str, *, limit: int = 10) -> list[tuple[float, str]]:
    """Search an index that the sink `hr.sinks.search` fills.

    Args:
        path: The index's directory.
        query: Words to look for in all strings; `row.COLUMN:WORD` looks in one column.
        limit: The most rows to return.

    Returns:
        The best rows as JSON, each with its score, the best first.

    Raises:
        InputError: There is no index, or the query cannot be read.

    Example:
        >>> search("products", "row.name:shoes AND red", limit=5)  # doctest: +SKIP
        [(2.7, '{"id": 7, "name": "red shoes"}')]
    """
    if not Path(path).is_dir() or not tantivy.Index.exists(str(path)):
        raise InputError(
            f"There is no search index in {path}.",
            fix="fill one with `headrace sync TOPIC search:DIRECTORY`.",
        )
    index = tantivy.Index.open(str(path))
    searcher = index.searcher()
    try:
        hits = searcher.search(index.parse_query(query, ["text"]), limit).hits
    except ValueError as error:
        raise InputError(
            f"The query {query!r} cannot be read: {error}.",
            fix='write words, "a phrase", row.COLUMN:WORD, row.COLUMN:[1 TO 9], AND, OR, -WORD.',
        ) from error
    return [(score, bytes(searcher.doc(address)["_row"][0]).decode()) for score, address in hits]
