"""The topic of answers is polled for as long as a request waits."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message

import headrace as hr
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
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps({"n": number}).encode()}

    headers = [(b"content-type", b"application/json")]
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/ask/double",
            "query_string": b"wait=5s",
            "headers": headers,
            "path_params": {"name": "double"},
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
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower has found nobody for long enough, and pauses for the last time when the second
    question comes.
    """
    monkeypatch.setattr("headrace.serve.ask.POLL_S", POLL_S)
    monkeypatch.setattr("headrace.serve.ask._IDLE_S", POLL_S)

    async def twice() -> list[int]:
        handler = AskHandler(log, ReadPool(Limits()), Limits())
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
