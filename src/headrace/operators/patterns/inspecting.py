"""What a key's stored rows say about matches in the making: for people who ask what a pattern waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from headrace.operators.keys import whole
from headrace.operators.patterns.automaton import ACCEPT
from headrace.operators.patterns.compiled import CompiledPattern
from headrace.operators.patterns.kernel import PatternKernel, certain_work
from headrace.operators.patterns.settings import MatchSettings
from headrace.operators.patterns.walking import Walker
from headrace.operators.windows.kept_rows import TIME

Partial = tuple[str, list[dict[str, Any]], list[str], int | None]
"""The pattern's name, the rows taken, what may come next, and until when."""


def partial(settings: MatchSettings, output: pa.Schema, stored: bytes | None, now_us: int) -> tuple[list[Partial], int]:
    """The partial matches of one key, from its stored rows; and how many rows are not certain yet. Rows before `now_us` are."""
    work = certain_work(PatternKernel(settings, output), pa.array([stored], pa.binary()), now_us)
    found: list[Partial] = []
    for at, (name, pattern) in enumerate(settings.patterns):
        view = work.view(at)
        source, matcher = view.source, work.matcher(at, view)
        outcome = matcher.run()
        begin = np.flatnonzero((outcome.certain_us >= now_us) & matcher.may_begin)
        entries = Walker(matcher.look, matcher.holds).partly(begin, view.rows.end[begin] - 1)
        for owner, first in enumerate(begin.tolist()):
            mine = entries.owner == owner
            places = entries.place[mine].tolist()
            if not places:
                continue
            columns = source.rows.take(pa.array(source.order[entries.row[mine]]))
            times = whole(columns.column(TIME)).to_pylist()
            rows = [{"classifier": pattern.automaton.symbols[place], "time_us": time} for place, time in zip(places, times, strict=True)]
            kept = columns.select([each for each in columns.column_names if not each.startswith("_")]).to_pylist()
            until = None if pattern.spec.within_us is None else int(view.rows.times[first]) + pattern.spec.within_us
            found.append((name, [{**row, **more} for row, more in zip(rows, kept, strict=True)], _next(pattern, places[-1]), until))
    return found, len(work.batch.order) - len(work.rows)


def _next(pattern: CompiledPattern, place: int) -> list[str]:
    """What may come behind a place."""
    automaton = pattern.automaton
    absent = " and ".join(f"no {each}" for each in automaton.pattern.absent) or "no row"
    return [(absent if automaton.pattern.waits else "what ends it") if edge.to == ACCEPT else automaton.symbols[edge.to] for edge in automaton.edges[place]]
