"""`headrace events`: the entities of an event store, their history and state, digests to compare
replicas, truncation, and the erasure of a person's data.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import JsonOption, LogOption, open_chosen_log
from headrace.cli.output import count_text, echo, print_json, print_table, to_json_value
from headrace.errors import BadPipelineFile, InputError, UnknownEntity, nearest
from headrace.log.api import Log

if TYPE_CHECKING:
    from headrace.events import Decider, EventStore, Handler, Vault


app = typer.Typer(
    help="Event stores: list, history, state, digest, truncate, excise, forget, rotate-key.",
    no_args_is_help=True,
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
    """Open an event store that exists: a command that only reads must not create one."""
    from headrace.events import open_store
    from headrace.events.event import is_event_schema
    from headrace.events.store import check_log

    check_log(log)
    stores = [
        topic
        for topic, info in log.topic_infos().items()
        if info is not None and is_event_schema(info.arrow_schema)
    ]
    if name is None and len(stores) == 1:
        return open_store(log, stores[0])
    if name not in stores:
        if not stores:
            message = "There is no event store in this log."
        elif name:
            message = f"There is no event store {name!r}: {nearest(name, stores)}"
        else:
            message = f"There are several event stores: {', '.join(stores)}."
        raise InputError(message, fix="name one with --store.")
    return open_store(log, name)


def _handler(store: EventStore, rules: str, stack: ExitStack) -> Handler[Any]:
    """A handler with the decider that a Python file defines, given as FILE:NAME. Its vault is
    closed with the stack.
    """
    import sys

    from headrace.events import Decider, Handler

    file, _, name = rules.rpartition(":")
    spec = spec_from_file_location(Path(file).stem, file) if file and Path(file).is_file() else None
    if spec is None or spec.loader is None:
        raise BadPipelineFile(
            f"{rules!r} does not name a decider.",
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
    decider = getattr(module, name, None)
    if not isinstance(decider, Decider):
        names = [key for key, value in vars(module).items() if isinstance(value, Decider)]
        raise BadPipelineFile(
            f"{file} has no decider {name!r}: {nearest(name, names)}", fix="give its name."
        )
    return Handler(store, decider, vault=_vault(stack, store, decider))


def _vault(stack: ExitStack, store: EventStore, decider: Decider[Any]) -> Vault | None:
    """The vault, which needs the master key, if events of the decider have personal fields."""
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
    prefix: Annotated[str, typer.Option("--prefix", help="Only names with this prefix.")] = "",
    max_rows: Annotated[int, typer.Option("--max", min=1, help="Show at most this many.")] = 1000,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """List entities with their versions, by name.

    Example: headrace events list --prefix account- --log file:data
    """
    with open_chosen_log(context, log) as opened_log, _store(opened_log, store) as events:
        entities = events.entities(prefix)
    if json:
        for name, version in entities[:max_rows]:
            print_json({"entity": name, "version": version})
        return
    print_table(["entity", "version"], entities[:max_rows])
    if len(entities) > max_rows:
        echo(f"There are {len(entities):,}; see --max and --prefix.")


@app.command()
def history(
    context: typer.Context,
    entity: Entity,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """List all events of an entity.

    Example: headrace events history account-17 --log file:data
    """
    with open_chosen_log(context, log) as opened_log, _store(opened_log, store) as events:
        entity_events = events.load(entity)
        if not entity_events:
            raise UnknownEntity(entity, events.name)
    if json:
        for event in entity_events:
            print_json(
                {
                    "version": event.version,
                    "time": event.time.isoformat(),
                    "type": event.type,
                    "type_version": event.type_version,
                    "id": event.id,
                    "subject": event.subject,
                    "offset": event.offset,
                    "data": event.data,
                    "correlation_id": event.correlation_id,
                    "causation_id": event.causation_id,
                    "metadata": event.metadata,
                }
            )
        return
    print_table(
        ["version", "time", "type", "data"],
        [
            (
                event.version,
                event.time.isoformat(" ", "milliseconds"),
                event.type,
                to_json_value(event.data),
            )
            for event in entity_events
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
    from headrace.events.value_codec import loose_json

    with open_chosen_log(context, log) as opened_log, _store(opened_log, store) as events:
        if not events.version(entity):
            raise UnknownEntity(entity, events.name)
        with ExitStack() as stack:
            handler = _handler(events, decider, stack)
            as_of, entity_state = handler.versioned_state(entity, version=version, at=at)
            entity_state = (
                entity_state if handler.vault is None else handler.vault.reveal(entity_state)
            )
    if json:
        print_json({"entity": entity, "version": as_of, "state": loose_json(entity_state)})
    else:
        echo(f"{entity} at version {as_of}: {entity_state}")


@app.command()
def digest(
    context: typer.Context,
    ranges: Annotated[
        int, typer.Option(min=1, max=4096, help="The number of ranges of entities.")
    ] = 16,
    decider: Rules = None,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Print a hash for each range of entities. Replicas with the same events print the same hashes.
    With a decider, states are hashed too.

    Example: headrace events digest --ranges 4 --log file:data
    """
    from headrace.events import digest as digests

    with (
        open_chosen_log(context, log) as opened_log,
        _store(opened_log, store) as events,
        ExitStack() as stack,
    ):
        range_digests = digests(
            events,
            ranges=ranges,
            handler=None if decider is None else _handler(events, decider, stack),
        )
    if json:
        for range_digest in range_digests:
            print_json(
                {
                    "range": range_digest.number,
                    "entities": range_digest.entities,
                    "events": range_digest.events,
                    "digest": range_digest.digest,
                }
            )
        return
    print_table(
        ["range", "entities", "events", "digest"],
        [
            (range_digest.number, range_digest.entities, range_digest.events, range_digest.digest)
            for range_digest in range_digests
        ],
    )


