"""The kernel of patterns: rows wait until they are certain to be in order, then the matcher looks at them; what is certain is told, and what may still be needed is kept.

A row is taken in when the closed clock has passed it. A match is told in the tick in which it becomes certain: by a row, or by the clock alone (absence, time-outs). So nothing
depends on the order in which rows came, nor on how ticks were put into calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import pyarrow as pa

from headrace.errors import InputError, PlanError
from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.joins.matching import ranked, sorting
from headrace.operators.kernel import TICK, UNSTARTED, Clocks, Groups, KeyedState, Times
from headrace.operators.keys import encode_keys, key_groups, whole
from headrace.operators.patterns.compiled import CompiledPattern
from headrace.operators.patterns.matching import FOREVER, Matcher, Outcome
from headrace.operators.patterns.row_buffer import (
    BITS,
    MARK,
    NO_TIMER,
    Accounts,
    Numbers,
    bit_fields,
    marks_of,
    packed,
    put_rows,
    timers_of,
    unpacked,
)
from headrace.operators.patterns.sorted_rows import SortedRows
from headrace.operators.patterns.specs import ALL_ROWS, DROP, ONE_ROW, STOP
from headrace.operators.patterns.telling import MATCHED_AT, PATTERN, all_rows, as_times, classifiers, one_row
from headrace.operators.patterns.terms import CLASSIFIER, MATCH_NUMBER, Source
from headrace.operators.patterns.walking import Entries, Walker
from headrace.operators.times import microseconds
from headrace.operators.windows.entries import WAITING, first_end, scan_until
from headrace.operators.windows.kept_rows import TIME, RowStore
from headrace.operators.windows.late import LateRows
from headrace.operators.windows.specs import Divert, Drop, drop

DROPPED = drop()
_TICK_FIELD = pa.field(TICK, pa.int64(), nullable=False)


@dataclass(frozen=True)
class MatchSettings:
    """What the kernel is told. `bits`: columns of the input, each a condition that rows alone decide; `fits`: for each pattern, by symbol, which of them it is."""

    name: str
    schema: pa.Schema
    by: tuple[str, ...]
    time: str
    patterns: tuple[tuple[str, CompiledPattern], ...]
    bits: tuple[str, ...] = ()
    fits: tuple[tuple[tuple[str, int], ...], ...] = ((),)
    rows: str = ONE_ROW
    several: bool = False
    timed_out: bool = False
    late: Drop | Divert = DROPPED
    producer: str | None = None
    time_shift_us: int = 0
    when_full: str = DROP
    closed_behind_us: int = 0
    """How far behind the complete clock the closed one is."""

    @property
    def counts_matches(self) -> bool:
        return self.rows == ALL_ROWS or any(each.counts_matches for _, each in self.patterns)

    @property
    def pattern_at(self) -> int:
        """Where the pattern's name stands: behind the key, or behind the row."""
        return len(self.schema) if self.rows == ALL_ROWS else len(self.by)

    @property
    def from_first(self) -> bool:
        return any(each.automaton.pattern.from_first for _, each in self.patterns)


@dataclass(frozen=True)
class Batch:
    """The rows of a call, stored and new, in order of key and time: where in `rows` each is, its key's number, its time, and its conditions. `certain`: how many keys' rows are."""

    by: pa.Array
    groups: Groups
    names: pa.Array
    rows: pa.Table
    order: Ints
    keys: Ints
    times: Times
    bits: list[Mask]
    stored: Ints
    timers: Times
    certain: Ints  # positions of rows that the clock has passed


