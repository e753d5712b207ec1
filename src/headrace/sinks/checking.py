"""Compare a target with its topic, key by key: `headrace sync --check`.

The topic is folded up to the place that the target says it has, so a sink may run meanwhile. Neither side is held in memory: the log's rows stand in a store that goes to disk when it
grows (`folded_rows`), and the target is read piece by piece; what it has as the log has it is struck out, and what then is left is missing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.log.api import OFFSET_COLUMN, PARTITION_COLUMN, Log
from headrace.sinks.declared import Sink
from headrace.sinks.folded_rows import FoldedRows, TextRow
from headrace.sinks.shape import Shape, shape_of

MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"


@dataclass(frozen=True)
class Difference:
    """One key on which target and log disagree: a row that is missing in the target, one that it has too many, or one with other values in `columns`."""

    kind: str
    key: Mapping[str, Any]
    columns: tuple[str, ...] = ()
    log: Mapping[str, Any] | None = None
    target: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """`rows` are those that the log says there should be; `counts` how many keys differ in which way, `examples` the first of them."""

    rows: int
    counts: Mapping[str, int]
    examples: Sequence[Difference]
    positions: Mapping[int, int]

    @property
    def is_equal(self) -> bool:
        return not any(self.counts.values())


def compare(sink: Sink, log: Log, topic: str, *, most: int = 20) -> Comparison:
    shape = shape_of(sink, log.topic(topic))
    with replace(sink, create=False).open(shape, log) as target, FoldedRows(shape) as expected:  # looking changes nothing
        target.prepare()
        applied, actual = target.contents()
        positions = dict(applied.positions) if applied is not None else {}
        expected.fold(log, topic, positions)
        rows = expected.count()
        comparing = _Comparing(expected, most)
        first = log.start_offsets(topic)
        for piece in actual:
            comparing.take(piece if shape.is_merge else _still_kept(piece, first))
        return Comparison(rows, *comparing.result(), positions)


def _still_kept(rows: pa.Table, first: Mapping[int, int]) -> pa.Table:
    """Appended rows that the log has not removed since."""
    starts = pa.array([first.get(partition, 0) for partition in range(max(first, default=0) + 1)], pa.int64())
    return rows.filter(pc.greater_equal(rows[OFFSET_COLUMN], pc.take(starts, rows[PARTITION_COLUMN])))


@dataclass
class _Comparing:
    """What was found to differ. Of each kind, those with the smallest keys are kept as examples."""

    expected: FoldedRows
    most: int
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((MISSING, EXTRA, DIFFERENT), 0))
    _found: dict[str, list[tuple[TextRow | None, TextRow | None]]] = field(default_factory=lambda: {EXTRA: [], DIFFERENT: []})

    def take(self, rows: pa.Table) -> None:
        for of_target in self.expected.strike_out(rows):
            of_log = self.expected.take_out(of_target.key)
            kind = EXTRA if of_log is None else DIFFERENT
            self._counts[kind] += 1
            self._found[kind] = sorted([*self._found[kind], (of_log, of_target)], key=lambda pair: pair[1].key if pair[1] else b"")[: self.most]

    def result(self) -> tuple[Mapping[str, int], list[Difference]]:
        self._counts[MISSING] = self.expected.count()
        pairs: list[tuple[str, TextRow | None, TextRow | None]] = [(MISSING, of_log, None) for of_log in self.expected.first(self.most)]
        pairs += [(kind, *pair) for kind, found in self._found.items() for pair in found]
        return self._counts, [_difference(self.expected.shape, *each) for each in pairs][: self.most]


def _difference(shape: Shape, kind: str, of_log: TextRow | None, of_target: TextRow | None) -> Difference:
    log, target = (each.values(shape) if each is not None else None for each in (of_log, of_target))
    known = log or target or {}
    columns = tuple(name for name in shape.values if log and target and repr(log[name]) != repr(target[name]))
    return Difference(kind, {name: known[name] for name in shape.key}, columns, log, target)


