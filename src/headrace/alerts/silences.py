"""Silences: for some time an alert is decided and recorded, and nobody is told. What still fires when the silence ends is told then."""

from __future__ import annotations

from headrace.log.api import Log


def _note(pipeline: str, alert: str) -> str:
    return f"silence.{pipeline}.{alert}"


def silence(log: Log, pipeline: str, alert: str, until_us: int) -> None:
    """Until a time; one that has passed ends it."""
    with log.transaction(_note(pipeline, alert)) as tx:
        tx.set_note(_note(pipeline, alert), str(until_us))


def silenced_until_us(log: Log, pipeline: str, alert: str) -> int:
    return int(log.note(_note(pipeline, alert)) or 0)
