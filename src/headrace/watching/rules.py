"""A rule in one line: `lag rows > 10000 of billing`, `watermark age > 5 minutes of orders for 30 seconds`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.durations import format_us, to_us
from headrace.errors import BadDuration, ConfigurationError, InputError, nearest

LAG_ROWS, LAG_SECONDS, BEHIND, WATERMARK, LATE, DROPPED, REFUSED, FAILED, DEAD, STATUS_AGE = (
    "lag rows", "lag seconds", "behind rows", "watermark age", "late rows", "dropped rows", "refused rows", "failed batches", "dead letters", "status age",
)  # fmt: skip
OF_THE_LOG = {LAG_ROWS: "a group", LAG_SECONDS: "a group", REFUSED: "a gateway", DEAD: "a topic, step or sink"}
OF_PIPELINES = {BEHIND: "a pipeline", WATERMARK: "an input", LATE: "a step", DROPPED: "a topic, or a gateway", FAILED: "a pipeline", STATUS_AGE: "a pipeline"}
IN_SECONDS = {LAG_SECONDS, WATERMARK, STATUS_AGE}
A_MINUTE = {LATE, DROPPED, REFUSED, FAILED}
"""What is counted over the last minute; all else is as it is now."""
KNOWN = (*OF_THE_LOG, *OF_PIPELINES)
DEFAULT_HOLD_US = 10_000_000
_RULE = re.compile(r"(?P<what>[a-z]+ [a-z]+)\s*>\s*(?P<limit>.+?)(?:\s+of\s+(?P<of>\S+))?(?:\s+for\s+(?P<hold>.+))?", re.IGNORECASE)
_FORM = "write it as `lag rows > 10000 of billing`, with `of NAME` and `for DURATION` if you like."


@dataclass(frozen=True)
class Rule:
    """It fires when a value has been above the limit for as long as `hold_us`, and is over when it has not been for as long."""

    text: str
    what: str
    limit: float
    of: str | None = None
    hold_us: int = DEFAULT_HOLD_US

    def shown(self, value: float) -> str:
        return format_us(round(value) * 1_000_000) if self.what in IN_SECONDS else f"{value:,.0f}{' a minute' if self.what in A_MINUTE else ''}"


def parse(text: str) -> Rule:
    line = " ".join(text.split())
    found = _RULE.fullmatch(line)
    if found is None:
        raise InputError(f"The rule {line!r} cannot be read.", fix=_FORM)
    what = found["what"].lower()
    if what not in KNOWN:
        raise InputError(f"The rule {line!r} is about {what!r}: {nearest(what, KNOWN)}", fix=f"there is {', '.join(KNOWN)}.")
    hold_us = DEFAULT_HOLD_US if found["hold"] is None else to_us(found["hold"], what="time of a rule")
    return Rule(line, what, _limit(what, found["limit"], line), found["of"], hold_us)


def _limit(what: str, text: str, line: str) -> float:
    number = text.replace(",", "").replace("_", "")
    if re.fullmatch(r"\d+(\.\d+)?", number):
        return float(number)
    if what in IN_SECONDS:
        try:
            return to_us(text, what="limit") / 1e6
        except BadDuration as error:
            raise InputError(f"The rule {line!r} has a limit that is no time: {error.message}", fix=error.fix) from None
    raise InputError(f"The rule {line!r} has the limit {text!r}, which is no number.", fix=_FORM)


def read(file: Path) -> list[Rule]:
    """One rule a line; what follows # is for people."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The rules in {file} cannot be read: {error}.", fix="name a text file with one rule a line.") from None
    return [parse(line) for each in lines if (line := each.partition("#")[0].strip())]
