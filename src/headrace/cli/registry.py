"""Which commands there are, where each is, and what `headrace --help` says of it: a command's
module is imported when it is called.

All of them together import Arrow, pandas and more, a second's work that nobody should wait for to
read a list. The tests see that each line here is the first one of what the command says of itself.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from headrace.cli.options import Settings
from headrace.errors import HeadraceError

# How the command ends when something goes wrong: a short red message with the way out, no
# traceback, and a silent end for closed pipes.


class QuietGroup(TyperGroup):
    """The root of all commands: turns our errors into exit code 1, and a reader that went away into
    a quiet end.
    """

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
    """Nobody reads any more: what is still buffered must not raise again when the interpreter shuts
    down.
    """
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (it must stay open until the end)


class Entry(NamedTuple):
    """A command, or with the attribute `app` a group of them."""

    name: str
    module: str
    attribute: str
    help: str


COMMANDS = (
    Entry(
        "demo",
        "demo",
        "demo",
        "Show a small web shop at work, with its dashboard, until Ctrl-C; with --for, every number"
        " is computed a second time in the end.",
    ),
    Entry("topic", "topic", "app", "Topics and tables: create, list, show, alter, delete."),
    Entry(
        "produce",
        "produce",
        "produce",
        "Append rows. On a table they are upserts, unless a row says otherwise in _change_type"
        " (insert, update_postimage, delete).",
    ),
    Entry(
        "consume",
        "consume",
        "consume",
        "Print a topic's rows up to its end, or with --follow as they come.",
    ),
    Entry("group", "group", "app", "Consumer groups: list, show, reset."),
    Entry(
        "lag",
        "group",
        "lag",
        "Show how far groups are behind. Exits with 3 when a threshold is passed (with --watch: was"
        " passed).",
    ),
    Entry("queue", "queue", "app", "A topic as a queue, for scripts: receive, ack, nack."),
    Entry("dead", "dead", "app", "Dead letters: list, show, replay."),
    Entry("log", "log", "app", "Care of the log: verify, stats, compact."),
    Entry(
        "plan",
        "plan",
        "plan",
        "Show the plan of a pipeline: its steps, their names, inputs and outputs. Nothing is"
        " started.",
    ),
    Entry(
        "run",
        "run",
        "run",
        "Run a pipeline: take in its topics, keep its views and derived topics, and serve the views"
        " on this machine, until Ctrl-C or SIGTERM.",
    ),
    Entry(
        "status",
        "status",
        "status",
        "Show a pipeline's run: its tick, how far it is behind, rows a second, the size of its"
        " state, clocks and who holds them back, errors.",
    ),
    Entry(
        "explain",
        "explain",
        "explain",
        "Say what a step waits for: its open windows, a key's partial matches, its clocks, the"
        " producers that hold them back, and what would release them.",
    ),
    Entry(
        "dashboard",
        "serve",
        "dashboard",
        "Show a pipeline in the browser: its graph, topics, time, views as they change, matches,"
        " dead letters, SQL. Until Ctrl-C.",
    ),
    Entry(
        "top",
        "status",
        "top",
        "Show a pipeline at a glance: rates, steps, time, dead letters. Until Ctrl-C.",
    ),
    Entry(
        "serve",
        "serve",
        "serve",
        "Serve the views of a pipeline over HTTP, until Ctrl-C: rows, SQL, and changes as they"
        " happen. With a log, its topics too.",
    ),
    Entry("view", "view", "app", "Views: list, show, compare and switch versions."),
    Entry(
        "state", "state", "app", "A pipeline's state: list its steps, show one, verify the files."
    ),
    Entry(
        "replay",
        "run",
        "replay",
        "Build a version of a pipeline beside it: the same ticks over again, with state, topics and"
        " views of its own.",
    ),
    Entry(
        "rescale",
        "run",
        "rescale",
        "Choose how many shards a pipeline has: how many tasks of a stage can work at once. Its"
        " rows stay the same.",
    ),
    Entry(
        "capture",
        "capture",
        "capture",
        "Capture the changes of databases into the log, until Ctrl-C or SIGTERM.",
    ),
    Entry(
        "sync",
        "sync",
        "sync",
        "Keep another system equal to a topic, exactly once, until Ctrl-C or SIGTERM.",
    ),
    Entry("gateway", "gateway", "app", "Take rows in from outside: HTTP, StatsD, ZeroMQ, AMQP."),
    Entry(
        "watch",
        "alert",
        "watch",
        "Watch lag, watermarks, late and dropped rows, failed batches and dead letters, until"
        " Ctrl-C.",
    ),
    Entry("alert", "alert", "app", "Show what alerts have told, and silence them for a while."),
    Entry("events", "events", "app", "Event stores: list, history, state, digest, excise, forget."),
    Entry("search", "search", "search", "Search an index; the best rows first."),
    Entry(
        "search-test",
        "search",
        "search_test",
        "Try a search query on a topic's history: the rows that it would have found, and how many"
        " of all.",
    ),
)


class LazyGroup(QuietGroup):
    """Lists commands as the table says, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        entry = next((entry for entry in COMMANDS if entry.name == name), None)
        return name, command if entry is None else loaded(entry), rest


def register(app: typer.Typer) -> None:
    """Put a name and a line of help for each command into a group; `LazyGroup` puts the command
    itself in its place.
    """
    for entry in COMMANDS:
        app.command(entry.name, help=entry.help)(_stand_in)


def _stand_in() -> None:
    """Never called: a command is loaded before."""


def loaded(entry: Entry) -> Any:
    """The command itself, imported now."""
    found = getattr(import_module(f"headrace.cli.commands.{entry.module}"), entry.attribute)
    if isinstance(found, typer.Typer):
        group = get_group(found)
        group.name = entry.name
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(entry.name)(found)
    return get_command(alone)
