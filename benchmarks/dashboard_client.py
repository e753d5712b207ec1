"""Somebody who has the dashboard open: asks for the facts every second, follows a view as it
changes and a topic's newest rows, as the page does, and draws nothing.

`python -m benchmarks.dashboard_client PORT` goes on until its standard input ends, and prints how
many events and answers came. It says "ready" when it has the first of each.
"""

from __future__ import annotations

import asyncio
import sys

EVERY_S = 1.0
FOLLOWED = ["/views/revenue/changes", "/topics/orders/tail"]


class Client:
    """Counts what came."""

    def __init__(self, port: int) -> None:
        self.port, self.came = port, dict[str, int]()

    async def follow(self, path: str) -> None:
        reader, _writer = await self._asked(path)
        while line := await reader.readline():
            if line.startswith((b"data: ", b"event: ")):
                self.came[path] = self.came.get(path, 0) + 1

    async def poll(self) -> None:
        while True:
            reader, writer = await self._asked("/dashboard/facts", "Connection: close\r\n")
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
            self.came["/dashboard/facts"] = self.came.get("/dashboard/facts", 0) + 1
            await asyncio.sleep(EVERY_S)

    async def _asked(
        self, path: str, more: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Both are to be kept: a writer that nobody has closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
        return reader, writer


async def main(port: int) -> None:
    client = Client(port)
    tasks = [
        asyncio.create_task(client.poll()),
        *(asyncio.create_task(client.follow(path)) for path in FOLLOWED),
    ]
    while len(client.came) < 2 and not any(task.done() for task in tasks):  # noqa: ASYNC110 - a look now and then costs nothing that is measured
        await asyncio.sleep(0.1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    failed = [task.exception() for task in tasks if task.done() and task.exception() is not None]
    assert not failed, failed
    print(sum(client.came.values()), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
