"""`headrace state`: look at the state a pipeline keeps for its steps."""

from __future__ import annotations

import json as text_json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import typer

from headrace.cli.options import EXIT_DAMAGE, JsonOption, LogOption, chosen_log, opened
from headrace.cli.output import emit, say, table
from headrace.errors import nearest
from headrace.types.text import from_csv, from_json
from headrace.types.values import Misfit

if TYPE_CHECKING:
    from headrace.log.api import Log
    from headrace.plan.plan import PipelinePlan
    from headrace.runtime.state_inspector import Shown


app = typer.Typer(
    help="A pipeline's state: list its steps, show one, verify the files.", no_args_is_help=True
)
Which = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE", help="The file that declares the pipeline, or the pipeline's name."
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="Its state directory. Default: NAME.state, beside the file."
    ),
]
VersionOption = Annotated[
    str | None,
    typer.Option("--as", metavar="VERSION", help="Of this version, made by `headrace replay`."),
]
MAX_ROWS = 100


@dataclass(frozen=True)
class Chosen:
    """A pipeline, its log and its state directory. The plan is known if its file was named."""

    log: Log
    name: str
    state: Path
    plan: PipelinePlan | None


@contextmanager
def _chosen(
    context: typer.Context, which: str, log: str | None, state: Path | None, version: str | None
) -> Iterator[Chosen]:
    from headrace.pipeline.loader import load
    from headrace.runtime.arrangement import known_names
    from headrace.runtime.versions import as_version, version_state

    pipeline = load(which) if which.endswith(".py") or Path(which).is_file() else None
    name, beside = (which, Path()) if pipeline is None else (pipeline.name, Path(which).parent)
    plan = None if pipeline is None else pipeline.plan()
    directory = state or beside / f"{name}.state"
    if version is not None:
        name, directory, plan = (
            f"{name}.{version}",
            version_state(directory, version),
            None if plan is None else as_version(plan, version),
        )
    with opened(
        context, chosen_log(context, log) or (None if pipeline is None else pipeline.log)
    ) as found:
        yield Chosen(found, name, directory, None if plan is None else known_names(plan, found))


@app.command("list")
def list_steps(
    context: typer.Context,
    pipeline: Which,
    log: LogOption = None,
    state: StateOption = None,
    version: VersionOption = None,
    json: JsonOption = False,
) -> None:
    """List the steps that keep state, with how many keys and bytes.

    Example: headrace state list shop.py
    """
    from headrace.runtime.state_inspector import step_states

    with _chosen(context, pipeline, log, state, version) as chosen:
        found = step_states(chosen.log, chosen.name, chosen.state)
    if json:
        for each in found:
            emit(each)
        return
    table(
        ["step", "tick", "keys", "files", "bytes"],
        [(e.step, e.tick, f"{e.keys:,}", e.files, f"{e.bytes:,}") for e in found],
        empty="No state yet.",
    )


@app.command()
def show(
    context: typer.Context,
    pipeline: Which,
    step: Annotated[str, typer.Argument(help="The step, as `headrace state list` names it.")],
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            help=(
                'Only this key: its value, or JSON such as \'{"region": "eu", "day":'
                ' "2026-01-31"}\'.'
            ),
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many keys to show.")] = MAX_ROWS,
    log: LogOption = None,
    state: StateOption = None,
    version: VersionOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a step keeps, key by key, as of the last batch. With the pipeline's file it is
    decoded as far as the step can tell.

    Exits with 1 if a key has no state. A running pipeline is not disturbed.

    Example: headrace state show shop.py regions.aggregate --key north
    """
    from headrace.runtime.state_inspector import Shown

    with _chosen(context, pipeline, log, state, version) as chosen:
        shown = Shown(chosen.log, chosen.name, chosen.state, step, chosen.plan, version=version)
        if key is not None:
            rows, more = _one(shown, key), False
        else:
            rows, more = shown.rows(limit)
    if json:
        for row in rows:
            emit(row)
        return
    say(f"{shown.state.step} at tick {shown.state.tick:,}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    table(
        [name.removeprefix("_") for name in names],
        [[row.get(name) for name in names] for row in rows],
        empty="Nothing is kept.",
    )
    if more:
        say(f"There are more than {limit:,} keys; --limit shows more.")


def _one(shown: Shown, key: str) -> list[dict[str, Any]]:
    row = shown.row(_typed(key, shown.key_fields, shown.state.step))
    if row is None:
        typer.echo(
            f"{shown.state.step} keeps nothing for {key} at tick {shown.state.tick:,}.", err=True
        )
        raise typer.Exit(1)
    return [row]


def _typed(text: str, fields: list[pa.Field], step: str) -> dict[str, Any]:
    """A key as its columns' types: plain text for a single column, JSON for any."""
    if not fields:
        raise typer.BadParameter(
            f"The keys of {step} cannot be read here: name the pipeline's file, or leave out"
            " --key.",
            param_hint="--key",
        )
    names = [field.name for field in fields]
    given = _object(text)
    if given is None and len(fields) > 1:
        raise typer.BadParameter(
            f"The key of {step} is ({', '.join(names)}): give it as JSON.", param_hint="--key"
        )
    if given is not None and sorted(given) != sorted(names):
        wrong = next((name for name in given if name not in names), None)
        why = (
            f"there is no {wrong!r}: {nearest(wrong, names)}"
            if wrong is not None
            else "a column is missing."
        )
        raise typer.BadParameter(
            f"The key of {step} is ({', '.join(names)}): {why}", param_hint="--key"
        )
    try:
        return {
            field.name: _value(
                text if given is None else given[field.name], field.type, plain=given is None
            )
            for field in fields
        }
    except (Misfit, pa.ArrowException, ValueError, TypeError) as error:
        raise typer.BadParameter(f"The key of {step}: {error}.", param_hint="--key") from None


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = text_json.loads(text, parse_float=Decimal)
    except text_json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _value(value: Any, kind: pa.DataType, *, plain: bool) -> Any:
    convert = from_csv(kind) if plain else from_json(kind)
    typed = value if value is None or convert is None else convert(value)
    pa.array([typed], kind)  # or it does not fit
    return typed


@app.command()
def verify(
    context: typer.Context,
    pipeline: Which,
    log: LogOption = None,
    state: StateOption = None,
    version: VersionOption = None,
    json: JsonOption = False,
) -> None:
    """Check that every file that the ledger refers to is there and sound. Exits with 4 if not.

    Example: headrace state verify shop.py
    """
    from headrace.runtime.state_inspector import damaged_files

    with _chosen(context, pipeline, log, state, version) as chosen:
        damage = damaged_files(chosen.log, chosen.name, chosen.state)
    for message in damage:
        emit({"damage": message}) if json else say(message)
    if damage:
        raise typer.Exit(EXIT_DAMAGE)
    sound = "Every state file that the ledger refers to is there and sound."
    emit({"damage": None, "message": sound}) if json else say(sound)
