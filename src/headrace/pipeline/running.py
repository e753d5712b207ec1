"""A pipeline's run from beginning to end: the log is opened, Spark started, the runner set to work with all that goes on beside it, and everything closed again.

`Pipeline.run`, `headrace run` and `headrace replay` come here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError
from headrace.log import open_log
from headrace.pipeline.replay import begin, version_state
from headrace.pipeline.runner import Runner
from headrace.pipeline.status import Status

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.pipeline import Pipeline

OnStatus = Callable[[Status], None]


def run(
    pipeline: Pipeline,
    *,
    log: str | None = None,
    state: str | Path | None = None,
    shards: int | None = None,
    until_caught_up: bool = False,
    stop: Event | None = None,
    on_status: OnStatus | None = None,
    **spark_options: Any,
) -> None:
    """Run a pipeline in this process until `stop` is set; `on_status` hears of every batch. Other options are those of `hr.spark`."""
    with open_log(address_of(pipeline, log)) as opened:
        runner = Runner(pipeline.plan(), opened, _session(spark_options), state_of(pipeline, state), shards=shards)
        _run(runner, until_caught_up=until_caught_up, stop=stop, on_status=on_status)


def replay(
    pipeline: Pipeline,
    version: str,
    *,
    since: int | str | None = None,
    retick: bool = False,
    log: str | None = None,
    state: str | Path | None = None,
    shards: int | None = None,
    until_caught_up: bool = False,
    stop: Event | None = None,
    on_status: OnStatus | None = None,
    **spark_options: Any,
) -> None:
    """Run a version of a pipeline beside it, over the recorded ticks from `since` on (a tick's number, or a time) and whatever comes after them."""
    with open_log(address_of(pipeline, log)) as opened:
        plan = begin(opened, pipeline.plan(), version, since=since, retick=retick)
        runner = Runner(plan, opened, _session(spark_options), version_state(state_of(pipeline, state), version), shards=shards)
        _run(runner, until_caught_up=until_caught_up, stop=stop, on_status=on_status)


def _run(runner: Runner, *, until_caught_up: bool, stop: Event | None, on_status: OnStatus | None) -> None:
    runner.on_status = on_status or runner.on_status
    try:
        runner.run(until_caught_up=until_caught_up, stop=stop)
    finally:
        runner.close()


def _session(options: dict[str, Any]) -> SparkSession:
    from headrace.spark_session import spark

    return spark(**options)


def state_of(pipeline: Pipeline, given: str | Path | None) -> Path:
    return Path(given or f"{pipeline.name}.state")


def address_of(pipeline: Pipeline, given: str | None) -> str:
    address = given or pipeline.log
    if address is None:
        raise ConfigurationError(f"The pipeline {pipeline.name!r} has no log.", fix="pass log=… (--log …), or Pipeline(name, log=…).")
    return address
