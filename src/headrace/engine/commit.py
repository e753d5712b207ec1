"""The commit of a batch: views, derived topics and the ledger."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import pieces
from headrace.durations import from_us
from headrace.engine.ledger import Ledger, LedgerEntry
from headrace.log.dead_letters import aside_to_rows, ensure_topic, rows_to_texts
from headrace.log.values import Staged
from headrace.views.store import ViewStore

_LATE = "step STRING, minute TIMESTAMP, producer STRING, rows BIGINT, tick BIGINT"


@dataclass(frozen=True)
class BatchOutput:
    """What a batch made, ready to be committed: a view's changes in files, rows staged for topics,
    what each partition carries beside them, files with dead letters by step, the count of rows that
    came too late, and such rows by the topic that is to have them.
    """

    changes: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    staged: Sequence[Staged] = ()
    controls: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    diverted: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    late: Sequence[tuple[str, int, str | None, int]] = ()
    late_rows: Mapping[str, Sequence[Path]] = field(default_factory=dict)


def commit_batch(
    ledger: Ledger,
    views: ViewStore | None,
    entry: LedgerEntry,
    made: BatchOutput,
    of_views: Collection[str],
) -> None:
    """The steps:

    1. views: one SQL transaction, with their tick in it; ticks they already have are dropped
    2. derived topics, dead letters and the ledger entry: one log transaction, refused if a newer
       runner has taken over

    A crash between the two is harmless: the run resumes at the ledger's tick, computes the same
    rows again, and the views drop what they have.
    """
    if views is not None and of_views:  # 1
        with ledger.fencing():
            views.commit(
                entry.tick,
                entry.epoch,
                {name: in_order(files) for name, files in made.changes.items()},
                views=of_views,
            )
    dead = {step: ensure_topic(ledger.log, step) for step in made.diverted}
    late = late_topic(ledger) if made.late else ""
    tx = ledger.transaction()  # 2
    for part in made.staged:
        tx.adopt(part)
    for (topic, partition), payload in made.controls.items():
        tx.append_control(topic, partition, payload)
    for step, letters in made.diverted.items():
        for piece in pieces(_read(letters)):
            tx.append(dead[step], aside_to_rows(f"step {step}", piece))
    if made.late:
        tx.append(late, [_late_row(entry.tick, *counted) for counted in made.late])
    for topic, files in made.late_rows.items():
        for piece in pieces(_sorted_by_tick(files)):
            tx.append(topic, piece)
    ledger.add(tx, entry)
    ledger.commit(tx)


def late_topic(ledger: Ledger) -> str:
    """The topic with the count of rows that came too late, by step, minute and producer."""
    name = f"__late.{ledger.pipeline}"
    ledger.log.create_topic(name, _LATE, exist_ok=True)
    return name


def _late_row(
    tick: int, step: str, minute_us: int, producer: str | None, rows: int
) -> dict[str, Any]:
    return {
        "step": step,
        "minute": from_us(minute_us),
        "producer": producer,
        "rows": rows,
        "tick": tick,
    }


def _sorted_by_tick(files: Sequence[Path]) -> pa.Table:
    """Rows of all shards, by tick and then by their text, so that they do not depend on the
    shards.
    """
    rows = _read(files)
    texts = rows_to_texts(rows.drop_columns(["_tick"]))
    order = pc.sort_indices(
        pa.table({"tick": rows["_tick"], "text": texts}),
        sort_keys=[("tick", "ascending"), ("text", "ascending")],
    )
    return rows.take(order).drop_columns(["_tick"])


def _read(files: Sequence[Path]) -> pa.Table:
    return pa.concat_tables(
        [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in files]
    )


def in_order(files: Sequence[Path]) -> pa.Table:
    """A view's changes from all shards: by tick, within one by key group, and within that as the
    shard gave them. So it does not depend on the number of shards.
    """
    rows = _read(files)
    order = np.lexsort(
        [rows[name].to_numpy() for name in ("_offset", "_partition", "_rank", "_tick")]
    )
    return rows.take(pa.array(order)).drop_columns(["_rank", "_partition", "_offset"])
