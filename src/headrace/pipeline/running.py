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
from headrace.pipeline.runner import Runner
from headrace.pipeline.status import Status

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline


def run(
    pipeline: Pipeline,
    *,
    log: str | None = None,
    state: str | Path | None = None,
    shards: int | None = None,
    until_caught_up: bool = False,
    stop: Event | None = None,
    on_status: Callable[[Status], None] | None = None,
    **spark_options: Any,
) -> None:
    """Run a pipeline in this process until `stop` is set; `on_status` hears of every batch. Other options are those of `hr.spark`."""
    from headrace.spark_session import spark as session

    with open_log(address_of(pipeline, log)) as opened:
        runner = Runner(pipeline.plan(), opened, session(**spark_options), Path(state or f"{pipeline.name}.state"), shards=shards)
        runner.on_status = on_status or runner.on_status
        try:
            runner.run(until_caught_up=until_caught_up, stop=stop)
        finally:
            runner.close()


def address_of(pipeline: Pipeline, given: str | None) -> str:
    address = given or pipeline.log
    if address is None:
        raise ConfigurationError(f"The pipeline {pipeline.name!r} has no log.", fix="pass log=… (--log …), or Pipeline(name, log=…).")
    return address
