"""The target `search`: a full-text index in a directory (tantivy). The ledger is a document of the
index, committed with the others.

Every row is a document: `text` are all its strings together, `row` its columns (search
`row.city:oslo`), `_row` the row itself, exactly. The index is locked for the moment of a commit
only, and the ledger is read under that lock: so an older owner finds that it is not the newest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InputError, MissingExtra, TargetMismatch, TargetUnavailable
from headrace.log.partitioning import key_bytes
from headrace.sinks.base import (
    PIECE_ROWS,
    Applied,
    Batch,
    Refusal,
    Shape,
    SinkSpec,
    Target,
    json_of,
    upserted,
)
from headrace.types.json_codec import decode

try:
    import tantivy
except ImportError as error:
    raise MissingExtra("tantivy", "search") from error

LEDGER, PREFIX = "ledger", "row:"
_HEAP_BYTES = 64 << 20
_CHUNK_ROWS = 10_000


def index_schema() -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("_key", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("text", stored=False)
    builder.add_json_field("row", stored=False, fast=True)  # so that ranges can be asked for
    builder.add_bytes_field("_row", stored=True, indexed=False)
    return builder.build()


@contextmanager
def _translated() -> Iterator[None]:
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
    def __init__(self, sink: SinkSpec, shape: Shape) -> None:
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
        with _translated():
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
    def exclusive(self) -> Iterator[None]:
        with _translated():
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

    def read_applied(self) -> Applied | None:
        found = self._documents(tantivy.Query.term_query(self._index.schema, "_key", LEDGER), 1)
        return Applied.from_json(found[0][1].decode()) if found else None

    def write_applied(self, applied: Applied) -> None:
        self._replace(LEDGER, applied.to_json().encode())
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

    def merge(self, batch: Batch) -> list[Refusal]:
        for piece in _chunks(batch.deletes):
            for key in self._keys(piece):
                self._writer.delete_documents_by_term("_key", key)
        return upserted(batch, self._upsert, rows_at_once=_CHUNK_ROWS)

    def _upsert(self, rows: pa.Table) -> None:
        (piece,) = _chunks(rows)
        for key, row, text in zip(self._keys(piece), json_of(piece), _texts(piece), strict=True):
            self._replace(key, row, text)

    def clear(self) -> None:
        self._writer.delete_all_documents()

    def _keys(self, rows: pa.RecordBatch) -> list[str]:
        return [
            PREFIX + key.decode("latin-1") for key in key_bytes(rows, self.shape.key).to_pylist()
        ]

    # Reading back

    def contents(self) -> tuple[Applied | None, Iterator[pa.Table]]:
        with _translated():
            applied = self.read_applied()
            return applied, self._pieces(self._index.searcher())

    def _pieces(self, searcher: Any) -> Iterator[pa.Table]:
        """A searcher shows one commit."""
        with _translated():
            for start in range(0, searcher.num_docs, PIECE_ROWS):
                hits = searcher.search(tantivy.Query.all_query(), PIECE_ROWS, offset=start).hits
                yield self._table([_stored(searcher.doc(address)) for _, address in hits])

    def lookup(self, keys: pa.Table) -> pa.Table:
        with _translated():
            wanted = [key for piece in _chunks(keys) for key in self._keys(piece)]
            return self._table(
                [
                    row
                    for key in wanted
                    for row in self._documents(
                        tantivy.Query.term_query(self._index.schema, "_key", key), 1
                    )
                ]
            )

    def _documents(self, query: Any, most: int) -> list[tuple[str, bytes]]:
        """Keys and rows."""
        self._index.reload()
        searcher = self._index.searcher()
        return [_stored(searcher.doc(address)) for _, address in searcher.search(query, most).hits]

    def _table(self, found: list[tuple[str, bytes]]) -> pa.Table:
        values = [row for key, row in found if key != LEDGER]
        return pa.Table.from_batches(
            [decode(values, self.shape.schema).batch], schema=self.shape.schema
        )


def _stored(document: Any) -> tuple[str, bytes]:
    """Key and row."""
    return str(document["_key"][0]), bytes(document["_row"][0])


def _chunks(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows.num_rows, _CHUNK_ROWS):
        yield from rows.slice(start, _CHUNK_ROWS).combine_chunks().to_batches()


def _texts(rows: pa.RecordBatch) -> list[str]:
    """All strings of each row."""
    strings = [
        pc.fill_null(column, "") for column in rows.columns if pa.types.is_string(column.type)
    ]
    texts: list[str] = (
        pc.binary_join_element_wise(*strings, "\n").to_pylist() if strings else [""] * rows.num_rows
    )
    return texts


def search(path: str | Path, query: str, *, most: int = 10) -> list[tuple[float, str]]:
    """The best rows for a query, as JSON, each with its score. A word is looked for in all strings;
    `row.COLUMN:WORD` in one column.
    """
    if not Path(path).is_dir() or not tantivy.Index.exists(str(path)):
        raise InputError(
            f"There is no search index in {path}.",
            fix="make one with `headrace sync TOPIC search:DIRECTORY`.",
        )
    index = tantivy.Index.open(str(path))
    searcher = index.searcher()
    try:
        hits = searcher.search(index.parse_query(query, ["text"]), most).hits
    except ValueError as error:
        raise InputError(
            f"The query {query!r} cannot be read: {error}.",
            fix='write words, "a phrase", row.COLUMN:WORD, row.COLUMN:[1 TO 9], AND, OR, -WORD.',
        ) from error
    return [(score, bytes(searcher.doc(address)["_row"][0]).decode()) for score, address in hits]
