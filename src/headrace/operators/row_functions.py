"""`hr.over`: functions of a row's place among the rows of its partition, for `stream.over(…)`.

    bids.over("auction", order_by="bid_id").aggregate(
        number=hr.over.row_number(),
        previous=hr.over.lag("price"),
        following=hr.over.lead("price", within="10 minutes"),
    )

The aggregates of `hr.agg` stand beside them. `headrace.operators.row_frames` computes both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from headrace.durations import format_us, to_us
from headrace.errors import PlanError

MAX_OFFSET = 10_000
LAG, LEAD = "lag", "lead"
ROW_NUMBER, RANK, DENSE_RANK = "row_number", "rank", "dense_rank"


@dataclass(frozen=True)
class RowFunction:
    """One function of a row's place. `column` is a column or, until the plan is built, an
    expression. `offset` is how many rows away `lag` and `lead` look, and `within_us` how long
    `lead` waits.
    """

    kind: str
    column: str | None = None
    offset: int = 0
    within_us: int | None = None

    def __str__(self) -> str:
        arguments = [] if self.column is None else [self.column, str(self.offset)]
        if self.within_us is not None:
            arguments.append(f"within={format_us(self.within_us)!r}")
        return f"{self.kind}({', '.join(arguments)})"


def row_number() -> RowFunction:
    """The number of a row in its partition, from 1.

    Returns:
        A function for `stream.over(…).aggregate(…)`. Its result is BIGINT.

    Example:
        ```python
        numbered = orders.over("customer_id").aggregate(number=hr.over.row_number())
        ```
    """
    return RowFunction(ROW_NUMBER)


def rank() -> RowFunction:
    """The rank of a row in its partition, from 1: how many rows come before it and are not equal to
    it in the order, and 1.

    Returns:
        A function for `stream.over(…).aggregate(…)`. Its result is BIGINT.

    Example:
        ```python
        ranked = orders.over("customer_id").aggregate(place=hr.over.rank())
        ```
    """
    return RowFunction(RANK)


def dense_rank() -> RowFunction:
    """The rank of a row in its partition without gaps: rows that are equal in the order count
    once.

    Returns:
        A function for `stream.over(…).aggregate(…)`. Its result is BIGINT.

    Example:
        ```python
        ranked = orders.over("customer_id").aggregate(place=hr.over.dense_rank())
        ```
    """
    return RowFunction(DENSE_RANK)


def lag(column: str, offset: int = 1) -> RowFunction:
    """The value of a row before this one; null if there is none.

    Args:
        column: A column or a Spark SQL expression.
        offset: How many rows before, at most 10,000.

    Returns:
        A function for `stream.over(…).aggregate(…)`.

    Raises:
        PlanError: `offset` is out of range.

    Example:
        ```python
        steps = orders.over("customer_id").aggregate(previous=hr.over.lag("amount"))
        ```
    """
    return RowFunction(LAG, column, _offset(LAG, offset))


def lead(column: str, offset: int = 1, *, within: str | timedelta) -> RowFunction:
    """The value of a row after this one; null if it does not come in time.

    Args:
        column: A column or a Spark SQL expression.
        offset: How many rows after, at most 10,000.
        within: How much later that row may be, in event time. A row is emitted when the row after
            it is certain, or when this time is over.

    Returns:
        A function for `stream.over(…).aggregate(…)`.

    Raises:
        PlanError: `offset` is out of range.
        BadDuration: `within` is no duration.

    Example:
        ```python
        followed = orders.over("customer_id").aggregate(
            following=hr.over.lead("amount", within="1 hour")
        )
        ```
    """
    within_us = to_us(within, what="within of hr.over.lead")
    return RowFunction(LEAD, column, _offset(LEAD, offset), within_us)


def _offset(kind: str, offset: Any) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or not 1 <= offset <= MAX_OFFSET:
        raise PlanError(
            f"hr.over.{kind} looks {offset!r} rows away.", fix=f"give 1 to {MAX_OFFSET:,} rows."
        )
    return offset
