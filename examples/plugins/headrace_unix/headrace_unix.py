"""A sink that Headrace does not have: a program that listens on a Unix socket.

After `pip install ./examples/plugins/headrace_unix`, the command line knows its URLs:

    headrace sync orders unix:/run/orders.sock --log file:data

Rows are sent as JSON, one a line, and an empty line behind each group. The program answers a group
with `ok`, when it has all of it, or with `refused` and a reason, when it has none of it:

    > {"id": "4f1c…-0-17", "change": "upsert", "row": {"id": 7, "amount": "1.50"}}
    >
    < ok

A group without an answer is sent again, with the same ids: at least once.
"""

import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Any

from headrace.errors import TargetUnavailable
from headrace.sinks import Sink
from headrace.sinks.at_least_once import MessageTarget, OutgoingRow
from headrace.sinks.base import RowsRefused

TIMEOUT_S = 10.0


def sink(url: str, **settings: Any) -> Sink:
    """Declare the sink of a URL such as `unix:/run/orders.sock`."""
    settings.setdefault("batch_rows", 1_000)
    path = url.partition(":")[2].removeprefix("//")
    return Sink(
        kind="unix", opener=UnixTarget, options={"path": path}, keeps_marks=True, **settings
    )


class UnixTarget(MessageTarget):
    _connection: socket.socket | None = None

    def send(self, messages: Sequence[OutgoingRow]) -> None:
        lines = [
            b'{"id": %s, "change": %s, "row": %s}\n'
            % (json.dumps(each.id).encode(), json.dumps(each.change).encode(), each.json)
            for each in messages
        ]
        answer = self.ask(b"".join(lines) + b"\n")
        if answer.startswith("refused"):
            raise RowsRefused(answer.removeprefix("refused").strip())
        if answer != "ok":
            self.close()
            raise TargetUnavailable(f"The program answers {answer!r}, which is neither yes nor no.")

    def ask(self, request: bytes) -> str:
        """Return the line with which the program answers."""
        path = self.sink.options["path"]
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX)
                self._connection.settimeout(TIMEOUT_S)
                self._connection.connect(path)
            self._connection.sendall(request)
            answer = b""
            while not answer.endswith(b"\n") and (part := self._connection.recv(4_096)):
                answer += part
        except OSError as error:
            self.close()
            raise TargetUnavailable(f"The program at {path} is away: {error}.") from error
        return answer.decode().strip()

    def close(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self._connection.close()  # type: ignore[union-attr]
        self._connection = None
