"""`hr.Pipeline`: the inputs, outputs and background services of a pipeline, declared. `plan()`
returns the inert plan, `run()` runs it.

Declaring opens nothing and starts nothing. The operations between inputs and outputs are in
`stream`; running is in `headrace.runtime`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.columnar.columns import SYSTEM_FIELDS
from headrace.errors import (
    CyclicPlan,
    DuplicateStep,
    PlanError,
    StreamOnly,
    UnknownColumn,
    UnknownTopic,
    nearest,
)
from headrace.log.topic_config import declared_topic
from headrace.log.values import ASK_ID, FOUND, Duration, answers_topic, questions_topic
from headrace.names import check_name
from headrace.operators.load_shedding import ShedPolicy
from headrace.pipeline.stream import Rows, Stream, Table, positive_us
from headrace.pipeline.view import View, plan_bundle
from headrace.pipeline.windows import RESERVED, check_side_outputs
from headrace.plan.columns import check_columns, check_step_name
from headrace.plan.event_time import DeviceTime, EventTime, ProcessingTime
from headrace.plan.join_steps import HoldStep, JoinStep
from headrace.plan.names import with_names
from headrace.plan.plan import (
    Ingest,
    KeepStep,
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
    from threading import Event

    from headrace.alerts.alert import Alert, AlertReceiver
    from headrace.calls.call import Call
    from headrace.cdc.declaration import Capture
    from headrace.gateways.declaration import Gateway
    from headrace.plan.answer_steps import AnswersStep, RequestsOutput
    from headrace.runtime.run import OnStatus
    from headrace.runtime.services import OnAlert, OnReady
    from headrace.serve.server import Server
    from headrace.sources.base import Source
    from headrace.sql.session import SqlSession

MAX_KEPT_CHANGES = 100_000_000

_COMMON_SETTINGS = {
    "tombstones",
    "segment_bytes",
    "segment_age",
    "compression",
    "strict",
    "format",
    "registry",
}
_TOPIC_SETTINGS = _COMMON_SETTINGS | {"retention", "retention_bytes", "compact"}
_TABLE_SETTINGS = _COMMON_SETTINGS | {"history"}

_DECLARED = frozenset(
    {"ingested", "captures", "sinks", "gateways", "alerts", "_inputs", "_outputs", "_ingests"}
)
"""The attributes of a pipeline that have what was declared."""


class Pipeline:
    """A pipeline over one log: topics in, steps between, topics, views and sinks out.

    Args:
        name: The pipeline's name. Its state, ticks and ledger are found by it.
        log: The log's address, such as `"file:data"` or `"kafka://localhost:9092"`. It can be left
            out, and given to `run` or to the command that runs the file.

    Raises:
        PlanError: The name cannot be used.

    Example:
        ```python
        import headrace as hr

        shop = hr.Pipeline("shop", log="file:data")
        orders = shop.topic("orders", schema="order_id BIGINT, region STRING, amount DOUBLE")
        revenue = orders.group_by("region").aggregate(total=hr.agg.sum("amount"))
        shop.view("revenue", revenue)
        ```
    """

    def __init__(self, name: str, *, log: str | None = None) -> None:
        self.name = check_name(name, what="pipeline name", error=PlanError)
        self.log = log
        declaring_file = sys._getframe(1).f_globals.get("__file__")  # noqa: SLF001
        self.directory = Path(declaring_file or "headrace").absolute().parent
        """Internal: the directory of the file that declares the pipeline, or else the working
        directory. The state directory is there by default.
        """
        self.ingested: dict[str, Any] = {}
        """Internal: the DataFrames given to `ingest`, by the name of their entry in the plan."""
        self.captures: dict[str, Capture] = {}
        """Internal: the captures that run with the pipeline, by name."""
        self.sinks: dict[str, Sink] = {}
        """Internal: the sinks, by the derived topic that each follows, or by name if it `follows`
        an input's topic.
        """
        self.gateways: dict[str, Gateway] = {}
        """Internal: the gateways that run with the pipeline, by name."""
        self.alerts: dict[str, Alert] = {}
        """Internal: the alerts, by name."""
        self.calls: dict[str, Call] = {}
        """Internal: the recorded calls, by name."""
        self._inputs: dict[str, TopicStep] = {}
        self._answers: dict[str, AnswersStep] = {}
        self._outputs: dict[str, Output] = {}
        self._ingests: list[Ingest] = []
        self._sql_session: SqlSession | None = None

    # Inputs

    def topic(
        self,
        name: str,
        *,
        schema: str,
        key: str | Sequence[str] | None = None,
        event_time: EventTime | ProcessingTime | str | None = None,
        metadata: Mapping[str, str] | None = None,
        partitions: int = 1,
        shed: ShedPolicy | None = None,
        **settings: Any,
    ) -> Stream:
        """Read a topic as a stream. It is created when the pipeline first runs; if it exists, it
        must fit this declaration.

        Args:
            name: The topic's name.
            schema: Its columns as Spark DDL, as in `"order_id BIGINT, amount DOUBLE"`.
            key: The column or columns that it is partitioned by.
            event_time: The column with the event time, or `hr.EventTime(…)`, `hr.device_time(…)`
                or `hr.processing_time()`.
            metadata: Columns to add with what the log knows of a row, by their names: its
                `"_partition"`, `"_offset"` or `"_timestamp"`, the time at which it was appended.
                Partition and offset tell rows apart that are otherwise equal.
            partitions: The number of partitions, if it is created.
            shed: `hr.shed(…)`: which rows are dropped, and counted, when too many wait.
            **settings: Settings of `create_topic` for a topic that is created: `retention`,
                `retention_bytes`, `compact`, `tombstones`, `segment_bytes`, `segment_age`,
                `compression`, `strict`, `format`, `registry`.

        Returns:
            A stream of the topic's rows.

        Raises:
            BadSchema: The schema cannot be parsed.
            UnknownColumn: A key or event time names a column that does not exist.
            DuplicateStep: The topic is declared twice.
            PlanError: A setting or a name cannot be used.

        Example:
            ```python
            clicks = shop.topic(
                "clicks",
                schema="user_id BIGINT, page STRING, at TIMESTAMP",
                key="user_id",
                event_time=hr.EventTime("at", delay="10 seconds"),
                retention="30 days",
            )
            ```
        """
        step = self._add_input(
            name,
            schema,
            key,
            event_time,
            partitions,
            settings,
            is_table=False,
            metadata=tuple((metadata or {}).items()),
        )
        if shed is not None:
            _check_shed(shed, step.stored_schema, where=f"The topic {name!r}")
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
        """Read a table's topic as a table. It is created when the pipeline first runs; if it
        exists, it must fit this declaration.

        Args:
            name: The topic's name.
            schema: Its columns as Spark DDL.
            key: The column or columns of the primary key.
            event_time: The column with the event time, for joins as of a time.
            partitions: The number of partitions, if it is created.
            **settings: Settings of `create_table` for a topic that is created (`tombstones`,
                `segment_bytes`, `segment_age`, `compression`), and `history`: how long old versions
                are kept for `as_of` and `history()`.

        Returns:
            A table with the newest row of each key.

        Raises:
            BadSchema: The schema cannot be parsed.
            UnknownColumn: A key or event time names a column that does not exist.
            DuplicateStep: The topic is declared twice.
            PlanError: A setting or a name cannot be used.

        Example:
            ```python
            prices = shop.table(
                "prices",
                schema="item STRING, price DOUBLE, valid_from TIMESTAMP",
                key="item",
                event_time="valid_from",
                history="30 days",
            )
            ```
        """
        return Table(
            self,
            self._add_input(name, schema, key, event_time, partitions, settings, is_table=True),
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
        """Read a table of a database as a table. The capture runs as long as the pipeline does.

        Args:
            capture: A capture of `hr.cdc`.
            table: The table's name in the database.
            schema: The columns that are used, which may be some of the table's. Hidden columns can
                be named too, such as `_committed_at TIMESTAMP` for the time of the commit.
            key: The column or columns of the primary key.
            event_time: The column with the event time.

        Returns:
            A table that follows the database's.

        Raises:
            DuplicateStep: Another capture has the same name.
            BadSchema: The schema cannot be parsed.
            UnknownColumn: A key or event time names a column that does not exist.

        Example:
            ```python
            source = hr.cdc.sqlite("shop.db", tables=["people"])
            people = shop.capture(source, "people", schema="id BIGINT, name STRING", key="id")
            ```
        """
        from headrace.cdc.topics import topic_name

        if self.captures.setdefault(capture.name, capture) is not capture:
            raise DuplicateStep(
                f"Two captures have the name {capture.name!r}.",
                fix="give one of them another name, with name=….",
            )
        topic = topic_name(table, capture.prefix, capture.topic)
        step = self._add_input(
            topic, schema, key, event_time, capture.partitions, {}, is_table=True
        )
        step = self._inputs[topic] = replace(step, captured_by=capture.name)
        return Table(self, step)

    def source(self, source: Source) -> None:
        """Read rows by a source as long as the pipeline runs. A run that is to catch up reads what
        is there first.

        Args:
            source: A source of `hr.sources`, into a topic that was declared with `topic` or
                `table`.

        Raises:
            PlanError: Its topic was not declared.
            DuplicateStep: Another source or capture has the same name.

        Example:
            ```python
            shop.source(hr.sources.directory("incoming", topic="orders"))
            ```
        """
        self._declared_input(source.topic)
        if self.captures.setdefault(source.name, source) is not source:
            raise DuplicateStep(
                f"Two sources or captures have the name {source.name!r}.",
                fix="give one of them another name, with name=….",
            )

    def gateway(self, gateway: Gateway) -> None:
        """Receive rows through a gateway as long as the pipeline runs.

        Args:
            gateway: A gateway of `hr.gateways`, into topics that were declared with `topic` or
                `table`.

        Raises:
            PlanError: One of its topics was not declared.
            DuplicateStep: Another gateway has the same name.

        Example:
            ```python
            shop.gateway(hr.gateways.http("orders", port=8080))
            ```
        """
        for name in gateway.topics:
            self._declared_input(name)
        if self.gateways.setdefault(gateway.name, gateway) is not gateway:
            raise DuplicateStep(
                f"Two gateways have the name {gateway.name!r}.",
                fix="give one of them another name, with name=….",
            )

    def ingest(self, df: Any, topic: Stream | Table | str, *, name: str | None = None) -> None:
        """Append the rows of a streaming DataFrame to a topic as long as the pipeline runs.

        Args:
            df: A streaming DataFrame, or a function that makes one from the Spark session. With a
                function, declaring the pipeline starts no Spark.
            topic: A topic that was declared with `topic` or `table`, or its name.
            name: The ingest's name, by which its progress is found; `TOPIC.ingest` if left out.

        Raises:
            PlanError: The topic was not declared, or the DataFrame is no streaming one.
            DuplicateStep: Another ingest has the same name.

        Example:
            ```python
            def new_orders(spark):
                return spark.readStream.schema("order_id BIGINT").json("incoming/")

            shop.ingest(new_orders, "orders")
            ```
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
        entry_name = check_name(name or f"{step.name}.ingest", what="ingest name", error=PlanError)
        if entry_name in self.ingested:
            raise DuplicateStep(
                f"Something is ingested under the name {entry_name!r} already.",
                fix="give it another name with name=….",
            )
        self._ingests.append(Ingest(entry_name, step.topic))
        self.ingested[entry_name] = df

    def sql(
        self, query: str, *, name: str | None = None, file: str = "", **rows: Stream | Table
    ) -> Any:
        """Declare what statements of SQL say, or select rows by a query. The plan is that of the
        Python spelling; `docs/how-to/sql.md` has the statements and clauses.

        Args:
            query: A query, or statements that semicolons separate. All are compiled before any of
                them counts.
            name: The name of the last step of a query.
            file: What errors call the text.
            **rows: Streams and tables of this pipeline by the names that the text has for them,
                besides those of its topics, tables and outputs.

        Returns:
            The stream or table of the last statement, which it selects or declares; of SHOW,
            DESCRIBE and EXPLAIN an Arrow table; None of a statement without rows.

        Raises:
            BadSql: The text has several errors. One alone is raised as what it is: `BadQuery`,
                `UnknownTopic`, `UnknownColumn` or another `PlanError`.

        Example:
            ```python
            bursts = shop.sql('''
                SELECT customer_id, total FROM orders MATCH_RECOGNIZE (
                    PARTITION BY customer_id ORDER BY placed_at
                    MEASURES sum(amount) AS total
                    PATTERN (small{3,} big) WITHIN INTERVAL '10' MINUTE
                    DEFINE small AS amount < 10, big AS amount > 1000
                )
            ''')
            ```
        """
        results = self.sql_session().run(query, name=file, rows=rows)
        last = results[-1]
        if last.answer is not None:
            return last.answer
        if name is None or last.rows is None or last.rows.step.name:
            return last.rows
        return type(last.rows)(self, replace(last.rows.step, name=check_step_name(name) or ""))

    def sql_session(self) -> SqlSession:
        """Internal: the session that has the names of this pipeline's SQL."""
        from headrace.sql.session import SqlSession

        if self._sql_session is None:
            self._sql_session = SqlSession(self)
        return self._sql_session

    def input(self, name: str) -> Stream:
        """Get a topic that was declared before, as a stream.

        Args:
            name: The topic's name.

        Returns:
            The stream that `topic` returned for it.

        Raises:
            UnknownTopic: The topic was not declared.
            StreamOnly: It is a table.

        Example:
            ```python
            large = shop.input("orders").where("amount > 100")
            ```
        """
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
        """Write rows to a derived topic, which has the rows' key. A table is written to a table's
        topic.

        Args:
            name: The topic's name.
            rows: A stream or table of this pipeline.
            partitions: The number of partitions. Rows with a key go by it; those without one go by
                the partition that they came from, and keep its order.
            **settings: Settings of the topic, as in `topic` and `table`.

        Raises:
            DuplicateStep: Another output has the same name.
            CyclicPlan: The rows are computed from that topic.
            PlanError: The name or a setting cannot be used.

        Example:
            ```python
            shop.write("large_orders", orders.where("amount > 100"), retention="7 days")
            ```
        """
        where = f"The output {name!r}"
        step = self._check_output(name, rows, "topic")
        check_columns(step.schema, where=where)
        _check_settings(settings, where=where, is_table=step.is_table)
        declared_topic(
            name,
            to_ddl(step.schema),
            step.key,
            partitions=partitions,
            is_table=step.is_table,
            options=settings,
        )
        self._outputs[name] = TopicOutput(
            name=name, input=step, partitions=partitions, settings=_sorted_settings(settings)
        )

    def view(
        self,
        name: str,
        rows: Table,
        *,
        keep_changes: int | None = None,
        keep: Duration | None = None,
    ) -> View:
        """Keep a table as a view, which is read by key, by range and by SQL, and followed.

        Args:
            name: The view's name.
            rows: A table of this pipeline.
            keep_changes: How many of the newest changes are kept, 100,000 by default. A reader can
                resume following, or read an earlier tick, as far back as these reach.
            keep: How long rows stay in the view. Where the table's key has the end of a window, a
                row goes when the watermark is that much later; otherwise when its newest change is
                that long ago, in tick time. Followers see it deleted. Other outputs of the same
                table keep it. By default rows stay until the table deletes them.

        Returns:
            The view, for reading it from Python once the pipeline has run. In a notebook it shows
            its rows.

        Raises:
            StreamOnly: `rows` is a stream.
            DuplicateStep: Another output has the same name.
            PlanError: The name, `keep_changes` or `keep` cannot be used.

        Example:
            ```python
            revenue_view = shop.view("revenue", revenue)
            ```
        """
        step = self._check_output(name, rows, "view")
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
        if keep is not None:
            step = KeepStep(
                inputs=(step,),
                schema=step.schema,
                key=step.key,
                is_table=True,
                keep_us=positive_us(keep, f"time that the view {name!r} keeps rows"),
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
        pipeline runs.

        The sink follows a derived topic that the rows are written to. An input is in a topic
        already: its sink follows that topic, with the columns that the pipeline declares.

        Args:
            sink: A sink of `hr.sinks`.
            rows: A stream or table of this pipeline.
            topic: The derived topic that the rows are written to and that the sink follows; named
                after the sink's table if left out. A topic that `write` writes the same rows to is
                followed as it is. Of an input, it asks for a copy.
            partitions: The number of partitions of the derived topic.
            **settings: Settings of the derived topic, as in `write`.

        Raises:
            PlanError: `sink` is no sink, nothing says what its rows are called there, or settings
                are given for the topic of an input.
            DuplicateStep: Another output has the same name.

        Example:
            ```python
            shop.sink(hr.sinks.sqlite("shop.db", table="revenue"), revenue)
            ```
        """
        if not isinstance(sink, Sink):
            raise PlanError(
                f"A sink was expected, not a {type(sink).__name__}.",
                fix=(
                    "make one with hr.sinks, as in shop.sink(hr.sinks.sqlite('shop.db',"
                    " table='revenue'), revenue)."
                ),
            )
        stored = _stored_topic(rows) if topic is None else None
        if topic is None and sink.name is None and sink.table is None and stored is None:
            raise PlanError(
                f"The sink ({sink.kind}) does not say what its rows are called there.",
                fix="give it table=….",
            )
        called = sink.table or (stored.topic if stored is not None else "")
        name = topic or sink.name or f"{called}.{sink.kind}"
        if name in self.sinks:
            raise DuplicateStep(
                f"Two sinks have the name {name!r}.", fix="give one of them another name=…."
            )
        if stored is not None:
            given = [*settings, *(["partitions"] if partitions != 1 else [])]
            if given:
                raise PlanError(
                    f"The sink {name!r} follows the input topic {stored.topic!r}, which has"
                    f" settings of its own: {', '.join(given)} cannot be given here.",
                    fix=(
                        f"leave out {', '.join(given)}; or give topic=… for a copy of the rows with"
                        " these settings."
                    ),
                )
            self._check_output(name, rows, "sink")
            sink = replace(
                sink,
                follows=stored.topic,
                columns=tuple(stored.schema.names),
                default_name=name,
            )
        elif not self._is_written(name, rows):
            self.write(name, rows, partitions=partitions, **settings)
        self.sinks[name] = sink

    def _is_written(self, topic: str, rows: Stream | Table) -> bool:
        """Whether `write` has rows written to a topic already."""
        output = self._outputs.get(topic)
        return type(output) is TopicOutput and output.input is rows.step

    def alert(
        self,
        name: str,
        rows: Stream | Table,
        *,
        to: AlertReceiver | Sequence[AlertReceiver] = (),
        every: Duration = "0 seconds",
        by: str | Sequence[str] = (),
        for_: Duration = "0 seconds",
    ) -> None:
        """Notify somebody of rows as long as the pipeline runs. Of a table, a row that is inserted
        fires and one that is deleted resolves; of a stream, each row fires.

        Every message is also in the topic `alerts`, and shown by `headrace run`. `headrace alert
        silence` silences an alert for a while.

        Args:
            name: The alert's name.
            rows: A stream or table of this pipeline.
            to: Webhooks (`hr.sinks.webhook`) and mails (`hr.alerts.email`).
            every: At most one message in this time. Rows that come meanwhile are in the next one.
            by: The column or columns that make a group. Each group has messages of its own, at its
                own pace.
            for_: Of a table, how long a key must have been in it, in tick time, before its row
                fires. One that leaves earlier never does, and starts over when it returns.

        Raises:
            UnknownColumn: `by` names a column that does not exist.
            DuplicateStep: Another output has the same name.
            PlanError: `to` cannot be notified, or `for_` is given for a stream.

        Example:
            ```python
            shop.alert(
                "no_revenue",
                revenue.where("total = 0"),
                to=hr.sinks.webhook("https://example.com/hook"),
                every="5 minutes",
                by="region",
                for_="10 minutes",
            )
            ```
        """
        from headrace.alerts.alert import Alert
        from headrace.durations import to_us

        groups = (by,) if isinstance(by, str) else tuple(by)
        for column in groups:
            if column not in rows.schema.names:
                raise UnknownColumn(column, rows.schema.names, where=f"The alert {name!r}")
        alert = Alert(
            name=name,
            topic=f"alert.{name}",
            to=tuple(to) if isinstance(to, Sequence) else (to,),
            every_us=to_us(every, what="every"),
            by=groups,
        )
        for_us = to_us(for_, what="for_")
        settings: dict[str, Any] = {} if isinstance(rows, Table) else {"retention": "30 days"}
        self.write(alert.topic, self._held(name, rows, for_us) if for_us else rows, **settings)
        self.alerts[name] = alert

    def _held(self, alert: str, rows: Stream | Table, for_us: int) -> Table:
        """The rows of a table that have been in it for some time."""
        if not isinstance(rows, Table):
            raise PlanError(
                f"The alert {alert!r} has for_, and its rows are a stream: each is an event, which"
                " does not last.",
                fix=(
                    "give it a table whose rows are there as long as the condition holds, such as"
                    " an aggregate or to_table(…) with where(…); or leave out for_."
                ),
            )
        step = HoldStep(
            inputs=(rows.step,),
            schema=rows.schema,
            key=rows.key,
            is_table=True,
            for_us=for_us,
        )
        return Table(self, step)

    def ask(
        self, name: str, *, using: Table, question: str | None = None, keep: str = "1 day"
    ) -> Stream:
        """Answer questions to a table, each as of its tick: `POST /ask/NAME` where the pipeline is
        served, or a row in the topic `ask.NAME`.

        Questions and answers are rows of topics, so a replay gives the same answers.

        Args:
            name: The question's name.
            using: The table that answers.
            question: Further columns of a question besides the table's key, as in `"lang STRING"`.
                They come back with the answer.
            keep: How long questions and answers are kept.

        Returns:
            The answers: the question's columns, the table's row, and `found`, which is true, or
            null if there is no row.

        Raises:
            StreamOnly: `using` is a stream.
            PlanError: A column has the name of one of the answer's, or `using` is no table of this
                pipeline.

        Example:
            ```python
            shop.ask("revenue_of", using=revenue, question="lang STRING")
            ```
        """
        check_name(name, what="name of a question", error=PlanError)
        self._check_answering(name, using)
        key = [using.schema.field(column) for column in using.key]
        added = pa.schema([]) if question is None else parse_schema(question)
        for column in added.names:
            if column in using.schema.names or column in {ASK_ID, FOUND}:
                raise PlanError(
                    f"The question {name!r} has a column {column!r}, which the table or the answer"
                    " has too.",
                    fix="rename it.",
                )
        schema = pa.schema([pa.field(ASK_ID, pa.string()), *key, *added])
        questions = self.topic(
            questions_topic(name), schema=to_ddl(schema), key=ASK_ID, retention=keep
        )
        known = using.with_columns(**{FOUND: "true"})
        joined = questions.join(known, on=list(using.key), how="left", name=f"ask.{name}.join")
        assert isinstance(joined.step, JoinStep)
        answers = Stream(self, replace(joined.step, null_matches=True)).key_by(ASK_ID)
        self.write(answers_topic(name), answers, retention=keep)
        return answers

    def add_call(self, call: Call, answers: AnswersStep, requests: RequestsOutput) -> None:
        """Internal: add a recorded call, its answers as an input, its requests as an output."""
        if call.name in self.calls:
            raise DuplicateStep(
                f"Two calls have the name {call.name!r}.",
                fix="give one of them another name, with name=….",
            )
        if call.name in self._inputs:
            raise DuplicateStep(
                f"The call {call.name!r} has the name of an input topic.",
                fix="give it another name, with name=….",
            )
        self.calls[call.name] = call
        self._answers[call.name] = answers
        self._outputs[requests.name] = requests

    def topic_of(self, step: Step) -> str | None:
        """Internal: the derived topic that a step's rows are written to, if there is one."""
        for output in self._outputs.values():
            if type(output) is TopicOutput and output.input is step:
                return output.name
        return None

    # What SQL needs

    def declared_rows(self) -> dict[str, Stream | Table]:
        """Internal: the rows of inputs and outputs, by name."""
        rows: dict[str, Stream | Table] = {}
        steps = {name: output.input for name, output in self._outputs.items()}
        for name, step in {**self._inputs, **steps}.items():
            last = step.input if isinstance(step, KeepStep) else step
            rows[name] = (Table if last.is_table else Stream)(self, last)
        return rows

    def shed_policy(self, **values: Any) -> ShedPolicy:
        """Internal: the policy that `hr.shed` makes of these values."""
        return shed(**values)

    def plan_of(self, rows: Stream | Table) -> PipelinePlan:
        """Internal: the plan of a pipeline whose only output is these rows, called `query`."""
        output = TopicOutput(name="query", input=rows.step)
        inputs = tuple(self._inputs.values())
        return PipelinePlan(name=self.name, inputs=inputs, outputs=with_names(inputs, (output,)))

    def remove(self, kind: str, name: str) -> None:
        """Internal: undo the declaration of an input, an output or a service. Topics stay in
        the log.
        """
        if kind == "alert":
            self.alerts.pop(name, None)
            self._outputs.pop(f"alert.{name}", None)
        elif kind == "sink":
            for topic, sink in list(self.sinks.items()):
                if name in {topic, sink.name, sink.default_name}:
                    del self.sinks[topic]
                    self._outputs.pop(topic, None)
        elif kind == "source":
            self.gateways.pop(name, None)
            if self.captures.pop(name, None) is not None:
                for topic, step in list(self._inputs.items()):
                    if step.captured_by == name:
                        del self._inputs[topic]
        else:
            self._inputs.pop(name, None)
            self._outputs.pop(name, None)

    def declarations(self) -> dict[str, Any]:
        """Internal: everything that was declared so far, for `restore`."""
        return {
            name: dict(value) if isinstance(value, dict) else list(value)
            for name, value in vars(self).items()
            if name in _DECLARED
        }

    def restore(self, declarations: dict[str, Any]) -> None:
        """Internal: undo everything that was declared since `declarations`."""
        vars(self).update(declarations)

    # Planning and running

    def plan(self) -> PipelinePlan:
        """Make the inert plan: every step with its stable name. It can be printed and compared.

        Returns:
            The plan.

        Raises:
            PlanError: The pipeline has no output, or a topic has two uses that exclude each other.
            DuplicateStep: Two steps have the same name.

        Example:
            ```python
            shop.view("revenue", revenue)
            print(shop.plan())
            ```
        """
        if not self._outputs and not self.sinks:
            raise PlanError(
                f"The pipeline {self.name!r} has no output.",
                fix="add write(…), view(…) or sink(…).",
            )
        if not self._outputs and self._ingests:
            raise PlanError(
                f"The pipeline {self.name!r} ingests rows and computes nothing.",
                fix="add write(…) or view(…), or give its sink a topic=….",
            )
        inputs = (*self._inputs.values(), *self._answers.values())
        plan = PipelinePlan(
            name=self.name,
            inputs=inputs,
            outputs=with_names(inputs, tuple(self._outputs.values())),
            ingests=tuple(self._ingests),
        )
        check_side_outputs(plan)
        return plan

    def run(
        self,
        *,
        log: str | None = None,
        state: str | Path | None = None,
        local: str | Path | None = None,
        shards: int | None = None,
        until_caught_up: bool = False,
        final: bool = False,
        stop: Event | None = None,
        on_status: OnStatus | None = None,
        serve: bool = False,
        port: int | None = None,
        on_serving: Callable[[Server], None] | None = None,
        on_gateway: OnReady | None = None,
        on_alert: OnAlert | None = None,
        batch_target: Duration = "30 seconds",
        width: str = "auto",
        accept_edits: Sequence[str] = (),
        master: str | None = None,
        remote: str | None = None,
        config: Mapping[str, Any] | None = None,
        **spark_options: Any,
    ) -> None:
        """Run the pipeline in this process until it is stopped. `headrace run FILE` does the same.

        Args:
            log: The log's address, if the pipeline does not name it.
            state: The directory for state and views, which all machines of a cluster must see.
                By default NAME.state in the directory of the file that declares the pipeline.
            local: The directory for each machine's local copy of state. By default in the state
                directory on one machine, and in the temporary directory on a cluster.
            shards: How many shards keep state; by default as the state has, or as there are cores.
            until_caught_up: Return once everything that is in the log has been processed.
            final: With `until_caught_up`, end event time then: windows, unmatched rows of joins and
                patterns that wait for the watermark are emitted. Rows that are appended after that
                are late for all of them.
            stop: An event that stops the run when it is set.
            on_status: Called with the status after every batch.
            serve: Serve the views over HTTP meanwhile.
            port: The port to serve at; 8765 or any free one if left out.
            on_serving: Called with the server once it listens.
            on_gateway: Called with a gateway and its address once it listens.
            on_alert: Called with every message of an alert.
            batch_target: About how long a batch may take. The results do not depend on it.
            width: How wide batches run: whole in `"one"` task, `"wide"` over many, or `"auto"`, as
                their rows need it. The results do not depend on it.
            accept_edits: Topics whose definition was edited, and that go on with it: their rows up
                to now follow the old definition. Without it, such an edit is refused, since a
                topic's rows cannot be taken back.
            master: Spark's master, such as `"local[2]"` or a cluster's.
            remote: The address of a Spark Connect server.
            config: Settings of Spark by their full names.
            **spark_options: Further options of `hr.spark`: settings of Spark by keyword, with dots
                as underscores, as in `sql_shuffle_partitions=8`.

        Raises:
            ConfigurationError: No log is named, Spark cannot be started, or a final run does not
                end by itself.
            PlanError: The pipeline cannot be planned.
            FencedError: Another runner of the pipeline has taken over.
            RetryError: Spark has ended, and the run cannot start it again.

        Example:
            ```python
            if __name__ == "__main__":
                shop.run(until_caught_up=True)
            ```
        """
        from headrace.runtime.run import run

        given: dict[str, Any] = {"master": master, "remote": remote, "config": config}
        run(
            self,
            log=log,
            state=state,
            local=local,
            shards=shards,
            until_caught_up=until_caught_up,
            final=final,
            stop=stop,
            on_status=on_status,
            serve=serve,
            port=port,
            on_serving=on_serving,
            on_gateway=on_gateway,
            on_alert=on_alert,
            batch_target=batch_target,
            width=width,
            accept_edits=accept_edits,
            **{name: value for name, value in given.items() if value is not None},
            **spark_options,
        )

    def __repr__(self) -> str:
        return f"<Pipeline {self.name!r}: {len(self._inputs)} inputs, {len(self._outputs)} outputs>"

    def __str__(self) -> str:
        return str(self.plan()) if self._outputs else repr(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """In a notebook, the graph."""
        return plan_bundle(self.plan()) if self._outputs else {"text/plain": repr(self)}

    # Checks

    def _add_input(
        self,
        name: str,
        schema: str,
        key: str | Sequence[str] | None,
        event_time: EventTime | ProcessingTime | str | None,
        partitions: int,
        settings: dict[str, Any],
        *,
        is_table: bool,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> TopicStep:
        _refuse_reserved(name)
        if name in self._inputs:
            raise DuplicateStep(
                f"The topic {name!r} is an input already.",
                fix="declare it once, and use what topic(…) or table(…) returned.",
            )
        if name in self.calls:
            raise DuplicateStep(
                f"The topic {name!r} has the name of a recorded call.",
                fix="give the call another name, with name=….",
            )
        if name in self._outputs:
            raise DuplicateStep(
                f"The pipeline writes an output {name!r}, and cannot read it too.",
                fix="use the stream or table that is written.",
            )
        _check_settings(
            settings, where=f"The {'table' if is_table else 'topic'} {name!r}", is_table=is_table
        )
        info = declared_topic(
            name, schema, key, partitions=partitions, is_table=is_table, options=settings
        )
        columns = check_columns(parse_schema(schema), where=f"The topic {name!r}")
        added = _metadata_fields(metadata, event_time, where=f"The topic {name!r}")
        times = EventTime(event_time) if isinstance(event_time, str) else event_time
        if times is not None:
            times.check(pa.schema([*columns, *added]), where=f"The topic {name!r}")
            if is_table and isinstance(times, DeviceTime):
                raise StreamOnly(
                    f"The table {name!r} has hr.device_time, which is for streams.",
                    fix="read it with topic(…), and use to_table(key) behind it.",
                )
            columns = pa.schema([*columns, *times.added_columns(columns)])
        columns = check_columns(pa.schema([*columns, *added]), where=f"The topic {name!r}")
        step = TopicStep(
            name=name,
            topic=name,
            schema=columns,
            key=info.key,
            is_table=is_table,
            event_time=times,
            partitions=partitions,
            settings=_sorted_settings(settings),
            metadata=metadata,
        )
        self._inputs[name] = step
        return step

    def _declared_input(self, topic: Stream | Table | str) -> TopicStep:
        """The input topic of this pipeline, by its stream, table or name."""
        step = self._inputs.get(topic) if isinstance(topic, str) else topic.step
        if not isinstance(step, TopicStep) or self._inputs.get(step.name) is not step:
            raise PlanError(
                f"{topic!r} is not an input topic of the pipeline {self.name!r}.",
                fix="declare it with topic(…) or table(…) first.",
            )
        return step

    def _check_output(self, name: str, rows: Any, kind: str) -> Step:
        """The last step of an output's rows. Raises if it cannot have that name."""
        check_name(name, what=f"{kind} name", error=PlanError)
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
            if kind == "view":
                raise PlanError(
                    f"The view {name!r} has the name of an input topic.",
                    fix=f"choose another name, such as {f'all_{name}'!r}.",
                )
            if self._inputs[name] in topological_order([rows.step]):
                raise CyclicPlan(
                    f"The output {name!r} is computed from the input topic {name!r}: the plan would"
                    " be a cycle.",
                    fix="write to another topic.",
                )
            raise PlanError(
                f"The output {name!r} has the name of an input topic.",
                fix="choose another name; an input's rows come from outside.",
            )
        _refuse_reserved(name)
        if name in self._outputs:
            raise DuplicateStep(
                f"Two outputs have the name {name!r}: a {self._outputs[name].kind} and a {kind}.",
                fix="rename one of them.",
            )
        return rows.step

    def _check_answering(self, name: str, using: Any) -> None:
        """Raise if questions cannot be answered by what was given as `using`."""
        if isinstance(using, Stream):
            raise StreamOnly(
                f"The question {name!r} is to use the stream {using.step.path}: it has no rows that"
                " a question could meet.",
                fix="use a table: to_table(key), or group_by(…).aggregate(…).",
            )
        if not isinstance(using, Table):
            raise PlanError(
                f"The question {name!r} is to use a {type(using).__name__}.",
                fix="give it a table of this pipeline.",
            )
        if using.pipeline is not self:
            raise PlanError(
                f"The question {name!r} is to use a table of another pipeline.",
                fix="write it to a topic, and read that topic here.",
            )
        for column in (ASK_ID, FOUND):
            if column in using.schema.names:
                raise PlanError(
                    f"The question {name!r} uses a table with a column {column!r}, which answers"
                    " have.",
                    fix="rename it.",
                )


def _metadata_fields(
    metadata: tuple[tuple[str, str], ...],
    event_time: EventTime | ProcessingTime | str | None,
    *,
    where: str,
) -> list[pa.Field]:
    """The columns that are added to a topic's rows with what the log knows of them."""
    known = {field.name: field for field in SYSTEM_FIELDS}
    for name, source in metadata:
        if source not in known:
            raise PlanError(
                f"{where} has metadata= with {name!r} from {source!r}.",
                fix=f"name one of {', '.join(map(repr, known))}.",
            )
    if metadata and isinstance(event_time, DeviceTime):
        raise PlanError(
            f"{where} has metadata= and hr.device_time.",
            fix="leave out metadata=; rows of devices are told apart by the device and its time.",
        )
    return [known[source].with_name(name) for name, source in metadata]


def _stored_topic(rows: Any) -> TopicStep | None:
    """The input that rows are, if its topic has exactly these rows: none are dropped, and no column
    is added when they are read.
    """
    step = rows.step if isinstance(rows, Rows) else None
    if not isinstance(step, TopicStep) or step.shed is not None:
        return None
    return step if step.stored_schema.names == step.schema.names else None


def _refuse_reserved(name: str) -> None:
    if name.startswith(RESERVED):
        raise PlanError(
            f"The name {name!r} is reserved: names that start with {RESERVED} are Headrace's own.",
            fix="choose another name.",
        )


def _check_settings(settings: dict[str, Any], *, where: str, is_table: bool) -> None:
    """A table's topic has a history, another topic a retention."""
    known = _TABLE_SETTINGS if is_table else _TOPIC_SETTINGS
    for option in settings:
        if option not in known:
            raise PlanError(
                f"{where} has no setting {option!r}: {nearest(option, known)}",
                fix=f"there is {', '.join(sorted(known))}.",
            )


def _sorted_settings(settings: dict[str, Any]) -> Settings:
    return tuple(sorted(settings.items()))


# Load shedding


def shed(
    *, behind: int, keep: float = 0.0, priority: str | None = None, min_priority: Any = None
) -> ShedPolicy:
    """Drop rows of a topic while too many wait, for `Pipeline.topic(…, shed=hr.shed(…))`.

    Rows are dropped when a tick is cut, and the tick records it, so a replay drops the same rows.
    They are counted: `TOPIC.shed` in `headrace status`.

    Args:
        behind: Rows are dropped while more than this many wait.
        keep: The share of rows that is kept then, from 0 up to but not including 1.
        priority: A column; rows in which it is at least `min_priority` are always kept.
        min_priority: The lowest priority that is always kept.

    Returns:
        The policy.

    Raises:
        PlanError: A value is out of range, or only one of `priority` and `min_priority` is given.

    Example:
        ```python
        clicks = shop.topic(
            "clicks",
            schema="user_id BIGINT, level INT",
            shed=hr.shed(behind=1_000_000, keep=0.1, priority="level", min_priority=3),
        )
        ```
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
    if (priority is None) != (min_priority is None):
        raise PlanError(
            "hr.shed needs both priority= and min_priority=, or neither.",
            fix='say which rows always stay, as in priority="level", min_priority=3.',
        )
    return ShedPolicy(behind=behind, keep=keep, priority=priority, min_priority=min_priority)


def _check_shed(policy: Any, schema: pa.Schema, *, where: str) -> None:
    """Raise if a topic with these columns cannot be shed so."""
    if not isinstance(policy, ShedPolicy):
        raise PlanError(
            f"{where} has shed={policy!r}.", fix="make it with hr.shed(behind=1_000_000, keep=0.1)."
        )
    if policy.priority is None:
        return
    if policy.priority not in schema.names:
        raise UnknownColumn(policy.priority, schema.names, where=where)
    kind = schema.field(policy.priority).type
    try:
        pa.scalar(policy.min_priority).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise PlanError(
            f"{where} sheds by {policy.priority!r}, which is {type_name(kind)}, and"
            f" min_priority={policy.min_priority!r} is not.",
            fix="give a value of that type.",
        ) from None
