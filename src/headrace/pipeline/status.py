"""What a runner tells of itself: a small file in its state directory, written after each batch. `headrace status` shows it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace.errors import ConfigurationError

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
