"""A service for benchmarks that answers each request after 50 ms, and a client for it with
connections that stay open. `python -m benchmarks.answering_service PORT` runs the service.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

DELAY_S = 0.05
_REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
_RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b"
_END_OF_HEAD = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """One request after the other over one connection: as cheap as asyncio can be."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(_END_OF_HEAD)
        if separator and len(body) >= int(head.rpartition(b":")[2]):
            self._received = b""
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(body)

    async def post(self, body: bytes) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(_REQUEST % (len(body), body))
        return await self._answer


class Pool:
    """As many connections as there are requests at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self._all: list[Connection] = []

    async def post(self, body: bytes) -> bytes:
        if self._idle:
            connection = self._idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
            self._all.append(connection)
        answer = await connection.post(body)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._all:
            connection.transport.close()


@asynccontextmanager
async def pool(port: int) -> AsyncIterator[Pool]:
    opened = Pool(port)
    try:
        yield opened
    finally:
        opened.close()


class Answering(asyncio.Protocol):
    """The service's side of a connection: the body comes back after `DELAY_S`."""

    requests = 0

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(_END_OF_HEAD)
        if separator and len(body) >= int(head.rpartition(b":")[2]):
            self._received = b""
            if body == b"count":
                self._answer(b"%d" % Answering.requests)
                return
            Answering.requests += 1
            asyncio.get_running_loop().call_later(DELAY_S, self._answer, body)

    def _answer(self, body: bytes) -> None:
        self._transport.write(_RESPONSE % (len(body), body))


@contextmanager
def service() -> Iterator[int]:
    """Run the service in a process of its own. Yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.answering_service", str(port)],
        cwd=Path(__file__).parents[1],
    )
    try:
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


def requests_so_far(port: int) -> int:
    """How many requests the service has had."""

    async def count() -> int:
        async with pool(port) as opened:
            return int(await opened.post(b"count"))

    return asyncio.run(count())


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answering, "127.0.0.1", port, backlog=1_000)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
