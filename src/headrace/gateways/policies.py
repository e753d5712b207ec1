"""What a gateway does when the log is slower than whoever sends: chosen by name, and bounded in rows and in bytes.

- `block`: the sender waits. HTTP answers later, RabbitMQ keeps what is not acknowledged, a PUSH socket stops; of UDP the system's own buffer fills, and what does not fit there is counted.
- `buffer`: what comes is kept in memory, up to a bound; beyond it the sender is refused (HTTP: 503, come back).
- `drop newest`, `drop oldest`: nobody waits; beyond the bound what comes, or what has waited longest, is dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.log.values import Duration

BLOCK, BUFFER, DROP_NEWEST, DROP_OLDEST = "block", "buffer", "drop newest", "drop oldest"
NAMES = (BLOCK, BUFFER, DROP_NEWEST, DROP_OLDEST)
_SHORT = {"drop": DROP_NEWEST, "drop-newest": DROP_NEWEST, "drop-oldest": DROP_OLDEST}
DEFAULT_ROWS, DEFAULT_BYTES = 100_000, 64 << 20


@dataclass(frozen=True)
class Policy:
    """At most `rows` rows and `bytes` bytes wait for the log. One delivery alone may be larger: it is let in when nothing else waits."""

    name: str = BLOCK
    rows: int = DEFAULT_ROWS
    bytes: int = DEFAULT_BYTES
    patience_s: float = 30.0
    """How long a sender that can be answered waits, before it is told to come back."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.bytes < 1:
            raise InputError("A gateway's bounds must be at least 1 row and 1 byte.")
        if self.patience_s <= 0:
            raise InputError("A gateway's patience must be longer than nothing.")


def policy_of(name: str, *, most_rows: int = DEFAULT_ROWS, most_bytes: int = DEFAULT_BYTES, patience: Duration = "30 seconds") -> Policy:
    chosen = _SHORT.get(name, name)
    if chosen not in NAMES:
        raise InputError(f"There is no policy {name!r}: {nearest(name, NAMES)}", fix=f"choose one of {', '.join(NAMES)}.")
    return Policy(chosen, most_rows, most_bytes, to_us(patience, what="patience") / 1e6)
