"""A table's versions by the time from which they are valid: which row of a key was valid at a time,
as far as was known in a tick.

A version comes with an insert or an update, and is valid from its event time until the next one's.
A delete ends validity at its tick's time, or, if that is later, at the time from which the row that
goes was to be valid; one that does not say which row goes, as in a topic, means the latest that is
known by then. A version that comes later for the same time takes the place of the earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import CHANGE_FIELD, CHANGE_TYPE, TICK_FIELD
from headrace.columnar.keys import whole
from headrace.columnar.lookup import (
    begins,
    bounds,
    hull,
    last_before,
    marked,
    pairs,
    ranked,
    search,
    sorting,
)
from headrace.errors import InputError
from headrace.operators.changelog import DELETE, UPDATE_PREIMAGE
from headrace.operators.joins import row_store
from headrace.operators.joins.row_store import LOWEST, NONE, Piles, PileWriter, Records
from headrace.operators.joins.sides import Rows, Side, join_keys, merged, ticks_of
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks

GONE = np.uint8(1)


def check_versioned(step: str, table: Side) -> None:
    """Refuse a table whose rows' versions cannot be told apart by its join key."""
    if table.time is None:
        raise InputError(
            f"Step {step!r} needs the versions of a table that has no event time.",
            fix="declare the table with event_time=hr.EventTime(...).",
        )
    if set(table.on) != set(table.key):
        raise InputError(
            f"Step {step!r} joins versions on {', '.join(map(repr, table.on))}, and the table's key"
            f" is {', '.join(map(repr, table.key))}.",
            fix="join on the table's whole key.",
        )


def horizon(watermarks: list[Times], history_us: int) -> Times:
    """How far back the past is known, by the clock that is behind."""
    earliest = np.minimum.reduce(watermarks)
    known: Times = np.where(earliest < UNSTARTED + history_us, UNSTARTED, earliest - history_us)
    return known


