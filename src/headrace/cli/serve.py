"""`headrace serve`: the views of a state directory over HTTP, whether their pipeline runs or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import say
from headrace.cli.settings import LogOption, chosen_log
from headrace.cli.stopping import stopping
from headrace.cli.view_places import opened_stores

PORT = 8765
StateArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")]
HostOption = Annotated[str, typer.Option("--host", help="Where to listen. Elsewhere than on this machine only with a token.")]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="A file with the token that requests must have.  [env var: HEADRACE_TOKEN]")
]


def serve(
    context: typer.Context,
    state: StateArgument,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 is any that is free.")] = PORT,
    token_file: TokenOption = None,
    log: LogOption = None,
) -> None:
    """Serve the views of a pipeline over HTTP, until Ctrl-C: rows, SQL, and changes as they happen. With a log, its topics too.

    Example: headrace serve shop.state --log file:data
    """
    from headrace.serve.access import find_token
    from headrace.serve.server import start

    with opened_stores(state) as stores:
        stores.store()  # a directory without views is more likely to be misspelt than to get some
    with stopping("Stopping.") as stop, start(state, chosen_log(context, log), port, host=host, token=find_token(token_file)) as server:
        say(f"Serving the views of {state} at {server.address}. Ctrl-C ends it.")
        sys.stdout.flush()
        stop.wait()
