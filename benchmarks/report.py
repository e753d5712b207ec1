"""What a benchmark reports, and how two sides are measured fairly: interleaved, repeated, medians
compared.

A benchmark is a module `bench_<name>.py` with `results() -> Iterator[Result]`, built with `compare`
(ours against a peer) or `within` (a promised limit).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Better = Literal["higher", "lower"]
Measure = Callable[[], float]
"""Runs one side once and returns its figure, in the unit of the result."""


class Unavailable(Exception):
    """The peer of a benchmark cannot be had on this machine (no Java, no broker). Skipped with the
    reason; a failure when CI=true.
    """


@dataclass(frozen=True)
class Result:
    """One line of output. `ratio` says how many times as good as the peer we are, whichever way the
    unit counts.
    """

    bench: str
    what: str
    unit: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    bar: float
    ok: bool
    params: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def note(text: str) -> None:
    """Tell the person watching; results alone go to standard output."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def seconds(action: Callable[[], object]) -> float:
    """How long one run of something takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def paired(
    ours: Measure, theirs: Measure, *, repeats: int = 5, warmups: int = 1
) -> tuple[float, float]:
    """The medians of both sides. Rounds alternate who goes first, so that a machine that slows down
    hurts both alike.
    """
    for _ in range(warmups):
        ours(), theirs()
    our_figures: list[float] = []
    their_figures: list[float] = []
    for round_number in range(repeats):
        sides = [(ours, our_figures), (theirs, their_figures)]
        for measure, figures in sides if round_number % 2 == 0 else reversed(sides):
            figures.append(measure())
    return statistics.median(our_figures), statistics.median(their_figures)


def ratio_of(ours: float, theirs: float, better: Better) -> float:
    """How many times as good as the peer: 2.0 is twice the rate, or half the time."""
    good, bad = (ours, theirs) if better == "higher" else (theirs, ours)
    return good / bad if bad else math.inf


def compare(
    bench: str,
    what: str,
    unit: str,
    *,
    ours: Measure,
    peer: str,
    theirs: Measure,
    bar: float,
    better: Better,
    repeats: int = 5,
    warmups: int = 1,
    params: Mapping[str, Any] | None = None,
) -> Result:
    """Measure ours against a peer. `bar` is the ratio promised."""
    note(f"{bench}: {what} (against {peer}, {repeats} rounds)")
    our_median, their_median = paired(ours, theirs, repeats=repeats, warmups=warmups)
    return judged(
        bench,
        what,
        unit,
        our_median,
        peer,
        their_median,
        bar=bar,
        better=better,
        params={**(params or {}), "repeats": repeats},
    )


def within(
    bench: str,
    what: str,
    unit: str,
    *,
    ours: Measure,
    limit: float,
    repeats: int = 5,
    warmups: int = 1,
    params: Mapping[str, Any] | None = None,
) -> Result:
    """Measure ours against a limit it must stay under, such as 50 ms."""
    note(f"{bench}: {what} (at most {limit:g} {unit}, {repeats} rounds)")
    for _ in range(warmups):
        ours()
    median = statistics.median(ours() for _ in range(repeats))
    return judged(
        bench,
        what,
        unit,
        median,
        "limit",
        limit,
        bar=1.0,
        better="lower",
        params={**(params or {}), "repeats": repeats},
    )


def limited(
    bench: str,
    what: str,
    unit: str,
    ours: float,
    *,
    limit: float,
    params: Mapping[str, Any] | None = None,
) -> Result:
    """A figure already measured, against a limit."""
    return judged(
        bench, what, unit, max(ours, 1e-6), "limit", limit, bar=1.0, better="lower", params=params
    )


def judged(
    bench: str,
    what: str,
    unit: str,
    ours: float,
    peer: str,
    theirs: float,
    *,
    bar: float,
    better: Better,
    params: Mapping[str, Any] | None = None,
) -> Result:
    """A result from two figures already measured."""
    ratio = ratio_of(ours, theirs, better)
    return Result(
        bench,
        what,
        unit,
        _short(ours),
        peer,
        _short(theirs),
        _short(ratio),
        bar,
        ratio >= bar,
        dict(params or {}),
    )


def _short(figure: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{figure:.4g}")
