"""Connections of an HTTP server, and what each of them may cost before its request is complete.

uvicorn reads requests with httptools and has one time limit, for idle connections that have had a
response. `GuardedConnection` extends its protocol, `ConnectionGuard` knows all connections of a
server. Together they bound, for anybody who can connect:

    time     a head must be complete after `head_s`. A body must come with at least `body_rate`
             bytes a second, after `body_s` for free. So neither a drip-fed header nor a body
             without an end keeps its connection.
    count    connections, of each client and of all. Where there are too many, the one that has
             been without a complete request for longest is closed. A request that waits for its
             response is never closed.
    memory   bytes of heads, and pipelined requests; bytes of bodies that the application holds, of
             each client and of all (`GuardedConnection.hold`). Where there are too many, the
             oldest unfinished body of the client with the most is refused.

Only what has come is counted, never what a sender announces: a `Content-Length` reserves nothing.
Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import resource
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from headrace.http.proxies import NO_PROXIES, TrustedProxies

SWEEP_S = 0.25
"""How often connections are checked for their deadlines."""
MAX_PIPELINED = 16
DRAIN_S = 5.0
"""How long the rest of a body is read and discarded after its response, so that the sender sees the
response and not a broken connection.
"""
DRAIN_BYTES = 1 << 20
"""How many bytes of the rest are read and discarded at the least, also where bodies are bounded by
less: what is on its way when the response is sent would break the connection.
"""
YOUNG_S = 0.5
"""How long an unfinished body is not refused for others: an honest one is complete by then."""
UNFINISHED_SHARE = 0.75
"""How much of the room unfinished bodies may have; the rest is for bytes that complete one."""
MAX_FILES = 1 << 16
CONNECTION_KEY = "headrace.connection"
"""Where the connection of a request is in its ASGI scope."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What the connections of a server may cost.

    Attributes:
        connections: The most connections; fewer if the system allows the process fewer open files.
        client_connections: The most connections of one client address; None for no such limit.
            Trusted proxies have none.
        head_bytes: The most bytes in a request's head.
        head_s: How long a head may take.
        idle_s: How long a connection may be idle between requests.
        body_s: How long a body may take before its rate counts.
        body_rate: The least bytes a second of a body that takes longer.
        body_bytes: The most bytes of a body that has had its response, if more than `DRAIN_BYTES`.
        held_bytes: The most bytes of bodies that the application holds.
        client_held_bytes: The most of these from one client address.
        proxies: The proxies whose forwarded addresses are believed.
    """

    connections: int = 10_000
    client_connections: int | None = None
    head_bytes: int = 32 << 10
    head_s: float = 10.0
    idle_s: float = 75.0
    body_s: float = 20.0
    body_rate: int = 1 << 10
    body_bytes: int = 8 << 20
    held_bytes: int = 64 << 20
    client_held_bytes: int = 64 << 20
    proxies: TrustedProxies = NO_PROXIES


def allowed_connections(wanted: int) -> int:
    """Raise the process's limit of open files as far as the system allows, and return how many
    connections fit: a quarter of the files, and at least 128, stay for the log.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - max(128, soft // 4)))


def client_key(address: str) -> str:
    """Return by what a client is counted: its address, or the /64 network of an IPv6 address, which
    one machine has for itself.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return address


@dataclass
class Client:
    """What one client address has open."""

    connections: int = 0
    incomplete: OrderedDict[GuardedConnection, None] = field(default_factory=OrderedDict)
    """Connections without a complete request, the oldest first."""
    held_bytes: int = 0
    receiving: OrderedDict[GuardedConnection, None] = field(default_factory=OrderedDict)
    """Connections with bytes of a body that is not complete, the oldest first."""

    def is_unused(self) -> bool:
        return not self.connections and not self.held_bytes and not self.receiving


class ConnectionGuard:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.max_connections = allowed_connections(limits.connections)
        self.closed = 0
        """Connections that were closed for their deadlines or to make room."""
        self.held_bytes = 0
        self._clients: dict[str, Client] = {}
        self._connections: set[GuardedConnection] = set()
        self._incomplete: OrderedDict[GuardedConnection, None] = OrderedDict()
        self._waiting_for_room: list[asyncio.Future[None]] = []

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    # Connections

    def add(self, connection: GuardedConnection) -> bool:
        """Count a new connection, and close an older one if there are too many. Returns false if
        there is no room, because all others wait for responses.
        """
        client = self._client(connection.peer_key)
        if not connection.is_proxy:
            most = self.limits.client_connections
            if most is not None and client.connections >= most and not self._evict(client):
                return False
        if len(self._connections) >= self.max_connections and not self._evict(None):
            return False
        self._connections.add(connection)
        client.connections += 1
        self.set_incomplete(connection)
        return True

    def remove(self, connection: GuardedConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self.set_complete(connection)
            self._client(connection.peer_key).connections -= 1
            self._forget(connection.peer_key)

    def set_incomplete(self, connection: GuardedConnection) -> None:
        if connection in self._connections:
            self._incomplete[connection] = None
            self._client(connection.peer_key).incomplete[connection] = None

    def set_complete(self, connection: GuardedConnection) -> None:
        self._incomplete.pop(connection, None)
        self._client(connection.peer_key).incomplete.pop(connection, None)

    def _evict(self, client: Client | None) -> bool:
        """Close the connection that has been without a complete request for longest, of a client or
        of all. Returns false if there is none.
        """
        candidates = self._incomplete if client is None else client.incomplete
        oldest = next(iter(candidates), None)
        if oldest is None:
            return False
        self.closed += 1
        oldest.end()
        return True

    def sweep(self, now_s: float) -> None:
        """Close the connections whose deadlines are over."""
        late = [each for each in self._connections if each.deadline_s < now_s]
        for connection in late:
            self.closed += 1
            connection.time_out()

    async def run(self) -> None:
        """Sweep until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(loop.time())

    # Bodies

    async def hold(
        self, connection: GuardedConnection, size: int, patience_s: float, *, is_last: bool
    ) -> bool:
        """Count bytes of a body. Where there are too many, wait for room, or refuse the oldest
        unfinished body instead: once it is not young any more, or at once for bytes that complete a
        body. Returns false if this request is the one to refuse.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + patience_s
        if is_last:  # a body that is complete is not refused for others
            self._client(connection.client_key).receiving.pop(connection, None)
        while (crowded := self._crowded(connection, size, is_last=is_last)) is not None:
            oldest = next(iter(crowded.receiving), connection)
            young_until_s = oldest.held_since_s + (0.0 if is_last else YOUNG_S)
            now_s = loop.time()
            if oldest is not connection and young_until_s <= now_s:
                self.closed += 1
                fix = "send it again in a moment."
                oldest.refuse(503, "Others send too many bytes at once.", fix)
                self.release(oldest)
                continue
            is_oldest = oldest is connection and connection.held_bytes and not is_last
            if now_s >= deadline_s or (is_oldest and young_until_s <= now_s):
                return False
            room = loop.create_future()
            self._waiting_for_room.append(room)
            connection.set_waiting(True)
            try:
                async with asyncio.timeout(min(deadline_s - now_s, YOUNG_S)):
                    await room
            except TimeoutError:
                pass
            finally:
                connection.set_waiting(False)
        client = self._client(connection.client_key)
        if not is_last and connection not in client.receiving:
            connection.held_since_s = loop.time()
            client.receiving[connection] = None
        client.held_bytes += size
        self.held_bytes += size
        connection.held_bytes += size
        return True

    def _crowded(self, connection: GuardedConnection, size: int, *, is_last: bool) -> Client | None:
        """The client that has too many bytes, if there is no room: the connection's own, or of all
        the one with the most. What is larger than the bounds has room when it is alone.
        """
        share = 1.0 if is_last else UNFINISHED_SHARE
        client = self._client(connection.client_key)
        has_others = client.held_bytes > connection.held_bytes
        if has_others and client.held_bytes + size > share * self.limits.client_held_bytes:
            return client
        has_others = self.held_bytes > connection.held_bytes
        if has_others and self.held_bytes + size > share * self.limits.held_bytes:
            return max(
                self._clients.values(), key=lambda each: (bool(each.receiving), each.held_bytes)
            )
        return None

    def release(self, connection: GuardedConnection) -> None:
        """The application does not hold the body any more."""
        client = self._client(connection.client_key)
        client.receiving.pop(connection, None)
        client.held_bytes -= connection.held_bytes
        self.held_bytes -= connection.held_bytes
        connection.held_bytes = 0
        self._forget(connection.client_key)
        waiting, self._waiting_for_room = self._waiting_for_room, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    # Clients

    def _client(self, key: str) -> Client:
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = Client()
        return client

    def _forget(self, key: str) -> None:
        if self._clients[key].is_unused():
            del self._clients[key]


_NEVER = float("inf")


class GuardedConnection(HttpToolsProtocol):
    """One connection. Of the request that is being received, `_receives_head` or `_receives_body`
    is true until it is complete; `_open` counts requests whose response is not complete.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        guard: ConnectionGuard,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guard = guard
        self._limits = guard.limits
        self.deadline_s = _NEVER
        self.peer_key = self.client_key = ""
        self.is_proxy = False
        self.held_bytes = 0
        self.held_since_s = 0.0
        self._receives_head = self._receives_body = False
        self._head_bytes = self._raw_bytes = self._body_bytes = self._rated_bytes = 0
        self._body_began_s = 0.0
        self._open = 0
        self._has_ended = False
        self._refusal: tuple[int, str, str] | None = None

    # uvicorn's protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = self.client[0] if self.client else ""
        self.peer_key = self.client_key = client_key(peer)
        self.is_proxy = self._limits.proxies.is_trusted(peer)
        if not self._guard.add(self):
            fix = "close connections that are not needed, or try again in a moment."
            self.refuse(503, "There are too many connections.", fix)
            return
        self.deadline_s = self.loop.time() + self._limits.head_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True
        self._guard.remove(self)  # what the application holds, it releases itself
        self.deadline_s = _NEVER
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        self._unset_keepalive_if_required()
        had_begun = self._receives_head or not self._receives_body
        self._raw_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the request is answered as if it had not asked for another protocol
        except httptools.HttpParserError:
            self.refuse(*(self._refusal or (400, "This is not an HTTP request.", "send HTTP/1.1.")))
            return
        if self._receives_head:
            if had_begun:
                self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes:
                self.refuse(*self._head_too_large())
        elif self._receives_body and self._has_too_much():
            self.refuse(413, "The body does not end.", "send it in parts.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)[CONNECTION_KEY] = self
        self._receives_head = True
        self._head_bytes = self._body_bytes = self._rated_bytes = 0
        self._wait(self._limits.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._receives_head:  # a trailer, which nothing here reads
            return
        super().on_header(name, value)
        if sum(len(name) + len(value) for name, value in self.headers) > self._limits.head_bytes:
            self._refusal = self._head_too_large()
            raise ValueError(self._refusal[1])

    def on_headers_complete(self) -> None:
        if len(self.url) > self._limits.head_bytes or len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = self._head_too_large()
            raise ValueError(self._refusal[1])
        self._receives_head = False
        self._receives_body = True
        self._raw_bytes = 0
        self._body_began_s = self.loop.time()
        self._open += 1
        self._wait(self._limits.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._rated_bytes += len(body)
        if self.deadline_s != _NEVER and not self.cycle.response_complete:
            earned_s = self._rated_bytes / self._limits.body_rate
            self.deadline_s = self._body_began_s + self._limits.body_s + earned_s
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._receives_body = False
        if self._open:
            self.deadline_s = _NEVER
            self._guard.set_complete(self)
        else:
            self._wait(self._limits.idle_s)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._open -= 1
        self._raw_bytes = self._body_bytes = 0
        super().on_response_complete()
        if self._open > self._receives_body:
            return  # another complete request waits for its response
        if self._receives_body and not self._open:  # the response came before the body's end
            self._wait(min(DRAIN_S, self._limits.body_s))
        elif self._receives_body:
            self._body_began_s = self.loop.time()
            self._rated_bytes = 0
            self._wait(self._limits.body_s)
        else:
            self._wait(self._limits.head_s if self._receives_head else self._limits.idle_s)
        self._guard.set_incomplete(self)

    # Deadlines and refusals

    def _wait(self, seconds: float) -> None:
        """Give the sender so long for what comes next. It has no deadline while it waits for the
        response of an earlier request: then nothing more is read.
        """
        if self._open == 0 or (self._open == 1 and self._receives_body):
            self.deadline_s = self.loop.time() + seconds

    def _has_too_much(self) -> bool:
        """Whether a body has more bytes after its response, or more that are not of the body
        itself, than it may have.
        """
        if not self._open:
            return self._raw_bytes > max(self._limits.body_bytes, DRAIN_BYTES)
        framing_bytes = self._raw_bytes - self._body_bytes
        return framing_bytes > self._limits.head_bytes + 8 * self._body_bytes

    def _head_too_large(self) -> tuple[int, str, str]:
        return (
            431,
            f"The head of the request has more than {self._limits.head_bytes:,} bytes.",
            "send shorter headers.",
        )

    def time_out(self) -> None:
        """Close the connection, because its deadline is over."""
        if self._receives_head or self._receives_body:
            what = "head" if self._receives_head else "body"
            fix = "send it faster, or in smaller parts."
            self.refuse(408, f"The {what} of the request took too long.", fix)
        else:
            self.end()

    def refuse(self, status: int, message: str, fix: str) -> None:
        """Send an error, if no response has begun, and close the connection."""
        if self._receives_body:
            is_answerable = self._open == 1 and not self.cycle.response_started
        else:
            is_answerable = self._open == 0
        if is_answerable and not self._has_ended:
            body = json.dumps({"error": "Refused", "message": message, "fix": fix}).encode()
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\ncache-control: no-store\r\n"
                + (b"retry-after: 1\r\n" if status == 503 else b"")
                + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
        self.end()

    def end(self) -> None:
        """Close the connection. The application learns at once that the sender is gone."""
        if self._has_ended:
            return
        self._has_ended = True
        self.deadline_s = _NEVER
        self._unset_keepalive_if_required()
        self._guard.remove(self)
        begun: list[RequestResponseCycle | None] = [self.cycle]  # None before the first request
        for cycle in [*begun, *(cycle for cycle, _ in self.pipeline)]:
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # it does not read: what it should get never leaves
        else:
            self.transport.close()

    # For the application

    async def hold(self, size: int, patience_s: float, *, is_last: bool) -> bool:
        """Count bytes of a body that the application has received and keeps, and wait until there
        is room. Returns false if it must refuse the request.
        """
        return await self._guard.hold(self, size, patience_s, is_last=is_last)

    def set_waiting(self, is_waiting: bool) -> None:
        """Stop or begin to count time: while there is no room, the sender is not slow."""
        if self._receives_body and not self._has_ended:
            self.deadline_s = _NEVER if is_waiting else self.loop.time() + self._limits.body_s
            self._body_began_s = self.loop.time()
            self._rated_bytes = 0

    def release(self) -> None:
        """The application has handed the body on, or dropped it."""
        self._guard.release(self)

    def set_client(self, headers: Mapping[str, str]) -> None:
        """Count the body for the address that a trusted proxy forwards."""
        if self.is_proxy and not self.held_bytes:
            peer = self.client[0] if self.client else ""
            self.client_key = client_key(self._limits.proxies.client_address(peer, headers))


def connection_of(scope: Scope) -> GuardedConnection | None:
    """Return the connection of a request; None without one, as in tests that call an application
    directly.
    """
    connection: GuardedConnection | None = scope.get(CONNECTION_KEY)
    return connection
