"""`headrace gateway`: accepts rows over HTTP, StatsD, ZeroMQ or AMQP, until Ctrl-C."""

from __future__ import annotations

import sys
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import (
    JsonOption,
    LogOption,
    open_chosen_log,
    parse_settings,
    require_log_address,
    stop_signals,
)
from headrace.cli.output import (
    StatusLines,
    bytes_text,
    count_text,
    echo,
    iso_text,
    print_json,
    print_table,
)
from headrace.gateways.declaration import HTTP_PORT, STATSD_PORT

if TYPE_CHECKING:
    from headrace.gateways import Gateway
    from headrace.gateways.inbox import GatewayStatus
    from headrace.gateways.signatures import Hook


app = typer.Typer(
    help="Accept rows from outside: HTTP, StatsD, ZeroMQ, AMQP.", no_args_is_help=True
)

_COUNTS = (
    "received",
    "stored",
    "repeated",
    "dropped",
    "refused",
    "lost",
    "waiting_rows",
    "waiting_bytes",
)
TopicOption = Annotated[
    str, typer.Option("--topic", metavar="TOPIC", help="The topic to append to.")
]
HostOption = Annotated[str, typer.Option("--host", help="The address to listen on.")]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        help=(
            "What to do if the log is slower than the senders: block, buffer, 'drop newest' or"
            " 'drop oldest'."
        ),
    ),
]
RowsOption = Annotated[
    int | None,
    typer.Option("--max-rows", min=1, help="How many rows may wait for the log. Default: 100,000."),
]
BytesOption = Annotated[
    int | None,
    typer.Option(
        "--max-bytes", min=1, help="How many bytes may wait for the log. Default: 64 MiB."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help=(
            "The gateway's name; a second process with the same name takes over. Default: its kind"
            " and address."
        ),
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Store bodies unparsed, in a column `body`, not as JSON.")
]


@app.command()
def http(
    context: typer.Context,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="TOPIC", help="A topic that accepts JSON; may be repeated."
        ),
    ] = None,
    hook: Annotated[
        list[str] | None,
        typer.Option(
            "--hook",
            metavar="TOPIC=SIGNATURE:SECRET",
            help=(
                "A topic for signed webhooks, such as pushes=github:env:HOOK_SECRET (github,"
                " stripe, standard); may be repeated."
            ),
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port; 0 is any free one.")
    ] = HTTP_PORT,
    host: HostOption = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="A file with the token that senders must send.  [env var: HEADRACE_TOKEN]",
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            "--public-url",
            metavar="URL",
            help="The URL under which a reverse proxy makes this public, with its prefix.",
        ),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--proxy",
            metavar="ADDRESS",
            help=(
                "An address or network of reverse proxies whose X-Forwarded-For is believed; may be"
                " repeated."
            ),
        ),
    ] = None,
    client_connections: Annotated[
        int,
        typer.Option(
            "--client-connections",
            min=1,
            help="The most connections of one address that is no trusted proxy.",
        ),
    ] = 1_000,
    drain: Annotated[
        str,
        typer.Option(
            "--drain",
            metavar="DURATION",
            help="How long requests are accepted after SIGTERM, while it is not ready any more.",
        ),
    ] = "0 seconds",
    policy: PolicyOption = "block",
    max_rows: RowsOption = None,
    max_bytes: BytesOption = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Accept rows by HTTP: POST /topics/TOPIC with JSON, JSON lines, CSV, or a webhook's body. The
    response is sent once they are durable.

    Example: headrace gateway http --topic orders --log file:data
    """
    from headrace.gateways import http as declare

    hooks = [parse_hook(each) for each in hook or ()]
    gateway = declare(
        topic or (),
        port=port,
        host=host,
        hooks=hooks,
        token_file=token_file,
        public_url=public_url,
        proxies=proxy or (),
        client_connections=client_connections,
        drain=drain,
        name=name,
        **_policy_options(policy, max_rows, max_bytes),
    )
    _run(context, gateway, log, as_json=json)


@app.command()
def statsd(
    context: typer.Context,
    topic: TopicOption = "metrics",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port; 0 is any free one.")
    ] = STATSD_PORT,
    host: HostOption = "127.0.0.1",
    flush: Annotated[
        str,
        typer.Option("--flush", metavar="DURATION", help="Store one row per metric and interval."),
    ] = "10 seconds",
    raw: Annotated[bool, typer.Option("--raw", help="Store every value.")] = False,
    policy: PolicyOption = "block",
    max_rows: RowsOption = None,
    max_bytes: BytesOption = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Accept StatsD packets over UDP.

    Example: headrace gateway statsd --topic metrics --log file:data
    """
    from headrace.gateways import statsd as declare

    gateway = declare(
        topic,
        port=port,
        host=host,
        flush=None if raw else flush,
        name=name,
        **_policy_options(policy, max_rows, max_bytes),
    )
    _run(context, gateway, log, as_json=json)


