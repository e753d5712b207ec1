"""The command `headrace`: one file a command group, all of them against the log's interface (`headrace.log.api`).

Exit codes, for scripts: 0 done, 1 an error (what happened and what to do is on standard error), 2 wrong usage, 3 a lag threshold was passed,
4 `log verify` found damage, 5 `view diff` or `sync --check` found a difference, 130 ended by Ctrl-C. A reader that closes our output early, such as `head`, ends a command quietly with 0.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headrace._version import __version__
from headrace.cli import (
    alert,
    capture,
    consume,
    dashboard,
    dead,
    demo,
    events,
    explain,
    gateway,
    group,
    lag,
    log,
    plan,
    produce,
    queue,
    replay,
    rescale,
    run,
    search,
    search_test,
    serve,
    state,
    status,
    sync,
    top,
    topic,
    view,
    view_versions,
    watch,
)
from headrace.cli.output import emit, say
from headrace.cli.quiet import QuietGroup
from headrace.cli.settings import JsonOption, Settings

app = typer.Typer(
    name="headrace",
    cls=QuietGroup,
    help="Stream processing for Python: a durable log with topics, groups and queues, in a directory or on Kafka, and pipelines over it, with views that are served.\n\n"
    "Say which log with --log or HEADRACE_LOG: file:PATH is a directory, kafka://HOST:PORT a broker.\n\n"
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 a lag threshold was passed, 4 damage was found, 5 views, or a sink and its topic, differ.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(topic.app, name="topic")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(group.app, name="group")
app.command("lag")(lag.lag)
app.command("watch")(watch.watch)
app.add_typer(queue.app, name="queue")
app.add_typer(dead.app, name="dead")
app.add_typer(alert.app, name="alert")
app.add_typer(log.app, name="log")
app.add_typer(events.app, name="events")
app.command("capture")(capture.capture)
app.add_typer(gateway.app, name="gateway")
app.command("sync")(sync.sync)
app.command("search")(search.search)
app.command("search-test")(search_test.search_test)
app.command("plan")(plan.plan)
app.command("run")(run.run)
app.command("serve")(serve.serve)
app.command("dashboard")(dashboard.dashboard)
app.command("top")(top.top)
app.command("replay")(replay.replay)
app.command("rescale")(rescale.rescale)
app.command("status")(status.status)
app.command("explain")(explain.explain)
app.add_typer(state.app, name="state")
view.app.command("diff")(view_versions.diff)
view.app.command("switch")(view_versions.switch)
view.app.command("drop")(view_versions.drop)
app.add_typer(view.app, name="view")
app.command("demo")(demo.demo)


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    _version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)] = False,
    log: Annotated[str | None, typer.Option("--log", metavar="ADDRESS", help="The log: file:PATH or kafka://HOST:PORT.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.obj = Settings(log=log, debug=debug)


@app.command()
def version(json: JsonOption = False) -> None:
    """Show the version.

    Example: headrace version
    """
    if json:
        emit({"headrace": __version__})
    else:
        say(f"headrace {__version__}")


def main() -> None:
    """The entry point of the installed command."""
    app()
