"""A run of a pipeline from start to end: open the log, start Spark, the runner and the background
services, and close everything again.

`Pipeline.run`, `headrace run` and `headrace replay` come here. `runner` has the loop over batches,
`services` what runs in the background.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from headrace.durations import to_us
from headrace.engine.worker_daemon import settle_partition
from headrace.errors import ConfigurationError
from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.values import Duration
from headrace.plan.plan import PipelinePlan
from headrace.plan.rendering import write_plan
from headrace.run_status import Status
from headrace.runtime.batch_size import BatchWidth
from headrace.runtime.calls import Calls
from headrace.runtime.failures import SparkLost
from headrace.runtime.inputs import InputTopics, create_topics
from headrace.runtime.query_assignment import check_fits, known_names, log_former_steps
from headrace.runtime.runner import Maintenance, Runner, input_topics
from headrace.runtime.services import (
    Ingests,
    OnAlert,
    OnReady,
    run_alerts,
    run_captures,
    run_gateways,
    run_sinks,
)
from headrace.runtime.spark_jobs import cancel_jobs
from headrace.runtime.state_directory import StateDirectory
from headrace.runtime.versions import start_version, version_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.runtime.declared_pipeline import DeclaredPipeline
    from headrace.serve.server import Server


logger = logging.getLogger("headrace.pipeline")
OnStatus = Callable[[Status], None]
OnStarting = Callable[[float | None], None]
PATIENCE_S = 20.0


def run(
    pipeline: DeclaredPipeline,
    *,
    log: str | None = None,
    state: str | Path | None = None,
    local: str | Path | None = None,
    shards: int | None = None,
    until_caught_up: bool = False,
    final: bool = False,
    stop: Event | None = None,
    on_status: OnStatus | None = None,
    serve: bool = False,
    port: int | None = None,
    on_serving: Callable[[Server], None] | None = None,
    on_gateway: OnReady | None = None,
    on_alert: OnAlert | None = None,
    on_starting: OnStarting | None = None,
    batch_target: Duration = "30 seconds",
    width: str = "auto",
    accept_edits: Sequence[str] = (),
    **spark_options: Any,
) -> None:
    """Run a pipeline in this process until `stop` is set.

    Args:
        pipeline: The declared pipeline.
        log: The address of the log; by default the pipeline's own.
        state: The directory for state and views, which all machines of a cluster must share. By
            default `NAME.state` next to the file that declares the pipeline.
        local: The directory for local stores on each machine. By default in the state directory on
            a single machine, and in the temporary directory of each machine of a cluster.
        shards: The number of shards; by default the one chosen with `headrace rescale`, or one per
            core.
        until_caught_up: End when everything that was there at the start has been processed.
        final: With `until_caught_up`, end event time then: emit what still waits for it.
        stop: Ends the run when it is set.
        on_status: Called with the status after every batch.
        serve: Serve the views on this machine meanwhile.
        port: The port to serve at; by default 8765, or a free one if that is taken.
        on_serving: Called with the server when it is ready.
        on_gateway: Called with each gateway and its address when it is ready.
        on_alert: Called with each alert message.
        on_starting: Called with None when Spark is about to be started, and with the seconds that
            it took when it is there; again if it dies and is started anew.
        batch_target: How long a batch should take. The results do not depend on it.
        width: How wide batches run: whole in "one" task, "wide" over many, or "auto", as their rows
            need it. The results do not depend on it.
        accept_edits: The outputs that go on although their definition was edited.
        **spark_options: The options of `hr.spark`.

    Raises:
        ConfigurationError: The pipeline has no log, or a final run does not end by itself.
        PlanChanged: The stored state does not fit the pipeline any more.
        StateElsewhere: The state directory is not the one of this pipeline.
        RunnerFenced: Another runner of the pipeline has taken over.
        SparkLost: Spark has ended, and the run cannot start it again.

    Example:
        run(pipeline, log="file:data", until_caught_up=True)

    """
    from headrace.log.spark.session import check_start

    BatchWidth(width)  # refuses what is none, before Spark is started
    _check_final(final=final, until_caught_up=until_caught_up)
    stop = stop or Event()
    with (
        open_log(address_of(pipeline, log)) as opened,
        run_captures(pipeline, opened, stop, until_caught_up=until_caught_up),
    ):
        if stop.is_set():  # so early that a captured table may have no topic yet
            return
        home = state_of(pipeline, state).absolute()
        plan = _check(opened, pipeline.plan(), home, accept_edits)
        check_start(**spark_options)
        write_plan(home, plan, pipeline.sinks, opened.address)
        target_s = to_us(batch_target, what="batch_target") / 1e6
        # Serving starts before Spark, which takes seconds.
        with _serving(home, opened, port, on_serving) if serve else nullcontext():
            if not plan.outputs:
                create_topics(opened, plan)
                _run_services(
                    pipeline,
                    opened.address,
                    stop,
                    until_caught_up=until_caught_up,
                    on_gateway=on_gateway,
                )
                return
            spark = RunSession(spark_options, on_starting)

            def start_runner() -> Runner:
                return Runner.start(
                    plan,
                    opened,
                    spark.session,
                    home,
                    shards=shards,
                    local=None if local is None else Path(local),
                    batch_target_s=target_s,
                    width=width,
                    accept_edits=accept_edits,
                )

            calls = Calls(opened, pipeline.calls, plan)

            def run_batches(runner: Runner) -> None:
                calls.attach(runner)
                ingests = Ingests(
                    pipeline,
                    runner.spark,
                    opened.address,
                    home,
                    until_caught_up=until_caught_up,
                    on_change=runner.write_status,
                )
                _run(
                    runner,
                    ingests,
                    calls,
                    fixed_shards=shards is not None,
                    until_caught_up=until_caught_up,
                    final=final,
                    stop=stop,
                    on_status=on_status,
                )

            runner = start_runner()
            calls.open()
            with (
                calls.running(stop),
                run_gateways(
                    pipeline,
                    opened.address,
                    stop,
                    until_caught_up=until_caught_up,
                    on_ready=on_gateway,
                ),
                run_sinks(pipeline.sinks, opened.address, stop, until_caught_up=until_caught_up),
                run_alerts(
                    pipeline, opened, stop, until_caught_up=until_caught_up, on_alert=on_alert
                ),
            ):
                spark.survive_deaths(runner, start_runner, run_batches)


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
    final: bool = False,
    stop: Event | None = None,
    on_status: OnStatus | None = None,
    **spark_options: Any,
) -> None:
    """Run a version of a pipeline: over the recorded ticks, and then over whatever comes after
    them. The version has its own state, topics and views.

    Args:
        pipeline: The declared pipeline, which may have changed since the ticks were recorded.
        version: The name of the version.
        since: The first tick, by its number or by a time; by default the first recorded one.
        retick: Cut new ticks from what the inputs still have, instead of using recorded ones.
        log: The address of the log; by default the pipeline's own.
        state: The pipeline's state directory; the version's is inside it.
        local: The directory for local stores on each machine.
        shards: The number of shards.
        until_caught_up: End when everything that was there at the start has been processed.
        final: With `until_caught_up`, end event time then: emit what still waits for it.
        stop: Ends the run when it is set.
        on_status: Called with the status after every batch.
        **spark_options: The options of `hr.spark`.

    Raises:
        ReplayRefused: The version cannot be made, or not from there.

    Example:
        replay(pipeline, "v2", since="2026-01-01T00:00:00Z", until_caught_up=True)

    """
    _check_final(final=final, until_caught_up=until_caught_up)
    with open_log(address_of(pipeline, log)) as opened:
        directory = version_state(state_of(pipeline, state), version)
        plan = start_version(opened, pipeline.plan(), version, since=since, retick=retick)
        plan = _check(opened, plan, directory)
        spark = RunSession(spark_options)

        def start_runner() -> Runner:
            return Runner.start(
                plan,
                opened,
                spark.session,
                directory,
                shards=shards,
                local=None if local is None else Path(local),
            )

        def run_batches(runner: Runner) -> None:
            _run(
                runner,
                None,
                None,
                fixed_shards=shards is not None,
                until_caught_up=until_caught_up,
                final=final,
                stop=stop,
                on_status=on_status,
            )

        spark.survive_deaths(start_runner(), start_runner, run_batches)


@contextmanager
def _serving(
    state: Path, log: Log, port: int | None, on_serving: Callable[[Server], None] | None
) -> Iterator[None]:
    """Serve the views for as long as the pipeline runs."""
    from headrace.http.access import find_token
    from headrace.serve.server import start_at_usual_port

    with start_at_usual_port(state, log, port, token=find_token(None)) as server:
        if on_serving is not None:
            on_serving(server)
        yield


def _check(
    log: Log, plan: PipelinePlan, state: Path, accept_edits: Sequence[str] = ()
) -> PipelinePlan:
    """Refuse what can be refused before Spark is started. Returns the plan with the step names
    under which state is stored.
    """
    declared, plan = plan, known_names(plan, log)
    log_former_steps(declared, plan)
    plan.check_kernels()
    create_topics(log, plan)
    StateDirectory.find(log, plan.name, state)
    InputTopics.find(log, plan.name, input_topics(plan))
    check_fits(plan, log, state, accept_edits)
    return plan


def _run_services(
    pipeline: DeclaredPipeline,
    log: str,
    stop: Event,
    *,
    until_caught_up: bool,
    on_gateway: OnReady | None,
) -> None:
    """Run the gateways and sinks of a pipeline that computes nothing: its sinks follow inputs."""
    with (
        run_gateways(pipeline, log, stop, until_caught_up=until_caught_up, on_ready=on_gateway),
        run_sinks(pipeline.sinks, log, stop, until_caught_up=until_caught_up),
    ):
        if not until_caught_up:
            stop.wait()


def _run(
    runner: Runner,
    ingests: Ingests | None,
    calls: Calls | None,
    *,
    fixed_shards: bool,
    until_caught_up: bool,
    final: bool,
    stop: Event | None,
    on_status: OnStatus | None,
) -> None:
    """Run batches until the runner ends or is stopped, then close everything. When it is stopped,
    the present batch may take some time to finish, and is interrupted after that.
    """
    stop, ended = stop or Event(), Event()
    runner.on_status = on_status or runner.on_status
    maintenance = Maintenance(runner, fixed_shards=fixed_shards)
    if ingests is not None:
        runner.ingests = ingests.status

    def between() -> bool:
        maintenance.step()
        if calls is not None:
            calls.check()
        try:
            return ingests is not None and ingests.poll()
        except Exception as error:
            runner.check_spark(error)
            raise

    Thread(target=_interrupt_late_batch, args=(runner.spark, stop, ended), daemon=True).start()
    try:
        _warn_of_ended_time(runner)
        runner.run(until_caught_up=until_caught_up, final=final, stop=stop, between=between)
    except SparkLost:
        ingests = None  # their queries have ended with it
        raise
    finally:
        ended.set()
        if ingests is not None:
            ingests.stop()
        runner.close()


def _check_final(*, final: bool, until_caught_up: bool) -> None:
    if final and not until_caught_up:
        raise ConfigurationError(
            "A final run ends event time when it has caught up, and this one never does.",
            fix="pass until_caught_up=True (--until-caught-up) too, or leave out final=True.",
        )


def _warn_of_ended_time(runner: Runner) -> None:
    last = runner.journal.last
    if last is not None and last.is_ended:
        logger.warning(
            "Event time of %s has ended with a final run: rows that come now are late for every"
            " step that goes by event time. To compute them together with the others: headrace"
            " replay FILE --as v2 --retick.",
            runner.plan.name,
        )


def _interrupt_late_batch(spark: SparkSession, stop: Event, ended: Event) -> None:
    """Interrupt a batch that goes on too long after `stop`. That does no harm: what is not in the
    ledger never happened.
    """
    while not ended.wait(0.5):
        if stop.is_set():
            if not ended.wait(PATIENCE_S):
                with suppress(Exception):  # it may have ended
                    cancel_jobs(spark)
            return


# Spark


MAX_DEATHS = 3


class RunSession:
    """The Spark session of a run. One that the run has started itself is replaced when its JVM
    dies; one that was there before, and one of a Connect server, is its owner's business.
    """

    def __init__(self, options: dict[str, Any], on_starting: OnStarting | None = None) -> None:
        from pyspark.sql import SparkSession

        self.options = options
        self.on_starting = on_starting or (lambda _seconds: None)
        self.is_own = (
            options.get("remote") is None
            and SparkSession.getActiveSession() is None
            and "PYSPARK_GATEWAY_PORT" not in os.environ
        )
        self.session = self._start()

    def _start(self) -> SparkSession:
        """Start Spark from another thread: started by the main thread, it would handle Ctrl-C
        itself.
        """
        from headrace.log.spark.session import end_quietly, limit_retries, spark

        if self.is_own:
            self.on_starting(None)
        started_s = time.monotonic()
        with ThreadPoolExecutor(1) as starter:
            session = starter.submit(spark, **self.options).result()
        # Makes it this thread's session too, which is where Spark looks for data sources.
        session.createDataFrame([], "nothing INT")
        if self.options.get("remote") is not None:
            limit_retries(session)
        if self.is_own:
            end_quietly(session)
            self.on_starting(time.monotonic() - started_s)
            Thread(target=_start_workers, args=(session,), daemon=True).start()
        return session

    def survive_deaths(
        self,
        runner: Runner,
        start_runner: Callable[[], Runner],
        run_batches: Callable[[Runner], None],
    ) -> None:
        """Run batches with a runner. If Spark ends meanwhile, start another session and another
        runner, which goes on at the ledger's tick: what is not in the ledger never happened.
        Raises SparkLost if the session is not the run's own, or if several in a row end before
        they have committed anything.
        """
        from headrace.log.spark.session import forget_ended

        deaths = 0
        while True:
            try:
                run_batches(runner)
            except SparkLost:
                deaths = 1 if runner.batches else deaths + 1
                if not self.is_own or deaths >= MAX_DEATHS:
                    raise
                logger.warning(
                    "Spark has ended while %s was running. Starting it again.", runner.plan.name
                )
                forget_ended(self.session)
                self.session = self._start()
                runner = start_runner()
            else:
                return


def _start_workers(session: SparkSession) -> None:
    """Run a job of nothing, so that the daemon of Python workers starts while the run is being
    prepared and not with the first batch. If it fails, the batches will say why.
    """
    with suppress(Exception):
        session.sparkContext.parallelize([0], 1).foreachPartition(settle_partition)


def state_of(pipeline: DeclaredPipeline, state: str | Path | None) -> Path:
    """The state directory of a pipeline: next to the file that declares it, unless it is given."""
    return Path(state) if state else pipeline.directory / f"{pipeline.name}.state"


def address_of(pipeline: DeclaredPipeline, log: str | None) -> str:
    """The address of a pipeline's log. Raises ConfigurationError if it has none."""
    address = log or pipeline.log
    if address is None:
        raise ConfigurationError(
            f"The pipeline {pipeline.name!r} has no log.",
            fix="pass log=… (--log …), or Pipeline(name, log=…).",
        )
    return address
