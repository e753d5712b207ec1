"""What the dashboard and `headrace top` show of a pipeline: its plan, how it goes, its topics and
groups, time, and how all that was in the last minutes.

Everything is read from what the runner leaves in its state directory and from the log, so it can be
another process that shows it. Rates are differences between two looks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.errors import ConfigurationError, HeadraceError
from headrace.http_server import family
from headrace.log import dead_letters
from headrace.log.api import Log
from headrace.serve.stores import Stores, version_directory, versions

# What a pipeline's runner tells of itself in its state directory (`pipeline/status.py` writes it),
# as the server needs it: its name, and figures for Prometheus.


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
    runs = [
        run
        for version in (None, *versions(stores.state))
        if (run := read_run(version_directory(stores.state, version)))
    ]
    for name, what in _GAUGES.items():
        lines += family(
            f"headrace_{name}",
            "gauge",
            what,
            [(_of(run), run[name]) for run in runs if name in run],
        )
    for name, what in _COUNTERS.items():
        lines += family(
            f"headrace_{name}_total",
            "counter",
            what,
            [(_of(run), run[name]) for run in runs if name in run],
        )
    lines += family(
        "headrace_running",
        "gauge",
        "Whether the pipeline's process is there.",
        [(_of(run), float(is_running(run))) for run in runs],
    )
    lines += family(
        "headrace_updated_timestamp_seconds",
        "gauge",
        "When the pipeline last told of itself.",
        [(_of(run), run["updated"]) for run in runs],
    )
    lines += family(
        "headrace_rows_counted_total",
        "counter",
        "Rows that were put aside or came too late, by step and reason.",
        list(_counts(runs)),
    )
    lines += family(
        "headrace_complete_timestamp_seconds",
        "gauge",
        "Event time up to which an input is complete.",
        list(_watermarks(runs)),
    )
    lines += family(
        "headrace_producers",
        "gauge",
        "Producers of an input that are waited for.",
        list(_producers(runs)),
    )
    lines += family(
        "headrace_producer_timestamp_seconds",
        "gauge",
        "Newest event time of the producers that hold an input's clock back most.",
        list(_held(runs, "newest_us")),
    )
    lines += family(
        "headrace_producer_silent_seconds",
        "gauge",
        "How long the producers that hold an input's clock back most have been silent.",
        [(of, time.time() - heard_s) for of, heard_s in _held(runs, "heard_us")],
    )
    lines += family(
        "headrace_open_windows",
        "gauge",
        "Windows that wait to be published, and those kept for corrections.",
        list(_windows(runs)),
    )
    lines += family(
        "headrace_waits_for_timestamp_seconds",
        "gauge",
        "The event time that a step waits for next.",
        list(_due(runs)),
    )
    lines += family(
        "headrace_view_tick",
        "gauge",
        "The tick that a view shows.",
        [({"view": place.name}, info.tick) for place, info in _views(stores)],
    )
    lines += family(
        "headrace_subscribers",
        "gauge",
        "Those who follow views and topics here.",
        [({}, subscribers)],
    )
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
        for name, clock in run.get("watermarks", {}).items():
            yield {**_of(run), "input": name}, clock.get("producers", 0)


def _held(runs: list[dict[str, Any]], what: str) -> Iterator[tuple[dict[str, str], float]]:
    """A few of each input: as many series as there are producers would be too many."""
    for run in runs:
        for name, clock in run.get("watermarks", {}).items():
            for held in clock.get("held_back_by", ()):
                yield (
                    {**_of(run), "input": name, "producer": str(held["producer"])},
                    held[what] / 1_000_000,
                )


def _watermarks(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for name, clock in run.get("watermarks", {}).items():
            if clock.get("watermark_us") is not None:
                yield {**_of(run), "input": name}, clock["watermark_us"] / 1_000_000


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


PLAN = "plan.json"
LOOK_EVERY_S = 1.0
SIZES_EVERY_S = 10.0
MAX_LOOKS = 600
RATE_OVER_S = 5.0
RATE_OVER_TICKS = (
    3  # counts are told once a batch: over less than some of them, a rate would be 0 or too much
)
RATE_OVER_AT_MOST_S = 20.0
MAX_TOPICS = 200
_RESERVED = "__"
_OWN_GROUPS = ("headrace", "__")


def check_state(state: Path) -> None:
    """A directory without a run is more likely to be misspelt than to get one."""
    if not (state / PLAN).exists():
        raise ConfigurationError(
            f"No pipeline has run with the state directory {state}.",
            fix=(
                "name the pipeline's state directory, such as shop.state, or run the pipeline"
                " first."
            ),
        )


def log_of(state: Path) -> str | None:
    """The address of the log that the pipeline reads."""
    plan = read_plan(state)
    return None if plan is None else plan.get("log")


def read_plan(state: Path) -> dict[str, Any] | None:
    """None if nothing has run there, or a newer Headrace has."""
    try:
        found = json.loads((state / PLAN).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("version") == 1 else None


@dataclass(frozen=True)
class Look:
    """How it was at one time."""

    at: float
    tick: int
    counts: dict[str, int]
    ends: dict[str, int]
    behind: int
    lag: dict[str, int]
    watermark_us: dict[str, int | None]


@dataclass
class Sizes:
    """What takes longer to find out, and changes slowly."""

    at: float = float("-inf")
    topics: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    dead: list[dict[str, Any]] = field(default_factory=list)
    views: dict[str, int] = field(default_factory=dict)


class Board:
    """Looks when it is asked, at most once a second; keeps the last ten minutes. The rows of views
    are counted for those who want that.
    """

    def __init__(self, state: Path, log: Log | None, *, count_views: bool = False) -> None:
        self.state, self.log, self.count_views = state, log, count_views
        self._looks: deque[Look] = deque(maxlen=MAX_LOOKS)
        self._sizes = Sizes()
        self._lock = threading.Lock()

    def look(self) -> None:
        """Remember how it is now."""
        with self._lock:
            if self._looks and time.time() - self._looks[-1].at < LOOK_EVERY_S * 0.9:
                return
            run = read_run(self.state) or {}
            watermarks = {
                name: clock.get("watermark_us") for name, clock in run.get("watermarks", {}).items()
            }
            self._looks.append(
                Look(
                    time.time(),
                    int(run.get("tick", 0)),
                    dict(run.get("counts", {})),
                    self._ends(),
                    int(run.get("rows_behind", 0)),
                    self._lag(),
                    watermarks,
                )
            )
            if time.time() - self._sizes.at > SIZES_EVERY_S:
                self._sizes = self._sized()

    def facts(self) -> dict[str, Any]:
        """Everything, in plain values."""
        self.look()
        run = read_run(self.state)
        with self._lock:
            before, now = span(self._looks)
        return {
            "at": now.at,
            "plan": read_plan(self.state),
            "run": None if run is None else {**run, "is_running": is_running(run)},
            "rates": _rates(before, now),
            "topics": self._topics(before, now),
            "groups": now.lag,
            "state": self._sizes.steps,
            "dead": self._sizes.dead,
            "views": self._sizes.views,
            "series": self._series(),
        }

    # A look

    def _ends(self) -> dict[str, int]:
        if self.log is None:
            return {}
        names = [name for name in self.log.topics() if not name.startswith(_RESERVED)][:MAX_TOPICS]
        return {topic: sum(ends.values()) for topic, ends in self.log.snapshot(names).items()}

    def _lag(self) -> dict[str, int]:
        """Rows that each group is behind, over all topics."""
        found: dict[str, int] = {}
        try:
            for each in self.log.lag() if self.log is not None else ():
                if not each.group.startswith(_OWN_GROUPS):
                    found[each.group] = found.get(each.group, 0) + each.rows
        except HeadraceError:  # a group that has just gone
            return found
        return found

    def _sized(self) -> Sizes:
        sizes = Sizes(time.time())
        steps = self.state / "steps"
        for directory in steps.iterdir() if steps.is_dir() else ():
            sizes.steps[directory.name] = sum(_size(path) for path in directory.glob("*.state"))
        if self.count_views:
            sizes.views = _view_rows(self.state)
        if self.log is None:
            return sizes
        for each in self.log.stats():
            if not each.name.startswith(_RESERVED):
                sizes.topics[each.name] = {
                    "partitions": each.partitions,
                    "bytes": each.bytes,
                    "rows": each.rows,
                }
        sizes.dead = [
            {"name": each.name, "of": each.of, "rows": each.rows}
            for each in dead_letters.topics(self.log)
            if each.rows
        ]
        return sizes

    # What follows from looks

    def _topics(self, before: Look, now: Look) -> list[dict[str, Any]]:
        seconds = max(now.at - before.at, 1e-9)
        return [
            {
                "name": name,
                "rows_per_second": max(0.0, (end - before.ends.get(name, end)) / seconds),
                "end": end,
                **self._sizes.topics.get(name, {}),
            }
            for name, end in sorted(now.ends.items())
        ]

    def _series(self) -> dict[str, Any]:
        """The last minutes: rows behind, each group's lag, and how far each input's time is behind
        the clock on the wall.
        """
        with self._lock:
            looks = list(self._looks)
        return {
            "at": [round(look.at, 1) for look in looks],
            "behind": [look.behind for look in looks],
            "lag": {group: [look.lag.get(group) for look in looks] for group in looks[-1].lag},
            "event_time": {
                name: [_seconds(look.watermark_us.get(name)) for look in looks]
                for name in looks[-1].watermark_us
            },
        }


def span(looks: Sequence[Look]) -> tuple[Look, Look]:
    """The newest look, and one some seconds and batches before it: what rates are told over."""
    now = looks[-1]
    recent = [look for look in looks if now.at - look.at <= RATE_OVER_AT_MOST_S]
    enough = (
        look
        for look in reversed(recent)
        if now.at - look.at >= RATE_OVER_S and now.tick - look.tick >= RATE_OVER_TICKS
    )
    return next(enough, recent[0]), now


def _rates(before: Look, now: Look) -> dict[str, float]:
    """Of every count, how fast it grows."""
    seconds = now.at - before.at
    return (
        {}
        if seconds <= 0
        else {
            name: (count - before.counts.get(name, count)) / seconds
            for name, count in now.counts.items()
        }
    )


def _view_rows(state: Path) -> dict[str, int]:
    """The rows of each view as it is served."""
    stores = Stores(state)
    try:
        found = {}
        for place, _ in stores.views():
            with place.store.reader.snapshot() as snap:
                found[place.name] = snap.count(place.stored)
    except HeadraceError:  # there are none yet, or one has just gone
        return {}
    else:
        return found
    finally:
        stores.close()


def _seconds(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1_000_000


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # folded meanwhile
        return 0


# The dashboard's files: one page, its scripts, one style sheet, served as they are. Nothing is
# loaded from elsewhere, and the browser is told to refuse it.


_SCRIPT = "text/javascript"
_FILES = {
    "/": ("index.html", "text/html"),
    "/board.js": ("board.js", _SCRIPT),
    "/drawing.js": ("drawing.js", _SCRIPT),
    "/board.css": ("board.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    return Response(
        (files("headrace.serve") / "page" / name).read_bytes(), media_type=kind, headers=_HEADERS
    )


def page_routes() -> list[Route]:
    return [Route(path, page, methods=["GET"]) for path in _FILES]