@app.command()
def zeromq(
    context: typer.Context,
    topic: TopicOption,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            "--bind", metavar="ADDRESS", help="Such as tcp://127.0.0.1:5556; may be repeated."
        ),
    ] = None,
    connect: Annotated[
        list[str] | None,
        typer.Option(
            "--connect", metavar="ADDRESS", help="The address of a bound socket; may be repeated."
        ),
    ] = None,
    subscribe: Annotated[
        list[str] | None,
        typer.Option(
            "--subscribe",
            metavar="PREFIX",
            help=(
                "Use a SUB socket for subjects with this prefix ('' is all). Default: a PULL"
                " socket."
            ),
        ),
    ] = None,
    raw: RawOption = False,
    policy: PolicyOption = "block",
    max_rows: RowsOption = None,
    max_bytes: BytesOption = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Accept messages of a ZeroMQ socket.

    Example: headrace gateway zeromq --topic orders --bind tcp://127.0.0.1:5556 --log file:data
    """
    from headrace.gateways import zeromq as declare

    socket = {"socket": "sub", "subjects": subscribe} if subscribe else {"socket": "pull"}
    gateway = declare(
        topic,
        bind=bind or (),
        connect=connect or (),
        format="raw" if raw else "json",
        name=name,
        **socket,
        **_policy_options(policy, max_rows, max_bytes),
    )
    _run(context, gateway, log, as_json=json)


@app.command()
def amqp(
    context: typer.Context,
    topic: TopicOption,
    url: Annotated[
        str,
        typer.Option(
            "--url", help="amqp://user@host:5672/, or a reference to it: env:NAME or file:PATH."
        ),
    ],
    queue: Annotated[str, typer.Option("--queue", help="The queue to read.")],
    prefetch: Annotated[
        int,
        typer.Option("--prefetch", min=1, max=65535, help="How many messages may be in flight."),
    ] = 1_000,
    declare_queue: Annotated[
        bool, typer.Option("--declare", help="Create the queue if it does not exist.")
    ] = False,
    raw: RawOption = False,
    policy: PolicyOption = "block",
    max_rows: RowsOption = None,
    max_bytes: BytesOption = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Accept messages of a RabbitMQ queue; each is acknowledged once it is durable in the log.

    Example: headrace gateway amqp --topic orders --url env:RABBIT --queue orders --log file:data
    """
    from headrace.gateways import amqp as declare

    gateway = declare(
        topic,
        url=url,
        queue=queue,
        prefetch=prefetch,
        declare=declare_queue,
        format="raw" if raw else "json",
        name=name,
        **_policy_options(policy, max_rows, max_bytes),
    )
    _run(context, gateway, log, as_json=json)


