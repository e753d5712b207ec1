"""What every command shares: which log it speaks to, the options they have in common, and how a
place in a topic is written.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.durations import from_us, to_time_us, to_us
from headrace.errors import BadDuration

if TYPE_CHECKING:
    from headrace.log.api import Log


LOG_VARIABLE = "HEADRACE_LOG"
EXIT_ALERT = 3
EXIT_DAMAGE = 4

LogOption = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="ADDRESS",
        help=f"The log: file:PATH or kafka://HOST:PORT; else {LOG_VARIABLE}.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")]


@dataclass(frozen=True)
class Settings:
    """What was said before the command's name."""

    log: str | None = None
    debug: bool = False


def chosen_log(context: typer.Context, address: str | None) -> str | None:
    """The address of a log that was chosen: behind the command, before it, or in the environment,
    in this order.
    """
    settings = context.find_object(Settings) or Settings()
    return address or settings.log or os.environ.get(LOG_VARIABLE)


def required_log(context: typer.Context, address: str | None) -> str:
    """The same, of a command that cannot do without."""
    chosen = chosen_log(context, address)
    if not chosen:
        raise typer.BadParameter(
            "Which log? Say --log file:PATH (a directory) or --log kafka://HOST:PORT, or set"
            f" {LOG_VARIABLE}.",
            param_hint="--log",
        )
    return chosen


@contextmanager
def opened(context: typer.Context, address: str | None, *, create: bool = False) -> Iterator[Log]:
    """The log that was chosen.

    A directory is made only with `create`, so that a misspelt address does not leave an empty log
    behind.
    """
    chosen = required_log(context, address)
    from headrace.log import open_log

    options = {"create": create} if chosen.startswith("file:") else {}
    with open_log(chosen, **options) as log:
        yield log


def place(text: str, *, option: str) -> str | int | datetime:
    """`earliest`, `latest`, an offset, or a time: in ISO 8601 (UTC unless it names a zone), or back
    from now, as in "1 hour ago".
    """
    from headrace.log.topic_config import place_word

    if place_word(text) in {"earliest", "latest"}:
        return place_word(text)
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


def seconds_of(text: str, *, option: str) -> float:
    """A duration such as "2 seconds", in seconds."""
    try:
        return to_us(text) / 1_000_000
    except BadDuration as error:
        raise typer.BadParameter(f"{error.message} {error.fix}", param_hint=option) from None


def confirm(question: str, *, to: str) -> None:
    """Ask before what cannot be undone. Where nobody can be asked, it takes --yes."""
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"Nobody can be asked here: say --yes to {to}.", param_hint="--yes"
        )
    typer.confirm(question, abort=True, err=True)


# Ctrl-C and SIGTERM end a command that runs until it is told to stop: the first one asks, the
# second one does not wait.


@contextmanager
def stopping(
    told: str = "Stopping after the batch under way; once more ends it at once.",
) -> Iterator[Event]:
    """An event that the first signal sets; the second one raises KeyboardInterrupt, which does no
    harm either.
    """
    stop = Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if told:
            print(told, file=sys.stderr, flush=True)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
