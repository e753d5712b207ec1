"""Spark without Spark: the part of its API that a pipeline needs, in this process and without a
JVM.

`PipelineTest` runs on it unless it is given a session, and so do property tests, which need
hundreds of runs. Tasks run one after the other in random order; some are tried again, run twice, or
run long after their job has ended. The runner, the job builder and everything inside a task are the
real ones, and every attempt of a task has its own copy of its function, as in Spark. Of Spark SQL
there is only what the job builder itself uses, and expressions that Python computes as Spark does;
others are refused unless `sql` says what they give.
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
from headrace.expressions.expression import parse_expression
from headrace.expressions.spark_subset import compile_to_arrow

Batches = Iterable[pa.RecordBatch]
Part = Callable[[], Iterator[pa.RecordBatch]]
SQL = dict[str, Callable[[pa.RecordBatch], pa.Array]]
MAX_ATTEMPTS = 4


class Fault(Exception):
    """A failure that a test has injected."""


@dataclass
class PlainSpark:
    """The session. `chance` decides the order of tasks and of their input. A task that raises
    `Fault` is tried again; some that succeeded are run again, at once or later.
    """

    cores: int = 2
    chance: Random = field(default_factory=lambda: Random(0))  # noqa: S311  # any order will do
    repeats: float = 0.0
    sql: SQL = field(default_factory=dict)
    """Expression, as the job builder writes it -> a function over a batch."""
    zombies: list[Callable[[], object]] = field(default_factory=list)
    """The tasks of earlier jobs, to be run when nobody waits for them."""

    @property
    def conf(self) -> dict[str, str]:
        return {"spark.sql.shuffle.partitions": str(self.cores)}

    def range(self, start: int, stop: int, step: int, parts: int) -> PlainFrame:
        numbers = list(range(start, stop, step))
        cuts = [len(numbers) * part // parts for part in range(parts + 1)]
        chunks = [numbers[cuts[part] : cuts[part + 1]] for part in range(parts)]
        return PlainFrame(
            self,
            lambda: [
                partial(iter, [pa.record_batch({"id": chunk})] if chunk else []) for chunk in chunks
            ],
        )

    def run(self, tasks: list[Part]) -> list[list[pa.RecordBatch]]:
        """Run all tasks of a Spark stage. Returns the batches of each."""
        results: list[list[pa.RecordBatch]] = [[] for _ in tasks]
        for number in self.chance.sample(range(len(tasks)), len(tasks)):
            task = partial(_attempt, tasks[number], number)
            results[number] = self._run_task(task)
            if self.chance.random() < self.repeats:
                results[number] = self._run_task(task)
            if self.repeats:
                self.zombies.append(task)
        return results

    @staticmethod
    def _run_task(task: Callable[[], list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
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
class PlainFrame:
    """A DataFrame: its partitions, computed anew for each action."""

    spark: PlainSpark
    parts: Callable[[], list[Part]]

    def mapInArrow(  # noqa: N802
        self,
        function: Callable[[Batches], Iterator[pa.RecordBatch]],
        schema: str,  # noqa: ARG002
    ) -> PlainFrame:
        from pyspark import cloudpickle

        frozen: bytes = cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
        return PlainFrame(
            self.spark, lambda: [partial(_run_function, frozen, part) for part in self.parts()]
        )

    def selectExpr(self, *expressions: str) -> PlainFrame:  # noqa: N802
        """Select columns, also under other names, and the arithmetic of ranks: what the job builder
        itself needs.
        """
        return self.mapInArrow(partial(_select, expressions, self.spark.sql), "")

    def repartition(self, count: int, label: str) -> PlainFrame:
        return PlainFrame(self.spark, partial(self._shuffle, count, label))

    def _shuffle(self, count: int, label: str) -> list[Part]:
        rows = [
            batch.slice(at, 1)
            for batches in self.spark.run(self.parts())
            for batch in batches
            for at in range(batch.num_rows)
        ]
        self.spark.chance.shuffle(rows)
        partitions: list[list[pa.RecordBatch]] = [[] for _ in range(count)]
        for row in rows:
            partitions[spark_hash(row.column(label)[0].as_py()) % count].append(row)
        return [partial(iter, partition) for partition in partitions]

    def unionAll(self, other: PlainFrame) -> PlainFrame:  # noqa: N802
        return PlainFrame(self.spark, lambda: [*self.parts(), *other.parts()])

    def unionByName(self, other: PlainFrame) -> PlainFrame:  # noqa: N802
        return self.unionAll(other)

    def persist(self) -> PlainFrame:
        """Compute the partitions once, for the first action."""
        persisted: list[Part] = []

        def parts() -> list[Part]:
            if not persisted:
                persisted.extend(_persist(part) for part in self.parts())
            return persisted

        return PlainFrame(self.spark, parts)

    def unpersist(self) -> None:
        """Nothing to do: the job is over."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python itself looks for
            raise AttributeError(name)
        raise no_spark_sql(_WITHOUT_SPARK.get(name, name))

    def collect(self) -> list[tuple[Any, ...]]:
        results = self.spark.run(self.parts())
        return [
            tuple(row.values())
            for batches in results
            for batch in batches
            for row in batch.to_pylist()
        ]


