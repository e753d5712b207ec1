"""Search when it is declared: what `stream.search(queries, …)` checks, and the steps it adds to the
plan. `hr.search` (`document_search`) reads its queries by the same rules.

The steps are in `headrace.plan.search_steps`, the kernels in `headrace.operators.search`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import PlanError, UnknownColumn
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.plan import Step
from headrace.plan.search_steps import GatherStep, SearchStep
from headrace.types.schema import type_name

if TYPE_CHECKING:
    from headrace.operators.search.parser import Language


Names = str | Iterable[str]
MATCH, DOCUMENT = "match", "document"


@dataclass(frozen=True)
class SearchOptions:
    """The arguments of `search`."""

    query: str
    text: Names
    filters: Names = ()
    per: str = MATCH
    highlights: bool = False
    explain: bool = False
    language: str | None = None
    stop_words: tuple[str, ...] = ()
    default: str = "or"
    suffix: str | None = None


def search_step(
    documents: Relation, queries: Any, options: SearchOptions, name: str | None
) -> Step:
    """Check `documents.search(queries, …)`, and make its steps: the search and, for one row per
    document, a step that gathers the shards' matches.
    """
    where = documents.step_label("search", name)
    if not (isinstance(queries, Relation) and queries.step.is_table):
        raise PlanError(
            f"The step {where} was given a {type(queries).__name__} of queries.",
            fix="give it a table, such as pipeline.table(…), or to_table(key) of a stream.",
        )
    if queries.pipeline is not documents.pipeline:
        raise PlanError(
            f"The step {where} searches with queries of another pipeline.",
            fix="write them to a topic, and read that topic here.",
        )
    language = search_language(documents.schema, options, where=where)
    if options.query not in queries.schema.names:
        raise UnknownColumn(
            options.query, queries.schema.names, where=f"The queries of the step {where}"
        )
    if not pa.types.is_string(queries.schema.field(options.query).type):
        raise PlanError(
            f"The step {where} has queries in {options.query!r}, which is"
            f" {type_name(queries.schema.field(options.query).type)}.",
            fix="name the STRING column that has them.",
        )
    columns = _query_columns(documents.schema, queries.schema, options, where=where)
    gathered = options.per == DOCUMENT
    if options.per not in {MATCH, DOCUMENT}:
        raise PlanError(
            f"The step {where} has per={options.per!r}.",
            fix='choose per="match" or per="document".',
        )
    step = SearchStep(
        name=name or "",
        inputs=(documents.step, queries.step),
        schema=pa.schema([]),
        key=documents.key,
        query=options.query,
        query_columns=columns,
        language=language,
        highlights=options.highlights,
        explain=options.explain,
        gathered=gathered,
    )
    step = replace(step, schema=step.settings.output)
    if not gathered:
        cols.check_columns(step.schema, where=f"The step {where}")
        return step
    from headrace.operators.search.kernel import DOCUMENT_ID

    beside_matches = {*documents.schema.names, DOCUMENT_ID}
    matches = pa.schema([field for field in step.schema if field.name not in beside_matches])
    gather = GatherStep(
        name=f"{name}.gather" if name else "",
        inputs=(step,),
        schema=pa.schema([]),
        key=documents.key,
        documents=documents.schema,
        matches=matches,
        order=step.query_key,
    )
    return replace(
        gather, schema=cols.check_columns(gather.kernel().output, where=f"The step {where}")
    )


def search_language(schema: pa.Schema, options: SearchOptions, *, where: str) -> Language:
    """The language of queries over some columns. Raises if a column does not fit."""
    from headrace.operators.search.analyzer import Analyzer
    from headrace.operators.search.parser import AND, OR, Language
    from headrace.operators.search.syntax import Fields, filter_kind

    text, filters = (
        tuple([names] if isinstance(names, str) else names)
        for names in (options.text, options.filters)
    )
    for name in (*text, *filters):
        if name not in schema.names:
            raise UnknownColumn(name, schema.names, where=f"The input of the step {where}")
    if not text or len({*text, *filters}) < len(text) + len(filters):
        raise PlanError(
            f"The step {where} names no text columns, or a column twice.",
            fix='name each once: text=["title", "body"], filters=["price"].',
        )
    for name in text:
        if not pa.types.is_string(schema.field(name).type):
            raise PlanError(
                f"The step {where} searches {name!r}, which is"
                f" {type_name(schema.field(name).type)}.",
                fix="name STRING columns in text=; numbers and times belong into filters=.",
            )
    kinds = [(name, filter_kind(schema.field(name).type)) for name in filters]
    for name, kind in kinds:
        if kind is None:
            raise PlanError(
                f"The step {where} filters by {name!r}, which is"
                f" {type_name(schema.field(name).type)}.",
                fix="name plain columns: numbers, strings, booleans, dates and times.",
            )
    if options.default not in {OR, AND}:
        raise PlanError(
            f"The step {where} has default={options.default!r}.",
            fix='choose default="or" or default="and".',
        )
    analyzer = Analyzer(options.language, frozenset(options.stop_words)).check()
    return Language(
        Fields(text, tuple((name, kind) for name, kind in kinds if kind is not None)),
        analyzer,
        options.default,
    )


def _query_columns(
    documents: pa.Schema, queries: pa.Schema, options: SearchOptions, *, where: str
) -> tuple[tuple[str, str], ...]:
    """The queries' columns and what they are called in the result: with the suffix, if documents
    have a column of that name.
    """
    taken = {name.lower() for name in documents.names}
    columns = []
    for name in queries.names:
        if name.lower() in taken and options.suffix is None:
            raise PlanError(
                f"Documents and queries of the step {where} have a column {name!r}.",
                fix='tell them apart with suffix="_query", or select or rename one first.',
            )
        columns.append((name, f"{name}{options.suffix}" if name.lower() in taken else name))
    return tuple(columns)
