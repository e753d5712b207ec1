"""The dead letters of a sink: rows that its target refuses, each once, in the topic `<sink>.dead`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from headrace.errors import BadRows
from headrace.log.api import OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN, Log, Transaction
from headrace.log.dead import DeadLetter, ensure_topic, letters_to_rows, rows_to_texts
from headrace.sinks.target import Refusal


class Letters:
    """They are written before the target commits, and a note remembers those of the batch under way: if that commit fails, they are not written again."""

    def __init__(self, log: Log, sink: str) -> None:
        self.log, self.sink = log, sink
        self._note = f"sync.{sink}.letters"
        self._last: Transaction | None = None

    def write(self, refused: Sequence[Refusal], rows: Sequence[pa.RecordBatch], start: Mapping[int, int]) -> None:
        place = json.dumps(sorted(start.items()))
        known = json.loads(self.log.note(self._note) or "{}")
        told = {(partition, offset) for partition, offset in known.get("told", ())} if known.get("start") == place else set()
        fresh = [each for each in refused if (each.partition, each.offset) not in told]
        if not fresh:
            return
        texts = _texts(fresh, rows)
        letters = [
            DeadLetter(f"sink {self.sink}", each.reason, each.partition, each.offset, row=texts.get((each.partition, each.offset))) for each in fresh
        ]
        topic = ensure_topic(self.log, self.sink)
        told |= {(each.partition, each.offset) for each in fresh}
        with self._transaction() as tx:
            tx.append(topic, letters_to_rows(letters))
            tx.set_note(self._note, json.dumps({"start": place, "told": sorted(told)}))

    def _transaction(self) -> Transaction:
        self._last = self._last.next() if self._last is not None else self.log.transaction(f"sync.{self.sink}")
        return self._last


def _texts(refused: Sequence[Refusal], rows: Sequence[pa.RecordBatch]) -> dict[tuple[int, int], str]:
    """The refused rows as JSON, by their places. There are few of them."""
    wanted = {(each.partition, each.offset) for each in refused}
    found: dict[tuple[int, int], str] = {}
    for batch in rows:
        places = list(zip(batch.column(PARTITION_COLUMN).to_pylist(), batch.column(OFFSET_COLUMN).to_pylist(), strict=True))
        here = [number for number, place in enumerate(places) if place in wanted]
        if here:
            picked = pa.Table.from_batches([batch]).take(here).drop_columns([PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN])
            found.update({places[number]: text for number, text in zip(here, _as_texts(picked), strict=True)})
    return found


def _as_texts(rows: pa.Table) -> list[str]:
    """What JSON cannot carry (a date beyond the year 9999) is left as Python shows it."""
    try:
        texts: list[str] = rows_to_texts(rows).to_pylist()
    except BadRows:
        return [str(rows.slice(number, 1).cast(_readable(rows.schema)).to_pylist()[0]) for number in range(rows.num_rows)]
    return texts


def _readable(schema: pa.Schema) -> pa.Schema:
    """Dates and times as numbers."""
    return pa.schema([pa.field(each.name, _number_of(each.type)) for each in schema])


def _number_of(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date(kind):
        return pa.int32()
    return pa.int64() if pa.types.is_timestamp(kind) else kind
