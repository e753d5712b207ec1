"""What a pipeline needs of Spark, in this process and without a JVM: tasks one after the other, in
an order of chance, some of them tried again, run twice, or long after their time.

It is what `PipelineTest` runs on unless it is given a session, and for properties, which want
hundreds of runs. The runner, the builder and everything a task does are the real ones, and every
attempt of a task has its own copy of its function, as in Spark. There is no Spark SQL here but a
few words that the builder uses itself, and expressions that Python computes as Spark does; others
are refused unless `sql` says what they give.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine.shuffle import spark_hash
from headrace.errors import HeadraceError, NotSupported
from headrace.plan.expressions import parse_expression
from headrace.plan.expressions.arrow_evaluator import compile_to_arrow

Batches = Iterable[pa.RecordBatch]
Part = Callable[[], Iterator[pa.RecordBatch]]
SQL = dict[str, Callable[[pa.RecordBatch], pa.Array]]
MAX_ATTEMPTS = 4


class Fault(Exception):
    """Something broke, on purpose."""


@dataclass
class PlainSpark:
    """The session. `chance` orders tasks and what they get; a task that raises `Fault` is tried
    again; some that succeeded are run again, at once or later.
    """

    cores: int = 2
    chance: Random = field(default_factory=lambda: Random(0))  # noqa: S311  # any order will do
    repeats: float = 0.0
    sql: SQL = field(default_factory=dict)
    """Expressions, as the builder writes them, and what they give over a batch."""
    zombies: list[Callable[[], object]] = field(default_factory=list)
    """The tasks of earlier jobs, to be run when nobody waits for them any more."""

    @property
    def conf(self) -> dict[str, str]:
        return {"spark.sql.shuffle.partitions": str(self.cores)}

    def range(self, start: int, stop: int, step: int, parts: int) -> Frame:
        numbers = list(range(start, stop, step))
        cuts = [len(numbers) * part // parts for part in range(parts + 1)]
        chunks = [numbers[cuts[part] : cuts[part + 1]] for part in range(parts)]
        return Frame(
            self,
            lambda: [
                partial(iter, [pa.record_batch({"id": chunk})] if chunk else []) for chunk in chunks
            ],
        )

    def run(self, tasks: list[Part]) -> list[list[pa.RecordBatch]]:
        """All tasks of a Spark stage."""
        results: list[list[pa.RecordBatch]] = [[] for _ in tasks]
        for number in self.chance.sample(range(len(tasks)), len(tasks)):
            task = partial(_attempt, tasks[number], number)
            results[number] = self._tried(task)
            if self.chance.random() < self.repeats:
                results[number] = self._tried(task)
            if self.repeats:
                self.zombies.append(task)
        return results

    @staticmethod
    def _tried(task: Callable[[], list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
        for attempt in range(MAX_ATTEMPTS):
            try:
                return task()
            except Fault:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError


def _attempt(task: Part, number: int) -> list[pa.RecordBatch]:
    from pyspark import TaskContext

    TaskContext(partitionId=number)  # there is one in a process; Spark's workers set it like this
    try:
        return list(task())
    finally:
        TaskContext._setTaskContext(None)  # noqa: SLF001  # there is no other way


@dataclass
class Frame:
    """A DataFrame: what its parts give, made anew whenever it is asked."""

    spark: PlainSpark
    parts: Callable[[], list[Part]]

    def mapInArrow(  # noqa: N802
        self,
        function: Callable[[Batches], Iterator[pa.RecordBatch]],
        schema: str,  # noqa: ARG002
    ) -> Frame:
        from pyspark import cloudpickle

        frozen: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
        return Frame(self.spark, lambda: [partial(_mapped, frozen, part) for part in self.parts()])

    def selectExpr(self, *expressions: str) -> Frame:  # noqa: N802
        """Columns, under other names, and whole numbers that are multiplied and moved: what the
        builder itself needs.
        """
        return self.mapInArrow(partial(_selected, expressions, self.spark.sql), "")

    def repartition(self, count: int, label: str) -> Frame:
        return Frame(self.spark, partial(self._shuffled, count, label))

    def _shuffled(self, count: int, label: str) -> list[Part]:
        rows = [
            batch.slice(at, 1)
            for batches in self.spark.run(self.parts())
            for batch in batches
            for at in range(batch.num_rows)
        ]
        self.spark.chance.shuffle(rows)
        places: list[list[pa.RecordBatch]] = [[] for _ in range(count)]
        for row in rows:
            places[spark_hash(row.column(label)[0].as_py()) % count].append(row)
        return [partial(iter, place) for place in places]

    def unionAll(self, other: Frame) -> Frame:  # noqa: N802
        return Frame(self.spark, lambda: [*self.parts(), *other.parts()])

    def unionByName(self, other: Frame) -> Frame:  # noqa: N802
        return self.unionAll(other)

    def persist(self) -> Frame:
        """Computed by whoever comes first, and kept."""
        known: list[Part] = []

        def parts() -> list[Part]:
            if not known:
                known.extend(_kept(part) for part in self.parts())
            return known

        return Frame(self.spark, parts)

    def unpersist(self) -> None:
        """Nothing to do: nobody asks again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python itself looks for
            raise AttributeError(name)
        raise no_spark_sql(name)

    def collect(self) -> list[Any]:
        results = self.spark.run(self.parts())
        assert not any(batch.num_rows for batches in results for batch in batches), (
            "a job has no rows of its own"
        )
        return []


