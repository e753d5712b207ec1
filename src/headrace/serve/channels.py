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
from bisect import bisect_left
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError, RetryError
from headrace.http.responses import Refused
from headrace.serve.requests import Limits
from headrace.serve.selections import RowSelection, evaluate

_SEND_BYTES = 64 << 10
Position = Any
"""How far a channel has read: a view's tick, or the offsets of a topic's partitions."""
RunInThread = Callable[..., Awaitable[Any]]
_WOKEN_AT_ONCE = 50
"""Subscribers that are woken between two looks at the network: about 3 ms of work."""


@dataclass(frozen=True)
class StreamEvent:
    """The rows of one tick, or of one read of a topic. `id` is where a subscriber resumes after it;
    `data` is the encoded event with all rows.
    """

    id: str
    rows: pa.Table
    data: bytes
    selected: dict[RowSelection, bytes] = field(default_factory=dict)
    """The encoded event for the subscribers of a selection; empty if it selects no row."""


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

    def objects(self, rows: pa.Table) -> list[Any]:
        """The rows as they are sent, such as JSON objects."""

    def encode(self, id: str, objects: Sequence[Any]) -> bytes:
        """An event with some rows."""

    def heartbeat(self, id: str) -> bytes:
        """What is sent from time to time if there is no event; nothing if it is empty."""


class SourceReset(Exception):
    """A source has changed otherwise than by events: a version was switched, a store was rebuilt,
    or more changes came at once than are retained. Subscribers need a new snapshot.
    """


class SlowSubscriber(Exception):
    """A subscriber was too slow and is dropped. It can resume after the last event it received."""


class ServerClosing(Exception):
    """The server shuts down."""


def evaluate_selections(
    source: EventSource, events: Iterable[StreamEvent], selections: Collection[RowSelection]
) -> None:
    """Encode the rows that selections select, in the thread that reads."""
    for event in events:
        for selection, objects in evaluate(event.rows, selections, source.objects).items():
            event.selected[selection] = source.encode(event.id, objects)


