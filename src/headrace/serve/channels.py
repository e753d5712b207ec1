"""Server-sent events for many subscribers. Each view or topic with subscribers is read once, and
each event is encoded once, however many receive it. `subscriptions.py` says what the events are.

A channel has a ring of the newest events, bounded in number and bytes. A subscriber is only an
index into that ring, so thousands of idle subscribers cost little, and a slow one delays nobody:
when it falls behind the ring it is dropped, and resumes later from what the store or the log
retains. All of this lives in the event loop's thread; one other thread reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError, RetryError
from headrace.http.responses import Refused
from headrace.serve.requests import Limits

_SEND_BYTES = 64 << 10
Position = Any
"""How far a channel has read: a view's tick, or the offsets of a topic's partitions."""
Selector = Callable[[pa.Table], pa.Table]
"""Selects the rows of an event that a subscriber wants. Equal selectors share their result."""


@dataclass(frozen=True)
class StreamEvent:
    """The rows of one tick, or of one read of a topic. `id` is where a subscriber resumes after it;
    `data` is the encoded event with all rows.
    """

    id: str
    rows: pa.Table
    data: bytes
    selected: dict[Selector, bytes] = field(default_factory=dict)
    """The encoded event for subscribers with a selector."""


class EventSource(Protocol):
    """What a channel reads: a view or a topic. Its methods may block, and run in a thread."""

    def start(self) -> Position:
        """The current end."""

    def read(self, after: Position) -> tuple[Position, list[StreamEvent]]:
        """The events after a position, and the position after them. SourceReset if they are not a
        continuation.
        """

    def read_missed(self, after: Position, up_to: Position) -> Iterator[StreamEvent]:
        """The events after one position up to another, for a subscriber that resumes."""

    def is_behind(self, position: Position, target: Position) -> bool: ...

    def id(self, position: Position) -> str: ...

    def encode(self, id: str, rows: pa.Table) -> bytes: ...


class SourceReset(Exception):
    """A source has changed otherwise than by events: a version was switched, a store was rebuilt,
    or more changes came at once than are retained. Subscribers need a new snapshot.
    """


class SlowSubscriber(Exception):
    """A subscriber was too slow and is dropped. It can resume after the last event it received."""


class ServerClosing(Exception):
    """The server shuts down."""


class Channel:
    """The ring of the newest events of one source."""

    def __init__(self, source: EventSource, position: Position, limits: Limits) -> None:
        self.source = source
        self.position = position
        self._limits = limits
        self._events: deque[StreamEvent] = deque()
        self._newest: list[StreamEvent] = []
        """Only these cache their selected rows. Subscribers that keep up need no older ones, and
        the selections of thousands of subscribers add up.
        """
        self.first = 0
        """The number of the oldest event in the ring."""
        self._bytes = 0
        self._heartbeats = 0
        self._changed = asyncio.Event()
        self.subscribers = 0
        self.end: Exception | None = None

    @property
    def next(self) -> int:
        """The number that the next event will have."""
        return self.first + len(self._events)

    def publish(self, position: Position, events: list[StreamEvent]) -> None:
        self.position = position
        if events:
            for event in self._newest:
                event.selected.clear()
            self._newest = events
        for event in events:
            self._events.append(event)
            self._bytes += len(event.data)
        while self._events and (
            len(self._events) > self._limits.ring_events or self._bytes > self._limits.ring_bytes
        ):
            self._bytes -= len(self._events.popleft().data)
            self.first += 1
        if events:
            self._wake()

    def heartbeat(self) -> None:
        self._heartbeats += 1
        self._wake()

    def close(self, why: Exception) -> None:
        self.end = why
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def listen(self, number: int, select: Selector | None) -> AsyncGenerator[bytes, None]:
        """Encoded events from a number on, and heartbeats. SlowSubscriber if the next event is no
        longer in the ring.
        """
        heartbeats = self._heartbeats
        while True:
            changed = self._changed
            while number < self.next:
                if number < self.first:
                    raise SlowSubscriber
                number, data = self._next_events(number, select)
                if data:
                    yield data
            if self.end is not None:
                raise self.end
            if heartbeats != self._heartbeats:
                heartbeats = self._heartbeats
                yield f": heartbeat\nid: {self.source.id(self.position)}\n\n".encode()
            if changed is self._changed:
                await changed.wait()

    def _next_events(self, number: int, select: Selector | None) -> tuple[int, bytes]:
        """The number after some events, and these events from `number` on, joined to about 64 KiB
        so that a subscriber that is behind catches up in few steps.
        """
        parts, size = [], 0
        while number < self.next and size < _SEND_BYTES:
            parts.append(self.data(self._events[number - self.first], select))
            size += len(parts[-1])
            number += 1
        return number, parts[0] if len(parts) == 1 else b"".join(parts)

    def data(self, event: StreamEvent, select: Selector | None) -> bytes:
        if select is None:
            return event.data
        data = event.selected.get(select)
        if data is None:
            rows = select(event.rows)
            data = event.selected[select] = (
                self.source.encode(event.id, rows) if rows.num_rows else b""
            )
        return data


class Hub:
    """All channels of a server, and the task that reads their sources."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._channels: dict[Hashable, Channel] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="headrace-follow")
        self._resuming = asyncio.Semaphore(limits.resuming)
        self._reading = asyncio.Lock()
        self.is_closing = False

    def start(self) -> None:
        """Start to read the sources, in a task of the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def subscribers(self) -> int:
        return sum(channel.subscribers for channel in self._channels.values())

    def end_streams(self) -> None:
        """End the streams of all subscribers."""
        self.is_closing = True
        self._task.cancel()
        for channel in self._channels.values():
            channel.close(ServerClosing())

    async def close(self) -> None:
        self.end_streams()
        await asyncio.gather(self._task, return_exceptions=True)
        self._reader.shutdown(wait=True)

    @contextmanager
    def subscribed(self, channel: Channel) -> Iterator[None]:
        """Count a subscriber of a channel for as long as the `with` lasts."""
        if self.subscribers >= self.limits.subscribers:
            raise Refused(
                503,
                f"There are {self.limits.subscribers:,} subscribers, the largest number allowed.",
                fix="try again later.",
            )
        channel.subscribers += 1
        try:
            yield
        finally:
            channel.subscribers -= 1

    async def channel(self, key: Hashable, make_source: Callable[[], EventSource]) -> Channel:
        """The channel of a key, created for its first subscriber."""
        channel = self._channels.get(key)
        if channel is not None and channel.end is None:
            return channel
        async with self._reading:
            if self.is_closing:
                raise ServerClosing
            channel = self._channels.get(key)
            if channel is None or channel.end is not None:
                source = make_source()
                position = await self.run_in_thread(source.start)
                channel = self._channels[key] = Channel(source, position, self.limits)
            return channel

    async def follow(
        self, channel: Channel, after: Position, select: Selector | None
    ) -> AsyncGenerator[bytes, None]:
        """All events after a position, without a gap or a repeat: first those that were missed,
        then new ones as they come.
        """
        if channel.source.is_behind(channel.position, after):
            # A snapshot, or a subscriber of another server, can be ahead of the last read here.
            async with self._reading:
                await self._read(channel)
        while True:
            up_to, number = channel.position, channel.next
            if channel.source.is_behind(after, up_to):
                async for data in self._send_missed(channel, after, up_to, select):
                    yield data
            after = up_to
            if number >= channel.first:  # else the ring has moved on meanwhile
                break
        async for data in channel.listen(number, select):
            yield data

    async def _send_missed(
        self, channel: Channel, after: Position, up_to: Position, select: Selector | None
    ) -> AsyncGenerator[bytes, None]:
        """The events between two positions. They are read for each subscriber, so few subscribers
        catch up at once; one that takes too long is dropped, and can resume where it stopped.
        """
        async with self._resuming:
            deadline = time.monotonic() + self.limits.resuming_s
            missed = await self.run_in_thread(channel.source.read_missed, after, up_to)
            while (event := await self.run_in_thread(next, missed, None)) is not None:
                if time.monotonic() > deadline:
                    raise SlowSubscriber
                if data := channel.data(event, select):
                    yield data

    async def _run(self) -> None:
        last_heartbeat = time.monotonic()
        while True:
            await asyncio.sleep(self.limits.poll_s)
            if is_due := time.monotonic() - last_heartbeat >= self.limits.heartbeat_s:
                last_heartbeat = time.monotonic()
            for key, channel in list(self._channels.items()):
                async with self._reading:
                    if not channel.subscribers or channel.end is not None:
                        if self._channels.get(key) is channel:
                            del self._channels[key]
                        channel.close(channel.end or SourceReset())
                        continue
                    await self._read(channel)
                if is_due:
                    channel.heartbeat()

    async def _read(self, channel: Channel) -> None:
        try:
            position, events = await self.run_in_thread(channel.source.read, channel.position)
        except RetryError:
            return  # the next read may succeed
        except (SourceReset, HeadraceError) as error:
            channel.close(error)
            return
        channel.publish(position, events)

    async def run_in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, function, *arguments)


# The wire format


SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
DROPPED_EVENT = (
    b'event: dropped\ndata: {"why":"too slow: connect again with the Last-Event-ID of the last'
    b' event"}\n\n'
)


def encode_event(kind: str, data: str, id: str | None = None) -> bytes:
    """One server-sent event. JSON text has no line breaks, so its data is one line."""
    id_line = f"id: {id}\n" if id is not None else ""
    return f"event: {kind}\n{id_line}data: {data}\n\n".encode()


class EventStream:
    """An ASGI response that sends events until there are no more, the client disconnects, or it
    does not accept one for `slow_s` seconds.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], slow_s: float) -> None:
        self._events = events
        self._slow_s = slow_s
        self._sending_since: float | None = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. The connection of a client that is stuck is closed without a last
        event; the client can resume with the id of the last event it received.
        """
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        tasks = [
            asyncio.ensure_future(coroutine)
            for coroutine in (
                self._send_all(send),
                _wait_for_disconnect(receive),
                self._wait_until_stuck(),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not tasks[0].cancelled() and (error := tasks[0].exception()):
            raise error

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                await self._send(send, b": hello\n\n")
                async for data in events:
                    await self._send(send, data)
            except SlowSubscriber:
                await self._send(send, DROPPED_EVENT)
            except ServerClosing:
                pass
            except HeadraceError as error:
                content = {
                    "error": type(error).__name__,
                    "message": error.message,
                    "fix": error.fix,
                }
                await self._send(send, encode_event("error", json.dumps(content)))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since = None

    async def _wait_until_stuck(self) -> None:
        """Return once an event has been on its way for too long. Checking now and then costs less
        than a timer for each event.
        """
        while self._sending_since is None or time.monotonic() - self._sending_since < self._slow_s:  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(self._slow_s / 4)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
