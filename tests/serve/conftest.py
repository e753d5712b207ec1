"""A real server on a free port over a real view store, and clients that speak HTTP to it."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import pytest

from headrace.serve.requests import Limits
from headrace.serve.server import Server, start
from headrace.types.schema import parse_schema
from headrace.views.store import ViewStore
from tests.views.store_contract import COUNTS, inserts

ORDERS = parse_schema(
    "region STRING, day DATE, amount DOUBLE, tax DECIMAL(10, 2), at TIMESTAMP, big BOOLEAN, tags"
    " ARRAY<STRING>, raw BINARY, ratio FLOAT"
)
QUICK = Limits(poll_s=0.01, heartbeat_s=0.2, slow_s=1.0)
PATIENCE_S = 20
Start = Callable[..., Server]


@dataclass(frozen=True)
class Response:
    """The response of a server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends requests to one server, each over a connection of its own."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port, self.host = port, host

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        **query: Any,
    ) -> Response:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(
                method,
                f"{path}?{urlencode(query, doseq=True)}" if query else path,
                body,
                headers or {},
            )
            response = connection.getresponse()
            return Response(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )

    def get(self, path: str, *, headers: Any = None, **query: Any) -> Response:
        return self.ask("GET", path, None, headers, **query)

    def sql(self, query: str, **members: Any) -> Response:
        return self.ask(
            "POST",
            "/sql",
            json.dumps({"query": query, **members}).encode(),
            {"content-type": "application/json"},
        )

    def follow(self, path: str, last: str | None = None, **query: Any) -> "Subscriber":
        return Subscriber(self, f"{path}?{urlencode(query, doseq=True)}" if query else path, last)


@dataclass(frozen=True)
class ReceivedEvent:
    """One server-sent event."""

    kind: str
    id: str | None
    data: Any


class Subscriber:
    """Receives server-sent events as a browser does, and remembers the last id."""

    def __init__(self, client: Client, path: str, last: str | None) -> None:
        self.last = last
        self._connection = http.client.HTTPConnection(client.host, client.port, timeout=30)
        self._connection.request(
            "GET", path, headers={} if last is None else {"Last-Event-ID": last}
        )
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def next(self) -> ReceivedEvent | None:
        """The next event, without heartbeats; None when the stream has ended."""
        fields: dict[str, str] = {}
        deadline = time.monotonic() + PATIENCE_S
        while line := self._response.readline():
            assert time.monotonic() < deadline, "nothing but heartbeats came"
            text = line.decode().rstrip("\n")
            if text and not text.startswith(":"):
                name, _, value = text.partition(": ")
                fields[name] = value
            elif not text:
                self.last = fields.get("id", self.last)
                if "data" in fields:
                    return ReceivedEvent(
                        fields["event"], fields.get("id"), json.loads(fields["data"])
                    )
                fields = {}
        return None

    def body(self) -> Any:
        return json.loads(self._response.read())


def receive(subscriber: Subscriber) -> ReceivedEvent:
    """The next event of a stream that has not ended."""
    event = subscriber.next()
    assert event is not None
    return event


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "shop.state"
    directory.mkdir()
    return directory


@pytest.fixture
def store(state: Path) -> Iterator[ViewStore]:
    """`counts` with the keys 1, 2 and 3 as of tick 4, and the empty stream `events`."""
    with ViewStore.open(state / "views.db") as store:
        store.declare("counts", COUNTS, ("k",))
        store.declare("events", COUNTS)
        store.commit(4, 1, {"counts": inserts(4, (1, 10), (2, 20), (3, 30))})
        yield store


@pytest.fixture
def serve(state: Path) -> Iterator[Start]:
    """`serve()` starts a server over the state directory; it is stopped afterwards."""
    started: list[Server] = []

    def start_one(log: Any = None, **options: Any) -> Server:
        started.append(start(state, log, **{"limits": QUICK, **options}))
        return started[-1]

    yield start_one
    for server in started:
        server.stop()


@pytest.fixture
def client(serve: Start, store: ViewStore) -> Client:
    return Client(serve().port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
