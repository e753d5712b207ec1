"""What StatsD does each flush interval: counters are summed, gauges remembered, timers and histograms described, members of sets counted.

Values wait as columns, by the number of their metric. Only metrics are gone through one by one, never values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.gateways.statsd_gateway.lines import COUNTER, GAUGE, HISTOGRAM, SET, TIMER, Values

MOST_METRICS = 100_000
MOST_VALUES = 5_000_000
"""Values of timers and members of sets that wait for the end of their interval."""
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SCHEMA = (
    "metric STRING, kind STRING, tags STRING, value DOUBLE, count DOUBLE, rate DOUBLE, sum DOUBLE, min DOUBLE, max DOUBLE, mean DOUBLE, "
    "p50 DOUBLE, p90 DOUBLE, p95 DOUBLE, p99 DOUBLE, started_at TIMESTAMP, ended_at TIMESTAMP, received_at TIMESTAMP"
)
_FIGURES = ("value", "count", "rate", "sum", "min", "max", "mean", *PERCENTILES)
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_NO_NUMBERS, _NO_FLOATS = np.empty(0, np.int64), np.empty(0, np.float64)


@dataclass
class _Waiting:
    """Values of one interval, by the numbers of their metrics."""

    totals: dict[int, float] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)
    timed: list[tuple[Numbers, Floats, Floats]] = field(default_factory=list)
    """Metric, value, and how many it stands for."""
    members: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0
    values: int = 0


class Aggregator:
    """Takes values, and gives one row a metric at the end of an interval."""

    def __init__(self, *, forget_gauges: bool = False) -> None:
        self._forget_gauges = forget_gauges
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._names: list[tuple[str, str, str]] = []
        self._gauges: dict[int, float] = {}
        self._waiting = _Waiting()

    @property
    def waiting(self) -> int:
        return self._waiting.values

    def add(self, values: Values) -> int:
        """Returns how many could not be taken: there are too many metrics, or values."""
        metrics = self._metrics_of(values)
        taken = metrics >= 0
        kinds = values.kind.to_numpy(zero_copy_only=False)
        weights = values.times / values.rate
        self._add_counters(metrics, values, weights, taken & (kinds == COUNTER))
        self._add_gauges(metrics, values, taken & (kinds == GAUGE))
        many = taken & ((kinds == TIMER) | (kinds == HISTOGRAM) | (kinds == SET))
        if self._waiting.size + int(many.sum()) > MOST_VALUES:
            taken &= ~many
        else:
            self._add_timed(metrics, values, weights, many & (kinds != SET))
            self._add_members(metrics, values, many & (kinds == SET))
        count = int(values.times[taken].sum())
        self._waiting.values += count
        return len(values) - count

    def _metrics_of(self, values: Values) -> Numbers:
        """The number of each value's metric; -1 for one too many."""
        names = pc.binary_join_element_wise(values.metric, values.kind, values.tags, "\n").dictionary_encode()
        numbers = np.array([self._number(name) for name in names.dictionary.to_pylist()], np.int64)
        found: Numbers = numbers[names.indices.to_numpy()] if len(numbers) else _NO_NUMBERS
        return found

    def _number(self, joined: str) -> int:
        metric, kind, tags = joined.split("\n")
        name = (metric, kind, tags)
        number = self._numbers.get(name)
        if number is None:
            if len(self._names) >= MOST_METRICS:
                return -1
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number

    def _add_counters(self, metrics: Numbers, values: Values, weights: Floats, mine: npt.NDArray[np.bool_]) -> None:
        different, places = np.unique(metrics[mine], return_inverse=True)
        sums = np.bincount(places, weights=values.value[mine] * weights[mine])
        times = np.bincount(places, weights=weights[mine])
        for metric, total, count in zip(different.tolist(), sums.tolist(), times.tolist(), strict=True):
            self._waiting.totals[metric] = self._waiting.totals.get(metric, 0.0) + total
            self._waiting.counts[metric] = self._waiting.counts.get(metric, 0.0) + count

    def _add_gauges(self, metrics: Numbers, values: Values, mine: npt.NDArray[np.bool_]) -> None:
        """In the order they came: the last value without a sign, and what was added to it since."""
        order = values.order[mine[values.order]]
        if not len(order):
            return
        different, places = np.unique(metrics[order], return_inverse=True)
        numbers, is_delta, at = values.value[order], values.is_delta[order], np.arange(len(order))
        last = np.full(len(different), -1)
        np.maximum.at(last, places[~is_delta], at[~is_delta])
        since = is_delta & (at > last[places])
        more = np.bincount(places[since], weights=numbers[since], minlength=len(different))
        for i, metric in enumerate(different.tolist()):
            base = float(numbers[last[i]]) if last[i] >= 0 else self._gauges.get(metric, 0.0)
            self._gauges[metric] = base + float(more[i])
        times = np.bincount(places)
        for metric, count in zip(different.tolist(), times.tolist(), strict=True):
            self._waiting.counts[metric] = self._waiting.counts.get(metric, 0.0) + count

    def _add_timed(self, metrics: Numbers, values: Values, weights: Floats, mine: npt.NDArray[np.bool_]) -> None:
        if mine.any():
            self._waiting.timed.append((metrics[mine], values.value[mine], weights[mine]))
            self._waiting.size += int(mine.sum())

    def _add_members(self, metrics: Numbers, values: Values, mine: npt.NDArray[np.bool_]) -> None:
        if mine.any():
            members = values.member.filter(pa.array(mine))
            self._waiting.members.append(pa.record_batch({"metric": pa.array(metrics[mine]), "member": members}))
            self._waiting.size += int(mine.sum())

    # The end of an interval

    def flush(self, started_us: int, ended_us: int) -> tuple[pa.RecordBatch, int]:
        """One row a metric, and how many values they are of. Gauges that nobody told anything about keep their values, and are told again unless they are to be forgotten."""
        waiting, self._waiting = self._waiting, _Waiting()
        seconds = max((ended_us - started_us) / 1e6, 1e-6)
        rows: list[tuple[int, dict[str, float]]] = [
            (metric, {"value": total, "sum": total, "count": waiting.counts[metric], "rate": total / seconds}) for metric, total in waiting.totals.items()
        ]
        rows += [(metric, {"value": value, "count": waiting.counts.get(metric, 0.0)}) for metric, value in self._gauges.items()]
        rows += _described(waiting.timed, seconds) + _distinct(waiting.members)
        batch = self._batch(rows, started_us, ended_us)
        if self._forget_gauges:
            self._gauges.clear()
        if len(self._names) >= MOST_METRICS // 2:
            self._forget_idle()
        return batch, waiting.values

    def _forget_idle(self) -> None:
        """Numbers are given anew, before there are too many; gauges are kept."""
        kept = [self._names[number] for number in self._gauges]
        gauges = list(self._gauges.values())
        self._names, self._numbers = kept, {name: number for number, name in enumerate(kept)}
        self._gauges = dict(enumerate(gauges))

    def _batch(self, rows: list[tuple[int, dict[str, float]]], started_us: int, ended_us: int) -> pa.RecordBatch:
        names = [self._names[number] for number, _ in rows]
        moment = pa.timestamp("us", "UTC")
        columns = {each: pa.array([name[i] for name in names], pa.string()) for i, each in enumerate(("metric", "kind", "tags"))}
        columns |= {each: pa.array([figures.get(each) for _, figures in rows], pa.float64()) for each in _FIGURES}
        columns |= {name: pa.repeat(pa.scalar(us, moment), len(rows)) for name, us in (("started_at", started_us), ("ended_at", ended_us))}
        return pa.record_batch(columns)


