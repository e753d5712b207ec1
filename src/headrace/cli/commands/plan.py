"""`headrace plan`: what a pipeline file declares, as a tree, a graph or JSON. Starts nothing and
opens no log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import JsonOption
from headrace.cli.output import emit, say


def plan(
    file: Annotated[Path, typer.Argument(help="A Python file that declares a pipeline.")],
    pipeline: Annotated[
        str | None,
        typer.Option("--pipeline", metavar="NAME", help="Which one, if the file declares several."),
    ] = None,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="A graph in Mermaid's language.")
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
    from headrace.pipeline.loader import load
    from headrace.plan import rendering as draw
    from headrace.plan import rendering as pictures

    made = load(file, pipeline).plan()
    if json:
        described = made.describe()
        for each in (*described["steps"], *described["outputs"], *described["ingests"]):
            emit({"pipeline": made.name, **each})
    elif mermaid:
        typer.echo(draw.mermaid(made), nl=False)
    elif svg is not None:
        _write(svg, pictures.svg(made))
    else:
        say(str(made))


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
    say(f"Drawn in {path}.")
