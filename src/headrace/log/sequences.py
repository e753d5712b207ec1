"""The numbers that a producer with an id gives its appends, so that a repeat is known. The same rule on every backend."""

from __future__ import annotations

from typing import Any

from headrace.errors import InputError

LARGEST = 1 << 62  # stored in 64 bits, with a sign; a producer must be able to count on from here


def check_sequence(sequence: Any, *, topic: str, id: str | None) -> None:
    """Refuse what cannot be the number of an append; None leaves the choice to the producer."""
    if sequence is None:
        return
    if id is None:
        raise InputError("A sequence number needs a producer with an id.", fix=f"open it with log.producer({topic!r}, id='...').")
    if not isinstance(sequence, int) or isinstance(sequence, bool) or not 0 <= sequence <= LARGEST:
        raise InputError(f"A sequence number is an int from 0 to {LARGEST}, not {sequence!r}.", fix="use producer.last_sequence + 1.")
