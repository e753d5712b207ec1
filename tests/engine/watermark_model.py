"""The obvious computation of watermarks, producer by producer and tick by tick: a model for
tests. It shares no code with the engine, keeps all history, and asks everything anew at each tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.operators.kernel import UNSTARTED
from headrace.operators.watermark_spec import WatermarkSpec

SPEC = WatermarkSpec("orders", "at", "device", delay_us=3, idle_us=20)
Row = tuple[str, int]


@dataclass
class ModelInput:
    """One input, from its rows in every tick."""

    spec: WatermarkSpec
    history: list[tuple[int, list[Row]]] = field(default_factory=list)
    """The time and the rows of each tick so far."""
    watermark: int = UNSTARTED

    def tick(self, time: int, rows: list[Row]) -> None:
        self.history.append((time, rows))
        if not any(rows for _, rows in self.history):
            return
        if self.is_idle:
            last = max(time for time, rows in self.history if rows)
            newest = max(at for _, rows in self.history for _, at in rows)
            now = newest + (time - last - self.spec.idle_us)
        else:
            now = min(self._newest(name) for name in self._live())
        self.watermark = max(self.watermark, now - self.spec.delay_us)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for it any more."""
        first, now = self.history[0][0], self.history[-1][0]
        if not any(rows for _, rows in self.history):
            return now - first > self.spec.idle_us
        return not self._live()

    def _live(self) -> set[str]:
        now = self.history[-1][0]
        return {
            name
            for time, rows in self.history
            for name, _ in rows
            if now - time <= self.spec.idle_us
        }

    def _newest(self, producer: str) -> int:
        """The newest event time since the producer last returned from idleness."""
        newest, heard = UNSTARTED, None
        for time, rows in self.history:
            own = [at for name, at in rows if name == producer]
            if own:
                if heard is not None and time - heard > self.spec.idle_us:
                    newest = UNSTARTED
                newest, heard = max(newest, *own), time
        return newest


def obvious(ticks: list[list[Row]], times: list[int]) -> list[int]:
    """The watermark of one input at each tick."""
    model, answer = ModelInput(SPEC), []
    for rows, time in zip(ticks, times, strict=True):
        model.tick(time, rows)
        answer.append(model.watermark)
    return answer


def obvious_meeting(
    inputs: dict[str, list[list[Row]]], specs: dict[str, WatermarkSpec], times: list[int]
) -> dict[str, list[int]]:
    """What each input of a step with several inputs is given, at each tick."""
    models = {name: ModelInput(specs[name]) for name in inputs}
    given: dict[str, list[int]] = {name: [] for name in inputs}
    for number, time in enumerate(times):
        for name, model in models.items():
            model.tick(time, inputs[name][number])
        waited_for = [model.watermark for model in models.values() if not model.is_idle]
        others = min(waited_for) if waited_for else max(m.watermark for m in models.values())
        for name, model in models.items():
            now = others if model.is_idle else model.watermark
            given[name].append(max([now, *given[name][-1:]]))
    return given
