"""The commit of a batch: views, derived topics, dead letters and the ledger entry.

`commit_batch` is the whole protocol. `runtime.query` calls it with the output of a job; `ledger`
fences older runners.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import split_table
from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, RANK, TICK
from headrace.durations import from_us
from headrace.engine.ledger import Ledger, LedgerEntry
from headrace.engine.reports import JobRows
from headrace.log.dead_letters import ensure_dead_topic, pending_to_rows, rows_to_json_column
from headrace.log.values import Staged
from headrace.views.store import ViewStore

_LATE_SCHEMA = "step STRING, minute TIMESTAMP, producer STRING, rows BIGINT, tick BIGINT"


@dataclass(frozen=True)
class BatchOutput:
    """Everything that a batch commits besides its ledger entry."""

    views: Mapping[str, Sequence[JobRows]] = field(default_factory=dict)
    """View -> its changes."""
    topics: Sequence[Staged] = ()
    """Rows staged in the log for derived topics."""
    controls: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    """(derived topic, partition) -> control record: ticks and watermarks of the rows."""
    dead_letters: Mapping[str, Sequence[JobRows]] = field(default_factory=dict)
    """Step -> its dead letters."""
    late_counts: Sequence[tuple[str, int, str | None, int]] = ()
    """Late rows as (step, minute in microseconds, producer, number of rows)."""
    side_outputs: Mapping[str, Sequence[JobRows]] = field(default_factory=dict)
    """Topic -> late rows, or with partial matches that timed out, to append to it."""


def commit_batch(
    ledger: Ledger,
    views: ViewStore | None,
    entry: LedgerEntry,
    output: BatchOutput,
    query_views: Collection[str],
) -> dict[str, int]:
    """Commit a batch. Returns the last tick in which each view that has changed did so. The steps:

    1. Commit the views of the query in one SQL transaction, which stores the tick with them. Ticks
       that a view already has are skipped.
    2. Create the dead-letter topics and the topic of late counts that this batch needs.
    3. In one transaction of the log, append derived topics with their control records, dead
       letters, late counts, side outputs and the ledger entry. The log refuses the transaction if a
       newer runner has taken over.

    A crash between 1 and 3 is harmless: the next run resumes at the ledger's tick, computes the
    same rows again, and the views skip the ticks they have.
    """
    changes = {name: read_view_changes(files) for name, files in output.views.items()}
    if views is not None and query_views:  # 1
        with ledger.fencing():
            views.commit(entry.tick, entry.epoch, changes, views=query_views)
    dead_letter_topics = {  # 2
        step: ensure_dead_topic(ledger.log, step) for step in output.dead_letters
    }
    late_counts_topic = f"__late.{ledger.pipeline}"
    if output.late_counts:
        ledger.log.create_topic(late_counts_topic, _LATE_SCHEMA, exist_ok=True)
    tx = ledger.transaction()  # 3
    for staged in output.topics:
        tx.adopt(staged)
    for (topic, partition), payload in output.controls.items():
        tx.append_control(topic, partition, payload)
    for step, files in output.dead_letters.items():
        for piece in split_table(_read(files)):
            tx.append(dead_letter_topics[step], pending_to_rows(f"step {step}", piece))
    if output.late_counts:
        tx.append(
            late_counts_topic,
            [
                {
                    "step": step,
                    "minute": from_us(minute_us),
                    "producer": producer,
                    "rows": rows,
                    "tick": entry.tick,
                }
                for step, minute_us, producer, rows in output.late_counts
            ],
        )
    for topic, files in output.side_outputs.items():
        for piece in split_table(_read_by_tick_and_text(files)):
            tx.append(topic, piece)
    ledger.add(tx, entry)
    ledger.commit(tx)
    return {name: rows[TICK][-1].as_py() for name, rows in changes.items() if rows.num_rows}


def read_view_changes(files: Sequence[JobRows]) -> pa.Table:
    """A view's changes from all shards, ordered by tick, then key group, then as the shard emitted
    them. The order does not depend on the number of shards.
    """
    rows = _read(files)
    order = np.lexsort(
        [rows[name].to_numpy() for name in (OFFSET_COLUMN, PARTITION_COLUMN, RANK, TICK)]
    )
    return rows.take(pa.array(order)).drop_columns([RANK, PARTITION_COLUMN, OFFSET_COLUMN])


def _read_by_tick_and_text(files: Sequence[JobRows]) -> pa.Table:
    """Rows from all shards, ordered by tick and then by their JSON text, so that the order does not
    depend on the number of shards.
    """
    rows = _read(files)
    texts = rows_to_json_column(rows.drop_columns([TICK]))
    order = pc.sort_indices(
        pa.table({"tick": rows[TICK], "text": texts}),
        sort_keys=[("tick", "ascending"), ("text", "ascending")],
    )
    return rows.take(order).drop_columns([TICK])


def _read(files: Sequence[JobRows]) -> pa.Table:
    return pa.concat_tables([file.read() for file in files])
