"""How a gateway is doing: every row that came is counted once, as stored, repeated, dropped or refused, or waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

from headrace.gateways.deliveries import Fate, Outcome


@dataclass
class GatewayStatus:
    """`received` is the sum of `stored`, `repeated`, `dropped`, `refused` and `waiting_rows`, at any moment."""

    gateway: str
    kind: str
    received: int = 0
    stored: int = 0
    repeated: int = 0
    dropped: int = 0
    refused: int = 0
    waiting_rows: int = 0
    waiting_bytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Why rows were refused or dropped."""
    details: dict[str, int] = field(default_factory=dict)
    """What only this kind of gateway knows, such as packets that the system had no room for."""
    failures: int = 0
    error: str | None = None

    @property
    def rows(self) -> int:
        return self.stored


class Counts:
    """The same, while many threads count."""

    def __init__(self, gateway: str, kind: str) -> None:
        self.gateway, self.kind = gateway, kind
        self.details: dict[str, int] = {}
        self.failures, self.error = 0, None
        self._lock = Lock()
        self._received = self._waiting_bytes = 0
        self._fates = dict.fromkeys(Fate, 0)
        self._reasons: Counter[str] = Counter()

    failures: int
    error: str | None

    def came(self, rows: int) -> None:
        with self._lock:
            self._received += rows

    def settled(self, rows: int, outcome: Outcome) -> None:
        with self._lock:
            self._fates[outcome.fate] += rows
            if outcome.reason:
                self._reasons[outcome.reason] += rows

    def turned_away(self, rows: int, reason: str, fate: Fate = Fate.refused) -> None:
        """Rows that came and went, without a delivery."""
        with self._lock:
            self._received += rows
            self._fates[fate] += rows
            self._reasons[reason] += rows

    def failed(self, error: str) -> None:
        with self._lock:
            self.failures, self.error = self.failures + 1, error

    def works(self) -> None:
        self.failures, self.error = 0, None

    def status(self, waiting_bytes: int = 0) -> GatewayStatus:
        with self._lock:
            fates = {fate.value: count for fate, count in self._fates.items()}
            waiting = self._received - sum(fates.values())
            return GatewayStatus(
                self.gateway, self.kind, received=self._received, **fates, waiting_rows=waiting, waiting_bytes=waiting_bytes, reasons=dict(self._reasons),
                details=dict(self.details), failures=self.failures, error=self.error,
            )  # fmt: skip
