"""An HTTP API that is polled: each row once by its cursor, through restarts, kills and bad days of
the server.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, InputError
from headrace.log.dead_letters import read_dead_letters
from headrace.sources import Source
from headrace.testing.source_contract import ROWS, SourceContract, numbered

PAGE_ROWS = 7
Answer = tuple[int, dict[str, str], bytes]


class Api:
    """An API with pages of rows behind an offset, or whatever `answer` says."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.answer: Callable[[], Answer | None] = lambda: None
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                status, headers, body = api.answer() or api.page(self.path, dict(self.headers))
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def page(self, target: str, headers: Mapping[str, str]) -> Answer:
        parts = urlsplit(target)
        if parts.path == "/all":
            etag = f'"{len(self.rows)}"'
            if headers.get("If-None-Match") == etag:
                return 304, {}, b""
            return 200, {"ETag": etag}, json.dumps(self.rows).encode()
        start = int(parse_qs(parts.query).get("after", ["0"])[0])
        rows = self.rows[start : start + PAGE_ROWS]
        answer = {"data": {"rows": rows}, "next": start + len(rows) if rows else None}
        return 200, {}, json.dumps(answer).encode()

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += rows

    def add_bad(self) -> None:
        self.rows.append({"id": "x", "name": "bad"})

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def outside() -> Iterator[Api]:
    api = Api()
    yield api
    api.stop()


def polled(api: Api, path: str = "/rows", **settings: Any) -> Source:
    given = {"topic": "rows", "schema": ROWS, "every": "20 ms", "name": "api", **settings}
    return hr.sources.poll(f"{api.url}{path}", **given)


BY_CURSOR = {"items": "data.rows", "cursor": "next", "parameter": "after"}


class TestByCursor(SourceContract):
    @pytest.fixture
    def source(self, outside: Api) -> Source:
        return polled(outside, **BY_CURSOR)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        yield opened


def read(source: Source, log: hr.Log) -> list[int]:
    source.run(log=log.address, until_caught_up=True)
    return [row["id"] for row in log.read("rows").to_pylist()]


def answers(*listed: Answer) -> Callable[[], Answer | None]:
    """Some answers, and then those of the API."""
    waiting = list(listed)
    return lambda: waiting.pop(0) if waiting else None


def test_a_page_that_grows_is_stored_once(outside: Api, log: hr.Log) -> None:
    """Its cursor stays, as with APIs whose last page names no next one."""
    source = polled(outside, items="rows", cursor="next")
    outside.answer = lambda: (200, {}, json.dumps({"rows": numbered(0, n), "next": None}).encode())
    for n in (3, 3, 5, 9):
        assert read(source, log) == list(range(n))


def test_an_answer_without_a_cursor_is_stored_when_it_changes(outside: Api, log: hr.Log) -> None:
    source = polled(outside, "/all")
    outside.add(numbered(0, 3))
    assert read(source, log) == [0, 1, 2]
    assert read(source, log) == [0, 1, 2]
    assert outside.requests[-1][1]["if-none-match"] == '"3"'
    outside.add(numbered(3, 4))
    assert read(source, log) == [0, 1, 2, 0, 1, 2, 3]
    outside.answer = lambda: (200, {}, json.dumps(outside.rows).encode())  # no ETag any more
    assert read(source, log) == [0, 1, 2, 0, 1, 2, 3]


def test_the_column_of_the_last_row_is_a_cursor(outside: Api, log: hr.Log) -> None:
    source = polled(outside, items="data.rows", column="id", parameter="since")
    outside.answer = answers(
        (200, {}, json.dumps({"data": {"rows": numbered(0, 3)}}).encode()),
        (200, {}, json.dumps({"data": {"rows": numbered(3, 5)}}).encode()),
        *[(200, {}, b'{"data": {"rows": []}}')] * 3,
    )
    assert read(source, log) == list(range(5))
    assert [target for target, _ in outside.requests[:3]] == [
        "/rows",
        "/rows?since=2",
        "/rows?since=4",
    ]


def test_lines_single_objects_and_types_are_read(outside: Api, log: hr.Log) -> None:
    schema = "id BIGINT, price DECIMAL(10, 2), `at` TIMESTAMP"
    source = polled(outside, schema=schema)
    for body in (
        b'{"id": 1, "price": 9.50, "at": "2026-03-01T12:00:00Z"}\n{"id": 2}\n',
        b'{"id": 3}',
        b'{\n  "id": 4\n}',
    ):
        outside.answer = lambda body=body: (200, {}, body)  # type: ignore[misc]
        read(source, log)
    outside.answer = lambda: (204, {}, b"")
    assert read(source, log) == [1, 2, 3, 4]
    first = log.read("rows").to_pylist()[0]
    assert (str(first["price"]), first["at"].hour) == ("9.50", 12)


