"""`Relation`: a stream or a table under construction, which is the last step of the plan so far and
the pipeline that the step belongs to.

`Stream` and `Table` (`stream`) add the operations. Joins, windows, patterns and search take
relations.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from headrace.plan.columns import check_step_name
from headrace.plan.plan import Step
from headrace.runtime.declared_pipeline import DeclaredPipeline


@dataclass(frozen=True, eq=False)
class Relation:
    """A stream or a table: a pipeline, and the last step of its plan so far."""

    pipeline: DeclaredPipeline
    step: Step

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows, as an Arrow schema.

        Example:
            ```python
            orders.schema.names  # ["order_id", "customer_id", …]
            ```
        """
        return self.step.schema

    @property
    def key(self) -> tuple[str, ...]:
        """A table's primary key, or the columns that a stream is keyed by; empty if it has none.

        Example:
            ```python
            customers.key  # ("customer_id",)
            ```
        """
        return self.step.key

    def step_label(self, operation: str, name: str | None) -> str:
        """Internal: how errors call the step that is being declared: its name, or the path that
        leads to it.
        """
        return check_step_name(name) or f"{self.step.path}.{operation}"