def _described(timed: list[tuple[Numbers, Floats, Floats]], seconds: float) -> list[tuple[int, dict[str, float]]]:
    """Each metric's values, in order of size: percentiles are those of what the values stand for, sampled or not."""
    if not timed:
        return []
    metrics, values, weights = (np.concatenate([part[i] for part in timed]) for i in range(3))
    order = np.lexsort((values, metrics))
    metrics, values, weights = metrics[order], values[order], weights[order]
    different, firsts = np.unique(metrics, return_index=True)
    ends = np.append(firsts[1:], len(metrics))
    total = np.cumsum(weights)
    rows = []
    for metric, first, end in zip(different.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        mine, share = values[first:end], total[first:end] - (total[first - 1] if first else 0.0)
        count, whole = float(share[-1]), float((mine * weights[first:end]).sum())
        figures = {"value": whole / count, "mean": whole / count, "count": count, "rate": count / seconds, "sum": whole, "min": float(mine[0]), "max": float(mine[-1])}
        places = np.minimum(np.searchsorted(share, np.array(list(PERCENTILES.values())) * count * (1 - 1e-12)), len(mine) - 1)
        rows.append((metric, figures | dict(zip(PERCENTILES, mine[places].tolist(), strict=True))))
    return rows


def _distinct(members: list[pa.RecordBatch]) -> list[tuple[int, dict[str, float]]]:
    if not members:
        return []
    counted = pa.Table.from_batches(members).group_by("metric").aggregate([("member", "count_distinct")])
    return [(metric, {"value": float(count), "count": float(count)}) for metric, count in zip(*(counted[name].to_pylist() for name in ("metric", "member_count_distinct")), strict=True)]
