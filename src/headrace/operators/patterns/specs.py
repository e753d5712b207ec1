"""What a pattern step is told, as plain values: which rows fit which symbol, what a match gives, how long it may take, and where the next one may begin."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import BadPattern, PlanError, nearest

PAST_LAST, NEXT_ROW, TO_FIRST, TO_LAST, NO_SKIP = "skip past last row", "skip to next row", "skip to first", "skip to last", "no skip"
ONE_ROW, ALL_ROWS = "one", "all"
DROP, STOP = "drop", "stop"
MOST_ROWS = 10_000
MOST_MATCHES = 1_000
MOST_RULES = 500
_SKIP_TO = re.compile(r"skip\s+to\s+(first|last)\s+(\w+)")


@dataclass(frozen=True)
class AfterMatch:
    """Where the next match may begin. `symbol`: for those that go to the first or last row of one."""

    kind: str = PAST_LAST
    symbol: str | None = None

    @property
    def in_turn(self) -> bool:
        """Whether where a match may begin depends on those before it."""
        return self.kind not in {NEXT_ROW, NO_SKIP}

    def __str__(self) -> str:
        return self.kind if self.symbol is None else f"{self.kind} {self.symbol}"


SKIP_PAST_LAST = AfterMatch()


def after_match(text: str, symbols: tuple[str, ...], *, where: str) -> AfterMatch:
    """`after_match=` as users write it."""
    plain = " ".join(str(text).split())
    for kind in (PAST_LAST, NEXT_ROW, NO_SKIP):
        if plain.lower() == kind:
            return AfterMatch(kind)
    found = _SKIP_TO.fullmatch(plain) or _SKIP_TO.fullmatch(f"{' '.join(plain.split()[:-1]).lower()} {plain.split()[-1] if plain else ''}")
    if found is None:
        kinds = [PAST_LAST, NEXT_ROW, f"{TO_FIRST} a", f"{TO_LAST} a", NO_SKIP]
        raise PlanError(f"The step {where} has after_match={text!r}: {nearest(plain, kinds)}", fix=f"use one of {', '.join(map(repr, kinds))}.")
    if found[2] not in symbols:
        raise BadPattern(f"The step {where} skips to {found[2]!r}, which is no symbol of the pattern: {nearest(found[2], symbols)}")
    return AfterMatch(f"skip to {found[1]}", found[2])
