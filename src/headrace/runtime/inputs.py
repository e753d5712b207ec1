"""The topics of a pipeline: missing ones are created when it starts, existing ones must fit their
declaration, and inputs must still be the topics that were read before.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Self

import pyarrow as pa

from headrace.engine.ledger import Ledger, known_pipelines
from headrace.errors import InputReplaced, NewerFormat, TopicExists
from headrace.log.api import Log
from headrace.log.values import TopicInfo
from headrace.plan.plan import PipelinePlan, SideOutput, Step, TopicOutput, TopicStep
from headrace.types.schema import parse_schema, to_ddl
from headrace.types.schema_history import differences

# Creating and checking topics


def create_topics(log: Log, plan: PipelinePlan) -> None:
    """Create the topics of a plan that are missing: inputs, derived topics and side outputs. Raises
    TopicExists if an existing topic does not fit its declaration.
    """
    existing = set(log.topics())
    for source in plan.inputs:
        create_input(log, source, existing)
    for output in plan.outputs:
        if isinstance(output, TopicOutput):
            _create_output(log, output, existing)
    for step in plan.steps():
        for side_output in step.side_outputs:
            _create_side_output(log, step, side_output, existing)


def create_input(log: Log, step: TopicStep, existing: set[str]) -> None:
    """Create the topic of an input if it is not among the `existing` ones. If it is, check that it
    has the declared columns and key. It may have more columns, and a column may be declared with a
    name or a type that it had before the topic was altered.
    """
    if step.captured_by is not None:
        _check_captured(step, log.topic(step.topic) if step.topic in existing else None)
        return
    if step.topic not in existing:
        _create(log, step.topic, step, step.created_schema, step.partitions, dict(step.settings))
        return
    info = log.topic(step.topic)
    wrong = list(_differences(step, info))
    if wrong:
        raise TopicExists(
            f"The topic {step.topic!r} is not as it is declared: {'; '.join(wrong)}.",
            fix=(
                f"declare it in the pipeline as it is: {info.schema} (key:"
                f" {', '.join(info.key) or 'none'})."
            ),
        )


def _check_captured(step: TopicStep, info: TopicInfo | None) -> None:
    """Check the topic of a captured table. The capture creates it with the database's columns; the
    pipeline may declare some of them.
    """
    if info is None:
        raise TopicExists(
            f"The table {step.topic!r} has not been captured yet by {step.captured_by!r}.",
            fix="run the capture first, with `headrace capture` or `headrace run`.",
        )
    wrong = list(_differences(step, info))
    if wrong:
        raise TopicExists(
            f"The captured table {step.topic!r} is not as it is declared: {'; '.join(wrong)}.",
            fix=f"declare columns that it has: {info.schema}.",
        )


def _differences(step: TopicStep, info: TopicInfo) -> Iterator[str]:
    """How a topic differs from its declaration, in words. Columns are read by name, so the topic
    may have more of them, and in another order.
    """
    stored = parse_schema(info.schema)
    for kind, text in differences(step.stored_schema, stored, info.schema_history):
        if kind not in {"more", "order"}:
            yield text
    if info.is_table != step.is_table:
        yield f"it is a {'table' if info.is_table else 'topic'}"
    if info.key != step.key:
        yield (
            f"its key is {', '.join(info.key) or 'none'}, and {', '.join(step.key) or 'none'} is"
            " declared"
        )


def create_captured_topics(log: Log, plan: PipelinePlan) -> None:
    """Create the missing topics of captured tables, with the declared columns: for tests that feed
    them by hand, without a database.
    """
    existing = set(log.topics())
    for step in plan.inputs:
        if step.captured_by is not None and step.topic not in existing:
            _create(log, step.topic, step, step.stored_schema, step.partitions, {})


def _create_output(log: Log, output: TopicOutput, existing: set[str]) -> None:
    """Create a derived topic, or check that an existing one has the same columns, key and
    partitions.
    """
    step = output.input
    if output.name not in existing:
        _create(log, output.name, step, step.schema, output.partitions, dict(output.settings))
        return
    info = log.topic(output.name)
    has_other_columns = any(
        differences(step.schema, parse_schema(info.schema), info.schema_history)
    )
    if has_other_columns or (info.key, info.is_table) != (step.key, step.is_table):
        raise TopicExists(
            f"The output {output.name!r} has the columns {to_ddl(step.schema)}"
            f" ({_kind_and_key(step.key, is_table=step.is_table)}), and there is a topic of that"
            f" name with {info.schema} ({_kind_and_key(info.key, is_table=info.is_table)}).",
            fix="write to another topic: the rows of that one are others'.",
        )
    if info.partitions != output.partitions:
        raise TopicExists(
            f"The output {output.name!r} is declared with {output.partitions} partitions, and its"
            f" topic has {info.partitions}: keys would go to other partitions.",
            fix=f"declare it with partitions={info.partitions}, or write to another topic.",
        )


def _kind_and_key(key: tuple[str, ...], *, is_table: bool) -> str:
    return f"{'table' if is_table else 'stream'}, key: {', '.join(key) or 'none'}"


def _create_side_output(log: Log, step: Step, side_output: SideOutput, existing: set[str]) -> None:
    schema = to_ddl(side_output.schema)
    if side_output.topic not in existing:
        log.create_topic(side_output.topic, schema, key=side_output.key or None, exist_ok=True)
        return
    info = log.topic(side_output.topic)
    if (info.schema, info.key, info.is_table) != (schema, side_output.key, False):
        raise TopicExists(
            f"The step {step.name!r} {side_output.what} to the topic {side_output.topic!r}, which"
            f" is there with another schema or key: {info.schema}.",
            fix="name another topic: hr.late.divert(…).",
        )


def _create(
    log: Log, name: str, step: Step, schema: pa.Schema, partitions: int, settings: dict[str, Any]
) -> None:
    ddl = to_ddl(schema)
    if step.is_table:
        log.create_table(name, ddl, key=step.key, partitions=partitions, exist_ok=True, **settings)
    else:
        log.create_topic(
            name, ddl, key=step.key or None, partitions=partitions, exist_ok=True, **settings
        )


# The identity of inputs


VERSION = 1


class InputTopics:
    """The ids of the topics that a pipeline reads.

    A topic that was deleted and created again has the old name and other rows, for which the
    recorded offsets mean nothing. A note in the log has the id of each topic that was ever read.
    `find` reads it and checks it; the runner checks again with every tick.
    """

    def __init__(
        self, log: Log, pipeline: str, ids: dict[str, str], stored: dict[str, str]
    ) -> None:
        self._log = log
        self._pipeline = pipeline
        self._ids = ids
        self._stored = stored

    @classmethod
    def find(cls, log: Log, pipeline: str, topics: Collection[str]) -> Self:
        """The ids of a pipeline's topics. Raises InputReplaced if an existing topic is not the one
        that was read before.
        """
        stored = _stored_ids(log, pipeline)
        existing = set(log.topics())
        new = {
            topic: log.topic(topic).id
            for topic in topics
            if topic in existing and topic not in stored
        }
        inputs = cls(log, pipeline, new | stored, stored)
        inputs.check(topic for topic in topics if topic in existing)
        return inputs

    def check(self, topics: Iterable[str]) -> None:
        """Raise InputReplaced if one of the topics is not the one that was read before."""
        for topic in topics:
            if self._log.topic(topic).id != self._ids.get(topic):
                raise InputReplaced(
                    f"The topic {topic!r} was deleted and created again since the pipeline"
                    f" {self._pipeline!r} first read it: it has other rows now.",
                    fix=(
                        "build the pipeline again from what is there: headrace replay FILE --as v2"
                        " --retick; or give it another name."
                    ),
                )

    def remember(self, ledger: Ledger) -> None:
        """Store the ids of topics that are read for the first time."""
        if self._ids != self._stored:
            tx = ledger.transaction()
            content = {"version": VERSION, "ids": self._ids}
            tx.set_note(_note(self._pipeline), json.dumps(content))
            ledger.commit(tx)
            self._stored = self._ids


def pipelines_that_read(log: Log, topic: str) -> list[str]:
    """The pipelines that have read a topic, also those that do not run now."""
    return [pipeline for pipeline in known_pipelines(log) if topic in _stored_ids(log, pipeline)]


def _note(pipeline: str) -> str:
    return f"inputs.{pipeline}"


def _stored_ids(log: Log, pipeline: str) -> dict[str, str]:
    text = log.note(_note(pipeline))
    if text is None:
        return {}
    stored = json.loads(text)
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"The inputs of {pipeline!r} were remembered by a newer Headrace (format"
            f" {stored['version']}).",
            fix="upgrade Headrace.",
        )
    ids: dict[str, str] = stored["ids"]
    return ids
