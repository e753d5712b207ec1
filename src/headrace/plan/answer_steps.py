"""The steps of recorded calls: `AnswersStep` reads the answers that `headrace.calls` appends to the
log, `RequestsOutput` is the internal topic with the rows that wait for one.

    orders ── RequestsOutput `__calls.shop.geocode.requests`      (ticks, exactly once)
                   │  the caller of the run: calls, and records each answer
                   ▼
              AnswersStep `__calls.shop.geocode`  ── where answered ── select ── what follows

To the plan, answers are an input like any other. So ticks take them in, a replay over the recorded
ticks sees the same answers in the same ticks, and nothing downstream depends on when, or whether, a
service was called. An answer carries the columns of its row, so no step keeps rows that wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from headrace.log.values import ANSWERED_AT, CALL_CODE, CALL_ID, COMPLETE_TO
from headrace.plan.plan import TimeColumn, Times, TopicOutput, TopicStep

_TIME = pa.timestamp("us", "UTC")


def answer_fields(*, has_time: bool) -> list[pa.Field]:
    """The columns of a topic of answers besides those of the row and of the answer."""
    fields = [
        pa.field(CALL_ID, pa.string()),
        pa.field(CALL_CODE, pa.string()),
        pa.field(ANSWERED_AT, _TIME),
    ]
    return [*fields, pa.field(COMPLETE_TO, _TIME)] if has_time else fields


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswersStep(TopicStep):
    """The recorded answers of a call, each with its row. `schema` has the columns that are read."""

    operation: ClassVar[str] = "call"

    row_time: TimeColumn | None = None
    """The event time of the rows."""

    @property
    def created_schema(self) -> pa.Schema:
        """The columns of rows and answers, and then all of `answer_fields`."""
        added = answer_fields(has_time=self.row_time is not None)
        names = {field.name for field in added}
        return pa.schema([*(field for field in self.schema if field.name not in names), *added])

    def time(self, inputs: Times) -> TimeColumn | None:  # noqa: ARG002
        return self.row_time

    requests: str
    """The topic of the rows that wait."""

    def further_meaning(self) -> dict[str, Any]:
        """What the event time of the rows is besides its column."""
        time = self.row_time
        return {} if time is None else {"row_time": [time.name, time.shift_us, time.producer]}

    def summary(self) -> str:
        return f"of {self.requests}, recorded in {self.topic}"


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestsOutput(TopicOutput):
    """The rows that wait for an answer. A version does not have it, since it calls nobody."""

    call: str
    """The name of the call."""

    @property
    def step_prefix(self) -> str:
        return self.call
