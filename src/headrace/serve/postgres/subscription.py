"""`SUBSCRIBE TO view`: the changes of a view as rows that do not end.

    _tick | _change_type | region | revenue
    41    | insert       | eu     | 100.00      first the rows that are there, as inserts
    42    | update_preimage  | eu | 100.00      then each tick's changes
    42    | update_postimage | eu | 120.00

All subscribers of a view with the same formats share one channel of the server (`serve.channels`):
the view is read once, and each change is encoded once. A subscriber that is too slow is ended, and
goes on with `AS OF TICK n`, the last tick that it has seen.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from starlette.concurrency import run_in_threadpool

from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, INSERT, TICK_FIELD
from headrace.errors import ChangesGone
from headrace.serve.channels import Hub, SlowSubscriber, SourceReset, StreamEvent
from headrace.serve.postgres.errors import OBJECT_NOT_READY, SqlError
from headrace.serve.postgres.values import copy_messages, row_messages
from headrace.serve.selections import RowSelection
from headrace.serve.stores import ViewLocation, ViewStores
from headrace.serve.subscriptions import ViewEventSource

_SHARED_BYTES = 4 << 20
_SEND_BYTES = 64 << 10


@dataclass(frozen=True)
class RowEncoding:
    """How a subscriber wants its rows: the format of each column, or None for COPY's lines."""

    formats: tuple[int, ...] | None
    zone: str = "UTC"

    def messages(self, rows: pa.RecordBatch | pa.Table) -> list[bytes]:
        """One message a row."""
        if self.formats is None:
            return list(copy_messages(rows, self.zone).to_pylist())
        return list(row_messages(rows, self.formats, self.zone).to_pylist())


def subscription_schema(view: pa.Schema) -> pa.Schema:
    """The columns of a subscription to a view."""
    return pa.schema([TICK_FIELD, CHANGE_FIELD, *view])


class ViewRowSource(ViewEventSource):
    """The changes of one view as messages of rows, for a channel."""

    def __init__(self, location: ViewLocation, stores: ViewStores, encoding: RowEncoding) -> None:
        super().__init__(location, stores)
        self._encoding = encoding

    def _event(self, tick: int, rows: pa.Table) -> StreamEvent:
        columns = rows.schema.names
        names = [CHANGE_TYPE, *(name for name in columns if name != CHANGE_TYPE)]
        rows = with_tick(rows.select(names), tick)
        return StreamEvent(self.id(tick), rows, self.encode("", self.objects(rows)))

    def objects(self, rows: pa.Table) -> list[bytes]:
        return self._encoding.messages(rows)

    def heartbeat(self, id: str) -> bytes:  # noqa: ARG002 - of the interface
        return b""

    def encode(self, id: str, objects: Sequence[bytes]) -> bytes:  # noqa: ARG002 - of the interface
        return b"".join(objects)


def with_tick(rows: pa.Table, tick: int) -> pa.Table:
    return rows.add_column(0, TICK_FIELD, pa.array([tick] * rows.num_rows, pa.int64()))


@dataclass(frozen=True)
class SubscribeRequest:
    """What a subscriber wants.

    Attributes:
        view: The view.
        select: The rows, if not all.
        after: The tick after which changes are wanted; None for the rows that are there first.
    """

    view: str
    select: RowSelection | None
    after: int | None


async def follow_view(
    request: SubscribeRequest, encoding: RowEncoding, stores: ViewStores, hub: Hub
) -> AsyncGenerator[bytes, None]:
    """The messages of a subscription, some at a time, without end.

    Raises:
        ChangesGone: The changes after the tick are no longer retained.
        SqlError: The subscriber was too slow, or the view was built again.
    """
    location = stores.locate(request.view)
    channel = await hub.channel(
        ("rows", location, encoding), lambda: ViewRowSource(location, stores, encoding)
    )
    after = request.after
    try:
        with hub.subscribed(channel):
            if after is None:
                snapshot = await run_in_threadpool(_snapshot, location, request.select, encoding)
                after, file = snapshot
                with file:
                    while part := await run_in_threadpool(file.read, _SEND_BYTES):
                        yield part
            else:
                store, name = location.store, location.stored_name
                await hub.run_in_thread(store.reader.changes_since, name, after)
            async for data in hub.follow(channel, after, request.select):
                if data:
                    yield data
    except SlowSubscriber:
        raise SqlError(
            OBJECT_NOT_READY,
            "The subscriber did not read fast enough.",
            fix="subscribe again with AS OF TICK and the last tick that was seen.",
        ) from None
    except SourceReset:
        raise SqlError(
            OBJECT_NOT_READY,
            f"The view {request.view!r} was built again, or is served from another version now.",
            fix="subscribe again.",
        ) from None
    except ChangesGone as error:
        if request.after is not None:
            raise
        raise SqlError(OBJECT_NOT_READY, error.message, fix="subscribe again.") from None


def _snapshot(
    location: ViewLocation, select: RowSelection | None, encoding: RowEncoding
) -> tuple[int, tempfile.SpooledTemporaryFile[bytes]]:
    """The rows of a view as messages, and their tick. They are not sent while they are read,
    because a slow client must not hold a snapshot of the store open.
    """
    file = tempfile.SpooledTemporaryFile(_SHARED_BYTES)  # noqa: SIM115 - the sender closes it
    with location.store.reader.snapshot() as snap:
        info = snap.view(location.stored_name)
        for batch in snap.batches(location.stored_name):
            rows = pa.Table.from_batches([batch]).select(info.schema.names)
            rows = rows if select is None else select(rows)
            inserted = pa.array([INSERT] * rows.num_rows, pa.string())
            rows = with_tick(rows.add_column(0, CHANGE_FIELD, inserted), info.tick)
            file.write(b"".join(encoding.messages(rows)))
    file.seek(0)
    return info.tick, file
