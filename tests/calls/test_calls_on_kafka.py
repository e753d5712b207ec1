"""Recorded calls on Kafka: the same fates, event time and replay as on the embedded log."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import CallRefused
from headrace.log import open_log
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.pipelines import PipelineTest
from tests.calls.test_calls import Doubler, declared, numbers, values
from tests.servers.kafka_broker import KafkaBroker


def test_calls_on_kafka(tmp_path: Path, kafka_broker: KafkaBroker) -> None:
    doubler = Doubler()

    async def ask(row: dict[str, object], ctx: object) -> dict[str, object]:
        if row["n"] == 5:
            raise CallRefused("no such number")
        return await doubler(row, ctx)  # type: ignore[arg-type]

    pipeline = declared(ask, name="asked.numbers", partitions=2, key="n")
    with open_log(kafka_broker.address) as log, PipelineTest(pipeline, tmp_path, log=log) as test:
        test.feed("asked.numbers", numbers(70))
        test.settle()
        test.restart()
        test.feed("asked.numbers", numbers(60, first=70))
        test.settle(final=True)
        assert values(test, "asked.numbers.answered") == [(n, 2 * n) for n in range(130) if n != 5]
        assert [row["rows"] for row in test.view("windows")] == [59, 60, 10]
        assert [letter["reason"] for letter in read_dead_letters(log, "doubled")] == [
            "refused: no such number"
        ]
        assert len(doubler.asked) == 129
        version = test.replay("v2")
        version.settle()
        assert version.view("windows.v2") == test.view("windows")
        assert len(doubler.asked) == 129
