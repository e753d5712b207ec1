"""Why a batch failed, in a few lines: what a worker raised, without the traces of all that stood between it and the runner."""

from __future__ import annotations

import re

from headrace import errors

LASTING = (
    errors.BadPartition,
    errors.BadRows,
    errors.BadSchema,
    errors.InputReplaced,
    errors.MissingExtra,
    errors.NewerFormat,
    errors.NotSupported,
    errors.PlanChanged,
    errors.PlanError,
    errors.TopicExists,
)
"""What does not pass by itself: the same batch would fail again."""
_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(: |$)")
_END = re.compile(r"^\s*$|^\s+at [\w$.]+[(/]|^\s*SQLSTATE:")
_MOST_CHARACTERS = 2_000


def reason(error: BaseException) -> str:
    """What a person needs to know about an error that ended a batch."""
    if isinstance(error, errors.HeadraceError):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    found = _raised_in_worker(text) if _TRACE in text else f"{type(error).__name__}: {text.strip()}"
    return found if len(found) <= _MOST_CHARACTERS else f"{found[:_MOST_CHARACTERS]} …"


def is_lasting(error: BaseException) -> bool:
    """Whether it is of no use to try again, also if it was raised in a worker."""
    kind = getattr(errors, reason(error).partition(":")[0], None)
    return isinstance(kind, type) and issubclass(kind, LASTING)


def _raised_in_worker(text: str) -> str:
    """The error at the end of a worker's traceback: of several the last, but one of ours before all others, since it says what to do. Up to the JVM's part."""
    lines = text[text.index(_TRACE) :].splitlines()
    raised = [number for number, line in enumerate(lines) if _RAISED.match(line) and number and lines[number - 1].startswith("  ")]
    if not raised:
        return text.strip()
    begin = next((number for number in reversed(raised) if lines[number].startswith("headrace.")), raised[-1])
    end = next((number for number in range(begin + 1, len(lines)) if _END.match(lines[number])), len(lines))
    name, colon, rest = lines[begin].partition(":")
    return "\n".join([f"{name.rsplit('.', 1)[-1]}{colon}{rest}", *lines[begin + 1 : end]])
