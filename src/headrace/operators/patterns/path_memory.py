"""What conditions that look back need to know of a path, the rows that a match in the making has
taken so far: a few values for each path, carried on from row to row, instead of its rows.

Example: `b` is `v > first(a.v) AND sum(a.v) < 10`. A path remembers

    row      first row of a    rows of a    sum of a.v
    a, 3     0                 1            3
    a, 4     0                 2            7
    b, 5     0                 2            7             5 > 3 and 7 < 10: the condition holds

So a row costs a path the same however long the path is; and two paths of one beginning that stand
in the same state and remember the same have the same future, of which one is enough
(`path_search.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask
from headrace.columnar.keys import as_array
from headrace.expressions.evaluator import BIGINT_LIMIT
from headrace.operators.patterns.conditions import (
    AGGREGATES,
    CLASSIFIER,
    FIRST,
    ConditionExpression,
    MatchSource,
    Term,
)

Values = npt.NDArray[Any]
Columns = list[Values]
"""What paths remember: a column for each thing, a row for each path."""


class PathMemory(Protocol):
    """What paths remember, and the conditions that read it."""

    def begin(self) -> Columns:
        """The columns of one path without rows."""

    def extend(self, columns: Columns, parents: Ints, rows: Ints, states: Ints) -> Columns:
        """The columns of paths that each continue one of the given paths by a row, in a state."""

    def holds(self, symbol: str, columns: Columns, rows: Ints, states: Ints) -> Mask:
        """For which paths, given with their last rows and states, a symbol's condition holds."""

    def columns_read(self, symbols: Collection[str]) -> Ints:
        """The columns on which the conditions of some symbols depend, now or later."""


ROWS, FIRST_ROW, LAST_ROW, LAST_STATE, SUM, LOWEST, HIGHEST = (
    "rows",
    "first row",
    "last row",
    "last state",
    "sum",
    "lowest",
    "highest",
)
_EMPTY = -1
"""No row, or no state."""


@dataclass(frozen=True)
class Register:
    """One thing that a path remembers of its rows of some symbols (None: of all): how many there
    are, or how many have a value in the column; the first or last one but `offset`; the sum of a
    column, or its row with the lowest or highest value.
    """

    kind: str
    symbols: tuple[str, ...] | None
    column: str | None = None
    offset: int = 0
    as_float: bool = False


