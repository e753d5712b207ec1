"""What a runner tells of itself: a small file in its state directory, written after each batch. `headrace status` shows it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.pipeline.query import Query

FILE = "status.json"
VERSION = 1


@dataclass(frozen=True)
class Status:
    """One pipeline's run as of its last batch. Times are seconds since the epoch."""

    pipeline: str
    process: int
    epoch: int
    shards: int
    started: float
    updated: float
    tick: int
    newest_tick: int
    batch_seconds: float
    batch_rows: int
    rows_per_second: float
    rows_behind: int
    state_bytes: int
    batches: int
    failures: int = 0
    last_error: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    ingests: dict[str, str] = field(default_factory=dict)
    """How each stream that is brought in is doing."""
    queries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each query: its tick, its outputs, and the times its steps wait for."""
    clocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each input with event time: how far it is complete, and the producers that hold it back."""
    version: int = VERSION

    @property
    def is_running(self) -> bool:
        """Whether the process that wrote it is still there."""
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def told_clocks(query: Query, time_us: int) -> dict[str, dict[str, Any]]:
    """The clocks of a query's inputs, as people want to know them."""
    found = {}
    for name, clock in query.clock_state.inputs.items():
        holding = [{"producer": who, "newest_us": newest_us, "silent_us": time_us - heard_us} for who, newest_us, heard_us in clock.holding()]
        complete_us = clock.complete_us if clock.begun else None
        found[name] = {"complete_us": complete_us, "producers": len(clock.producers), "held_back_by": holding}
    return found


def write_status(directory: Path, status: Status) -> None:
    fresh = directory / f".{FILE}"
    fresh.write_text(json.dumps(asdict(status)))
    fresh.rename(directory / FILE)


def read_status(directory: Path) -> Status:
    try:
        stored = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        raise ConfigurationError(
            f"No pipeline has run with the state directory {directory}.", fix="name it with --state, or run the pipeline first."
        ) from None
    return Status(**stored)
