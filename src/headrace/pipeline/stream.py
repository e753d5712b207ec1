"""`Stream` and `Table`: what a pipeline chains operations on. Each operation checks its arguments
and adds a step to the inert plan; nothing runs.

A stream only inserts rows. A table has a primary key, and its rows change. `GroupedRows` and
`WindowedRows` are what `group_by` and `window` return, and wait for `aggregate`.

This module has the signatures and their documentation. The checks are in `joins`, `windows`,
`aggregates`, `patterns` and `search`; columns and expressions are checked in `headrace.plan`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import pyarrow as pa

from headrace.durations import to_us
from headrace.error_policy import NULL, check_error_policy
from headrace.errors import PlanError, StreamOnly
from headrace.expressions.function_calls import shows_calls
from headrace.expressions.literals import quoted_name
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.patterns.parser import DROP as FULL_DROP
from headrace.operators.patterns.parser import MAX_MATCHES, MAX_ROWS, MAX_RULES, ONE_ROW, PAST_LAST
from headrace.operators.row_functions import RowFunction, lead
from headrace.operators.windows.late_policy import LatePolicy, drop
from headrace.operators.windows.specs import WindowSpec
from headrace.pipeline.aggregates import (
    Aggregation,
    bind_aggregates,
    distinct_step,
    first_of_each_key,
    first_step,
    newest_by,
    ranked_step,
    top_step,
)
from headrace.pipeline.foreign_names import (
    GROUP_REPLACEMENTS,
    REPLACEMENTS,
    TABLE_REPLACEMENTS,
    operations_of,
    unknown_operation,
)
from headrace.pipeline.frames import RowFrame, check_frame, frame_input, over_step
from headrace.pipeline.functions import (
    explode_step,
    map_step,
    refusal_for_table,
    sample_step,
    with_calls,
    with_calls_of_results,
)
from headrace.pipeline.joins import AsOf, Bounds, as_of, history_step, join_step
from headrace.pipeline.relation import Relation
from headrace.pipeline.windows import (
    check_window,
    compare_step,
    require_event_time,
    window_schema,
    without_late_moves,
)
from headrace.plan import columns as cols
from headrace.plan.join_steps import WAIT
from headrace.plan.plan import (
    AggregateStep,
    ChangesStep,
    DedupeStep,
    KeyByStep,
    SelectStep,
    Step,
    ToTableStep,
    UnionStep,
    WhereStep,
)
from headrace.plan.window_steps import WINDOW_END, WINDOW_START, WindowStep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.operators.file_table import FileTable
    from headrace.operators.processors.processor import Processor
    from headrace.pipeline.patterns import PatternText
    from headrace.pipeline.preview import Preview

Names = str | Sequence[str]
Duration = str | timedelta


class Rows(Relation):
    """The operations that streams and tables share."""

    @shows_calls
    def select(
        self, *columns: str, name: str | None = None, errors: str = NULL, **named: str
    ) -> Self:
        """Keep only these columns, each a column's name or a Spark SQL expression.

        Args:
            *columns: Names, `"*"` for all columns, `"* EXCEPT (note, region)"` for all but some, or
                expressions with a name, as in `"amount * rate AS tax"`.
            name: The step's name, by which its state and dead letters are found. Derived from the
                output if left out.
            errors: What becomes of a row on which an expression fails: `"null"` makes the value
                null and counts it, `"divert"` sends the row to dead letters, `"stop"` ends the run
                with an error that names the row.
            **named: Further expressions by the name of their column, as in `tax="amount * rate"`.

        Returns:
            A stream, or a table with the same key, with these columns.

        Raises:
            UnknownColumn: An expression reads a column that does not exist.
            BadExpression: An expression cannot be parsed, or is not allowed.
            PlanError: A table's key is left out, two columns have one name, or `errors` is none of
                the three.

        Example:
            ```python
            taxed = orders.select("order_id", "amount * 0.2 AS tax", region="upper(region)")
            ```
        """
        where = self.step_label("select", name)
        step, columns, named = with_calls(self.step, columns, named, errors=errors, where=where)
        selection = cols.select_columns(step, columns, named, where=where)
        return replace(self, step=step).add_selection(selection, name=name, errors=errors)

    @shows_calls
    def with_columns(
        self, *columns: str, name: str | None = None, errors: str = NULL, **named: str
    ) -> Self:
        """Add columns, or replace columns of the same name where they stand.

        Args:
            *columns: Expressions with a name, as in `"amount * rate AS tax"`.
            name: The step's name.
            errors: What becomes of a row on which an expression fails: `"null"`, `"divert"` or
                `"stop"`, as in `select`.
            **named: Expressions by the name of their column.

        Returns:
            A stream or table with all columns and these.

        Raises:
            UnknownColumn: An expression reads a column that does not exist.
            BadExpression: An expression cannot be parsed, or is not allowed.
            PlanError: A table's key would change, or `errors` is none of the three.

        Example:
            ```python
            taxed = orders.with_columns(tax="amount * 0.2", day="date(placed_at)")
            ```
        """
        where = self.step_label("with_columns", name)
        step, columns, named = with_calls(self.step, columns, named, errors=errors, where=where)
        selection = cols.add_columns(step, columns, named, where=where)
        return replace(self, step=step).add_selection(selection, name=name, errors=errors)

    @shows_calls
    def where(self, condition: str, *, name: str | None = None, errors: str = NULL) -> Self:
        """Keep the rows for which a condition is true. A row for which it is null is left out.

        Args:
            condition: A Spark SQL expression of type BOOLEAN.
            name: The step's name.
            errors: What becomes of a row on which the condition fails: `"null"` leaves it out and
                counts it, `"divert"` sends it to dead letters, `"stop"` ends the run with an error
                that names the row.

        Returns:
            A stream or table with the same columns and key.

        Raises:
            UnknownColumn: The condition reads a column that does not exist.
            BadExpression: The condition cannot be parsed, or is not allowed.
            UnfitColumn: The expression is not BOOLEAN.
            PlanError: `errors` is none of the three.

        Example:
            ```python
            large = orders.where("amount > 100 AND region = 'north'")
            ```
        """
        where = self.step_label("where", name)
        step, (rewritten,), _ = with_calls(self.step, [condition], {}, errors=errors, where=where)
        if step is not self.step:
            everything = [quoted_name(column) for column in self.schema.names]
            fitting = replace(self, step=step).where(rewritten, errors=errors)
            return fitting.select(*everything, name=name)
        cols.parse_condition(condition, self.schema, where=where)
        return self._add(
            WhereStep,
            name=name,
            schema=self.schema,
            key=self.key,
            condition=condition,
            errors=check_error_policy(errors, where=f"The step {where}"),
        )

    @shows_calls
    def group_by(self, *columns: str, **named: str) -> GroupedRows:
        """Group rows, for `aggregate`.

        Args:
            *columns: Names of columns, or expressions with a name, as in
                `"date(placed_at) AS day"`.
            **named: Further groups by expression, as in `day="date(placed_at)"`.

        Returns:
            Groups; call `aggregate` on them.

        Raises:
            UnknownColumn: A column does not exist.
            BadExpression: An expression cannot be parsed, or has no name.
            PlanError: No column is named, or one cannot be a key.

        Example:
            ```python
            revenue = orders.group_by("region", day="date(placed_at)").aggregate(
                total=hr.agg.sum("amount")
            )
            ```
        """
        where = f"{self.step.path}.group_by"
        if not columns and not named:
            raise PlanError(
                f"The step {where} names no columns.",
                fix=(
                    "name at least one; for one group of all rows leave out group_by, and write"
                    " aggregate(n=hr.agg.count())."
                ),
            )
        rows, names = _with_group_columns(self, columns, named, where=where)
        return GroupedRows(rows, cols.key_columns(names, rows.schema, where=where))

    def aggregate(
        self,
        *,
        name: str | None = None,
        errors: str = NULL,
        ttl: Duration | None = None,
        **aggregates: AggregateSpec,
    ) -> Table:
        """Compute one row of all rows.

        Args:
            name: The step's name.
            errors: What becomes of a row on which an expression fails, as in
                `group_by(…).aggregate`.
            ttl: Of a stream: how long the row stays after the newest row that came.
            **aggregates: Aggregates of `hr.agg` by the name of their column.

        Returns:
            A table with one row, once a row has come. A table has a key: the column `everything`,
            which is true. One shard computes it; rows are combined before they are sent there.

        Raises:
            UnknownColumn: An aggregate reads a column that does not exist.
            UnfitColumn: An aggregate does not take the type of its column.
            PlanError: No aggregate is named, or `errors` is none of the three.

        Example:
            ```python
            shop_total = orders.aggregate(orders=hr.agg.count(), revenue=hr.agg.sum("amount"))
            ```
        """
        groups = self.group_by(everything="true")
        return groups.aggregate(name=name, errors=errors, ttl=ttl, **aggregates)

    def window(
        self, window: WindowSpec, *, late: LatePolicy | None = None, emit: str = "final"
    ) -> WindowedRows:
        """Assign rows to windows over event time, for `group_by` and `aggregate`.

        Args:
            window: `hr.tumbling("1 minute")`, `hr.hopping`, `hr.sliding` or `hr.session`.
            late: What becomes of rows behind the horizon or the watermark: `hr.late.drop()`, the
                default, `hr.late.correct("1 hour")` or `hr.late.divert("late_rows")`.
            emit: `"final"` emits a window once, when the watermark passes its end; `"changes"`
                emits it on every change.

        Returns:
            Windows; call `aggregate` on them, or `group_by` first.

        Raises:
            PlanError: The rows have no event time, or an argument does not fit.

        Example:
            ```python
            hourly = (
                orders.window(hr.tumbling("1 hour"), late=hr.late.correct("1 day"))
                .group_by("region")
                .aggregate(orders=hr.agg.count())
            )
            ```
        """
        late = late or drop()
        check_window(self, window, late=late, emit=emit)
        return WindowedRows(self, window, late, emit)

    def sample(
        self,
        fraction: float,
        *,
        by: Names | None = None,
        seed: int = 0,
        name: str | None = None,
    ) -> Self:
        """Keep a part of the rows, chosen by what each row is: the same rows in every replay,
        whatever the batches.

        Args:
            fraction: How many of the rows are kept, above 0 and up to 1: 0.01 keeps about every
                hundredth.
            by: The column or columns that decide: all rows with the same values are kept, or none
                of them. By default a row of a topic is chosen by its partition and offset, with
                what was made of it by `explode` and the like; a row that a step with state made by
                its values; and a row of a table by its key.
            seed: Another seed chooses other rows. Samples with the same seed agree: a smaller one
                is part of a larger one.
            name: The step's name.

        Returns:
            A stream or table with the same columns and key.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: `fraction` is out of range, or `by` names columns of a table that are not in
                its key.

        Example:
            ```python
            few = orders.sample(0.01)
            of_few_customers = orders.sample(0.01, by="customer_id")
            ```
        """
        step = sample_step(self, fraction, by, seed, name)
        return type(self)(self.pipeline, step)

    def process(
        self,
        processor: type[Processor] | Processor,
        *,
        key: Names,
        errors: str = "stop",
        ttl: Duration | None = None,
        name: str | None = None,
        **inputs: Rows,
    ) -> Any:
        """Run a class of one's own over the rows of each key, with state and timers: for what no
        other operation says.

        Args:
            processor: A class that extends `hr.Processor`, or an instance with settings.
            key: The column or columns of the key. All inputs and the output have them. Null is a
                key.
            errors: What becomes of a row on which the processor fails: with `"stop"` the run ends
                with an error that names it; with `"divert"` it becomes a dead letter, and its key
                stays as it was.
            ttl: How long a key is kept after its newest row, in tick time. Then its values and
                timers are forgotten without a call; a row that comes later begins it anew. By
                default keys stay for ever.
            name: The step's name.
            **inputs: Further streams and tables, whose rows go to the method `on_NAME`. Rows of
                tables are changes, with a column `_change_type`.

        Returns:
            A stream of what the processor emits, keyed by `key`; a table if the class has a
            `table_key`. It has this stream's event time if the output has that column. `side` gives
            the further outputs that the class declares.

        Raises:
            PlanError: The processor's class lacks something, or inputs and output do not fit.
            NoFingerprint: Edits of the code could not be noticed.

        Example:
            ```python
            class Totals(hr.Processor, each_key=True):
                output = "customer_id BIGINT, total DOUBLE"
                total = hr.state("DOUBLE", default=0.0)

                def on_row(self, row, ctx):
                    ctx["total"] += row["amount"]
                    return {**ctx.key, "total": ctx["total"]}

            totals = orders.process(Totals, key="customer_id")
            ```
        """
        from headrace.pipeline.processors import process_step

        step = process_step(self, processor, key, inputs, errors=errors, ttl=ttl, name=name)
        return (Table if step.is_table else Stream)(self.pipeline, step)

    def side(self, output: str) -> Stream:
        """The rows that a processor emits to a further output: `hr.side_output` of its class.

        Args:
            output: The name of the attribute.

        Returns:
            A stream of these rows.

        Raises:
            PlanError: This is not what `process` returned, or the class has no such output.

        Example:
            ```python
            class Checked(hr.Processor, each_key=True):
                output = "customer_id BIGINT, amount DOUBLE"
                odd = hr.side_output("customer_id BIGINT, order_id BIGINT")

                def on_row(self, row, ctx):
                    if row["amount"] < 0:
                        ctx.emit_to("odd", customer_id=row["customer_id"], order_id=row["order_id"])
                    else:
                        ctx.emit(customer_id=row["customer_id"], amount=row["amount"])

            checked = orders.process(Checked, key="customer_id")
            odd = checked.side("odd")
            ```
        """
        from headrace.pipeline.processors import side_step

        return Stream(self.pipeline, side_step(self, output))

    def df(
        self, spark: SparkSession | None = None, *, log: str | None = None, **options: Any
    ) -> DataFrame:
        """Read the rows as a streaming DataFrame, for anything that Spark can do.

        Row-local steps become Spark SQL, in which an expression that fails gives null. A step that
        keeps state must be written to a topic, which is read then. A table's rows come as its
        changes, with `_change_type`.

        Args:
            spark: The session; `hr.spark()` if left out.
            log: The log's address, if the pipeline does not name it.
            **options: Options of reading a topic with `format("headrace")`, such as
                `startingOffsets`.

        Returns:
            A streaming DataFrame.

        Raises:
            NotSupported: A step keeps state, and its rows are written to no topic.
            ConfigurationError: No log is named.

        Example:
            ```python
            def frame():
                return orders.where("amount > 100").df(startingOffsets="earliest")
            ```
        """
        from headrace.pipeline.dataframes import dataframe

        return dataframe(self, spark, log, options)

    def preview(
        self,
        rows: int = 20,
        *,
        of: int = 10_000,
        given: Mapping[str, Any] | None = None,
        log: str | None = None,
        spark: SparkSession | None = None,
    ) -> Preview:
        """Compute what this gives on the newest rows, at once and without a run of the pipeline:
        for a look in a notebook, and to try out functions. Nothing is stored.

        The newest rows of each topic are copied to a temporary directory, and the steps run there:
        all rows in one tick, after which event time ends, so that windows that are open are shown
        too. Tables have what these rows make of them. Steps that Python computes need no JVM;
        others start Spark.

        Args:
            rows: How many rows to show: the newest ones, of a table the first by key.
            of: How many of the newest rows of each topic are read.
            given: Rows for topics, by name, instead of those in the log: dictionaries, an Arrow
                table or a DataFrame of pandas.
            log: The log's address, if the pipeline does not name it.
            spark: A session to use; by default one is started where it is needed.

        Returns:
            The rows, which a notebook shows as a table; `to_pandas()`, `to_arrow()` and
            `to_pylist()` give them.

        Raises:
            UnknownTopic: A topic does not exist yet.
            FunctionFailed: A function failed on a row, and `errors="stop"`.
            ConfigurationError: No log is named.

        Example:
            ```python
            def look():
                return orders.where("amount > 100").preview(5)
            ```
        """
        from headrace.pipeline.preview import preview

        return preview(self, rows, of=of, given=given, log=log, spark=spark)

    def add_selection(self, selection: cols.Selection, *, name: str | None, errors: str) -> Self:
        """Internal: these rows behind a step that computes a checked selection."""
        where = self.step_label("select", name)
        if name is not None and name in self.schema.names:
            raise PlanError(
                f"The step {where} has the name of a column: name= names the step, and makes no"
                " column called 'name'.",
                fix=(
                    f"for such a column write {f'{name} AS name'!r}; for the step choose another"
                    " name."
                ),
            )
        errors = check_error_policy(errors, where=f"The step {where}")
        return self._add(
            SelectStep,
            name=name,
            schema=selection.schema,
            key=selection.key_of(self.step, where=where),
            columns=selection.columns,
            errors=errors,
        )

    def _add(
        self, kind: type[Step], *, name: str | None, others: Sequence[Rows] = (), **fields: Any
    ) -> Self:
        fields.setdefault("is_table", self.step.is_table)
        step = kind(name=name or "", inputs=(self.step, *(each.step for each in others)), **fields)
        return type(self)(self.pipeline, step)

    def _union(self, others: Sequence[Rows], *, name: str | None) -> Self:
        where = self.step_label("union", name)
        for other in others:
            # Raise if two sides of a union do not fit together.
            if not isinstance(other, Rows):
                raise PlanError(
                    f"The step {where} was given a {type(other).__name__}.",
                    fix="give it streams, or tables.",
                )
            if other.pipeline is not self.pipeline:
                raise PlanError(
                    f"The step {where} unites rows of two pipelines, {self.pipeline.name!r} and"
                    f" {other.pipeline.name!r}.",
                    fix="write one of them to a topic, and read that topic here.",
                )
            if other.step.is_table != self.step.is_table:
                table = (self if self.step.is_table else other).step.path
                raise StreamOnly(
                    f"The step {where} unites a stream with the table {table}: a table changes"
                    " rows, a"
                    " stream only inserts.",
                    fix="use changes() of the table, or to_table(key) of the stream.",
                )
            cols.check_same_columns(self.step, other.step, where=where)
        steps = [self.step, *(each.step for each in others)]
        return self._add(
            UnionStep,
            name=name,
            others=others,
            schema=cols.shared_schema(steps),
            key=cols.shared_key(steps),
        )

    if not TYPE_CHECKING:  # or every name would pass the type checker

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in {"step", "pipeline"}:
                raise AttributeError(name)
            table = isinstance(self, Table)
            raise unknown_operation(
                f"The {'table' if table else 'stream'} {self.step.path}",
                name,
                TABLE_REPLACEMENTS if table else REPLACEMENTS,
                operations_of(type(self)),
            )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.step.path} of the pipeline {self.pipeline.name!r}:"
            f" {', '.join(self.schema.names)}>"
        )


class Stream(Rows):
    """Rows that are inserted and never change.

    `Pipeline.topic` returns one, and so does every operation that inserts only.

    Example:
        ```python
        large = orders.where("amount > 100").select("order_id", "amount")
        ```
    """

    def key_by(self, *columns: str, name: str | None = None) -> Stream:
        """Key the rows by other columns: a topic they are written to is partitioned by these, and
        patterns are matched per key.

        Args:
            *columns: Names of columns.
            name: The step's name.

        Returns:
            A stream with the same rows.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: No column is named, or one cannot be a key.

        Example:
            ```python
            by_customer = orders.key_by("customer_id")
            ```
        """
        where = self.step_label("key_by", name)
        return self._add(
            KeyByStep,
            name=name,
            schema=self.schema,
            key=cols.key_columns(columns, self.schema, where=where),
        )

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        """Put the rows of several streams into one.

        Args:
            *others: Streams of the same pipeline with the same columns, in any order.
            name: The step's name.

        Returns:
            A stream with the rows of all of them.

        Raises:
            PlanError: A stream belongs to another pipeline, or its columns differ.
            StreamOnly: One of them is a table.

        Example:
            ```python
            both = orders.where("region = 'north'").union(orders.where("region = 'south'"))
            ```
        """
        return self._union(others, name=name)

    def dedupe(
        self, *, on: Names, within: Duration, keep: str = "first", name: str | None = None
    ) -> Stream:
        """Keep the first row of each key, and drop those that repeat it within some time; or keep
        the last.

        Args:
            on: The column or columns that identify a row.
            within: How long a key is remembered, in event time, or in tick time if the rows have
                no event time. A row that repeats its key later than that counts as new.
            keep: `"first"` emits a row at once, and drops those that come within `within` before or
                after it. `"last"` drops a row if another one of its key comes at most `within`
                later, so it emits a row when that time is over. Of rows with one event time the
                last to arrive counts.
            name: The step's name.

        Returns:
            A stream with the same columns.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: `within` is zero, `keep` is neither of the two, or the last row is kept of a
                stream without event time.
            BadDuration: `within` is no duration.

        Example:
            ```python
            once = orders.dedupe(on="order_id", within="1 hour")
            ```
        """
        where = self.step_label("dedupe", name)
        within_us = to_us(within, what=f"within of the step {where}")
        if within_us == 0:
            raise PlanError(
                f"The step {where} compares rows within no time at all.",
                fix="give a duration above zero, such as within='1 hour'.",
            )
        if keep == "last":
            return self._last_of_repeated(on, within, name, where=where)
        if keep != "first":
            raise PlanError(
                f"The step {where} keeps {keep!r}.", fix='choose keep="first" or keep="last".'
            )
        return self._add(
            DedupeStep,
            name=name,
            schema=self.schema,
            key=self.key,
            on=cols.key_columns(on, self.schema, where=where),
            within_us=within_us,
        )

    def map_batches(
        self,
        function: Callable[[pa.Table], Any],
        schema: str,
        *,
        errors: str = "stop",
        version: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Make other rows of the rows, with a function over Arrow tables.

        The function is called with the rows of a batch, and must treat each row by itself: how many
        a batch has may be different in a replay. It returns a row for each row, in order; or any
        number of rows with a further column `_row`, the index of the row that each is from, in
        order.

        Args:
            function: The function: an Arrow table with this stream's columns in; an Arrow table,
                record batch or pandas DataFrame out.
            schema: The columns of the result.
            errors: What becomes of a row on which the function fails: `"stop"` ends the run with an
                error that names the row, `"divert"` sends it to dead letters.
            version: The function's version, instead of its fingerprint: code of the same version
                counts as the same.
            name: The step's name.

        Returns:
            A stream of the rows that the function returns. It has this stream's event time if the
            schema has that column.

        Raises:
            BadSchema: The schema cannot be read.
            PlanError: A column has a reserved name, or `errors` is none of the two.
            UnfitColumn: The event time has another type in the schema.
            NoFingerprint: Edits of the code could not be noticed.

        Example:
            ```python
            def with_tax(rows):
                return rows.append_column("tax", pc.multiply(rows["amount"], 0.2))

            taxed = orders.select("order_id", "amount").map_batches(
                with_tax, "order_id BIGINT, amount DOUBLE, tax DOUBLE"
            )
            ```
        """
        step = map_step(
            self, function, schema, each_row=False, errors=errors, version=version, name=name
        )
        return Stream(self.pipeline, step)

    def flat_map(
        self,
        function: Callable[[dict[str, Any]], Iterable[dict[str, Any]]],
        schema: str,
        *,
        errors: str = "stop",
        version: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Make any number of rows of each row, with a function over dictionaries. `map_batches` is
        faster.

        Args:
            function: The function: a row as a dictionary in, dictionaries out.
            schema: The columns of the result.
            errors: What becomes of a row on which the function fails: `"stop"` or `"divert"`, as in
                `map_batches`.
            version: The function's version, instead of its fingerprint.
            name: The step's name.

        Returns:
            A stream of the rows that the function returns. It has this stream's event time if the
            schema has that column.

        Raises:
            BadSchema: The schema cannot be read.
            PlanError: A column has a reserved name, or `errors` is none of the two.
            UnfitColumn: The event time has another type in the schema.
            NoFingerprint: Edits of the code could not be noticed.

        Example:
            ```python
            def regions(row):
                for part in row["region"].split("-"):
                    yield {"order_id": row["order_id"], "region": part}

            parts = orders.flat_map(regions, "order_id BIGINT, region STRING")
            ```
        """
        step = map_step(
            self, function, schema, each_row=True, errors=errors, version=version, name=name
        )
        return Stream(self.pipeline, step)

    def explode(
        self,
        column: str,
        *names: str,
        position: str | None = None,
        outer: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Make a row for each element of a list, or for each entry of a map.

        Args:
            column: A column of type ARRAY or MAP, which the result does not have.
            *names: Names for what replaces it. A list of structs becomes a column for each member,
                a map the columns `key` and `value`; another list, or one with a single name given,
                one column of elements.
            position: The name of a column with each element's position, from 0. By default there is
                none.
            outer: Whether a row whose list is empty or null gives a row with nulls. By default it
                gives none.
            name: The step's name.

        Returns:
            A stream with the other columns, the position, and the elements.

        Raises:
            UnknownColumn: The column does not exist.
            UnfitColumn: It is neither ARRAY nor MAP.
            PlanError: Two columns have one name, or another number of names is given.

        Example:
            ```python
            words = orders.select("order_id", words="split(region, '-')").explode("words", "word")
            ```
        """
        step = explode_step(self, column, names, position=position, outer=outer, name=name)
        return Stream(self.pipeline, step)

    def posexplode(
        self,
        column: str,
        *names: str,
        position: str = "pos",
        outer: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Make a row for each element of a list, or for each entry of a map, with its position:
        `explode` with a position.

        Args:
            column: A column of type ARRAY or MAP, which the result does not have.
            *names: Names for what replaces it, as in `explode`.
            position: The name of the column with each element's position, from 0.
            outer: Whether a row whose list is empty or null gives a row with nulls.
            name: The step's name.

        Returns:
            A stream with the other columns, the position, and the elements.

        Raises:
            UnknownColumn: The column does not exist.
            UnfitColumn: It is neither ARRAY nor MAP.
            PlanError: Two columns have one name, or another number of names is given.

        Example:
            ```python
            parts = orders.select("order_id", part="split(region, '-')").posexplode("part")
            ```
        """
        step = explode_step(
            self, column, names, position=position, outer=outer, name=name, operation="posexplode"
        )
        return Stream(self.pipeline, step)

    def inline(
        self, column: str, *names: str, outer: bool = False, name: str | None = None
    ) -> Stream:
        """Make a row for each struct of a list, with a column for each member.

        Args:
            column: A column of type ARRAY<STRUCT<…>>, which the result does not have.
            *names: Names for the members' columns, if not their own.
            outer: Whether a row whose list is empty or null gives a row with nulls.
            name: The step's name.

        Returns:
            A stream with the other columns and the members.

        Raises:
            UnknownColumn: The column does not exist.
            UnfitColumn: It is no list of structs.
            PlanError: Two columns have one name, or another number of names is given.

        Example:
            ```python
            parts = orders.select(
                "order_id", parts="array(named_struct('region', region, 'paid', amount))"
            ).inline("parts")
            ```
        """
        step = explode_step(
            self, column, names, position=None, outer=outer, name=name, operation="inline"
        )
        return Stream(self.pipeline, step)

    def call(
        self,
        function: Callable[..., Awaitable[Any]],
        schema: str,
        *,
        arguments: Names | None = None,
        key: Names | None = None,
        concurrency: int = 20,
        timeout: Duration = "30 seconds",
        retries: int = 4,
        max_per_second: float | None = None,
        batch: int | None = None,
        cache: Duration | None = None,
        ordered: bool = False,
        client: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        errors: str = "divert",
        keep: Duration | None = None,
        partitions: int = 1,
        version: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Add the answers of a service to the rows: of a geocoder, a language model, a database.

        Each answer is recorded in the log, in the topic `__calls.PIPELINE.NAME`, before anything
        uses it. So a replay calls nobody and gives the same rows, and an answer that is recorded is
        never asked for again. Towards the service a call is made at least once; all tries of a row
        have the same `ctx.idempotency_key`. Answers come in a later tick than their rows: nothing
        else waits for them.

        Args:
            function: An `async def` that gets a row as a dictionary, or with `batch` a list of
                them, and returns the answer as a dictionary, or a list of them in that order. If
                it takes a second argument, it gets an `hr.RequestContext`.
            schema: The columns of an answer, which the rows do not have.
            arguments: The columns that the function gets, and that the cache goes by; all by
                default.
            key: The columns that the result is keyed by; by default as this stream is.
            concurrency: How many calls are in flight at most.
            timeout: How long one try may take.
            retries: How many further tries follow a first one that raised, took too long, or
                returned what does not fit, after growing pauses. A function that raises
                `hr.errors.CallRefused` is not tried again. An error with an attribute `wait_s` asks
                for a pause of so many seconds at least.
            max_per_second: How many calls are begun per second at most.
            batch: How many rows the function gets at once, at most.
            cache: How long an answer stands for rows with equal arguments. They are not asked about
                then; their answers are recorded like the others.
            ordered: Whether answers keep the order of their rows: per key, or per partition without
                one. Otherwise each comes when it is there.
            client: A function that returns an asynchronous context manager, such as a pool of
                connections. It is entered once per run, and what it gives is `ctx.client`.
            errors: What becomes of a row that has no answer after all tries: `"divert"` sends it to
                the dead letters `NAME.dead`, `"null"` makes the answer's columns null, `"stop"`
                ends the run.
            keep: How long recorded answers are kept; by default for ever. A replay from before that
                is refused.
            partitions: The number of partitions of requests and answers.
            version: The function's version, instead of its fingerprint.
            name: The call's name, by which its answers are found; by default the function's.

        Returns:
            A stream of the answered rows: this stream's columns, and those of the answers. It has
            this stream's event time, whose watermark waits for rows without an answer.

        Raises:
            BadSchema: The schema cannot be read.
            UnknownColumn: An argument or the key is a column that does not exist.
            DuplicateStep: Another call, or an input topic, has the same name.
            PlanError: The function is not async, a setting is out of range, or a column exists.
            NoFingerprint: Edits of the code could not be noticed.

        Example:
            ```python
            async def score(row, ctx):
                answer = await ctx.client.post("/score", json=row)
                return {"score": answer.json()["score"]}

            scored = orders.call(
                score, "score DOUBLE", arguments=["amount"], cache="1 day", version="1"
            )
            ```
        """
        from headrace.pipeline.calls import call_step

        rows = self
        if key is not None:
            names = (key,) if isinstance(key, str) else tuple(key)
            rows = self.key_by(*names)
        step = call_step(
            rows,
            function,
            schema,
            arguments=arguments,
            concurrency=concurrency,
            timeout=timeout,
            retries=retries,
            max_per_second=max_per_second,
            batch=batch,
            cache=cache,
            ordered=ordered,
            client=client,
            errors=errors,
            keep=keep,
            partitions=partitions,
            version=version,
            name=name,
        )
        return Stream(self.pipeline, step)

    def _last_of_repeated(
        self, on: Names, within: Duration, name: str | None, *, where: str
    ) -> Stream:
        """The rows that none of the same key follows within some time."""
        following = "is_followed"
        while following in self.schema.names:
            following += "_"
        on = cols.key_columns(on, self.schema, where=where)
        functions: dict[str, Any] = {following: lead("true", within=within)}
        followed = self.over(on).aggregate(name=name, **functions)
        return followed.where(f"{following} IS NULL").select(*map(quoted_name, self.schema.names))

    def to_table(
        self,
        key: Names,
        *,
        by: str | None = None,
        ttl: Duration | None = None,
        name: str | None = None,
    ) -> Table:
        """Keep the newest row of each key, as a table: by event time if the rows have one,
        otherwise by arrival. Of rows with the same time, the last to arrive counts.

        Args:
            key: The column or columns of the table's primary key. A row with a null in it becomes
                a dead letter; of `last(per=)` null is a group.
            by: The column that says which row is newer, instead of the event time; null is older
                than every value. `"_arrival"` keeps the row that arrived last.
            ttl: How long a key stays after its newest row, in tick time. Then its row is deleted
                from the table, and from everything computed from it; a row that comes later
                inserts it again. By default keys stay for ever.
            name: The step's name.

        Returns:
            A table; each row of the stream inserts its key's row, or replaces it if it is newer.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: A column cannot be a key, or `ttl` is zero.
            UnfitColumn: The values of `by` have no order.

        Example:
            ```python
            latest = orders.to_table("customer_id")
            ```
        """
        return self._newest_rows(key, by, ttl, name, null_groups=False)

    def _newest_rows(
        self,
        key: Names,
        by: str | None,
        ttl: Duration | None,
        name: str | None,
        *,
        null_groups: bool,
    ) -> Table:
        where = self.step_label("to_table", name)
        step = ToTableStep(
            name=name or "",
            inputs=(self.step,),
            schema=self.schema,
            key=cols.key_columns(key, self.schema, where=where),
            is_table=True,
            by=newest_by(self.step, by, where=where),
            ttl_us=None if ttl is None else positive_us(ttl, f"ttl of the step {where}"),
            null_groups=null_groups,
        )
        return Table(self.pipeline, step)

    def last(self, *, per: Names, by: str | None = None, name: str | None = None) -> Table:
        """Keep the last row of each group, as a table: `to_table`, but null is a group.

        Args:
            per: The column or columns that make a group. Null is a group.
            by: The column by which rows are ordered, instead of the event time; `"_arrival"` keeps
                the row that arrived last. Of rows that are equal, the last to arrive counts.
            name: The step's name.

        Returns:
            A table keyed by `per`.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: A column cannot be a key.
            UnfitColumn: The values of `by` have no order.

        Example:
            ```python
            last_orders = orders.last(per="customer_id")
            ```
        """
        return self._newest_rows(per, by, None, name, null_groups=True)

    def first(self, *, per: Names, by: Names | None = None, name: str | None = None) -> Table:
        """Keep the first row of each group, as a table.

        Args:
            per: The column or columns that make a group. Null is a group.
            by: The column by which rows are ordered, instead of the event time; `"_arrival"` keeps
                the row that arrived first. A list has columns, each smallest first unless
                `"name DESC"`. Of rows that are equal, the first to arrive counts. Null comes last.
            name: The step's name.

        Returns:
            A table keyed by `per`. A row that arrives later and is earlier replaces the one before.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: A column cannot be a key.

        Example:
            ```python
            first_orders = orders.first(per="customer_id")
            ```
        """
        return Table(self.pipeline, first_step(self, per, by, name))

    def top(
        self,
        n: int,
        *,
        by: Names,
        per: Names | None = None,
        rank: str = "rank",
        name: str | None = None,
    ) -> Table:
        """Keep the first rows by some order, of all rows or of each group, with their ranks. The
        state has `n` rows a group, since a stream only inserts.

        Args:
            n: How many rows, at most 1,000.
            by: The column or columns to order by, largest first unless `"name ASC"`. Of rows that
                are equal, the first to arrive comes first. Null comes last.
            per: The column or columns that make a group. Null is a group.
            rank: The name of the column with a row's rank, from 1. INT.
            name: The step's name.

        Returns:
            A table with the stream's columns and `rank`, keyed by `per` and `rank`. A row that
            comes in between moves those behind it: each rank has another row then.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: `n` is out of range, no order is named, or the stream has a column `rank`.

        Example:
            ```python
            dearest = orders.top(3, by="amount", per="region")
            ```
        """
        return Table(self.pipeline, ranked_step(self, n, by, per, rank, name))

    def over(
        self,
        partition_by: Names | None = None,
        *,
        order_by: Names = (),
        rows: int | None = None,
        range: Duration | None = None,
        gap: Duration | None = None,
        late: LatePolicy | None = None,
    ) -> FramedRows:
        """Compute functions over the rows around each row, as SQL's OVER does: running aggregates,
        aggregates over the last rows or the last hour, the rows before and after, row numbers and
        ranks.

        Rows are in order of event time: a row is emitted once, when the watermark has passed it.

        Args:
            partition_by: The column or columns of a partition, each of which is computed by itself;
                without it there is one of all rows. Null is a partition.
            order_by: The order of rows that have one event time: a column, or `"column desc"`, or
                several. Rows that are still equal are in order of arrival. `"_arrival"` goes by
                arrival instead of event time: no row waits then.
            rows: Aggregates are over the last rows, this one included, at most 10,000.
            range: Aggregates are over the rows that are at most this much earlier, in event time,
                this row and those of its time included. With neither `rows` nor `range` they are
                over all rows of the partition so far.
            gap: A row that is more than this later than the one before begins the partition anew,
                and the state of a partition is dropped when none has come for so long. Without it,
                row numbers, ranks and aggregates over all rows keep their state for ever.
            late: What becomes of rows behind the horizon: `hr.late.drop()`, the default, or
                `hr.late.divert("late_rows")`.

        Returns:
            Frames; call `aggregate` on them.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: The stream has no event time, or an argument does not fit.

        Example:
            ```python
            recent = orders.over("customer_id", rows=10).aggregate(mean=hr.agg.avg("amount"))
            ```
        """
        frame = check_frame(
            self,
            partition_by,
            order_by=order_by,
            rows=rows,
            range_=range,
            gap=gap,
            late=late,
        )
        return FramedRows(self, frame)

    @overload
    def join(
        self,
        other: Stream,
        *,
        on: Names | None = ...,
        left_on: Names | None = ...,
        right_on: Names | None = ...,
        how: str = ...,
        within: Duration | None = ...,
        before: Duration | None = ...,
        after: Duration | None = ...,
        since: str | None = ...,
        until: str | None = ...,
        suffix: str | None = ...,
        name: str | None = ...,
    ) -> Stream: ...

    @overload
    def join(
        self,
        other: Table | FileTable,
        *,
        on: Names | None = ...,
        left_on: Names | None = ...,
        right_on: Names | None = ...,
        how: str = ...,
        suffix: str | None = ...,
        name: str | None = ...,
    ) -> Stream: ...

    @overload
    def join(
        self,
        other: AsOf,
        *,
        on: Names | None = ...,
        left_on: Names | None = ...,
        right_on: Names | None = ...,
        how: str = ...,
        suffix: str | None = ...,
        late_versions: Literal["wait"] = ...,
        name: str | None = ...,
    ) -> Stream: ...

    @overload
    def join(
        self,
        other: AsOf,
        *,
        on: Names | None = ...,
        left_on: Names | None = ...,
        right_on: Names | None = ...,
        how: str = ...,
        suffix: str | None = ...,
        late_versions: Literal["correct"],
        name: str | None = ...,
    ) -> Table: ...

    @shows_calls
    def join(
        self,
        other: Rows | AsOf | FileTable,
        *,
        on: Names | None = None,
        left_on: Names | None = None,
        right_on: Names | None = None,
        how: str = "inner",
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        since: str | None = None,
        until: str | None = None,
        suffix: str | None = None,
        late_versions: str = WAIT,
        name: str | None = None,
    ) -> Stream | Table:
        """Join with a stream, a table, or a table as of a time.

        With a stream, rows meet that are at most `within` apart in event time, or from `before` to
        `after` the left row's time, or until a time that the left row has. With a table,
        each row meets the table as of its tick. With `table.as_of(column)`, each row meets the
        version that was valid at the row's time.

        Args:
            other: A stream, a table, or `table.as_of(column)`, of the same pipeline; or a constant
                table, `hr.file_table(…)`.
            on: The column or columns that must be equal on both sides.
            left_on: Columns of this stream, or expressions, where the names differ; with
                `right_on`.
            right_on: Columns of `other`, or expressions, where the names differ; with `left_on`.
            how: `"inner"`, `"left"`, and between streams also `"right"` and `"full"`.
            within: How far apart rows of two streams may be, on either side.
            before: How far before the left row the right one may be, instead of `within`.
            after: How far after the left row the right one may be, instead of `within`.
            since: The first time that the right row may have, a TIMESTAMP column or expression of
                the left rows. It cannot be earlier than `before` allows, by default the left row's
                own time. Inner joins only.
            until: The last time that the right row may have, a TIMESTAMP column or expression of
                the left rows, which are kept until then. The event time of the result is the right
                row's. Inner joins only.
            suffix: Added to the right side's columns whose names the left side has too.
            late_versions: With `as_of`: `"wait"` holds a row back until the table's watermark has
                passed its time; `"correct"` answers at once and corrects the answer later.
            name: The step's name.

        Returns:
            A stream; with `late_versions="correct"` a table, keyed as this stream is.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: The sides do not fit together, or an argument does not fit their kinds.

        Example:
            ```python
            paid = orders.join(payments, on="order_id", within="1 hour", suffix="_paid")
            named = orders.join(customers, on="customer_id", how="left")
            then = orders.join(customers.as_of("placed_at"), on="customer_id")
            ```
        """
        step = join_step(
            self,
            other,
            on=on,
            left_on=left_on,
            right_on=right_on,
            how=how,
            bounds=Bounds(within, before, after, since, until),
            suffix=suffix,
            late_versions=late_versions,
            name=name,
        )
        return (Table if step.is_table else Stream)(self.pipeline, step)

    @overload
    def match(
        self,
        pattern: str,
        *,
        define: Mapping[str, str] | None = ...,
        measures: Mapping[str, str] | None = ...,
        within: Duration | None = ...,
        after_match: str = ...,
        subsets: Mapping[str, Sequence[str]] | None = ...,
        rows: str = ...,
        late: LatePolicy | None = ...,
        timed_out: str | None = ...,
        max_rows: int = ...,
        max_matches: int = ...,
        when_full: str = ...,
        order_by: str | Sequence[str] = ...,
        name: str | None = ...,
    ) -> Stream: ...

    @overload
    def match(
        self,
        pattern: Mapping[str, PatternText],
        *,
        rows: str = ...,
        late: LatePolicy | None = ...,
        timed_out: str | None = ...,
        max_rows: int = ...,
        max_matches: int = ...,
        when_full: str = ...,
        order_by: str | Sequence[str] = ...,
        name: str | None = ...,
    ) -> Stream: ...

    @overload
    def match(
        self,
        pattern: Table,
        *,
        measures: Mapping[str, str] | None = ...,
        within: Duration | None = ...,
        after_match: str = ...,
        late: LatePolicy | None = ...,
        timed_out: str | None = ...,
        max_rows: int = ...,
        max_matches: int = ...,
        max_rules: int = ...,
        when_full: str = ...,
        order_by: str | Sequence[str] = ...,
        name: str | None = ...,
    ) -> Stream: ...

    @shows_calls
    def match(
        self,
        pattern: str | Mapping[str, PatternText] | Table,
        *,
        define: Mapping[str, str] | None = None,
        measures: Mapping[str, str] | None = None,
        within: Duration | None = None,
        after_match: str = PAST_LAST,
        subsets: Mapping[str, Sequence[str]] | None = None,
        rows: str = ONE_ROW,
        late: LatePolicy | None = None,
        timed_out: str | None = None,
        max_rows: int = MAX_ROWS,
        max_matches: int = MAX_MATCHES,
        max_rules: int = MAX_RULES,
        when_full: str = FULL_DROP,
        order_by: str | Sequence[str] = (),
        name: str | None = None,
    ) -> Stream:
        """Find sequences of rows that match a pattern, per key and in the order of event time.

        Between symbols rows follow each other directly; `a -> b` skips to the next b, `a ->> b` to
        any later one.

        Args:
            pattern: A pattern such as `"small{3,} big"`; or several, as a dictionary of
                `hr.pattern(…)` by name; or a table of patterns that come, change and go. Such a
                table has one STRING column as its key and the columns `pattern` and, if needed,
                `define` (JSON, or MAP<STRING, STRING>), `within`, `after_match` and `subsets`.
            define: A condition per symbol. A symbol without one matches any row.
            measures: The result's columns, by name. With a table of patterns they are the same for
                all.
            within: The longest time from a match's first row to its last.
            after_match: Where to look next: `"skip past last row"`, `"skip to next row"`,
                `"skip to first a"`, `"skip to last a"`, or `"no skip"` for every match there is.
            subsets: Names for several symbols together, for measures.
            rows: `"one"` gives one row per match, `"all"` each row of a match, with `classifier`
                and `match_number`.
            late: What becomes of rows behind the horizon: `hr.late.drop()`, the default, or
                `hr.late.divert(topic)`.
            timed_out: A topic for partial matches whose time ran out.
            max_rows: The most rows that are buffered per key and pattern.
            max_matches: The most partial matches per key and pattern.
            max_rules: The most patterns that a table may hold.
            when_full: What happens beyond these bounds: `"drop"` drops and counts, `"stop"` ends
                the run.
            order_by: Columns by which rows of one event time are ordered, such as `"line"` or
                `["line", "version desc"]`; rows that are still equal stay in order of arrival.
            name: The step's name.

        Returns:
            A stream of matches, each with `matched_at`, the time at which the match was certain.

        Raises:
            PlanError: The stream has no event time, or an argument does not fit.
            UnknownColumn: A condition or measure reads a column that does not exist.

        Example:
            ```python
            bursts = orders.key_by("customer_id").match(
                "small{3,} big",
                define={"small": "amount < 10", "big": "amount > 1000"},
                measures={"started": "first(small.placed_at)", "total": "sum(amount)"},
                within="10 minutes",
            )
            ```
        """
        from headrace.pipeline.patterns import (
            MatchOptions,
            match_step,
            rule_match_step,
        )
        from headrace.pipeline.patterns import pattern as pattern_text

        where = self.step_label("match", name)
        options = MatchOptions(
            rows=rows,
            late=late,
            timed_out=timed_out,
            max_rows=max_rows,
            max_matches=max_matches,
            when_full=when_full,
            order_by=order_by,
        )
        if isinstance(pattern, Table):
            if define or subsets:
                raise PlanError(
                    f"The step {where} has rules in a table, and define= or subsets= for all of"
                    " them.",
                    fix="give these as columns of the table.",
                )
            rule_step = rule_match_step(
                self,
                pattern,
                options,
                name,
                measures=measures,
                within=within,
                after_match=after_match,
                max_rules=max_rules,
            )
            return Stream(self.pipeline, rule_step)
        texts: dict[str, PatternText]
        if isinstance(pattern, str):
            single = pattern_text(
                pattern,
                define=define,
                measures=measures,
                within=within,
                after_match=after_match,
                subsets=subsets,
            )
            texts = {"": single}
        elif isinstance(pattern, Mapping):
            about = {"define": define, "measures": measures, "within": within, "subsets": subsets}
            common = next((key for key, value in about.items() if value is not None), None)
            if common is not None:
                raise PlanError(
                    f"The step {where} has several patterns, and {common}= for all of them.",
                    fix=f"give {common}= to each hr.pattern(…).",
                )
            texts = dict(pattern)
        else:
            raise PlanError(
                f"The step {where} was given a {type(pattern).__name__}.",
                fix="give it a pattern's text, a dictionary of hr.pattern(…), or a table of rules.",
            )
        step = match_step(self, texts, options, name, several=not isinstance(pattern, str))
        return Stream(self.pipeline, step)

    def search(
        self,
        queries: Table,
        *,
        query: str,
        text: Names,
        filters: Names = (),
        per: str = "match",
        highlights: bool = False,
        explain: bool = False,
        language: str | None = None,
        stop_words: Iterable[str] = (),
        default: str = "or",
        suffix: str | None = None,
        name: str | None = None,
    ) -> Stream:
        """Match documents, which are this stream's rows, against stored queries.

        Each document meets the queries that are in force at its tick.

        Args:
            queries: A table of queries.
            query: The table's STRING column that has the queries' texts.
            text: The documents' columns whose words are searched.
            filters: The documents' columns for exact values and ranges, as in `price:<20`.
            per: `"match"` gives one row per match, `"document"` one per document, with a list
                `matches`.
            highlights: Whether matches say where in the texts the words were found.
            explain: Whether matches say why they match.
            language: The language of a stemmer, such as `"english"`, for documents and queries.
            stop_words: Words that are ignored in documents and queries.
            default: What words side by side mean: `"or"`, one of them must match, or `"and"`.
            suffix: Added to the queries' columns whose names documents have too.
            name: The step's name.

        Returns:
            A stream with the documents' columns, the queries' columns and `score`.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: `queries` is no table, or a column's type does not fit.

        Example:
            ```python
            alerts = articles.search(searches, query="query", text=["title", "body"])
            ```
        """
        from headrace.pipeline.search import SearchOptions, search_step

        options = SearchOptions(
            query=query,
            text=text,
            filters=filters,
            per=per,
            highlights=highlights,
            explain=explain,
            language=language,
            stop_words=tuple(stop_words),
            default=default,
            suffix=suffix,
        )
        return Stream(self.pipeline, search_step(self, queries, options, name))

    def changes(self, **_: Any) -> Stream:
        """Internal: refused, since a stream only inserts."""
        raise StreamOnly(
            f"{self.step.path} is a stream: it only inserts, so it is its own changes.",
            fix="leave out changes().",
        )


class Table(Rows):
    """Rows that change, one for each primary key.

    `Pipeline.table`, `Stream.to_table` and `aggregate` return one.

    Example:
        ```python
        best = revenue.where("total > 1000").top(10, by="total")
        ```
    """

    def key_by(self, *columns: str, name: str | None = None) -> Table:
        """Give the rows another primary key, which must contain the present one to stay unique.

        Args:
            *columns: Names of columns, those of the present key among them.
            name: The step's name.

        Returns:
            A table with the same rows.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: A column of the present key is missing.

        Example:
            ```python
            by_country = customers.key_by("country", "customer_id")
            ```
        """
        where = self.step_label("key_by", name)
        key = cols.key_columns(columns, self.schema, where=where)
        missing = [column for column in self.key if column not in key]
        if missing:
            raise PlanError(
                f"The step {where} leaves out {', '.join(map(repr, missing))} of the primary key,"
                " so several rows could have the same new key.",
                fix=(
                    "name the old key's columns too, or use group_by(…).aggregate(…) to make one"
                    " row of several."
                ),
            )
        return self._add(KeyByStep, name=name, schema=self.schema, key=key)

    def union(self, *others: Table, disjoint: bool = False, name: str | None = None) -> Table:
        """Put the rows of several tables into one. Of a key that several of them have, the row of
        the first one counts.

        Args:
            *others: Tables of the same pipeline with the same columns and primary key.
            disjoint: A promise that no key is in two of them at a time. No state is needed then.
            name: The step's name.

        Returns:
            A table with the same key.

        Raises:
            PlanError: A table belongs to another pipeline, or its columns or key differ.
            StreamOnly: One of them is a stream.

        Example:
            ```python
            all_of_them = customers.where("country = 'AT'").union(
                customers.where("country = 'DE'"), disjoint=True
            )
            ```
        """
        where = self.step_label("union", name)
        for other in others:
            if other.step.is_table and other.key != self.key:
                raise PlanError(
                    f"The step {where} unites tables with different primary keys:"
                    f" {', '.join(self.key)} and {', '.join(other.key)}.",
                    fix="give them the same key with key_by.",
                )
        united = self._union(others, name=name)
        if disjoint or not others:
            return united
        return Table(self.pipeline, first_of_each_key(united.step, name))

    @shows_calls
    def join(
        self,
        other: Table,
        *,
        on: Names | None = None,
        left_on: Names | None = None,
        right_on: Names | None = None,
        how: str = "inner",
        within: None = None,
        before: None = None,
        after: None = None,
        suffix: str | None = None,
        late_versions: Literal["wait"] = "wait",
        name: str | None = None,
    ) -> Table:
        """Join with a table. The result changes whenever either side does.

        Args:
            other: A table of the same pipeline.
            on: The column or columns that must be equal on both sides.
            left_on: Columns of this table, or expressions, where the names differ; with `right_on`.
            right_on: Columns of `other`, or expressions, where the names differ; with `left_on`.
            how: `"inner"`, `"left"`, `"right"` or `"full"`.
            within: For joins of two streams; refused here.
            before: For joins of two streams; refused here.
            after: For joins of two streams; refused here.
            suffix: Added to the right side's columns whose names the left side has too.
            late_versions: For joins of a stream with `as_of`; refused here.
            name: The step's name.

        Returns:
            A table, keyed by the keys of both sides as far as the join does not determine them.

        Raises:
            UnknownColumn: A column does not exist.
            StreamOnly: `other` is a stream; write `stream.join(table)`.
            PlanError: The sides do not fit together.

        Example:
            ```python
            latest = orders.to_table("order_id").join(customers, on="customer_id")
            ```
        """
        step = join_step(
            self,
            other,
            on=on,
            left_on=left_on,
            right_on=right_on,
            how=how,
            bounds=Bounds(within, before, after),
            suffix=suffix,
            late_versions=late_versions,
            name=name,
        )
        return Table(self.pipeline, step)

    def top(self, n: int, *, by: Names, per: Names | None = None, name: str | None = None) -> Table:
        """Keep the first rows by some order, of all rows or of each group.

        Args:
            n: How many rows.
            by: The column or columns to order by, largest first unless `"name ASC"`. Rows of equal
                rank are ordered by key.
            per: The column or columns that make a group.
            name: The step's name.

        Returns:
            A table with the same columns and key.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: `n` is out of range, or no order is named.

        Example:
            ```python
            best = revenue.top(10, by="total")
            oldest = customers.top(3, by="valid_from ASC", per="country")
            ```
        """
        return Table(self.pipeline, top_step(self, n, by, per, name))

    def distinct(self, *columns: str, name: str | None = None) -> Table:
        """Keep each different row once, or each different value of some columns. Null is a value
        like others.

        Args:
            *columns: Names of columns; all if left out.
            name: The step's name.

        Returns:
            A table keyed by these columns.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: A column cannot be a key.

        Example:
            ```python
            countries = customers.distinct("country")
            ```
        """
        return Table(self.pipeline, distinct_step(self, columns, name))

    def compare(
        self, period: Duration, *, prefix: str = "previous_", name: str | None = None
    ) -> Table:
        """Put each window next to the same window a period earlier. For tables of windows.

        Args:
            period: How much earlier, a multiple of the windows' step.
            prefix: Put before the names of the earlier window's columns.
            name: The step's name.

        Returns:
            A table with the columns of both windows; those of the earlier one are null where there
            is none.

        Raises:
            PlanError: The rows are no windows, or the period does not fit them.

        Example:
            ```python
            week_over_week = hourly.compare("7 days")
            ```
        """
        return Table(self.pipeline, compare_step(self, period, prefix, name))

    def as_of(self, column: str, *, history: Duration | None = None) -> AsOf:
        """Look the table up as of a time, for `stream.join`.

        Args:
            column: The stream's column with the time, which is its event time.
            history: How long old versions are kept; by default as the table was declared.

        Returns:
            What `stream.join` takes as `other`.

        Raises:
            PlanError: No history is given here or where the table is declared.

        Example:
            ```python
            then = orders.join(
                customers.as_of("placed_at", history="90 days"), on="customer_id"
            )
            ```
        """
        return as_of(self, column, history, where=f"{self.step.path}.as_of")

    def history(
        self,
        *,
        kept: Duration | None = None,
        valid_to: str = "valid_to",
        name: str | None = None,
    ) -> Table:
        """Every version of each row, with the time until which it was valid.

        Args:
            kept: How long old versions are kept; by default as the table was declared.
            valid_to: The name of the column with the end of validity; null for the present
                version. The table's event time says when a version began to be valid.
            name: The step's name.

        Returns:
            A table keyed by the table's key and event time.

        Raises:
            PlanError: The table has no event time, no history is given, or the column exists.

        Example:
            ```python
            versions = customers.history(kept="30 days")
            ```
        """
        return Table(self.pipeline, history_step(self, kept, valid_to, name))

    def changes(self, *, column: str = "change_type", name: str | None = None) -> Stream:
        """The changes of the table's rows, as a stream.

        Args:
            column: The name of the column with the kind of change: `insert`, `update_preimage`,
                `update_postimage` or `delete`.
            name: The step's name.

        Returns:
            A stream with the table's columns and `column`.

        Raises:
            PlanError: The table has a column of that name.

        Example:
            ```python
            gone = customers.changes().where("change_type = 'delete'")
            ```
        """
        where = self.step_label("changes", name)
        schema = cols.with_column(
            self.schema, pa.field(column, pa.string(), nullable=False), where=where
        )
        step = ChangesStep(
            name=name or "", inputs=(self.step,), schema=schema, key=self.key, column=column
        )
        return Stream(self.pipeline, step)

    def dedupe(self, **_: Any) -> Stream:
        """Internal: refused, since a table has one row per key."""
        raise StreamOnly(
            f"{self.step.path} is a table, and dedupe is for streams: a table has one row for each"
            " key already.",
            fix=(
                "leave it out, or use group_by(…).aggregate(…) for one row for each value of other"
                " columns."
            ),
        )

    def over(self, *_: Any, **__: Any) -> FramedRows:
        """Internal: refused, since a row's results would change with every row before it."""
        raise StreamOnly(
            f"{self.step.path} is a table, and over is for streams: a row that changes would change"
            " the results of all rows behind it.",
            fix="use over(…) of the stream, top(…) for ranks, or changes(), whose rows are events.",
        )

    def match(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since patterns are over events."""
        raise StreamOnly(
            f"{self.step.path} is a table, and patterns are sequences of events: a row that"
            " changes is not one.",
            fix="use changes(), whose rows are events.",
        )

    def search(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since matches of documents are not retracted."""
        raise StreamOnly(
            f"{self.step.path} is a table, and documents are a stream: matches that were emitted"
            " for a row cannot be retracted when the row changes.",
            fix="use changes(), whose rows are events.",
        )

    def map_batches(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since the rows of the result have no key."""
        raise refusal_for_table(self, "map_batches")

    def flat_map(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since the rows of the result have no key."""
        raise refusal_for_table(self, "flat_map")

    def call(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since an answer could not be retracted."""
        raise refusal_for_table(self, "call")

    def explode(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since the rows of the result have no key."""
        raise refusal_for_table(self, "explode")

    def posexplode(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since the rows of the result have no key."""
        raise refusal_for_table(self, "posexplode")

    def inline(self, *_: Any, **__: Any) -> Stream:
        """Internal: refused, since the rows of the result have no key."""
        raise refusal_for_table(self, "inline")

    def to_table(self, *_: Any, **__: Any) -> Table:
        """Internal: refused, since this is a table."""
        raise StreamOnly(
            f"{self.step.path} is a table already, keyed by {', '.join(self.key)}.",
            fix="leave out to_table, or use key_by.",
        )


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """Rows in groups, as `group_by` returns them. Call `aggregate` on them."""

    rows: Rows
    by: tuple[str, ...]

    @shows_calls
    def aggregate(
        self,
        *,
        name: str | None = None,
        errors: str = NULL,
        ttl: Duration | None = None,
        **aggregates: AggregateSpec,
    ) -> Table:
        """Compute one row per group.

        Args:
            name: The step's name.
            errors: What becomes of a row on which an expression fails: `"null"`, `"divert"` or
                `"stop"`, as in `select`. A row that a custom aggregate raises on becomes a dead
                letter with `"divert"`; otherwise the run stops.
            ttl: Of a stream: how long a group stays after its newest row, in tick time. Then it is
                deleted from the table, and from everything computed from it; a row that comes later
                begins it anew. By default groups stay for ever.
            **aggregates: Aggregates of `hr.agg` by the name of their column.

        Returns:
            A table keyed by the group's columns, with these aggregates.

        Raises:
            UnknownColumn: An aggregate reads a column that does not exist.
            UnfitColumn: An aggregate does not take the type of its column.
            StreamOnly: An aggregate that cannot retract is used over a table, or `ttl` is given for
                one.
            PlanError: No aggregate is named, or `errors` is none of the three.

        Example:
            ```python
            revenue = orders.group_by("region").aggregate(
                orders=hr.agg.count(), total=hr.agg.sum("amount * 1.2")
            )
            ```
        """
        where = self.rows.step_label("aggregate", name)
        check_error_policy(errors, where=f"The step {where}")
        if ttl is not None and self.rows.step.is_table:
            raise StreamOnly(
                f"The step {where} has a ttl, and its input is a table: a group lives as long as"
                " the table has rows of it.",
                fix="give ttl= to the step that makes the table: to_table(…) or aggregate(…).",
            )
        source, aggregates = with_calls_of_results(
            self.rows.step, aggregates, errors=errors, where=where
        )
        aggregation = bind_aggregates(source, self.by, aggregates, where=where, errors=errors)
        rows = _aggregation_input(replace(self.rows, step=source), aggregation, errors)
        step = AggregateStep(
            name=name or "",
            inputs=(rows.step,),
            schema=aggregation.schema,
            key=self.by,
            is_table=True,
            by=self.by,
            aggregates=aggregation.aggregates,
            errors=errors,
            ttl_us=None if ttl is None else positive_us(ttl, f"ttl of the step {where}"),
        )
        return Table(self.rows.pipeline, step)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in {"rows", "by"}:
                raise AttributeError(name)
            raise unknown_operation(
                f"The groups of {self.rows.step.path}",
                name,
                GROUP_REPLACEMENTS,
                operations_of(type(self)),
            )


@dataclass(frozen=True)
class WindowedRows:
    """Rows in windows, as `window` returns them. Call `aggregate` on them, or `group_by` first."""

    rows: Rows
    window_spec: WindowSpec
    late: LatePolicy
    emit: str
    by: tuple[str, ...] = ()

    @shows_calls
    def group_by(self, *columns: str, **named: str) -> WindowedRows:
        """Make windows per group. Without it there is one group of all rows.

        Args:
            *columns: Names of columns, or expressions with a name.
            **named: Further groups by expression.

        Returns:
            Windows; call `aggregate` on them.

        Raises:
            UnknownColumn: A column does not exist.
            PlanError: No column is named, or one cannot be a key.

        Example:
            ```python
            windows = orders.window(hr.tumbling("1 hour")).group_by("region")
            ```
        """
        where = f"{self.rows.step.path}.window.group_by"
        if not columns and not named:
            raise PlanError(
                f"The step {where} names no columns.",
                fix="leave out group_by() for windows over all rows.",
            )
        rows, names = _with_group_columns(self.rows, columns, named, where=where)
        key = cols.key_columns(names, rows.schema, where=where)
        return replace(self, rows=rows, by=key)

    @shows_calls
    def aggregate(
        self, *, name: str | None = None, errors: str = NULL, **aggregates: AggregateSpec
    ) -> Table:
        """Compute one row per group and window, emitted as `emit=` of `window` says.

        Args:
            name: The step's name.
            errors: What becomes of a row on which an expression fails, or which a custom aggregate
                raises on, as in `group_by(…).aggregate`.
            **aggregates: Aggregates of `hr.agg` by the name of their column.

        Returns:
            A table keyed by the group's columns, `window_start` and `window_end`.

        Raises:
            UnknownColumn: An aggregate reads a column that does not exist.
            UnfitColumn: An aggregate does not take the type of its column.
            PlanError: No aggregate is named, or `errors` is none of the three.

        Example:
            ```python
            hourly = orders.window(hr.tumbling("1 hour")).aggregate(total=hr.agg.sum("amount"))
            ```
        """
        where = self.rows.step_label("window", name)
        check_error_policy(errors, where=f"The step {where}")
        over = require_event_time(self.rows.step, where=where)
        kept = (*self.by, over.name, *([over.producer] if over.producer else []))
        source, aggregates = with_calls_of_results(
            self.rows.step, aggregates, errors=errors, where=where
        )
        aggregation = bind_aggregates(
            source,
            self.by,
            aggregates,
            where=where,
            keep=kept,
            in_windows=True,
            errors=errors,
        )
        rows = _aggregation_input(replace(self.rows, step=source), aggregation, errors)
        time_type = rows.step.schema.field(over.name).type
        step = WindowStep(
            name=name or "",
            inputs=(without_late_moves(rows.step, self.window_spec, self.late, over, self.by),),
            schema=window_schema(aggregation.schema, self.by, time_type, where=where),
            key=(*self.by, WINDOW_START, WINDOW_END),
            is_table=True,
            window=self.window_spec,
            late=self.late,
            emit=self.emit,
            over=over,
            by=self.by,
            aggregates=aggregation.aggregates,
            errors=errors,
        )
        return Table(self.rows.pipeline, step)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in {"rows", "window_spec", "late", "emit", "by"}:
                raise AttributeError(name)
            raise unknown_operation(
                f"The windows of {self.rows.step.path}",
                name,
                GROUP_REPLACEMENTS,
                operations_of(type(self)),
            )


@dataclass(frozen=True)
class FramedRows:
    """The rows of a stream, each with a frame, as `over` returns them. Call `aggregate` on them."""

    rows: Stream
    frame: RowFrame

    @shows_calls
    def aggregate(
        self, *, name: str | None = None, errors: str = NULL, **results: AggregateSpec | RowFunction
    ) -> Stream:
        """Compute functions for each row.

        Args:
            name: The step's name.
            errors: What becomes of a row on which an expression fails: `"null"`, `"divert"` or
                `"stop"`, as in `select`.
            **results: Aggregates of `hr.agg`, which are over the frame, and functions of `hr.over`,
                by the name of their column. `first` and `last` go by the order of the rows.

        Returns:
            A stream with the same rows and these columns. A row is emitted when the watermark has
            passed it, and with `hr.over.lead` when the row after it is there or its time is over.

        Raises:
            UnknownColumn: A function reads a column that does not exist.
            UnfitColumn: An aggregate does not take the type of its column.
            PlanError: No function is named, or one does not fit.

        Example:
            ```python
            recent = orders.over("customer_id", range="1 hour").aggregate(
                total=hr.agg.sum("amount"), previous=hr.over.lag("amount")
            )
            ```
        """
        where = self.rows.step_label("over", name)
        check_error_policy(errors, where=f"The step {where}")
        called, results = with_calls_of_results(self.rows.step, results, errors=errors, where=where)
        source = replace(self.rows, step=called)
        selection, bound = frame_input(source, self.frame, results, where=where, errors=errors)
        if selection is not None:
            source = source.add_selection(selection, name=None, errors=errors)
        step = over_step(self.rows, source.step, self.frame, bound, name, where=where)
        return Stream(self.rows.pipeline, step)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in {"rows", "frame"}:
                raise AttributeError(name)
            raise unknown_operation(
                f"The frames of {self.rows.step.path}",
                name,
                GROUP_REPLACEMENTS,
                operations_of(type(self)),
            )


def positive_us(duration: Duration, what: str) -> int:
    """A duration in microseconds. Raises PlanError if it is zero."""
    us = to_us(duration, what=what)
    if us == 0:
        raise PlanError(f"The {what} is zero.", fix="give a duration above zero, such as '1 day'.")
    return us


def _with_group_columns(
    rows: Rows, columns: Sequence[str], named: Mapping[str, str], *, where: str
) -> tuple[Rows, tuple[str, ...]]:
    """Rows with the columns that `group_by(day="date(placed_at)")` groups by, and the names of all
    groups. Columns are passed as texts, so that a group may be called `name` or `errors`.
    """
    source, columns, named = with_calls(rows.step, columns, named, errors=NULL, where=where)
    names, computed = cols.split_computed(
        source, columns, where=where, fix="name it: group_by('date(placed_at) AS day')."
    )
    computed |= named
    if computed:
        rows = replace(rows, step=source).with_columns(
            *(f"{text} AS {quoted_name(name)}" for name, text in computed.items())
        )
    return rows, (*names, *named)


def _aggregation_input(rows: Rows, aggregation: Aggregation, errors: str) -> Rows:
    """Rows with the columns that aggregates read, where an aggregate reads an expression."""
    selection = aggregation.selection
    if selection is None:
        return rows
    return rows.add_selection(selection, name=None, errors=errors)
