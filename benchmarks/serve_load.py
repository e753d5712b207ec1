"""Clients for `bench_serve` and `bench_serve_pipeline`: connections that ask again as soon as they
are answered, and subscribers that note when each event came.

Bare sockets, so that little is measured but the server. `python -m benchmarks.serve_load PORT PATH
SUBSCRIBERS` follows until its standard input ends, in a process of its own, and prints how many
events came.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field


class Asker(asyncio.Protocol):
    """One connection; each answer is small enough to come in one piece or two."""

    def __init__(self, paths: list[str], deadline: float) -> None:
        self._requests = [
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths
        ]
        self._deadline, self._held = deadline, bytearray()
        self.answers, self.done = 0, asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._transport.write(self._requests[self.answers % len(self._requests)])

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, found, body = self._held.partition(b"\r\n\r\n")
        if not found or len(body) < int(
            head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        ):
            return
        assert head.startswith(b"HTTP/1.1 200"), bytes(self._held)
        self._held.clear()
        self.answers += 1
        if time.perf_counter() < self._deadline:
            self._ask()
        else:
            self._transport.close()
            self.done.set_result(None)


def answers_a_second(port: int, paths: list[str], *, connections: int, seconds: float) -> float:
    async def ask() -> float:
        loop, started = asyncio.get_running_loop(), time.perf_counter()
        askers = [
            (
                await loop.create_connection(
                    lambda: Asker(paths, started + seconds), "127.0.0.1", port
                )
            )[1]
            for _ in range(connections)
        ]
        await asyncio.gather(*(each.done for each in askers))
        return sum(each.answers for each in askers) / (time.perf_counter() - started)

    return asyncio.run(ask())


class Subscriber(asyncio.Protocol):
    """Notes when each tick came, by the ids of events."""

    def __init__(self, path: str, came: dict[int, list[float]]) -> None:
        self._path, self._came, self._held = path, came, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        now = time.time()
        for line in lines:
            if line.startswith(b"id: "):
                self._came.setdefault(int(line[4:]), []).append(now)


@dataclass
class Heard:
    """When each tick came to each subscriber, in seconds since the epoch. A subscriber's first is
    that of its snapshot.
    """

    came: dict[int, list[float]] = field(default_factory=dict)

    async def subscribe(self, port: int, path: str, subscribers: int) -> None:
        """Returns when everyone has the snapshot."""
        loop = asyncio.get_running_loop()
        for _ in range(subscribers):
            await loop.create_connection(lambda: Subscriber(path, self.came), "127.0.0.1", port)
        while self.events < subscribers:  # noqa: ASYNC110 - a look now and then costs nothing that is measured
            await asyncio.sleep(0.1)

    @property
    def events(self) -> int:
        return sum(map(len, self.came.values()))


async def follow(port: int, path: str, subscribers: int) -> None:
    heard = Heard()
    await heard.subscribe(port, path, subscribers)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(heard.events - subscribers, flush=True)


if __name__ == "__main__":
    asyncio.run(follow(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