_WITHOUT_SPARK = {"observe": "expressions that can fail, such as sums of INT, which can overflow"}


def no_spark_sql(what: str) -> NotSupported:
    return NotSupported(
        f"There is no Spark SQL in a test without Spark: {what}.",
        fix="give the test a session: PipelineTest(pipeline, path, hr.spark()).",
    )


def _run_function(frozen: bytes, part: Part) -> Iterator[pa.RecordBatch]:
    result: Iterator[pa.RecordBatch] = pickle.loads(frozen)(part())  # noqa: S301  # what `mapInArrow` froze
    return result


_COLUMN = re.compile(r"`([^`]+)`(?: AS `([^`]+)`)?")
_NUMBER = re.compile(r"(\d+) AS `(\w+)`")
_RANK = re.compile(r"CAST\(`(\w+)` \* (\d+) \+ (\d+) AS INT\) AS `(\w+)`")


_NAMED = re.compile(r"(.+) AS `(\w+)`")


def _select(expressions: tuple[str, ...], sql: SQL, batches: Batches) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = dict(_column(batch, expression, sql) for expression in expressions)
        yield pa.record_batch(columns)


def _column(batch: pa.RecordBatch, expression: str, sql: SQL) -> tuple[str, pa.Array]:
    if (named := _NAMED.fullmatch(expression)) and named[1] in sql:
        return named[2], sql[named[1]](batch)
    if rank := _RANK.fullmatch(expression):
        name, factor, summand, new = rank.groups()
        return new, pc.add(pc.multiply(batch.column(name), int(factor)), int(summand)).cast(
            pa.int32()
        )
    if number := _NUMBER.fullmatch(expression):
        return number[2], pa.array([int(number[1])] * batch.num_rows, pa.int32())
    if column := _COLUMN.fullmatch(expression):
        return column[2] or column[1], batch.column(column[1])
    if named and (node := _compile(named[1], batch.schema)) is not None:
        values = node.evaluate(batch)
        if isinstance(values, pa.Scalar):
            values = pa.repeat(values, batch.num_rows)
        return named[2], values
    raise no_spark_sql(expression)


def _compile(text: str, schema: pa.Schema) -> Any:
    """An expression as a function over Arrow, if Python computes it as Spark does; None if not."""
    try:
        return compile_to_arrow(parse_expression(text, schema, where="a test"), schema)
    except HeadraceError:
        return None


def _persist(part: Part) -> Part:
    batches: list[list[pa.RecordBatch]] = []

    def persisted() -> Iterator[pa.RecordBatch]:
        if not batches:
            batches.append(list(part()))
        return iter(batches[0])

    return persisted
