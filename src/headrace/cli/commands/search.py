"""`headrace search`: look something up in an index that a sink keeps."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from headrace.cli.options import JsonOption, LogOption, opened, place
from headrace.cli.output import counted, emit, say
from headrace.errors import BadDuration
from headrace.log.api import Log
from headrace.log.topic_config import place_word
from headrace.pipeline.document_search import Search


def search(
    index: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX",
            help="The directory of an index, which `headrace sync TOPIC search:DIRECTORY` keeps.",
        ),
    ],
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", help='Words, "a phrase", row.COLUMN:WORD, AND, OR, -WORD.'),
    ],
    most: Annotated[int, typer.Option("--max", min=1, help="At most so many rows.")] = 10,
    json: JsonOption = False,
) -> None:
    """Search an index; the best rows first.

    Example: headrace search products "red shoes"
    """
    from headrace.sinks.search_index import search as search_index

    found = search_index(index, query, most=most)
    for score, row in found:
        if json:
            emit({"score": score, "row": json_module.loads(row)})
        else:
            say(f"{score:6.2f}  {row}")
    if not found and not json:
        say("Nothing found.")


# `headrace search-test`: which rows of a topic's history a search query would have found, before it
# is stored.


def search_test(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic with the documents.")],
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help='As queries of search are written: storm AND price:<20 -"heavy rain".',
        ),
    ],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="How far back, such as 7d; or earliest (the default), or a time.",
        ),
    ] = "earliest",
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", help="A column whose words are searched; all STRING columns unless given."
        ),
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", help="A column for values and ranges; all others unless given."),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="The language of the stemmer, such as english.")
    ] = None,
    most: Annotated[
        int, typer.Option("--max", min=1, help="Show at most so many rows; all are counted.")
    ] = 20,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Try a search query on a topic's history: the rows that it would have found, and how many of
    all.

    Example: headrace search-test articles "storm AND language:en" --from 7d

    Before a query that begins with a minus, two of them stand alone: headrace search-test --from 7d
    -- articles "-football"
    """
    with opened(context, log) as opened_log:
        schema = opened_log.topic(topic).arrow_schema
        columns = [name for name in schema.names if not name.startswith("_")]
        search = Search(
            query,
            pa.schema([schema.field(name) for name in columns]),
            text=text or None,
            filters=filters or None,
            language=language,
        )
        read = found = 0
        for batch in _history(opened_log, topic, columns, _start(start)):
            read += batch.num_rows
            matches = search.match(batch).to_pylist()
            for row in matches[: max(0, most - found)]:
                _show(row, json=json)
            found += len(matches)
        if json:
            emit({"rows": read, "found": found})
        else:
            say(f"{counted(found, 'row')} of {read:,} would have been found.")


def _start(text: str) -> str | int | datetime:
    """A duration means so long ago."""
    try:
        return place(f"{text} ago", option="--from")
    except (BadDuration, typer.BadParameter):
        return place(place_word(text) or "earliest", option="--from")


def _history(
    log: Log, topic: str, columns: list[str], start: str | int | datetime
) -> Iterator[pa.RecordBatch]:
    ends = log.end_offsets(topic)
    starts = (
        log.start_offsets(topic)
        if start == "earliest"
        else (
            ends
            if start == "latest"
            else (
                dict.fromkeys(ends, start)
                if isinstance(start, int)
                else log.offsets_at(topic, start)
            )
        )
    )
    for partition in sorted(ends):
        if starts[partition] < ends[partition]:
            yield from log.read(
                topic, partition, starts[partition], ends[partition], columns=columns
            )


def _show(row: dict[str, object], *, json: bool) -> None:
    if json:
        emit(row)
        return
    score, places, why = row.pop("score"), row.pop("highlights"), row.pop("explanation")
    shown = ", ".join(f"{name}={value!r}" for name, value in row.items() if value is not None)
    say(f"{score:>5g}  {shown if len(shown) <= 300 else shown[:299] + '…'}")
    snippets = dict.fromkeys(each["snippet"] for each in places) if isinstance(places, list) else {}
    say(f"       fits {why}" + (f": {' | '.join(list(snippets)[:3])}" if snippets else ""))
