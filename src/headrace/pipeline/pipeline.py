"""`hr.Pipeline`: the inputs and outputs of a pipeline, declared. `plan()` gives the inert plan,
`run()` runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.errors import (
    CyclicPlan,
    DuplicateStep,
    PlanError,
    StreamOnly,
    UnknownColumn,
    UnknownTopic,
    nearest,
)
from headrace.log.topic_config import check_name, declared
from headrace.log.values import ASK_ID, FOUND, Duration, answers_topic, questions_topic
from headrace.operators.load_shedding import Shed
from headrace.pipeline.stream import Rows, Stream, Table
from headrace.pipeline.view import View
from headrace.pipeline.windows import RESERVED, check_side_outputs
from headrace.plan.columns import check_columns
from headrace.plan.event_time import DeviceTime, EventTime, ProcessingTime
from headrace.plan.names import with_names
from headrace.plan.plan import (
    Ingest,
    Output,
    PipelinePlan,
    Settings,
    Step,
    TopicOutput,
    TopicStep,
    ViewOutput,
    topological_order,
)
from headrace.sinks.declaration import Sink
from headrace.types.schema import parse_schema, to_ddl, type_name

if TYPE_CHECKING:
    from headrace.alerts.alert import Alert, Way
    from headrace.cdc.declaration import Capture
    from headrace.gateways.declaration import Gateway


# `shed=hr.shed(…)` of a topic, as users write it, checked.


def shed(*, behind: int, keep: float = 0.0, priority: str | None = None, least: Any = None) -> Shed:
    """Once more than `behind` rows of an input wait, leave out all but a share `keep` of those that
    come then; never those whose `priority` column is at least `least`.

    What is left out is counted (`TOPIC.shed` in `headrace status`). It is decided when a tick is
    cut, and recorded with it, so a replay leaves out the same rows.
    """
    if type(behind) is not int or behind < 1:
        raise PlanError(
            f"hr.shed has behind={behind!r}.", fix="give a number of rows, as in behind=1_000_000."
        )
    if not 0 <= keep < 1:
        raise PlanError(
            f"hr.shed has keep={keep!r}.",
            fix="give the share of rows that stays, from 0 up to but not including 1.",
        )
    if (priority is None) != (least is None):
        raise PlanError(
            "hr.shed needs both priority= and least=, or neither.",
            fix='say which rows always stay, as in priority="level", least=3.',
        )
    return Shed(behind, keep, priority, least)


def check_shed(wanted: Any, schema: pa.Schema, *, where: str) -> None:
    if not isinstance(wanted, Shed):
        raise PlanError(
            f"{where} has shed={wanted!r}.", fix="make it with hr.shed(behind=1_000_000, keep=0.1)."
        )
    if wanted.priority is None:
        return
    if wanted.priority not in schema.names:
        raise UnknownColumn(wanted.priority, schema.names, where=where)
    kind = schema.field(wanted.priority).type
    try:
        pa.scalar(wanted.least).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise PlanError(
            f"{where} sheds by {wanted.priority!r}, which is {type_name(kind)}, and"
            f" least={wanted.least!r} is not.",
            fix="give a value of that type.",
        ) from None


MAX_KEPT_CHANGES = 100_000_000

_OF_ALL = {"tombstones", "segment_bytes", "segment_age", "compression"}
_OF_TOPICS = {"retention", "retention_bytes", "compact"}
_OF_TABLES = {"history"}


class Pipeline:
    """A pipeline over one log. Declaring opens nothing and starts nothing.

    `log` is the log's address; it can be left out here and given to `run`, or to the command that
    runs the file.
    """

    def __init__(self, name: str, *, log: str | None = None) -> None:
        self.name = check_name(name, what="pipeline name", error=PlanError)
        self.log = log
        self.directory = (
            Path(sys._getframe(1).f_globals.get("__file__") or "headrace").absolute().parent  # noqa: SLF001
        )
        """That of the file which declares the pipeline, or, where there is none, the working
        directory: its state is there, unless it is told where.
        """
        self.ingested: dict[str, Any] = {}
        """The DataFrames given to `ingest`, by the name of their entry in the plan."""
        self.captures: dict[str, Capture] = {}
        """The captures that run with the pipeline, by name."""
        self.sinks: dict[str, Sink] = {}
        """Other systems that follow derived topics, by the topic's name."""
        self.gateways: dict[str, Gateway] = {}
        """The gateways that run with the pipeline, by name."""
        self.alerts: dict[str, Alert] = {}
        """What somebody is to hear of, by name."""
        self._inputs: dict[str, TopicStep] = {}
        self._outputs: dict[str, Output] = {}
        self._ingests: list[Ingest] = []

    # Inputs

    def topic(
        self,
        name: str,
        *,
        schema: str,
        key: str | Sequence[str] | None = None,
        event_time: EventTime | ProcessingTime | str | None = None,
        partitions: int = 1,
        shed: Shed | None = None,
        **settings: Any,
    ) -> Stream:
        """A topic as a stream. It is made when the pipeline first runs, if it is not there; if it
        is, it must fit this declaration.

        `shed=hr.shed(…)` says what is left out, and counted, when too much of it waits.
        """
        step = self._input(name, schema, key, event_time, partitions, settings, is_table=False)
        if shed is not None:
            check_shed(shed, step.stored_schema, where=f"The topic {name!r}")
            step = self._inputs[name] = replace(step, shed=shed)
        return Stream(self, step)

    def table(
        self,
        name: str,
        *,
        schema: str,
        key: str | Sequence[str],
        event_time: EventTime | ProcessingTime | str | None = None,
        partitions: int = 1,
        **settings: Any,
    ) -> Table:
        """A table's topic as a table."""
        return Table(
            self, self._input(name, schema, key, event_time, partitions, settings, is_table=True)
        )

    def capture(
        self,
        capture: Capture,
        table: str,
        *,
        schema: str,
        key: str | Sequence[str],
        event_time: EventTime | ProcessingTime | str | None = None,
    ) -> Table:
        """A table of a database as a table. The capture runs with the pipeline; `schema` names the
        columns that are used here, which may be some of those there are.

        Hidden columns can be named too, such as `_committed_at TIMESTAMP`, to go by the time at
        which the database committed.
        """
        from headrace.cdc.topics import topic_name

        if self.captures.setdefault(capture.name, capture) is not capture:
            raise DuplicateStep(
                f"Two captures have the name {capture.name!r}.",
                fix="give one of them another name, with name=….",
            )
        step = self._input(
            topic_name(table, capture.prefix),
            schema,
            key,
            event_time,
            capture.partitions,
            {},
            is_table=True,
        )
        captured = replace(step, captured_by=capture.name)
        self._inputs[step.name] = captured
        return Table(self, captured)

    def gateway(self, gateway: Gateway) -> None:
        """Rows come in through a gateway, into topics that were declared with `topic` or `table`,
        as long as the pipeline runs. `hr.gateways` has the kinds.
        """
        for name in gateway.topics:
            self._declared_input(name)
        if self.gateways.setdefault(gateway.name, gateway) is not gateway:
            raise DuplicateStep(
                f"Two gateways have the name {gateway.name!r}.",
                fix="give one of them another name, with name=….",
            )

    def ingest(self, df: Any, topic: Stream | Table | str, *, name: str | None = None) -> None:
        """Bring a streaming DataFrame in, through a topic that was declared with `topic` or
        `table`, as long as the pipeline runs.

        `df` may also be a function that makes one from the Spark session: then declaring the
        pipeline starts no Spark.
        """
        step = self._declared_input(topic)
        if not callable(df) and not getattr(df, "isStreaming", True):
            raise PlanError(
                f"What is to be ingested into {step.topic!r} is no streaming DataFrame.",
                fix=(
                    "read it with spark.readStream; a batch is written once, with"
                    " df.write.format('headrace')."
                ),
            )
        entry = Ingest(
            check_name(name or f"{step.name}.ingest", what="ingest name", error=PlanError),
            step.topic,
        )
        if entry.name in self.ingested:
            raise DuplicateStep(
                f"Something is ingested under the name {entry.name!r} already.",
                fix="give it another name with name=….",
            )
        self._ingests.append(entry)
        self.ingested[entry.name] = df

    def sql(self, query: str, *, name: str | None = None) -> Stream:
        """A stream of matches, from a query with MATCH_RECOGNIZE over a topic of this pipeline: the
        same as `match` on that stream.
        """
        from headrace.pipeline.sql import matched_by_sql

        return matched_by_sql(self.input, query, name)

    def input(self, name: str) -> Stream:
        """A topic that was declared before, as a stream."""
        step = self._inputs.get(name)
        if step is None:
            raise UnknownTopic(name, self._inputs)
        if step.is_table:
            raise StreamOnly(f"{name!r} is a table, and not a stream.", fix="use its changes().")
        return Stream(self, step)

    # Outputs

    def write(
        self, name: str, rows: Stream | Table, *, partitions: int = 1, **settings: Any
    ) -> None:
        """Write rows to a derived topic, which is keyed as they are; a table becomes a table's
        topic.
        """
        step = self._checked_output(name, rows, "topic")
        check_columns(step.schema, where=f"The output {name!r}")
        _check_settings(settings, where=f"The output {name!r}", is_table=step.is_table)
        declared(
            name,
            to_ddl(step.schema),
            step.key,
            partitions=partitions,
            is_table=step.is_table,
            options=settings,
        )
        self._outputs[name] = TopicOutput(
            name=name, input=step, partitions=partitions, settings=_as_settings(settings)
        )

    def view(self, name: str, rows: Table, *, keep_changes: int | None = None) -> View:
        """Keep a table where it can be asked by key, by range and by SQL. What is returned reads
        it, once the pipeline has run, and shows it in a notebook.

        Of its changes the newest `keep_changes` (100,000, unless it says otherwise) are kept: so
        far back can others resume to follow it, or ask for an earlier tick.
        """
        step = self._checked_output(name, rows, "view")
        if keep_changes is not None and not 1 <= keep_changes <= MAX_KEPT_CHANGES:
            raise PlanError(
                f"The view {name!r} is to keep {keep_changes!r} changes.",
                fix=f"keep from 1 to {MAX_KEPT_CHANGES:,}.",
            )
        if not step.is_table:
            raise StreamOnly(
                f"The view {name!r} was given the stream {step.path}: without a key it would only"
                " ever grow.",
                fix=(
                    "give it a table: to_table(key) keeps the newest row of each key,"
                    " group_by(…).aggregate(…) one row for each group."
                ),
            )
        self._outputs[name] = ViewOutput(name=name, input=step, keep_changes=keep_changes)
        return View(self, name)

    def sink(
        self,
        sink: Sink,
        rows: Stream | Table,
        *,
        topic: str | None = None,
        partitions: int = 1,
        **settings: Any,
    ) -> None:
        """Keep another system equal to a table, or append a stream's rows to it, as long as the
        pipeline runs. `hr.sinks` has the kinds.

        The rows are written to a derived topic (`topic`, or else one named for what it is called
        there), which the sink follows.
        """
        if not isinstance(sink, Sink):
            raise PlanError(
                f"A sink was expected, not a {type(sink).__name__}.",
                fix=(
                    "make one with hr.sinks, as in shop.sink(hr.sinks.sqlite('shop.db',"
                    " table='revenue'), revenue)."
                ),
            )
        if topic is None and sink.name is None and sink.table is None:
            raise PlanError(
                f"The sink ({sink.kind}) does not say what its rows are called there.",
                fix="give it table=….",
            )
        name = topic or sink.name or f"{sink.table}.{sink.kind}"
        self.write(name, rows, partitions=partitions, **settings)
        self.sinks[name] = sink

    def alert(
        self,
        name: str,
        rows: Stream | Table,
        *,
        to: Way | Sequence[Way] = (),
        every: Duration = "0 seconds",
        by: str | Sequence[str] = (),
    ) -> None:
        """Let somebody hear of rows, as long as the pipeline runs: of a table, a row that comes
        fires and one that goes resolves; of a stream each row fires.

        `to` are webhooks (`hr.sinks.webhook`) and mails (`hr.alerts.email`); every message is also
        in the topic `alerts`, and shown by `headrace run`. At most one message comes in `every`;
        what happens meanwhile is in the next one. With `by="region"` each region has messages of
        its own, at its own pace. `headrace alert silence` silences it for a while.
        """
        from headrace.alerts.alert import Alert
        from headrace.durations import to_us

        topic = f"alert.{name}"
        groups = (by,) if isinstance(by, str) else tuple(by)
        for column in groups:
            if column not in rows.schema.names:
                raise UnknownColumn(column, rows.schema.names, where=f"The alert {name!r}")
        alert = Alert(
            name,
            topic,
            tuple(to) if isinstance(to, Sequence) else (to,),
            to_us(every, what="every"),
            groups,
        )
        settings: dict[str, Any] = {} if isinstance(rows, Table) else {"retention": "30 days"}
        self.write(topic, rows, **settings)
        self.alerts[name] = alert

    def ask(
        self, name: str, *, using: Table, question: str | None = None, keep: str = "1 day"
    ) -> Stream:
        """Let questions be asked of a table, each answered as of its tick: with `POST /ask/NAME`
        where the pipeline is served, or by a row in the topic `ask.NAME`.

        A question has the table's key, and what `question` adds ("lang STRING"), which comes back
        with the answer; that has the table's row, and `found`: true, or null if there was none.
        Both are kept for `keep`.
        """
        return asked(self, name, using, question, keep)

    def topic_of(self, step: Step) -> str | None:
        """The derived topic that a step's rows are written to, if there is one."""
        return next(
            (
                each.name
                for each in self._outputs.values()
                if isinstance(each, TopicOutput) and each.input is step
            ),
            None,
        )

    # What becomes of it

    def plan(self) -> PipelinePlan:
        """The inert plan: every step with its stable name."""
        if not self._outputs:
            raise PlanError(
                f"The pipeline {self.name!r} has no output.",
                fix="add write(…), view(…) or sink(…).",
            )
        inputs = tuple(self._inputs.values())
        plan = PipelinePlan(
            self.name,
            inputs,
            with_names(inputs, tuple(self._outputs.values())),
            tuple(self._ingests),
        )
        check_side_outputs(plan)
        return plan

    def run(self, **options: Any) -> Any:
        """Run the pipeline until it is stopped; `headrace run FILE` does the same."""
        from headrace.runtime.run import run

        return run(self, **options)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name!r}: {len(self._inputs)} inputs, {len(self._outputs)} outputs>"

    def __str__(self) -> str:
        return str(self.plan()) if self._outputs else repr(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """In a notebook: the graph."""
        from headrace.pipeline.view import plan_bundle

        return plan_bundle(self.plan()) if self._outputs else {"text/plain": repr(self)}

    # Checks

    def _input(
        self,
        name: str,
        schema: str,
        key: str | Sequence[str] | None,
        event_time: EventTime | ProcessingTime | str | None,
        partitions: int,
        settings: dict[str, Any],
        *,
        is_table: bool,
    ) -> TopicStep:
        self._refuse_taken(name)
        _check_settings(
            settings, where=f"The {'table' if is_table else 'topic'} {name!r}", is_table=is_table
        )
        info = declared(
            name, schema, key, partitions=partitions, is_table=is_table, options=settings
        )
        columns = check_columns(parse_schema(schema), where=f"The topic {name!r}")
        times = EventTime(event_time) if isinstance(event_time, str) else event_time
        if times is not None:
            times.check(columns, where=f"The topic {name!r}")
            if is_table and isinstance(times, DeviceTime):
                raise StreamOnly(
                    f"The table {name!r} has hr.device_time, which is for streams.",
                    fix="read it with topic(…), and use to_table(key) behind it.",
                )
            columns = pa.schema([*columns, *times.added(columns)])
        step = TopicStep(
            name=name,
            topic=name,
            schema=columns,
            key=info.key,
            is_table=is_table,
            event_time=times,
            partitions=partitions,
            settings=_as_settings(settings),
        )
        self._inputs[name] = step
        return step

    def _refuse_taken(self, name: str) -> None:
        if name.startswith(RESERVED):
            raise PlanError(
                f"The name {name!r} is reserved: names that start with {RESERVED} are Headrace's"
                " own.",
                fix="choose another name.",
            )
        if name in self._inputs:
            raise DuplicateStep(
                f"The topic {name!r} is an input already.",
                fix="declare it once, and use what topic(…) or table(…) returned.",
            )
        if name in self._outputs:
            raise DuplicateStep(
                f"The pipeline writes an output {name!r}, and cannot read it too.",
                fix="use the stream or table that is written.",
            )

    def _checked_output(self, name: str, rows: Any, what: str) -> Step:
        check_name(name, what=f"{what} name", error=PlanError)
        if not isinstance(rows, Rows):
            raise PlanError(
                f"The output {name!r} was given a {type(rows).__name__}.",
                fix="give it a stream or a table.",
            )
        if rows.pipeline is not self:
            raise PlanError(
                f"The output {name!r} was given rows of another pipeline, {rows.pipeline.name!r}.",
                fix="write them to a topic there, and read that topic here.",
            )
        if name in self._inputs:
            self._refuse_input_as_output(name, rows.step, what)
        if name.startswith(RESERVED):
            raise PlanError(
                f"The name {name!r} is reserved: names that start with {RESERVED} are Headrace's"
                " own.",
                fix="choose another name.",
            )
        if name in self._outputs:
            raise DuplicateStep(
                f"Two outputs have the name {name!r}: a {self._outputs[name].kind} and a {what}.",
                fix="rename one of them.",
            )
        return rows.step

    def _refuse_input_as_output(self, name: str, step: Step, what: str) -> None:
        if what == "view":
            raise PlanError(
                f"The view {name!r} has the name of an input topic.",
                fix=f"choose another name, such as {f'all_{name}'!r}.",
            )
        if self._inputs[name] in topological_order([step]):
            raise CyclicPlan(
                f"The output {name!r} is computed from the input topic {name!r}: the plan would be"
                " a cycle.",
                fix="write to another topic.",
            )
        raise PlanError(
            f"The output {name!r} has the name of an input topic.",
            fix="choose another name; what an input holds comes from outside.",
        )

    def _declared_input(self, topic: Stream | Table | str) -> TopicStep:
        step = self._inputs.get(topic) if isinstance(topic, str) else topic.step
        if not isinstance(step, TopicStep) or self._inputs.get(step.name) is not step:
            raise PlanError(
                f"{topic!r} is not an input topic of the pipeline {self.name!r}.",
                fix="declare it with topic(…) or table(…) first.",
            )
        return step


def _check_settings(settings: dict[str, Any], *, where: str, is_table: bool) -> None:
    """A table's topic keeps a history, another topic has a retention."""
    known = _OF_ALL | (_OF_TABLES if is_table else _OF_TOPICS)
    for option in settings:
        if option not in known:
            raise PlanError(
                f"{where} has no setting {option!r}: {nearest(option, known)}",
                fix=f"there is {', '.join(sorted(known))}.",
            )


def _as_settings(settings: dict[str, Any]) -> Settings:
    return tuple(sorted(settings.items()))


# Questions to the stream: `shop.ask("reach", using=reach)`. A question is a row of a topic, meets a
# table as of its tick, and the answer is a row of another topic.
#
# So questions and answers are in the log, a replay answers them again in the same way, and whoever
# can append can ask; `POST /ask/reach` (`serve/asks`) appends, and waits for the answer.


def asked(pipeline: Pipeline, name: str, using: Any, question: str | None, keep: str) -> Stream:
    """What `Pipeline.ask` makes: the topic of questions, the join, the topic of answers."""
    check_name(name, what="name of a question", error=PlanError)
    table = _checked(pipeline, name, using)
    about = pa.schema([table.schema.field(column) for column in table.key])
    more = pa.schema([]) if question is None else parse_schema(question)
    for column in more.names:
        if column in table.schema.names or column in {ASK_ID, FOUND}:
            raise PlanError(
                f"The question {name!r} has a column {column!r}, which the table or the answer has"
                " too.",
                fix="rename it.",
            )
    schema = pa.schema([pa.field(ASK_ID, pa.string()), *about, *more])
    questions = pipeline.topic(
        questions_topic(name), schema=to_ddl(schema), key=ASK_ID, retention=keep
    )
    known = table.with_columns(**{FOUND: "true"})
    answers: Stream = questions.join(known, on=list(table.key), how="left", name=f"ask.{name}.join")
    answers = answers.key_by(ASK_ID)
    pipeline.write(answers_topic(name), answers, retention=keep)
    return answers


def _checked(pipeline: Pipeline, name: str, using: Any) -> Table:
    from headrace.pipeline.stream import Stream, Table

    if isinstance(using, Stream):
        raise StreamOnly(
            f"The question {name!r} is to use the stream {using.step.path}: it has no rows that a"
            " question could meet.",
            fix="use a table: to_table(key), or group_by(…).aggregate(…).",
        )
    if not isinstance(using, Table):
        raise PlanError(
            f"The question {name!r} is to use a {type(using).__name__}.",
            fix="give it a table of this pipeline.",
        )
    if using.pipeline is not pipeline:
        raise PlanError(
            f"The question {name!r} is to use a table of another pipeline.",
            fix="write it to a topic, and read that topic here.",
        )
    for column in (ASK_ID, FOUND):
        if column in using.schema.names:
            raise PlanError(
                f"The question {name!r} uses a table with a column {column!r}, which answers have.",
                fix="rename it.",
            )
    return using
