"""The runner: cuts ticks and runs batches until it is stopped.

It is the only writer of a pipeline's ticks and ledger. It holds nothing that is not in the log or
in the state directory: it can be killed at any moment, and the next runner resumes at the ledger's
tick. `Maintenance` is what a run does between batches. `runtime.run` starts a runner with
everything around it; `runtime.query` has the batch.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Self

from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry, RunnerFenced
from headrace.engine.reports import STATE_BYTES, STATE_KEYS, BatchResult
from headrace.engine.state.files import StateIds
from headrace.engine.state.sweeper import Sweeper
from headrace.engine.ticks import (
    MAX_ROWS_A_TICK,
    Tick,
    TickJournal,
    final_tick,
    first_tick,
    next_ticks,
    rows_between,
)
from headrace.engine.watermarks import WatermarkState, sweep_watermarks, write_watermarks
from headrace.errors import HeadraceError
from headrace.log.api import Log
from headrace.operators.load_shedding import ShedPolicy
from headrace.plan.plan import PipelinePlan, ViewOutput
from headrace.retry import Backoff
from headrace.run_status import Status, process_start_ticks, write_status
from headrace.runtime.batch_size import DEFAULT_TARGET_S
from headrace.runtime.failures import SparkLost, failure_reason, is_permanent
from headrace.runtime.inputs import InputTopics, create_topics
from headrace.runtime.query import (
    MAX_TICKS_A_BATCH,
    ComputedBatch,
    Query,
    RunContext,
    sub_plan,
)
from headrace.runtime.query_assignment import (
    arrange,
    arrange_query,
    arrangement_of,
    check_fits,
    known_names,
    log_former_steps,
    note_name,
    remembered_shards,
    view_key,
)
from headrace.runtime.spark_jobs import check_code_can_be_sent
from headrace.runtime.state_directory import StateDirectory
from headrace.views.file import VIEWS_FILE
from headrace.views.store import ViewStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


logger = logging.getLogger("headrace.pipeline")
TICK_EVERY_S = 0.2
BACKOFF = Backoff(first_s=2.0, longest_s=60.0, jitter=0.0)
MAX_FAILURES = 20
STATUS_EVERY_S = 5.0


class Runner:
    """One run of a pipeline. `start` takes the pipeline over; `step` runs one batch; `run` goes on
    until it is stopped; `close` closes the views.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        context: RunContext,
        inputs: InputTopics,
        queries: Sequence[Query],
    ) -> None:
        self.plan = plan
        self.context = context
        self.log = context.log
        self.spark = context.spark
        self.state = context.state
        self.local = context.local
        self.ledger = context.ledger
        self.journal = context.journal
        self.views = context.views
        self.queries = list(queries)
        self.started = time.time()
        self.failures = 0
        self.last_error: str | None = None
        self.on_status: Callable[[Status], None] = lambda _status: None
        self.ingests: Callable[[], dict[str, str]] = dict
        """Returns the status of each ingest of the run."""
        self.call_status: Callable[[], dict[str, str]] = dict
        """Returns the status of each recorded call of the run."""
        self.waits_for_answers: Callable[[], bool] = lambda: False
        """Whether a run that is to catch up must go on, since rows wait for answers."""
        self.now_us: Callable[[], int] = lambda: time.time_ns() // 1000
        """Returns the time of the next tick. Tests replace it."""
        self._inputs = inputs
        self._shed_policies = {
            step.topic: step.shed for step in plan.inputs if step.shed is not None
        }
        self._status_written_s = 0.0
        self._cut_s, self._looked_us = 0.0, 0
        self._ends_event_time = False
        self._thread = ThreadPoolExecutor(1, "batch")
        self._ahead: Future[ComputedBatch | None] | None = None  # the next batch, if it was begun
        self._state_measured_s = -STATUS_EVERY_S

    # Starting

    @classmethod
    def start(
        cls,
        plan: PipelinePlan,
        log: Log,
        spark: SparkSession,
        state: Path,
        *,
        shards: int | None = None,
        local: Path | None = None,
        batch_target_s: float = DEFAULT_TARGET_S,
        width: str = "auto",
        accept_edits: Collection[str] = (),
    ) -> Self:
        """Take over a pipeline, and return its runner. `accept_edits` are outputs that go on under
        an edited definition. The steps:

        1. Check the plan against the state directory, create missing topics, and check that the
           inputs and the stored state fit. Until here, an older runner is not disturbed.
        2. Take the next epoch of the ledger, which fences older runners.
        3. Store the ids of the state directory and of the inputs; on a first run, tick 0.
        4. Open the views, and fence them with the epoch.
        5. Arrange the outputs into queries, store the arrangement, and begin to rebuild the views
           that are built from the beginning.
        """
        declared, plan = plan, known_names(plan, log)  # 1
        log_former_steps(declared, plan)
        plan.check_kernels()
        check_code_can_be_sent(plan)
        state = state.absolute()
        home = StateDirectory.find(log, plan.name, state)
        state.mkdir(parents=True, exist_ok=True)
        create_topics(log, plan)
        topics = input_topics(plan)
        inputs = InputTopics.find(log, plan.name, topics)
        check_fits(plan, log, state, accept_edits)
        ledger = Ledger.open(log, plan.name)  # 2
        ledger.take_over()
        inputs.remember(ledger)  # 3
        home.remember(ledger)
        journal = TickJournal.open(log, plan.name)
        if journal.last is None:
            starts = {topic: log.start_offsets(topic) for topic in topics}
            _record(ledger, journal, [first_tick(starts)])
        views = _open_views(plan, state, ledger.epoch)  # 4
        cores = int(spark.conf.get("spark.sql.shuffle.partitions", "2") or 2)
        context = RunContext(
            log=log,
            spark=spark,
            state=state,
            local=home.local(spark, local),
            cores=cores,
            shards=shards or remembered_shards(log, plan.name) or cores,
            ledger=ledger,
            journal=journal,
            views=views,
            batch_target_s=batch_target_s,
            width=width,
        )
        return cls(plan, context, inputs, _arrange_queries(plan, context, accept_edits))  # 5

    # State of the run

    @property
    def topics(self) -> list[str]:
        """The topics of the pipeline's inputs."""
        return input_topics(self.plan)

    @property
    def shards(self) -> int:
        return self.context.shards

    @shards.setter
    def shards(self, shards: int) -> None:
        self.context.shards = shards

    @property
    def leading(self) -> Query:
        """The query that is furthest ahead; the others follow it."""
        return self.queries[0]

    @property
    def has_begun(self) -> bool:
        return self.leading.has_begun

    @property
    def tick(self) -> int:
        """The last tick that is in all outputs."""
        return min(query.tick for query in self.queries)

    @property
    def batches(self) -> int:
        return sum(query.batches for query in self.queries)

    @property
    def last_result(self) -> BatchResult | None:
        return self.leading.last_result

    @property
    def watermark_state(self) -> WatermarkState:
        return self.leading.watermark_state

    def _newest_tick(self) -> int:
        return self.journal.last.number if self.journal.last else 0

    # Cutting ticks

    def cut(
        self,
        *,
        forced: bool = False,
        max_rows: int = MAX_ROWS_A_TICK,
        after: ComputedBatch | None = None,
    ) -> int:
        """Record the ticks that are due: for new rows, or because the passing of time lets a step
        emit something. `after` is the leading query's last batch, if it is not committed yet.
        Returns how many.
        """
        self._cut_s = time.monotonic()
        self.ledger.settle()
        last, now_us = self.journal.last, self.now_us()
        assert last is not None
        if after is not None:
            is_due = (
                after.entry.tick == last.number
                and self.leading.waits_for(now_us, after) is not None
            )
        else:
            is_due = any(
                query.tick == last.number and query.waits_for(now_us) for query in self.queries
            )
        ticks = next_ticks(
            self.log,
            self.topics,
            last,
            now_us,
            max_rows=max_rows,
            forced=forced or is_due,
            likely_row_bytes=self.leading.width.row_bytes,
        )
        if ticks:
            self._inputs.check(
                topic for topic, ends in ticks[-1].ends.items() if ends != last.ends.get(topic)
            )
            committed = self.journal.at(self.tick) or last
            shed_ticks = mark_shed_topics(ticks, committed, self._shed_policies)
            _record(self.ledger, self.journal, shed_ticks)
            for tick in ticks if self._looked_us else ():
                self.context.looked_us[tick.number] = self._looked_us
        self._looked_us = now_us
        return len(ticks)

    def end_event_time(self) -> int:
        """Record the final tick, with which event time ends, unless it has ended: all that waits
        for a watermark is emitted in that tick. It is recorded like any other, so that a restart
        and a replay end at the same point. Returns the number of the final tick, or of the last one
        if event time has ended already.
        """
        self.discard_ahead()
        self.ledger.settle()
        last = self.journal.last
        assert last is not None
        if not last.is_ended:
            last = final_tick(last, self.now_us())
            _record(self.ledger, self.journal, [last])
        self._ends_event_time = False
        return last.number

    # Batches

    def step_ahead(self, max_ticks: int = MAX_TICKS_A_BATCH) -> bool:
        """Run one batch, and begin the next one while this one is committed. Returns whether there
        was one.

        1. Wait for the batch that was begun, or compute one.
        2. Cut the ticks that are due by now, and begin the batch after it in another thread.
        3. Commit the batch. If that fails, the one that was begun never happened.

        Only one query can run ahead: several are merged at ticks that both have committed.
        """
        if len(self.queries) > 1:
            self.discard_ahead()
            return self.step(max_ticks)
        begun_s = time.time()
        self.leading.dead_letters_emitted_elsewhere = frozenset()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            batch = ahead.result()  # 1
        else:
            self.ledger.settle()
            batch = self.leading.compute(self._newest_tick(), max_ticks)
        if batch is None:
            return False
        try:
            if time.monotonic() - self._cut_s >= TICK_EVERY_S:
                self.cut(after=batch)  # 2
            if batch.entry.tick < self._newest_tick():
                self._begin(batch, max_ticks)
            self.leading.commit(batch)  # 3
        except BaseException:
            self.discard_ahead()
            raise
        self._sweep_watermarks(begun_s)
        return True

    def _begin(self, after: ComputedBatch, max_ticks: int) -> None:
        """Begin the batch after one that is not yet committed."""
        self._ahead = self._thread.submit(
            self.leading.compute, self._newest_tick(), max_ticks, after=after
        )

    def discard_ahead(self) -> None:
        """Wait for the batch that was begun ahead, if there is one, and forget it."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        try:
            batch = ahead.result()
        except Exception as error:
            logger.debug("A batch that was begun ahead failed.", exc_info=error)
            return
        if batch is not None:
            self.leading.discard(batch)

    def step(self, max_ticks: int = MAX_TICKS_A_BATCH) -> bool:
        """Run one batch of each query that has ticks to do. Returns whether one had."""
        self.ledger.settle()
        begun_s = time.time()
        ahead: set[str] = set()
        for query in self.queries:
            query.dead_letters_emitted_elsewhere = frozenset(ahead)
            ahead |= query.steps.keys()
        worked = self.leading.step(self._newest_tick(), max_ticks)
        for query in self.queries[1:]:
            worked |= query.step(self.leading.tick, max_ticks)
        self._merge_queries()
        if worked:
            self._sweep_watermarks(begun_s)
        return worked

    def _sweep_watermarks(self, begun_s: float) -> None:
        sweep_watermarks(
            self.context.watermark_directory,
            {query.entry.watermarks or "" for query in self.queries},
            begun_s=begun_s,
        )

    def _merge_queries(self) -> None:
        """Merge queries that have caught up into the leading one: both are at the same tick, so
        their states fit together.
        """
        for query in self.queries[1:]:
            leading = self.leading
            if query.tick != leading.tick or query.tick < max(query.rebuild_to, leading.rebuild_to):
                continue
            if (leading.continued & query.steps.keys()) | (query.continued & leading.steps.keys()):
                continue  # they have different states for one step, and stay apart
            outputs = [output.name for output in (*leading.plan.outputs, *query.plan.outputs)]
            plan = sub_plan(self.plan, outputs)
            others = [other for other in self.queries if other not in (leading, query)]
            arrangement = arrangement_of([leading, *others])
            continued = leading.continued | query.continued
            arrangement.queries[leading.name] = arrange_query(plan, continued=continued)
            entry = self._merge_entries(leading, query)
            tx = self.ledger.transaction()
            self.ledger.add(tx, entry)
            tx.set_note(note_name(self.plan.name), arrangement.to_json())
            self.ledger.commit(tx)
            merged = Query(leading.name, plan, self.context, continued=continued)
            merged.last_result = leading.last_result
            merged.batches = leading.batches + query.batches
            self.queries = [merged, *others]

    def _merge_entries(self, leading: Query, query: Query) -> LedgerEntry:
        """One ledger entry for two queries: of each only what it computes itself."""
        first, second = leading.own(leading.entry), query.own(query.entry)
        watermarks = WatermarkState(
            {**query.own_watermarks, **leading.own_watermarks},
            merged={**query.watermark_state.merged, **leading.watermark_state.merged},
        )
        watermark_id = None
        if watermarks.inputs:
            watermark_id = write_watermarks(self.context.watermark_directory, watermarks)
        return replace(
            first,
            epoch=self.ledger.epoch,
            states={**second.states, **first.states},
            watermarks=watermark_id,
            due_us={**second.due_us, **first.due_us},
            counts={**second.counts, **first.counts},
        )

    # Running

    def run(
        self,
        *,
        until_caught_up: bool = False,
        final: bool = False,
        stop: Event | None = None,
        between: Callable[[], bool] | None = None,
    ) -> None:
        """Run batches until `stop` is set or, with `until_caught_up`, until everything that was
        there at the start has been taken in; with `final` event time ends then, and what waits for
        it is emitted. SparkLost if Spark has ended.

        `between` is called between batches. It returns whether more rows will come from the
        services that it looks after: then the run has not caught up.
        """
        stop = stop or Event()
        target: int | None = None
        self.write_status()
        while not stop.is_set():
            started_s = time.monotonic()
            more_will_come = between is not None and between()
            worked = self._try_batch(stop)
            if until_caught_up and not more_will_come and self.last_error is None:
                target = target if target is not None else self._newest_tick()
                if self.tick >= target:
                    if self.waits_for_answers():
                        target = None
                        continue
                    if not final:
                        return
                    final, target, self._ends_event_time = False, None, True
                    continue
            if started_s - self._status_written_s > STATUS_EVERY_S:
                self.write_status()
                self._check_newest()
                self.check_spark()
            if not (worked and self.tick < self._newest_tick()):
                stop.wait(max(0.0, TICK_EVERY_S - (time.monotonic() - started_s)))

    def _try_batch(self, stop: Event) -> bool:
        """Cut ticks and run a batch. A failure is tried again after a pause that grows, unless
        another runner has taken over or the failure is permanent. Returns whether there was a
        batch.
        """
        try:
            if self._ends_event_time:
                self.end_event_time()
            elif self._ahead is None:
                self.cut()
            worked = self.step_ahead()
        except RunnerFenced:
            raise
        except Exception as error:
            # While stopping, the batch was interrupted: what is not in the ledger never happened.
            if not stop.is_set():
                self._handle_failure(error, stop)
            return False
        if worked or self.last_error is not None:
            self.failures = 0
            self.last_error = None
            self.write_status()
        return worked

    def _handle_failure(self, error: Exception, stop: Event) -> None:
        self.failures += 1
        self.last_error = failure_reason(error)
        logger.debug("A batch of %s failed.", self.plan.name, exc_info=error)
        self.check_spark(error)
        if self.failures > MAX_FAILURES or is_permanent(error):
            raise error
        pause_s = BACKOFF.pause_s(self.failures)
        logger.warning(
            "A batch of %s failed (%d in a row): %s\nTrying again in %.0f s.",
            self.plan.name,
            self.failures,
            self.last_error,
            pause_s,
        )
        self.write_status()
        stop.wait(pause_s)

    def _check_newest(self) -> None:
        """Raise RunnerFenced if another runner has taken over, even if there is nothing to
        commit.
        """
        try:
            self.ledger.check_newest()
        except RunnerFenced:
            raise
        except HeadraceError as error:  # the log cannot be reached: the next batch will report it
            logger.debug(
                "Whether %s has a newer runner is not known.", self.plan.name, exc_info=error
            )

    def check_spark(self, error: Exception | None = None) -> None:
        """Raise SparkLost if Spark has ended: no batch can succeed any more. `error` is what was
        seen of it.
        """
        from headrace.log.spark.session import has_ended

        if has_ended(self.spark):
            self.last_error = "SparkLost: Spark has ended."
            self.write_status()
            raise SparkLost(
                f"Spark has ended while {self.plan.name} was running.",
                fix=(
                    "start the run again: it goes on at the last committed tick. If it happens"
                    " again, look for what ended Spark's JVM, such as a lack of memory."
                ),
            ) from error

    # Status

    def status(self) -> Status:
        """The present status, as `headrace status` shows it."""
        leading, newest, tick = self.leading, self.journal.last, self.journal.at(self.tick)
        assert newest is not None
        assert tick is not None
        ends = self.log.snapshot(self.topics)
        return Status(
            pipeline=self.plan.name,
            process=os.getpid(),
            epoch=self.ledger.epoch,
            shards=self.shards,
            started=self.started,
            updated=time.time(),
            tick=tick.number,
            newest_tick=newest.number,
            batch_seconds=leading.batch_seconds,
            batch_width=leading.width.last,
            width=leading.width.reason,
            batch_rows=leading.batch_rows,
            rows_per_second=leading.rows_per_second,
            rows_behind=rows_between(tick.ends, ends),
            state_bytes=self.state_bytes(),
            batches=self.batches,
            failures=self.failures,
            last_error=self.last_error,
            counts={
                name: count
                for name, count in leading.entry.counts.items()
                if not name.endswith((STATE_KEYS, STATE_BYTES))
            },
            steps={
                step: size
                for query in reversed(self.queries)
                for step, size in query.state_sizes.items()
            },
            ingests=self.ingests(),
            calls=self.call_status(),
            queries={query.name: query.status(ends) for query in self.queries},
            watermarks=leading.watermark_status(),
            views={
                name: freshness
                for query in self.queries
                for name, freshness in query.view_status().items()
            },
            host=socket.gethostname(),
            process_began=process_start_ticks(os.getpid()),
            local=str(self.local),
        )

    def write_status(self) -> None:
        """Write the status file, and call `on_status`. A failure, as without the log, is no reason
        to stop.
        """
        self._status_written_s = time.monotonic()
        try:
            status = self.status()
            write_status(self.state, status)
        except (HeadraceError, OSError) as error:
            logger.debug("The status of %s was not written.", self.plan.name, exc_info=error)
            return
        self.on_status(status)

    def state_bytes(self) -> int:
        """The size of all state files, measured every few seconds."""
        if time.monotonic() > self._state_measured_s + STATUS_EVERY_S:
            self._state_measured_s = time.monotonic()
            paths = (self.state / "steps").glob("*/*.state")
            self.context.state_bytes = sum(path.stat().st_size for path in paths)
        return self.context.state_bytes

    def close(self) -> None:
        self.discard_ahead()
        self._thread.shutdown()
        if self.views is not None:
            self.views.close()


def input_topics(plan: PipelinePlan) -> list[str]:
    """The topics that a plan reads, sorted."""
    return sorted({step.topic for step in plan.inputs})


def _record(ledger: Ledger, journal: TickJournal, ticks: Sequence[Tick]) -> None:
    tx = ledger.transaction()
    journal.record(tx, ticks)
    journal.note_commit(ticks, ledger.commit(tx))


def _open_views(plan: PipelinePlan, state: Path, epoch: int) -> ViewStore | None:
    outputs = [output for output in plan.outputs if isinstance(output, ViewOutput)]
    if not outputs:
        return None
    store = ViewStore.open(state / VIEWS_FILE)
    for output in outputs:
        store.declare(
            output.name, output.input.schema, view_key(output), max_changes=output.keep_changes
        )
    store.fence(epoch)
    return store


def _arrange_queries(
    plan: PipelinePlan, context: RunContext, accepted: Collection[str]
) -> list[Query]:
    """The queries of a run, the one that is furthest ahead first."""
    ledger, views = context.ledger, context.views
    view_tick = views.reader.written_tick if views is not None else None
    arrangement = arrange(plan, context.log, ledger, context.journal, view_tick, accepted)
    for name, tick in arrangement.accepted.items():
        logger.warning(
            "The output %s goes on with its new definition: its rows up to tick %d follow the old"
            " one.",
            name,
            tick,
        )
    text = arrangement.to_json()
    if text != context.log.note(note_name(plan.name)):
        tx = ledger.transaction()
        tx.set_note(note_name(plan.name), text)
        ledger.commit(tx)
    queries = [
        Query(
            name,
            sub_plan(plan, query.outputs),
            context,
            query.dead_letters_emitted_to,
            query.rebuild_to,
            query.continued,
        )
        for name, query in arrangement.queries.items()
    ]
    if views is not None:
        new_views = [
            output.name
            for query in queries
            if not query.has_begun
            for output in query.plan.outputs
            if isinstance(output, ViewOutput)
        ]
        has_committed = any(query.has_begun for query in queries) or ledger.last(MAIN_QUERY)
        newest = context.journal.last if has_committed else None
        rebuilt = views.rebuild(new_views, ledger.epoch, newest.number if newest else None)
        for name in rebuilt:
            logger.warning(
                "The view %s is built again from the first tick on. Readers see its old rows until"
                " it is complete.",
                name,
            )
    return sorted(queries, key=lambda query: (-query.tick, query.name != MAIN_QUERY))


def mark_shed_topics(
    ticks: Sequence[Tick], committed: Tick, policies: Mapping[str, ShedPolicy]
) -> list[Tick]:
    """The ticks, with the topics that are shed in each: those of which more rows wait since the
    `committed` tick than their policy allows.
    """
    if not policies:
        return list(ticks)

    def waiting_rows(tick: Tick, topic: str) -> int:
        before = {topic: committed.ends.get(topic, {})}
        return rows_between(before, {topic: tick.ends.get(topic, {})})

    return [
        replace(
            tick,
            shed=frozenset(
                topic
                for topic, policy in policies.items()
                if waiting_rows(tick, topic) > policy.behind
            ),
        )
        for tick in ticks
    ]


# Between batches


RETAINED_ENTRIES = 10
LOOK_EVERY_S = 2.0


class Maintenance:
    """What a run does between batches, a little at a time: sweep state that nothing refers to, and
    adopt another number of shards. With `fixed_shards`, the number was given to the run and stays.
    """

    def __init__(self, runner: Runner, *, fixed_shards: bool = False) -> None:
        self.runner = runner
        self.fixed_shards = fixed_shards
        self.sweeper = Sweeper(
            state=runner.state,
            local=runner.local,
            roots=self._retained_states,
            shards=lambda: {1, runner.shards},
            queries=lambda: {query.name for query in runner.queries},
        )
        self._next_look_s = 0.0

    def step(self) -> None:
        """Do what is due. A failure is no reason to stop: if it is serious, the next batch reports
        it.
        """
        try:
            self._adopt_shards()
            self.sweeper.work()
        except (HeadraceError, OSError) as error:
            logger.warning("The maintenance of %s was put off: %s", self.runner.plan.name, error)
            self.sweeper.postpone()

    def _adopt_shards(self) -> None:
        now_s = time.monotonic()
        if self.fixed_shards or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        chosen = remembered_shards(self.runner.log, self.runner.plan.name)
        if chosen is not None and chosen != self.runner.shards:
            logger.info(
                "%s goes on with %d shards instead of %d.",
                self.runner.plan.name,
                chosen,
                self.runner.shards,
            )
            self.runner.shards = chosen

    def _retained_states(self) -> dict[str, list[StateIds]]:
        """The states that must stay: of the newest ledger entry of every query, and of the entries
        just before.
        """
        ledger = self.runner.ledger
        ledger.check_newest()
        entries = [query.entry for query in self.runner.queries]
        states: dict[str, list[StateIds]] = {}
        for entry in [*entries, *ledger.recent(RETAINED_ENTRIES)]:
            for step, ids in entry.states.items():
                states.setdefault(step, []).append(dict(ids))
        return states
