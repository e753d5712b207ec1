"""`headrace events`: what an event store knows: an entity's history, its state then and now,
digests to compare replicas, and forgetting a person.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, opened
from headrace.cli.output import counted, emit, plain, say, table
from headrace.errors import BadPipelineFile, InputError, UnknownEntity, nearest
from headrace.log.api import Log

if TYPE_CHECKING:
    from headrace.events import Decider, EventStore, Handler, Vault


app = typer.Typer(
    help="Event stores: list, history, state, digest, excise, forget.", no_args_is_help=True
)

Entity = Annotated[str, typer.Argument(help="The entity's name.")]
Store = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="NAME", help="The event store; not needed if the log has one only."
    ),
]
Rules = Annotated[
    str | None,
    typer.Option(
        "--decider", metavar="FILE:NAME", help="A Python file and the decider's name in it."
    ),
]


def _store(log: Log, name: str | None) -> EventStore:
    """The store meant; a command that only looks must not make one."""
    from headrace.events import open_store
    from headrace.events.event import ARROW
    from headrace.events.store import check_log

    check_log(log)
    known = [each for each in log.topics() if log.topic(each).arrow_schema.equals(ARROW)]
    if name is None and len(known) == 1:
        return open_store(log, known[0])
    if name not in known:
        what = (
            "There is no event store in this log."
            if not known
            else (
                f"There is no event store {name!r}: {nearest(name or '', known)}"
                if name
                else f"There are several event stores: {', '.join(known)}."
            )
        )
        raise InputError(what, fix="name one with --store.")
    return open_store(log, name)


def _handler(store: EventStore, rules: str, stack: ExitStack) -> Handler[Any]:
    """Run a Python file, and take the decider of that name from it. What is opened for it is closed
    with the stack.
    """
    import sys

    from headrace.events import Decider, Handler

    file, _, name = rules.rpartition(":")
    spec = spec_from_file_location(Path(file).stem, file) if file and Path(file).is_file() else None
    if spec is None or spec.loader is None:
        raise BadPipelineFile(
            f"{rules!r} names no decider.",
            fix="give a Python file and a name in it, such as bank.py:ACCOUNTS.",
        )
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadPipelineFile(
            f"{file} fails when it is run: {error!r}", fix="correct it."
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, Decider):
        raise BadPipelineFile(
            f"{file} has no decider {name!r}:"
            f" {nearest(name, [key for key, value in vars(module).items() if isinstance(value, Decider)])}",
            fix="give its name.",
        )
    return Handler(store, found, vault=_vault(stack, store, found))


def _vault(stack: ExitStack, store: EventStore, decider: Decider[Any]) -> Vault | None:
    """Deciders of events with personal fields need the master key."""
    from headrace.events import open_vault
    from headrace.events.codec import has_personal_fields

    return (
        stack.enter_context(open_vault(store, create=False))
        if has_personal_fields(decider.events)
        else None
    )


@app.command("list")
def list_entities(
    context: typer.Context,
    prefix: Annotated[str, typer.Option("--prefix", help="Only those whose names begin so.")] = "",
    most: Annotated[int, typer.Option("--max", min=1, help="At most so many.")] = 1000,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """List entities with their versions, by name.

    Example: headrace events list --prefix account- --log file:data
    """
    with opened(context, log) as opened_log, _store(opened_log, store) as events:
        found = events.entities(prefix)
    if json:
        for name, version in found[:most]:
            emit({"entity": name, "version": version})
        return
    table(["entity", "version"], found[:most])
    if len(found) > most:
        say(f"There are {len(found):,}; see --max and --prefix.")


@app.command()
def history(
    context: typer.Context,
    entity: Entity,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """List everything that happened to an entity.

    Example: headrace events history account-17 --log file:data
    """
    with opened(context, log) as opened_log, _store(opened_log, store) as events:
        found = events.load(entity)
        if not found:
            raise UnknownEntity(entity, events.name)
    if json:
        for each in found:
            emit(
                {
                    "version": each.version,
                    "time": each.time.isoformat(),
                    "type": each.type,
                    "type_version": each.type_version,
                    "id": each.id,
                    "subject": each.subject,
                    "offset": each.offset,
                    "data": each.data,
                }
            )
        return
    table(
        ["version", "time", "type", "data"],
        [
            (each.version, each.time.isoformat(" ", "milliseconds"), each.type, plain(each.data))
            for each in found
        ],
    )


@app.command()
def state(
    context: typer.Context,
    entity: Entity,
    decider: Annotated[
        str,
        typer.Option(
            "--decider", metavar="FILE:NAME", help="A Python file and the decider's name in it."
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="As of then: an ISO time, or '1 hour ago'."),
    ] = None,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="As of this version.")
    ] = None,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Show the state of an entity, now or as of a time or version, folded from its events.

    Example: headrace events state account-17 --decider bank.py:ACCOUNTS --at "1 hour ago" --log
    file:data
    """
    from headrace.events.codec import to_json

    with opened(context, log) as opened_log, _store(opened_log, store) as events:
        if not events.version(entity):
            raise UnknownEntity(entity, events.name)
        with ExitStack() as stack:
            handler = _handler(events, decider, stack)
            as_of, found = handler.versioned_state(entity, version=version, at=at)
            found = found if handler.vault is None else handler.vault.reveal(found)
    if json:
        emit({"entity": entity, "version": as_of, "state": to_json(found)})
    else:
        say(f"{entity} at version {as_of}: {found}")


