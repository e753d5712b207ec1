"""`headrace plan`: shows what a pipeline file declares, as a tree, a graph or JSON; of a file of
SQL also the answers of its SHOW, DESCRIBE and EXPLAIN. It starts nothing and opens no log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import JsonOption
from headrace.cli.output import echo, print_json, print_table


def plan(
    file: Annotated[Path, typer.Argument(help="A file of Python or SQL that declares a pipeline.")],
    pipeline: Annotated[
        str | None,
        typer.Option("--pipeline", metavar="NAME", help="Which one, if the file declares several."),
    ] = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print the graph in Mermaid's language.")
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="OUT", help="Draw the graph into this file; - is standard output."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the plan of a pipeline: its steps, their names, inputs and outputs. Nothing is started.

    Example: headrace plan shop.py --svg shop.svg
    """
    if sum((mermaid, svg is not None, json)) > 1:
        raise typer.BadParameter("Choose one of --mermaid, --svg and --json.")
    from headrace.pipeline.loader import SQL_SUFFIX, load_pipeline, load_sql
    from headrace.plan import rendering

    if file.suffix.lower() == SQL_SUFFIX:
        loaded, results = load_sql(file, pipeline)
        answers = [result.answer for result in results if result.answer is not None]
    else:
        loaded, answers = load_pipeline(file, pipeline), []
    if not (json or mermaid or svg is not None):
        for answer in answers:
            print_table(
                [name.upper() for name in answer.column_names],
                [tuple(row.values()) for row in answer.to_pylist()],
            )
            echo("")
    pipeline_plan = loaded.plan()
    if json:
        description = pipeline_plan.describe()
        for node in (*description["steps"], *description["outputs"], *description["ingests"]):
            print_json({"pipeline": pipeline_plan.name, **node})
    elif mermaid:
        typer.echo(rendering.mermaid(pipeline_plan), nl=False)
    elif svg is not None:
        _write(svg, rendering.svg(pipeline_plan))
    else:
        echo(str(pipeline_plan))


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        typer.echo(text, nl=False)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise typer.BadParameter(
            f"{path} cannot be written: {error.strerror}.", param_hint="--svg"
        ) from None
    echo(f"The graph is in {path}.")
