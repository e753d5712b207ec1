"""The runner: cuts ticks, runs batches, commits them, until it is told to stop.

It alone writes a pipeline's ticks and ledger. It holds nothing that is not in the log or the state
directory: killed at any moment, the next one goes on at the ledger's tick.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from headrace.engine.context import BatchResult
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry, RunnerFenced
from headrace.engine.state.files import StateIds
from headrace.engine.state.sweeper import Sweeper
from headrace.engine.ticks import (
    MAX_ROWS_A_TICK,
    Tick,
    TickJournal,
    beginning,
    next_ticks,
    rows_between,
)
from headrace.engine.watermarks import WatermarkState, sweep_watermarks, write_watermarks
from headrace.errors import HeadraceError
from headrace.log.api import Log
from headrace.operators.load_shedding import Shed
from headrace.plan.plan import PipelinePlan, ViewOutput
from headrace.retry import Backoff
from headrace.runtime.arrangement import (
    Arrangement,
    arranged,
    arrangement_of,
    check_fits,
    known_names,
    note_name,
    plan_query,
    remembered_shards,
    view_key,
)
from headrace.runtime.inputs import Sources, make_topics
from headrace.runtime.query import (
    DEFAULT_TARGET_S,
    MAX_TICKS_A_BATCH,
    Query,
    RunContext,
    is_lasting,
    query_status,
    reason,
    sub_plan,
    watermark_status,
)
from headrace.runtime.state_directory import StateDirectory
from headrace.runtime.status import Status, process_start_ticks, write_status
from headrace.views.file import VIEWS_FILE
from headrace.views.store import ViewStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# What a runner tells of itself: a small file in its state directory, written after each batch and
# every few seconds. `headrace status` shows it.


def status_of(runner: Runner) -> Status:
    leading = runner.leading
    newest, now = runner.journal.last, runner.journal.at(runner.tick)
    assert newest is not None
    assert now is not None
    ends = runner.log.snapshot(runner.topics)
    return Status(
        pipeline=runner.plan.name,
        process=os.getpid(),
        epoch=runner.ledger.epoch,
        shards=runner.shards,
        started=runner.started,
        updated=time.time(),
        tick=now.number,
        newest_tick=newest.number,
        batch_seconds=leading.batch_seconds,
        batch_rows=leading.batch_rows,
        rows_per_second=leading.rows_per_second,
        rows_behind=rows_between(now.ends, ends),
        state_bytes=runner.state_bytes(),
        batches=runner.batches,
        failures=runner.failures,
        last_error=runner.last_error,
        counts=dict(leading.entry.counts),
        ingests=runner.ingests(),
        queries={query.name: query_status(query, ends) for query in runner.queries},
        watermarks=watermark_status(leading),
        host=socket.gethostname(),
        process_began=process_start_ticks(os.getpid()),
        local=str(runner.local),
    )


# `shed=hr.shed(…)` of a topic, as users write it, checked.


def decided(ticks: Sequence[Tick], done: Tick, sheds: Mapping[str, Shed]) -> list[Tick]:
    """Ticks with the topics that are shed in them: those of which more rows wait than may. `done`:
    the last one that was committed.
    """

    def waits(tick: Tick, topic: str) -> int:
        return rows_between({topic: done.ends.get(topic, {})}, {topic: tick.ends.get(topic, {})})

    return (
        [
            replace(
                tick,
                shed=frozenset(
                    topic for topic, wanted in sheds.items() if waits(tick, topic) > wanted.behind
                ),
            )
            for tick in ticks
        ]
        if sheds
        else list(ticks)
    )


logger = logging.getLogger("headrace.pipeline")
TICK_EVERY_S = 0.2
BACKOFF = Backoff(first_s=2.0, longest_s=60.0, jitter=0.0)
MAX_FAILURES = 20
TELL_EVERY_S = 5.0


class Runner:
    """One run of a pipeline. `step()` does one batch; `run()` goes on until stopped."""

    def __init__(
        self,
        plan: PipelinePlan,
        log: Log,
        spark: SparkSession,
        state: Path,
        *,
        shards: int | None = None,
        local: Path | None = None,
        batch_target_s: float = DEFAULT_TARGET_S,
    ) -> None:
        plan = known_names(plan, log)
        plan.check_kernels()
        self.plan, self.log, self.spark, self.state = plan, log, spark, state.absolute()
        home = StateDirectory(log, plan.name, self.state)
        self.local = home.local(spark, local)
        self.cores = int(spark.conf.get("spark.sql.shuffle.partitions", "2") or 2)
        self.shards = shards or remembered_shards(log, plan.name) or self.cores
        self.state.mkdir(parents=True, exist_ok=True)
        make_topics(log, plan)
        self._sources = Sources(log, plan.name, self.topics)
        check_fits(plan, log, self.state)  # before an older runner is told to stop
        self.ledger = Ledger(log, plan.name)
        self.ledger.take_over()
        self._sources.remember(self.ledger)
        home.remember(self.ledger)
        self.journal = TickJournal(log, plan.name)  # now nobody else can add to it
        self._begin()
        self.views = self._open_views()
        self._workshop = RunContext(
            log,
            spark,
            self.state,
            self.local,
            self.cores,
            self.shards,
            self.ledger,
            self.journal,
            self.views,
            batch_target_s,
        )
        self.queries = self._arranged()
        self.started, self.failures = time.time(), 0
        self.last_error: str | None = None
        self.on_status: Callable[[Status], None] = lambda _status: None
        self.ingests: Callable[[], dict[str, str]] = dict
        """How the streams that are brought in are doing, for the status."""
        self.now_us: Callable[[], int] = lambda: time.time_ns() // 1000
        """The time that the next tick gets. Tests let it pass as they like."""
        self._told_s, self._sized = 0.0, (-TELL_EVERY_S, 0)  # when, bytes

    # Beginning

    def _open_views(self) -> ViewStore | None:
        outputs = [each for each in self.plan.outputs if isinstance(each, ViewOutput)]
        if not outputs:
            return None
        store = ViewStore(self.state / VIEWS_FILE)
        for output in outputs:
            store.declare(
                output.name, output.input.schema, view_key(output), max_changes=output.keep_changes
            )
        store.fence(self.ledger.epoch)
        return store

    def _arranged(self) -> list[Query]:
        """The queries, the one that is furthest first."""
        known = self.views.reader.tick if self.views is not None else None
        arrangement = arranged(self.plan, self.log, self.ledger, self.journal, known)
        self._store(arrangement)
        queries = [
            Query(name, sub_plan(self.plan, each.outputs), self._workshop, each.told, each.again)
            for name, each in arrangement.queries.items()
        ]
        if self.views is not None:
            new = [
                output.name
                for query in queries
                if not query.has_begun
                for output in query.plan.outputs
                if isinstance(output, ViewOutput)
            ]
            self.views.empty(new, self.ledger.epoch)
        return sorted(queries, key=lambda query: (-query.tick, query.name != MAIN_QUERY))

    def _store(self, arrangement: Arrangement) -> None:
        text = arrangement.to_json()
        if text != self.log.note(note_name(self.plan.name)):
            tx = self.ledger.transaction()
            tx.set_note(note_name(self.plan.name), text)
            self.ledger.commit(tx)

    def _begin(self) -> None:
        """Tick 0 says where each input began when the pipeline was first run."""
        if self.journal.last is None:
            self._record(
                [beginning({topic: self.log.start_offsets(topic) for topic in self.topics})]
            )

    @property
    def topics(self) -> list[str]:
        return sorted({step.topic for step in self.plan.inputs})

    def _record(self, ticks: Sequence[Tick]) -> None:
        tx = self.ledger.transaction()
        self.journal.record(tx, ticks)
        self.journal.took(ticks, self.ledger.commit(tx))

    # Going on

    @property
    def leading(self) -> Query:
        """The query that is furthest; the others follow it."""
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

    def cut(self, *, forced: bool = False, max_rows: int = MAX_ROWS_A_TICK) -> int:
        """Record the ticks that are due: for new rows, or because time itself has something to
        tell. Returns how many.
        """
        self.ledger.settle()
        last, now_us = self.journal.last, self.now_us()
        assert last is not None
        ticks = next_ticks(
            self.log,
            self.topics,
            last,
            now_us,
            max_rows=max_rows,
            forced=forced or self._time_must_move(last, now_us),
        )
        if ticks:
            self._sources.check(
                topic for topic, ends in ticks[-1].ends.items() if ends != last.ends.get(topic)
            )
            self._record(decided(ticks, self.journal.at(self.tick) or last, self._sheds))
        return len(ticks)

    @cached_property
    def _sheds(self) -> dict[str, Shed]:
        return {step.topic: step.shed for step in self.plan.inputs if step.shed is not None}

    def _time_must_move(self, last: Tick, now_us: int) -> bool:
        return any(query.tick == last.number and query.waits_for(now_us) for query in self.queries)

    def step(self, max_ticks: int = MAX_TICKS_A_BATCH) -> bool:
        """One batch of each query that has ticks to do. Returns whether one had."""
        self.ledger.settle()
        begun_s = time.time()
        self._workshop.shards = self.shards
        for number, query in enumerate(self.queries):
            query.told_elsewhere = frozenset(
                step for further in self.queries[:number] for step in further.steps
            )
        worked = self.leading.step(self._newest(), max_ticks)
        for query in self.queries[1:]:
            worked |= query.step(self.leading.tick, max_ticks)
        if len(self.queries) > 1:
            self._join_up()
        if worked:
            sweep_watermarks(
                self._workshop.watermark_directory,
                {query.entry.watermarks or "" for query in self.queries},
                begun_s=begun_s,
            )
        return worked

    def _join_up(self) -> None:
        """A query that has caught up becomes part of the leading one: they have the same tick, so
        the states of both fit together.
        """
        for query in [
            query
            for query in self.queries[1:]
            if query.tick == self.leading.tick >= max(query.again, self.leading.again)
        ]:
            leading = self.leading
            outputs = [output.name for output in (*leading.plan.outputs, *query.plan.outputs)]
            entry = self._both(leading, query)
            rest = [each for each in self.queries if each not in (leading, query)]
            tx = self.ledger.transaction()
            self.ledger.add(tx, entry)
            arrangement = arrangement_of([leading, *rest])
            arrangement.queries[leading.name] = plan_query(sub_plan(self.plan, outputs))
            tx.set_note(note_name(self.plan.name), arrangement.to_json())
            self.ledger.commit(tx)
            joined = Query(leading.name, sub_plan(self.plan, outputs), self._workshop)
            joined.last_result, joined.batches = (
                leading.last_result,
                leading.batches + query.batches,
            )
            self.queries = [joined, *rest]

    def _both(self, leading: Query, query: Query) -> LedgerEntry:
        """The entry of two queries as one: of each only what it computes itself, clocks
        included.
        """
        mine, theirs = leading.own(leading.entry), query.own(query.entry)
        watermarks = WatermarkState({**query.own_watermarks, **leading.own_watermarks})
        return replace(
            mine,
            epoch=self.ledger.epoch,
            states={**theirs.states, **mine.states},
            watermarks=write_watermarks(self._workshop.watermark_directory, watermarks)
            if watermarks.inputs
            else None,
            due_us={**theirs.due_us, **mine.due_us},
            counts={**theirs.counts, **mine.counts},
        )

    def run(
        self,
        *,
        until_caught_up: bool = False,
        stop: Event | None = None,
        between: Callable[[], bool] | None = None,
    ) -> None:
        """Batches until `stop` is set, or until everything that was there at the start has been
        taken in.

        `between` is called between batches. It says whether more rows will come of what it looks
        after: then it is too early to end.
        """
        stopped = stop or Event()
        target: int | None = None
        self.tell()
        while not stopped.is_set():
            started = time.monotonic()
            more = between is not None and between()
            worked = self._try_batch(stopped)
            if until_caught_up and not more and self.last_error is None:
                target = target if target is not None else self._newest()
                if self.tick >= target:
                    return
            if started - self._told_s > TELL_EVERY_S:
                self.tell()
                self._look_for_newer()
            stopped.wait(
                0
                if worked and self.tick < self._newest()
                else max(0.0, TICK_EVERY_S - (time.monotonic() - started))
            )

    def _look_for_newer(self) -> None:
        """RunnerFenced if another runner has taken over, though there is nothing to commit here."""
        try:
            self.ledger.check_newest()
        except RunnerFenced:
            raise
        except HeadraceError as error:  # the log is away: the next batch will tell
            logger.debug(
                "Whether %s has a newer runner is not known.", self.plan.name, exc_info=error
            )

    def _newest(self) -> int:
        return self.journal.last.number if self.journal.last else 0

    def _try_batch(self, stopped: Event) -> bool:
        """A batch that fails is tried again, after a while that grows; one that has lost the
        pipeline to another runner, or cannot do better, is not.
        """
        try:
            self.cut()
            worked = self.step()
        except RunnerFenced:
            raise
        except Exception as error:
            if (
                not stopped.is_set()
            ):  # else the batch was given up: whatever is not in the ledger never happened
                self._failed(error, stopped)
            return False
        if worked or self.last_error is not None:
            self.failures, self.last_error = 0, None
            self.tell()
        return worked

    def _failed(self, error: Exception, stopped: Event) -> None:
        self.failures += 1
        self.last_error = reason(error)
        pause_s = BACKOFF.pause_s(self.failures)
        logger.debug("A batch of %s failed.", self.plan.name, exc_info=error)
        if self.failures > MAX_FAILURES or is_lasting(error):
            raise error
        logger.warning(
            "A batch of %s failed (%d in a row): %s\nTrying again in %.0f s.",
            self.plan.name,
            self.failures,
            self.last_error,
            pause_s,
        )
        self.tell()
        stopped.wait(pause_s)

    def tell(self) -> None:
        """Leave word of how it goes, for `headrace status` and whoever watches. If that fails, as
        it does without the log, it is no reason to stop.
        """
        self._told_s = time.monotonic()
        try:
            status = status_of(self)
            write_status(self.state, status)
        except (HeadraceError, OSError) as error:
            logger.debug("The status of %s was not told.", self.plan.name, exc_info=error)
            return
        self.on_status(status)

    def state_bytes(self) -> int:
        """The size of all state files; looked up now and then."""
        if time.monotonic() > self._sized[0] + TELL_EVERY_S:
            self._sized = (
                time.monotonic(),
                sum(path.stat().st_size for path in (self.state / "steps").glob("*/*.state")),
            )
        return self._sized[1]

    def close(self) -> None:
        if self.views is not None:
            self.views.close()


# What a run does beside its batches, seldom and a little at a time: it sweeps state that nobody
# needs any more, and notices when another number of shards was chosen.

ENTRIES_KEPT = 10
LOOK_EVERY_S = 2.0


class Maintenance:
    """Of one runner. `fixed_shards`: the run was told how many shards to have, and stays with
    that.
    """

    def __init__(self, runner: Runner, *, fixed_shards: bool = False) -> None:
        self.runner, self.fixed_shards = runner, fixed_shards
        self.sweeper = Sweeper(
            runner.state,
            runner.local,
            self._roots,
            lambda: runner.shards,
            lambda: {query.name for query in runner.queries},
        )
        self._next_look_s = 0.0

    def attend(self) -> None:
        """Called between batches."""
        try:
            self._notice_shards()
            self.sweeper.work()
        except (
            HeadraceError,
            OSError,
        ) as error:  # no reason to stop: if it is one, the next batch will tell
            logger.warning("The upkeep of %s was put off: %s", self.runner.plan.name, error)
            self.sweeper.postpone()

    def _notice_shards(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        chosen = (
            None if self.fixed_shards else remembered_shards(self.runner.log, self.runner.plan.name)
        )
        if chosen is not None and chosen != self.runner.shards:
            logger.info(
                "%s goes on with %d shards instead of %d.",
                self.runner.plan.name,
                chosen,
                self.runner.shards,
            )
            self.runner.shards = chosen

    def _roots(self) -> dict[str, list[StateIds]]:
        """What must stay: the states of the newest entry of every query, and of the entries just
        before.
        """
        ledger = self.runner.ledger
        ledger.check_newest()
        found: dict[str, list[StateIds]] = {}
        for entry in [
            *(query.entry for query in self.runner.queries),
            *ledger.recent(ENTRIES_KEPT),
        ]:
            for step, ids in entry.states.items():
                found.setdefault(step, []).append(dict(ids))
        return found
