"""`headrace state`: lists, shows and verifies the state of a pipeline's steps."""

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

from headrace.cli.options import (
    EXIT_DAMAGE,
    JsonOption,
    LogOption,
    find_log_address,
    open_chosen_log,
)
from headrace.cli.output import echo, print_json, print_table
from headrace.errors import nearest
from headrace.types.text import csv_converter, json_converter
from headrace.types.values import Misfit

if TYPE_CHECKING:
    from headrace.log.api import Log
    from headrace.plan.plan import PipelinePlan
    from headrace.runtime.state_inspector import StateInspector


app = typer.Typer(
    help="A pipeline's state: list its steps, show one, verify the files.", no_args_is_help=True
)
PipelineArgument = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE", help="The file that declares the pipeline, or the pipeline's name."
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="Its state directory. Default: NAME.state next to the file."
    ),
]
VersionOption = Annotated[
    str | None,
    typer.Option("--as", metavar="VERSION", help="Of this version, made by `headrace replay`."),
]
MAX_ROWS = 100


@dataclass(frozen=True)
class SelectedPipeline:
    """A pipeline, its log and its state directory. The plan is known if its file was named."""

    log: Log
    name: str
    state: Path
    plan: PipelinePlan | None


@contextmanager
def _select_pipeline(
    context: typer.Context, which: str, log: str | None, state: Path | None, version: str | None
) -> Iterator[SelectedPipeline]:
    from headrace.pipeline.loader import load_pipeline
    from headrace.runtime.query_assignment import known_names
    from headrace.runtime.versions import as_version, version_state

    pipeline = load_pipeline(which) if which.endswith(".py") or Path(which).is_file() else None
    name, parent = (which, Path()) if pipeline is None else (pipeline.name, Path(which).parent)
    plan = None if pipeline is None else pipeline.plan()
    directory = state or parent / f"{name}.state"
    if version is not None:
        name, directory, plan = (
            f"{name}.{version}",
            version_state(directory, version),
            None if plan is None else as_version(plan, version),
        )
    with open_chosen_log(
        context, find_log_address(context, log) or (None if pipeline is None else pipeline.log)
    ) as opened_log:
        yield SelectedPipeline(
            opened_log, name, directory, None if plan is None else known_names(plan, opened_log)
        )


@app.command("list")
def list_steps(
    context: typer.Context,
    pipeline: PipelineArgument,
    log: LogOption = None,
    state: StateOption = None,
    version: VersionOption = None,
    json: JsonOption = False,
) -> None:
    """List the steps with state, and the number of keys and bytes of each.

    Example: headrace state list shop.py
    """
    from headrace.runtime.state_inspector import state_sizes

    with _select_pipeline(context, pipeline, log, state, version) as selected:
        opened_log = state_sizes(selected.log, selected.name, selected.state)
    if json:
        for each in opened_log:
            print_json(each)
        return
    print_table(
        ["step", "tick", "keys", "files", "bytes"],
        [(e.step, e.tick, f"{e.keys:,}", e.files, f"{e.bytes:,}") for e in opened_log],
        empty="No state yet.",
    )


@app.command()
def show(
    context: typer.Context,
    pipeline: PipelineArgument,
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
    """Show the state of a step, key by key, as of the last batch. With the pipeline's file it is
    decoded as far as possible.

    Exits with 1 if a key has no state. It does not disturb a running pipeline.

    Example: headrace state show shop.py regions.aggregate --key north
    """
    from headrace.runtime.state_inspector import StateInspector

    with _select_pipeline(context, pipeline, log, state, version) as selected:
        inspector = StateInspector.open(
            selected.log, selected.name, selected.state, step, selected.plan, version=version
        )
        if key is not None:
            rows, more = _show_key(inspector, key), False
        else:
            rows, more = inspector.rows(limit)
    if json:
        for row in rows:
            print_json(row)
        return
    echo(f"{inspector.state.step} at tick {inspector.state.tick:,}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    print_table(
        [name.removeprefix("_") for name in names],
        [[row.get(name) for name in names] for row in rows],
        empty="There is no state.",
    )
    if more:
        echo(f"There are more than {limit:,} keys; --limit shows more.")


def _show_key(inspector: StateInspector, key: str) -> list[dict[str, Any]]:
    row = inspector.row(_parse_key(key, inspector.key_fields, inspector.state.step))
    if row is None:
        typer.echo(
            f"{inspector.state.step} has no state for {key} at tick {inspector.state.tick:,}.",
            err=True,
        )
        raise typer.Exit(1)
    return [row]


def _parse_key(text: str, fields: list[pa.Field], step: str) -> dict[str, Any]:
    """A key converted to the types of its columns. It is written as JSON, or as plain text if it
    has a single column.
    """
    if not fields:
        raise typer.BadParameter(
            f"The keys of {step} cannot be read here: name the pipeline's file, or leave out"
            " --key.",
            param_hint="--key",
        )
    names = [field.name for field in fields]
    members = _parse_object(text)
    if members is None and len(fields) > 1:
        raise typer.BadParameter(
            f"The key of {step} is ({', '.join(names)}): give it as JSON.", param_hint="--key"
        )
    if members is not None and sorted(members) != sorted(names):
        wrong = next((name for name in members if name not in names), None)
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
            field.name: _convert(
                text if members is None else members[field.name],
                field.type,
                is_text=members is None,
            )
            for field in fields
        }
    except (Misfit, pa.ArrowException, ValueError, TypeError) as error:
        raise typer.BadParameter(f"The key of {step}: {error}.", param_hint="--key") from None


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        opened_log = text_json.loads(text, parse_float=Decimal)
    except text_json.JSONDecodeError:
        return None
    return opened_log if isinstance(opened_log, dict) else None


def _convert(value: Any, kind: pa.DataType, *, is_text: bool) -> Any:
    convert = csv_converter(kind) if is_text else json_converter(kind)
    converted = value if value is None or convert is None else convert(value)
    pa.array([converted], kind)  # or it does not fit
    return converted


@app.command()
def verify(
    context: typer.Context,
    pipeline: PipelineArgument,
    log: LogOption = None,
    state: StateOption = None,
    version: VersionOption = None,
    json: JsonOption = False,
) -> None:
    """Verify that every file the ledger refers to exists and is intact. Exits with 4 if not.

    Example: headrace state verify shop.py
    """
    from headrace.runtime.state_inspector import damaged_files

    with _select_pipeline(context, pipeline, log, state, version) as selected:
        damage = damaged_files(selected.log, selected.name, selected.state)
    for message in damage:
        print_json({"damage": message}) if json else echo(message)
    if damage:
        raise typer.Exit(EXIT_DAMAGE)
    message = "Every state file that the ledger refers to exists and is intact."
    print_json({"damage": None, "message": message}) if json else echo(message)
