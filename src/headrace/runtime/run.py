"""A pipeline's run from beginning to end: the log is opened, Spark started, the runner set to work
with all that goes on beside it, and everything closed again.

`Pipeline.run`, `headrace run` and `headrace replay` come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from headrace.durations import to_us
from headrace.errors import ConfigurationError
from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.values import Duration
from headrace.plan.plan import PipelinePlan
from headrace.plan.rendering import write_plan
from headrace.runtime.arrangement import check_fits, known_names
from headrace.runtime.inputs import Sources, make_topics
from headrace.runtime.runner import Runner, Maintenance
from headrace.runtime.services import (
    Ingests,
    OnAlert,
    OnReady,
    alerting,
    capturing,
    receiving,
    sinking,
)
from headrace.runtime.state_directory import StateDirectory
from headrace.runtime.status import Status
from headrace.runtime.versions import begin, version_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.runtime.declaration import DeclaredPipeline
    from headrace.serve.server import Server


OnStatus = Callable[[Status], None]
PATIENCE_S = 20.0


def run(
    pipeline: DeclaredPipeline,
    *,
    log: str | None = None,
    state: str | Path | None = None,
    local: str | Path | None = None,
    shards: int | None = None,
    until_caught_up: bool = False,
    stop: Event | None = None,
    on_status: OnStatus | None = None,
    serve: bool = False,
    port: int | None = None,
    on_serving: Callable[[Server], None] | None = None,
    on_gateway: OnReady | None = None,
    on_alert: OnAlert | None = None,
    batch_target: Duration = "30 seconds",
    **spark_options: Any,
) -> None:
    """Run a pipeline in this process until `stop` is set; `on_status` hears of every batch. Other
    options are those of `hr.spark`.

    State and views are in `state`, which a cluster's machines must all see; by default NAME.state
    beside the file that declares the pipeline. What each machine keeps at hand is in `local`; by
    default in the state directory on one machine, and in its temporary directory on each of a
    cluster.

    A batch takes in about as much as can be done in `batch_target`; what comes out does not depend
    on it.

    With `serve` its views are served on this machine meanwhile, at a port or, without one, at 8765
    or any that is free; `on_serving` hears where. `on_gateway` hears where each gateway listens,
    `on_alert` what alerts tell.
    """
    from headrace.log.spark.session import check_start

    stop = stop or Event()
    with (
        open_log(address_of(pipeline, log)) as opened,
        capturing(pipeline, opened, stop, until_caught_up=until_caught_up),
    ):
        if stop.is_set():  # so early that a captured table may have no topic yet
            return
        home = state_of(pipeline, state).absolute()
        plan = _checked(opened, pipeline.plan(), home)
        check_start(**spark_options)
        write_plan(home, plan, pipeline.sinks, opened.address)
        target_s = to_us(batch_target, what="batch_target") / 1e6
        with (
            _serving(home, opened, port, on_serving) if serve else nullcontext()
        ):  # before Spark, which takes seconds to start
            runner = Runner(
                plan,
                opened,
                _session(spark_options),
                home,
                shards=shards,
                local=_path(local),
                batch_target_s=target_s,
            )
            ingests = Ingests(
                pipeline,
                runner.spark,
                opened.address,
                home,
                until_caught_up=until_caught_up,
                on_change=runner.tell,
            )
            following = sinking(
                pipeline.sinks, opened.address, stop, until_caught_up=until_caught_up
            )
            coming = receiving(
                pipeline, opened.address, stop, until_caught_up=until_caught_up, on_ready=on_gateway
            )
            telling = alerting(
                pipeline, opened, stop, until_caught_up=until_caught_up, on_alert=on_alert
            )
            with coming, following, telling:
                _run(
                    runner,
                    ingests,
                    fixed_shards=shards is not None,
                    until_caught_up=until_caught_up,
                    stop=stop,
                    on_status=on_status,
                )


def replay(
    pipeline: DeclaredPipeline,
    version: str,
    *,
    since: int | str | None = None,
    retick: bool = False,
    log: str | None = None,
    state: str | Path | None = None,
    local: str | Path | None = None,
    shards: int | None = None,
    until_caught_up: bool = False,
    stop: Event | None = None,
    on_status: OnStatus | None = None,
    **spark_options: Any,
) -> None:
    """Run a version of a pipeline beside it, over the recorded ticks from `since` on (a tick's
    number, or a time) and whatever comes after them.
    """
    with open_log(address_of(pipeline, log)) as opened:
        directory = version_state(state_of(pipeline, state), version)
        plan = _checked(
            opened, begin(opened, pipeline.plan(), version, since=since, retick=retick), directory
        )
        runner = Runner(
            plan, opened, _session(spark_options), directory, shards=shards, local=_path(local)
        )
        _run(
            runner,
            None,
            fixed_shards=shards is not None,
            until_caught_up=until_caught_up,
            stop=stop,
            on_status=on_status,
        )


@contextmanager
def _serving(
    state: Path, log: Log, port: int | None, on_serving: Callable[[Server], None] | None
) -> Iterator[None]:
    """The views, for as long as the pipeline runs."""
    from headrace.serve.access import find_token
    from headrace.serve.server import start_at_usual_port

    with start_at_usual_port(state, log, port, token=find_token(None)) as server:
        if on_serving is not None:
            on_serving(server)
        yield


def _checked(log: Log, plan: PipelinePlan, state: Path) -> PipelinePlan:
    """What can be refused without Spark is refused before it is started."""
    plan = known_names(plan, log)
    plan.check_kernels()
    make_topics(log, plan)
    StateDirectory(log, plan.name, state)
    Sources(log, plan.name, [step.topic for step in plan.inputs])
    check_fits(plan, log, state)
    return plan


def _run(
    runner: Runner,
    ingests: Ingests | None,
    *,
    fixed_shards: bool,
    until_caught_up: bool,
    stop: Event | None,
    on_status: OnStatus | None,
) -> None:
    """The runner at work, until it ends or is stopped; a batch that is under way then may take some
    time to finish, and is given up after that.
    """
    stopped, ended = stop or Event(), Event()
    runner.on_status = on_status or runner.on_status
    upkeep = Maintenance(runner, fixed_shards=fixed_shards)
    if ingests is not None:
        runner.ingests = ingests.status

    def between() -> bool:
        upkeep.attend()
        return ingests is not None and ingests.attend()

    Thread(target=_give_up_late_batch, args=(runner.spark, stopped, ended), daemon=True).start()
    try:
        runner.run(until_caught_up=until_caught_up, stop=stopped, between=between)
    finally:
        ended.set()
        if ingests is not None:
            ingests.stop()
        runner.close()


def _give_up_late_batch(spark: SparkSession, stopped: Event, ended: Event) -> None:
    """Interrupting a batch does no harm: what is not in the ledger never happened."""
    while not ended.wait(0.5):
        if stopped.is_set():
            if not ended.wait(PATIENCE_S):
                spark.interruptAll()
            return


def _session(options: dict[str, Any]) -> SparkSession:
    """Started by the main thread, Spark would take Ctrl-C for itself. So another starts it, and
    whoever asked for Ctrl-C keeps it.
    """
    from headrace.log.spark.session import spark

    with ThreadPoolExecutor(1) as starter:
        session = starter.submit(spark, **options).result()
    session.createDataFrame(
        [], "nothing INT"
    )  # makes it this thread's session too: that is where Spark looks for data sources
    return session


def state_of(pipeline: DeclaredPipeline, given: str | Path | None) -> Path:
    """Where a pipeline keeps its state: beside the file that declares it, unless it is told."""
    return Path(given) if given else pipeline.directory / f"{pipeline.name}.state"


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def address_of(pipeline: DeclaredPipeline, given: str | None) -> str:
    address = given or pipeline.log
    if address is None:
        raise ConfigurationError(
            f"The pipeline {pipeline.name!r} has no log.",
            fix="pass log=… (--log …), or Pipeline(name, log=…).",
        )
    return address
