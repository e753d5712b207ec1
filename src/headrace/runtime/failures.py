"""Why a batch failed, in a few lines for people: what a worker raised, without the stack traces of
Python, Py4J and the JVM between it and the runner.

`runner` and `services` log it and put it into the status, and decide by it whether to try again.
"""

from __future__ import annotations

import re

from headrace import errors
from headrace.operators.changelog import MalformedChangelog
from headrace.operators.kernel import AggregateFailed, GroupFull, PatternFull


class SparkLost(errors.RetryError):
    """Spark's JVM, or the Connect server, has ended under a run. What is not in the ledger never
    happened: another run goes on from there.
    """


PERMANENT = (
    errors.BadPartition,
    errors.BadRows,
    errors.BadSchema,
    errors.ExpressionFailed,
    errors.FunctionFailed,
    errors.InputReplaced,
    errors.MissingExtra,
    errors.NewerFormat,
    errors.NotSupported,
    errors.PlanChanged,
    errors.PlanError,
    errors.ProcessorFailed,
    errors.TopicExists,
    errors.UnknownColumn,
    AggregateFailed,
    GroupFull,
    MalformedChangelog,
    PatternFull,
)
"""Errors that do not pass by themselves: the same batch would fail again."""
_PERMANENT_BY_NAME = {kind.__name__: kind for kind in PERMANENT}
_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(: |$)")
_END = re.compile(r"^\s*$|^\s+at [\w$.]+[(/]|^\s*SQLSTATE:")
_MAX_CHARACTERS = 2_000


def failure_reason(error: BaseException) -> str:
    """What a person needs to know about an error that ended a batch: its class and message."""
    if isinstance(error, errors.HeadraceError):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    plain = f"{type(error).__name__}: {text.strip()}"
    reason = _worker_error(text) if _TRACE in text else plain
    return reason if len(reason) <= _MAX_CHARACTERS else f"{reason[:_MAX_CHARACTERS]} …"


def is_permanent(error: BaseException) -> bool:
    """Whether trying again is useless, also if the error was raised in a worker."""
    name = failure_reason(error).partition(":")[0]
    kind = _PERMANENT_BY_NAME.get(name) or getattr(errors, name, None)
    return isinstance(kind, type) and issubclass(kind, PERMANENT)


def _worker_error(text: str) -> str:
    """The error at the end of a worker's traceback, up to the JVM's part. Of several, the last one
    of Headrace, which says what to do; otherwise the last.
    """
    lines = text[text.index(_TRACE) :].splitlines()
    raised = [
        number
        for number, line in enumerate(lines)
        if _RAISED.match(line) and number and lines[number - 1].startswith("  ")
    ]
    if not raised:
        return text.strip()
    ours = [number for number in raised if lines[number].startswith("headrace.")]
    start = (ours or raised)[-1]
    end = next(
        (number for number in range(start + 1, len(lines)) if _END.match(lines[number])), len(lines)
    )
    name, colon, rest = lines[start].partition(":")
    return "\n".join([f"{name.rsplit('.', 1)[-1]}{colon}{rest}", *lines[start + 1 : end]])
