"""`shed=hr.shed(…)` of a topic, as users write it, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from headrace.engine.cutter import rows_between
from headrace.engine.ticks import Tick
from headrace.errors import PlanError, UnknownColumn
from headrace.log.schema import type_name
from headrace.operators.shed import Shed


def shed(*, behind: int, keep: float = 0.0, priority: str | None = None, least: Any = None) -> Shed:
    """Once more than `behind` rows of an input wait, leave out all but a share `keep` of those that come then; never those whose `priority` column is at least `least`.

    What is left out is counted (`TOPIC.shed` in `headrace status`). It is decided when a tick is cut, and recorded with it, so a replay leaves out the same rows.
    """
    if type(behind) is not int or behind < 1:
        raise PlanError(f"hr.shed has behind={behind!r}.", fix="give a number of rows, as in behind=1_000_000.")
    if not 0 <= keep < 1:
        raise PlanError(f"hr.shed has keep={keep!r}.", fix="give the share of rows that stays, from 0 up to but not including 1.")
    if (priority is None) != (least is None):
        raise PlanError("hr.shed needs both priority= and least=, or neither.", fix='say which rows always stay, as in priority="level", least=3.')
    return Shed(behind, keep, priority, least)


def check_shed(wanted: Any, schema: pa.Schema, *, where: str) -> None:
    if not isinstance(wanted, Shed):
        raise PlanError(f"{where} has shed={wanted!r}.", fix="make it with hr.shed(behind=1_000_000, keep=0.1).")
    if wanted.priority is None:
        return
    if wanted.priority not in schema.names:
        raise UnknownColumn(wanted.priority, schema.names, where=where)
    kind = schema.field(wanted.priority).type
    try:
        pa.scalar(wanted.least).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise PlanError(f"{where} sheds by {wanted.priority!r}, which is {type_name(kind)}, and least={wanted.least!r} is not.", fix="give a value of that type.") from None


def decided(ticks: Sequence[Tick], done: Tick, sheds: Mapping[str, Shed]) -> list[Tick]:
    """Ticks with the topics that are shed in them: those of which more rows wait than may. `done`: the last one that was committed."""

    def waits(tick: Tick, topic: str) -> int:
        return rows_between({topic: done.ends.get(topic, {})}, {topic: tick.ends.get(topic, {})})

    return [replace(tick, shed=frozenset(topic for topic, wanted in sheds.items() if waits(tick, topic) > wanted.behind)) for tick in ticks] if sheds else list(ticks)
