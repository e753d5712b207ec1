"""`Relation`: the last step of a plan under construction, with its pipeline. `Stream` and `Table`
add the operations (`stream`); joins, windows, patterns and search take relations.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from headrace.plan.columns import check_step_name
from headrace.plan.plan import Step
from headrace.runtime.declaration import DeclaredPipeline


@dataclass(frozen=True, eq=False)
class Relation:
    """A stream or a table. `step` is the last step of the plan so far."""

    pipeline: DeclaredPipeline
    step: Step

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return self.step.schema

    @property
    def key(self) -> tuple[str, ...]:
        """A table's primary key, or the columns that a stream is keyed by."""
        return self.step.key

    def step_label(self, operation: str, name: str | None) -> str:
        """What errors call the step that is being declared: its name, or the path that leads to
        it.
        """
        return check_step_name(name) or f"{self.step.path}.{operation}"
