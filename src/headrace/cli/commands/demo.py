"""`headrace demo`: a small web shop, live, with the dashboard; or for a while, with a summary in
which every number was computed twice. A wrong one is exit code 1.

The pipeline is examples/shop.py. Who orders, searches, clicks and pays is in examples/shop_demo,
and so is the second computation.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import Settings, stopping
from headrace.cli.output import say, seconds_text

if TYPE_CHECKING:
    from headrace.serve.server import Server


SHARDS = 2
QUICK_START = {
    "driver_extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "sql_adaptive_enabled": False,
    "sql_codegen_wholeStage": False,
    "sql_codegen_factoryMode": "NO_CODEGEN",
}
"""The first order is counted after about 20 seconds instead of 29: for a shop's few rows a second,
compiling queries and classes costs more than it saves.
"""


def demo(
    context: typer.Context,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="DURATION",
            help=(
                "How long the shop is open once numbers move, as in 30s; then everything is"
                " checked. Default: until Ctrl-C."
            ),
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=3600, envvar="DEMO_SECONDS", help="The same in seconds."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Keep the log, the database and the views in this directory. Default: one that is"
                " gone at the end."
            ),
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Where the dashboard is. Default: 8765, or the next that is free.",
        ),
    ] = None,
    open_browser: Annotated[
        bool,
        typer.Option(
            "--open/--no-open", help="Open the dashboard in the browser, where there is one."
        ),
    ] = True,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="ADDRESS",
            help="Another log, such as kafka://HOST:PORT; one without a shop in it.",
        ),
    ] = None,
    master: Annotated[
        str, typer.Option(help="Spark's master. A cluster's machines must all see the directory.")
    ] = "local[2]",
) -> None:
    """Show a small web shop at work, with its dashboard, until Ctrl-C; with --for, every number is
    computed a second time in the end.

    Example: headrace demo --for 30s
    """
    from headrace.log.spark.session import check_start

    open_s = seconds if for_ is None else _duration_s(for_)
    check_start(master=master)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-demo-", ignore_cleanup_errors=True) as scratch,
        stopping("Closing the shop; once more ends it at once.") as stop,
    ):
        _find_examples()
        from shop_demo.showing import Showing

        home = _fresh(keep) if keep is not None else Path(scratch) / "shop"
        chosen = (
            log or (context.find_object(Settings) or Settings()).log
        )  # not from the environment: that one may be in earnest
        opens = open_browser and open_s is None
        showing = Showing(
            home,
            _told,
            open_s,
            chosen,
            on_serving=lambda server: _point_to(server, port, showing.state, opens=opens),
            port=port,
            stop=stop,
            spark_options=_spark(master),
        )
        checks = showing.show()
        for check in checks:
            say(str(check))
    failed = [check for check in checks if not check.good]
    if checks:
        moved = (
            f"; numbers moved after {seconds_text(showing.steps_s['moved'])}"
            if "moved" in showing.steps_s
            else ""
        )
        say(
            f"{f'{len(failed)} of {len(checks)} are WRONG' if failed else f'All {len(checks)} as it should be'}{moved}."
        )
    else:
        say("The shop is closed.")
    if keep is not None:
        say(f"To look at it again: headrace dashboard {showing.state}")
    if failed:
        raise typer.Exit(1)


def _duration_s(text: str) -> float:
    from headrace.durations import to_us
    from headrace.errors import InputError

    seconds = float(text) if text.isdecimal() else to_us(text, what="--for") / 1e6
    if not 1 <= seconds <= 3600:
        raise InputError(
            f"--for {text} is not from 1 second to 1 hour.",
            fix="choose a length in between, or leave it out: then the shop is open until Ctrl-C.",
        )
    return seconds


def _fresh(directory: Path) -> Path:
    """A shop begins anew: it does not go on in one that was there."""
    from headrace.errors import InputError

    fix = "name a directory that is empty, or not there yet."
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise InputError(
            f"{directory} cannot be the demo's directory: {error.strerror}.", fix=fix
        ) from None
    if not is_empty:
        raise InputError(f"The directory {directory} is not empty.", fix=fix)
    return directory


def _spark(master: str) -> dict[str, Any]:
    """On this machine: soon ready rather than fast in the long run. A cluster does not say how many
    shards would be good for it; here two are enough.
    """
    return (
        {"master": master, **QUICK_START}
        if master.startswith("local")
        else {"master": master, "sql_shuffle_partitions": SHARDS}
    )


def _told(text: str) -> None:
    print(text, flush=True)


def _point_to(server: Server, port: int | None, state: Path, *, opens: bool) -> None:
    """Where to look, and how to end."""
    from headrace.cli.commands.serve import show_in_browser, where_not

    if said := where_not(server, port):
        _told(f"         {said}")
    if opens and not show_in_browser(server.address):
        _told("          No browser could be opened here: open that address in one.")
    if opens:
        _told(f"          In another terminal: headrace top {state}. Ctrl-C ends it.")


def _find_examples() -> None:
    """Make the package `shop_demo` importable: a wheel ships it in `headrace/examples`, a checkout
    has it in `examples`.
    """
    package = Path(__file__).parents[2]
    shipped = package / "examples"
    directory = shipped if shipped.is_dir() else package.parents[1] / "examples"
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
