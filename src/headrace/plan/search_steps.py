"""The steps of search: `SearchStep` matches documents against stored queries, `GatherStep` puts the
shards' matches of a document together.

`headrace.pipeline.search` checks and builds them; the kernels are in
`headrace.operators.search`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from headrace.plan.plan import Step, TimeColumn, Times

if TYPE_CHECKING:
    from headrace.operators.search.kernel import GatherKernel, SearchKernel, SearchSettings
    from headrace.operators.search.parser import Language

MATCHES = "matches"


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchStep(Step):
    """One row per match of a document with a stored query. Its inputs are the documents and the
    queries.
    """

    operation: ClassVar[str] = "search"
    stateful: ClassVar[bool] = True

    query: str
    query_columns: tuple[tuple[str, str], ...]
    language: Language
    highlights: bool = False
    explain: bool = False
    gathered: bool = False

    @property
    def query_key(self) -> tuple[str, ...]:
        """The columns of the queries' key, as the result calls them. Queries are sharded by it."""
        names = dict(self.query_columns)
        return tuple(names[name] for name in self.inputs[1].key)

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.query_key

    @property
    def input_keys(self) -> tuple[tuple[str, ...] | None, ...]:
        return None, self.inputs[1].key

    @property
    def settings(self) -> SearchSettings:
        from headrace.operators.search.kernel import SearchSettings

        documents, queries = self.inputs
        return SearchSettings(
            step=self.name,
            documents=documents.schema,
            queries=queries.schema,
            key=queries.key,
            query=self.query,
            query_columns=self.query_columns,
            language=self.language,
            highlights=self.highlights,
            explain=self.explain,
            with_document_ids=self.gathered,
        )

    def kernel(self) -> SearchKernel:
        from headrace.operators.search.kernel import SearchKernel

        return SearchKernel(self.settings)

    @property
    def watermark_inputs(self) -> tuple[Step, ...]:
        """Matches follow the documents' watermark."""
        return self.inputs[:1]

    def time(self, inputs: Times) -> TimeColumn | None:
        return inputs[0]

    def details(self) -> dict[str, Any]:
        analyzer = self.language.analyzer
        more: dict[str, Any] = {"language": analyzer.language} if analyzer.language else {}
        more |= {"stop_words": sorted(analyzer.stop_words)} if analyzer.stop_words else {}
        more |= {"default": self.language.default} if self.language.default != "or" else {}
        fields = self.language.fields
        return {
            "query": self.query,
            "text": list(fields.text),
            "filters": [name for name, _ in fields.filters],
            **more,
        }

    def summary(self) -> str:
        fields = self.language.fields
        filters = (
            f", filtered by {', '.join(name for name, _ in fields.filters)}"
            if fields.filters
            else ""
        )
        return f"{self.query} in {', '.join(fields.text)}{filters}"


@dataclass(frozen=True, kw_only=True, eq=False)
class GatherStep(Step):
    """The matches of each document as a list, gathered from all shards."""

    operation: ClassVar[str] = "gather"
    stateful: ClassVar[bool] = True

    documents: pa.Schema
    matches: pa.Schema
    order: tuple[str, ...]

    @property
    def allows_null_keys(self) -> bool:
        return True

    def kernel(self) -> GatherKernel:
        from headrace.operators.search.kernel import GatherKernel

        return GatherKernel(self.documents, self.matches, self.order, MATCHES)

    def details(self) -> dict[str, Any]:
        return {"matches": self.matches.names}

    def summary(self) -> str:
        return "a row a document"
