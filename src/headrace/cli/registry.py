"""The list of commands: the module of each, and its line in `headrace --help`. A command's module
is imported when the command is called.

Importing all modules takes a second (Arrow, pandas and more), which is too long to wait for a list.
A test checks that each line here equals the first line of the command's own help.
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

# Errors


class ErrorGroup(TyperGroup):
    """The root of all commands. It turns Headrace errors into a short red message and exit code 1,
    and a closed pipe into a silent end.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except HeadraceError as error:
            if isinstance(ctx.obj, Settings) and ctx.obj.debug:
                raise
            print_error(error)
            raise typer.Exit(1) from None
        except BrokenPipeError:
            # Redirect standard output to nowhere after its reader has closed it, so that flushing
            # the buffer does not raise again when the interpreter shuts down.
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except (OSError, ValueError):
                sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (stays open)
            raise typer.Exit(0) from None


def print_error(error: HeadraceError) -> None:
    """Print an error on standard error: what happened in red, and below it what to do."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Error: {error.message}", style="red")
    for note in getattr(error, "__notes__", ()):
        console.print(f"  {note}")
    if error.fix:
        console.print(f"To fix: {error.fix}")


# Commands


class CommandEntry(NamedTuple):
    """A command, or with the attribute `app` a group of commands."""

    name: str
    module: str
    attribute: str
    help: str


COMMANDS = (
    CommandEntry(
        "demo",
        "pipeline.demo",
        "demo",
        "Run a small web shop with its dashboard, until Ctrl-C; with --for, every number is"
        " computed a second time at the end.",
    ),
    CommandEntry(
        "topic", "log.topic", "app", "Topics and tables: create, list, show, alter, trim, delete."
    ),
    CommandEntry(
        "produce",
        "log.produce",
        "produce",
        "Append rows. In a table they are upserts, unless _change_type of a row is insert,"
        " update_postimage or delete.",
    ),
    CommandEntry(
        "consume",
        "log.consume",
        "consume",
        "Print a topic's rows up to its end, or with --follow as they arrive.",
    ),
    CommandEntry("group", "log.group", "app", "Consumer groups: list, show, reset, delete."),
    CommandEntry(
        "lag",
        "log.lag",
        "lag",
        "Show how far consumer groups are behind. Exits with 3 if a threshold is exceeded, with"
        " --watch if it was exceeded at any time.",
    ),
    CommandEntry(
        "queue",
        "log.queue",
        "app",
        "A topic as a queue, for scripts: receive, ack, nack, renew, peek, stats, purge.",
    ),
    CommandEntry("dead", "log.dead", "app", "Dead letters: list, show, replay."),
    CommandEntry(
        "log", "log.log", "app", "Maintain the log: verify, stats, compact, backup, repair."
    ),
    CommandEntry(
        "plan",
        "pipeline.plan",
        "plan",
        "Show the plan of a pipeline: its steps, their names, inputs and outputs. Nothing is"
        " started.",
    ),
    CommandEntry(
        "run",
        "pipeline.run",
        "run",
        "Run a pipeline: process its topics, update its views and derived topics, and serve the"
        " views on this machine, until Ctrl-C or SIGTERM.",
    ),
    CommandEntry(
        "status",
        "pipeline.status",
        "status",
        "Show the status of a pipeline: its tick, how far it is behind, rows per second, the size"
        " of its state, watermarks and the producers that hold them back, errors.",
    ),
    CommandEntry(
        "explain",
        "pipeline.explain",
        "explain",
        "Explain what a step waits for: its open windows, a key's partial matches, its watermarks,"
        " the producers that hold them back, and what would release them.",
    ),
    CommandEntry(
        "dashboard",
        "pipeline.serve",
        "dashboard",
        "Show a pipeline in the browser: its graph, topics, watermarks, views as they change,"
        " matches, dead letters, SQL. Until Ctrl-C.",
    ),
    CommandEntry(
        "top",
        "pipeline.top",
        "top",
        "Show a pipeline at a glance: rates, steps, watermarks, dead letters. Until Ctrl-C.",
    ),
    CommandEntry(
        "serve",
        "pipeline.serve",
        "serve",
        "Serve the views of a pipeline over HTTP, until Ctrl-C: rows, SQL, and changes as they"
        " happen. With a log, its topics too.",
    ),
    CommandEntry("view", "pipeline.view", "app", "Views: list, show, compare and switch versions."),
    CommandEntry(
        "state",
        "pipeline.state",
        "app",
        "A pipeline's state: list its steps, show one, verify the files.",
    ),
    CommandEntry(
        "replay",
        "pipeline.replay",
        "replay",
        "Build a version of a pipeline next to it: replay the same ticks, with state, topics and"
        " views of its own.",
    ),
    CommandEntry(
        "verify-determinism",
        "pipeline.verify_determinism",
        "verify_determinism",
        "Compute some recorded ticks of a pipeline twice, in a temporary directory, and compare the"
        " rows. Exits with 7 if they differ.",
    ),
    CommandEntry(
        "rescale",
        "pipeline.rescale",
        "rescale",
        "Choose how many shards a pipeline has, which is how many tasks of a stage can run at once."
        " Its rows stay the same.",
    ),
    CommandEntry(
        "capture",
        "connectors.capture",
        "capture",
        "Capture the changes of databases into the log, until Ctrl-C or SIGTERM.",
    ),
    CommandEntry(
        "sync",
        "connectors.sync",
        "sync",
        "Keep another system equal to a topic, exactly once, until Ctrl-C or SIGTERM.",
    ),
    CommandEntry(
        "gateway",
        "connectors.gateway",
        "app",
        "Accept rows from outside: HTTP, StatsD, ZeroMQ, AMQP.",
    ),
    CommandEntry(
        "watch",
        "connectors.watch",
        "watch",
        "Watch lag, watermarks, late and dropped rows, failed batches and dead letters, until"
        " Ctrl-C.",
    ),
    CommandEntry(
        "alert",
        "connectors.alert",
        "app",
        "Show the messages of alerts, and silence an alert for a while.",
    ),
    CommandEntry(
        "events",
        "log.events",
        "app",
        "Event stores: list, history, state, digest, truncate, excise, forget, rotate-key.",
    ),
    CommandEntry("search", "log.search", "search", "Search an index, with the best matches first."),
    CommandEntry(
        "search-test",
        "log.search",
        "search_test",
        "Try a search query on a topic's history: show the rows that it would have found, and count"
        " them.",
    ),
)


class LazyGroup(ErrorGroup):
    """Lists commands from `COMMANDS`, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        entry = next((entry for entry in COMMANDS if entry.name == name), None)
        return name, command if entry is None else load_command(entry), rest


def register(app: typer.Typer) -> None:
    """Add a placeholder with a name and a line of help for each command; `LazyGroup` replaces it by
    the command itself.
    """
    for entry in COMMANDS:
        app.command(entry.name, help=entry.help)(_placeholder)


def _placeholder() -> None:
    """Never called: the command is loaded first."""


def load_command(entry: CommandEntry) -> Any:
    """Import the module of a command, and return the command."""
    command = getattr(import_module(f"headrace.cli.commands.{entry.module}"), entry.attribute)
    if isinstance(command, typer.Typer):
        group = get_group(command)
        group.name = entry.name
        return group
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(entry.name)(command)
    return get_command(app)
