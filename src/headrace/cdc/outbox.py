"""The outbox: a table into which applications put events in the same transaction as their data. Its rows become events in topics named by `aggregate_type`, not a table.

Only what is inserted counts: an application may delete a row at once, even in the same transaction, and the event is there all the same.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.source import COMMITTED_AT, POSITION, Event, TableShape
from headrace.cdc.topics import topic_name
from headrace.errors import ConfigurationError
from headrace.log.api import CHANGE_TYPE, INSERT

COLUMNS = ("id", "aggregate_type", "aggregate_id", "type", "payload")
_HIDDEN_DDL = f"{POSITION} BIGINT, {COMMITTED_AT} TIMESTAMP"


def check_outbox(shape: TableShape) -> None:
    names = [name for name, _ in shape.columns]
    if missing := [name for name in COLUMNS if name not in names]:
        raise ConfigurationError(
            f"The outbox {shape.name} has no column {missing[0]!r}.", fix=f"an outbox has the columns {', '.join(COLUMNS)}; others are ignored."
        )


def events(shape: TableShape, rows: pa.RecordBatch, prefix: str) -> list[Event]:
    """A batch of the outbox's changes as events, one batch a topic, in their order."""
    inserted = rows.filter(pc.equal(rows.column(CHANGE_TYPE), INSERT))
    kinds = dict(shape.columns)
    kept = ("id", "aggregate_id", "type", "payload")
    ddl = ", ".join(f"{name} {'STRING' if name == 'aggregate_id' else kinds[name]}" for name in kept)
    found = []
    for aggregate in pc.unique(inserted.column("aggregate_type")).to_pylist():
        mine = inserted.filter(pc.equal(inserted.column("aggregate_type"), aggregate))
        columns = {name: mine.column(name) for name in (*kept, POSITION, COMMITTED_AT)}
        columns["aggregate_id"] = columns["aggregate_id"].cast(pa.string())
        found.append(Event(topic_name(str(aggregate), prefix), f"{ddl}, {_HIDDEN_DDL}", "aggregate_id", pa.RecordBatch.from_pydict(columns)))
    return found
