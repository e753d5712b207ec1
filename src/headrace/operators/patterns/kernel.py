"""The kernel of patterns: it buffers rows until they are certain to be in order, matches them,
emits the matches that are certain, and retains the rows that may still be needed.

Example: `failed{2,} ok` within 5 minutes, by `user`.

    tick 1   (ann, failed, 10:00), (ann, failed, 10:02)    state of ann: both rows
    tick 2   horizon passes 10:03                          both rows are certain; a row may follow:
                                                           state: both rows, timer at 10:05
    tick 3   (ann, ok, 10:04)                              state: three rows
    tick 4   horizon passes 10:04                          the match is certain at 10:04: emits
                                                           (ann, measures…, matched_at=10:04)
                                                           state of ann: none

A row is looked at once the horizon has passed it. A match is emitted in the tick in which it
becomes certain: by a row, or by time alone (absence, deadlines). So nothing depends on the order in
which rows arrived, nor on how ticks were put into batches.

`match_pass.py` runs the patterns of a batch; `row_buffer.py` has the state; `rules.py` is the
kernel of patterns in a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.columns import TICK, TICK_FIELD
from headrace.columnar.keys import as_array, encode_keys, key_groups
from headrace.columnar.lookup import rank_keys, sort_order
from headrace.operators.kernel import UNSTARTED, KeyedState, Times, Watermarks, microseconds
from headrace.operators.patterns.automaton import ACCEPT
from headrace.operators.patterns.compiled_pattern import CompiledPattern
from headrace.operators.patterns.match_pass import MatchPass
from headrace.operators.patterns.matcher import FOREVER
from headrace.operators.patterns.parser import ALL_ROWS
from headrace.operators.patterns.row_buffer import (
    BITS,
    NO_TIMER,
    TIMER,
    BufferedBatch,
    MatchCounters,
    RowBits,
    bit_fields,
    merge_by_key,
    pack_bits,
    sort_by_time,
    store_rows,
    tie_ranks,
    timer_column,
    timers_of,
)
from headrace.operators.patterns.settings import MatchSettings, match_schema
from headrace.operators.windows.late_policy import Divert
from headrace.operators.windows.late_rows import LateRowCounter
from headrace.operators.windows.state import TIME, WAITING, RowStore, first_end, scan_windows


class PatternKernel:
    """The kernel of one or more patterns.

    After each step `counts` has the number of late rows (`late`), of rows on which a condition
    failed (`errors`), and of starts that were abandoned (`given_up`). The side output has the
    partial matches whose time ran out.
    """

    gauges: ClassVar[Mapping[str, bytes]] = {"keys_waiting": WAITING}

    def __init__(self, settings: MatchSettings, output: pa.Schema | None = None) -> None:
        self.settings, self.step_name, self._output = settings, settings.name, output
        needed = {name for _, pattern in settings.patterns for name in pattern.columns}
        needed.update(settings.by, (name for name, _ in settings.tie_order))
        # A rule that is added later may need any column.
        needs_all = settings.rows == ALL_ROWS or settings.active_rules is not None
        self._columns = [name for name in settings.schema.names if needs_all or name in needed]
        self._store = RowStore(
            settings.name,
            [
                pa.field(TIMER, pa.int64()),
                *bit_fields(settings.stored_bits),
                *(settings.schema.field(name) for name in self._columns),
            ],
            with_id=False,
        )
        self._counters = (
            MatchCounters(settings.name, len(settings.patterns)) if settings.has_counters else None
        )
        self.late_rows = LateRowCounter(
            settings.row_schema, settings.producer, divert=isinstance(settings.late, Divert)
        )
        self.counts: dict[str, int] = {}
        self._timed_out: list[pa.Table] = []

    @cached_property
    def output(self) -> pa.Schema:
        return self._output or match_schema(self.settings)

    def due(self, state: KeyedState) -> int | None:
        """The earliest watermark at which something becomes certain."""
        end = first_end(state, WAITING)
        return None if end is None else end + self.settings.horizon_lag_us

    def take_side_output(self) -> pa.Table:
        """The partial matches whose time ran out since the last call."""
        tables, self._timed_out = self._timed_out, []
        if not tables:
            return self.output.append(TICK_FIELD).empty_table()
        return pa.concat_tables(tables).sort_by(TICK)

    def step_timed(
        self, state: KeyedState, inputs: Sequence[pa.Table], watermarks: Sequence[Watermarks]
    ) -> pa.Table:
        """1. Leave out late rows. 2. Sort the rows of all keys that have new rows or due timers. 3.
        Match. 4. Store the rows that are still needed. 5. Emit, in order of tick and key.
        """
        (rows,), (clock,) = inputs, watermarks
        self.counts = {}
        nothing = self.output.append(TICK_FIELD).empty_table()
        if not len(clock):
            return nothing
        batch = self._load(state, self._without_late(rows, clock), clock)
        if not len(batch.by):
            return nothing
        had_row, match_counts = (
            self._counters.read(state, batch.by, batch.groups)
            if self._counters
            else (np.zeros(0, np.bool_), np.zeros((0, 0), np.int64))
        )
        match_pass = MatchPass(self.settings, self.output, batch, clock, had_row, match_counts)
        results = [match_pass.run_pattern(index) for index in range(len(self.settings.patterns))]
        self._retain(state, match_pass, int(clock.horizon[-1]))
        self._timed_out += match_pass.timed_out
        for name, count in match_pass.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        emitted = [result for result in results if result is not None]
        if not emitted:
            return nothing
        table = pa.concat_tables([table for table, _ in emitted])
        keys = np.concatenate([keys for _, keys in emitted])
        order = sort_order(as_array(table.column(TICK)).to_numpy(), keys)
        return table.take(pa.array(order))

    def _without_late(self, rows: pa.Table, clock: Watermarks) -> pa.Table:
        if not rows.num_rows:
            return rows
        tick_index = clock.tick_indices(as_array(rows.column(TICK)).to_numpy())
        horizon = clock.horizon_before[tick_index]
        behind = horizon - self._times(rows)
        is_late = (behind > 0) & (horizon != UNSTARTED)
        if not is_late.any():
            return rows
        self.counts["late"] = self.late_rows.add(rows, is_late, clock.times_us[tick_index], behind)
        return rows.filter(pa.array(~is_late))

    def _times(self, rows: pa.Table) -> Times:
        return microseconds(rows.column(self.settings.time)) + self.settings.time_shift_us

    def _load(self, state: KeyedState, rows: pa.Table, clock: Watermarks) -> BufferedBatch:
        """The stored and the new rows of all keys with new rows or due timers, sorted."""
        now_us = int(clock.horizon[-1])
        due_keys = (
            pa.nulls(0, pa.binary())
            if now_us == UNSTARTED
            else scan_windows(state, WAITING, UNSTARTED, now_us)[1].group_keys
        )
        ranked = rank_keys([encode_keys(rows, self.settings.by), due_keys])
        groups, names = key_groups(ranked.keys), RowStore.names(ranked.keys)
        stored_counts, stored = self._store.read(state, names, groups)
        # New rows in the columns in which rows are stored.
        masks = [
            as_array(rows.column(name)).fill_null(False).to_numpy(zero_copy_only=False)
            for name in self.settings.bits
        ]
        words = pack_bits(masks, self.settings.stored_bits - len(masks), rows.num_rows)
        arrays = [
            pa.array(self._times(rows)),
            pa.array(np.full(rows.num_rows, NO_TIMER)),
            *words,
            *(rows.column(name) for name in self._columns),
        ]
        word_names = [f"{BITS}{word}" for word in range(len(words))]
        fresh = (
            pa.Table.from_arrays(arrays, names=[TIME, TIMER, *word_names, *self._columns])
            .select(stored.schema.names)
            .cast(stored.schema)
        )
        all_rows = pa.concat_tables([stored, fresh]) if stored.num_rows else fresh
        all_rows = all_rows.combine_chunks()
        order, keys = merge_by_key(stored_counts, ranked.ranks[0], ranked.orders[0])
        ties = [
            tie_ranks(as_array(all_rows.column(name)), descends=descends)
            for name, descends in self.settings.tie_order
        ]
        all_times = as_array(all_rows.column(TIME)).to_numpy()
        order, times = sort_by_time(order, keys, all_times, ties)
        return BufferedBatch(
            by=ranked.keys,
            groups=groups,
            names=names,
            rows=all_rows,
            order=order,
            keys=keys,
            times=times,
            bits=self._bits(all_rows, stored.num_rows, order),
            stored_counts=stored_counts,
            timers=timers_of(as_array(stored.column(TIMER)).to_numpy(), stored_counts),
            certain=np.flatnonzero(times < now_us),
        )

    def _bits(self, rows: pa.Table, stored: int, order: Ints) -> RowBits:
        """The bits of rows, sorted: the conditions of rules, which are computed, and the stored
        bits. Conditions that fail are counted when the row is new.
        """
        masks = []
        rules = self.settings.active_rules
        for condition in rules.conditions if rules else ():
            columns = [as_array(rows.column(str(term.column))) for term in condition.terms]
            holds, failed = condition.holds(columns, rows.num_rows)
            masks.append(holds[order])
            if count := int(failed[stored:].sum()):
                self.counts["errors"] = self.counts.get("errors", 0) + count
        computed = [word.to_numpy() for word in pack_bits(masks, 0, len(order))]
        stored_words = [
            as_array(rows.column(field.name)).to_numpy()[order]
            for field in bit_fields(self.settings.stored_bits)
        ]
        return RowBits([*computed, *stored_words])

    # What is retained

    def _retain(self, state: KeyedState, match_pass: MatchPass, now_us: int) -> None:
        """Store the rows of each key from the first on that some pattern still needs, and as many
        rows before it as conditions look back.
        """
        batch = match_pass.batch
        is_retained = np.ones(len(batch.order), np.bool_)
        is_retained[batch.certain] = match_pass.is_needed | self._looked_back_at(match_pass, now_us)
        which = np.flatnonzero(is_retained)
        counts = np.bincount(batch.keys[which], minlength=len(batch.by))
        timers = self._next_timers(match_pass, which, now_us)
        table = batch.rows.take(pa.array(batch.order[which]))
        stored_words = batch.bits.words[self.settings.computed_words :]
        columns = {
            TIME: table[TIME],
            TIMER: pa.array(timer_column(timers, counts)),
            **{f"{BITS}{word}": pa.array(bits[which]) for word, bits in enumerate(stored_words)},
            **{name: table[name] for name in self._columns},
        }
        store_rows(self._store, state, batch, pa.table(columns), counts, timers)
        if self._counters is not None:
            self._counters.write(
                state,
                batch.by,
                batch.groups,
                match_pass.match_counts,
                match_pass.keys_with_counters(),
            )

    @cached_property
    def _look_back(self) -> tuple[int, int | None]:
        """How many rows patterns look back, and for how long."""
        patterns = [pattern for _, pattern in self.settings.patterns]
        withins = [pattern.spec.within_us for pattern in patterns]
        row_count = max((pattern.look_back_rows for pattern in patterns), default=0)
        if None in withins:
            return row_count, None
        return row_count, max((within or 0 for within in withins), default=0)

    def _looked_back_at(self, match_pass: MatchPass, now_us: int) -> Mask:
        """The certain rows that conditions of later rows may look back at."""
        row_count, within = self._look_back
        rows = match_pass.rows
        if not row_count or not len(rows):
            return np.zeros(len(rows), np.bool_)
        needed = match_pass.first_needed[rows.keys]
        first = np.where(needed < FOREVER, needed, rows.end)
        is_near = (rows.positions < first) & (rows.positions >= first - row_count)
        if within is None:
            return is_near
        # The row that looks back is the first needed one, which is older than the horizon, or one
        # that is not certain yet.
        looks_back_us = np.full(len(rows), now_us)
        has_needed = needed < FOREVER
        looks_back_us[has_needed] = rows.times[needed[has_needed]]
        return is_near & (rows.times >= looks_back_us - within)

    def _next_timers(self, match_pass: MatchPass, retained: Ints, now_us: int) -> Times:
        """When each key must be looked at again: when its next row is certain, when a deadline has
        passed, or when the rows that conditions looked back at can be dropped.
        """
        batch = match_pass.batch
        timers = np.full(len(batch.by), FOREVER)
        is_uncertain = np.ones(len(batch.order), np.bool_)
        is_uncertain[batch.certain] = False
        uncertain = np.flatnonzero(is_uncertain)
        np.minimum.at(timers, batch.keys[uncertain], batch.times[uncertain] + 1)
        deadlines = match_pass.deadlines
        deadlines = np.where(deadlines < FOREVER, deadlines + 1, FOREVER)
        np.minimum.at(timers, match_pass.rows.keys, deadlines)
        row_count, within = self._look_back
        if row_count and within is not None:
            newest = np.full(len(batch.by), -FOREVER)
            np.maximum.at(newest, batch.keys[retained], batch.times[retained])
            is_alone = (timers == FOREVER) & (newest > -FOREVER)
            timers[is_alone] = newest[is_alone] + within + 1
        has_rows = np.zeros(len(timers), np.bool_)
        has_rows[batch.keys[retained]] = True
        timers = np.where(has_rows & (timers < FOREVER), timers, NO_TIMER)
        # A timer that is too early stays: setting it again when it fires is cheaper than moving it
        # in each batch.
        is_early = (batch.timers != NO_TIMER) & (batch.timers > now_us) & (batch.timers < timers)
        return np.where(is_early, batch.timers, timers)

    def stored_pass(self, stored: pa.Array, now_us: int) -> MatchPass:
        """A match pass over the stored rows of keys, of which those before a time are certain; for
        readers that change nothing.
        """
        counts, rows = self._store.decode(stored)
        keys, times = np.repeat(np.arange(len(counts)), counts), as_array(rows.column(TIME))
        order = np.arange(len(keys))
        batch = BufferedBatch(
            by=stored,
            groups=np.zeros(len(counts), np.uint8),
            names=stored,
            rows=rows,
            order=order,
            keys=keys,
            times=times.to_numpy(),
            bits=self._bits(rows, 0, order),
            stored_counts=counts,
            timers=np.full(len(counts), NO_TIMER),
            certain=np.flatnonzero(times.to_numpy() < now_us),
        )
        now = np.array([now_us], np.int64)
        return MatchPass(
            settings=self.settings,
            output=self.output,
            batch=batch,
            clock=Watermarks(now, now, now, now, now_us, now_us),
            had_row=np.ones(len(counts), np.bool_),
            match_counts=np.zeros((len(counts), len(self.settings.patterns)), np.int64),
        )


# Partial matches, for people who ask what a pattern waits for


PartialMatchTuple = tuple[str, list[dict[str, Any]], list[str], int | None]
"""The name of the pattern, the rows taken, what may come next, and until when."""


def partial_matches_of_key(
    settings: MatchSettings, output: pa.Schema, stored: bytes | None, now_us: int
) -> tuple[list[PartialMatchTuple], int]:
    """The partial matches of one key, from its stored rows, of which those before `now_us` are
    certain; and how many rows are not certain yet.
    """
    kernel = PatternKernel(settings, output)
    match_pass = kernel.stored_pass(pa.array([stored], pa.binary()), now_us)
    partial_matches: list[PartialMatchTuple] = []
    for index, (name, pattern) in enumerate(settings.patterns):
        view = match_pass.view(index)
        matcher = match_pass.matcher(index, view)
        outcome = matcher.run()
        start = np.flatnonzero((outcome.decided_us >= now_us) & matcher.may_begin)
        match_rows = matcher.partial_matches(outcome, start, view.rows.end[start] - 1)
        for owner, first in enumerate(start.tolist()):
            mine = match_rows.owner == owner
            states = match_rows.state[mine].tolist()
            if not states:
                continue
            row_index = view.source.order[match_rows.row[mine]]
            columns = view.source.rows.take(pa.array(row_index))
            own = {TIME, TIMER, *(name for name in columns.column_names if name.startswith(BITS))}
            user_columns = [name for name in columns.column_names if name not in own]
            rows = [
                {"classifier": pattern.automaton.symbols[state], "time_us": time, **values}
                for state, time, values in zip(
                    states,
                    as_array(columns.column(TIME)).to_pylist(),
                    columns.select(user_columns).to_pylist(),
                    strict=True,
                )
            ]
            within = pattern.spec.within_us
            until = None if within is None else int(view.rows.times[first]) + within
            partial_matches.append((name, rows, _next_symbols(pattern, states[-1]), until))
    return partial_matches, len(match_pass.batch.order) - len(match_pass.rows)


def _next_symbols(pattern: CompiledPattern, state: int) -> list[str]:
    """What may come after a state."""
    tree = pattern.automaton.pattern
    absent = " and ".join(f"no {symbol}" for symbol in tree.absent_symbols) or "no row"
    end = absent if tree.waits_for_deadline else "what ends it"
    return [
        end if transition.target == ACCEPT else pattern.automaton.symbols[transition.target]
        for transition in pattern.automaton.transitions[state]
    ]