@app.command("open")
def open_gateway(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="http://HOST:PORT, statsd://HOST:PORT, or what an installed package brings.",
        ),
    ],
    topic: Annotated[
        list[str],
        typer.Option("--topic", metavar="TOPIC", help="A topic to append to; may be repeated."),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUE", help="Another setting of it; may be repeated."
        ),
    ] = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Accept rows by the gateway of a URL, such as one that an installed package brings.

    Example: headrace gateway open http://127.0.0.1:8766 --topic orders --log file:data
    """
    from headrace.gateways import from_url

    given = {"name": name, **parse_settings(option or ())}
    settings = {setting: value for setting, value in given.items() if value is not None}
    _run(context, from_url(url, topics=topic, **settings), log, as_json=json)


@app.command("list")
def list_gateways(context: typer.Context, log: LogOption = None, json: JsonOption = False) -> None:
    """Show the gateways of a log and their last reports: how many rows were stored, repeated,
    dropped or refused, and how many wait.

    Example: headrace gateway list --log file:data
    """
    from headrace.gateways.metrics import GatewayReports

    with open_chosen_log(context, log) as opened_log:
        reports = sorted(
            GatewayReports(opened_log).read().values(), key=lambda row: str(row["gateway"])
        )
    if json:
        for row in reports:
            print_json(
                {
                    "gateway": row["gateway"],
                    "kind": row["kind"],
                    "at": iso_text(row["at"]),
                    **{name: row[name] for name in _COUNTS},
                    "reasons": loads(row["reasons"]),
                }
            )
        return
    if not reports:
        echo("No gateway has accepted anything yet.")
        return
    print_table(
        ["gateway", "as of", *(name.replace("_", " ") for name in _COUNTS)],
        [
            (row["gateway"], iso_text(row["at"]), *(f"{row[name]:,}" for name in _COUNTS))
            for row in reports
        ],
    )


def _policy_options(policy: str, max_rows: int | None, max_bytes: int | None) -> dict[str, Any]:
    return {"policy": policy} | {
        name: value
        for name, value in (("max_rows", max_rows), ("max_bytes", max_bytes))
        if value is not None
    }


def parse_hook(text: str) -> Hook:
    """The hook that a text such as `pushes=github:env:HOOK_SECRET` declares."""
    from headrace.gateways import hook

    topic, equals, rest = text.partition("=")
    signature, colon, secret = rest.partition(":")
    if not equals or not colon or not topic:
        raise typer.BadParameter(
            f"{text!r} is not a hook: write TOPIC=SIGNATURE:SECRET, such as"
            " pushes=github:env:HOOK_SECRET.",
            param_hint="--hook",
        )
    return hook(topic, signature=signature, secret=secret)


def _run(context: typer.Context, gateway: Gateway, log: str | None, *, as_json: bool) -> None:
    address = require_log_address(context, log)
    status_lines = StatusLines(status_line, as_json)

    def on_ready(address: str) -> None:
        echo(f"Accepting rows for {', '.join(gateway.topics)} at {address}. Ctrl-C ends it.")
        sys.stdout.flush()

    with stop_signals(
        "Stopping once all accepted rows are stored; press Ctrl-C again to stop at once."
    ) as stop:
        gateway.run(log=address, stop=stop, on_status=status_lines, on_ready=on_ready)
    last, losses = status_lines.last, ""
    if last is not None and last.dropped + last.refused:
        losses = f" {last.dropped:,} dropped, {last.refused:,} refused."
    echo(f"{gateway.name}: {status_lines.summary()}{losses}")


def status_line(status: GatewayStatus, rate: float) -> str:
    """The status of a gateway as one line."""
    parts = [
        f"{count_text(status.stored, 'row')} stored, {rate:,.0f} rows/s",
        f"{status.waiting_rows:,} waiting ({bytes_text(status.waiting_bytes)})",
    ]
    parts += [
        f"{count:,} {name}"
        for name, count in (
            ("repeated", status.repeated),
            ("dropped", status.dropped),
            ("refused", status.refused),
        )
        if count
    ]
    if status.reasons:
        parts.append(
            "because of: "
            + ", ".join(f"{reason} {count:,}" for reason, count in sorted(status.reasons.items()))
        )
    parts += [f"{name.replace('_', ' ')}: {value:,}" for name, value in status.details.items()]
    if status.error:
        parts.append(f"failed {status.failures} times in a row: {status.error}")
    return f"{status.gateway}: {'; '.join(parts)}"
