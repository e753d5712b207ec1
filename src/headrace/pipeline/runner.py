"""The runner: cuts ticks, runs batches, commits them, until it is told to stop.

It alone writes a pipeline's ticks and ledger. It holds nothing that is not in the log or the state directory: killed at any moment, the next one goes on at the ledger's tick.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from headrace.engine.clock_files import ClockWork, read_clocks, sweep_clocks, write_clocks
from headrace.engine.clocks import BatchClocks, ClockState
from headrace.engine.cutter import MOST_ROWS_A_TICK, next_ticks, rows_between
from headrace.engine.job import clean_up, read_reports
from headrace.engine.spec import BatchContext, BatchResult
from headrace.engine.state_files import new_id
from headrace.engine.ticks import Tick, TickJournal, beginning
from headrace.errors import ConfigurationError, PlanChanged, TopicExists
from headrace.log.api import Log, TopicInfo
from headrace.log.schema import to_ddl
from headrace.pipeline.builder import JobBuilder
from headrace.pipeline.failures import reason
from headrace.pipeline.hosting import check_hosted, keeps_state
from headrace.pipeline.plan import PipelinePlan, TopicOutput, TopicStep, ViewOutput
from headrace.pipeline.rescale import remembered_shards
from headrace.pipeline.status import Status, write_status
from headrace.pipeline.timing import clock_spec
from headrace.sinks.commit import commit_batch
from headrace.sinks.ledger import MAIN_QUERY, Ledger, LedgerEntry, RunnerFenced
from headrace.sinks.views import ViewStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("headrace.pipeline")
TICK_EVERY_S = 0.2
MOST_TICKS_A_BATCH = 2_000
MOST_ROWS_A_BATCH = 4_000_000
ROWS_A_KEY_TO_COMBINE = 4
LONGEST_PAUSE_S = 60.0
MOST_FAILURES = 20


class Runner:
    """One run of a pipeline. `step()` does one batch; `run()` goes on until stopped."""

    def __init__(
        self, plan: PipelinePlan, log: Log, spark: SparkSession, state: Path, *, shards: int | None = None, local: Path | None = None
    ) -> None:
        check_hosted(plan)
        self.plan, self.log, self.spark, self.state = plan, log, spark, state.absolute()
        self.local = (local or self.state / "local").absolute()
        self.cores = int(spark.conf.get("spark.sql.shuffle.partitions", "2") or 2)
        self.shards = shards or remembered_shards(log, plan.name) or self.cores
        self.state.mkdir(parents=True, exist_ok=True)
        self._make_topics()
        self.ledger = Ledger(log, plan.name)
        self.journal = TickJournal(log, plan.name)
        self.ledger.take_over()
        self._check_steps()
        self.views = self._open_views()
        self._begin()
        self._clocks = tuple(clock_spec(step) for step in self.plan.inputs)
        self.clock_state: ClockState = read_clocks(self.state / "clocks", self._entry().clocks)
        self.batch_clocks: BatchClocks | None = None
        self.last_result: BatchResult | None = None
        self.started, self.batches, self.failures = time.time(), 0, 0
        self.last_error: str | None = None
        self.on_status: Callable[[Status], None] = lambda _status: None
        self.ingests: Callable[[], dict[str, str]] = dict
        """How the streams that are brought in are doing, for the status."""
        self._last_batch = (0, 0.0)  # rows, seconds
        self._state_bytes = 0

    # Beginning

    def _make_topics(self) -> None:
        """Make the topics that are missing; those that are there must fit."""
        known = set(self.log.topics())
        for step in self.plan.inputs:
            if step.topic not in known:
                self._create(step.topic, step, step.partitions, dict(step.settings))
            else:
                _check_fits(step, self.log.topic(step.topic))
        for output in self.plan.outputs:
            if isinstance(output, TopicOutput) and output.name not in known:
                self._create(output.name, output.input, output.partitions, dict(output.settings))

    def _create(self, name: str, step: Any, partitions: int, settings: dict[str, Any]) -> None:
        ddl = to_ddl(step.schema)
        if step.is_table:
            self.log.create_table(name, ddl, primary_key=step.key, partitions=partitions, exist_ok=True, **settings)
        else:
            self.log.create_topic(name, ddl, key=step.key or None, partitions=partitions, exist_ok=True, **settings)

    def _open_views(self) -> ViewStore | None:
        outputs = [each for each in self.plan.outputs if isinstance(each, ViewOutput)]
        if not outputs:
            return None
        store = ViewStore(self.state / "views.db")
        for output in outputs:
            store.declare(output.name, output.input.schema, output.input.key if output.input.is_table else ())
        store.fence(self.ledger.epoch)
        for output in outputs:
            if self.has_begun and store.reader.tick(output.name) < self.tick:
                raise PlanChanged(
                    f"The view {output.name!r} is at tick {store.reader.tick(output.name)}, and the pipeline at {self.tick}: it is new, or was lost.",
                    fix="build it from the beginning: run the pipeline under another name, or with another --state on a log of its own.",
                )
        return store

    def _check_steps(self) -> None:
        """A step whose meaning changed must not go on with the state of the old one; a new one would miss what came before."""
        stored = json.loads(self.log.note(self._plan_note()) or "{}")
        for step in self.plan.steps():
            if not keeps_state(step) or not self.has_begun:
                continue
            if step.name not in stored:
                raise PlanChanged(
                    f"The step {step.name!r} is new, and the pipeline is at tick {self.tick}: it would miss everything before.",
                    fix="run the pipeline under another name to build it from the beginning.",
                )
            if stored[step.name] != step.signature:
                raise PlanChanged(
                    f"The step {step.name!r} is not what it was: its state belongs to its old meaning ({step.summary()} now).",
                    fix="give the changed step another name, and run the pipeline under another name to build it from the beginning.",
                )
        signatures = {step.name: step.signature for step in self.plan.steps() if keeps_state(step)}
        if signatures != stored:
            tx = self.ledger.transaction()
            tx.set_note(self._plan_note(), json.dumps({**stored, **signatures}))
            self.ledger.commit(tx)

    def _plan_note(self) -> str:
        return f"plan.{self.plan.name}"

    def _begin(self) -> None:
        """Tick 0 says where each input began when the pipeline was first run."""
        if self.journal.last is None:
            self._record([beginning({topic: self.log.start_offsets(topic) for topic in self.topics})])

    @property
    def topics(self) -> list[str]:
        return sorted({step.topic for step in self.plan.inputs})

    def _record(self, ticks: Sequence[Tick]) -> None:
        tx = self.ledger.transaction()
        self.journal.record(tx, ticks)
        self.ledger.commit(tx)
        self.journal.refresh()

    # Going on

    @property
    def has_begun(self) -> bool:
        return self.ledger.last(MAIN_QUERY) is not None

    def _entry(self) -> LedgerEntry:
        """The newest one; before the first batch, one that says where the pipeline begins."""
        first = self.journal.first
        return self.ledger.last(MAIN_QUERY) or LedgerEntry(0, MAIN_QUERY, first.number if first else 0)

    @property
    def tick(self) -> int:
        """The last tick that is in the ledger."""
        return self._entry().tick

    def cut(self, *, forced: bool = False, most_rows: int = MOST_ROWS_A_TICK) -> int:
        """Record the ticks that are due. Returns how many."""
        last = self.journal.last
        assert last is not None
        ticks = next_ticks(self.log, self.topics, last, time.time_ns() // 1000, most_rows=most_rows, forced=forced)
        if ticks:
            self._record(ticks)
        return len(ticks)

    def step(self, most_ticks: int = MOST_TICKS_A_BATCH) -> bool:
        """One batch, if there are ticks that the ledger does not have. Returns whether there were."""
        entry = self._entry()
        before = self.journal.at(entry.tick)
        newest = self.journal.last
        if before is None or newest is None:
            raise ConfigurationError(f"The ticks of {self.plan.name!r} do not reach back to {entry.tick}.", fix="replay the pipeline.")
        ticks = self._bounded(before, self.journal.between(entry.tick, min(newest.number, entry.tick + most_ticks)))
        if not ticks:
            return False
        self._batch(entry, before, ticks)
        return True

    def _bounded(self, before: Tick, ticks: Sequence[Tick]) -> Sequence[Tick]:
        """As many ticks as make a batch of bounded size; at least one."""
        for count, tick in enumerate(ticks):
            rows = sum(end - before.end(topic, p) for topic, parts in tick.ends.items() for p, end in parts.items())
            if rows > MOST_ROWS_A_BATCH and count:
                return ticks[:count]
        return ticks

    def _batch(self, entry: LedgerEntry, before: Tick, ticks: Sequence[Tick]) -> None:
        time_of = ClockWork(self._clocks, entry.clocks, before.time_us, tuple(tick.number for tick in ticks), tuple(tick.time_us for tick in ticks))
        context = BatchContext(
            self.plan.name, self.log.address, self.state, self.local, new_id(), self.shards, entry.tick, ticks[-1].number,
            {step: dict(ids) for step, ids in entry.states.items()}, time_of,
        )  # fmt: skip
        builder = JobBuilder(self.spark, self.plan, context, before, ticks, self.cores, self._worth_combining())
        try:
            builder.job().collect()
            result = read_reports(context)
            self.batch_clocks, self.clock_state = time_of.clocks(context.clock_directory, context.job_directory, [spec.name for spec in self._clocks])
            clocks = write_clocks(context.clock_directory, self.clock_state) if self.clock_state.inputs else None
            committed = LedgerEntry(self.ledger.epoch, MAIN_QUERY, ticks[-1].number, result.ids, clocks, result.due_us)
            topics = {output.name: output.partitions for output in self.plan.outputs if isinstance(output, TopicOutput)}
            result.counts |= builder.failure_counts()
            commit_batch(self.ledger, self.views, committed, result.views, result.topics, topics, result.diverted)
            sweep_clocks(context.clock_directory, {clocks} if clocks else set())
            self.batches += 1
            self.last_result = result
        finally:
            builder.forget()
            clean_up(context)

    def _worth_combining(self) -> set[str]:
        """Steps that had many rows a key in the last batch. What they compute does not depend on it, only how fast."""
        counts = self.last_result.counts if self.last_result else {}
        many = ROWS_A_KEY_TO_COMBINE
        return {step.name for step in self.plan.steps() if counts.get(f"{step.name}.rows_in", 0) > many * counts.get(f"{step.name}.keys", 1)}

    def run(self, *, until_caught_up: bool = False, stop: Event | None = None, between: Callable[[], bool] | None = None) -> None:
        """Batches until `stop` is set, or until everything that was there at the start has been taken in.

        `between` is called between batches. It says whether more rows will come of what it looks after: then it is too early to end.
        """
        stopped = stop or Event()
        target: int | None = None
        while not stopped.is_set():
            started = time.monotonic()
            more = between is not None and between()
            worked = self._try_batch(stopped)
            if until_caught_up and not more and self.last_error is None:
                target = target if target is not None else self._newest()
                if self.tick >= target:
                    return
            stopped.wait(0 if worked and self.tick < self._newest() else max(0.0, TICK_EVERY_S - (time.monotonic() - started)))

    def _newest(self) -> int:
        return self.journal.last.number if self.journal.last else 0

    def _try_batch(self, stopped: Event) -> bool:
        """A batch that fails is tried again, after a while that grows; one that has lost the pipeline to another runner is not."""
        started, before = time.monotonic(), self._entry()
        try:
            self.cut()
            worked = self.step()
        except RunnerFenced:
            raise
        except Exception as error:
            if not stopped.is_set():  # else the batch was given up: whatever is not in the ledger never happened
                self._failed(error, stopped)
            return False
        if worked or self.last_error is not None:
            self.failures, self.last_error = 0, None
            self._count_batch(before.tick, time.monotonic() - started)
        return worked

    def _failed(self, error: Exception, stopped: Event) -> None:
        self.failures += 1
        self.last_error = reason(error)
        pause = min(LONGEST_PAUSE_S, 2.0 ** min(self.failures, 10))
        logger.debug("A batch of %s failed.", self.plan.name, exc_info=error)
        if self.failures > MOST_FAILURES:
            raise error
        logger.warning("A batch of %s failed (%d in a row): %s\nTrying again in %.0f s.", self.plan.name, self.failures, self.last_error, pause)
        self.tell()
        stopped.wait(pause)

    def _count_batch(self, before: int, seconds: float) -> None:
        start, now = self.journal.at(before), self.journal.at(self.tick)
        self._last_batch = (rows_between(start.ends, now.ends) if start and now else 0, seconds)
        self.tell()

    def tell(self) -> None:
        """Leave word of how it goes, for `headrace status` and whoever watches."""
        entry, newest = self._entry(), self.journal.last
        now = self.journal.at(entry.tick)
        if newest is None or now is None:
            return
        rows, seconds = self._last_batch
        behind = rows_between(now.ends, self.log.snapshot(self.topics))
        size = sum(path.stat().st_size for path in (self.state / "steps").glob("*/*.state")) if self.batches % 20 == 1 else self._state_bytes
        self._state_bytes = size
        status = Status(
            pipeline=self.plan.name,
            process=os.getpid(),
            epoch=self.ledger.epoch,
            shards=self.shards,
            started=self.started,
            updated=time.time(),
            tick=entry.tick,
            newest_tick=newest.number,
            batch_seconds=seconds,
            batch_rows=rows,
            rows_per_second=rows / max(seconds, 1e-9),
            rows_behind=behind,
            state_bytes=size,
            batches=self.batches,
            failures=self.failures,
            last_error=self.last_error,
            counts=self.last_result.counts if self.last_result else {},
            ingests=self.ingests(),
        )
        write_status(self.state, status)
        self.on_status(status)

    def close(self) -> None:
        if self.views is not None:
            self.views.close()


def _check_fits(step: TopicStep, info: TopicInfo) -> None:
    """A topic that is there must have the declared columns and key."""
    if (info.schema, info.key, info.is_table) != (to_ddl(step.schema), step.key, step.is_table):
        raise TopicExists(
            f"The topic {step.topic!r} is there with another schema or key: {info.schema} (key: {', '.join(info.key) or 'none'}).",
            fix="declare it in the pipeline as it is.",
        )