class TermMemory:
    """Remembers what the terms of conditions read. `note_failures` is called with the rows on which
    a condition failed.
    """

    def __init__(
        self,
        conditions: Mapping[str, ConditionExpression],
        source: MatchSource,
        row_count: int,
        note_failures: Callable[[Ints], None],
    ) -> None:
        self.conditions, self.source, self.note_failures = conditions, source, note_failures
        self._all_rows = np.arange(row_count)
        self._registers: dict[Register, int] = {}
        self._read: dict[str, set[int]] = {}
        self._columns: dict[str, pa.Array] = {}
        self._numbers: dict[tuple[str, bool], Values] = {}
        self._ranks: dict[str, Ints] = {}
        self._valid: dict[str, Mask] = {}
        for symbol, condition in conditions.items():
            self._read[symbol] = set()
            for term in condition.terms:
                for register in _registers_of(term, source):
                    index = self._registers.setdefault(register, len(self._registers))
                    self._read[symbol].add(index)
        self._members = {
            register.symbols: np.array(
                [
                    register.symbols is None or symbol in register.symbols
                    for symbol in source.symbols
                ],
                np.bool_,
            )
            for register in self._registers
        }

    def columns_read(self, symbols: Collection[str]) -> Ints:
        read = set().union(*(self._read.get(symbol, set()) for symbol in symbols))
        return np.array(sorted(read), np.int64)

    def begin(self) -> Columns:
        columns: Columns = []
        for register in self._registers:
            if register.kind == ROWS:
                columns.append(np.zeros(1, np.int64))
            elif register.kind == SUM:
                columns.append(np.zeros(1, self._numbers_of(register).dtype))
            else:
                columns.append(np.full(1, _EMPTY))
        return columns

    def extend(self, columns: Columns, parents: Ints, rows: Ints, states: Ints) -> Columns:
        before = [column[parents] for column in columns]
        extended: Columns = []
        for register, old in zip(self._registers, before, strict=True):
            taken = self._members[register.symbols][states]
            if register.column is not None:
                taken = taken & self._is_valid(register.column)[rows]
            new: Values
            if register.kind == ROWS:
                new = old + taken
            elif register.kind == FIRST_ROW:
                count = before[self._registers[Register(ROWS, register.symbols)]]
                new = np.where(taken & (count == register.offset), rows, old)
            elif register.kind in (LAST_ROW, LAST_STATE):
                if register.offset:
                    nearer = Register(register.kind, register.symbols, None, register.offset - 1)
                    newest = before[self._registers[nearer]]
                else:
                    newest = rows if register.kind == LAST_ROW else states
                new = np.where(taken, newest, old)
            elif register.kind == SUM:
                new = old.copy()
                new[taken] += self._numbers_of(register)[rows[taken]]
            else:
                rank = self._rank(str(register.column))
                there, here = rank[np.maximum(old, 0)], rank[rows]
                is_better = here < there if register.kind == LOWEST else here > there
                new = np.where(taken & ((old == _EMPTY) | is_better), rows, old)
            extended.append(new)
        return extended

    def holds(self, symbol: str, columns: Columns, rows: Ints, states: Ints) -> Mask:
        condition = self.conditions[symbol]
        values = [self._term_values(term, columns, rows, states) for term in condition.terms]
        holds, failed = condition.holds(values, len(rows))
        if failed.any():
            self.note_failures(rows[failed])
        return holds

    def _term_values(self, term: Term, columns: Columns, rows: Ints, states: Ints) -> pa.Array:
        def column_of(register: Register) -> Values:
            return columns[self._registers[register]]

        schema = self.source.rows.schema
        if term.kind in AGGREGATES:
            name = term.column
            counts = column_of(Register(ROWS, term.symbols, name))
            kind = term.type(schema)
            if term.kind == "count":
                return pa.array(counts)
            assert name is not None
            if term.kind in ("min", "max"):
                which = column_of(
                    Register(LOWEST if term.kind == "min" else HIGHEST, term.symbols, name)
                )
                return self._values_at(name, which).cast(kind)
            return self._sums(term, counts, column_of).cast(kind)
        if term.kind == CLASSIFIER:
            last = states if term.symbols is None else column_of(Register(LAST_STATE, term.symbols))
            symbols = pa.array(self.source.symbols, pa.string())
            return symbols.take(pa.array(np.maximum(last, 0), mask=last == _EMPTY))
        assert term.column is not None
        which = rows
        if not term.is_current:
            kind = FIRST_ROW if term.kind == FIRST else LAST_ROW
            which = column_of(Register(kind, term.symbols, None, term.offset))
        if term.look_back:
            exists = which != _EMPTY
            earlier, exists = self.source.look_back(np.maximum(which, 0), exists, term.look_back)
            which = np.where(exists, earlier, _EMPTY)
        return self._values_at(term.column, which)

    def _sums(self, term: Term, counts: Ints, column_of: Any) -> pa.Array:
        name, has_none = str(term.column), counts == 0
        about = column_of(Register(SUM, term.symbols, name, 0, as_float=True))
        if term.kind == "avg":
            return pa.array(about / np.maximum(counts, 1), mask=has_none)
        kind = self._column(name).type
        if pa.types.is_floating(kind):
            return pa.array(about, mask=has_none)
        sums = column_of(Register(SUM, term.symbols, name))
        if pa.types.is_decimal(kind):
            decimals = [
                None if is_missing else Decimal(int(value)).scaleb(-kind.scale)
                for value, is_missing in zip(sums.tolist(), has_none.tolist(), strict=True)
            ]
            return pa.array(decimals, pa.decimal256(76, kind.scale))
        return pa.array(sums, mask=has_none | (np.abs(about) >= BIGINT_LIMIT))

    # Columns of rows

    def _column(self, name: str) -> pa.Array:
        if name not in self._columns:
            self._columns[name] = self.source.column(name, self._all_rows)
        return self._columns[name]

    def _values_at(self, name: str, rows: Ints) -> pa.Array:
        return self._column(name).take(pa.array(np.maximum(rows, 0), mask=rows == _EMPTY))

    def _is_valid(self, name: str) -> Mask:
        if name not in self._valid:
            self._valid[name] = self._column(name).is_valid().to_numpy(zero_copy_only=False)
        return self._valid[name]

    def _numbers_of(self, register: Register) -> Values:
        """The numbers of a column, 0 where it is null; decimals as integers in their last place."""
        name = str(register.column)
        if (name, register.as_float) not in self._numbers:
            values = self._column(name)
            kind = values.type
            numbers: Values
            if register.as_float:
                numbers = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
            elif pa.types.is_decimal(kind):
                numbers = np.array(
                    [
                        0 if each is None else int(each.scaleb(kind.scale))
                        for each in values.to_pylist()
                    ],
                    dtype=object,
                )
            else:
                numbers = values.fill_null(0).cast(pa.int64()).to_numpy()
            self._numbers[name, register.as_float] = numbers
        return self._numbers[name, register.as_float]

    def _rank(self, name: str) -> Ints:
        """The rank of each row by a column; NaN is greater than any number."""
        if name not in self._ranks:
            ranks = pc.rank(self._column(name), sort_keys="ascending", tiebreaker="dense")
            self._ranks[name] = as_array(ranks).to_numpy().astype(np.int64)
        return self._ranks[name]


def _registers_of(term: Term, source: MatchSource) -> list[Register]:
    """What must be remembered for a term."""
    symbols, column = term.symbols, term.column
    if term.kind in AGGREGATES:
        count = Register(ROWS, symbols, column)
        if term.kind == "count":
            return [count]
        if term.kind in ("min", "max"):
            return [count, Register(LOWEST if term.kind == "min" else HIGHEST, symbols, column)]
        about = Register(SUM, symbols, column, 0, as_float=True)
        kind = source.type_of(str(column))
        if term.kind == "avg" or pa.types.is_floating(kind):
            return [count, about]
        return [count, about, Register(SUM, symbols, column)]
    if term.kind == CLASSIFIER:
        return [] if symbols is None else [Register(LAST_STATE, symbols)]
    if term.is_current:
        return []
    if term.kind == FIRST:
        return [Register(ROWS, symbols), Register(FIRST_ROW, symbols, None, term.offset)]
    return [Register(LAST_ROW, symbols, None, offset) for offset in range(term.offset + 1)]
