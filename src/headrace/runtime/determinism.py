"""Checks that a pipeline's functions are deterministic: some recorded ticks are computed twice, cut
into batches differently, and the outputs are compared row by row.

    ticks     the last recorded ones, or those from a tick on
    scratch   a log of its own in a temporary directory, with copies of the rows of these ticks
    first     one tick a batch, two shards, each batch whole in one task
    second    as many ticks a batch as there are, three shards, wide batches

Nothing is written to the pipeline's own log, state or views: it is read only. Both runs begin with
empty state, so what they compute need not be what the pipeline has computed; it must be the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.columnar.columns import OFFSET_COLUMN, PARTITION_COLUMN, TIMESTAMP_COLUMN
from headrace.engine.ticks import Ends, Tick, TickJournal
from headrace.errors import nearest
from headrace.log import open_log
from headrace.log.api import Log
from headrace.plan.function_steps import UserCodeStep
from headrace.plan.plan import Output, PipelinePlan, TopicOutput, topological_order
from headrace.plan.processor_steps import ProcessStep
from headrace.runtime.runner import Runner
from headrace.runtime.versions import RecordedTicks, ReplayRefused, start_version
from headrace.views.file import VIEWS_FILE
from headrace.views.reader import ViewReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_TICKS = 20
SECOND_RUN = "again"
_ALL = 1_000_000
Rows = dict[str, list[dict[str, Any]]]
"""The rows of an output: of a topic by partition, of a view under one name."""


@dataclass(frozen=True)
class OutputDifference:
    """The first row in which two runs of an output differ."""

    output: str
    where: str
    """Which row, as text."""
    first: dict[str, Any] | None
    second: dict[str, Any] | None
    suspects: tuple[str, ...]
    """The steps before the output that run users' code, with its names."""

    def __str__(self) -> str:
        if self.suspects:
            cause = f"Before it: {'; '.join(self.suspects)}."
        else:
            cause = "No function of yours is before it: please report this."
        return (
            f"{self.output!r} differs at {self.where}:\n"
            f"    first:  {_text(self.first)}\n    second: {_text(self.second)}\n  {cause}"
        )


@dataclass(frozen=True)
class DeterminismReport:
    """What was compared, and the first difference of each output that has one."""

    pipeline: str
    ticks: int
    input_rows: int
    output_rows: int
    differences: tuple[OutputDifference, ...]

    @property
    def is_deterministic(self) -> bool:
        return not self.differences


def verify_determinism(
    plan: PipelinePlan,
    log: Log,
    spark: SparkSession,
    *,
    ticks: int = DEFAULT_TICKS,
    since: int | str | None = None,
) -> DeterminismReport:
    """Compute some recorded ticks of a pipeline twice, and compare all outputs.

    Args:
        plan: The pipeline's plan.
        log: The log in which its ticks are recorded; it is only read.
        spark: A session.
        ticks: How many ticks.
        since: The first tick, by number or by time; by default the last ones are taken.

    Raises:
        ReplayRefused: The pipeline has no recorded ticks, or not from there.

    Example:
        report = verify_determinism(pipeline.plan(), log, hr.spark())
        assert report.is_deterministic, report.differences[0]

    """
    chosen = _choose(log, plan, ticks, since)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-determinism-") as directory,
        open_log(f"file:{Path(directory) / 'log'}") as scratch,
    ):
        home = Path(directory)
        _create_inputs(log, scratch, plan)
        first = Runner.start(plan, scratch, spark, home / "first", shards=2, width="one")
        try:
            copied = _copy_ticks(log, scratch, plan, chosen, first)
            while first.step(1):
                continue
        finally:
            first.close()
        again = start_version(scratch, plan, SECOND_RUN)
        second = Runner.start(again, scratch, spark, home / "second", shards=3, width="wide")
        try:
            while second.step(_ALL):
                continue
        finally:
            second.close()
        differences, rows = _compare(scratch, plan, again, home)
    return DeterminismReport(
        pipeline=plan.name,
        ticks=len(chosen) - 1,
        input_rows=copied,
        output_rows=rows,
        differences=tuple(differences),
    )


# The ticks, and their rows


def _choose(log: Log, plan: PipelinePlan, count: int, since: int | str | None) -> list[Tick]:
    """The ticks to compute, behind the one before them."""
    recorded = RecordedTicks(log, plan)
    journal = TickJournal.open(log, plan.name)
    if journal.last is None or journal.first is None or journal.last == journal.first:
        raise ReplayRefused(
            f"The pipeline {plan.name!r} has no ticks yet.", fix="run it first: headrace run."
        )
    if since is None:
        after = max(journal.first.number, journal.last.number - count)
    else:
        after = recorded.find_tick(since) - 1
    recorded.check_history(after)
    before = journal.at(after)
    assert before is not None
    return [before, *journal.between(after, min(after + count, journal.last.number))]


