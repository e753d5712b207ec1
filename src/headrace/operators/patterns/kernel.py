"""The kernel of patterns: rows wait until they are certain to be in order, then the matcher looks
at them; what is certain is told, and what may still be needed is kept.

A row is taken in when the closed clock has passed it. A match is told in the tick in which it
becomes certain: by a row, or by the clock alone (absence, time-outs). So nothing depends on the
order in which rows came, nor on how ticks were put into calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import TICK, TICK_FIELD
from headrace.columnar.keys import encode_keys, key_groups, whole
from headrace.columnar.lookup import ranked, sorting
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks, microseconds
from headrace.operators.patterns.automaton import ACCEPT
from headrace.operators.patterns.compiled_pattern import CompiledPattern
from headrace.operators.patterns.match_pass import Work
from headrace.operators.patterns.matcher import FOREVER
from headrace.operators.patterns.parser import ALL_ROWS
from headrace.operators.patterns.row_buffer import (
    BITS,
    MARK,
    NO_TIMER,
    Accounts,
    Batch,
    Bits,
    bit_fields,
    by_time,
    marks_of,
    merged,
    packed,
    put_rows,
    timers_of,
)
from headrace.operators.patterns.settings import MatchSettings, match_schema
from headrace.operators.patterns.walker import Walker
from headrace.operators.windows.late import Divert
from headrace.operators.windows.late_rows import LateRows
from headrace.operators.windows.state import TIME, WAITING, RowStore, first_end, scan_until


class PatternKernel:
    """After each step `counts` has how many rows were late, on how many a condition failed, and how
    many beginnings were given up; `aside` has partial matches whose time ran out.
    """

    gauges: ClassVar[Mapping[str, bytes]] = {"keys_waiting": WAITING}

    def __init__(self, settings: MatchSettings, output: pa.Schema | None = None) -> None:
        self.settings, self.step_name, self._output = settings, settings.name, output
        needed = dict.fromkeys(name for _, each in settings.patterns for name in each.columns)
        every = (
            settings.rows == ALL_ROWS or settings.in_force is not None
        )  # a pattern that comes later may need any column
        kept = settings.schema.names if every else [*settings.by, *needed]
        self._columns = [name for name in settings.schema.names if name in set(kept)]
        words = bit_fields(settings.stored_bits)
        self._store = RowStore(
            settings.name,
            [
                pa.field(MARK, pa.int64()),
                *words,
                *(settings.schema.field(name) for name in self._columns),
            ],
            with_id=False,
        )
        self._accounts = (
            Accounts(settings.name, len(settings.patterns)) if settings.has_accounts else None
        )
        self.late = LateRows(
            settings.schema, settings.producer, divert=isinstance(settings.late, Divert)
        )
        self.counts: dict[str, int] = {}
        self._aside: list[pa.Table] = []

    @cached_property
    def output(self) -> pa.Schema:
        return self._output or match_schema(self.settings)

    def due(self, state: KeyedState) -> int | None:
        """The earliest time at which something is certain, as the complete clock tells it."""
        end = first_end(state, WAITING)
        return None if end is None else end + self.settings.closed_behind_us

    def take_aside(self) -> pa.Table:
        """Partial matches whose time ran out since the last time."""
        tables, self._aside = self._aside, []
        return (
            pa.concat_tables(tables).sort_by(TICK)
            if tables
            else self.output.append(TICK_FIELD).empty_table()
        )

    # The step

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Leave out what is late. 2. Put rows of all keys that come up into order. 3. Match. 4.
        Store what is still needed. 5. Tell.
        """
        (rows,), (clock,) = inputs, watermarks
        self.counts = {}
        if not len(clock):
            return self.output.append(TICK_FIELD).empty_table()
        batch = self._gather(state, self._in_time(rows, clock), clock)
        if not len(batch.by):
            return self.output.append(TICK_FIELD).empty_table()
        numbers = (
            self._accounts.read(state, batch.by, batch.groups)
            if self._accounts
            else (np.zeros(0, np.bool_), np.zeros((0, 0), np.int64))
        )
        work = Work(self.settings, self.output, batch, clock, *numbers)
        told = [work.matched(at) for at in range(len(self.settings.patterns))]
        self._keep(state, batch, work, clock)
        self._aside += work.aside
        for name, count in work.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        found = [each for each in told if each is not None]
        if not found:
            return self.output.append(TICK_FIELD).empty_table()
        return _in_order(
            pa.concat_tables([table for table, _ in found]),
            np.concatenate([key for _, key in found]),
        )

    def _in_time(self, rows: pa.Table, clock: Watermarks) -> pa.Table:
        if not rows.num_rows:
            return rows
        places = clock.at(whole(rows.column(TICK)).to_numpy())
        behind = clock.horizon_before[places] - self._times(rows)
        late = (behind > 0) & (clock.horizon_before[places] != UNSTARTED)
        if not late.any():
            return rows
        self.counts["late"] = self.late.add(rows, late, clock.times_us[places], behind)
        return rows.filter(pa.array(~late))

    def _times(self, rows: pa.Table) -> Times:
        return microseconds(rows.column(self.settings.time)) + self.settings.time_shift_us

    def _gather(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> Batch:
        now_us = int(clock.closed[-1])
        woken = (
            pa.nulls(0, pa.binary())
            if now_us == UNSTARTED
            else scan_until(state, WAITING, UNSTARTED, now_us)[1].by
        )
        found = ranked([encode_keys(rows, self.settings.by), woken])
        groups, names = key_groups(found.keys), RowStore.names(found.keys)
        counts, stored = self._store.read(state, names, groups)
        fresh = self._fresh(rows).select(stored.schema.names).cast(stored.schema)
        everything = (
            pa.concat_tables([stored, fresh]) if stored.num_rows else fresh
        ).combine_chunks()
        order, keys = merged(counts, found.ranks[0], found.orders[0])
        order, times = by_time(order, keys, whole(everything.column(TIME)).to_numpy())
        words = [
            *self._computed(everything, stored.num_rows, order),
            *_stored_words(self.settings, everything, order),
        ]
        timers = timers_of(whole(stored.column(MARK)).to_numpy(), counts)
        return Batch(
            found.keys,
            groups,
            names,
            everything,
            order,
            keys,
            times,
            Bits(words),
            counts,
            timers,
            np.flatnonzero(times < now_us),
        )

    def _fresh(self, rows: pa.Table) -> pa.Table:
        """New rows as they are stored."""
        count = rows.num_rows
        masks = [
            whole(rows.column(name)).fill_null(False).to_numpy(zero_copy_only=False)
            for name in self.settings.bits
        ]
        words = packed(masks, self.settings.stored_bits - len(masks), count)
        arrays = [
            pa.array(self._times(rows)),
            pa.array(np.full(count, NO_TIMER)),
            *words,
            *(rows.column(name) for name in self._columns),
        ]
        return pa.Table.from_arrays(
            arrays,
            names=[TIME, MARK, *(f"{BITS}{word}" for word in range(len(words))), *self._columns],
        )

    def _computed(self, rows: pa.Table, stored: int, order: Ints) -> list[Ints]:
        """The conditions of patterns that come and go, of rows in order. Those that fail are
        counted when the row is new.
        """
        masks = []
        for condition in self.settings.in_force.conditions if self.settings.in_force else ():
            holds, failed = condition.holds(
                [whole(rows.column(str(term.column))) for term in condition.terms], rows.num_rows
            )
            masks.append(holds[order])
            if count := int(failed[stored:].sum()):
                self.counts["errors"] = self.counts.get("errors", 0) + count
        return [word.to_numpy() for word in packed(masks, 0, len(order))]

    # What is kept

    def _keep(self, state: KeyedState, batch: Batch, work: Work, clock: Watermarks) -> None:
        """From the first row on that some pattern still needs; and rows before it, as many as
        conditions look back.
        """
        keep = np.ones(len(batch.order), np.bool_)
        keep[batch.certain] = work.needed
        keep[batch.certain] |= self._looked_back_at(work, int(clock.closed[-1]))
        which = np.flatnonzero(keep)
        counts = np.bincount(batch.keys[which], minlength=len(batch.by))
        timers = self._timers(batch, work, which, keep, int(clock.closed[-1]))
        table = batch.rows.take(pa.array(batch.order[which]))
        words = [pa.array(word[which]) for word in batch.bits.words[self.settings.computed_words :]]
        columns = {
            TIME: table[TIME],
            MARK: pa.array(marks_of(timers, counts)),
            **{f"{BITS}{at}": word for at, word in enumerate(words)},
        }
        rows = pa.table({**columns, **{name: table[name] for name in self._columns}})
        put_rows(
            self._store,
            state,
            batch.by,
            batch.groups,
            batch.names,
            rows,
            (batch.stored, counts),
            (batch.timers, timers),
        )
        if self._accounts is not None:
            self._accounts.write(state, batch.by, batch.groups, work.numbers, work.accounted())

    def _looked_back_at(self, work: Work, now_us: int) -> Mask:
        back, within = self._back
        rows = work.rows
        if not back or not len(rows):
            return np.zeros(len(rows), np.bool_)
        needed = work.first[rows.keys]
        first = np.where(needed < FOREVER, needed, rows.end)
        near = (rows.at < first) & (rows.at >= first - back)
        return near if within is None else near & (rows.times >= now_us - within)

    @cached_property
    def _back(self) -> tuple[int, int | None]:
        """How many rows patterns look back, and how long for."""
        withins = [each.spec.within_us for _, each in self.settings.patterns]
        return max((each.back for _, each in self.settings.patterns), default=0), (
            None if None in withins else max((each or 0 for each in withins), default=0)
        )

    def _timers(self, batch: Batch, work: Work, which: Ints, keep: Mask, now_us: int) -> Times:
        """When each key must be looked at again: when its next row is certain, when a deadline has
        passed, or when what it looked back at can go.
        """
        timers = np.full(len(batch.by), FOREVER)
        waits = np.ones(len(batch.order), np.bool_)
        waits[batch.certain] = False
        waiting = np.flatnonzero(waits)
        np.minimum.at(timers, batch.keys[waiting], batch.times[waiting] + 1)
        np.minimum.at(timers, work.rows.keys, np.where(work.wake < FOREVER, work.wake + 1, FOREVER))
        back, within = self._back
        if back and within is not None:
            newest = np.full(len(batch.by), -FOREVER)
            np.maximum.at(newest, batch.keys[which], batch.times[which])
            alone = (timers == FOREVER) & (newest > -FOREVER)
            timers[alone] = newest[alone] + within + 1
        some = np.zeros(len(timers), np.bool_)
        some[batch.keys[keep]] = True
        timers = np.where(some & (timers < FOREVER), timers, NO_TIMER)
        early = (
            (batch.timers != NO_TIMER) & (batch.timers > now_us) & (batch.timers < timers)
        )  # who is woken too early sets a timer again: cheaper than moving it each time
        return np.where(early, batch.timers, timers)


def certain_work(kernel: PatternKernel, stored: pa.Array, now_us: int) -> Work:
    """The stored rows of keys, of which those before a time are certain: for those who only
    look.
    """
    counts, rows = kernel._store.decoded(stored)  # noqa: SLF001
    keys, times = np.repeat(np.arange(len(counts)), counts), whole(rows.column(TIME)).to_numpy()
    order = np.arange(len(keys))
    words = [
        *kernel._computed(rows, 0, order),  # noqa: SLF001
        *_stored_words(kernel.settings, rows, order),
    ]
    nothing = np.zeros(len(counts), np.uint8)
    batch = Batch(
        stored,
        nothing,
        stored,
        rows,
        order,
        keys,
        times,
        Bits(words),
        counts,
        timers_of(keys, counts),
        np.flatnonzero(times < now_us),
    )
    now = np.array([now_us], np.int64)
    known = np.ones(len(counts), np.bool_)
    return Work(
        kernel.settings,
        kernel.output,
        batch,
        Watermarks(now, now, now, now, now_us, now_us),
        known,
        np.zeros((len(counts), len(kernel.settings.patterns)), np.int64),
    )


def _stored_words(settings: MatchSettings, rows: pa.Table, order: Ints) -> list[Ints]:
    return [
        whole(rows.column(field.name)).to_numpy()[order]
        for field in bit_fields(settings.stored_bits)
    ]


def _in_order(told: pa.Table, keys: Ints) -> pa.Table:
    """In order of tick and key."""
    order = sorting(whole(told.column(TICK)).to_numpy(), keys)
    return told.take(pa.array(order))


# What a key's stored rows say about matches in the making: for people who ask what a pattern waits
# for.


Partial = tuple[str, list[dict[str, Any]], list[str], int | None]
"""The pattern's name, the rows taken, what may come next, and until when."""


def partial(
    settings: MatchSettings, output: pa.Schema, stored: bytes | None, now_us: int
) -> tuple[list[Partial], int]:
    """The partial matches of one key, from its stored rows; and how many rows are not certain yet.
    Rows before `now_us` are.
    """
    work = certain_work(PatternKernel(settings, output), pa.array([stored], pa.binary()), now_us)
    found: list[Partial] = []
    for at, (name, pattern) in enumerate(settings.patterns):
        view = work.view(at)
        source, matcher = view.source, work.matcher(at, view)
        outcome = matcher.run()
        begin = np.flatnonzero((outcome.certain_us >= now_us) & matcher.may_begin)
        entries = Walker(matcher.look, matcher.holds).partly(begin, view.rows.end[begin] - 1)
        for owner, first in enumerate(begin.tolist()):
            mine = entries.owner == owner
            places = entries.place[mine].tolist()
            if not places:
                continue
            columns = source.rows.take(pa.array(source.order[entries.row[mine]]))
            times = whole(columns.column(TIME)).to_pylist()
            rows = [
                {"classifier": pattern.automaton.symbols[place], "time_us": time}
                for place, time in zip(places, times, strict=True)
            ]
            kept = columns.select(
                [each for each in columns.column_names if not each.startswith("_")]
            ).to_pylist()
            until = (
                None
                if pattern.spec.within_us is None
                else int(view.rows.times[first]) + pattern.spec.within_us
            )
            found.append(
                (
                    name,
                    [{**row, **more} for row, more in zip(rows, kept, strict=True)],
                    _next(pattern, places[-1]),
                    until,
                )
            )
    return found, len(work.batch.order) - len(work.rows)


def _next(pattern: CompiledPattern, place: int) -> list[str]:
    """What may come behind a place."""
    automaton = pattern.automaton
    absent = " and ".join(f"no {each}" for each in automaton.pattern.absent) or "no row"
    return [
        (
            (absent if automaton.pattern.waits else "what ends it")
            if edge.to == ACCEPT
            else automaton.symbols[edge.to]
        )
        for edge in automaton.edges[place]
    ]