@dataclass
class _Listeners:
    """The subscribers of a channel with one selection, or with none."""

    since: int
    """The selection is evaluated for the events from this number on."""
    count: int = 0
    matches: deque[int] = field(default_factory=deque)
    """The numbers of the events with selected rows that are in the ring."""
    lost: int = -1
    """The number of the last event with selected rows that has left the ring."""
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


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
        self._listeners: dict[RowSelection | None, _Listeners] = {}
        self._to_wake: deque[asyncio.Future[None]] = deque()
        self._waker: asyncio.Task[None] | None = None
        self.subscribers = 0
        self.end: Exception | None = None

    @property
    def next(self) -> int:
        """The number that the next event will have."""
        return self.first + len(self._events)

    @property
    def selections(self) -> list[RowSelection]:
        """The selections of the present subscribers, each once."""
        return [selection for selection in self._listeners if selection is not None]

    def publish(
        self,
        position: Position,
        events: list[StreamEvent],
        evaluated: Collection[RowSelection] = (),
    ) -> None:
        """Add events to the ring, in which `evaluated` were evaluated already, and wake those
        subscribers that they are for.
        """
        self.position = position
        if not events:
            return
        for event in self._newest:
            event.selected.clear()
        self._newest, start = events, self.next
        done = set(evaluated)
        for event in events:
            self._events.append(event)
            self._bytes += len(event.data)
        for selection, listeners in self._listeners.items():
            if selection is None:
                self._wake(listeners)
            elif selection not in done:  # it came while the events were read
                listeners.since = max(listeners.since, self.next)
                self._wake(listeners)
        for number, event in enumerate(events, start):
            for selection in event.selected:
                if (listeners_ := self._listeners.get(selection)) is not None:
                    listeners_.matches.append(number)
                    self._wake(listeners_)
        self._shorten()

    def _shorten(self) -> None:
        while self._events and (
            len(self._events) > self._limits.ring_events or self._bytes > self._limits.ring_bytes
        ):
            self._bytes -= len(self._events.popleft().data)
            self.first += 1

    def heartbeat(self) -> None:
        self._heartbeats += 1
        self._wake_all()

    def close(self, why: Exception) -> None:
        self.end = why
        self._wake_all()

    def _wake_all(self) -> None:
        for listeners in self._listeners.values():
            self._wake(listeners)

    def _wake(self, listeners: _Listeners) -> None:
        """Wake subscribers, a few at a time, so that the event loop is never busy for long."""
        if not listeners.waiting:
            return
        self._to_wake += listeners.waiting
        listeners.waiting = []
        if self._waker is None or self._waker.done():
            self._waker = asyncio.get_running_loop().create_task(self._wake_in_turn())

    async def _wake_in_turn(self) -> None:
        while self._to_wake:
            for _ in range(min(_WOKEN_AT_ONCE, len(self._to_wake))):
                waiting = self._to_wake.popleft()
                if not waiting.done():
                    waiting.set_result(None)
            await asyncio.sleep(0)

    async def listen(
        self, number: int, selection: RowSelection | None, run_in_thread: RunInThread
    ) -> AsyncGenerator[bytes, None]:
        """Encoded events from a number on, and heartbeats. SlowSubscriber if the next event is no
        longer in the ring.
        """
        listeners = self._listeners.get(selection)
        if listeners is None:
            listeners = self._listeners[selection] = _Listeners(since=self.next)
        listeners.count += 1
        heartbeats = self._heartbeats
        try:
            while True:
                while number < self.next:
                    number, data = await self._next_events(
                        number, selection, listeners, run_in_thread
                    )
                    if data:
                        yield data
                if self.end is not None:
                    raise self.end
                if heartbeats != self._heartbeats:
                    heartbeats = self._heartbeats
                    yield self.source.heartbeat(self.source.id(self.position))
                    continue
                waiting = asyncio.get_running_loop().create_future()
                listeners.waiting.append(waiting)
                await waiting
        finally:
            listeners.count -= 1
            if not listeners.count and self._listeners.get(selection) is listeners:
                del self._listeners[selection]

    async def _next_events(
        self,
        number: int,
        selection: RowSelection | None,
        listeners: _Listeners,
        run_in_thread: RunInThread,
    ) -> tuple[int, bytes]:
        """The number after some events, and these events from `number` on, joined to about 64 KiB
        so that a subscriber that is behind catches up in few steps.
        """
        if selection is not None and number >= listeners.since:
            matches = listeners.matches
            while matches and matches[0] < self.first:
                listeners.lost = matches.popleft()
            if listeners.lost >= number:
                raise SlowSubscriber
            at = bisect_left(matches, number)
            if at == len(matches):
                return self.next, b""
            number = matches[at]
        elif number < self.first:
            raise SlowSubscriber
        parts: list[bytes] = []
        size = 0
        while number < self.next and size < _SEND_BYTES and number >= self.first:
            event = self._events[number - self.first]
            number += 1
            data = event.data
            if selection is not None:
                data = await self.data(event, selection, number - 1, listeners, run_in_thread)
            parts.append(data)
            size += len(data)
        return number, parts[0] if len(parts) == 1 else b"".join(parts)

    async def data(
        self,
        event: StreamEvent,
        selection: RowSelection,
        number: int,
        listeners: _Listeners | None,
        run_in_thread: RunInThread,
    ) -> bytes:
        """The encoded event with the selected rows, or nothing if there are none."""
        data = event.selected.get(selection)
        if data is not None:
            return data
        if listeners is not None and number >= listeners.since:
            at = bisect_left(listeners.matches, number)
            if at == len(listeners.matches) or listeners.matches[at] != number:
                return b""
        # An older event, whose selected rows are not cached any more.
        found = await run_in_thread(evaluate, event.rows, [selection], self.source.objects)
        objects = found.get(selection)
        return self.source.encode(event.id, objects) if objects else b""


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
        self, channel: Channel, after: Position, select: RowSelection | None
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
        async for data in channel.listen(number, select, self.run_in_thread):
            yield data

    async def _send_missed(
        self, channel: Channel, after: Position, up_to: Position, select: RowSelection | None
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
                data = event.data
                if select is not None:
                    data = await channel.data(event, select, -1, None, self.run_in_thread)
                if data:
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
            selections = channel.selections
            position, events = await self.run_in_thread(channel.source.read, channel.position)
            if events and selections:
                await self.run_in_thread(evaluate_selections, channel.source, events, selections)
        except RetryError:
            return  # the next read may succeed
        except (SourceReset, HeadraceError) as error:
            channel.close(error)
            return
        channel.publish(position, events, selections)

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


def encode_heartbeat(id: str) -> bytes:
    return f": heartbeat\nid: {id}\n\n".encode()


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
