"""`headrace gateway`: rows come in over HTTP, StatsD's packets, ZeroMQ or AMQP, until Ctrl-C."""

from __future__ import annotations

import sys
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, opened, required_log, stopping
from headrace.cli.output import StatusLines, bytes_text, counted, emit, iso, say, table
from headrace.gateways.declaration import HTTP_PORT, STATSD_PORT

if TYPE_CHECKING:
    from headrace.gateways import Gateway
    from headrace.gateways.inbox import GatewayStatus
    from headrace.gateways.signatures import Hook


app = typer.Typer(
    help="Take rows in from outside: HTTP, StatsD, ZeroMQ, AMQP.", no_args_is_help=True
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
HostOption = Annotated[str, typer.Option("--host", help="Where to listen.")]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        help=(
            "When the log is slower than those who send: block, buffer, 'drop newest' or 'drop"
            " oldest'."
        ),
    ),
]
RowsOption = Annotated[
    int | None,
    typer.Option(
        "--most-rows", min=1, help="At most so many rows wait for the log. Default: 100,000."
    ),
]
BytesOption = Annotated[
    int | None,
    typer.Option(
        "--most-bytes", min=1, help="At most so many bytes wait for the log. Default: 64 MiB."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help=(
            "The gateway's name: a second process with the same one takes over. Default: by kind"
            " and place."
        ),
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Store bodies as they come, in a column `body`, not as JSON.")
]


@app.command()
def http(
    context: typer.Context,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="TOPIC", help="A topic that takes JSON; may be repeated."),
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
        int, typer.Option("--port", min=0, max=65535, help="0 is any that is free.")
    ] = HTTP_PORT,
    host: HostOption = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="A file with the token that senders must have.  [env var: HEADRACE_TOKEN]",
        ),
    ] = None,
    policy: PolicyOption = "block",
    max_rows: RowsOption = None,
    max_bytes: BytesOption = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Take rows by HTTP: POST /topics/TOPIC with JSON, JSON lines, or a webhook's body. Answered
    when they are durable.

    Example: headrace gateway http --topic orders --log file:data
    """
    from headrace.gateways import http as declare

    hooks = [parsed_hook(each) for each in hook or ()]
    gateway = declare(
        topic or (),
        port=port,
        host=host,
        hooks=hooks,
        token_file=token_file,
        name=name,
        **_given(policy, max_rows, max_bytes),
    )
    _run(context, gateway, log, as_json=json)


@app.command()
def statsd(
    context: typer.Context,
    topic: TopicOption = "metrics",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 is any that is free.")
    ] = STATSD_PORT,
    host: HostOption = "127.0.0.1",
    flush: Annotated[
        str, typer.Option("--flush", metavar="DURATION", help="One row a metric for each interval.")
    ] = "10 seconds",
    raw: Annotated[bool, typer.Option("--raw", help="Store every value as it came.")] = False,
    policy: PolicyOption = "block",
    max_rows: RowsOption = None,
    max_bytes: BytesOption = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Take StatsD's packets over UDP.

    Example: headrace gateway statsd --topic metrics --log file:data
    """
    from headrace.gateways import statsd as declare

    gateway = declare(
        topic,
        port=port,
        host=host,
        flush=None if raw else flush,
        name=name,
        **_given(policy, max_rows, max_bytes),
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
        typer.Option("--connect", metavar="ADDRESS", help="The same, of one who is bound."),
    ] = None,
    subscribe: Annotated[
        list[str] | None,
        typer.Option(
            "--subscribe",
            metavar="PREFIX",
            help="Be a SUB socket for subjects that begin so ('' is all); else a PULL socket.",
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
    """Take messages of a ZeroMQ socket.

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
        **_given(policy, max_rows, max_bytes),
    )
    _run(context, gateway, log, as_json=json)


@app.command()
def amqp(
    context: typer.Context,
    topic: TopicOption,
    url: Annotated[
        str,
        typer.Option(
            "--url", help="amqp://user@host:5672/, or where it is kept: env:NAME or file:PATH."
        ),
    ],
    queue: Annotated[str, typer.Option("--queue", help="The queue to read.")],
    prefetch: Annotated[
        int, typer.Option("--prefetch", min=1, max=65535, help="Messages that may be under way.")
    ] = 1_000,
    declare_queue: Annotated[
        bool, typer.Option("--declare", help="Make the queue, if it is missing.")
    ] = False,
    raw: RawOption = False,
    policy: PolicyOption = "block",
    max_rows: RowsOption = None,
    max_bytes: BytesOption = None,
    name: NameOption = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Take messages of a RabbitMQ queue; each is acknowledged there when it is durable here.

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
        **_given(policy, max_rows, max_bytes),
    )
    _run(context, gateway, log, as_json=json)


@app.command("list")
def list_gateways(context: typer.Context, log: LogOption = None, json: JsonOption = False) -> None:
    """Show the gateways of a log, and what they last told of themselves: rows by what became of
    them, and what waits.

    Example: headrace gateway list --log file:data
    """
    from headrace.gateways.metrics import Told

    with opened(context, log) as opened_log:
        told = sorted(Told(opened_log).read().values(), key=lambda row: str(row["gateway"]))
    if json:
        for row in told:
            emit(
                {
                    "gateway": row["gateway"],
                    "kind": row["kind"],
                    "at": iso(row["at"]),
                    **{name: row[name] for name in _COUNTS},
                    "reasons": loads(row["reasons"]),
                }
            )
        return
    if not told:
        say("No gateway has taken anything yet.")
        return
    table(
        ["gateway", "as of", *(name.replace("_", " ") for name in _COUNTS)],
        [(row["gateway"], iso(row["at"]), *(f"{row[name]:,}" for name in _COUNTS)) for row in told],
    )


def _given(policy: str, max_rows: int | None, max_bytes: int | None) -> dict[str, Any]:
    return {"policy": policy} | {
        name: value
        for name, value in (("max_rows", max_rows), ("max_bytes", max_bytes))
        if value is not None
    }


def parsed_hook(text: str) -> Hook:
    """`pushes=github:env:HOOK_SECRET`."""
    from headrace.gateways import hook

    topic, equals, rest = text.partition("=")
    signature, colon, place = rest.partition(":")
    if not equals or not colon or not topic:
        raise typer.BadParameter(
            f"{text!r} is no hook: write TOPIC=SIGNATURE:SECRET, such as"
            " pushes=github:env:HOOK_SECRET.",
            param_hint="--hook",
        )
    return hook(topic, signature=signature, secret=place)


def _run(context: typer.Context, gateway: Gateway, log: str | None, *, as_json: bool) -> None:
    address = required_log(context, log)
    told = StatusLines(line, as_json)

    def ready(place: str) -> None:
        say(f"Taking rows for {', '.join(gateway.topics)} at {place}. Ctrl-C ends it.")
        sys.stdout.flush()

    with stopping(
        "Stopping when everything that came is stored; once more ends it at once."
    ) as stop:
        gateway.run(log=address, stop=stop, on_status=told, on_ready=ready)
    last = told.last
    say(
        f"{gateway.name}:"
        f" {told.summary()}{f' {last.dropped:,} dropped, {last.refused:,} refused.' if last is not None and last.dropped + last.refused else ''}"
    )


def line(status: GatewayStatus, rate: float) -> str:
    """How it goes, in one line."""
    parts = [
        f"{counted(status.stored, 'row')} stored, {rate:,.0f} rows/s",
        f"{status.waiting_rows:,} waiting ({bytes_text(status.waiting_bytes)})",
    ]
    parts += [
        f"{count:,} {what}"
        for what, count in (
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
