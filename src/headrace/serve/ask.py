"""`POST /ask/NAME`: the question is appended to its topic, and the answer given when it appears in
the other. Who waits too long, or is one too many, is told to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import ConfigurationError, InputError, nearest
from headrace.log.api import Log
from headrace.log.values import ASK_ID, answers_topic, names, questions_topic
from headrace.serve.requests import (
    Asked,
    Limits,
    Reads,
    Refused,
    json_response,
    read_json,
    rows_json,
)

MAX_WAITING = 1_000
LOOK_EVERY_S = 0.02
_IDLE_S = 60.0


class Asks:
    """Of one server. Each question that is asked has a task that follows its answers for as long as
    somebody waits.
    """

    def __init__(self, log: Log | None, reads: Reads, limits: Limits) -> None:
        self._log, self._reads, self._limits = log, reads, limits
        self._waiting: dict[str, dict[str, asyncio.Future[bytes]]] = {}
        self._following: dict[str, asyncio.Task[None]] = {}

    async def ask(self, request: Request) -> Response:
        """1. Wait for answers. 2. Append the question. 3. Its answer, or that there was none in
        time.
        """
        asked = Asked(request, ("wait",))
        wait_s = asked.seconds("wait", self._limits.wait_s, self._limits.max_wait_s)
        name, log = request.path_params["name"], self._opened()
        await self._reads.run(_check_name, log, name)
        question = await _question(request, self._limits)
        mine = str(uuid.uuid4())
        with self._expected(name, mine) as answer:
            await self._follow(log, name)
            await self._reads.run(_append, log, name, {**question, ASK_ID: mine})
            try:
                return json_response(await asyncio.wait_for(answer, wait_s))
            except TimeoutError:
                raise Refused(
                    503,
                    f"The question was not answered within {wait_s:g} seconds.",
                    fix="see that the pipeline runs (headrace status), or wait longer: ?wait=30s.",
                ) from None

    async def close(self) -> None:
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)

    def _opened(self) -> Log:
        if self._log is None:
            raise ConfigurationError(
                "This server was started without a log.", fix="start it with --log ADDRESS."
            )
        return self._log

    @contextlib.contextmanager
    def _expected(self, name: str, mine: str) -> Iterator[asyncio.Future[bytes]]:
        if sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise Refused(
                503,
                f"{MAX_WAITING:,} questions wait for their answers, which is the most.",
                fix="come back in a moment.",
            )
        waiting = self._waiting.setdefault(name, {})
        waiting[mine] = asyncio.get_running_loop().create_future()
        try:
            yield waiting[mine]
        finally:
            del waiting[mine]

    # Answers

    async def _follow(self, log: Log, name: str) -> None:
        """From now on, so before the question is appended. Of several who begin together one
        follows.
        """
        if self._is_followed(name):
            return
        reached = await self._reads.run(log.end_offsets, answers_topic(name))
        if not self._is_followed(name):
            self._following[name] = asyncio.create_task(self._hear(log, name, dict(reached)))

    def _is_followed(self, name: str) -> bool:
        task = self._following.get(name)
        return task is not None and not task.done()

    async def _hear(self, log: Log, name: str, reached: dict[int, int]) -> None:
        """Until nobody has asked for a while. Whoever asked during the last pause counts on this
        task, so it looks for them before it ends; nothing else runs between that look and its end.
        """
        idle_s = 0.0
        while idle_s < _IDLE_S or self._waiting[name]:
            for row in await self._reads.run(_news, log, answers_topic(name), reached):
                answer = self._waiting[name].get(row[0])
                if answer is not None and not answer.done():
                    answer.set_result(row[1])
            idle_s = 0.0 if self._waiting[name] else idle_s + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)


def _check_name(log: Log, name: str) -> None:
    known = names(log.topics())
    if name not in known:
        raise Refused(
            404,
            f"There is no question {name!r}: {nearest(name, known)}",
            fix="declare it with pipeline.ask(…), and run the pipeline once.",
        )


async def _question(request: Request, limits: Limits) -> dict[str, Any]:
    question = await read_json(request, limits, what="A question", example='{"url": "…"}')
    if not isinstance(question, dict):
        raise InputError("The question is no JSON object.", fix='send one, such as {"url": "…"}.')
    return question


def _append(log: Log, name: str, question: dict[str, Any]) -> None:
    """What is not said is null."""
    columns = log.topic(questions_topic(name)).arrow_schema.names
    with log.producer(questions_topic(name)) as producer:
        producer.append([{**dict.fromkeys(columns), **question}])


def _news(log: Log, topic: str, reached: dict[int, int]) -> list[tuple[str, bytes]]:
    """Answers since the last time, as JSON, by the question's id."""
    found = []
    for partition, end in log.end_offsets(topic).items():
        start = reached.get(partition, 0)
        if end > start:
            rows = log.read(topic, partition, start, end).to_table()
            plain = rows.select(
                [
                    column
                    for column in rows.column_names
                    if not column.startswith("_") and column != ASK_ID
                ]
            )
            found += [(mine, _one(plain, at)) for at, mine in enumerate(rows[ASK_ID].to_pylist())]
            reached[partition] = end
    return found


def _one(rows: pa.Table, at: int) -> bytes:
    return rows_json(rows.slice(at, 1))[1:-1].encode()
