"""What a pipeline's runner tells of itself in its state directory (`pipeline/status.py` writes it), as the server needs it: its name, and figures for Prometheus."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ConfigurationError
from headrace.serve.prometheus import family
from headrace.serve.stores import Stores, version_directory, versions

_FILE = "status.json"
_GAUGES = {
    "tick": "The last tick that was committed.",
    "newest_tick": "The last tick that was cut.",
    "rows_behind": "Rows of the inputs that were not taken in yet.",
    "rows_per_second": "Rows of the last batch by its time.",
    "batch_seconds": "Time of the last batch.",
    "batch_rows": "Rows of the last batch.",
    "state_bytes": "Size of what steps keep.",
    "shards": "Shards that the pipeline runs with.",
}
_COUNTERS = {"batches": "Batches of this run.", "failures": "Batches of this run that failed."}
_OPEN = (".windows_waiting", ".windows_kept")
Samples = dict[str, list[tuple[dict[str, str], float]]]


def read_run(directory: Path) -> dict[str, Any] | None:
    """None if nothing has run there."""
    try:
        found = json.loads((directory / _FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def pipeline_of(directory: Path) -> str | None:
    """The pipeline's name; None as long as it has told nothing of itself."""
    run = read_run(directory)
    return None if run is None else str(run["pipeline"])


def metrics(stores: Stores, subscribers: int) -> str:
    """Prometheus' text format."""
    lines: list[str] = []
    runs = [run for version in (None, *versions(stores.state)) if (run := read_run(version_directory(stores.state, version)))]
    for name, what in _GAUGES.items():
        lines += family(f"headrace_{name}", "gauge", what, [(_of(run), run[name]) for run in runs if name in run])
    for name, what in _COUNTERS.items():
        lines += family(f"headrace_{name}_total", "counter", what, [(_of(run), run[name]) for run in runs if name in run])
    lines += family("headrace_running", "gauge", "Whether the pipeline's process is there.", [(_of(run), float(is_running(run))) for run in runs])
    lines += family(
        "headrace_updated_timestamp_seconds", "gauge", "When the pipeline last told of itself.", [(_of(run), run["updated"]) for run in runs]
    )
    lines += family("headrace_rows_counted_total", "counter", "Rows that were put aside or came too late, by step and reason.", list(_counts(runs)))
    lines += family("headrace_complete_timestamp_seconds", "gauge", "Event time up to which an input is complete.", list(_clocks(runs)))
    lines += family("headrace_producers", "gauge", "Producers of an input that are waited for.", list(_producers(runs)))
    lines += family(
        "headrace_producer_timestamp_seconds", "gauge", "Newest event time of the producers that hold an input's clock back most.", list(_held(runs, "newest_us"))
    )
    lines += family(
        "headrace_producer_silent_seconds", "gauge", "How long the producers that hold an input's clock back most have been silent.", [(of, time.time() - heard_s) for of, heard_s in _held(runs, "heard_us")]
    )
    lines += family("headrace_open_windows", "gauge", "Windows that wait to be published, and those kept for corrections.", list(_windows(runs)))
    lines += family("headrace_waits_for_timestamp_seconds", "gauge", "The event time that a step waits for next.", list(_due(runs)))
    lines += family(
        "headrace_view_tick", "gauge", "The tick that a view shows.", [({"view": place.name}, info.tick) for place, info in _views(stores)]
    )
    lines += family("headrace_subscribers", "gauge", "Those who follow views and topics here.", [({}, subscribers)])
    return "\n".join(lines) + "\n"


def _of(run: dict[str, Any]) -> dict[str, str]:
    return {"pipeline": str(run.get("pipeline"))}


def _counts(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for name, count in run.get("counts", {}).items():
            if not name.endswith(_OPEN):
                yield {**_of(run), "what": name}, count


def _windows(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for name, count in run.get("counts", {}).items():
            if name.endswith(_OPEN):
                step, _, how = name.rpartition(".windows_")
                yield {**_of(run), "step": step, "state": how}, max(0, count)


def _due(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for query in run.get("queries", {}).values():
            for step, due_us in query.get("due_us", {}).items():
                yield {**_of(run), "step": step}, due_us / 1_000_000


def _producers(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for name, clock in run.get("clocks", {}).items():
            yield {**_of(run), "input": name}, clock.get("producers", 0)


def _held(runs: list[dict[str, Any]], what: str) -> Iterator[tuple[dict[str, str], float]]:
    """A few of each input: as many series as there are producers would be too many."""
    for run in runs:
        for name, clock in run.get("clocks", {}).items():
            for held in clock.get("held_back_by", ()):
                yield {**_of(run), "input": name, "producer": str(held["producer"])}, held[what] / 1_000_000


def _clocks(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for name, clock in run.get("clocks", {}).items():
            if clock.get("complete_us") is not None:
                yield {**_of(run), "input": name}, clock["complete_us"] / 1_000_000


def _views(stores: Stores) -> list[Any]:
    try:
        return stores.views()
    except ConfigurationError:
        return []


def is_running(run: dict[str, Any]) -> bool:
    """Whether the process that told is there."""
    try:
        os.kill(int(run["process"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
