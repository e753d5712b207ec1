"""One reader for many subscribers: what is followed is read once, and each event is encoded once,
however many hear of it.

A channel has a ring of the newest events, bounded in number and bytes. A subscriber is only a place
in that ring, so thousands of idle ones cost little, and a slow one holds nothing up: when it has
fallen behind the ring it is dropped, and resumes later from what the store or the log keeps. All of
this lives in the event loop's thread; reading happens in one thread beside it.
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
from headrace.serve.requests import Limits, Refused

_BYTES_A_SEND = 64 << 10
AppendResult = Any
"""How far a channel is: a view's tick, or the offsets of a topic's partitions."""
Select = Callable[[pa.Table], pa.Table]
"""What a subscriber wants of an event's rows; equal for those who want the same."""


@dataclass(frozen=True)
class Event:
    """Rows that belong together: of one tick, or of one read. `id` is where to resume behind it,
    `data` what is sent to those who want all of it.
    """

    id: str
    rows: pa.Table
    data: bytes
    chosen: dict[Select, bytes] = field(default_factory=dict)
    """What is sent to those who want a part of it, by what they want."""


class Source(Protocol):
    """What a channel reads. Its methods may take time, and run in a thread."""

    def start(self) -> AppendResult:
        """Where it is now."""

    def read(self, after: AppendResult) -> tuple[AppendResult, list[Event]]:
        """What came since. Moved, if it cannot be followed any further."""

    def missed(self, after: AppendResult, up_to: AppendResult) -> Iterator[Event]:
        """What one who resumes missed: behind one position and not behind the other."""

    def is_behind(self, position: AppendResult, wanted: AppendResult) -> bool: ...

    def id(self, position: AppendResult) -> str: ...

    def encode(self, id: str, rows: pa.Table) -> bytes: ...


class Moved(Exception):
    """What is followed has changed otherwise than by events: a version was switched, a store
    rebuilt, or more came at once than is kept.
    """


class Dropped(Exception):
    """A subscriber that was too slow. It resumes behind the last event it got."""


class Channel:
    """The newest events of one source."""

    def __init__(self, source: Source, position: AppendResult, limits: Limits) -> None:
        self.source, self.position, self._limits = source, position, limits
        self._events: deque[Event] = deque()
        self._newest: list[Event] = []
        """Only these keep what was chosen of them: whoever keeps up is told soon, and what some
        thousand others want adds up.
        """
        self._first, self._bytes, self._beats = 0, 0, 0
        self._changed = asyncio.Event()
        self.subscribers = 0
        self.end: Exception | None = None

    @property
    def next(self) -> int:
        """The number that the next event will have."""
        return self._first + len(self._events)

    def publish(self, position: AppendResult, events: list[Event]) -> None:
        self.position = position
        if events:
            for event in self._newest:
                event.chosen.clear()
            self._newest = events
        for event in events:
            self._events.append(event)
            self._bytes += len(event.data)
        while self._events and (
            len(self._events) > self._limits.ring_events or self._bytes > self._limits.ring_bytes
        ):
            self._bytes -= len(self._events.popleft().data)
            self._first += 1
        if events:
            self._wake()

    def beat(self) -> None:
        self._beats += 1
        self._wake()

    def close(self, why: Exception) -> None:
        self.end = why
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def listen(self, number: int, select: Select | None) -> AsyncGenerator[bytes, None]:
        """Events from a number on, as they are sent, and a heartbeat when there has been none for
        long. Dropped, if it is no longer there.
        """
        beats = self._beats
        while True:
            changed = self._changed
            while number < self.next:
                if number < self._first:
                    raise Dropped
                number, data = self._some(number, select)
                if data:
                    yield data
            if self.end is not None:
                raise self.end
            if beats != self._beats:
                beats = self._beats
                yield f": heartbeat\nid: {self.source.id(self.position)}\n\n".encode()
            if changed is self._changed:
                await changed.wait()

    def _some(self, number: int, select: Select | None) -> tuple[int, bytes]:
        """The events from a number on, in one piece of about so many bytes: who is behind catches
        up in fewer steps. And the number behind them.
        """
        parts, size = [], 0
        while number < self.next and size < _BYTES_A_SEND:
            parts.append(self.data(self._events[number - self._first], select))
            size += len(parts[-1])
            number += 1
        return number, parts[0] if len(parts) == 1 else b"".join(parts)

    def data(self, event: Event, select: Select | None) -> bytes:
        if select is None:
            return event.data
        data = event.chosen.get(select)
        if data is None:
            rows = select(event.rows)
            data = event.chosen[select] = (
                self.source.encode(event.id, rows) if rows.num_rows else b""
            )
        return data


