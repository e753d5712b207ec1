"""The steps of processors: a user's own class over the state and timers of a key (`ProcessStep`),
one of its outputs (`OutputStep`), and the table that its changes amount to (`UpsertStep`).

    ProcessStep    rows of all outputs side by side    cart, items, reason, __output
    OutputStep     those of one: "odd"                 cart, reason
    UpsertStep     the newest row of each key, if the output is a table

`headrace.pipeline.processors` checks and builds it; the kernel is in
`headrace.operators.processors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints
from headrace.durations import format_us
from headrace.error_policy import DIVERT
from headrace.operators.kernel import Kernel, TimedKernel
from headrace.operators.processors.processor import (
    OUTPUT_COLUMN,
    PROCESSING,
    Declaration,
    Processor,
)
from headrace.plan.function_steps import UserCodeStep
from headrace.plan.plan import Step, TimeColumn, Times
from headrace.types.schema import to_ddl


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessStep(Step):
    """What a processor emits, as a stream. Its first input has no name; `input_names` has those of
    the others.
    """

    operation: ClassVar[str] = "process"
    stateful: ClassVar[bool] = True

    processor: Processor
    declaration: Declaration
    by: tuple[str, ...]
    input_names: tuple[str, ...] = ()
    code: str
    """The fingerprint of the processor's code, or the version that it declares."""
    errors: str
    ttl_us: int | None = None

    @property
    def shard_key(self) -> tuple[str, ...]:
        return self.by

    @property
    def allows_null_keys(self) -> bool:
        return True

    @property
    def user_code(self) -> tuple[tuple[str, Any], ...]:
        return ((f"the processor {type(self.processor).__qualname__}", self.processor),)

    @property
    def goes_by_ticks(self) -> bool:
        clock = self.declaration.clock
        return clock == PROCESSING or (clock is None and self.ttl_us is not None)

    def time(self, inputs: Times) -> TimeColumn | None:
        """The first input's event time, if the processor emits a column of that name and type."""
        time = inputs[0]
        if time is None or time.name not in self.schema.names:
            return None
        is_same = self.schema.field(time.name).type == self.input.schema.field(time.name).type
        if not is_same:
            return None
        producer = time.producer if time.producer in self.schema.names else None
        return TimeColumn(time.name, time.shift_us, producer)

    def details(self) -> dict[str, Any]:
        ttl = {} if self.ttl_us is None else {"ttl": format_us(self.ttl_us)}
        others = {"other_inputs": list(self.input_names)} if self.input_names else {}
        return {
            "processor": repr(self.processor),
            "code": self.code,
            "by": list(self.by),
            **others,
            **self.declaration.describe(),
            "errors": self.errors,
            **ttl,
        }

    def identity(self) -> dict[str, Any]:
        """State depends on the rows that are read. How long keys are kept may change."""
        identity = {name: value for name, value in super().identity().items() if name != "ttl"}
        return {
            **identity,
            "expires": self.ttl_us is not None,
            "given": [[to_ddl(each.schema), each.is_table] for each in self.inputs],
        }

    def meaning(self, needed: frozenset[str], *, parsed: bool) -> Any | None:
        content = super().meaning(needed, parsed=parsed)
        return content if self.ttl_us is None else [content, {"ttl_us": self.ttl_us}]

    def summary(self) -> str:
        return f"{self.processor!r} by {', '.join(self.by)}"

    def kernel(self) -> TimedKernel:
        from headrace.operators.processors.kernel import ProcessorInput, ProcessorKernel

        names = (None, *self.input_names)
        return ProcessorKernel(
            self.name,
            self.processor,
            self.declaration,
            [
                ProcessorInput(name, source.schema, source.is_table)
                for name, source in zip(names, self.inputs, strict=True)
            ],
            self.by,
            ttl_us=self.ttl_us,
            diverts=self.errors == DIVERT,
        )


@dataclass(frozen=True)
class OutputCode:
    """The rows of one output."""

    output: str | None
    columns: tuple[str, ...]

    def __call__(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], Ints | None]:
        outputs = rows.column(OUTPUT_COLUMN)
        own = outputs.is_null() if self.output is None else pc.equal(outputs, self.output)
        indices = np.flatnonzero(own.fill_null(False).to_numpy(zero_copy_only=False))
        chosen = pa.array(indices)
        return [rows.column(name).take(chosen) for name in self.columns], indices

    def null_columns(self, rows: pa.RecordBatch) -> list[pa.Array] | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputStep(UserCodeStep):
    """One output of a processor that has several; `output` is None for the main one."""

    operation: ClassVar[str] = "output"

    output: str | None

    def details(self) -> dict[str, Any]:
        return {"output": self.output}

    def summary(self) -> str:
        return self.output or "main"


@dataclass(frozen=True, kw_only=True, eq=False)
class UpsertStep(Step):
    """The table that a processor's changes amount to: of each key the newest row."""

    operation: ClassVar[str] = "upserts"
    stateful: ClassVar[bool] = True

    def kernel(self) -> Kernel:
        from headrace.operators.latest_rows import LatestKernel

        return LatestKernel(self.name, self.schema, self.key)

    def summary(self) -> str:
        return f"key {', '.join(self.key)}"
