"""`Stream` and `Table`: what a pipeline's text chains operations on. Each operation checks what it
is given and adds a step to the inert plan.

A stream only inserts; a table has a primary key and changes. What an operation needs to know about
types and columns it asks `expressions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from headrace.durations import to_us
from headrace.errors import PlanError, StreamOnly
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.patterns.parser import DROP as FULL_DROP
from headrace.operators.patterns.parser import MAX_MATCHES, MAX_ROWS, MAX_RULES, ONE_ROW, PAST_LAST
from headrace.operators.windows.late import LatePolicy, drop
from headrace.operators.windows.specs import WindowSpec
from headrace.pipeline.aggregates import aggregated, distinct, first_of_each, top
from headrace.pipeline.joins import AsOf, Bounds, as_of, history, joined
from headrace.pipeline.relation import Relation
from headrace.pipeline.windows import check_window, checked_time, compared, window_schema
from headrace.plan import columns as cols
from headrace.plan.expressions.literals import quoted_name
from headrace.plan.join_steps import WAIT
from headrace.plan.plan import (
    NULL,
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

    from headrace.pipeline.patterns import PatternText
    from headrace.plan.match_steps import MatchStep


# Windows in a plan: `rows.window(…)`, the step that `aggregate` makes of it, and what is checked
# when it is declared.


@dataclass(frozen=True)
class Windowed:
    """What `window` gives: waits for `group_by` and `aggregate`."""

    rows: Rows
    window: WindowSpec
    late: LatePolicy
    emit: str
    by: tuple[str, ...] = ()

    def group_by(self, *columns: str, **named: str) -> Windowed:
        """Windows of each group, by columns or by named expressions. Without it there is one group
        of all rows.
        """
        where = f"{self.rows.step.path}.window.group_by"
        if not columns and not named:
            raise PlanError(
                f"The step {where} names no columns.",
                fix="leave out group_by() for windows over all rows.",
            )
        rows = self.rows.with_columns(**named) if named else self.rows
        return Windowed(
            rows,
            self.window,
            self.late,
            self.emit,
            cols.key((*columns, *named), rows.schema, where=where),
        )

    def aggregate(
        self, *, name: str | None = None, errors: str = NULL, **aggregates: AggregateSpec
    ) -> Table:
        """One row for each group and window, as a table keyed by both."""
        where = self.rows.step_label("window", name)
        errors = cols.check_errors(errors, where=where)
        over = checked_time(self.rows.step, where=where)
        kept = (*self.by, over.name, *([over.producer] if over.producer else []))
        aggregation = aggregated(
            self.rows.step,
            self.by,
            aggregates,
            where=where,
            keep=kept,
            in_windows=True,
            errors=errors,
        )
        rows = (
            self.rows
            if aggregation.selection is None
            else self.rows._select(aggregation.selection, name=None, errors=errors)  # noqa: SLF001
        )
        schema = window_schema(
            aggregation.schema, self.by, rows.step.schema.field(over.name).type, where=where
        )
        step = WindowStep(
            name=name or "",
            inputs=(rows.step,),
            schema=schema,
            key=(*self.by, WINDOW_START, WINDOW_END),
            is_table=True,
            window=self.window,
            late=self.late,
            emit=self.emit,
            over=over,
            by=self.by,
            aggregates=aggregation.aggregates,
            errors=errors,
        )
        return Table(self.rows.pipeline, step)


Names = str | Sequence[str]


class Rows(Relation):
    """The operations that streams and tables share."""

    def select(
        self, *columns: str, name: str | None = None, errors: str = NULL, **named: str
    ) -> Self:
        """Only these columns: names, `"*"`, expressions with a name (`"amount * rate AS tax"`), or
        by keyword (`tax="amount * rate"`).
        """
        return self._select(
            cols.selected(self.step, columns, named, where=self.step_label("select", name)),
            name=name,
            errors=errors,
        )

    def with_columns(
        self, *columns: str, name: str | None = None, errors: str = NULL, **named: str
    ) -> Self:
        """All columns and these; one that is there already is replaced, where it stands."""
        where = self.step_label("with_columns", name)
        return self._select(
            cols.added(self.step, columns, named, where=where), name=name, errors=errors
        )

    def where(self, condition: str, *, name: str | None = None, errors: str = NULL) -> Self:
        """The rows for which a condition is true. Where it is null, the row is left out."""
        where = self.step_label("where", name)
        cols.condition(condition, self.schema, where=where)
        return self._add(
            WhereStep,
            name=name,
            schema=self.schema,
            key=self.key,
            condition=condition,
            errors=cols.check_errors(errors, where=where),
        )

    def group_by(self, *columns: str, **named: str) -> Grouped:
        """Groups for `aggregate`, by columns or by named expressions (`day="date(placed_at)"`)."""
        where = f"{self.step.path}.group_by"
        if not columns and not named:
            raise PlanError(
                f"The step {where} names no columns.",
                fix=(
                    "name at least one; for one group of all rows write"
                    " group_by(everything='true')."
                ),
            )
        rows = (
            self.with_columns(*(f"{text} AS {quoted_name(name)}" for name, text in named.items()))
            if named
            else self
        )
        return Grouped(rows, cols.key((*columns, *named), rows.schema, where=where))

    def window(
        self, window: WindowSpec, *, late: LatePolicy | None = None, emit: str = "final"
    ) -> Windowed:
        """Windows over event time, for `group_by` and `aggregate`: `hr.tumbling("1 minute")`,
        `hr.hopping`, `hr.sliding`, `hr.session`.

        A window is told when the clock says that it is complete, or at every change
        (`emit="changes"`). `late` says what becomes of rows that come after that: `hr.late.drop()`,
        `hr.late.correct("1 hour")`, `hr.late.divert("late_rows")`.
        """
        late = late or drop()
        check_window(self, window, late=late, emit=emit)
        return Windowed(self, window, late, emit)

    def join(
        self,
        other: Rows | AsOf,
        *,
        on: Names | None = None,
        left_on: Names | None = None,
        right_on: Names | None = None,
        how: str = "inner",
        within: str | timedelta | None = None,
        before: str | timedelta | None = None,
        after: str | timedelta | None = None,
        suffix: str | None = None,
        late_versions: str = WAIT,
        name: str | None = None,
    ) -> Any:
        """Rows of both sides that are equal in some columns, `on` or `left_on` and `right_on`.

        A stream with a stream: rows at most `within` apart, or from `before` to `after` the left
        one's time. A stream with a table: each row meets the table as of its tick; with
        `table.as_of(column)`, the version that was valid at the row's time: it waits until the
        table's clock has passed that time, or (`late_versions="correct"`) answers at once and is
        corrected, as a table. A table with a table: a table that changes with both. `how`: "inner",
        "left", "right", "full". Of columns that both sides have, the right ones get the `suffix`.
        """
        step = joined(
            self,
            other,
            on,
            left_on,
            right_on,
            how,
            Bounds(within, before, after),
            suffix,
            name,
            late_versions,
        )
        return (Table if step.is_table else Stream)(self.pipeline, step)

    def df(
        self, spark: SparkSession | None = None, *, log: str | None = None, **options: Any
    ) -> DataFrame:
        """A streaming DataFrame, for anything Spark can do. A table's rows come as its changes,
        with `_change_type`; where an expression fails, it gives null.

        What keeps state must be written to a topic, which is read then. Options are those of
        reading a topic with `format("headrace")`, such as `startingOffsets`.
        """
        from headrace.pipeline.dataframes import dataframe

        return dataframe(self, spark, log, options)

    def _select(self, selection: cols.Selection, *, name: str | None, errors: str) -> Self:
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
        errors = cols.check_errors(errors, where=where)
        key = selection.key_of(self.step, where=where)
        return self._add(
            SelectStep,
            name=name,
            schema=selection.schema,
            key=key,
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
            _check_like(self, other, where=where)
        steps = [self.step, *(each.step for each in others)]
        return self._add(
            UnionStep,
            name=name,
            others=others,
            schema=cols.shared_schema(steps),
            key=cols.shared_key(steps),
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.step.path} of the pipeline {self.pipeline.name!r}:"
            f" {', '.join(self.schema.names)}>"
        )


class Stream(Rows):
    """Rows that come and stay."""

    def key_by(self, *columns: str, name: str | None = None) -> Stream:
        """The same rows, keyed: a topic they are written to is partitioned by these columns."""
        where = self.step_label("key_by", name)
        return self._add(
            KeyByStep,
            name=name,
            schema=self.schema,
            key=cols.key(columns, self.schema, where=where),
        )

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        """The rows of several streams with the same columns."""
        return self._union(others, name=name)

    def dedupe(self, *, on: Names, within: str | timedelta, name: str | None = None) -> Stream:
        """The first row of each `on`; one that comes again later than `within` counts as new."""
        where = self.step_label("dedupe", name)
        within_us = to_us(within, what=f"within of the step {where}")
        if within_us == 0:
            raise PlanError(
                f"The step {where} compares rows within no time at all.",
                fix="give a duration above zero, such as within='1 hour'.",
            )
        return self._add(
            DedupeStep,
            name=name,
            schema=self.schema,
            key=self.key,
            on=cols.key(on, self.schema, where=where),
            within_us=within_us,
        )

    def to_table(self, key: Names, *, name: str | None = None) -> Table:
        """The newest row of each key, as a table."""
        where = self.step_label("to_table", name)
        columns = cols.key(key, self.schema, where=where)
        step = ToTableStep(
            name=name or "", inputs=(self.step,), schema=self.schema, key=columns, is_table=True
        )
        return Table(self.pipeline, step)

    def match(
        self,
        pattern: str | Mapping[str, PatternText] | Table,
        *,
        define: Mapping[str, str] | None = None,
        measures: Mapping[str, str] | None = None,
        within: str | timedelta | None = None,
        after_match: str = PAST_LAST,
        subsets: Mapping[str, Sequence[str]] | None = None,
        rows: str = ONE_ROW,
        late: LatePolicy | None = None,
        timed_out: str | None = None,
        max_rows: int = MAX_ROWS,
        max_matches: int = MAX_MATCHES,
        max_rules: int = MAX_RULES,
        when_full: str = FULL_DROP,
        name: str | None = None,
    ) -> Stream:
        """Sequences of rows of a key, in the order of their event times, that fit a pattern, such
        as `"small{3,} big"` with `define={"small": "amount < 10", …}`.

        A symbol without a condition fits any row. Between symbols rows follow each other directly;
        `a -> b` skips to the next b, `a ->> b` to any later one. `within`: from the first row to
        the last. `after_match`: "skip past last row", "skip to next row", "skip to first a", "skip
        to last a", "no skip" (every match there is). `rows="all"` gives each row of a match, with
        `classifier` and `match_number`, instead of one. `timed_out`: a topic for partial matches
        whose time ran out. Several patterns at once: a dictionary of `hr.pattern(…)`. Patterns that
        come, change and go: a table with a STRING key and the columns `pattern`, and if needed
        `define` (JSON, or MAP<STRING, STRING>), `within`, `after_match` and `subsets`; `measures`
        are the same for all.
        """
        from headrace.pipeline.patterns import Asked, matched
        from headrace.pipeline.patterns import pattern as one

        asked = Asked(rows, late, timed_out, max_rows, max_matches, when_full)
        if isinstance(pattern, Table):
            return Stream(
                self.pipeline,
                self._ruled(
                    pattern,
                    asked,
                    name,
                    define or subsets,
                    measures=measures,
                    within=within,
                    after_match=after_match,
                    max_rules=max_rules,
                ),
            )
        if not isinstance(pattern, str | Mapping):
            raise PlanError(
                f"The step {self.step_label('match', name)} was given a {type(pattern).__name__}.",
                fix="give it a pattern's text, a dictionary of hr.pattern(…), or a table of rules.",
            )
        several = not isinstance(pattern, str)
        about = {"define": define, "measures": measures, "within": within, "subsets": subsets}
        if several and any(each is not None for each in about.values()):
            given = next(each for each, value in about.items() if value is not None)
            raise PlanError(
                f"The step {self.step_label('match', name)} has several patterns, and {given}= for"
                " all of them.",
                fix=f"give {given}= to each hr.pattern(…).",
            )
        texts = (
            dict(pattern)
            if isinstance(pattern, Mapping)
            else {
                "": one(
                    pattern,
                    define=define,
                    measures=measures,
                    within=within,
                    after_match=after_match,
                    subsets=subsets,
                )
            }
        )
        return Stream(self.pipeline, matched(self, texts, asked, name, several=several))

    def _ruled(
        self, rules: Table, asked: Any, name: str | None, elsewhere: Any, **more: Any
    ) -> MatchStep:
        from headrace.pipeline.patterns import ruled

        if elsewhere:
            raise PlanError(
                f"The step {self.step_label('match', name)} has rules in a table, and define= or"
                " subsets= for all of them.",
                fix="give these as columns of the table.",
            )
        return ruled(self, rules, asked, name, **more)

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
        """Documents that fit stored queries: a row for each match, with the document's columns, the
        queries' columns and a score.

        `queries` is a table, whose column `query` has the texts; each document meets the queries in
        force at its tick. `text`: the columns whose words are searched; `filters`: columns for
        exact values and ranges. `per="document"` gives one row a document, with a list
        `matches`. `highlights=True` says where in the texts, `explain=True` why. `language` (of a
        stemmer, such as "english") and `stop_words` are for both sides. Words side by side: one
        must fit, or all (`default="and"`).
        """
        from headrace.pipeline.search import Asked, searched

        asked = Asked(
            query,
            text,
            filters,
            per,
            highlights,
            explain,
            language,
            tuple(stop_words),
            default,
            suffix,
        )
        return Stream(self.pipeline, searched(self, queries, asked, name))

    def changes(self, **_: Any) -> Stream:
        raise StreamOnly(
            f"{self.step.path} is a stream: it only inserts, so it is its own changes.",
            fix="leave out changes().",
        )


class Table(Rows):
    """Rows that change, one for each primary key."""

    def key_by(self, *columns: str, name: str | None = None) -> Table:
        """The same rows under another primary key, which must contain the present one so that it
        stays unique.
        """
        where = self.step_label("key_by", name)
        key = cols.key(columns, self.schema, where=where)
        missing = [each for each in self.key if each not in key]
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
        """The rows of several tables with the same columns and primary key: of a key that more than
        one of them has, the row of the first that has it.

        `disjoint=True` promises that no key is in two of them at a time. Then nothing needs to be
        kept to tell which comes first.
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
        return (
            united
            if disjoint or not others
            else Table(self.pipeline, first_of_each(united.step, name))
        )

    def top(self, n: int, *, by: Names, per: Names | None = None, name: str | None = None) -> Table:
        """The first `n` rows, of each group of `per` if it is given: by a column, the largest
        first, or `"name ASC"`. Rows of equal rank go by their keys.
        """
        return Table(self.pipeline, top(self, n, by, per, name))

    def distinct(self, *columns: str, name: str | None = None) -> Table:
        """The different values of some columns, or the different rows, each once: a table keyed by
        these columns, or by all. Null is a value like others.
        """
        return Table(self.pipeline, distinct(self, columns, name))

    def compare(
        self, period: str | timedelta, *, prefix: str = "previous_", name: str | None = None
    ) -> Table:
        """Each window beside the same window a period earlier: its columns again, with a prefix;
        null where there is none. For tables of windows.
        """
        return Table(self.pipeline, compared(self, period, prefix, name))

    def as_of(self, column: str, *, history: str | timedelta | None = None) -> AsOf:
        """For `stream.join`: the row that was valid at the time in the stream's `column`. Old
        versions are kept for `history`, or as the table was declared.
        """
        return as_of(self, column, history, where=f"{self.step.path}.as_of")

    def history(
        self,
        *,
        kept: str | timedelta | None = None,
        valid_to: str = "valid_to",
        name: str | None = None,
    ) -> Table:
        """Each version of each row: its event time says from when it was valid, `valid_to` until
        when; null as long as it is.
        """
        return Table(self.pipeline, history(self, kept, valid_to, name))

    def changes(self, *, column: str = "change_type", name: str | None = None) -> Stream:
        """The changes as a stream: the columns and, in `column`, insert, update_preimage,
        update_postimage or delete.
        """
        where = self.step_label("changes", name)
        schema = cols.with_column(
            self.schema, pa.field(column, pa.string(), nullable=False), where=where
        )
        return Stream(
            self.pipeline,
            ChangesStep(
                name=name or "", inputs=(self.step,), schema=schema, key=self.key, column=column
            ),
        )

    def dedupe(self, **_: Any) -> Stream:
        raise StreamOnly(
            f"{self.step.path} is a table, and dedupe is for streams: a table has one row for each"
            " key already.",
            fix=(
                "leave it out, or use group_by(…).aggregate(…) for one row for each value of other"
                " columns."
            ),
        )

    def match(self, *_: Any, **__: Any) -> Stream:
        raise StreamOnly(
            f"{self.step.path} is a table, and patterns are sequences of events: a row that"
            " changes is not one.",
            fix="use changes(), whose rows are events.",
        )

    def search(self, *_: Any, **__: Any) -> Stream:
        raise StreamOnly(
            f"{self.step.path} is a table, and documents are a stream: what was told of a row that"
            " changes cannot be taken back.",
            fix="use changes(), whose rows are events.",
        )

    def to_table(self, *_: Any, **__: Any) -> Table:
        raise StreamOnly(
            f"{self.step.path} is a table already, keyed by {', '.join(self.key)}.",
            fix="leave out to_table, or use key_by.",
        )