def test_items_that_are_no_rows_are_dead_letters(outside: Api, log: hr.Log) -> None:
    outside.answer = lambda: (200, {}, b'[{"id": 1}, 7, {"id": "x"}, {"id": 2, "colour": 1}]')
    assert read(polled(outside), log) == [1]
    letters = read_dead_letters(log, "rows")
    assert len(letters) == 3
    assert "no object" in letters[0]["reason"]


def test_a_server_that_is_busy_is_left_alone_for_as_long_as_it_says(
    outside: Api, log: hr.Log
) -> None:
    outside.add(numbered(0, 3))
    outside.answer = answers((429, {"Retry-After": "1"}, b""), (503, {}, b""))
    began_s = time.monotonic()
    assert read(polled(outside, **BY_CURSOR), log) == [0, 1, 2]
    assert time.monotonic() - began_s > 1
    assert len(outside.requests) >= 3


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((404, {}, b""), "answers 404"),
        ((401, {}, b""), "answers 401"),
        ((302, {"Location": "http://169.254.169.254/secret?x"}, b""), "redirects are not followed"),
        ((200, {}, b"<html>"), "not JSON"),
        ((200, {}, b"[" + b" " * 2_000 + b"]"), "more than 1,000 bytes"),
        ((200, {}, b'{"data": []}'), "no 'data.rows'"),
    ],
)
def test_what_somebody_must_mend_ends_the_source(
    outside: Api, log: hr.Log, answer: Answer, says: str
) -> None:
    outside.answer = lambda: answer
    source = polled(outside, "/rows?secret=1", body_bytes=1_000, items="data.rows")
    with pytest.raises(ConfigurationError) as raised:
        read(source, log)
    assert says in str(raised.value)
    assert "secret=1" not in str(raised.value)


def test_a_server_that_drips_is_cut_off(outside: Api, log: hr.Log) -> None:
    """Its pauses are shorter than the time limit, and its answer has no end."""
    from headrace.errors import RetryError
    from headrace.sources.http_source import HttpSource

    stop = threading.Event()

    def drip() -> Answer:
        stop.wait(30)
        return 200, {}, b"[]"

    outside.answer = drip
    source = polled(outside, timeout="200 ms")
    endpoint = HttpSource(source, source.prepare_topic(log))
    endpoint.start(None)
    began_s = time.monotonic()
    with pytest.raises(RetryError, match="cannot be read"):
        endpoint.read(1.0)
    assert time.monotonic() - began_s < 5
    stop.set()


@pytest.mark.parametrize("headers", [{"Content-Length": "60"}, {"Content-Length": "60000"}])
def test_an_answer_that_is_cut_off_is_not_stored_in_part(
    outside: Api, log: hr.Log, headers: dict[str, str]
) -> None:
    """What came of it were whole lines, so it looked like all of it."""
    lines = b'{"id": 0, "name": "row 0"}\n'
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in numbered(0, 3))
    outside.answer = answers((200, headers, lines), *[(200, {}, whole)] * 3)
    assert read(polled(outside), log) == [0, 1, 2]


def test_a_cursor_that_moves_without_rows_is_no_hurry(outside: Api, log: hr.Log) -> None:
    cursors = iter(range(10_000))
    outside.answer = lambda: (200, {}, b'{"rows": [], "next": %d}' % next(cursors))
    source = polled(outside, items="rows", cursor="next", every="1 hour")
    read(source, log)
    assert len(outside.requests) == 1


def test_secrets_are_in_headers_by_reference(
    outside: Api, log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "Bearer hidden")
    source = polled(outside, **BY_CURSOR, headers={"Authorization": "env:API_TOKEN"})
    assert "hidden" not in repr(source)
    read(source, log)
    assert outside.requests[0][1]["authorization"] == "Bearer hidden"


def test_impossible_settings_are_refused() -> None:
    for url, settings, says in (
        ("ftp://host/a", {}, "cannot be polled"),
        ("https://user:password@host/a", {}, "credentials belong in headers"),
        ("https://host/a", {"cursor": "a", "column": "b"}, "not in both"),
        ("https://host/a", {"body_bytes": 0}, "1 GiB"),
    ):
        with pytest.raises(InputError, match=says):
            hr.sources.poll(url, topic="rows", **settings)


def test_a_url_of_the_command_line_is_polled() -> None:
    source = hr.sources.from_url("poll:https://api.example.com/orders?x=1", topic="rows")
    assert source.options["url"] == "https://api.example.com/orders?x=1"
    assert source.name == "api.example.com_orders"
