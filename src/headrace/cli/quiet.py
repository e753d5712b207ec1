"""How the command ends when something goes wrong: a short red message with the way out, no traceback, and a silent end for closed pipes."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from headrace.cli.settings import Settings
from headrace.errors import HeadraceError


class QuietGroup(TyperGroup):
    """The root of all commands: turns our errors into exit code 1, and a reader that went away into a quiet end."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except HeadraceError as error:
            if isinstance(ctx.obj, Settings) and ctx.obj.debug:
                raise
            show(error)
            raise typer.Exit(1) from None
        except BrokenPipeError:
            _let_go_of_stdout()
            raise typer.Exit(0) from None


def show(error: HeadraceError) -> None:
    """The error for a person: what happened in red, what to do below it."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Error: {error.message}", style="red")
    for note in getattr(error, "__notes__", ()):
        console.print(f"  {note}")
    if error.fix:
        console.print(f"To fix: {error.fix}")


def _let_go_of_stdout() -> None:
    """Nobody reads any more: what is still buffered must not raise again when the interpreter shuts down."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (it must stay open until the end)
