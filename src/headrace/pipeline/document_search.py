"""Search the other way round, for small needs: one query over documents that are there already. To
try a query on a topic's history before it is stored.

hr.search.match(articles, 'storm AND price:<20')                 # Arrow, pandas or Spark; the rows
that fit, with score, highlights and explanation headrace search-test articles "storm AND price:<20"
--from 7d
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.search.index import QueryIndex, Stored
from headrace.operators.search.kernel import (
    EXPLANATION,
    HIGHLIGHT_TYPE,
    HIGHLIGHTS,
    SCORE,
    highlight_lists,
)
from headrace.operators.search.syntax import filter_kind
from headrace.pipeline.search import Asked, search_language
from headrace.types.schema import to_spark_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


Names = str | Sequence[str]
_FOUND = pa.schema(
    [(SCORE, pa.float64()), (HIGHLIGHTS, HIGHLIGHT_TYPE), (EXPLANATION, pa.string())]
)


class Search:
    """A query that is ready for documents with these columns. `text`: those whose words are
    searched, all strings unless given; `filters`: all others, unless given.
    """

    def __init__(
        self,
        query: str,
        schema: pa.Schema,
        *,
        text: Names | None = None,
        filters: Names | None = None,
        language: str | None = None,
        stop_words: Iterable[str] = (),
        default: str = "or",
    ) -> None:
        text = (
            text
            if text is not None
            else [field.name for field in schema if pa.types.is_string(field.type)]
        )
        named = {text} if isinstance(text, str) else set(text)
        filters = (
            filters
            if filters is not None
            else [
                field.name
                for field in schema
                if field.name not in named and filter_kind(field.type) is not None
            ]
        )
        asked = Asked(
            query, text, filters, language=language, stop_words=tuple(stop_words), default=default
        )
        self._language = search_language(schema, asked, where="search.match")
        self._index = QueryIndex.empty(self._language).changed(
            {b"": Stored.of(self._language, query)}
        )

    def match(self, documents: pa.Table | pa.RecordBatch) -> pa.Table:
        """The documents that fit, with why."""
        found = self._index.match(documents, reasons=True)
        table = documents if isinstance(documents, pa.Table) else pa.Table.from_batches([documents])
        kept = table.take(pa.array(found.documents))
        texts = {name: table.column(name) for name in self._language.fields.text}
        columns = [
            pa.array(found.scores),
            highlight_lists(texts, found),
            pa.array(found.explanations, pa.string()),
        ]
        for field, column in zip(_FOUND, columns, strict=True):
            kept = kept.append_column(field, column)
        return kept

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same for many batches: what Spark's `mapInArrow` runs."""
        for batch in batches:
            yield from self.match(batch).to_batches()


def match(
    documents: Any,
    query: str,
    *,
    text: Names | None = None,
    filters: Names | None = None,
    language: str | None = None,
    stop_words: Iterable[str] = (),
    default: str = "or",
) -> Any:
    """The documents that fit a query, with `score`, `highlights` and `explanation`.

    Documents are an Arrow table, a DataFrame of pandas or of Spark (whose workers then do it), or a
    list of dicts; the result is of the same kind.
    """
    on_spark, as_pandas = hasattr(documents, "mapInArrow"), hasattr(documents, "to_records")
    table = (
        pa.Table.from_pandas(documents, preserve_index=False)
        if as_pandas
        else pa.Table.from_pylist(documents)
        if isinstance(documents, list)
        else documents
    )
    if not on_spark and not isinstance(table, pa.Table | pa.RecordBatch):
        raise InputError(
            f"search.match was given a {type(documents).__name__}.",
            fix="give it an Arrow table, a DataFrame of pandas or Spark, or a list of dicts.",
        )
    schema = _spark_columns(documents) if on_spark else table.schema
    taken = [name for name in schema.names if name in _FOUND.names]
    if taken:
        raise InputError(
            f"The documents have a column {taken[0]!r}, which the result has too.",
            fix="rename it first.",
        )
    search = Search(
        query,
        schema,
        text=text,
        filters=filters,
        language=language,
        stop_words=stop_words,
        default=default,
    )
    if on_spark:
        return _mapped(documents, search)
    found = search.match(table)
    return (
        found.to_pandas()
        if as_pandas
        else found.to_pylist()
        if isinstance(documents, list)
        else found
    )


def _spark_columns(documents: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(documents.schema, timezone="UTC")


def _mapped(documents: DataFrame, search: Search) -> DataFrame:
    from pyspark.sql.types import StructType

    told = StructType.fromDDL(to_spark_ddl(_FOUND))
    assert isinstance(told, StructType)
    return documents.mapInArrow(search, StructType([*documents.schema.fields, *told.fields]))
