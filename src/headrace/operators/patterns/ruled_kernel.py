"""The kernel of patterns that come and go: rows meet the rules in force at their tick. A call is cut where rules change, and each piece is a call of the kernel of patterns.

Every shard hears of every rule and keeps all of them; of one that cannot be read, the shard that has its key tells.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pyarrow as pa

from headrace.errors import InputError
from headrace.operators.changelog import DELETE, UPDATE_PREIMAGE
from headrace.operators.diverted import Diverted
from headrace.operators.joins.sides import ticks_of
from headrace.operators.kernel import CHANGE_TYPE, Clocks, KeyedState
from headrace.operators.keys import encode_keys, key_groups
from headrace.operators.patterns.kernel import PatternKernel
from headrace.operators.patterns.rules import (
    COLUMNS,
    PATTERN,
    RULES,
    InForceRules,
    RuleSettings,
    from_bytes,
    in_force,
    to_bytes,
    with_rule,
    without_rule,
)
from headrace.operators.patterns.settings import match_schema
from headrace.operators.patterns.working import TICK_FIELD
from headrace.operators.windows.entries import WAITING


class RuledKernel:
    """Inputs: the rows, the changes of the rules. As `PatternKernel`, and `diverted` has rules that cannot be read."""

    gauges: ClassVar[Mapping[str, bytes]] = {"keys_waiting": WAITING}

    def __init__(self, settings: RuleSettings) -> None:
        self.settings = settings
        self.output = match_schema(settings.matching)
        self.diverted = Diverted(settings.schema)
        self.counts: dict[str, int] = {}
        self._fingerprint = pickle.dumps(settings)
        self._any = PatternKernel(settings.matching)
        self.late = self._any.late
        self._aside: list[pa.Table] = []

    def due(self, state: KeyedState) -> int | None:
        return self._any.due(state)

    def take_aside(self) -> pa.Table:
        """Partial matches whose time ran out since the last time."""
        tables, self._aside = self._aside, []
        return pa.concat_tables(tables) if tables else self.output.append(TICK_FIELD).empty_table()

    def step_timed(self, state: KeyedState, inputs: Sequence[pa.Table], clocks: Sequence[Clocks]) -> pa.Table:
        """Piece by piece: what of the rules changes, then the rows of the ticks until they change again."""
        rows, changes = inputs
        self.counts, told = {}, [self.output.append(TICK_FIELD).empty_table()]
        if not state.at_hand:
            return told[0]
        before = rules = from_bytes(self._stored(state), self.settings)
        for clock, some_rows, some_changes in _pieces(rows, changes, clocks[0]):
            if some_changes.num_rows:
                rules = self._changed(rules, some_changes, int(clock.closed_at_start), state.at_hand)
            told.append(self._matched(state, rules, some_rows, clock))
        if rules != before:
            names = [RULES + bytes([group]) for group in state.at_hand]
            state.put(names, [to_bytes(rules)] * len(names), np.array(state.at_hand, np.uint8))
        return pa.concat_tables(told)

    @staticmethod
    def _stored(state: KeyedState) -> bytes | None:
        first = state.at_hand[0]
        return state.get([RULES + bytes([first])], np.array([first], np.uint8))[0]

    def _matched(self, state: KeyedState, rules: InForceRules, rows: pa.Table, clock: Clocks) -> pa.Table:
        kernel = PatternKernel(in_force(self.settings, self._fingerprint, rules), self.output)
        kernel.late = self.late
        told = kernel.step_timed(state, [rows], [clock])
        self._aside.append(kernel.take_aside())
        for name, count in kernel.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        return told

    def _changed(self, rules: InForceRules, changes: pa.Table, since_us: int, at_hand: Sequence[int]) -> InForceRules:
        """What a tick makes of the rules. One that cannot be read is not in force, nor is what it was before."""
        mine = np.isin(key_groups(encode_keys(changes, [self.settings.key])), np.array(at_hand, np.uint8))
        wanted = [name for name in (self.settings.key, *COLUMNS) if name in changes.column_names]
        for at, (kind, row) in enumerate(zip(changes[CHANGE_TYPE].to_pylist(), changes.select(wanted).to_pylist(), strict=True)):
            name = row[self.settings.key]
            if kind == UPDATE_PREIMAGE:
                continue
            if kind == DELETE:
                rules = without_rule(rules, name)
                continue
            try:
                spec = self.settings.spec(row)
                self.settings.compiled(spec)
                rules = with_rule(rules, name, spec, since_us, self.settings.most_rules)
            except InputError as bad:
                rules = without_rule(rules, name)
                if mine[at]:
                    self.diverted.add(changes, np.array([at]), PATTERN, str(bad))
        return rules


def _pieces(rows: pa.Table, changes: pa.Table, clock: Clocks) -> Iterator[tuple[Clocks, pa.Table, pa.Table]]:
    """Clocks, rows and changes of the ticks up to the next with changes, which come at the beginning of a piece."""
    of_rows, of_changes = ticks_of(rows), ticks_of(changes)
    cuts = np.unique(np.concatenate([[0], clock.at(np.unique(of_changes)), [len(clock)]]))
    closed_before, complete_before = clock.closed_before, clock.complete_before
    for first, stop in pairwise(cuts.tolist()):
        some = slice(first, stop)
        ticks = clock.ticks[some]
        piece = Clocks(ticks, clock.times_us[some], clock.complete[some], clock.closed[some], int(complete_before[first]), int(closed_before[first]))
        bounds = np.searchsorted(of_rows, [ticks[0], ticks[-1] + 1])
        change_bounds = np.searchsorted(of_changes, [ticks[0], ticks[-1] + 1])
        yield piece, rows.slice(bounds[0], bounds[1] - bounds[0]), changes.slice(change_bounds[0], change_bounds[1] - change_bounds[0])
