"""`hr.search`: one query over documents that exist already, to try a query on a topic's history
before it is stored. For stored queries over a stream there is `Stream.search`.

    hr.search.match(articles, "storm AND price:<20")                   Arrow, pandas or Spark
    headrace search-test articles "storm AND price:<20" --from 7d      a topic's history
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.search.index import QueryIndex, StoredQuery
from headrace.operators.search.kernel import (
    EXPLANATION,
    HIGHLIGHT_TYPE,
    HIGHLIGHTS,
    SCORE,
    highlight_lists,
)
from headrace.operators.search.syntax import filter_kind
from headrace.pipeline.search import SearchOptions, search_language
from headrace.types.schema import to_spark_ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Search", "match"]

Names = str | Sequence[str]
_MATCH_COLUMNS = pa.schema(
    [(SCORE, pa.float64()), (HIGHLIGHTS, HIGHLIGHT_TYPE), (EXPLANATION, pa.string())]
)


class Search:
    """A query that is compiled for documents with some columns.

    Args:
        query: The query, as in `"storm AND price:<20"`.
        schema: The documents' columns.
        text: The columns whose words are searched; all STRING columns if left out.
        filters: The columns for exact values and ranges; all others if left out.
        language: The language of a stemmer, such as `"english"`.
        stop_words: Words that are ignored.
        default: What words side by side mean: `"or"` or `"and"`.

    Raises:
        BadSearch: The query cannot be parsed.
        UnknownColumn: A column does not exist.

    Example:
        ```python
        storms = hr.search.Search("storm", pa.schema([("title", pa.string())]))
        storms.match(pa.table({"title": ["a storm", "sunshine"]})).num_rows  # 1
        ```
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
        if text is None:
            text = [field.name for field in schema if pa.types.is_string(field.type)]
        if filters is None:
            text_columns = {text} if isinstance(text, str) else set(text)
            filters = [
                field.name
                for field in schema
                if field.name not in text_columns and filter_kind(field.type) is not None
            ]
        options = SearchOptions(
            query, text, filters, language=language, stop_words=tuple(stop_words), default=default
        )
        self._language = search_language(schema, options, where="search.match")
        self._index = QueryIndex.empty(self._language).with_changes(
            {b"": StoredQuery.of(self._language, query)}
        )

    def match(self, documents: pa.Table | pa.RecordBatch) -> pa.Table:
        """The documents that match, with `score`, `highlights` and `explanation`.

        Args:
            documents: Documents with the columns that the query was compiled for.

        Returns:
            The matching documents, in their order.

        Example:
            ```python
            storms = hr.search.Search("storm", pa.schema([("title", pa.string())]))
            storms.match(pa.table({"title": ["a storm", "sunshine"]}))
            ```
        """
        matches = self._index.match(documents, explain=True)
        table = documents if isinstance(documents, pa.Table) else pa.Table.from_batches([documents])
        kept = table.take(pa.array(matches.documents))
        texts = {name: table.column(name) for name in self._language.fields.text}
        columns = [
            pa.array(matches.scores),
            highlight_lists(texts, matches),
            pa.array(matches.explanations, pa.string()),
        ]
        for field, column in zip(_MATCH_COLUMNS, columns, strict=True):
            kept = kept.append_column(field, column)
        return kept

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Match batches of documents one by one; Spark's `mapInArrow` calls this."""
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
    """Find the documents that match a query.

    Args:
        documents: An Arrow table, a DataFrame of pandas or of Spark, or a list of dicts.
        query: The query, as in `"storm AND price:<20"`.
        text: The column or columns whose words are searched; all STRING columns if left out.
        filters: The columns for exact values and ranges; all others if left out.
        language: The language of a stemmer, such as `"english"`, for documents and query.
        stop_words: Words that are ignored in documents and query.
        default: What words side by side mean: `"or"`, one of them must match, or `"and"`.

    Returns:
        The matching documents with `score`, `highlights` and `explanation`, in the kind that was
        given. A Spark DataFrame is matched by Spark's workers.

    Raises:
        BadSearch: The query cannot be parsed.
        UnknownColumn: A column does not exist.
        InputError: `documents` is of another kind, or has one of the result's columns.

    Example:
        ```python
        documents = [{"title": "a storm at sea", "price": 12.5}, {"title": "sun", "price": 3.0}]
        hr.search.match(documents, "storm AND price:<20")
        ```
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
    taken = [name for name in schema.names if name in _MATCH_COLUMNS.names]
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
        return _match_on_spark(documents, search)
    result = search.match(table)
    if as_pandas:
        return result.to_pandas()
    return result.to_pylist() if isinstance(documents, list) else result


def _spark_columns(documents: DataFrame) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(documents.schema, timezone="UTC")


def _match_on_spark(documents: DataFrame, search: Search) -> DataFrame:
    from pyspark.sql.types import StructType

    added = StructType.fromDDL(to_spark_ddl(_MATCH_COLUMNS))
    assert isinstance(added, StructType)
    return documents.mapInArrow(search, StructType([*documents.schema.fields, *added.fields]))
