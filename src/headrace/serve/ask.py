"""`POST /ask/NAME`: a request-reply over two topics. The question is appended to one topic, and the
response is sent when its answer appears in the other. `pipeline.ask` declares the two topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import ConfigurationError, InputError, nearest
from headrace.http.responses import Refused, json_response
from headrace.log.api import Log
from headrace.log.values import ASK_ID, answers_topic, question_names, questions_topic
from headrace.run_status import read_plan
from headrace.serve.requests import Limits, ReadPool, RequestParameters, read_body, rows_json
from headrace.types.json_codec import decode_rows_exactly
from headrace.types.schema import to_ddl

MAX_WAITING = 1_000
POLL_S = 0.02
_IDLE_S = 60.0
_EXAMPLE = '{"url": "…"}'


class AskHandler:
    """Handles the questions of one server. For each name that is asked, one task polls the topic of
    answers for as long as a request waits.
    """

    def __init__(self, log: Log | None, reads: ReadPool, limits: Limits, state: Path) -> None:
        self._log = log
        self._state = state
        self._reads = reads
        self._limits = limits
        self._waiting: dict[str, dict[str, asyncio.Future[bytes]]] = {}
        self._pollers: dict[str, asyncio.Task[None]] = {}

    async def ask(self, request: Request) -> Response:
        """Handle one request:

        1. start to poll for answers
        2. append the question
        3. respond with its answer, or with status 503 if none came in time
        """
        parameters = RequestParameters(request, ("wait",))
        wait_s = parameters.seconds("wait", self._limits.wait_s, self._limits.max_wait_s)
        name, log = request.path_params["name"], self._require_log()
        await self._reads.run(_check_name, log, name)
        question = await read_body(request, self._limits, what="A question", example=_EXAMPLE)
        ask_id = str(uuid.uuid4())
        row = await self._reads.run(_parse_question, log, self._state, name, question, ask_id)
        with self._expect_answer(name, ask_id) as answer:
            await self._start_poller(log, name)  # 1
            await self._reads.run(_append, log, name, row)  # 2
            try:
                return json_response(await asyncio.wait_for(answer, wait_s))  # 3
            except TimeoutError:
                raise Refused(
                    503,
                    f"The question was not answered within {wait_s:g} seconds.",
                    fix=(
                        "check that the pipeline runs (headrace status), or wait longer: ?wait=30s."
                    ),
                ) from None

    async def close(self) -> None:
        for task in self._pollers.values():
            task.cancel()
        await asyncio.gather(*self._pollers.values(), return_exceptions=True)

    def _require_log(self) -> Log:
        if self._log is None:
            raise ConfigurationError(
                "This server was started without a log.", fix="start it with --log ADDRESS."
            )
        return self._log

    @contextlib.contextmanager
    def _expect_answer(self, name: str, ask_id: str) -> Iterator[asyncio.Future[bytes]]:
        if sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise Refused(
                503,
                f"{MAX_WAITING:,} questions wait for their answers, the largest number allowed.",
                fix="try again in a moment.",
            )
        waiting = self._waiting.setdefault(name, {})
        waiting[ask_id] = asyncio.get_running_loop().create_future()
        try:
            yield waiting[ask_id]
        finally:
            del waiting[ask_id]

    # Polling for answers

    async def _start_poller(self, log: Log, name: str) -> None:
        """Poll from the current end of the topic on. Of several requests that start together, one
        creates the task.
        """
        if self._is_polled(name):
            return
        offsets = await self._reads.run(log.end_offsets, answers_topic(name))
        if not self._is_polled(name):
            self._pollers[name] = asyncio.create_task(self._poll(log, name, dict(offsets)))

    def _is_polled(self, name: str) -> bool:
        task = self._pollers.get(name)
        return task is not None and not task.done()

    async def _poll(self, log: Log, name: str, offsets: dict[int, int]) -> None:
        """Resolve waiting requests until there has been none for a while. A request that arrives
        during the last pause relies on this task, so the task checks for it before it ends; nothing
        else runs between that check and its end.
        """
        idle_s = 0.0
        while idle_s < _IDLE_S or self._waiting[name]:
            answers = await self._reads.run(_read_answers, log, answers_topic(name), offsets)
            for ask_id, body in answers:
                answer = self._waiting[name].get(ask_id)
                if answer is not None and not answer.done():
                    answer.set_result(body)
            idle_s = 0.0 if self._waiting[name] else idle_s + POLL_S
            await asyncio.sleep(POLL_S)


def _check_name(log: Log, name: str) -> None:
    declared = question_names(log.topics())
    if name not in declared:
        raise Refused(
            404,
            f"There is no question {name!r}: {nearest(name, declared)}",
            fix="declare it with pipeline.ask(…), and run the pipeline once.",
        )


def _parse_question(
    log: Log, state: Path, name: str, question: bytes, ask_id: str
) -> pa.RecordBatch:
    """The row of a question in JSON, with the types of its topic. Columns that it leaves out are
    null; InputError if one of the table's key is left out, or if a value does not fit.
    """
    schema = log.topic(questions_topic(name)).arrow_schema
    asked = pa.schema([field.with_nullable(True) for field in schema if field.name != ASK_ID])
    decoded = decode_rows_exactly([question], asked)
    if decoded.misfits:
        raise InputError(
            f"The question {name!r} cannot be asked: {decoded.misfits[0]}.",
            fix=f"send a JSON object with {to_ddl(asked)}, encoded as in responses.",
        )
    present = json.loads(question)
    for column in _key_columns(state, name) or asked.names[:1]:
        if column not in present:
            raise InputError(
                f"The question {name!r} lacks the column {column!r}, by which its answer is found.",
                fix=f"send a JSON object with {to_ddl(asked)}.",
            )
    columns = dict(zip(asked.names, decoded.batch.columns, strict=True))
    columns[ASK_ID] = pa.array([ask_id])
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


def _key_columns(state: Path, name: str) -> list[str]:
    """The key of the table that answers, by the plan of the newest run."""
    plan = read_plan(state)
    nodes = {} if plan is None else {node["id"]: node for node in plan["nodes"]}
    columns: list[str] = nodes.get(f"ask.{name}.join", {}).get("on", [])
    return columns


def _append(log: Log, name: str, row: pa.RecordBatch) -> None:
    with log.producer(questions_topic(name)) as producer:
        producer.append(pa.Table.from_batches([row]))


def _read_answers(log: Log, topic: str, offsets: dict[int, int]) -> list[tuple[str, bytes]]:
    """The answers after some offsets, which it advances: the id of each question, and JSON."""
    answers: list[tuple[str, bytes]] = []
    for partition, end in log.end_offsets(topic).items():
        start = offsets.get(partition, 0)
        if end <= start:
            continue
        rows = log.read(topic, partition, start, end).to_table()
        columns = [
            name for name in rows.column_names if not name.startswith("_") and name != ASK_ID
        ]
        answer_rows = rows.select(columns)
        for index, ask_id in enumerate(rows[ASK_ID].to_pylist()):
            answers.append((ask_id, rows_json(answer_rows.slice(index, 1))[1:-1].encode()))
        offsets[partition] = end
    return answers