def no_spark_sql(what: str) -> NotSupported:
    return NotSupported(
        f"There is no Spark SQL in a test without Spark: {what}.",
        fix="give the test a session: PipelineTest(pipeline, path, hr.spark()).",
    )


def _mapped(frozen: bytes, part: Part) -> Iterator[pa.RecordBatch]:
    result: Iterator[pa.RecordBatch] = pickle.loads(frozen)(part())  # noqa: S301  # what `mapInArrow` froze
    return result


_COLUMN = re.compile(r"`([^`]+)`(?: AS `([^`]+)`)?")
_NUMBER = re.compile(r"(\d+) AS `(\w+)`")
_MOVED = re.compile(r"CAST\(`(\w+)` \* (\d+) \+ (\d+) AS INT\) AS `(\w+)`")


_NAMED = re.compile(r"(.+) AS `(\w+)`")


def _selected(expressions: tuple[str, ...], sql: SQL, batches: Batches) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = dict(_column(batch, expression, sql) for expression in expressions)
        yield pa.record_batch(columns)


def _column(batch: pa.RecordBatch, expression: str, sql: SQL) -> tuple[str, pa.Array]:
    if (named := _NAMED.fullmatch(expression)) and named[1] in sql:
        return named[2], sql[named[1]](batch)
    if moved := _MOVED.fullmatch(expression):
        name, times, plus, new = moved.groups()
        return new, pc.add(pc.multiply(batch.column(name), int(times)), int(plus)).cast(pa.int32())
    if number := _NUMBER.fullmatch(expression):
        return number[2], pa.array([int(number[1])] * batch.num_rows, pa.int32())
    if column := _COLUMN.fullmatch(expression):
        return column[2] or column[1], batch.column(column[1])
    if named and (node := _computable(named[1], batch.schema)) is not None:
        found = node.evaluate(batch)
        return named[2], pa.repeat(found, batch.num_rows) if isinstance(found, pa.Scalar) else found
    raise no_spark_sql(expression)


def _computable(text: str, schema: pa.Schema) -> Any:
    """What Python computes as Spark does, where rows are read; None for the rest."""
    try:
        return compile_to_arrow(parse_expression(text, schema, where="a test"), schema)
    except HeadraceError:
        return None


def _kept(part: Part) -> Part:
    known: list[list[pa.RecordBatch]] = []

    def give() -> Iterator[pa.RecordBatch]:
        if not known:
            known.append(list(part()))
        return iter(known[0])

    return give
