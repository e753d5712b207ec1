"""Faults at chosen points of the engine, in this process: an error is raised there, as if something
had broken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.testing.plain_spark import Fault


@dataclass
class Faults:
    """Strikes at some of the points that are passed, by their number, or the first time, by their
    name. None while it rests.
    """

    at: frozenset[int | str]
    passed: int = 0
    struck: list[str] = field(default_factory=list)
    resting: bool = True

    def strike(self, point: str) -> None:
        if self.resting:
            return
        self.passed += 1
        if self.passed in self.at or (point in self.at and point not in self.struck):
            self.struck.append(point)
            raise Fault(point)
