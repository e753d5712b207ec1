"""The commit of a batch: views, derived topics and the ledger."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.log.api import Staged
from headrace.log.dead import DeadLetter, ensure_topic, letters_to_rows
from headrace.sinks.ledger import Ledger, LedgerEntry
from headrace.sinks.views import ViewStore


@dataclass(frozen=True)
class Made:
    """What a batch made, ready to be committed: a view's changes in files, rows staged for topics, what each partition carries beside them, dead letters by step."""

    changes: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    staged: Sequence[Staged] = ()
    controls: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    diverted: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def commit_batch(ledger: Ledger, views: ViewStore | None, entry: LedgerEntry, made: Made, of_views: Collection[str]) -> None:
    """The steps:

    1. views: one SQL transaction, with their tick in it; ticks they already have are dropped
    2. derived topics, dead letters and the ledger entry: one log transaction, refused if a newer runner has taken over

    A crash between the two is harmless: the run resumes at the ledger's tick, computes the same rows again, and the views drop what they have.
    """
    if views is not None and of_views:  # 1
        views.commit(entry.tick, entry.epoch, {name: in_order(files) for name, files in made.changes.items()}, views=of_views)
    dead = {step: ensure_topic(ledger.log, step) for step in made.diverted}
    tx = ledger.transaction()  # 2
    for part in made.staged:
        tx.adopt(part)
    for (topic, partition), payload in made.controls.items():
        tx.append_control(topic, partition, payload)
    for step, letters in made.diverted.items():
        tx.append(dead[step], letters_to_rows(DeadLetter(place=f"step {step}", **letter) for letter in letters))
    ledger.add(tx, entry)
    ledger.commit(tx)


def in_order(files: Sequence[Path]) -> pa.Table:
    """A view's changes from all shards: by tick, within one by key group, and within that as the shard gave them. So it does not depend on the number of shards."""
    rows = pa.concat_tables([pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all() for path in files])
    order = np.lexsort([rows[name].to_numpy() for name in ("_offset", "_partition", "_rank", "_tick")])
    return rows.take(pa.array(order)).drop_columns(["_rank", "_partition", "_offset"])
