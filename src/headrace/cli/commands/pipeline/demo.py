"""`headrace demo`: runs a small web shop with the dashboard; with --for, it then computes every
number a second time and exits with 1 if one differs.

The pipeline is examples/shop.py. The customers, who order, search, click and pay, are in
examples/shop_demo, and so is the second computation.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import Settings, stop_signals
from headrace.cli.output import echo, seconds_text

if TYPE_CHECKING:
    from headrace.serve.server import Server


SHARDS = 2
QUICK_START = {
    "driver_extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "sql_adaptive_enabled": False,
    "sql_codegen_wholeStage": False,
    "sql_codegen_factoryMode": "NO_CODEGEN",
}
"""With these options the first order is counted after about 20 seconds instead of 29: for a few
rows per second, compiling queries and classes costs more than it saves.
"""


def demo(
    context: typer.Context,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="DURATION",
            help=(
                "How long the shop is open after the first result, as in 30s; then all numbers are"
                " checked. Default: until Ctrl-C."
            ),
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=3600, envvar="DEMO_SECONDS", help="Like --for, in seconds."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=(
                "Keep the log, the database and the views in this directory. Default: a temporary"
                " directory."
            ),
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="The port of the dashboard. Default: 8765, or the next free one.",
        ),
    ] = None,
    open_browser: Annotated[
        bool,
        typer.Option(
            "--open/--no-open", help="Open the dashboard in the browser, if there is one."
        ),
    ] = True,
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            metavar="ADDRESS",
            help="Another log, such as kafka://HOST:PORT, without the demo's topics.",
        ),
    ] = None,
    master: Annotated[
        str, typer.Option(help="Spark's master. On a cluster, all machines must see the directory.")
    ] = "local[2]",
) -> None:
    """Run a small web shop with its dashboard, until Ctrl-C; with --for, every number is computed a
    second time at the end.

    Example: headrace demo --for 30s
    """
    from headrace.log.spark.launcher import archive_later, begin

    open_s = seconds if for_ is None else _duration_s(for_)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-demo-", ignore_cleanup_errors=True) as scratch,
        stop_signals("Closing the shop; press Ctrl-C again to stop at once.") as stop,
    ):
        home = _prepare_directory(keep) if keep is not None else Path(scratch) / "shop"
        os.environ["SHOP_HOME"] = str(home.absolute())  # which the JVM's workers inherit
        begin(**_spark_options(master))  # the JVM starts while the rest is imported and checked
        from headrace.log.spark.session import check_start

        check_start(master=master)
        _find_examples()
        from shop_demo.showing import Showing

        # Not from the environment: that log may be in production.
        address = log or (context.find_object(Settings) or Settings()).log
        opens = open_browser and open_s is None
        showing = Showing(
            home,
            _print_now,
            open_s,
            address,
            on_serving=lambda server: _announce(server, port, showing.state, opens=opens),
            port=port,
            stop=stop,
            spark_options=_spark_options(master),
        )
        checks = showing.show()
        archive_later()
        for check in checks:
            echo(str(check))
    failed = [check for check in checks if not check.good]
    if checks:
        moved = (
            f"; numbers moved after {seconds_text(showing.steps_s['moved'])}"
            if "moved" in showing.steps_s
            else ""
        )
        result = (
            f"{len(failed)} of {len(checks)} are WRONG"
            if failed
            else f"All {len(checks)} as it should be"
        )
        echo(f"{result}{moved}.")
    else:
        echo("The shop is closed.")
    if keep is not None:
        echo(f"To look at it again: headrace dashboard {showing.state}")
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


def _prepare_directory(directory: Path) -> Path:
    """Create the demo's directory. InputError if it is not empty, because a demo starts anew."""
    from headrace.errors import InputError

    fix = "name a directory that is empty or does not exist."
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


def _spark_options(master: str) -> dict[str, Any]:
    """Spark's options: on this machine a quick start rather than the highest throughput, on a
    cluster a fixed number of shards, because it does not say how many suit it.
    """
    return (
        {"master": master, **QUICK_START}
        if master.startswith("local")
        else {"master": master, "sql_shuffle_partitions": SHARDS}
    )


def _print_now(text: str) -> None:
    print(text, flush=True)


def _announce(server: Server, port: int | None, state: Path, *, opens: bool) -> None:
    """Open the dashboard in the browser, and print where else to look."""
    from headrace.cli.commands.pipeline.serve import open_in_browser, port_taken_text

    if note := port_taken_text(server, port):
        _print_now(f"         {note}")
    if opens and not open_in_browser(server.address):
        _print_now("          No browser could be opened here: open that address in one.")
    if opens:
        _print_now(f"          In another terminal: headrace top {state}. Ctrl-C ends it.")


def _find_examples() -> None:
    """Make the package `shop_demo` importable: a wheel ships it in `headrace/examples`, a checkout
    has it in `examples`.
    """
    package = Path(__file__).parents[3]
    shipped = package / "examples"
    directory = shipped if shipped.is_dir() else package.parents[1] / "examples"
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
