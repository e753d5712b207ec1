"""Compare a target with its topic, key by key: `headrace sync --check`.

The topic is folded up to the place that the target says it has, so a sink may run meanwhile. Both sides are held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.source import MARKS
from headrace.log.api import OFFSET_COLUMN, PARTITION_COLUMN, Log
from headrace.log.dead import rows_to_texts
from headrace.sinks.batch import Batch, batch_of
from headrace.sinks.declared import Sink
from headrace.sinks.following import belonging
from headrace.sinks.keyed import having
from headrace.sinks.shape import Shape, shape_of

_FOLD_ROWS = 500_000
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
    with replace(sink, create=False).open(shape, log) as target:  # looking changes nothing
        target.prepare()
        applied, actual = target.contents()
    positions = dict(applied.positions) if applied is not None else {}
    expected = folded(log, topic, shape, positions)
    if not shape.is_merge:
        actual = _still_kept(actual, log.start_offsets(topic))
    return _compared(expected, actual, shape, positions, most)


def folded(log: Log, topic: str, shape: Shape, positions: Mapping[int, int]) -> pa.Table:
    """The rows that a target should have at these places of the topic."""
    known, waiting = shape.schema.empty_table(), list[pa.RecordBatch]()
    first = log.start_offsets(topic)
    together = MARKS in shape.source.names and len(positions) > 1  # a row may take over values from one in another partition
    for partition, stop in sorted(positions.items()):
        for batch in log.read(topic, partition, first.get(partition, 0), stop):
            if not together and sum(each.num_rows for each in waiting) >= _FOLD_ROWS and not belonging(waiting, batch, 0):
                known, waiting = _with(known, waiting, shape), []
            waiting.append(batch)
        if not together:
            known, waiting = _with(known, waiting, shape), []
    return _with(known, waiting, shape)


def _with(known: pa.Table, raw: list[pa.RecordBatch], shape: Shape) -> pa.Table:
    batch: Batch = batch_of(raw, shape, {}, {}, lambda keys: having(known, keys, list(shape.key), wanted=True))
    if shape.is_merge and known.num_rows:
        changed = pa.concat_tables([batch.upserts.select(list(shape.key)), batch.deletes.cast(batch.upserts.select(list(shape.key)).schema)])
        known = having(known, changed, list(shape.key), wanted=False)
    return pa.concat_tables([known, batch.upserts])


def _still_kept(rows: pa.Table, first: Mapping[int, int]) -> pa.Table:
    """Appended rows that the log has not removed since."""
    starts = pa.array([first.get(partition, 0) for partition in range(max(first, default=0) + 1)], pa.int64())
    return rows.filter(pc.greater_equal(rows[OFFSET_COLUMN], pc.take(starts, rows[PARTITION_COLUMN])))


def _compared(expected: pa.Table, actual: pa.Table, shape: Shape, positions: Mapping[int, int], most: int) -> Comparison:
    """By the JSON text of each row, for whole columns at once; only those that differ are looked at one by one."""
    sides = []
    for name, rows in (("log", expected), ("target", actual)):
        texts = {
            "key": rows_to_texts(rows.select(list(shape.key))),
            name: rows_to_texts(rows),
            f"{name}_n": pa.array(range(rows.num_rows), pa.int64()),
        }
        sides.append(pa.table(texts))
    both = sides[0].join(sides[1], "key", join_type="full outer")
    differing = both.filter(pc.not_equal(pc.fill_null(both["log"], ""), pc.fill_null(both["target"], ""))).sort_by("key")
    found = {
        MISSING: differing.filter(pc.is_null(differing["target"])),
        EXTRA: differing.filter(pc.is_null(differing["log"])),
        DIFFERENT: differing.filter(pc.and_(pc.is_valid(differing["log"]), pc.is_valid(differing["target"]))),
    }
    examples = [_difference(kind, row, expected, actual, shape) for kind, rows in found.items() for row in rows.slice(0, most).to_pylist()]
    return Comparison(expected.num_rows, {kind: rows.num_rows for kind, rows in found.items()}, examples[:most], positions)


def _difference(kind: str, row: dict[str, Any], expected: pa.Table, actual: pa.Table, shape: Shape) -> Difference:
    of_log = expected.slice(row["log_n"], 1).to_pylist()[0] if row["log_n"] is not None else None
    of_target = actual.slice(row["target_n"], 1).to_pylist()[0] if row["target_n"] is not None else None
    known = of_log or of_target or {}
    columns = tuple(name for name in shape.values if of_log and of_target and repr(of_log[name]) != repr(of_target[name]))
    return Difference(kind, {name: known[name] for name in shape.key}, columns, of_log, of_target)