class Hub:
    """All channels of a server, and the task that reads for them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._channels: dict[Hashable, Channel] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="headrace-follow")
        self._resuming = asyncio.Semaphore(limits.resuming)
        self._reading = asyncio.Lock()
        self.closing = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def subscribers(self) -> int:
        return sum(channel.subscribers for channel in self._channels.values())

    def end(self) -> None:
        """Everyone's stream ends."""
        self.closing = True
        self._task.cancel()
        for channel in self._channels.values():
            channel.close(Closing())

    async def close(self) -> None:
        self.end()
        await asyncio.gather(self._task, return_exceptions=True)
        self._reader.shutdown(wait=True)

    @contextmanager
    def followed(self, channel: Channel) -> Iterator[None]:
        """For as long as someone listens to it."""
        if self.subscribers >= self.limits.subscribers:
            raise Refused(
                503,
                f"There are {self.limits.subscribers:,} subscribers, which is the most.",
                fix="come back later.",
            )
        channel.subscribers += 1
        try:
            yield
        finally:
            channel.subscribers -= 1

    async def channel(self, key: Hashable, make: Callable[[], Source]) -> Channel:
        """The channel of a key, made for the first who asks."""
        found = self._channels.get(key)
        if found is not None and found.end is None:
            return found
        async with self._reading:
            if self.closing:
                raise Closing
            found = self._channels.get(key)
            if found is None or found.end is not None:
                source = make()
                found = self._channels[key] = Channel(
                    source, await self.in_thread(source.start), self.limits
                )
            return found

    async def follow(
        self, channel: Channel, after: AppendResult, select: Select | None
    ) -> AsyncGenerator[bytes, None]:
        """Everything behind a position, without a gap and without a repeat: first what was missed,
        then what comes.
        """
        await self._reach(channel, after)
        while True:
            up_to, number = channel.position, channel.next
            if channel.source.is_behind(after, up_to):
                async for data in self._missed(channel, after, up_to, select):
                    yield data
            after = up_to
            if number >= channel._first:  # noqa: SLF001 - else the ring has moved on meanwhile
                break
        async for data in channel.listen(number, select):
            yield data

    async def _missed(
        self, channel: Channel, after: AppendResult, up_to: AppendResult, select: Select | None
    ) -> AsyncGenerator[bytes, None]:
        """What lies between two positions. Few are told so at once, as it is read for each of them;
        one that takes too long makes room, and resumes where it is.
        """
        async with self._resuming:
            until = time.monotonic() + self.limits.resuming_s
            missed = await self.in_thread(channel.source.missed, after, up_to)
            while (event := await self.in_thread(next, missed, None)) is not None:
                if time.monotonic() > until:
                    raise Dropped
                if data := channel.data(event, select):
                    yield data

    async def _reach(self, channel: Channel, position: AppendResult) -> None:
        """A snapshot, or a subscriber of another server, can be ahead of what was last read
        here.
        """
        if channel.source.is_behind(channel.position, position):
            async with self._reading:
                await self._read(channel)

    async def _run(self) -> None:
        beaten = time.monotonic()
        while True:
            await asyncio.sleep(self.limits.poll_s)
            if is_due := time.monotonic() - beaten >= self.limits.heartbeat_s:
                beaten = time.monotonic()
            for key, channel in list(self._channels.items()):
                async with self._reading:
                    if not channel.subscribers or channel.end is not None:
                        if self._channels.get(key) is channel:
                            del self._channels[key]
                        channel.close(channel.end or Moved())
                        continue
                    await self._read(channel)
                if is_due:
                    channel.beat()

    async def _read(self, channel: Channel) -> None:
        try:
            position, events = await self.in_thread(channel.source.read, channel.position)
        except RetryError:
            return  # the next look may succeed
        except (Moved, HeadraceError) as error:
            channel.close(error)
            return
        channel.publish(position, events)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, function, *arguments)


class Closing(Exception):
    """The server ends."""


# Server-sent events: how one is written, and a response that sends them for as long as the client
# listens and keeps up.


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
DROPPED = (
    b'event: dropped\ndata: {"why":"too slow: connect again with the Last-Event-ID of the last'
    b' event"}\n\n'
)


def event(kind: str, data: str, id: str | None = None) -> bytes:
    """One event. JSON text has no line breaks, so its data is one line."""
    place = f"id: {id}\n" if id is not None else ""
    return f"event: {kind}\n{place}data: {data}\n\n".encode()


class EventStream:
    """Sends events until there are no more, the client goes, or it does not take one for `slow_s`
    seconds.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], slow_s: float) -> None:
        self._events, self._slow_s = events, slow_s
        self._sending_since: float | None = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """A client that is stuck gets no last word: the connection is closed under it, and it
        resumes with the id of what it got.
        """
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        tasks = [
            asyncio.ensure_future(each)
            for each in (self._send_all(send), _gone(receive), self._stuck())
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
            except Dropped:
                await self._send(send, DROPPED)
            except Closing:
                pass
            except HeadraceError as error:
                await self._send(
                    send,
                    event(
                        "error",
                        json.dumps(
                            {
                                "error": type(error).__name__,
                                "message": error.message,
                                "fix": error.fix,
                            }
                        ),
                    ),
                )
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since = None

    async def _stuck(self) -> None:
        """Returns when one event has been on its way for too long. A look now and then costs less
        than a timer for each event.
        """
        while self._sending_since is None or time.monotonic() - self._sending_since < self._slow_s:  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(self._slow_s / 4)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
