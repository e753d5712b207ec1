"""`stream.preview(20)`: what a stream or table gives on the newest rows of its topics, without a
run of the pipeline. For notebooks, and for trying out functions.

    orders, 1,000,000 rows         the newest 10,000 are copied to a log in a temporary directory
    orders.where(…).window(…)      a pipeline of these steps alone runs there: one tick, then the
                                   end of event time, so that what waits for it is emitted too
    preview                        the last 20 rows of its output; of a table the first 20

Everything is the real thing but its place: nothing is written to the pipeline's own log, state or
views. Steps that Python computes run in this process (`testing.plain_spark`); if there is one that
only Spark computes, Spark is started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.columnar.columns import (
    CHANGE_TYPE,
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    TIMESTAMP_COLUMN,
)
from headrace.columnar.keys import as_array
from headrace.errors import FunctionFailed, InputError, NotSupported, nearest
from headrace.log import open_log
from headrace.log.api import Log
from headrace.pipeline.relation import Relation
from headrace.pipeline.view import html_table
from headrace.plan.answer_steps import AnswersStep
from headrace.plan.names import with_names
from headrace.plan.plan import (
    Output,
    PipelinePlan,
    Step,
    TopicOutput,
    TopicStep,
    ViewOutput,
    topological_order,
)
from headrace.runtime.inputs import create_captured_topics, create_topics
from headrace.runtime.run import address_of
from headrace.runtime.runner import Runner
from headrace.testing.plain_spark import PlainSpark
from headrace.views.file import VIEWS_FILE
from headrace.views.reader import ViewReader

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

ROWS_READ = 10_000
"""How many of the newest rows of each topic a preview is computed of."""
_OUTPUT = "preview"


@dataclass(frozen=True)
class Preview:
    """The rows of a preview, as `stream.preview()` returns them. A notebook shows them as a table.

    Attributes:
        rows: The rows, as an Arrow table.
        source: What they were computed of, in words.
        failures: Step and what became of its rows -> how many rows.
    """

    rows: pa.Table
    source: str
    failures: Mapping[str, int]

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self.rows

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a DataFrame of pandas."""
        frame: pd.DataFrame = self.rows.to_pandas()
        return frame

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as dictionaries."""
        rows: list[dict[str, Any]] = self.rows.to_pylist()
        return rows

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """The rows as text, and what they were computed of."""
        text = self.rows.to_pandas().to_string(index=False) if len(self) else "no rows"
        return "\n".join([text, *self._notes()])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._notes())
        return f"{html_table(self.rows)}{notes}"

    def _notes(self) -> Iterator[str]:
        yield f"({self.source})"
        for counter, rows in sorted(self.failures.items()):
            step, _, what = counter.rpartition(".")
            fate = "null where an expression failed" if what == "errors" else "dead letters"
            yield f"{step}: {rows:,} {'row' if rows == 1 else 'rows'} {fate}"


def preview(
    declared: Relation,
    rows: int,
    *,
    of: int,
    given: Mapping[str, Any] | None,
    log: str | None,
    spark: SparkSession | None,
) -> Preview:
    """Compute `declared.preview(rows)`."""
    for name, number in (("rows", rows), ("of", of)):
        if type(number) is not int or number < 1:
            raise InputError(f"preview was given {name}={number!r}.", fix="give a whole number.")
    inputs = [step for step in topological_order([declared.step]) if isinstance(step, TopicStep)]
    topics = sorted({step.topic for step in inputs})
    given = dict(given or {})
    if unknown := sorted(given.keys() - set(topics)):
        raise InputError(
            f"preview was given rows of {unknown[0]!r}, which {declared.step.path} does not read:"
            f" {nearest(unknown[0], topics)}"
        )
    read: dict[str, _Newest] = {}
    if given.keys() != set(topics):
        with open_log(address_of(declared.pipeline, log), create=False) as opened:
            for step in inputs:
                if isinstance(step, AnswersStep) and step.topic not in opened.topics():
                    raise InputError(
                        f"{step.path} has no recorded answers yet, and a preview asks nobody.",
                        fix="run the pipeline first, or preview the stream before the call.",
                    )
                if step.topic not in given:
                    read[step.topic] = _newest_rows(opened, step, of)
    plan = _plan_of(declared)
    try:
        return _computed(plan, read, given, rows, spark or PlainSpark())
    except NotSupported:
        if spark is not None:
            raise
    from headrace.log.spark.session import spark as session

    return _computed(plan, read, given, rows, session())


@dataclass(frozen=True)
class _Newest:
    """The newest rows of a topic, as its copy stores them, and where they stand in the topic."""

    rows: pa.Table
    partitions: pa.Array
    offsets: pa.Array


def _newest_rows(log: Log, step: TopicStep, count: int) -> _Newest:
    """The newest rows of each partition of a topic, in the order in which they were appended."""
    changes = [CHANGE_TYPE] if log.topic(step.topic).is_table else []
    starts, ends = log.start_offsets(step.topic), log.end_offsets(step.topic)
    share = -(-count // len(ends))
    stored = step.created_schema.names  # of recorded answers more than the plan uses
    names = [*stored, *changes, PARTITION_COLUMN, OFFSET_COLUMN, TIMESTAMP_COLUMN]
    parts = [
        log.read(
            step.topic, partition, max(starts[partition], end - share), end, columns=names
        ).to_table()
        for partition, end in sorted(ends.items())
    ]
    table = pa.concat_tables(parts).rename_columns(names).combine_chunks()
    times = as_array(table[TIMESTAMP_COLUMN]).cast(pa.int64()).to_numpy()
    table = table.take(pa.array(np.argsort(times, kind="stable")))
    positions = {name: table[source] for name, source in step.metadata}
    columns = {name: table[name] for name in [*stored, *changes]}
    return _Newest(
        pa.table(positions | columns),
        as_array(table[PARTITION_COLUMN]),
        as_array(table[OFFSET_COLUMN]),
    )


def _plan_of(declared: Relation) -> PipelinePlan:
    """A plan of the steps upstream of one, with its rows as the only output. What a topic's
    metadata says is a column of the copy, whose rows stand elsewhere.
    """
    copies: dict[int, Step] = {}
    for step in topological_order([declared.step]):
        inputs = tuple(copies[id(source)] for source in step.inputs)
        copies[id(step)] = replace(step, inputs=inputs)
        if isinstance(step, TopicStep):
            copies[id(step)] = replace(step, metadata=(), partitions=1, shed=None)
    last = copies[id(declared.step)]
    topics = tuple(step for step in copies.values() if isinstance(step, TopicStep))
    taken = {step.topic for step in topics} | {step.name for step in copies.values()}
    taken |= {side.topic for step in copies.values() for side in step.side_outputs}
    name = _OUTPUT
    while name in taken:
        name += "_"
    output: Output = (ViewOutput if last.is_table else TopicOutput)(name=name, input=last)
    return PipelinePlan(
        name=declared.pipeline.name, inputs=topics, outputs=with_names(topics, [output])
    )


def _computed(
    plan: PipelinePlan,
    read: Mapping[str, _Newest],
    given: Mapping[str, Any],
    count: int,
    spark: Any,
) -> Preview:
    """Run the plan over the rows in a temporary directory."""
    (output,) = plan.outputs
    with tempfile.TemporaryDirectory(prefix="headrace-preview-") as directory:
        root = Path(directory)
        with open_log(f"file:{root / 'log'}", durability="os") as log:
            create_captured_topics(log, plan)
            create_topics(log, plan)
            sources = []
            for step in {step.topic: step for step in plan.inputs}.values():
                is_given = step.topic in given
                rows = given[step.topic] if is_given else read[step.topic].rows
                with log.producer(step.topic) as producer:
                    if step.is_table and is_given:
                        producer.upsert(rows)
                    else:
                        producer.append(rows)
                sources.append(_counted(len(rows), step.topic, newest=not is_given))
            with closing(Runner.start(plan, log, spark, root / "state", shards=1)) as runner:
                try:
                    runner.cut()
                    runner.end_event_time()
                    while runner.step():
                        continue
                except FunctionFailed as failed:
                    raise _at_its_position(failed, read) from failed
                counts = runner.leading.entry.counts
            if output.input.is_table:
                with ViewReader(root / "state" / VIEWS_FILE) as reader:
                    table = reader.table(output.name)
            else:
                table = log.read(output.name).to_table()
    shown = table.select([field.name for field in output.input.schema])
    failures = {
        name: number
        for name, number in counts.items()
        if name.endswith((".errors", ".diverted")) and number
    }
    first = 0 if output.input.is_table else max(0, len(shown) - count)
    return Preview(shown.slice(first, count), _listed(sources), failures)


def _at_its_position(failed: FunctionFailed, read: Mapping[str, _Newest]) -> FunctionFailed:
    """A failure at the position that the row has in its topic, not in the copy."""
    if len(read) != 1 or failed.position is None:
        return failed.at(None)
    (newest,) = read.values()
    offset = failed.position[1]
    return failed.at((newest.partitions[offset].as_py(), newest.offsets[offset].as_py()))


def _counted(rows: int, topic: str, *, newest: bool) -> str:
    return f"{'the newest ' if newest else ''}{rows:,} {'row' if rows == 1 else 'rows'} of {topic}"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
