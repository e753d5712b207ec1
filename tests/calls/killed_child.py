"""A process that runs a pipeline with a call until it is killed, without Spark, for
`test_calls_killed`: `python -m tests.calls.killed_child ROOT PORT`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import headrace as hr
from headrace.calls import caller, recorder
from headrace.log import open_log
from headrace.retry import Backoff, CircuitBreaker
from headrace.testing.pipelines import PipelineTest
from tests.servers.answer_server import post


def declared(port: int) -> hr.Pipeline:
    async def double(row: dict[str, Any], ctx: hr.RequestContext) -> Any:
        return await post(port, {"n": row["n"]}, ctx.idempotency_key)

    pipeline = hr.Pipeline("numbers")
    rows = pipeline.topic(
        "numbers", schema="n BIGINT, at TIMESTAMP", event_time=hr.EventTime("at", idle="1 hour")
    )
    answered = rows.call(
        double, "double BIGINT", concurrency=10, timeout="1 second", retries=3, version="1"
    )
    pipeline.write("answered", answered)
    pipeline.view(
        "windows",
        answered.window(hr.tumbling("10 seconds")).aggregate(
            rows=hr.agg.count(), total=hr.agg.sum("double")
        ),
    )
    return pipeline


def main(root: Path, port: int) -> None:
    quick = Backoff(first_s=0.01, longest_s=0.05)
    caller.BACKOFF = CircuitBreaker.OPEN_BACKOFF = quick
    recorder.PROGRESS_EVERY_S = 0.05
    log = open_log(f"file:{root / 'log'}")
    with PipelineTest(declared(port), root, log=log) as test:
        while True:
            test.settle()
            (root / "settled").touch()
            time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