class PatternKernel:
    """After each step `counts` has how many rows were late, on how many a condition failed, and how many beginnings were given up; `aside` has partial matches whose time ran out."""

    gauges: ClassVar[Mapping[str, bytes]] = {"waiting": WAITING}

    def __init__(self, settings: MatchSettings) -> None:
        self.settings, self.step_name = settings, settings.name
        needed = dict.fromkeys(name for _, each in settings.patterns for name in each.columns)
        kept = settings.schema.names if settings.rows == ALL_ROWS else [*settings.by, *needed]
        self._columns = [name for name in settings.schema.names if name in set(kept)]
        self._conditions = len(settings.bits)
        words = bit_fields(self._conditions + len(settings.patterns))
        self._store = RowStore(settings.name, [pa.field(MARK, pa.int64()), *words, *(settings.schema.field(name) for name in self._columns)], with_id=False)
        self._accounts = Accounts(settings.name, len(settings.patterns)) if settings.counts_matches or settings.from_first else None
        self.late = LateRows(settings.schema, settings.producer, divert=isinstance(settings.late, Divert))
        self.counts: dict[str, int] = {}
        self._aside: list[pa.Table] = []

    @cached_property
    def output(self) -> pa.Schema:
        return match_schema(self.settings)

    def due(self, state: KeyedState) -> int | None:
        """The earliest time at which something is certain, as the complete clock tells it."""
        end = first_end(state, WAITING)
        return None if end is None else end + self.settings.closed_behind_us

    def take_aside(self) -> pa.Table:
        """Partial matches whose time ran out since the last time."""
        tables, self._aside = self._aside, []
        return pa.concat_tables(tables).sort_by(TICK) if tables else self.output.append(_TICK_FIELD).empty_table()

    # The step

    def step_timed(self, state: KeyedState, inputs: Sequence[pa.Table], clocks: Sequence[Clocks]) -> pa.Table:
        """1. Leave out what is late. 2. Put rows of all keys that come up into order. 3. Match. 4. Store what is still needed. 5. Tell."""
        (rows,), (clock,) = inputs, clocks
        self.counts = {}
        if not len(clock):
            return self.output.append(_TICK_FIELD).empty_table()
        batch = self._gather(state, self._in_time(rows, clock), clock)
        if not len(batch.by):
            return self.output.append(_TICK_FIELD).empty_table()
        numbers = self._accounts.read(state, batch.by, batch.groups) if self._accounts else (np.zeros(0, np.bool_), np.zeros((0, 0), np.int64))
        work = _Work(self, batch, clock, *numbers)
        told = [work.matched(at) for at in range(len(self.settings.patterns))]
        self._keep(state, batch, work, clock)
        self._aside += work.aside
        return _in_order(pa.concat_tables([table for table, _ in told]), np.concatenate([key for _, key in told]))

    def _in_time(self, rows: pa.Table, clock: Clocks) -> pa.Table:
        if not rows.num_rows:
            return rows
        places = clock.at(whole(rows.column(TICK)).to_numpy())
        behind = clock.closed_before[places] - self._times(rows)
        late = (behind > 0) & (clock.closed_before[places] != UNSTARTED)
        if not late.any():
            return rows
        self.counts["late"] = self.late.add(rows, late, clock.times_us[places], behind)
        return rows.filter(pa.array(~late))

    def _times(self, rows: pa.Table) -> Times:
        return microseconds(rows.column(self.settings.time)) + self.settings.time_shift_us

    def _gather(self, state: KeyedState, rows: pa.Table, clock: Clocks) -> Batch:
        now_us = int(clock.closed[-1])
        woken = pa.nulls(0, pa.binary()) if now_us == UNSTARTED else scan_until(state, WAITING, UNSTARTED, now_us)[1].by
        found = ranked([encode_keys(rows, self.settings.by), woken])
        groups, names = key_groups(found.keys), RowStore.names(found.keys)
        counts, stored = self._store.read(state, names, groups)
        fresh = self._fresh(rows).select(stored.schema.names).cast(stored.schema)
        everything = pa.concat_tables([stored, fresh]) if stored.num_rows else fresh
        order, keys = _merged(counts, found.ranks[0], found.orders[0])
        order, times = _by_time(order, keys, whole(everything.column(TIME)).to_numpy())
        total = self._conditions + len(self.settings.patterns)
        words = [whole(everything.column(field.name)).to_numpy()[order] for field in bit_fields(total)]
        timers = timers_of(whole(stored.column(MARK)).to_numpy(), counts)
        return Batch(found.keys, groups, names, everything, order, keys, times, unpacked(words, total), counts, timers, np.flatnonzero(times < now_us))

    def _fresh(self, rows: pa.Table) -> pa.Table:
        """New rows as they are stored."""
        count = rows.num_rows
        masks = [whole(rows.column(name)).fill_null(False).to_numpy(zero_copy_only=False) for name in self.settings.bits]
        words = packed([*masks, *(np.ones(count, np.bool_) for _ in self.settings.patterns)], count)
        arrays = [pa.array(self._times(rows)), pa.array(np.full(count, NO_TIMER)), *words, *(rows.column(name) for name in self._columns)]
        return pa.Table.from_arrays(arrays, names=[TIME, MARK, *(f"{BITS}{word}" for word in range(len(words))), *self._columns])

    # What is kept

    def _keep(self, state: KeyedState, batch: Batch, work: _Work, clock: Clocks) -> None:
        """From the first row on that some pattern still needs; and rows before it, as many as conditions look back."""
        keep = np.ones(len(batch.order), np.bool_)
        keep[batch.certain] = work.needed
        keep[batch.certain] |= self._looked_back_at(work, int(clock.closed[-1]))
        for at in range(len(self.settings.patterns)):
            batch.bits[self._conditions + at][batch.certain] &= work.open[at]
        which = np.flatnonzero(keep)
        counts = np.bincount(batch.keys[which], minlength=len(batch.by))
        timers = self._timers(batch, work, which, keep, int(clock.closed[-1]))
        table = batch.rows.take(pa.array(batch.order[which]))
        words = packed([mask[which] for mask in batch.bits], len(which))
        columns = {TIME: table[TIME], MARK: pa.array(marks_of(timers, counts)), **{f"{BITS}{at}": word for at, word in enumerate(words)}}
        rows = pa.table({**columns, **{name: table[name] for name in self._columns}})
        put_rows(self._store, state, batch.by, batch.groups, batch.names, rows, (batch.stored, counts), (batch.timers, timers))
        if self._accounts is not None:
            self._accounts.write(state, batch.by, batch.groups, work.numbers, work.accounted())

    def _looked_back_at(self, work: _Work, now_us: int) -> Mask:
        back, within = self._back
        rows = work.rows
        if not back or not len(rows):
            return np.zeros(len(rows), np.bool_)
        first = np.where(work.first_needed < FOREVER, work.first_needed, rows.end)
        near = (rows.at < first) & (rows.at >= first - back)
        return near if within is None else near & (rows.times >= now_us - within)

    @cached_property
    def _back(self) -> tuple[int, int | None]:
        """How many rows patterns look back, and how long for."""
        withins = [each.spec.within_us for _, each in self.settings.patterns]
        return max(each.back for _, each in self.settings.patterns), None if None in withins else max(each or 0 for each in withins)

    def _timers(self, batch: Batch, work: _Work, which: Ints, keep: Mask, now_us: int) -> Times:
        """When each key must be looked at again: when its next row is certain, when a deadline has passed, or when what it looked back at can go."""
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
        early = (batch.timers != NO_TIMER) & (batch.timers > now_us) & (batch.timers < timers)  # who is woken too early sets a timer again: cheaper than moving it each time
        return np.where(early, batch.timers, timers)


