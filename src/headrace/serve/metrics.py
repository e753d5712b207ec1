"""The metrics of `GET /metrics`, in Prometheus' text format: the status of the pipeline and of its
versions, the ticks of its views, and the server's subscribers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.errors import ConfigurationError
from headrace.http.prometheus import family
from headrace.log.api import Log
from headrace.log.capture_reports import read_capture_reports
from headrace.run_status import is_alive, read_status_fields
from headrace.serve.stores import ViewStores, version_directory, versions

Samples = Iterable[tuple[dict[str, str], float]]
_GAUGES = {
    "tick": "The last tick that was committed.",
    "newest_tick": "The last tick that was cut.",
    "rows_behind": "Rows of the inputs that have not been processed.",
    "rows_per_second": "Rows of the last batch divided by its duration.",
    "batch_seconds": "Duration of the last batch.",
    "batch_rows": "Rows of the last batch.",
    "state_bytes": "Size of the state of all steps.",
    "shards": "Shards that the pipeline runs with.",
}
_COUNTERS = {"batches": "Batches of this run.", "failures": "Batches of this run that failed."}
_STATE_SIZES = {
    "keys": "Entries in the state of a step.",
    "bytes": "Bytes of the entries in the state of a step.",
}
_CAPTURE_FIGURES = {
    "rows": ("counter", "Rows that a capture has written since it was started."),
    "changes": ("counter", "Changes that a capture has written since it was started."),
    "transactions": ("counter", "Transactions that a capture has written since it was started."),
    "dead_letters": ("counter", "Records that a capture could not use."),
    "failures": ("gauge", "Failures of a capture in a row; 0 while it works."),
    "lag_seconds": ("gauge", "How long ago the last change was committed, while more wait."),
    "behind_bytes": ("gauge", "Bytes of the database's log that a capture has not read."),
    "retained_bytes": ("gauge", "Bytes of its log that the database retains for a capture."),
    "snapshot_rows": ("gauge", "Rows that running snapshots have read."),
    "snapshot_about": ("gauge", "About how many rows running snapshots have to read."),
}
_WINDOW_GAUGES = (".windows_waiting", ".windows_kept")


def render_metrics(stores: ViewStores, subscribers: int, log: Log | None = None) -> str:
    """All metrics, as text."""
    state = stores.state
    directories = [version_directory(state, version) for version in (None, *versions(state))]
    runs = [status for directory in directories if (status := read_status_fields(directory))]
    lines: list[str] = []

    def add(name: str, kind: str, help_text: str, samples: Samples) -> None:
        lines.extend(family(f"headrace_{name}", kind, help_text, list(samples)))

    for name, help_text in _GAUGES.items():
        add(name, "gauge", help_text, [(_labels(run), run[name]) for run in runs if name in run])
    for name, help_text in _COUNTERS.items():
        samples = [(_labels(run), run[name]) for run in runs if name in run]
        add(f"{name}_total", "counter", help_text, samples)
    add(
        "running",
        "gauge",
        "Whether the pipeline's process is alive.",
        [(_labels(run), float(is_alive(run))) for run in runs],
    )
    add(
        "updated_timestamp_seconds",
        "gauge",
        "When the pipeline last wrote its status.",
        [(_labels(run), run["updated"]) for run in runs],
    )
    add(
        "batch_is_wide",
        "gauge",
        "Whether the last batch ran over many tasks instead of whole in one.",
        [(_labels(run), float(run.get("batch_width", "wide") == "wide")) for run in runs],
    )
    add(
        "view_newest_timestamp_seconds",
        "gauge",
        "When the newest change of a view was cut into a tick.",
        [
            ({**_labels(run), "view": view}, freshness["newest"])
            for run in runs
            for view, freshness in run.get("views", {}).items()
            if freshness["newest"] is not None
        ],
    )
    add(
        "view_visible_seconds",
        "gauge",
        "How long rows took lately from append to visible in a view, by quantile.",
        [
            ({**_labels(run), "view": view, "quantile": quantile}, freshness[name])
            for run in runs
            for view, freshness in run.get("views", {}).items()
            for quantile, name in (("0.5", "visible_p50_s"), ("0.99", "visible_p99_s"))
            if freshness[name] is not None
        ],
    )
    add(
        "rows_counted_total",
        "counter",
        "Rows that became dead letters, were too late or ahead of their time, by step and reason.",
        [
            ({**_labels(run), "what": name}, count)
            for run in runs
            for name, count in run.get("counts", {}).items()
            if not name.endswith(_WINDOW_GAUGES)
        ],
    )
    for size, help_text in _STATE_SIZES.items():
        add(
            f"step_state_{size}",
            "gauge",
            help_text,
            [
                ({**_labels(run), "step": step}, sizes[size])
                for run in runs
                for step, sizes in run.get("steps", {}).items()
            ],
        )
    add(
        "watermark_timestamp_seconds",
        "gauge",
        "The watermark of an input: event time up to which it is complete.",
        _watermarks(runs),
    )
    add(
        "producers",
        "gauge",
        "Producers of an input that its watermark waits for.",
        [
            ({**_labels(run), "input": name}, watermark.get("producers", 0))
            for run in runs
            for name, watermark in run.get("watermarks", {}).items()
        ],
    )
    add(
        "producer_timestamp_seconds",
        "gauge",
        "Newest event time of the producers that hold an input's watermark back most.",
        _slowest_producers(runs, "newest_us"),
    )
    add(
        "producer_silent_seconds",
        "gauge",
        "How long the producers that hold an input's watermark back most have been silent.",
        [
            (labels, time.time() - heard_s)
            for labels, heard_s in _slowest_producers(runs, "heard_us")
        ],
    )
    add(
        "open_windows",
        "gauge",
        "Windows that wait to be emitted, and those retained for corrections.",
        _open_windows(runs),
    )
    add(
        "waits_for_timestamp_seconds",
        "gauge",
        "The event time that a step waits for next.",
        [
            ({**_labels(run), "step": step}, due_us / 1_000_000)
            for run in runs
            for query in run.get("queries", {}).values()
            for step, due_us in query.get("due_us", {}).items()
        ],
    )
    try:
        views = stores.views()
    except ConfigurationError:  # there are none yet
        views = []
    add(
        "view_tick",
        "gauge",
        "The tick that a view shows.",
        [({"view": location.name}, info.tick) for location, info in views],
    )
    reports = read_capture_reports(log) if log is not None else {}
    for column, (kind, help_text) in _CAPTURE_FIGURES.items():
        add(
            f"capture_{column}{'_total' if kind == 'counter' else ''}",
            kind,
            help_text,
            [
                ({"capture": name}, report[column])
                for name, report in reports.items()
                if report[column] is not None
            ],
        )
    add(
        "capture_stopped_tables",
        "gauge",
        "Tables that a capture does not follow any more.",
        [({"capture": name}, len(report["stopped"])) for name, report in reports.items()],
    )
    add(
        "capture_reported_timestamp_seconds",
        "gauge",
        "When a capture last reported.",
        [({"capture": name}, report["at"]) for name, report in reports.items()],
    )
    add(
        "subscribers",
        "gauge",
        "Subscribers of views and topics on this server.",
        [({}, subscribers)],
    )
    return "\n".join(lines) + "\n"


def _labels(run: dict[str, Any]) -> dict[str, str]:
    return {"pipeline": str(run.get("pipeline"))}


def _open_windows(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for name, count in run.get("counts", {}).items():
            if name.endswith(_WINDOW_GAUGES):
                step, _, state = name.rpartition(".windows_")
                yield {**_labels(run), "step": step, "state": state}, max(0, count)


def _watermarks(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], float]]:
    for run in runs:
        for name, watermark in run.get("watermarks", {}).items():
            if watermark.get("watermark_us") is not None:
                yield {**_labels(run), "input": name}, watermark["watermark_us"] / 1_000_000


def _slowest_producers(
    runs: list[dict[str, Any]], field: str
) -> Iterator[tuple[dict[str, str], float]]:
    """A time of the few producers that the status lists per input: one series for every producer
    would be too many.
    """
    for run in runs:
        for name, watermark in run.get("watermarks", {}).items():
            for producer in watermark.get("held_back_by", ()):
                labels = {**_labels(run), "input": name, "producer": str(producer["producer"])}
                yield labels, producer[field] / 1_000_000
