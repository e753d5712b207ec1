"""Which topics a pipeline's inputs are. A topic that was deleted and made again has the old one's name and other rows: its offsets say nothing about what was taken in.

A note of the log has the id of each topic that was ever read. The runner checks it when it starts, and with every tick.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from headrace.errors import InputReplaced, NewerFormat
from headrace.log.api import Log
from headrace.sinks.ledger import Ledger

VERSION = 1


class Sources:
    """InputReplaced if one of the topics is not what it was. Topics that are read for the first time are remembered with `remember`."""

    def __init__(self, log: Log, pipeline: str, topics: Iterable[str]) -> None:
        self._log, self._pipeline, self._note = log, pipeline, f"inputs.{pipeline}"
        self._stored = _ids(log.note(self._note), pipeline)
        there = set(log.topics())
        self._ids = {topic: log.topic(topic).id for topic in topics if topic in there and topic not in self._stored} | self._stored
        self.check(topic for topic in topics if topic in there)

    def remember(self, ledger: Ledger) -> None:
        if self._ids != self._stored:
            tx = ledger.transaction()
            tx.set_note(self._note, json.dumps({"version": VERSION, "ids": self._ids}))
            ledger.commit(tx)
            self._stored = self._ids

    def check(self, topics: Iterable[str]) -> None:
        """That topics are those that were read so far."""
        for topic in topics:
            if self._log.topic(topic).id != self._ids.get(topic):
                raise InputReplaced(
                    f"The topic {topic!r} was deleted and made again since the pipeline {self._pipeline!r} first read it: its rows are others now.",
                    fix="build the pipeline anew from what is there: headrace replay FILE --as v2 --retick; or give it another name.",
                )


def _ids(text: str | None, pipeline: str) -> dict[str, str]:
    if text is None:
        return {}
    stored = json.loads(text)
    if stored["version"] > VERSION:
        raise NewerFormat(f"The inputs of {pipeline!r} were remembered by a newer Headrace (format {stored['version']}).", fix="upgrade Headrace.")
    ids: dict[str, str] = stored["ids"]
    return ids