class _Work:
    """One call at work: its certain rows, pattern after pattern. `needed`: which of them some pattern still needs; `wake`: by row, the deadline of a beginning that is open."""

    def __init__(self, kernel: PatternKernel, batch: Batch, clock: Clocks, known: Mask, numbers: Numbers) -> None:
        self.kernel, self.settings, self.batch, self.clock = kernel, kernel.settings, batch, clock
        self.known, self.numbers = known, numbers
        certain = batch.certain
        self.rows = SortedRows(batch.keys[certain], batch.times[certain], {})
        self.fresh = self.rows.times >= clock.closed_at_start
        self.wake = np.full(len(self.rows), FOREVER)
        self.first_needed = np.full(len(self.rows), FOREVER)
        self.open: list[Mask] = []
        self.aside: list[pa.Table] = []

    @property
    def needed(self) -> Mask:
        return self.rows.at >= self.first_needed

    def accounted(self) -> Mask:
        """The keys of which something is to be remembered for good."""
        some: Mask = np.any(self.numbers > 0, axis=1)
        if self.settings.from_first:
            some[self.rows.keys] = True
        return some

    def matched(self, at: int) -> tuple[pa.Table, Ints]:
        """What a pattern tells now, and the number of each row's key."""
        _, pattern = self.settings.patterns[at]
        source, matcher = self.matcher(at)
        outcome = matcher.run()
        self._note(pattern, outcome)
        self._note_given_up(outcome)
        if self.settings.timed_out:
            self._time_out(at, pattern, source, matcher, outcome)
        now = self._now(outcome.matches.certain_us)
        matches = outcome.matches.take(now)
        return self._told(at, pattern, source, matches.entries, matches.begin, matches.certain_us)

    def matcher(self, at: int) -> tuple[Source, Matcher]:
        """A pattern's matcher, and what its conditions read."""
        _, pattern = self.settings.patterns[at]
        may_begin = self.batch.bits[len(self.settings.bits) + at][self.batch.certain]
        if pattern.automaton.pattern.from_first:
            may_begin = may_begin & self.rows.begins & ~(self.known[self.rows.keys] & self.fresh)
        source = Source(self.batch.rows, self.batch.order[self.batch.certain], self.rows.times, self.rows.start, pattern.automaton.symbols, pattern.spec.within_us)
        rows = SortedRows(self.rows.keys, self.rows.times, self._fits(at, pattern, source))
        return source, Matcher(pattern.rules, rows, int(self.clock.closed[-1]), _Holds(self, pattern, source), may_begin)

    def _now(self, certain_us: Times) -> Mask:
        """What is certain since this call."""
        since: Mask = (certain_us >= self.clock.closed_at_start) & (certain_us < int(self.clock.closed[-1]))
        return since

    def _fits(self, at: int, pattern: CompiledPattern, source: Source) -> dict[str, Mask | None]:
        fits: dict[str, Mask | None] = dict.fromkeys(pattern.automaton.pattern.symbols)
        for symbol, bit in self.settings.fits[at]:
            fits[symbol] = self.batch.bits[bit][self.batch.certain]
        for definition in pattern.definitions:
            if definition.beside is not None:
                count = len(self.rows)
                alone = Entries(self.rows.at, self.rows.at, np.zeros(count, np.int64))
                holds, failed = definition.beside.holds(source.values(definition.beside.terms, alone, count), count)
                self.failed(failed & self.fresh)
                before = fits[definition.symbol]
                fits[definition.symbol] = holds if before is None else holds & before
        return fits

    def failed(self, rows: Mask) -> None:
        if rows.any():
            self.kernel.counts["errors"] = self.kernel.counts.get("errors", 0) + int(rows.sum())

    def _note(self, pattern: CompiledPattern, outcome: Outcome) -> None:
        """From where on each key's rows are still needed, and until when."""
        undecided = np.flatnonzero(outcome.certain_us >= self.clock.closed[-1])
        first = np.full(len(self.batch.by), FOREVER)
        np.minimum.at(first, self.rows.keys[undecided], undecided)
        of_row = first[self.rows.keys]
        self.first_needed = np.minimum(self.first_needed, of_row)
        self.open.append(self.rows.at >= of_row)
        within = pattern.spec.within_us
        if within is not None:
            starts = first[first < FOREVER]
            self.wake[starts] = np.minimum(self.wake[starts], self.rows.times[starts] + within)

    def _note_given_up(self, outcome: Outcome) -> None:
        count = int(self._now(outcome.certain_us[outcome.given_up]).sum())
        if count and self.settings.when_full == STOP:
            raise InputError(
                f"The step {self.settings.name!r} has a match in the making that goes on for more rows, or in more ways, than it may.",
                fix='allow more with most_rows= or most_matches=, say within=, or let such beginnings be given up and counted with when_full="drop".',
            )
        if count:
            self.kernel.counts["given_up"] = self.kernel.counts.get("given_up", 0) + count

    def _time_out(self, at: int, pattern: CompiledPattern, source: Source, matcher: Matcher, outcome: Outcome) -> None:
        begin = outcome.timed_out[self._now(outcome.certain_us[outcome.timed_out])]
        if not len(begin):
            return
        limit = matcher.last_in_time(begin)
        entries = Walker(matcher.look, matcher.holds).partly(begin, limit)
        some = np.bincount(entries.owner, minlength=len(begin)) > 0
        table, _ = self._told(at, pattern, source, entries.of(some), begin[some], outcome.certain_us[begin[some]], count=False)
        self.aside.append(table)

    # Rows

    def _told(
        self, at: int, pattern: CompiledPattern, source: Source, entries: Entries, begin: Ints, certain_us: Times, *, count: bool = True
    ) -> tuple[pa.Table, Ints]:
        places = np.searchsorted(self.clock.closed, certain_us, side="right")
        keys = self.rows.keys[begin]
        numbers = self._numbered(at, keys, places) if count and self.kernel._accounts is not None else np.zeros(len(begin), np.int64)  # noqa: SLF001
        if self.settings.rows == ALL_ROWS:
            measures = all_rows(pattern, source, entries, numbers)
            columns = [source.column(name, entries.row) for name in self.settings.schema.names]
            columns += [classifiers(source, entries), pa.array(numbers[entries.owner])]
            which = entries.owner
        else:
            measures = one_row(pattern, source, entries, numbers)
            columns = [source.column(name, begin) for name in self.settings.by]
            which = np.arange(len(begin))
        if self.settings.several:
            columns.insert(self.settings.pattern_at, pa.repeat(pa.scalar(self.settings.patterns[at][0]), len(which)))
        kind = self.settings.schema.field(self.settings.time).type
        columns += [*measures, as_times(certain_us[which], kind, 0), pa.array(self.clock.ticks[np.minimum(places, len(self.clock) - 1)[which]])]
        schema = self.kernel.output.append(_TICK_FIELD)
        return pa.Table.from_arrays([column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema), keys[which]

    def _numbered(self, at: int, keys: Ints, places: Ints) -> Ints:
        """Each match's number among those of its key, in the order in which they became certain."""
        order = sorting(keys, places)
        begins = np.ones(len(order), np.bool_)
        begins[1:] = keys[order][1:] != keys[order][:-1]
        turn = np.arange(len(order))
        turn -= np.maximum.accumulate(np.where(begins, turn, 0)) if len(turn) else turn
        numbers = np.empty(len(order), np.int64)
        numbers[order] = self.numbers[keys[order], at] + 1 + turn
        np.add.at(self.numbers[:, at], keys, 1)
        return numbers


class _Holds:
    """Whether the condition of a symbol holds, given the match so far."""

    def __init__(self, work: _Work, pattern: CompiledPattern, source: Source) -> None:
        self._work, self._source, self._by_symbol = work, source, pattern.by_symbol

    def __call__(self, symbol: str, entries: Entries, count: int) -> Mask:
        condition = self._by_symbol[symbol].so_far
        assert condition is not None
        holds, failed = condition.holds(self._source.values(condition.terms, entries, count), count)
        if failed.any():
            last = entries.row[np.searchsorted(entries.owner, np.arange(count), side="right") - 1]
            self._work.failed(failed & self._work.fresh[last])
        return holds


def certain_work(kernel: PatternKernel, stored: pa.Array, now_us: int) -> _Work:
    """The stored rows of keys, of which those before a time are certain: for those who only look."""
    counts, rows = kernel._store.decoded(stored)  # noqa: SLF001
    keys, times = np.repeat(np.arange(len(counts)), counts), whole(rows.column(TIME)).to_numpy()
    total = len(kernel.settings.bits) + len(kernel.settings.patterns)
    words = [whole(rows.column(field.name)).to_numpy() for field in bit_fields(total)]
    nothing = np.zeros(len(counts), np.uint8)
    batch = Batch(stored, nothing, stored, rows, np.arange(len(keys)), keys, times, unpacked(words, total), counts, timers_of(keys, counts), np.flatnonzero(times < now_us))
    now = np.array([now_us], np.int64)
    known = np.ones(len(counts), np.bool_)
    return _Work(kernel, batch, Clocks(now, now, now, now, now_us, now_us), known, np.zeros((len(counts), len(kernel.settings.patterns)), np.int64))


def match_schema(settings: MatchSettings) -> pa.Schema:
    """The columns of a match."""
    time = settings.schema.field(settings.time).type
    given = list(settings.schema) if settings.rows == ALL_ROWS else [settings.schema.field(name) for name in settings.by]
    if settings.rows == ALL_ROWS:
        given += [pa.field(CLASSIFIER, pa.string()), pa.field(MATCH_NUMBER, pa.int64())]
    if settings.several:
        given.insert(settings.pattern_at, pa.field(PATTERN, pa.string()))
    return pa.schema([*given, *_measures(settings), pa.field(MATCHED_AT, time)])


def _measures(settings: MatchSettings) -> list[pa.Field]:
    """All patterns have the same ones; one that does not measure something has null there."""
    fields = []
    for at, (name, _) in enumerate(settings.patterns[0][1].measures):
        kinds = {str(kind): kind for _, pattern in settings.patterns for kind in [pattern.measures[at][1].type(settings.schema)] if kind != pa.null()}
        if len(kinds) > 1:
            raise PlanError(f"The measure {name!r} is {' in one pattern and '.join(kinds)} in another.", fix="cast it, or give it another name.")
        fields.append(pa.field(name, next(iter(kinds.values()), pa.null())))
    return fields


def _merged(counts: Ints, keys: Ints, order: Ints) -> tuple[Ints, Ints]:
    """Stored rows, so many for each key, and new ones, of these keys, as one sequence in order of key; new ones, which `order` has in that order, come behind stored ones."""
    fresh = np.bincount(keys, minlength=len(counts))
    stored = int(counts.sum())
    ends = np.cumsum(counts + fresh)
    merged = np.empty(stored + len(keys), np.int64)
    merged[runs(ends - fresh - counts, counts)] = np.arange(stored)
    merged[runs(ends - fresh, fresh)] = stored + order
    return merged, np.repeat(np.arange(len(counts)), counts + fresh)


def _by_time(order: Ints, keys: Ints, times: Times) -> tuple[Ints, Times]:
    """Rows that are in order of key and arrival, put into order of key and time. Most keys' rows are already."""
    in_order = times[order]
    wrong = np.flatnonzero((in_order[1:] < in_order[:-1]) & (keys[1:] == keys[:-1]))
    if len(wrong):
        mixed = np.zeros(int(keys[-1]) + 1, np.bool_)
        mixed[keys[wrong]] = True
        where = np.flatnonzero(mixed[keys])
        again = where[sorting(keys[where], in_order[where])]
        order[where] = order[again]
        in_order[where] = in_order[again]
    return order, in_order


def _in_order(told: pa.Table, keys: Ints) -> pa.Table:
    """In order of tick and key."""
    order = sorting(whole(told.column(TICK)).to_numpy(), keys)
    return told.take(pa.array(order))
