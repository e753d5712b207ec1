"""The newest events, in memory: those that the index does not have yet. Bounded by how often they are moved there (`indexed`)."""

from __future__ import annotations

from itertools import takewhile

from headrace.events.rows import Entry


class Tail:
    """Events from offset `start` up to `end`. Not safe for several threads: its owner has a lock."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.entries: list[Entry] = []
        self._of: dict[str, list[Entry]] = {}
        self._ids: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._of.setdefault(entry.entity, []).append(entry)
        if entry.id is not None:
            self._ids[entry.id] = entry
        self.end = entry.offset + 1

    def since(self, entity: str, version: int, offset: int) -> list[Entry]:
        """An entity's events behind a version, from an offset on, newest first; versions and offsets grow together."""
        return list(takewhile(lambda entry: entry.version > version and entry.offset >= offset, reversed(self._of.get(entity, ()))))

    def newest(self, entity: str) -> Entry | None:
        known = self._of.get(entity)
        return known[-1] if known else None

    def with_id(self, id: str) -> Entry | None:
        return self._ids.get(id)

    def entities(self) -> list[str]:
        return list(self._of)

    def kept(self, start: int, end: int) -> Tail:
        """Another one, without what is before one offset or behind another. Whoever reads this one goes on as before."""
        tail = Tail(start)
        for entry in self.entries:
            if start <= entry.offset < end:
                tail.add(entry)
        tail.end = max(start, min(self.end, end))
        return tail