class Timeline:
    """The versions of a call's keys, in order of key, time and arrival. `place`: that of the tick
    in which each came, -1 for those that were there.

    `forgets_gone`: whether that a row is gone may be forgotten too, so that nothing is left of it.
    """

    def __init__(
        self,
        side: Side,
        needs: pa.Schema,
        changes: pa.Table,
        keys: Ints,
        clock: Watermarks,
        *,
        forgets_gone: bool = True,
    ) -> None:
        self.forgets_gone = forgets_gone
        kinds = whole(changes.column(CHANGE_TYPE))
        self.fresh, self.needs = changes, needs
        which = np.flatnonzero(pc.not_equal(kinds, UPDATE_PREIMAGE).to_numpy(zero_copy_only=False))
        gone = pc.equal(kinds, DELETE).to_numpy(zero_copy_only=False)[which]
        places = clock.at(ticks_of(changes)[which])
        now = clock.times_us[places] if len(clock) else places
        assert side.time is not None
        stamps = whole(changes.column(side.time)).take(pa.array(which))
        at = (
            stamps.cast(pa.timestamp("us", stamps.type.tz))
            .cast(pa.int64())
            .fill_null(LOWEST)
            .to_numpy()
        )
        self._whole = gone & (at == LOWEST)  # the row that goes is not named
        at = np.where(gone, np.maximum(at, now), np.where(at == LOWEST, now, at))
        self.fresh_keys, self.fresh_at, self.fresh_place, self._gone, self._which = (
            keys[which],
            at,
            places,
            gone,
            which,
        )

    def load(
        self, piles: Piles, asked: tuple[Ints, Ints], woken: Mask, known: tuple[Times, Times]
    ) -> None:
        """What is valid in the times that are asked for, by key; the neighbours of what comes; and
        of woken keys what may be forgotten.

        `known`: how far back the past is known before each tick, and at its end.
        """
        known_before, known_from = known
        last = np.where(self._whole, NONE, self.fresh_at)
        low, high = (
            each.copy()
            for each in hull(
                len(piles), self.fresh_keys, np.where(self._gone, LOWEST, self.fresh_at), last
            )
        )
        low, high = np.where(woken, LOWEST, np.minimum(low, asked[0])), np.maximum(high, asked[1])
        high = np.where(woken, np.maximum(high, known_from[-1]), high)
        stored = piles.load(0, low, high, beyond=True)
        self.piles, self.woken, self.known_from = piles, woken, known_from
        self._end_all(stored, known_before)
        self._take_last()
        self.rows = Rows(self.needs, stored.rows, self.fresh)
        keys, at = (
            np.concatenate([stored.keys, self.fresh_keys]),
            np.concatenate([stored.at, self.fresh_at]),
        )
        place = np.concatenate([np.full(len(stored), -1), self.fresh_place])
        gone = np.concatenate([stored.flags & GONE, self._gone.astype(np.uint8)]).astype(np.bool_)
        row = np.concatenate([np.arange(len(stored)), len(stored) + self._which])
        order = sorting(keys, at, place)
        self._set(keys[order], at[order], place[order], gone[order], row[order])

    def _end_all(self, stored: Records, known_before: Times) -> None:
        """Deletes that do not say which row goes end the latest that came before them, also if it
        is to be valid only later.

        What was forgotten by then does not matter: it is not behind what is known.
        """
        which = np.flatnonzero(self._whole)
        if not len(which):
            return
        latest = np.full(len(self.piles), LOWEST)
        np.maximum.at(latest, stored.keys, stored.at)
        keys, came = self.fresh_keys[which], np.flatnonzero(~self._gone)
        came = came[np.argsort(self.fresh_keys[came], kind="stable")]  # by key, as they came
        begin = bounds(self.fresh_keys[came], len(self.piles))
        of, place = pairs(
            begin[keys], search(came, begin[keys], begin[keys + 1], which, right=False)
        )
        at = np.maximum.reduce(
            [self.fresh_at[which], known_before[self.fresh_place[which]], latest[keys]]
        )
        np.maximum.at(at, of, self.fresh_at[came[place]])
        self.fresh_at[which] = at

    def _take_last(self) -> None:
        """Of several versions for one time in a tick the last."""
        order = sorting(self.fresh_keys, self.fresh_at, self.fresh_place)
        keys, at, place = self.fresh_keys[order], self.fresh_at[order], self.fresh_place[order]
        kept = np.append(begins(keys, at, place)[1:], True)[: len(order)]
        self.fresh_keys, self.fresh_at, self.fresh_place = keys[kept], at[kept], place[kept]
        self._gone, self._which = self._gone[order[kept]], self._which[order[kept]]

    def _set(self, keys: Ints, at: Ints, place: Ints, gone: Mask, row: Ints) -> None:
        self.keys, self.at, self.place, self.gone, self.row = keys, at, place, gone, row
        self.bounds = bounds(keys, len(self.piles))
        self.until = self._until()

    def leave_out(self, versions: Ints) -> None:
        """As if these had never come."""
        stay = ~marked(len(self), versions)
        self._set(self.keys[stay], self.at[stay], self.place[stay], self.gone[stay], self.row[stay])

    def _until(self) -> Ints:
        """The place of the tick at whose end each version is forgotten because of a row that is
        gone: when that lies as far back as the past is known, nothing needs to be known of it, nor
        of what was before. It matters if something comes later that is valid from even earlier.
        """
        until = np.full(len(self), NONE)
        which = np.flatnonzero(self.gone & self.forgets_gone)
        forgotten = np.maximum(np.searchsorted(self.known_from, self.at[which]), self.place[which])
        which, forgotten = (
            which[forgotten < len(self.known_from)],
            forgotten[forgotten < len(self.known_from)],
        )
        of, earlier = pairs(self.bounds[self.keys[which]], which + 1)
        there = self.place[earlier] <= forgotten[of]
        np.minimum.at(until, earlier[there], forgotten[of[there]])
        return until

    def __len__(self) -> int:
        return len(self.keys)

    def known(self, keys: Ints, times: Ints, places: Ints) -> Ints:
        """The version of each key that is valid at a time, as far as is known in a tick; -1 if
        there is none.
        """
        return self._nearest(
            last_before(self.keys, self.at, keys, times, self.bounds) - 1, keys, places, -1
        )

    def before(self, versions: Ints, places: Ints) -> Ints:
        """The version before each, as far as is known in a tick; -1 if there is none."""
        return self._nearest(self.moments[versions] - 1, self.keys[versions], places, -1)

    def behind(self, versions: Ints, places: Ints) -> Ints:
        """The version that ends the validity of each, as far as is known in a tick; -1 if there is
        none.
        """
        moments = np.append(np.unique(self.moments), len(self))
        return self._nearest(
            moments[np.searchsorted(moments, versions, side="right")],
            self.keys[versions],
            places,
            1,
        )

    @property
    def moments(self) -> Ints:
        """The first version of the same key and time as each."""
        first: Ints = np.maximum.accumulate(
            np.where(begins(self.keys, self.at), np.arange(len(self)), 0)
        )
        return first

    def _nearest(self, at: Ints, keys: Ints, places: Ints, step: int) -> Ints:
        """From these on, step by step within the key, the first that has come and is not forgotten;
        -1 if there is none.
        """
        place, until = np.append(self.place, NONE), np.append(self.until, NONE)
        first, end = self.bounds[keys], self.bounds[keys + 1]
        left = np.arange(len(at))
        while len(left):
            here = at[left]
            inside = (here >= first[left]) & (here < end[left])
            left = left[inside & ((place[here] > places[left]) | (until[here] < places[left]))]
            at[left] += step
        return np.where((at >= first) & (at < end), at, -1)

    # Forgetting

    def store(self, writer: PileWriter, history_us: int) -> None:
        """Keep what is valid as far back as the past is known: the newest before that and all
        behind it. Mark 1: when there is more to forget.
        """
        newest = np.append(begins(self.keys, self.at)[1:], True)[: len(self)]
        everyone, ticks = np.arange(len(self.piles)), len(self.known_from)
        base = self.known(
            everyone, np.full(len(everyone), self.known_from[-1]), np.full(len(everyone), ticks - 1)
        )
        stays = newest & (self.until >= ticks) & (np.arange(len(self)) >= base[self.keys])
        which = np.flatnonzero(stays)
        self._wake(which, history_us)
        touched = (self.place >= 0) | ~stays
        if touched.any():
            flags = np.where(self.gone, GONE, np.uint8(0))[which]
            writer.replace(
                0,
                Records(self.keys[which], self.at[which], flags, self.rows.bytes(self.row[which])),
                self.keys[touched],
                self.at[touched],
            )

    def _wake(self, kept: Ints, history_us: int) -> None:
        """A version is forgotten when the next one is old enough; one that only says that the row
        is gone, when it is old enough itself.
        """
        mark = self.piles.marks[1]
        mark[:] = row_store.of_the_rest(self.piles, 0, 1, self.woken, history_us)
        first = begins(self.keys[kept])
        second = ~first & np.append(True, first)[:-1]
        told = np.concatenate([kept[second], kept[first & self.gone[kept] & self.forgets_gone]])
        np.minimum.at(mark, self.keys[told], self.at[told] + history_us)


