"""The step of processors: a user's own class over the state and timers of a key.

`headrace.pipeline.processors` checks and builds it; the kernel is in
`headrace.operators.processors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.durations import format_us
from headrace.error_policy import DIVERT
from headrace.operators.kernel import TimedKernel
from headrace.operators.processors.processor import PROCESSING, Declaration, Processor
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
