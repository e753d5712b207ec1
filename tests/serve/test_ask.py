"""The topic of answers is polled for as long as a request waits."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

import headrace as hr
from headrace.errors import InputError
from headrace.http.responses import Refused
from headrace.serve.ask import AskHandler
from headrace.serve.requests import Limits, ReadPool
from tests.waits import wait_until

POLL_S = 0.3


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("ask.double", "n BIGINT, ask_id STRING")
        opened.create_topic("ask.double.answers", "ask_id STRING, twice BIGINT")
        yield opened


def make_request(number: int) -> Request:
    return make_question("double", {"n": number})


def make_question(name: str, question: Any) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(question).encode()}

    headers = [(b"content-type", b"application/json")]
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": f"/ask/{name}",
            "query_string": b"wait=5s",
            "headers": headers,
            "path_params": {"name": name},
        },
        receive,
    )


def answer(log: hr.Log, already: int) -> None:
    """What a pipeline does with the next question."""
    wait_until(lambda: log.end_offsets("ask.double")[0] > already)
    (row,) = log.read("ask.double", 0, already).to_pylist()
    with log.producer("ask.double.answers") as producer:
        producer.append([{"ask_id": row["ask_id"], "twice": 2 * row["n"]}])


def test_a_request_that_races_with_the_end_of_the_follower_is_answered(
    log: hr.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower has found nobody for long enough, and pauses for the last time when the second
    question comes.
    """
    monkeypatch.setattr("headrace.serve.ask.POLL_S", POLL_S)
    monkeypatch.setattr("headrace.serve.ask._IDLE_S", POLL_S)

    async def twice() -> list[int]:
        handler = AskHandler(log, ReadPool(2, 8), Limits(), tmp_path)
        found: list[int] = []
        for number in (3, 4):
            response, _ = await asyncio.gather(
                handler.ask(make_request(number)), asyncio.to_thread(answer, log, len(found))
            )
            found.append(json.loads(bytes(response.body))["twice"])
            await asyncio.sleep(1.5 * POLL_S)
        await handler.close()
        return found

    assert asyncio.run(twice()) == [6, 8]


TYPES = {
    "BOOLEAN": (True, True),
    "BIGINT": (1 << 60, 1 << 60),
    "DOUBLE": ("NaN", "nan"),
    "DECIMAL(38, 2)": ("9.50", Decimal("9.50")),
    "STRING": ("a", "a"),
    "BINARY": ("AQI=", b"\x01\x02"),
    "DATE": ("2026-01-31", date(2026, 1, 31)),
    "TIMESTAMP": ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
    "TIMESTAMP_NTZ": ("2026-01-31T12:00:00", datetime(2026, 1, 31, 12)),  # noqa: DTZ001
    "ARRAY<DATE>": (["2026-01-31"], [date(2026, 1, 31)]),
}


def ask_once(log: hr.Log, state: Path, question: Any) -> None:
    """Ask a question that nobody answers."""

    async def once() -> None:
        limits = Limits(wait_s=0.0)
        handler = AskHandler(log, ReadPool(2, 8), limits, state)
        request = make_question("typed", question)
        request.scope["query_string"] = b""
        try:
            with pytest.raises(Refused, match="not answered"):
                await handler.ask(request)
        finally:
            await handler.close()

    asyncio.run(once())


@pytest.mark.parametrize("kind", TYPES)
def test_a_key_of_any_type_can_be_asked_for(log: hr.Log, tmp_path: Path, kind: str) -> None:
    sent, stored = TYPES[kind]
    log.create_topic("ask.typed", f"ask_id STRING, k {kind}, lang STRING")
    log.create_topic("ask.typed.answers", "ask_id STRING")
    ask_once(log, tmp_path, {"k": sent})
    (row,) = log.read("ask.typed").to_pylist()
    assert (str(row["k"]), row["lang"]) == (str(stored), None)


def test_a_missing_key_column_was_asked_for_as_null(log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("ask.typed", "ask_id STRING, k BIGINT, m BIGINT, lang STRING")
    log.create_topic("ask.typed.answers", "ask_id STRING")
    with pytest.raises(InputError, match="lacks the column 'k'"):
        ask_once(log, tmp_path, {"lang": "x"})
    (tmp_path / "plan.json").write_text(
        json.dumps({"version": 1, "nodes": [{"id": "ask.typed.join", "on": ["k", "m"]}]})
    )
    with pytest.raises(InputError, match="lacks the column 'm'"):
        ask_once(log, tmp_path, {"k": 1})
    with pytest.raises(InputError, match="k"):
        ask_once(log, tmp_path, {"k": "x", "m": 1})
    ask_once(log, tmp_path, {"k": 1, "m": None})
    assert len(log.read("ask.typed").to_pylist()) == 1
