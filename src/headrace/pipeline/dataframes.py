"""`rows.df()`: a stream or table of a pipeline as a streaming DataFrame, for anything that Spark
can do with one.

A topic is read as `format("headrace")` reads it, row-local steps are Spark SQL on top of it. What
keeps state is not computed a second time: it is read from the topic that the pipeline writes it to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from headrace.columnar.columns import CHANGE_TYPE, TIMESTAMP_COLUMN
from headrace.errors import NotSupported
from headrace.log import open_log
from headrace.log.api import Log
from headrace.pipeline.relation import Relation
from headrace.plan.plan import KeyByStep, SelectStep, Step, TopicStep, UnionStep, WhereStep
from headrace.runtime.inputs import make_input, make_topics
from headrace.runtime.run import address_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def dataframe(
    rows: Relation, spark: SparkSession | None, log: str | None, options: Mapping[str, Any]
) -> DataFrame:
    """A table's rows come as its changes, with `_change_type`. `options` are those of reading with
    `format("headrace")`.
    """
    from headrace.log.spark.session import spark as session

    with open_log(address_of(rows.pipeline, log)) as opened:
        return _Frames(rows, opened, spark or session(), options).of(rows.step)


@dataclass(frozen=True)
class _Frames:
    asked: Relation
    log: Log
    spark: SparkSession
    options: Mapping[str, Any]

    def of(self, step: Step) -> DataFrame:
        if isinstance(step, TopicStep) and step.device_time is None:
            make_input(self.log, step, set(self.log.topics()))
            added = [f"`{TIMESTAMP_COLUMN}` AS `{step.processed_at}`"] if step.processed_at else []
            return self._read(
                step.topic, step, [f"`{name}`" for name in step.stored_schema.names] + added
            )
        if (topic := self._written_to(step)) is not None:
            return self._read(topic, step, [f"`{name}`" for name in step.schema.names])
        if isinstance(step, SelectStep):
            columns = [
                f"{expression.safe} AS `{name}`"
                for (name, _), expression in zip(step.columns, step.expressions, strict=True)
            ]
            return self.of(step.input).selectExpr(*columns, *_change(step))
        if isinstance(step, WhereStep) and not step.is_table:
            return self.of(step.input).where(step.expression.safe)
        if isinstance(step, KeyByStep):
            return self.of(step.input)
        if isinstance(step, UnionStep):
            return reduce(
                lambda left, right: left.unionByName(right), [self.of(each) for each in step.inputs]
            )
        raise self._refused(step)

    def _read(self, topic: str, step: Step, columns: list[str]) -> DataFrame:
        read = (
            self.spark.readStream.format("headrace")
            .options(**self.options)
            .option("log", self.log.address)
            .option("topic", topic)
            .load()
        )
        return read.selectExpr(*columns, *_change(step))

    def _written_to(self, step: Step) -> str | None:
        """The derived topic that has these rows."""
        topic = self.asked.pipeline.topic_of(step)
        if topic is not None and topic not in self.log.topics():
            make_topics(self.log, self.asked.pipeline.plan())
        return topic

    def _refused(self, step: Step) -> NotSupported:
        what = self.asked.step.path
        why = f"{step.path} ({step.operation}) has to remember rows" + (
            ", as every condition on a table's changes has" if isinstance(step, WhereStep) else ""
        )
        name = self.asked.pipeline.name
        return NotSupported(
            f"{what} cannot be had as a DataFrame: {why}, and the pipeline's run is where that is"
            " done.",
            fix=(
                f"write it to a topic, as in {name}.write('changes', …): then df() reads that"
                " topic."
            ),
        )


def _change(step: Step) -> list[str]:
    return [f"`{CHANGE_TYPE}`"] if step.is_table else []
