"""`rows.df()`: a stream or table of a pipeline as a streaming DataFrame of Spark.

A topic is read with `format("headrace")`, and row-local steps become Spark SQL on top of it. A step
that keeps state is not computed a second time: its rows are read from the topic that the pipeline
writes them to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from headrace.columnar.columns import CHANGE_TYPE, TIMESTAMP_COLUMN
from headrace.error_policy import STOP
from headrace.errors import NotSupported
from headrace.expressions.expression import Expression
from headrace.expressions.literals import quoted_text
from headrace.log import open_log
from headrace.log.api import Log
from headrace.pipeline.relation import Relation
from headrace.plan.function_steps import UserCodeStep
from headrace.plan.join_steps import LookupStep
from headrace.plan.plan import KeyByStep, SelectStep, Step, TopicStep, UnionStep, WhereStep
from headrace.runtime.inputs import create_input, create_topics
from headrace.runtime.run import address_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def dataframe(
    rows: Relation, spark: SparkSession | None, log: str | None, options: Mapping[str, Any]
) -> DataFrame:
    """Rows as a streaming DataFrame; a table's as its changes, with `_change_type`. `options` are
    those of reading with `format("headrace")`.
    """
    from headrace.log.spark.session import spark as session

    with open_log(address_of(rows.pipeline, log)) as opened:
        return _FrameBuilder(rows, opened, spark or session(), options).frame(rows.step)


@dataclass(frozen=True)
class _FrameBuilder:
    rows: Relation
    log: Log
    spark: SparkSession
    options: Mapping[str, Any]

    def frame(self, step: Step) -> DataFrame:
        if isinstance(step, TopicStep) and step.device_time is None:
            create_input(self.log, step, set(self.log.topics()))
            added = [f"`{TIMESTAMP_COLUMN}` AS `{step.processed_at}`"] if step.processed_at else []
            added += [f"`{source}` AS `{name}`" for name, source in step.metadata]
            present = self.log.topic(step.topic).schema_history.present_name
            columns = [f"`{present(name)}` AS `{name}`" for name in step.stored_schema.names]
            return self._read(step.topic, step, columns + added)
        if (topic := self._derived_topic(step)) is not None:
            return self._read(topic, step, [f"`{name}`" for name in step.schema.names])
        if isinstance(step, SelectStep):
            columns = [
                f"{_sql(expression, step)} AS `{name}`"
                for (name, _), expression in zip(step.columns, step.expressions, strict=True)
            ]
            return self.frame(step.input).selectExpr(*columns, *_change_column(step))
        if isinstance(step, WhereStep) and not step.is_table:
            return self.frame(step.input).where(_sql(step.expression, step))
        if isinstance(step, KeyByStep):
            return self.frame(step.input)
        if isinstance(step, UnionStep):
            return reduce(
                lambda left, right: left.unionByName(right),
                [self.frame(each) for each in step.inputs],
            )
        raise self._not_supported(step)

    def _read(self, topic: str, step: Step, columns: list[str]) -> DataFrame:
        read = (
            self.spark.readStream.format("headrace")
            .options(**self.options)
            .option("log", self.log.address)
            .option("topic", topic)
            .load()
        )
        return read.selectExpr(*columns, *_change_column(step))

    def _derived_topic(self, step: Step) -> str | None:
        """The derived topic that has the step's rows, if there is one; it is created if it is
        missing.
        """
        topic = self.rows.pipeline.topic_of(step)
        if topic is not None and topic not in self.log.topics():
            create_topics(self.log, self.rows.pipeline.plan())
        return topic

    def _not_supported(self, step: Step) -> NotSupported:
        reason = f"{step.path} ({step.operation}) keeps state"
        if isinstance(step, LookupStep):
            reason = f"{step.path} looks up the rows of a file"
        if isinstance(step, UserCodeStep):
            reason = f"{step.path} ({step.operation}) runs in Headrace's tasks, not in Spark SQL"
        if isinstance(step, WhereStep):
            reason += ", as every condition on a table's changes does"
        name = self.rows.pipeline.name
        return NotSupported(
            f"{self.rows.step.path} cannot be had as a DataFrame: {reason}, and only a run of the"
            " pipeline does.",
            fix=(
                f"write it to a topic, as in {name}.write('changes', …): then df() reads that"
                " topic."
            ),
        )


def _sql(expression: Expression, step: SelectStep | WhereStep) -> str:
    """The expression with null where it fails; with `errors="stop"` it ends the query there."""
    if step.errors != STOP or expression.failed is None:
        return expression.safe
    message = f"The expression {expression.text} of the step {step.path} failed on a row."
    error = f"raise_error({quoted_text(message)})"
    return f"CASE WHEN {expression.failed} THEN {error} ELSE {expression.safe} END"


def _change_column(step: Step) -> list[str]:
    return [f"`{CHANGE_TYPE}`"] if step.is_table else []
