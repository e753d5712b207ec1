"""A view's rows as events: what a subscriber is told first. Written once for all who come while nothing changes, so that a thousand who come back at once cost little more than one."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import IO

import pyarrow as pa
from starlette.concurrency import run_in_threadpool

from headrace.serve.answers import quoted, rows_json
from headrace.serve.channels import Select
from headrace.serve.events import event
from headrace.serve.stores import Place

_ROWS_A_PART = 5_000
_SHARED_BYTES = 4 << 20
_SHARED_SNAPSHOTS = 8
_BYTES_A_SEND = 64 << 10


@dataclass(frozen=True)
class Written:
    """A snapshot as it is sent. A large one is in a file, which one subscriber alone reads."""

    tick: int
    data: bytes | IO[bytes]

    async def parts(self) -> AsyncGenerator[bytes, None]:
        if isinstance(self.data, bytes):
            for start in range(0, len(self.data), _BYTES_A_SEND):
                yield self.data[start : start + _BYTES_A_SEND]
            return
        with self.data as file:
            while part := await run_in_threadpool(file.read, _BYTES_A_SEND):
                yield part


class Snapshots:
    """Those written last. Used by the event loop's thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[Place, Select | None], tuple[int, asyncio.Future[Written]]] = {}

    async def get(self, place: Place, select: Select | None) -> Written:
        """The view's rows as they are now, or as someone else has just got them, if nothing has been committed since."""
        commits, known = place.store.commits(), self._known.get((place, select))
        if known is not None and known[0] == commits and not _has_failed(known[1]):
            written = await asyncio.shield(known[1])
            return written if isinstance(written.data, bytes) else await run_in_threadpool(write_snapshot, place, select)
        writing = asyncio.ensure_future(run_in_threadpool(write_snapshot, place, select))
        self._known.pop((place, select), None)
        self._known[place, select] = commits, writing
        while len(self._known) > _SHARED_SNAPSHOTS:
            del self._known[next(iter(self._known))]
        return await asyncio.shield(writing)


def _has_failed(writing: asyncio.Future[Written]) -> bool:
    return writing.done() and (writing.cancelled() or writing.exception() is not None)


def write_snapshot(place: Place, select: Select | None) -> Written:
    """A view's rows as events. Not sent as they are read: a client that is slow must not hold on to a moment of the store. Only the last part has an id."""
    written = tempfile.SpooledTemporaryFile(_SHARED_BYTES)  # noqa: SIM115 - whoever sends it closes it
    waiting = "[]"
    with place.store.reader.snapshot() as snap:
        info = snap.view(place.stored)
        about = f'"view":{quoted(place.name)},"tick":{info.tick},"key":{json.dumps(info.key)}'
        for part in _parts(snap.batches(place.stored), select):
            if waiting != "[]":
                written.write(event("snapshot", f'{{{about},"last":false,"rows":{waiting}}}'))
            waiting = part
    written.write(event("snapshot", f'{{{about},"last":true,"rows":{waiting}}}', place.id(info.tick)))
    is_small = written.tell() <= _SHARED_BYTES
    written.seek(0)
    if not is_small:
        return Written(info.tick, written)
    with written:
        return Written(info.tick, written.read())


def _parts(batches: Iterator[pa.RecordBatch], select: Select | None) -> Iterator[str]:
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        rows = rows if select is None else select(rows)
        yield from (rows_json(rows.slice(start, _ROWS_A_PART)) for start in range(0, rows.num_rows, _ROWS_A_PART))
