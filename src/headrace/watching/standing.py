"""Whether a rule fires for a thing. It does not flap: a change must hold for the rule's time before it counts, in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.watching.facts import Values
from headrace.watching.rules import Rule


@dataclass(frozen=True)
class Event:
    """A rule that begins to fire for a thing, or has ceased to."""

    rule: Rule
    of: str
    is_firing: bool
    value: float

    @property
    def text(self) -> str:
        return f"{'FIRING' if self.is_firing else 'resolved'}: {self.rule.text}: {self.of} has {self.rule.shown(self.value)}"


def is_meant(rule: Rule, of: str) -> bool:
    """`billing` means all of billing's partitions, `billing/orders` those of one topic; `orders` also the input of any pipeline."""
    return rule.of is None or of == rule.of or of.startswith(f"{rule.of}/") or of.endswith(f"/{rule.of}")


class Standings:
    """All rules and things; `firing` is what fires now. What is not there any more does not exceed anything."""

    def __init__(self, rules: Sequence[Rule], firing: Mapping[tuple[str, str], int] = {}) -> None:
        self.rules = rules
        self.firing: dict[tuple[str, str], int] = dict(firing)
        """By the rule's text and the thing: since when, in microseconds since 1970."""
        self._turning: dict[tuple[str, str], int] = {}

    def update(self, values: Values, now_us: int) -> list[Event]:
        events = []
        for rule in self.rules:
            found = {of: value for of, value in values.get(rule.what, {}).items() if is_meant(rule, of)}
            gone = {of: 0.0 for text, of in self.firing if text == rule.text and of not in found}
            events += [event for of, value in (found | gone).items() if (event := self._turned(rule, of, value, now_us)) is not None]
        return events

    def _turned(self, rule: Rule, of: str, value: float, now_us: int) -> Event | None:
        key, exceeds = (rule.text, of), value > rule.limit
        if exceeds == (key in self.firing):
            self._turning.pop(key, None)
            return None
        if now_us - self._turning.setdefault(key, now_us) < rule.hold_us:
            return None
        del self._turning[key]
        if exceeds:
            self.firing[key] = now_us
        else:
            del self.firing[key]
        return Event(rule, of, exceeds, value)
