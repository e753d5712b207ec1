"""The topics of a pipeline: those that are missing are made when it runs, those that are there must
fit their declaration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from headrace.engine.ledger import Ledger
from headrace.errors import InputReplaced, NewerFormat, TopicExists
from headrace.log.api import Log
from headrace.log.values import TopicInfo
from headrace.plan.plan import SideOutput, PipelinePlan, Step, TopicOutput, TopicStep
from headrace.types.schema import parse_schema, to_ddl


def make_topics(log: Log, plan: PipelinePlan) -> None:
    """Make the topics that are missing; those that are there must fit."""
    known = set(log.topics())
    for step in plan.inputs:
        make_input(log, step, known)
    for output in plan.outputs:
        if isinstance(output, TopicOutput):
            _make_output(log, output, known)
    for each in plan.steps():
        for aside in each.aside:
            _make_aside(log, each, aside, known)


def _make_output(log: Log, output: TopicOutput, known: set[str]) -> None:
    """Rows and keys must fit a topic that is there, and a key must go where it went."""
    step = output.input
    if output.name not in known:
        _create(log, output.name, step, step.schema, output.partitions, dict(output.settings))
        return
    info = log.topic(output.name)
    if (info.schema, info.key, info.is_table) != (to_ddl(step.schema), step.key, step.is_table):
        raise TopicExists(
            f"The output {output.name!r} has the columns {to_ddl(step.schema)}"
            f" ({_keyed(step.key, is_table=step.is_table)}), and there is a topic of that name with"
            f" {info.schema} ({_keyed(info.key, is_table=info.is_table)}).",
            fix="write to another topic, or delete that one first.",
        )
    if info.partitions != output.partitions:
        raise TopicExists(
            f"The output {output.name!r} is declared with {output.partitions} partitions, and its"
            f" topic has {info.partitions}: keys would go elsewhere.",
            fix=f"declare it with partitions={info.partitions}, or write to another topic.",
        )


def _differences(step: TopicStep, info: TopicInfo) -> Iterator[str]:
    declared, there = (
        {field.name: to_ddl(pa.schema([field])) for field in schema}
        for schema in (step.stored_schema, parse_schema(info.schema))
    )
    yield from (f"{name!r} is not in the topic" for name in declared if name not in there)
    yield from (f"{name!r} is in the topic only" for name in there if name not in declared)
    yield from (
        f"{there[name]} is declared as {declared[name]}"
        for name in declared
        if there.get(name, declared[name]) != declared[name]
    )
    if info.is_table != step.is_table:
        yield f"it is a {'table' if info.is_table else 'topic'}"
    if info.key != step.key:
        yield (
            f"its key is {', '.join(info.key) or 'none'}, and {', '.join(step.key) or 'none'} is"
            " declared"
        )
    if declared == there and list(declared) != list(there):
        yield "its columns have another order"


def _keyed(key: tuple[str, ...], *, is_table: bool) -> str:
    return f"{'table' if is_table else 'stream'}, key: {', '.join(key) or 'none'}"


def _make_aside(log: Log, step: Step, aside: SideOutput, known: set[str]) -> None:
    schema = to_ddl(aside.schema)
    if aside.topic not in known:
        log.create_topic(aside.topic, schema, key=aside.key or None, exist_ok=True)
        return
    info = log.topic(aside.topic)
    if (info.schema, info.key, info.is_table) != (schema, aside.key, False):
        raise TopicExists(
            f"The step {step.name!r} {aside.what} to the topic {aside.topic!r}, which is there with"
            f" another schema or key: {info.schema}.",
            fix="name another topic: hr.late.divert(…).",
        )


def make_input(log: Log, step: TopicStep, known: set[str]) -> None:
    """Make an input's topic, if it is not among those that are known to be there; if it is, it must
    have the declared columns and key.
    """
    if step.captured_by is not None:
        _check_captured(step, log.topic(step.topic) if step.topic in known else None)
    elif step.topic not in known:
        _create(log, step.topic, step, step.stored_schema, step.partitions, dict(step.settings))
    else:
        _check_fits(step, log.topic(step.topic))


def make_captured(log: Log, plan: PipelinePlan) -> None:
    """Make the topics of captured tables that are missing, with the declared columns: for tests
    that feed them by hand, without a database.
    """
    known = set(log.topics())
    for step in plan.inputs:
        if step.captured_by is not None and step.topic not in known:
            _create(log, step.topic, step, step.stored_schema, step.partitions, {})


def _check_captured(step: TopicStep, info: TopicInfo | None) -> None:
    """The capture makes the topic, as the database has the table; here it may be declared with some
    of its columns.
    """
    if info is None:
        raise TopicExists(
            f"The table {step.topic!r} has not been captured yet by {step.captured_by!r}.",
            fix="run the capture first, with `headrace capture` or `headrace run`.",
        )
    wrong = [
        each
        for each in _differences(step, info)
        if not each.endswith(("is in the topic only", "another order"))
    ]
    if wrong:
        raise TopicExists(
            f"The captured table {step.topic!r} is not as it is declared: {'; '.join(wrong)}.",
            fix=f"declare columns that it has: {info.schema}.",
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


def _check_fits(step: TopicStep, info: TopicInfo) -> None:
    if (info.schema, info.key, info.is_table) != (
        to_ddl(step.stored_schema),
        step.key,
        step.is_table,
    ):
        raise TopicExists(
            f"The topic {step.topic!r} is not as it is declared:"
            f" {'; '.join(_differences(step, info))}.",
            fix=(
                f"declare it in the pipeline as it is: {info.schema} (key:"
                f" {', '.join(info.key) or 'none'})."
            ),
        )


# Which topics a pipeline's inputs are. A topic that was deleted and made again has the old one's
# name and other rows: its offsets say nothing about what was taken in.
#
# A note of the log has the id of each topic that was ever read. The runner checks it when it
# starts, and with every tick.


VERSION = 1


class Sources:
    """InputReplaced if one of the topics is not what it was. Topics that are read for the first
    time are remembered with `remember`.
    """

    def __init__(self, log: Log, pipeline: str, topics: Iterable[str]) -> None:
        self._log, self._pipeline, self._note = log, pipeline, f"inputs.{pipeline}"
        self._stored = _ids(log.note(self._note), pipeline)
        there = set(log.topics())
        self._ids = {
            topic: log.topic(topic).id
            for topic in topics
            if topic in there and topic not in self._stored
        } | self._stored
        self.check(topic for topic in topics if topic in there)

    def remember(self, ledger: Ledger) -> None:
        if self._ids != self._stored:
            tx = ledger.transaction()
            tx.set_note(self._note, json.dumps({"version": VERSION, "ids": self._ids}))
            ledger.commit(tx)
            self._stored = self._ids

    def check(self, topics: Iterable[str]) -> None:
        """That topics are those that were read so far."""
        for topic in topics:
            if self._log.topic(topic).id != self._ids.get(topic):
                raise InputReplaced(
                    f"The topic {topic!r} was deleted and made again since the pipeline"
                    f" {self._pipeline!r} first read it: its rows are others now.",
                    fix=(
                        "build the pipeline anew from what is there: headrace replay FILE --as v2"
                        " --retick; or give it another name."
                    ),
                )


def _ids(text: str | None, pipeline: str) -> dict[str, str]:
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
