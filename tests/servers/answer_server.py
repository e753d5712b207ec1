"""A service to call, for tests of recorded calls: an HTTP server in a process of its own that may
fail, stall, answer twice and be killed, and writes down which idempotency keys it was asked with.

    with AnswerServer(tmp_path, fail=0.2) as server:
        answer = asyncio.run(post(server.port, {"n": 4}, key="a"))   # {"double": 8}
        server.asked()                                               # Counter({"a": 1})
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waits import wait_until


async def post(port: int, payload: Any, key: str) -> Any:
    """Ask the server, over a connection of its own. OSError if it does not answer with 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(payload).encode()
        head = f"POST / HTTP/1.1\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        length = 0
        while (line := await reader.readline()) not in {b"\r\n", b""}:
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        answer = json.loads(await reader.readexactly(length))
    except (IndexError, asyncio.IncompleteReadError) as error:
        raise ConnectionResetError("the server went away") from error
    finally:
        writer.close()
    if status != 200:
        raise OSError(f"the server answers {status}")
    return answer


class AnswerServer:
    """The server, started and killed by a test. It doubles `n`, of one payload or of a list."""

    def __init__(
        self,
        directory: Path,
        *,
        fail: float = 0.0,
        stall: float = 0.0,
        twice: float = 0.0,
        delay_s: float = 0.0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._record = directory / "asked.txt"
        self._options = [f"--fail={fail}", f"--stall={stall}", f"--twice={twice}"]
        self._options.append(f"--delay={delay_s}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.servers.answer_server", str(self.port)]
        command += [str(self._record), *self._options]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
        wait_until(self._listens)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def asked(self) -> Counter[str]:
        """How often each key was asked with."""
        return Counter(self._record.read_text().split()) if self._record.exists() else Counter()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("record", type=Path)
    for option in ("fail", "stall", "twice", "delay"):
        parser.add_argument(f"--{option}", type=float)
    asyncio.run(_serve(parser.parse_args()))


async def _serve(options: argparse.Namespace) -> None:
    chance = random.Random(0)
    with options.record.open("a") as record:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while request := await _read_request(reader):
                    key, payload = request
                    record.write(f"{key}\n")
                    record.flush()
                    if options.delay:
                        await asyncio.sleep(options.delay)
                    fate = chance.random()
                    if fate < options.stall:
                        await asyncio.sleep(3600)
                    is_failure = fate < options.stall + options.fail
                    given = payload if isinstance(payload, list) else [payload]
                    doubled = [{"double": 2 * each["n"]} for each in given]
                    body = json.dumps(doubled if isinstance(payload, list) else doubled[0])
                    status = "500 Broken" if is_failure else "200 OK"
                    response = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
                    times = 2 if chance.random() < options.twice else 1
                    writer.write(response.encode() * times)
                    await writer.drain()
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", options.port, backlog=1_000)
        await server.serve_forever()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, Any] | None:
    """The idempotency key and the payload of the next request on a connection."""
    if not await reader.readline():
        return None
    key, length = "", 0
    while (line := await reader.readline()) not in {b"\r\n", b""}:
        name, _, value = line.decode().partition(":")
        if name.lower() == "idempotency-key":
            key = value.strip()
        elif name.lower() == "content-length":
            length = int(value)
    return key, json.loads(await reader.readexactly(length))


if __name__ == "__main__":
    main()
