"""`headrace search`: look something up in an index that a sink keeps."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import emit, say
from headrace.cli.settings import JsonOption


def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="The directory of an index, which `headrace sync TOPIC search:DIRECTORY` keeps.")],
    query: Annotated[str, typer.Argument(metavar="QUERY", help='Words, "a phrase", row.COLUMN:WORD, AND, OR, -WORD.')],
    most: Annotated[int, typer.Option("--max", min=1, help="At most so many rows.")] = 10,
    json: JsonOption = False,
) -> None:
    """Search an index; the best rows first.

    Example: headrace search products "red shoes"
    """
    from headrace.sinks.search_target import search as search_index

    found = search_index(index, query, most=most)
    for score, row in found:
        if json:
            emit({"score": score, "row": json_module.loads(row)})
        else:
            say(f"{score:6.2f}  {row}")
    if not found and not json:
        say("Nothing found.")
