"""What a runner tells of itself: a small file in its state directory, written after each batch and
every few seconds. `headrace status` shows it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.atomic_file import write_atomically
from headrace.errors import ConfigurationError

FILE = "status.json"
VERSION = 1
_HEARD_LATELY_S = 30.0


@dataclass(frozen=True)
class Status:
    """One pipeline's run. Times are seconds since the epoch; what is said of a batch is said of the
    last one of the query that is furthest.
    """

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
    """Each query: its tick, its outputs, its last batch and what was counted in it, how far it is
    behind, and the times its steps wait for.
    """
    watermarks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each input with event time: how far it is complete, and the producers that hold it back."""
    host: str = ""
    process_began: str | None = None
    """When the process was started, as its system counts: another process may get the same number
    later.
    """
    local: str = ""
    """Where state is at hand on each machine."""
    version: int = VERSION

    @property
    def is_running(self) -> bool:
        """Whether the process that wrote it is still there; of one on another machine, whether it
        was lately.
        """
        if self.host != socket.gethostname():
            return time.time() - self.updated < _HEARD_LATELY_S
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return process_start_ticks(self.process) == self.process_began


def process_start_ticks(process: int) -> str | None:
    """Ticks of the system's clock from its start to the process's; None where the system does not
    tell.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def write_status(directory: Path, status: Status) -> None:
    write_atomically(directory / FILE, json.dumps(asdict(status)).encode(), durable=False)


def running_elsewhere(directory: Path) -> Status | None:
    """The run of another process with this state directory, if there is one."""
    if not (directory / FILE).exists():
        return None
    known = read_status(directory)
    return (
        known
        if known.is_running and (known.host, known.process) != (socket.gethostname(), os.getpid())
        else None
    )


def read_status(directory: Path) -> Status:
    try:
        stored = json.loads((directory / FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"No pipeline has run with the state directory {directory}.",
            fix=(
                "name the pipeline's state directory, such as shop.state, or run the pipeline"
                " first."
            ),
        ) from None
    return Status(**stored)
