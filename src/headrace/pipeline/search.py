"""Search in a plan: `stream.search(queries, …)`, the steps it makes, and what is checked when it is
declared.
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
class Asked:
    """What was given to `search`."""

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


def searched(documents: Relation, queries: Any, asked: Asked, name: str | None) -> Step:
    """`documents.search(queries, …)`, checked."""
    where = documents.step_label("search", name)
    _check_inputs(documents, queries, where=where)
    language = search_language(documents.schema, asked, where=where)
    _check_query(queries.schema, asked.query, where=where)
    columns = _query_columns(documents.schema, queries.schema, asked, where=where)
    gathered = asked.per == DOCUMENT
    if asked.per not in {MATCH, DOCUMENT}:
        raise PlanError(
            f"The step {where} has per={asked.per!r}.",
            fix='choose per="match" or per="document".',
        )
    step = SearchStep(
        name=name or "",
        inputs=(documents.step, queries.step),
        schema=pa.schema([]),
        key=documents.key,
        query=asked.query,
        query_columns=columns,
        language=language,
        highlights=asked.highlights,
        explain=asked.explain,
        gathered=gathered,
    )
    step = replace(step, schema=step.settings.output)
    if not gathered:
        cols.check_columns(step.schema, where=f"The step {where}")
        return step
    from headrace.operators.search.kernel import PLACE

    found = [
        field
        for field in step.schema
        if field.name not in documents.schema.names and field.name != PLACE
    ]
    matches = pa.schema(found)
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


def _check_inputs(documents: Relation, queries: Any, *, where: str) -> None:

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


def search_language(schema: pa.Schema, asked: Asked, *, where: str) -> Language:
    """How queries over some columns are read, checked; `hr.search` uses it too."""
    from headrace.operators.search.analyzer import Analysis
    from headrace.operators.search.parser import AND, OR, Language
    from headrace.operators.search.syntax import Fields, filter_kind

    text, filters = (
        tuple([names] if isinstance(names, str) else names) for names in (asked.text, asked.filters)
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
    if asked.default not in {OR, AND}:
        raise PlanError(
            f"The step {where} has default={asked.default!r}.",
            fix='choose default="or" or default="and".',
        )
    analysis = Analysis(asked.language, frozenset(asked.stop_words)).check()
    return Language(
        Fields(text, tuple((name, kind) for name, kind in kinds if kind is not None)),
        analysis,
        asked.default,
    )


def _check_query(schema: pa.Schema, query: str, *, where: str) -> None:
    if query not in schema.names:
        raise UnknownColumn(query, schema.names, where=f"The queries of the step {where}")
    if not pa.types.is_string(schema.field(query).type):
        raise PlanError(
            f"The step {where} has queries in {query!r}, which is"
            f" {type_name(schema.field(query).type)}.",
            fix="name the STRING column that has them.",
        )


def _query_columns(
    documents: pa.Schema, queries: pa.Schema, asked: Asked, *, where: str
) -> tuple[tuple[str, str], ...]:
    """All columns of the queries, those that documents have too with the suffix."""
    taken = {name.lower() for name in documents.names}
    found = []
    for name in queries.names:
        if name.lower() in taken and asked.suffix is None:
            raise PlanError(
                f"Documents and queries of the step {where} have a column {name!r}.",
                fix='tell them apart with suffix="_query", or select or rename one first.',
            )
        found.append((name, f"{name}{asked.suffix}" if name.lower() in taken else name))
    return tuple(found)