@app.command()
def truncate(
    context: typer.Context,
    entity: Entity,
    before: Annotated[
        int, typer.Option("--before", metavar="VERSION", help="The first version that stays.")
    ],
    rules: Annotated[
        str,
        typer.Option(
            "--decider",
            metavar="FILE:NAME",
            help="A Python file and the decider's name in it: the state must stay the same.",
        ),
    ],
    store: Store = None,
    log: LogOption = None,
) -> None:
    """Remove an entity's events before a version, if its state does not need them.

    Example: headrace events truncate account-17 --before 901 --decider bank.py:ACCOUNTS
    """
    with (
        open_chosen_log(context, log) as opened_log,
        _store(opened_log, store) as events,
        ExitStack() as stack,
    ):
        removed = _handler(events, rules, stack).truncate(entity, before=before)
    echo(f"Removed {count_text(removed, 'event')} of {entity}.")


@app.command()
def excise(
    context: typer.Context,
    subject: Annotated[str, typer.Option("--subject", help="The person whose events to remove.")],
    value: Annotated[
        list[str] | None,
        typer.Option(
            "--value", help="A value that no file may contain afterwards; can be repeated."
        ),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--also",
            help=(
                "Another directory to scan, such as backups, or a pipeline's state that was moved;"
                " can be repeated."
            ),
        ),
    ] = None,
    retire: Annotated[
        list[str] | None,
        typer.Option(
            "--retire",
            metavar="PIPELINE",
            help="Give up a pipeline that cannot be built again, with its state and views.",
        ),
    ] = None,
    store: Store = None,
    log: LogOption = None,
    json: JsonOption = False,
) -> None:
    """Remove a person's events permanently, with everything derived from them, and verify it by
    scanning every file.

    Stop the pipelines that read the events first: their state and views are removed, and their next
    run rebuilds them. The command can be repeated if it was interrupted. It exits with 1, and names
    the files, if a value still exists somewhere.

    Example: headrace events excise --subject customer-7 --value ada@example.com --also backups
    --log file:data
    """
    from headrace.events import excise as excised

    with open_chosen_log(context, log) as opened_log, _store(opened_log, store) as events:
        done = excised(events, subject, values=value or (), also=also or (), retire=retire or ())
    if json:
        print_json(
            {
                "events": done.events,
                "derived": done.derived,
                "pipelines": list(done.pipelines),
                "unreached": list(done.unreached),
            }
        )
        return
    derived = "".join(
        f", {count_text(rows, 'row')} of {topic}" for topic, rows in done.derived.items()
    )
    echo(
        f"Removed {count_text(done.events, 'event')}{derived}."
        + (" No file contains the values." if value else " No values were given to scan for.")
    )
    if done.pipelines:
        echo(
            f"The state and views of {', '.join(done.pipelines)} were removed too. The next run of"
            " each rebuilds them from the remaining events."
        )
    for location in done.unreached:
        echo(f"Not scanned, so check it yourself: {location}.")


@app.command()
def forget(
    context: typer.Context,
    subject: Annotated[str, typer.Option("--subject", help="The person whose key is deleted.")],
    store: Store = None,
    log: LogOption = None,
) -> None:
    """Delete a person's key: values sealed with it can no longer be read anywhere. The master key
    comes from HEADRACE_MASTER_KEY or HEADRACE_MASTER_KEY_FILE.

    Example: headrace events forget --subject customer-7 --log file:data
    """
    from headrace.events import open_vault

    with (
        open_chosen_log(context, log) as opened_log,
        _store(opened_log, store) as events,
        open_vault(events, create=False) as vault,
    ):
        vault.forget(subject)
    echo("The key is deleted.")


@app.command("rotate-key")
def rotate_key(
    context: typer.Context,
    new_key_file: Annotated[
        Path | None,
        typer.Option(
            "--new-key-file",
            metavar="FILE",
            help="The new master key, as base64. The present one comes from the environment.",
        ),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option(
            "--finish",
            help="End the rotation: from here on only the new key, now in the environment, is"
            " valid.",
        ),
    ] = False,
    store: Store = None,
    log: LogOption = None,
) -> None:
    """Rotate the master key of a vault. First wrap all keys by the new one too, with
    --new-key-file; then start all programs again with the new key; then --finish.

    Example: headrace events rotate-key --new-key-file new.key --log file:data
    """
    from headrace.events import open_vault
    from headrace.events.privacy.vault import decode_master_key

    if finish == (new_key_file is not None):
        raise InputError(
            "A rotation begins with a new key, and ends without one.",
            fix="give --new-key-file FILE, or --finish.",
        )
    with (
        open_chosen_log(context, log) as opened_log,
        _store(opened_log, store) as events,
        open_vault(events, create=False) as vault,
    ):
        if new_key_file is None:
            count = vault.finish_rotation()
        else:
            count = vault.rotate(decode_master_key(new_key_file.read_text()))
    if finish:
        echo(f"The rotation is finished: {count_text(count, 'key')}.")
    else:
        echo(
            f"{count_text(count, 'key')} are wrapped by the new master key too. Start all programs"
            " again with it; then run this with --finish."
        )