def _create_inputs(log: Log, scratch: Log, plan: PipelinePlan) -> None:
    """Create the inputs as they are in the pipeline's log: with its partitions, also where it is
    declared with others, and with the columns of captured tables.
    """
    known = log.topics()
    for step in plan.inputs:
        if step.topic not in known:
            raise ReplayRefused(
                f"There is no topic {step.topic!r}: {nearest(step.topic, known)}",
                fix="run the pipeline first.",
            )
        info = log.topic(step.topic)
        if step.topic in scratch.topics():
            continue
        if info.is_table:
            scratch.create_table(
                step.topic, schema=info.schema, key=info.key, partitions=info.partitions
            )
        else:
            scratch.create_topic(
                step.topic, schema=info.schema, key=info.key or None, partitions=info.partitions
            )


def _copy_ticks(
    log: Log, scratch: Log, plan: PipelinePlan, ticks: Sequence[Tick], runner: Runner
) -> int:
    """Append the rows of each tick to the scratch log and cut the tick there, at its recorded time.
    Returns how many rows were copied.
    """
    topics = sorted({step.topic for step in plan.inputs})
    copied = 0
    for before, tick in pairwise(ticks):
        for topic in topics:
            copied += _copy_rows(log, scratch, topic, before.ends, tick.ends)
        runner.now_us = lambda time_us=tick.time_us: time_us  # type: ignore[misc]
        runner.cut(forced=True, max_rows=2**62)
        if tick.is_ended:
            runner.end_event_time()
            break
    return copied


def _copy_rows(log: Log, scratch: Log, topic: str, before: Ends, after: Ends) -> int:
    copied = 0
    with scratch.producer(topic) as producer:
        for partition, end in sorted(after.get(topic, {}).items()):
            start = before.get(topic, {}).get(partition, 0)
            if end <= start:
                continue
            rows = log.read(topic, partition, start, end).to_table()
            rows = rows.drop_columns(
                [
                    name
                    for name in (PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)
                    if name in rows.column_names
                ]
            )
            if rows.num_rows:
                producer.append(rows, partition=partition)
                copied += rows.num_rows
    return copied


# Comparing


def _compare(
    scratch: Log, plan: PipelinePlan, again: PipelinePlan, home: Path
) -> tuple[list[OutputDifference], int]:
    differences, count = [], 0
    names = zip(_outputs(plan), _outputs(again), strict=True)
    for (name, output), (other, _) in names:
        if isinstance(output, TopicOutput) or output.name != name:
            first, second = _topic_rows(scratch, name), _topic_rows(scratch, other)
        else:
            first = _view_rows(home / "first", name)
            second = _view_rows(home / "second", other)
        count += sum(map(len, first.values()))
        found = _first_difference(name, output, first, second)
        if found is not None:
            differences.append(found)
    return differences, count


def _outputs(plan: PipelinePlan) -> Iterator[tuple[str, Output]]:
    """The outputs and side outputs of a plan by name, with the output that each belongs to."""
    seen = set()
    for output in plan.outputs:
        yield output.name, output
        for step in topological_order([output.input]):
            for side_output in step.side_outputs:
                if side_output.topic not in seen:
                    seen.add(side_output.topic)
                    yield side_output.topic, output


def _topic_rows(log: Log, topic: str) -> Rows:
    """The rows of a topic, by partition and in order."""
    return {
        f"partition {partition}": [
            {
                name: value
                for name, value in row.items()
                if name not in (PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN)
            }
            for row in log.read(topic, partition).to_pylist()
        ]
        for partition in range(log.topic(topic).partitions)
    }


def _view_rows(state: Path, view: str) -> Rows:
    """The rows of a view, sorted; and its changes, with the numbers of their ticks."""
    with ViewReader(state / VIEWS_FILE) as reader:
        rows = sorted(reader.table(view).to_pylist(), key=_text)
        changes = [
            {"tick": tick, **row}
            for tick, table in reader.changes_since(view, 0)
            for row in sorted(table.to_pylist(), key=_text)
        ]
    return {"row": rows, "change": changes}


def _first_difference(
    name: str, output: Output, first: Rows, second: Rows
) -> OutputDifference | None:
    for place, rows in first.items():
        for number, (one, other) in enumerate(zip_longest(rows, second[place])):
            if _text(one) != _text(other):  # by text, in which NaN is NaN
                return OutputDifference(
                    output=name,
                    where=f"{place}, row {number}"
                    if place.startswith("partition")
                    else f"{place} {number}",
                    first=one,
                    second=other,
                    suspects=tuple(_suspects(output)),
                )
    return None


def _suspects(output: Output) -> Iterator[str]:
    for step in topological_order([output.input]):
        if isinstance(step, UserCodeStep):
            yield f"step {step.name} calls {step.function_names}"
        elif isinstance(step, ProcessStep):
            yield f"step {step.name} runs the processor {step.processor!r}"


def _text(row: dict[str, Any] | None) -> str:
    return "no such row" if row is None else repr(row)
