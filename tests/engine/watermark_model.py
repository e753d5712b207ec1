"""The obvious computation of watermarks, producer by producer and tick by tick: a model for
tests.
"""

from __future__ import annotations

from headrace.operators.kernel import UNSTARTED
from headrace.operators.watermark_spec import WatermarkSpec

SPEC = WatermarkSpec("orders", "at", "device", delay_us=3, idle_us=20)
Row = tuple[str, int]


def obvious(ticks: list[list[Row]], times: list[int]) -> list[int]:
    """Producer by producer, tick by tick."""
    newest: dict[str, int] = {}
    heard: dict[str, int] = {}
    watermark, answer = UNSTARTED, []
    for rows, time in zip(ticks, times, strict=True):
        for name in [name for name, when in heard.items() if when < time - SPEC.idle_us]:
            del newest[name], heard[name]
        for name, at in rows:
            newest[name] = max(at, newest.get(name, at))
            heard[name] = time
        begun = watermark != UNSTARTED or bool(newest)
        if begun:
            watermark = max(watermark, (min(newest.values()) if newest else time) - SPEC.delay_us)
        answer.append(watermark)
    return answer
