"""`headrace serve` and `headrace dashboard`: the views of a state directory over HTTP, whether
their pipeline runs or not. `headrace run` serves the same pages at its own address.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import LogOption, find_log_address, stop_signals
from headrace.cli.output import echo
from headrace.cli.view_stores import open_stores

if TYPE_CHECKING:
    from headrace.serve.server import Server


PORT = 8765
StateArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="The pipeline's state directory, such as shop.state.")
]
HostOption = Annotated[
    str,
    typer.Option(
        "--host", help="The address to listen on. Any but this machine's own requires a token."
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="A file with the token that requests must send.  [env var: HEADRACE_TOKEN]",
    ),
]


def serve(
    context: typer.Context,
    state: StateArgument,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port; 0 is any free one.")
    ] = PORT,
    token_file: TokenOption = None,
    log: LogOption = None,
    postgres: Annotated[
        int | None,
        typer.Option(
            "--postgres",
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve the views by Postgres's protocol too, at this port; 0 is any free one.",
        ),
    ] = None,
    roles: Annotated[
        Path | None,
        typer.Option(
            "--roles",
            metavar="FILE",
            help="With --postgres: who may connect, and which views they see (TOML).",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="With --postgres: a certificate (PEM)."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key (PEM).")
    ] = None,
    require_tls: Annotated[
        bool, typer.Option("--require-tls", help="With --postgres: refuse clients without TLS.")
    ] = False,
) -> None:
    """Serve the views of a pipeline over HTTP, until Ctrl-C: rows, SQL, and changes as they happen.
    With a log, its topics too.

    With --postgres, also for psql and every other client of Postgres's.

    Example: headrace serve shop.state --log file:data --postgres 5432
    """
    from headrace.errors import ConfigurationError
    from headrace.http.access import find_token
    from headrace.serve.postgres.listener import PostgresOptions
    from headrace.serve.server import start

    options = None
    if postgres is not None:
        options = PostgresOptions(
            port=postgres,
            host=host,
            roles=roles,
            tls_certificate=tls_cert,
            tls_key=tls_key,
            requires_tls=require_tls,
        )
    elif roles or tls_cert or tls_key or require_tls:
        raise ConfigurationError(
            "--roles and the options for TLS are of Postgres's protocol.",
            fix="add --postgres PORT.",
        )
    with open_stores(state) as stores:
        stores.store()  # refuse a directory without views: it is more likely misspelt than new
    with (
        stop_signals("Stopping.") as stop,
        start(
            state,
            find_log_address(context, log),
            port,
            host=host,
            token=find_token(token_file),
            postgres=options,
        ) as server,
    ):
        also = f" and {server.postgres_address}" if options is not None else ""
        echo(f"Serving the views of {state} at {server.address}{also}. Ctrl-C ends it.")
        sys.stdout.flush()
        stop.wait()


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
            help="The port; 0 is any free one. Default: 8765, or the next free one.",
        ),
    ] = None,
    token_file: TokenOption = None,
    log: LogOption = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in the browser.")
    ] = True,
) -> None:
    """Show a pipeline in the browser: its graph, topics, watermarks, views as they change, matches,
    dead letters, SQL. Until Ctrl-C.

    Example: headrace dashboard shop.state --log file:data
    """
    from headrace.http.access import find_token
    from headrace.run_status import check_state, log_address
    from headrace.serve.server import start_at_usual_port

    check_state(state)
    with (
        stop_signals("Stopping.") as stop,
        start_at_usual_port(
            state,
            find_log_address(context, log) or log_address(state),
            port,
            host=host,
            token=find_token(token_file),
        ) as server,
    ):
        echo(
            f"The dashboard of {state} is at {server.address}{port_taken_text(server, port)}."
            " Ctrl-C"
            " ends it."
        )
        sys.stdout.flush()
        if open_browser and not open_in_browser(server.address):
            echo("No browser could be opened here: open that address in one.")
        stop.wait()


def port_taken_text(server: Server, port: int | None) -> str:
    """A note that the usual port was taken, if no port was given and it was."""
    return f" (port {PORT} is taken)" if port is None and server.port != PORT else ""


def open_in_browser(address: str) -> bool:
    """Open an address in a browser; False if there is none, other than one in the terminal."""
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
