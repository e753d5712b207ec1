"""A table's versions as a list, never forgotten: what was valid when, as far as was known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from headrace.operators.joins.row_store import KeyedRowStore
from headrace.operators.joins.sides import ResultColumn, Side
from headrace.operators.kernel import UNSTARTED
from headrace.testing.kernels import MemoryState
from tests.operators.histories import History, Row
from tests.operators.joins.join_driver import Track

TIME = pa.timestamp("us", "UTC")
STREAM = Side(
    pa.schema([("n", pa.int64()), ("k", pa.int64()), ("t", TIME)]), ("k",), ("n",), time="t"
)
TABLE = Side(
    pa.schema([("k", pa.int64()), ("v", pa.int64()), ("since", TIME)]), ("k",), ("k",), time="since"
)
CORRECTED_COLUMNS: list[ResultColumn] = [
    ("left", "n", "n"),
    ("left", "k", "k"),
    ("left", "t", "t"),
    ("right", "v", "v"),
]


@dataclass
class Version:
    key: int
    at: int
    tick: int
    value: int | None  # None: the row is gone


@dataclass
class Known:
    """Every version that ever came, in the order in which they came; and what may be forgotten of
    them.
    """

    history: int
    versions: list[Version] = field(default_factory=list)

    def take_in(self, tick: int, changes: list[Row], known_from: int) -> list[Version]:
        """`known_from`: how far back the past was known before the tick. Of versions for one time
        in a tick the last counts.
        """
        were, came = list(self.versions), dict[tuple[int, int], Version]()
        for change in changes:
            if change["_change_type"] == "update_preimage":
                continue
            version = Version(change["k"], change["since"], tick, change["v"])
            if change["_change_type"] == "delete":
                version = Version(change["k"], self._end(change, tick, known_from), tick, None)
            self.versions.append(version)
            came[version.key, version.at] = version
        self.versions = [*were, *came.values()]
        return list(came.values())

    def _end(self, change: Row, tick: int, known_from: int) -> int:
        """A delete ends the row that goes, and if it does not say which, the latest."""
        now: int = Track.time_of(tick)
        if change["since"] is not None:
            return max(now, int(change["since"]))
        return max(
            [now, known_from, *(each.at for each in self.versions if each.key == change["k"])]
        )

    def valid(self, key: Any, time: int) -> Version | None:
        """Of those up to a time the last; of those for the same time the one that came last."""
        found = [version for version in self.versions if version.key == key and version.at <= time]
        return max(enumerate(found), key=lambda each: (each[1].at, each[0]))[1] if found else None

    def forget(self, known_from: int) -> None:
        """What lies before the newest that is old enough; and that one, if it only says that the
        row is gone.
        """
        for key in {version.key for version in self.versions}:
            base = self.valid(key, known_from)
            if base is not None:
                self.versions = [
                    each for each in self.versions if each.key != key or each.at >= base.at
                ]
                self.versions = [
                    each
                    for each in self.versions
                    if each.key != key or each.at != base.at or each is base
                ]
                if base.value is None:
                    self.versions.remove(base)

    @property
    def count(self) -> int:
        return len({(version.key, version.at) for version in self.versions})


def horizon(watermarks: tuple[Track, ...], tick: int, history: int) -> int:
    """How far back the past is known at a tick's end."""
    clock = min(track.complete[tick] for track in watermarks) if tick >= 0 else UNSTARTED
    return UNSTARTED if clock == UNSTARTED else clock - history


def stored(state: MemoryState, section: int) -> int:
    keys = sorted(name[1:] for name in state.values if name[:1] == b"h")
    return len(
        KeyedRowStore("j", state, pa.array(keys, pa.binary()), sections=2, registers=2).load_all(
            section
        )
    )


@st.composite
def version_history(draw: st.DrawFn, ticks: int, *, keys: int = 2, max_keys: int = 3) -> History:
    """A table's versions in any order of time, and deletes: as changes, or as a topic has them,
    where a tick may change a key several times, and a delete may have nothing but the key, even
    that of a row that is not there.
    """
    rows: dict[int, Row] = {}
    emitted: list[list[Row]] = []
    as_topic = draw(st.booleans())
    for _ in range(ticks):
        emitted.append(changes := [])
        for key in draw(st.lists(st.integers(0, keys), max_size=max_keys, unique=not as_topic)):
            if (key in rows or as_topic) and draw(st.integers(0, 3)) == 0:
                gone = rows.pop(key, None)
                changes.append(
                    {
                        **(gone if gone and not as_topic else {"k": key, "v": None, "since": None}),
                        "_change_type": "delete",
                    }
                )
                continue
            fresh = {"k": key, "v": draw(st.integers(0, 3)), "since": draw(st.integers(-4, 14))}
            changes += [{**rows[key], "_change_type": "update_preimage"}] if key in rows else []
            changes.append(
                {**fresh, "_change_type": "update_postimage" if key in rows else "insert"}
            )
            rows[key] = fresh
    return History(TABLE.schema, emitted, is_table=True)


@st.composite
def row_history(draw: st.DrawFn, ticks: int, *, keys: int = 2) -> History:
    row = st.fixed_dictionaries({"k": st.none() | st.integers(0, keys), "t": st.integers(-4, 14)})
    numbers = iter(range(1000))
    drawn = draw(st.lists(st.lists(row, max_size=4), min_size=ticks, max_size=ticks))
    return History(
        STREAM.schema,
        [[{"n": next(numbers), **each} for each in rows] for rows in drawn],
        is_table=False,
    )


def moment(time: int | None) -> Any:
    return pa.scalar(time, TIME).as_py()
