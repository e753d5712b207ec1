"""`headrace serve`: the views of a state directory over HTTP, whether their pipeline runs or
not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands.view import opened_stores
from headrace.cli.options import LogOption, chosen_log, stopping
from headrace.cli.output import say

if TYPE_CHECKING:
    from headrace.serve.server import Server


PORT = 8765
StateArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")
]
HostOption = Annotated[
    str,
    typer.Option(
        "--host", help="Where to listen. Elsewhere than on this machine only with a token."
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="A file with the token that requests must have.  [env var: HEADRACE_TOKEN]",
    ),
]


def serve(
    context: typer.Context,
    state: StateArgument,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 is any that is free.")
    ] = PORT,
    token_file: TokenOption = None,
    log: LogOption = None,
) -> None:
    """Serve the views of a pipeline over HTTP, until Ctrl-C: rows, SQL, and changes as they happen.
    With a log, its topics too.

    Example: headrace serve shop.state --log file:data
    """
    from headrace.serve.access import find_token
    from headrace.serve.server import start

    with opened_stores(state) as stores:
        stores.store()  # a directory without views is more likely to be misspelt than to get some
    with (
        stopping("Stopping.") as stop,
        start(
            state, chosen_log(context, log), port, host=host, token=find_token(token_file)
        ) as server,
    ):
        say(f"Serving the views of {state} at {server.address}. Ctrl-C ends it.")
        sys.stdout.flush()
        stop.wait()


# `headrace dashboard`: a pipeline in the browser, whether it runs or not. `headrace run` has the
# same page at its own address.


def dashboard(
    context: typer.Context,
    state: StateArgument,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="0 is any that is free. Default: 8765, or the next that is free.",
        ),
    ] = None,
    token_file: TokenOption = None,
    log: LogOption = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in the browser.")
    ] = True,
) -> None:
    """Show a pipeline in the browser: its graph, topics, time, views as they change, matches, dead
    letters, SQL. Until Ctrl-C.

    Example: headrace dashboard shop.state --log file:data
    """
    from headrace.serve.access import find_token
    from headrace.serve.dashboard import check_state, log_of
    from headrace.serve.server import start_at_usual_port

    check_state(state)
    with (
        stopping("Stopping.") as stop,
        start_at_usual_port(
            state,
            chosen_log(context, log) or log_of(state),
            port,
            host=host,
            token=find_token(token_file),
        ) as server,
    ):
        say(
            f"The dashboard of {state} is at {server.address}{where_not(server, port)}. Ctrl-C"
            " ends it."
        )
        sys.stdout.flush()
        if open_browser and not show_in_browser(server.address):
            say("No browser could be opened here: open that address in one.")
        stop.wait()


def where_not(server: Server, asked: int | None) -> str:
    """That the usual port was taken, if it was."""
    from headrace.serve.server import PORT

    return f" (port {PORT} is taken)" if asked is None and server.port != PORT else ""


def show_in_browser(address: str) -> bool:
    """Whether there was a browser to open it in. One in the terminal would take the terminal."""
    import os
    import webbrowser

    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return False
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
