"""Why a batch failed, in a few lines: what a worker raised, without the traces of all that stood between it and the runner."""

from __future__ import annotations

import re

from headrace.errors import HeadraceError

_TRACE = "Traceback (most recent call last):"
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(: |$)")
_END = re.compile(r"^\s*$|^\s+at [\w$.]+[(/]|^\s*SQLSTATE:")
_MOST_CHARACTERS = 2_000


def reason(error: BaseException) -> str:
    """What a person needs to know about an error that ended a batch."""
    if isinstance(error, HeadraceError):
        return f"{type(error).__name__}: {error}"
    text = str(error)
    found = _raised_in_worker(text) if _TRACE in text else f"{type(error).__name__}: {text.strip()}"
    return found if len(found) <= _MOST_CHARACTERS else f"{found[:_MOST_CHARACTERS]} …"


def _raised_in_worker(text: str) -> str:
    """The last error of a worker's traceback: from the line that names it up to where the JVM's part begins."""
    lines = text.rsplit(_TRACE, 1)[1].splitlines()
    begin = next((number for number, line in enumerate(lines) if _RAISED.match(line)), None)
    if begin is None:
        return text.strip()
    end = next((number for number, line in enumerate(lines) if number > begin and _END.match(line)), len(lines))
    return "\n".join([lines[begin].rsplit(".", 1)[-1] if "." in lines[begin].split(":")[0] else lines[begin], *lines[begin + 1 : end]])
