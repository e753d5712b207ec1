"""Answers by their arguments, for `cache=` of a call: bounded in bytes, and old ones are forgotten.

What it gives is recorded like any answer, so a replay needs no cache and gives the same rows. Of
rows with equal arguments that wait together, one is asked about, and the others follow it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from headrace.calls.call import Call
from headrace.columnar.columns import OFFSET_COLUMN
from headrace.durations import from_us
from headrace.log.api import Log
from headrace.log.values import ANSWERED_AT, CALL_CODE

MAX_CACHE_BYTES = 64 << 20
_RELOADED_OFFSETS = 200_000
_ENTRY_BYTES = 300
Values = Mapping[str, Any]


def argument_key(arguments: Values) -> str:
    """Equal for equal arguments."""
    return repr(sorted(arguments.items()))


class AnswerCache:
    """The newest answers, by `argument_key`, with the time of each."""

    def __init__(self, ttl_us: int, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.ttl_us = ttl_us
        self._max_bytes = max_bytes
        self._bytes = 0
        self._answers: OrderedDict[str, tuple[Values, int, int]] = OrderedDict()

    def get(self, key: str, now_us: int) -> tuple[Values, int] | None:
        """The answer and its time, if it still stands."""
        known = self._answers.get(key)
        if known is None:
            return None
        values, answered_us, _ = known
        if now_us - answered_us > self.ttl_us:
            self._remove(key)
            return None
        self._answers.move_to_end(key)
        return values, answered_us

    def put(self, key: str, values: Values, answered_us: int) -> None:
        self._remove(key)
        size_bytes = _ENTRY_BYTES + len(key) + sum(map(sys.getsizeof, values.values()))
        self._answers[key] = values, answered_us, size_bytes
        self._bytes += size_bytes
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._answers)))

    def _remove(self, key: str) -> None:
        removed = self._answers.pop(key, None)
        if removed is not None:
            self._bytes -= removed[2]

    def __len__(self) -> int:
        return len(self._answers)

    def reload(self, log: Log, call: Call, now_us: int) -> None:
        """Take the newest recorded answers of the same code, as after a restart."""
        names = [*call.arguments, *call.schema.names]
        since = log.offsets_at(call.answers_topic, from_us(max(0, now_us - self.ttl_us)))
        for partition, end in log.end_offsets(call.answers_topic).items():
            start = max(since[partition], end - _RELOADED_OFFSETS)
            columns = list(dict.fromkeys([*names, ANSWERED_AT, CALL_CODE, OFFSET_COLUMN]))
            for batch in log.read(call.answers_topic, partition, start, end, columns=columns):
                for row in batch.to_pylist():
                    if row[CALL_CODE] == call.code and row[ANSWERED_AT] is not None:
                        answered_us = int(row[ANSWERED_AT].timestamp() * 1e6)
                        if now_us - answered_us <= self.ttl_us:
                            key = argument_key({name: row[name] for name in call.arguments})
                            values = {name: row[name] for name in call.schema.names}
                            self.put(key, values, answered_us)
