"""What the dashboard and `headrace top` show of a pipeline: its plan and status, topics, consumer
groups and dead letters, and a history of the last ten minutes.

Everything is read from the runner's state directory and from the log, so the dashboard may run in
another process. Rates are differences between two samples. The page's files are in `page/`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.engine.state.files import SHARED
from headrace.errors import HeadraceError
from headrace.log import dead_letters
from headrace.log.api import Log
from headrace.run_status import is_alive, read_plan, read_status_fields
from headrace.serve.stores import ViewStores

SAMPLE_EVERY_S = 1.0
SIZES_EVERY_S = 10.0
MAX_SAMPLES = 600
MAX_TOPICS = 200
# Counts are written once a batch. Over fewer than some batches, a rate would be 0 or too large.
RATE_MIN_S = 5.0
RATE_MIN_TICKS = 3
RATE_MAX_S = 20.0
_INTERNAL_TOPICS = "__"
_INTERNAL_GROUPS = ("headrace", "__")


@dataclass(frozen=True)
class DashboardSample:
    """The figures that change with every batch, at one time."""

    at: float
    tick: int
    counts: dict[str, int]
    ends: dict[str, int]
    rows_behind: int
    lag: dict[str, int]
    watermark_us: dict[str, int | None]


@dataclass
class SizeMeasurements:
    """The figures that take longer to measure, and change slowly."""

    at: float = float("-inf")
    topics: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    dead: list[dict[str, Any]] = field(default_factory=list)
    views: dict[str, int] = field(default_factory=dict)


class Dashboard:
    """Samples a pipeline when it is read, at most once a second, and retains the last ten minutes.
    With `count_views` it also counts the rows of views.
    """

    def __init__(self, state: Path, log: Log | None, *, count_views: bool = False) -> None:
        self.state = state
        self.log = log
        self.count_views = count_views
        self._samples: deque[DashboardSample] = deque(maxlen=MAX_SAMPLES)
        self._sizes = SizeMeasurements()
        self._lock = threading.Lock()

    def sample(self) -> None:
        """Take a sample, unless the last one is recent enough."""
        with self._lock:
            if self._samples and time.time() - self._samples[-1].at < SAMPLE_EVERY_S * 0.9:
                return
            status = read_status_fields(self.state) or {}
            watermarks = status.get("watermarks", {})
            self._samples.append(
                DashboardSample(
                    at=time.time(),
                    tick=int(status.get("tick", 0)),
                    counts=dict(status.get("counts", {})),
                    ends=self._topic_ends(),
                    rows_behind=int(status.get("rows_behind", 0)),
                    lag=self._group_lag(),
                    watermark_us={
                        name: watermark.get("watermark_us")
                        for name, watermark in watermarks.items()
                    },
                )
            )
            if time.time() - self._sizes.at > SIZES_EVERY_S:
                self._sizes = self._measure_sizes()

    def measurements(self) -> dict[str, Any]:
        """Everything the dashboard shows, in values that JSON can hold."""
        self.sample()
        status = read_status_fields(self.state)
        with self._lock:
            earlier, now = rate_span(self._samples)
            samples = list(self._samples)
        seconds = now.at - earlier.at
        rates = {}
        if seconds > 0:
            for name, count in now.counts.items():
                rates[name] = (count - earlier.counts.get(name, count)) / seconds
        topics = []
        for name, end in sorted(now.ends.items()):
            appended = end - earlier.ends.get(name, end)
            topics.append(
                {
                    "name": name,
                    "rows_per_second": max(0.0, appended / max(seconds, 1e-9)),
                    "end": end,
                    **self._sizes.topics.get(name, {}),
                }
            )
        return {
            "at": now.at,
            "plan": read_plan(self.state),
            "run": None if status is None else {**status, "is_running": is_alive(status)},
            "rates": rates,
            "topics": topics,
            "groups": now.lag,
            "state": self._sizes.steps,
            "dead": self._sizes.dead,
            "views": self._sizes.views,
            "series": {
                "at": [round(sample.at, 1) for sample in samples],
                "behind": [sample.rows_behind for sample in samples],
                "lag": {
                    group: [sample.lag.get(group) for sample in samples]
                    for group in samples[-1].lag
                },
                "event_time": {
                    name: [_seconds(sample.watermark_us.get(name)) for sample in samples]
                    for name in samples[-1].watermark_us
                },
            },
        }

    def _topic_ends(self) -> dict[str, int]:
        if self.log is None:
            return {}
        try:
            names = [name for name in self.log.topics() if not name.startswith(_INTERNAL_TOPICS)]
            snapshot = self.log.snapshot(names[:MAX_TOPICS])
        except HeadraceError:  # a topic was deleted meanwhile, or a partition has no leader
            return {}
        return {topic: sum(ends.values()) for topic, ends in snapshot.items()}

    def _group_lag(self) -> dict[str, int]:
        """The rows that each consumer group is behind, over all topics."""
        lag: dict[str, int] = {}
        if self.log is None:
            return lag
        try:
            for entry in self.log.lag():
                if not entry.group.startswith(_INTERNAL_GROUPS):
                    lag[entry.group] = lag.get(entry.group, 0) + entry.rows
        except HeadraceError:  # a group was deleted meanwhile
            return lag
        return lag

    def _measure_sizes(self) -> SizeMeasurements:
        sizes = SizeMeasurements(time.time())
        steps = self.state / "steps"
        for directory in steps.iterdir() if steps.is_dir() else ():
            if directory.name == SHARED:  # small files of several steps: only in the total
                continue
            sizes.steps[directory.name] = sum(
                _size_bytes(path) for path in directory.glob("*.state")
            )
        if self.count_views:
            sizes.views = _view_rows(self.state)
        if self.log is None:
            return sizes
        for stats in self.log.stats(count_rows=False):
            if not stats.name.startswith(_INTERNAL_TOPICS):
                sizes.topics[stats.name] = {
                    "partitions": stats.partitions,
                    "bytes": stats.bytes,
                    "rows": stats.rows,
                }
        sizes.dead = [
            {"name": topic.name, "of": topic.of, "rows": topic.rows}
            for topic in dead_letters.dead_topics(self.log)
            if topic.rows
        ]
        return sizes


def rate_span(samples: Sequence[DashboardSample]) -> tuple[DashboardSample, DashboardSample]:
    """The newest sample, and the one some seconds and batches before it: rates are taken over the
    time between the two.
    """
    now = samples[-1]
    recent = [sample for sample in samples if now.at - sample.at <= RATE_MAX_S]
    for sample in reversed(recent):
        if now.at - sample.at >= RATE_MIN_S and now.tick - sample.tick >= RATE_MIN_TICKS:
            return sample, now
    return recent[0], now


def _view_rows(state: Path) -> dict[str, int]:
    """The number of rows of each view, as it is served."""
    stores = ViewStores(state)
    counts = {}
    try:
        for location, _ in stores.views():
            with location.store.reader.snapshot() as snap:
                counts[location.name] = snap.count(location.stored_name)
    except HeadraceError:  # there are no views yet, or one was dropped meanwhile
        return {}
    finally:
        stores.close()
    return counts


def _seconds(time_us: int | None) -> float | None:
    return None if time_us is None else time_us / 1_000_000


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # compacted meanwhile
        return 0


# The page: its files are served as they are. Nothing is loaded from elsewhere, and the content
# security policy makes the browser refuse it.


_SCRIPT = "text/javascript"
_FILES = {
    "/": ("index.html", "text/html"),
    "/board.js": ("board.js", _SCRIPT),
    "/drawing.js": ("drawing.js", _SCRIPT),
    "/board.css": ("board.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(_FILES)
"""The page holds no data, and needs no token: it requests data with the token."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def serve_page(request: Request) -> Response:
    name, media_type = _FILES[request.url.path]
    content = (files("headrace.serve") / "page" / name).read_bytes()
    return Response(content, media_type=media_type, headers=_HEADERS)


def page_routes() -> list[Route]:
    """The routes of the dashboard's page and its files."""
    return [Route(path, serve_page, methods=["GET"]) for path in _FILES]
