"""`headrace search` and `headrace search-test`: search an index that a sink maintains, or try a
query on a topic's history before it is stored.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from headrace.cli.options import JsonOption, LogOption, open_chosen_log, parse_offset
from headrace.cli.output import count_text, echo, print_json
from headrace.errors import BadDuration
from headrace.log.api import Log
from headrace.log.topic_config import resolve_offset_alias
from headrace.pipeline.document_search import Search


def search(
    index: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX",
            help="The directory of an index that `headrace sync TOPIC search:DIRECTORY` maintains.",
        ),
    ],
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", help='Words, "a phrase", row.COLUMN:WORD, AND, OR, -WORD.'),
    ],
    max_rows: Annotated[
        int, typer.Option("--max", min=1, help="Show at most this many rows.")
    ] = 10,
    json: JsonOption = False,
) -> None:
    """Search an index, with the best matches first.

    Example: headrace search products "red shoes"
    """
    from headrace.sinks.search_target import search as search_index

    matches = search_index(index, query, limit=max_rows)
    for score, row in matches:
        if json:
            print_json({"score": score, "row": json_module.loads(row)})
        else:
            echo(f"{score:6.2f}  {row}")
    if not matches and not json:
        echo("Nothing found.")


def search_test(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="The topic with the documents.")],
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help='A search query, such as: storm AND price:<20 -"heavy rain".',
        ),
    ],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="OFFSET",
            help="How far back, such as 7d, or earliest (the default), or a time.",
        ),
    ] = "earliest",
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", help="A column whose words are searched. Default: all STRING columns."
        ),
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", help="A column for values and ranges. Default: all others."),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="The language of the stemmer, such as english.")
    ] = None,
    max_rows: Annotated[
        int, typer.Option("--max", min=1, help="Show at most this many rows; all are counted.")
    ] = 20,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Try a search query on a topic's history: show the rows that it would have found, and count
    them.

    Example: headrace search-test articles "storm AND language:en" --from 7d

    Put -- before the arguments if the query begins with a minus: headrace search-test --from 7d --
    articles "-football"
    """
    with open_chosen_log(context, log) as opened_log:
        schema = opened_log.topic(topic).arrow_schema
        columns = [name for name in schema.names if not name.startswith("_")]
        search = Search(
            query,
            pa.schema([schema.field(name) for name in columns]),
            text=text or None,
            filters=filters or None,
            language=language,
        )
        read_rows = found_rows = 0
        for batch in _history(opened_log, topic, columns, _start(start)):
            read_rows += batch.num_rows
            matches = search.match(batch).to_pylist()
            for row in matches[: max(0, max_rows - found_rows)]:
                _show(row, json=json)
            found_rows += len(matches)
        if json:
            print_json({"rows": read_rows, "found": found_rows})
        else:
            echo(f"{count_text(found_rows, 'row')} of {read_rows:,} would have been found.")


def _start(text: str) -> str | int | datetime:
    """The offset or time of --from; a duration means that long ago."""
    try:
        return parse_offset(f"{text} ago", option="--from")
    except (BadDuration, typer.BadParameter):
        return parse_offset(resolve_offset_alias(text) or "earliest", option="--from")


def _history(
    log: Log, topic: str, columns: list[str], start: str | int | datetime
) -> Iterator[pa.RecordBatch]:
    ends = log.end_offsets(topic)
    if start == "earliest":
        starts = log.start_offsets(topic)
    elif start == "latest":
        starts = ends
    elif isinstance(start, int):
        starts = dict.fromkeys(ends, start)
    else:
        starts = log.offsets_at(topic, start)
    for partition in sorted(ends):
        if starts[partition] < ends[partition]:
            yield from log.read(
                topic, partition, starts[partition], ends[partition], columns=columns
            )


def _show(row: dict[str, object], *, json: bool) -> None:
    if json:
        print_json(row)
        return
    score = row.pop("score")
    highlights = row.pop("highlights")
    explanation = row.pop("explanation")
    text = ", ".join(f"{name}={value!r}" for name, value in row.items() if value is not None)
    echo(f"{score:>5g}  {text if len(text) <= 300 else text[:299] + '…'}")
    snippets: dict[str, None] = {}
    if isinstance(highlights, list):
        snippets = dict.fromkeys(highlight["snippet"] for highlight in highlights)
    suffix = f": {' | '.join(list(snippets)[:3])}" if snippets else ""
    echo(f"       matches {explanation}{suffix}")