@app.command()
def digest(
    context: typer.Context,
    ranges: Annotated[
        int, typer.Option(min=1, max=4096, help="Into how many ranges entities are put.")
    ] = 16,
    decider: Rules = None,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Print a hash for each range of entities: replicas that hold the same events print the same.
    With a decider, states count too.

    Example: headrace events digest --ranges 4 --log file:data
    """
    from headrace.events import digest as digests

    with (
        opened(context, log) as opened_log,
        _store(opened_log, store) as events,
        ExitStack() as stack,
    ):
        found = digests(
            events,
            ranges=ranges,
            handler=None if decider is None else _handler(events, decider, stack),
        )
    if json:
        for each in found:
            emit(
                {
                    "range": each.number,
                    "entities": each.entities,
                    "events": each.events,
                    "digest": each.digest,
                }
            )
        return
    table(
        ["range", "entities", "events", "digest"],
        [(each.number, each.entities, each.events, each.digest) for each in found],
    )


@app.command()
def excise(
    context: typer.Context,
    subject: Annotated[str, typer.Option("--subject", help="The person whose events go.")],
    value: Annotated[
        list[str] | None,
        typer.Option("--value", help="What must be found nowhere afterwards; can be repeated."),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--also",
            help=(
                "Another directory to look through, such as backups, or a pipeline's state that was"
                " moved; can be repeated."
            ),
        ),
    ] = None,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Remove a person's events for good, with all that was derived from them, and prove it by
    looking through every file.

    Stop the pipelines that read the events first: their state and views go, and their next run
    builds them again. It can be repeated if it was interrupted; it exits with 1, and names the
    files, if a value is still somewhere.

    Example: headrace events excise --subject customer-7 --value ada@example.com --also backups
    --log file:data
    """
    from headrace.events import excise as excised

    with opened(context, log) as opened_log, _store(opened_log, store) as events:
        done = excised(events, subject, values=value or (), also=also or ())
    if json:
        emit(
            {
                "events": done.events,
                "derived": done.derived,
                "pipelines": list(done.pipelines),
                "unreached": list(done.unreached),
            }
        )
        return
    derived = "".join(
        f", {counted(rows, 'row')} of {topic}" for topic, rows in done.derived.items()
    )
    say(
        f"Gone: {counted(done.events, 'event')}{derived}."
        + (" No file has the values any more." if value else " No values were given to look for.")
    )
    if done.pipelines:
        say(
            f"State and views of {', '.join(done.pipelines)} went too. The next run of each builds"
            " them again from what is left."
        )
    for each in done.unreached:
        say(f"Not reached, and to be seen to by you: {each}.")


@app.command()
def forget(
    context: typer.Context,
    subject: Annotated[str, typer.Option("--subject", help="The person whose key is deleted.")],
    store: Store = None,
    log: LogOption = None,
) -> None:
    """Delete a person's key: what was sealed with it is unreadable from now on, everywhere. The
    master key comes from HEADRACE_MASTER_KEY or HEADRACE_MASTER_KEY_FILE.

    Example: headrace events forget --subject customer-7 --log file:data
    """
    from headrace.events import open_vault

    with (
        opened(context, log) as opened_log,
        _store(opened_log, store) as events,
        open_vault(events, create=False) as vault,
    ):
        vault.forget(subject)
    say("The key is deleted.")
