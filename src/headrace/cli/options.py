"""What commands share: the log they open, their common options, how offsets and durations are
written, and how signals stop them. Output is in `output.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.durations import from_us, to_time_us, to_us
from headrace.errors import BadDuration, InputError

if TYPE_CHECKING:
    from headrace.log.api import Log


LOG_VARIABLE = "HEADRACE_LOG"
EXIT_ALERT = 3
EXIT_DAMAGE = 4
EXIT_DEAD_LETTERS = 6
EXIT_NOT_DETERMINISTIC = 7

LogOption = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="ADDRESS",
        help=f"The log: file:PATH or kafka://HOST:PORT; else {LOG_VARIABLE}.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


@dataclass(frozen=True)
class Settings:
    """The options before the command's name."""

    log: str | None = None
    debug: bool = False


def find_log_address(context: typer.Context, address: str | None) -> str | None:
    """The address of the log: from the option after the command, the option before it, or the
    environment, in this order.
    """
    settings = context.find_object(Settings) or Settings()
    return address or settings.log or os.environ.get(LOG_VARIABLE)


def require_log_address(context: typer.Context, address: str | None) -> str:
    """The address of the log, as `find_log_address` finds it. BadParameter if there is none."""
    log_address = find_log_address(context, address)
    if not log_address:
        raise typer.BadParameter(
            "Which log? Give --log file:PATH (a directory) or --log kafka://HOST:PORT, or set"
            f" {LOG_VARIABLE}.",
            param_hint="--log",
        )
    return log_address


@contextmanager
def open_chosen_log(
    context: typer.Context, address: str | None, *, create: bool = False, mode: str | None = None
) -> Iterator[Log]:
    """Open the log of a command. A directory is created only with `create`, so that a misspelt
    address leaves no empty log behind; its files get the permissions `mode`, in octal.
    """
    log_address = require_log_address(context, address)
    from headrace.log import open_log

    options: dict[str, Any] = {"create": create} if log_address.startswith("file:") else {}
    if mode is not None and options:
        try:
            options["mode"] = int(mode, 8)
        except ValueError:
            raise InputError(
                f"The mode {mode!r} is not a file's.", fix="give it in octal, such as 660."
            ) from None
    with open_log(log_address, **options) as log:
        yield log


def parse_offset(text: str, *, option: str) -> str | int | datetime:
    """The offset that an option names: `earliest`, `latest`, a number, or a time in ISO 8601 (UTC
    unless it names a zone) or relative to now, as in "1 hour ago".
    """
    from headrace.log.topic_config import resolve_offset_alias

    if resolve_offset_alias(text) in {"earliest", "latest"}:
        return resolve_offset_alias(text)
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return from_us(to_time_us(text))
    except BadDuration:
        message = (
            f"{text!r} is neither earliest, latest, an offset nor a time such as"
            " 2026-01-31T12:00:00Z or '1 hour ago'."
        )
        raise typer.BadParameter(message, param_hint=option) from None


def parse_seconds(text: str, *, option: str) -> float:
    """A duration such as "2 seconds", in seconds."""
    try:
        return to_us(text) / 1_000_000
    except BadDuration as error:
        raise typer.BadParameter(f"{error.message} {error.fix}", param_hint=option) from None


def parse_settings(options: Sequence[str]) -> dict[str, str]:
    """The settings that options such as `--option "every=5 seconds"` name."""
    settings = {}
    for text in options:
        setting, equals, value = text.partition("=")
        if not equals or not setting.isidentifier():
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint="--option")
        settings[setting] = value
    return settings


def confirm(question: str, *, to: str) -> None:
    """Ask for confirmation before what cannot be undone. Without a terminal, --yes is required."""
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"There is no terminal to ask for confirmation: give --yes to {to}.",
            param_hint="--yes",
        )
    typer.confirm(question, abort=True, err=True)


@contextmanager
def stop_signals(
    message: str = "Stopping after the current batch; press Ctrl-C again to stop at once.",
) -> Iterator[Event]:
    """An event that the first Ctrl-C or SIGTERM sets, with a message on standard error. The second
    one raises KeyboardInterrupt, which loses nothing either.
    """
    stop = Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if message:
            print(message, file=sys.stderr, flush=True)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
