"""Recorded calls, a part of the benchmark `python`: 200 at once to a local service that answers
after 50 ms, against a bare asyncio client with the same connections; and a replay of what they
recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import headrace as hr
from benchmarks.answering_service import pool, requests_so_far, service
from benchmarks.report import Result, judged, note, paired
from benchmarks.state_runs import directory, session
from headrace.runtime.calls import Calls
from headrace.testing.pipelines import PipelineTest

CONCURRENCY = 200
CALLS = 20_000
REPLAYED = 100_000


def declared(port: int) -> hr.Pipeline:
    async def ask(row: dict[str, Any], ctx: hr.RequestContext) -> dict[str, Any]:
        return {"answer": int(await ctx.client.post(b"%d" % row["n"]))}

    pipeline = hr.Pipeline("asking")
    rows = pipeline.topic("numbers", schema="n BIGINT, text STRING")
    answered = rows.call(
        ask,
        "answer BIGINT",
        arguments="n",
        concurrency=CONCURRENCY,
        client=lambda: pool(port),
        version="1",
    )
    pipeline.write("answered", answered)
    return pipeline


def bare_calls_a_second(port: int, count: int) -> float:
    """What a client does that records nothing: as many workers as calls are allowed at once."""
    numbers = iter(range(count))

    async def work(client: Any) -> None:
        for number in numbers:
            assert int(await client.post(b"%d" % number)) == number

    async def work_all() -> None:
        async with pool(port) as client:
            await asyncio.gather(*(work(client) for _ in range(CONCURRENCY)))

    started = time.perf_counter()
    asyncio.run(work_all())
    return count / (time.perf_counter() - started)


class Asking:
    """A pipeline with a call, whose rows are fed, asked about, and replayed."""

    def __init__(self, port: int, root: Path, spark: Any = None) -> None:
        self.test = PipelineTest(declared(port), root, spark=spark, width="auto")
        self.fed = 0

    def calls_a_second(self, count: int) -> float:
        """From rows that wait in the log to answers that are recorded there."""
        text = "x" * 100
        rows = [{"n": n, "text": text} for n in range(self.fed, self.fed + count)]
        self.fed += count
        self.test.feed("numbers", rows)
        self.test.cut()
        while self.test.step():
            continue
        calls: Calls | None = self.test._calls  # noqa: SLF001 - the calls alone are measured
        assert calls is not None
        (caller,) = calls.callers.values()
        started = time.perf_counter()
        caller.run(Event(), until_quiet=True)
        rate = count / (time.perf_counter() - started)
        self.test.settle()
        return rate

    def replay_s(self, version: str) -> float:
        """How long a version takes over everything that is recorded."""
        replayed = self.test.replay(version)
        started = time.perf_counter()
        replayed.settle()
        took_s = time.perf_counter() - started
        assert len(replayed.rows(f"answered.{version}")) == self.fed
        return took_s


def recorded_calls() -> Iterator[Result]:
    """The lines of recorded calls."""
    with service() as port, directory() as root:
        asking = Asking(port, root / "asking")
        note(f"python: {CALLS:,} calls, {CONCURRENCY} at once")
        ours, theirs = paired(
            lambda: asking.calls_a_second(CALLS),
            lambda: bare_calls_a_second(port, CALLS),
            repeats=3,
        )
        asking.test.close()
        yield judged(
            "python",
            "calls to a service that answers after 50 ms, each answer recorded",
            "calls/s",
            ours,
            "bare asyncio client",
            theirs,
            bar=0.8,
            better="higher",
            params={"calls": CALLS, "concurrency": CONCURRENCY},
        )
    with service() as port, directory() as root, session() as spark:
        asking = Asking(port, root / "replayed", spark)
        note(f"python: {REPLAYED:,} calls, and their replay")
        called_s = REPLAYED / asking.calls_a_second(REPLAYED)
        before = requests_so_far(port)
        replayed_s = min(asking.replay_s(f"v{number}") for number in range(3))
        asked = requests_so_far(port) - before
        asking.test.close()
        if asked:
            raise AssertionError(f"the replay has asked {asked} times")
        yield judged(
            "python",
            "a replay of recorded calls, with 0 requests",
            "s",
            replayed_s,
            "calling",
            called_s,
            bar=20.0,
            better="lower",
            params={"calls": REPLAYED},
        )