# A table's history: every version of its rows, with when it was valid, as a table keyed by the
# row's key and the time from which it was valid.
#
# A version that comes between others ends the one before it; one that comes for the same time takes
# its place. Versions are remembered for `history` behind the clock, and the newest before that,
# even if it says that the row is gone: one from before that, where a newer one is known from before
# that too, is left out and counted. What was told of forgotten versions stands.


_FORGETS = 1


class HistoryKernel:
    """Input: a table's changes. The result has the table's columns, of which `table.time` is when a
    version's validity begins, and `valid_to`, when it ends; null as long as it does not. `counts`:
    `late_versions` are those that were left out.
    """

    hold_us = 0

    def __init__(
        self, step: str, table: Side, *, history_us: int, valid_to: str = "valid_to"
    ) -> None:
        table.check(f"The input of step {step!r}")
        check_versioned(step, table)
        assert table.time is not None
        self.step_name, self.table, self.history_us, self.valid_to = (
            step,
            table,
            history_us,
            valid_to,
        )
        self.key = (*table.key, table.time)
        self.counts: dict[str, int] = {}

    @cached_property
    def output(self) -> pa.Schema:
        ends = pa.field(self.valid_to, self.table.schema.field(self.table.time).type)
        return pa.schema([*self.table.schema, ends, CHANGE_FIELD])

    def due(self, state: KeyedState) -> int | None:  # noqa: ARG002
        """Nothing waits for time."""
        return None

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Load the versions beside those that come. 2. Leave out what is too late. 3. Tell whose
        content or end has changed. 4. Forget.
        """
        (changes,), (clock,) = inputs, watermarks
        if not len(clock):
            return self.output.append(TICK_FIELD).empty_table()
        keys, _ = join_keys(changes, self.table.on)
        found = ranked(
            [keys, row_store.fired(state, _FORGETS, int(clock.complete[-1])).cast(keys.type)]
        )
        piles = Piles(self.step_name, state, found.keys, sections=1, marks=2)
        timeline = Timeline(
            self.table, self.table.schema, changes, found.ranks[0], clock, forgets_gone=False
        )
        nothing = np.zeros(0, np.int64)
        woken = marked(len(piles), found.ranks[1])
        known = (
            horizon([clock.watermark_before], self.history_us),
            horizon([clock.complete], self.history_us),
        )
        timeline.load(piles, hull(len(piles), nothing, nothing, nothing), woken, known)
        self.counts = {"late_versions": self._leave_out(timeline, clock)}
        writer = PileWriter(piles)
        timeline.store(writer, self.history_us)
        writer.save((_FORGETS,))
        return self._told(timeline, clock)

    def _leave_out(self, timeline: Timeline, clock: Watermarks) -> int:
        """Versions that come when a newer one was old enough already that what is before it may be
        forgotten.
        """
        fresh = np.flatnonzero(timeline.place >= 0)
        places = timeline.place[fresh]
        known_before = horizon([clock.watermark_before], self.history_us)[places]
        newest = timeline.known(timeline.keys[fresh], known_before, places - 1)
        late = (newest >= 0) & (np.append(timeline.at, 0)[newest] > timeline.at[fresh])
        timeline.leave_out(fresh[late])
        return int(np.count_nonzero(late))

    def _told(self, timeline: Timeline, clock: Watermarks) -> pa.Table:
        """In order of tick, key and time."""
        moment, place, version, until = self._states(timeline)
        first = begins(moment)
        there = (version >= 0) & ~np.append(timeline.gone, True)[version]
        goes, comes = (
            np.flatnonzero(~first & np.append(False, there)[:-1]),
            np.flatnonzero(there & (place >= 0)),
        )
        which, shows = np.concatenate([goes, comes]), np.concatenate([goes - 1, comes])
        is_new = np.arange(len(which)) >= len(goes)
        order = sorting(place[which], moment[which], is_new.astype(np.int64))
        which, shows, is_new = which[order], shows[order], is_new[order]
        ends = np.append(timeline.at, 0)[until[shows]]
        found = timeline.rows.columns(self.table.schema, timeline.row[version[shows]])
        columns = [
            *(found[name] for name in self.table.schema.names),
            pa.array(ends, mask=until[shows] < 0).cast(self.output.field(self.valid_to).type),
        ]
        kinds, stays = merged(columns, ~begins(place[which], moment[which]), is_new)
        ticks = pa.array(clock.ticks[place[which]], pa.int64())
        result = pa.Table.from_arrays(
            [*columns, kinds, ticks], schema=self.output.append(TICK_FIELD)
        )
        return result if stays.all() else result.filter(pa.array(stays))

    @staticmethod
    def _states(timeline: Timeline) -> tuple[Ints, Ints, Ints, Ints]:
        """Of each moment of a key, for each tick that touches it and before the first: the version
        that stands for it, and the one that ends it; -1 for none.

        A version that comes touches its own moment, and that of the version before it, which it
        ends.
        """
        fresh = np.flatnonzero(timeline.place >= 0)
        before = timeline.before(fresh, timeline.place[fresh])
        touched = np.concatenate([fresh, before[before >= 0]])
        place = np.concatenate([timeline.place[fresh], timeline.place[fresh[before >= 0]]])
        moment = timeline.moments[touched]
        moment, place = (
            np.concatenate([moment, moment]),
            np.concatenate([place, np.full(len(place), -1)]),
        )
        order = sorting(moment, place)
        order = order[begins(moment[order], place[order])]
        moment, place = moment[order], place[order]
        version = timeline.known(timeline.keys[moment], timeline.at[moment], place)
        version = np.where(np.append(timeline.moments, NONE)[version] == moment, version, -1)
        until = np.where(version >= 0, timeline.behind(moment, place), -1)
        return moment, place, version, until
