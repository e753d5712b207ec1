"""Search the other way round, for small needs: one query over documents that are there already. To try a query on a topic's history before it is stored.

hr.search.match(articles, 'storm AND price:<20')                 # pandas or Arrow; the rows that fit, with score, highlights and explanation
headrace search-test articles "storm AND price:<20" --from 7d
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.search.fields import filter_kind
from headrace.operators.search.index import QueryIndex, Stored
from headrace.operators.search.kernel import EXPLANATION, HIGHLIGHT_TYPE, HIGHLIGHTS, SCORE, highlight_lists
from headrace.pipeline.searching import Asked, search_language

Names = str | Sequence[str]
_FOUND = pa.schema([(SCORE, pa.float64()), (HIGHLIGHTS, HIGHLIGHT_TYPE), (EXPLANATION, pa.string())])


class Search:
    """A query that is ready for documents with these columns. `text`: those whose words are searched, all strings unless given; `filters`: all others, unless given."""

    def __init__(
        self, query: str, schema: pa.Schema, *, text: Names | None = None, filters: Names | None = None, language: str | None = None,
        stop_words: Iterable[str] = (), default: str = "or",
    ) -> None:  # fmt: skip
        text = text if text is not None else [field.name for field in schema if pa.types.is_string(field.type)]
        named = {text} if isinstance(text, str) else set(text)
        filters = filters if filters is not None else [field.name for field in schema if field.name not in named and filter_kind(field.type) is not None]
        asked = Asked(query, text, filters, language=language, stop_words=tuple(stop_words), default=default)
        self._language = search_language(schema, asked, where="search.match")
        self._index = QueryIndex.empty(self._language).changed({b"": Stored.of(self._language, query)})

    def match(self, documents: pa.Table | pa.RecordBatch) -> pa.Table:
        """The documents that fit, with why."""
        found = self._index.match(documents, reasons=True)
        table = documents if isinstance(documents, pa.Table) else pa.Table.from_batches([documents])
        kept = table.take(pa.array(found.documents))
        texts = {name: table.column(name) for name in self._language.fields.text}
        columns = [pa.array(found.scores), highlight_lists(texts, found), pa.array(found.explanations, pa.string())]
        for field, column in zip(_FOUND, columns, strict=True):
            kept = kept.append_column(field, column)
        return kept

    def match_all(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """The same for many batches, those without a match left out."""
        return (found for batch in batches if (found := self.match(batch)).num_rows)


def match(
    documents: Any, query: str, *, text: Names | None = None, filters: Names | None = None, language: str | None = None, stop_words: Iterable[str] = (),
    default: str = "or",
) -> Any:  # fmt: skip
    """The documents that fit a query, with `score`, `highlights` and `explanation`. Documents: an Arrow table, a pandas DataFrame (so is the result), or a list of dicts."""
    as_pandas = hasattr(documents, "to_records")
    table = pa.Table.from_pandas(documents, preserve_index=False) if as_pandas else pa.Table.from_pylist(documents) if isinstance(documents, list) else documents
    if not isinstance(table, pa.Table | pa.RecordBatch):
        raise InputError(
            f"search.match was given a {type(documents).__name__}.", fix="give it an Arrow table, a pandas DataFrame or a list of dicts; of a Spark DataFrame its toArrow()."
        )
    taken = [name for name in table.schema.names if name in _FOUND.names]
    if taken:
        raise InputError(f"The documents have a column {taken[0]!r}, which the result has too.", fix="rename it first.")
    found = Search(query, table.schema, text=text, filters=filters, language=language, stop_words=stop_words, default=default).match(table)
    return found.to_pandas() if as_pandas else found.to_pylist() if isinstance(documents, list) else found
