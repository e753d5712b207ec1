"""What a run writes about itself into its state directory: `status.json`, after each batch and
every few seconds, and `plan.json`, its steps.

`runner` writes them. `headrace status`, the dashboard, the metrics and watches may run in another
process, on another machine or in another version of Headrace: these files are all they know.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace.atomic_file import write_atomically
from headrace.errors import ConfigurationError, CorruptionError, NewerFormat

FILE = "status.json"
PLAN_FILE = "plan.json"
VERSION = 1
_LATELY_S = 30.0


@dataclass(frozen=True)
class Status:
    """The status of one run. Times are seconds since the epoch. The figures of a batch are those of
    the last batch of the query that is furthest ahead.
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
    steps: dict[str, dict[str, int]] = field(default_factory=dict)
    """Step -> the "keys" and "bytes" of its state, without the garbage in its files."""
    ingests: dict[str, str] = field(default_factory=dict)
    """Ingest -> its state in words."""
    calls: dict[str, str] = field(default_factory=dict)
    """Recorded call -> its state in words."""
    queries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Query -> its tick, its outputs, its last batch with counts, how many rows it is behind, and
    the times that its steps wait for.
    """
    watermarks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Input with event time -> its watermark, and the producers that hold it back."""
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    """View -> the time of its newest change's tick (`newest`), and how long rows took lately from
    append to visible, half of them (`visible_p50_s`) and nearly all (`visible_p99_s`).
    """
    host: str = ""
    process_began: str | None = None
    """When the process was started, in ticks of its system: another process may get the same number
    later.
    """
    local: str = ""
    """The directory for local stores on each machine."""
    batch_width: str = "wide"
    """How wide the last batch ran: "one" task, or "wide" over many."""
    width: str = ""
    """Why it ran so, in words."""
    version: int = VERSION

    @property
    def is_running(self) -> bool:
        """Whether the process that wrote the status still runs. For a process on another machine:
        whether it has written lately.
        """
        return is_alive(vars(self))


def is_alive(status: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a status, given as its fields, still runs.

    A process of this machine is looked up by its number and the time it was started, since another
    process may get the number later. A process of another machine runs if it has written lately.
    """
    this_host = socket.gethostname()
    if status.get("host", this_host) != this_host:
        return time.time() - float(status["updated"]) < _LATELY_S
    process = int(status["process"])
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    started = process_start_ticks(process)
    return bool(status.get("process_began", started) == started)


def process_start_ticks(process: int) -> str | None:
    """Clock ticks between the boot of the system and the start of a process; None where the system
    does not have that.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def write_status(directory: Path, status: Status) -> None:
    write_atomically(directory / FILE, json.dumps(asdict(status)).encode(), durable=False)


def running_elsewhere(directory: Path) -> Status | None:
    """The status of a run in another process with this state directory, if there is one. Raises
    CorruptionError if the status is damaged, so that nobody can tell.
    """
    if not (directory / FILE).exists():
        return None
    status = read_status(directory)
    is_this_process = (status.host, status.process) == (socket.gethostname(), os.getpid())
    return status if status.is_running and not is_this_process else None


def read_status(directory: Path) -> Status:
    """The status in a state directory.

    Raises:
        ConfigurationError: No pipeline has run with the directory, or a newer Headrace wrote it.
        CorruptionError: The file is damaged.
    """
    path = directory / FILE
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _never_run(directory) from None
    try:
        stored = json.loads(content)
        if stored["version"] > VERSION:
            raise NewerFormat(
                f"{path} was written by a newer Headrace (format {stored['version']}, this one"
                f" reads {VERSION}).",
                fix="upgrade headrace.",
            )
        known = {each.name for each in fields(Status)}
        return Status(**{name: value for name, value in stored.items() if name in known})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = repr(error) if content else "it is empty, as a loss of power can leave it"
        raise CorruptionError(
            f"{path}, the status of the last run, is damaged: {what}.",
            fix=(
                "run the pipeline: each run writes the file anew, within seconds. Nothing else"
                " depends on it; the pipeline's state and its log are not affected."
            ),
        ) from error


def read_status_fields(directory: Path) -> dict[str, Any] | None:
    """The status in a state directory as its fields, which may be those of another version of
    Headrace; None if there is none that can be read.
    """
    try:
        status = json.loads((directory / FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def pipeline_name(directory: Path) -> str | None:
    """The name of the pipeline; None as long as it has written no status."""
    status = read_status_fields(directory)
    return None if status is None else str(status["pipeline"])


def read_plan(state: Path) -> dict[str, Any] | None:
    """The plan of the newest run; None if there is none, or if a newer Headrace wrote it."""
    try:
        plan = json.loads((state / PLAN_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return plan if isinstance(plan, dict) and plan.get("version") == 1 else None


def log_address(state: Path) -> str | None:
    """The address of the log that the pipeline reads."""
    plan = read_plan(state)
    return None if plan is None else plan.get("log")


def check_state(state: Path) -> None:
    """Refuse a directory without a plan: it is more likely misspelt than not yet used."""
    if not (state / PLAN_FILE).exists():
        raise _never_run(state)


def _never_run(state: Path) -> ConfigurationError:
    return ConfigurationError(
        f"No pipeline has run with the state directory {state}.",
        fix="name the pipeline's state directory, such as shop.state, or run the pipeline first.",
    )