@dataclass(frozen=True, eq=False)
class Grouped:
    """What `group_by` gives: waits for `aggregate`."""

    rows: Rows
    by: tuple[str, ...]

    def aggregate(
        self, *, name: str | None = None, errors: str = NULL, **aggregates: AggregateSpec
    ) -> Table:
        """One row for each group, as a table keyed by the group's columns, with these
        aggregates.
        """
        where = self.rows.step_label("aggregate", name)
        errors = cols.check_errors(errors, where=where)
        aggregation = aggregated(self.rows.step, self.by, aggregates, where=where, errors=errors)
        rows = (
            self.rows
            if aggregation.selection is None
            else self.rows._select(aggregation.selection, name=None, errors=errors)  # noqa: SLF001
        )
        step = AggregateStep(
            name=name or "",
            inputs=(rows.step,),
            schema=aggregation.schema,
            key=self.by,
            is_table=True,
            by=self.by,
            aggregates=aggregation.aggregates,
            errors=errors,
        )
        return Table(self.rows.pipeline, step)


def _check_like(one: Rows, other: Any, *, where: str) -> None:
    """That a union's two sides fit together."""
    if not isinstance(other, Rows):
        raise PlanError(
            f"The step {where} was given a {type(other).__name__}.",
            fix="give it streams, or tables.",
        )
    if other.pipeline is not one.pipeline:
        raise PlanError(
            f"The step {where} unites rows of two pipelines, {one.pipeline.name!r} and"
            f" {other.pipeline.name!r}.",
            fix="write one of them to a topic, and read that topic here.",
        )
    if other.step.is_table != one.step.is_table:
        table = (one if one.step.is_table else other).step.path
        raise StreamOnly(
            f"The step {where} unites a stream with the table {table}: a table changes rows, a"
            " stream only inserts.",
            fix="use changes() of the table, or to_table(key) of the stream.",
        )
    cols.check_same_columns(one.step, other.step, where=where)
