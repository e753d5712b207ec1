"""Which keys a pattern must look at, where there are many patterns: those in which a row of the symbol that is rarest could be part of a match, as far as it and the rows directly
before it tell. It decides about speed alone: of keys that are not looked at, what may still be needed is kept.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from headrace.operators.buffers import Ints, Mask, runs
from headrace.operators.patterns.automaton import Automaton
from headrace.operators.patterns.compiled import CompiledPattern
from headrace.operators.patterns.row_buffer import WORD, Bits
from headrace.operators.patterns.settings import MatchSettings
from headrace.operators.patterns.sorted_rows import SortedRows
from headrace.operators.patterns.syntax import STRICT

MANY = 8
"""From so many patterns on it pays to find out first which keys each needs to look at."""
DEPTH = 4
"""How many rows before one are looked at, to tell whether it can be part of a match."""


class Candidates:
    """Of rows that are in order, `keys` of them different; `bits`: which conditions each meets."""

    def __init__(self, settings: MatchSettings, rows: SortedRows, bits: Bits, keys: int) -> None:
        self.settings, self.rows, self.bits = settings, rows, bits
        self.bounds = np.searchsorted(rows.keys, np.arange(keys + 1))
        self._shared_rows: dict[int, Ints] = {}
        self._shared_keys: dict[int, Mask] = {}
        self._rare_rows: dict[int, Ints] = {}

    def of(self, at: int) -> Ints | None:
        """The rows of those keys, if they are far fewer than all; None for all."""
        _, pattern = self.settings.patterns[at]
        bits = dict(self.settings.fits[at])
        needed = {symbol: self._rows_with(bits[symbol]) for symbol in pattern.automaton.required if symbol in bits} if self._is_fit(pattern) else {}
        if not needed:
            return None
        rarest = min(needed, key=lambda symbol: len(needed[symbol]))
        found = needed[rarest][self._possible(pattern.automaton, rarest, needed[rarest], bits)]
        has = np.zeros(len(self.bounds) - 1, np.bool_)
        has[self.rows.keys[found]] = True
        for symbol in needed.keys() - {rarest}:
            has &= self._keys_with(bits[symbol])
        keys = np.flatnonzero(has)
        counts = self.bounds[keys + 1] - self.bounds[keys]
        return runs(self.bounds[keys], counts) if 2 * int(counts.sum()) < len(self.rows) else None

    def _is_fit(self, pattern: CompiledPattern) -> bool:
        settings, spec = self.settings, pattern.spec
        unfit = spec.within_us is None or settings.timed_out or pattern.automaton.pattern.from_first or len(settings.patterns) < MANY
        return not unfit and self._longest <= spec.most_rows

    @cached_property
    def _longest(self) -> int:
        return int(np.diff(self.bounds).max(initial=0))

    # Conditions

    def _rows_with(self, bit: int) -> Ints:
        if bit in self.settings.shared:
            if bit not in self._shared_rows:
                self._shared_rows[bit] = np.flatnonzero(self.bits.get(bit))
            return self._shared_rows[bit]
        some = self._rows_with_own(bit // WORD)
        return some[self.bits.get(bit, some)]

    def _rows_with_own(self, word: int) -> Ints:
        """The rows that meet any condition of a word that a single pattern has: there are few of those."""
        if word not in self._rare_rows:
            own = sum(1 << bit % WORD for bit in range(word * WORD, min((word + 1) * WORD, self.settings.conditions)) if bit not in self.settings.shared)
            self._rare_rows[word] = np.flatnonzero(self.bits.words[word] & own)
        return self._rare_rows[word]

    def _keys_with(self, bit: int) -> Mask:
        if bit in self._shared_keys:
            return self._shared_keys[bit]
        has = np.zeros(len(self.bounds) - 1, np.bool_)
        has[self.rows.keys[self._rows_with(bit)]] = True
        if bit in self.settings.shared:
            self._shared_keys[bit] = has
        return has

    # Rows before

    def _possible(self, automaton: Automaton, symbol: str, rows: Ints, bits: dict[str, int]) -> Mask:
        """Which of some rows of a symbol could be at one of its places."""
        found = np.zeros(len(rows), np.bool_)
        for place, each in enumerate(automaton.symbols):
            if each == symbol:
                found |= self._comes_to(automaton, place, rows, bits, DEPTH)
        return found

    def _comes_to(self, automaton: Automaton, place: int, rows: Ints, bits: dict[str, int], depth: int) -> Mask:
        """Whether a match could come to a place with these rows, given that they fit it."""
        before = automaton.ways_to[place]
        if place in automaton.first or not depth or any(mode != STRICT for _, mode in before):
            return np.ones(len(rows), np.bool_)
        found = np.zeros(len(rows), np.bool_)
        inside = np.flatnonzero(rows > self.rows.start[rows])
        for other, _ in before:
            bit = bits.get(automaton.symbols[other])
            fits = inside if bit is None else inside[self.bits.get(bit, rows[inside] - 1)]
            found[fits] |= self._comes_to(automaton, other, rows[fits] - 1, bits, depth - 1)
        return found
