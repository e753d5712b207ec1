"""The source `values`: rows that are written out where the pipeline is declared, as INSERT of a
file of SQL has them.

Each list of rows is stored once, however often the pipeline runs: the position has the digests of
the lists that are stored. A list that is added to the file is stored by the next run; one that is
edited counts as another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.log.values import TopicInfo
from headrace.sources.base import RowSource, Source, SourceRows

MAX_ROWS = 10_000
"""How many rows one list may have. More belong into a file."""


class ValuesSource(RowSource):
    """Hands out the lists of rows whose digests are not in the position."""

    def __init__(self, source: Source, topic: TopicInfo) -> None:
        super().__init__(source, topic)
        self._lists: Sequence[Sequence[Mapping[str, Any]]] = source.options["lists"]
        self._stored: list[str] = []

    def start(self, position: Any) -> None:
        self._stored = list(position or [])

    def read(self, timeout_s: float) -> SourceRows | None:  # noqa: ARG002
        occurrences: dict[str, int] = {}
        for rows in self._lists:
            digest = digest_of(rows)
            occurrences[digest] = occurrences.get(digest, 0) + 1
            mark = f"{digest}.{occurrences[digest]}"
            if mark not in self._stored:
                self._stored.append(mark)
                return SourceRows(
                    [json.dumps(dict(row)).encode() for row in rows],
                    position=list(self._stored),
                    where="INSERT",
                )
        return None


def digest_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A short digest of a list of rows."""
    text = json.dumps([dict(row) for row in rows], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
