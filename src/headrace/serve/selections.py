"""The rows that subscribers select, evaluated once for all of them.

A subscriber may want only the rows of one key, or those that meet a condition such as `amount >=
100 and region = eu`: comparisons of a column with a value, joined by `and`. Of an update that
crosses the condition only one half is selected. The row appears (an insert) or disappears (a
delete), so a subscriber that maintains the rows that meet the condition stays correct.

`evaluate` takes all selections of a channel at once. Those that compare columns for equality are
looked up by value, however many there are:

    selections   k = 7, k = 9, k = 7 and n > 3, …       the index of (k): 7 → 0, 9 → 1
    rows         k: 9  7  4  9                          numbers: 1  0  -  1

Each other selection is one pass over the rows. Selections that are equal are one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, DELETE, INSERT, UPDATE_POSTIMAGE, UPDATE_PREIMAGE
from headrace.columnar.keys import encode_keys
from headrace.errors import InputError, UnknownColumn
from headrace.serve.requests import parse_key_value, parse_value
from headrace.types.schema import type_name

Positions = npt.NDArray[np.int64]

Condition = Callable[[pa.Table], pa.ChunkedArray]
_COMPARISON = re.compile(
    r"\s*(?:\"([^\"]+)\"|([^\s<>=!\"]+))\s*(<=|>=|!=|<>|=|<|>)\s*(?:'((?:[^']|'')*)'|(\S+))\s*"
)
_FUNCTIONS = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
MAX_TEXT = 1_000


def parse_selection(
    name: str,
    schema: pa.Schema,
    key: Sequence[str],
    texts: Sequence[str],
    where: str | None,
    *,
    as_changes: bool = True,
) -> RowSelection | None:
    """The selection of the rows of a view or topic whose key begins with `texts` and that meet the
    condition `where`. None if it selects all rows.
    """
    if texts and not key:
        raise InputError(
            f"The view {name!r} is a stream: its rows have no key.", fix="choose rows with where=."
        )
    if len(texts) > len(key):
        raise InputError(
            f"{len(texts)} values came for the key of the view {name!r}, which is"
            f" ({', '.join(key)}).",
            fix="give key= once for each.",
        )
    comparisons = [
        _Comparison(schema.field(column), "=", parse_key_value(text, schema.field(column)))
        for column, text in zip(key, texts, strict=False)
    ]
    if where is not None:
        if len(where) > MAX_TEXT:
            raise InputError(
                f"The condition has {len(where):,} characters; the limit is {MAX_TEXT:,}."
            )
        # Split at `and`, but not inside quotes.
        parts = re.split(r"\s+and\s+(?=(?:[^']*'[^']*')*[^']*$)", where, flags=re.IGNORECASE)
        comparisons += [_comparison(name, schema, part) for part in parts]
    if not comparisons:
        return None
    equal: dict[str, pa.Scalar] = {}
    conditions = []
    for comparison in comparisons:
        condition = _compare(comparison)
        column = comparison.field.name
        if comparison.operator == "=" and column not in equal:
            equal[column] = comparison.value
        else:
            conditions.append(condition)
    return RowSelection(
        name, tuple(texts), where, as_changes, tuple(sorted(equal.items())), tuple(conditions)
    )


@dataclass(frozen=True)
class RowSelection:
    """A selection that is equal to another one with the same texts, so that both share results."""

    name: str
    key: tuple[str, ...]
    where: str | None
    as_changes: bool
    equal: tuple[tuple[str, pa.Scalar], ...] = field(compare=False, repr=False)
    """The columns that are compared for equality, by name, and their values."""
    conditions: tuple[Condition, ...] = field(compare=False, repr=False)
    """The other comparisons."""

    def __call__(self, rows: pa.Table) -> pa.Table:
        """The selected rows, with updates that cross the condition as inserts and deletes."""
        candidates = _equal_positions(rows, [self]) if self.equal else _all_positions(rows)
        return _selected(rows, self.restrict(rows, candidates), as_changes=self.as_changes)

    def restrict(self, rows: pa.Table, positions: Positions) -> Positions:
        """Those of some positions whose rows meet the conditions other than equalities."""
        if not self.conditions or not len(positions):
            return positions
        candidates = rows if len(positions) == rows.num_rows else rows.take(pa.array(positions))
        mask = np.ones(len(positions), np.bool_)
        for condition in self.conditions:
            mask &= condition(candidates).to_numpy().astype(np.bool_)
        return positions[mask]


def evaluate(
    rows: pa.Table,
    selections: Collection[RowSelection],
    objects: Callable[[pa.Table], list[Any]],
) -> dict[RowSelection, list[Any]]:
    """The rows that each selection selects, as JSON objects; selections without any are left out.

    Args:
        rows: The rows of one event.
        selections: What subscribers select.
        objects: Encodes rows, one object each.

    """
    found: dict[RowSelection, list[Any]] = {}
    by_columns: dict[tuple[str, ...], list[RowSelection]] = defaultdict(list)
    for selection in selections:
        columns = tuple(column for column, _ in selection.equal)
        if columns:
            by_columns[columns].append(selection)
        elif len(positions := selection.restrict(rows, _all_positions(rows))):
            found[selection] = objects(_selected(rows, positions, as_changes=selection.as_changes))
    for group in by_columns.values():
        found.update(_evaluate_equal(rows, group, objects))
    return found


def _evaluate_equal(
    rows: pa.Table, group: Sequence[RowSelection], objects: Callable[[pa.Table], list[Any]]
) -> dict[RowSelection, list[Any]]:
    """`evaluate` for selections that compare the same columns for equality."""
    wanted = _wanted_keys(rows, group)
    index = pc.unique(wanted)
    numbers_of_selections = pc.index_in(wanted, value_set=index).to_numpy()
    by_number: dict[int, list[RowSelection]] = defaultdict(list)
    for number, selection in zip(numbers_of_selections.tolist(), group, strict=True):
        by_number[number].append(selection)
    numbers = pc.fill_null(pc.index_in(_row_keys(rows, group), value_set=index), -1).to_numpy()
    positions = np.flatnonzero(numbers >= 0)
    if not len(positions):
        return {}
    positions = positions[np.argsort(numbers[positions], kind="stable")]
    numbers = numbers[positions]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1])
    texts = objects(_selected(rows, positions, as_changes=group[0].as_changes, group_starts=starts))
    found: dict[RowSelection, list[Any]] = {}
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(positions)], strict=True):
        for selection in by_number[int(numbers[start])]:
            if not selection.conditions:
                found[selection] = texts[start:stop]
            elif len(kept := selection.restrict(rows, positions[start:stop])):
                found[selection] = objects(_selected(rows, kept, as_changes=selection.as_changes))
    return found


def _equal_positions(rows: pa.Table, group: Sequence[RowSelection]) -> Positions:
    matches = pc.is_in(_row_keys(rows, group), value_set=_wanted_keys(rows, group))
    return np.flatnonzero(matches.to_numpy(zero_copy_only=False))


def _row_keys(rows: pa.Table, group: Sequence[RowSelection]) -> pa.Array:
    """The values that a group compares, as bytes; equal values have equal bytes, NaN too."""
    return encode_keys(rows, [column for column, _ in group[0].equal]).cast(pa.binary())


def _wanted_keys(rows: pa.Table, group: Sequence[RowSelection]) -> pa.Array:
    columns = [column for column, _ in group[0].equal]
    values = pa.Table.from_arrays(
        [
            pa.array(
                [selection.equal[position][1].as_py() for selection in group],
                rows.schema.field(column).type,
            )
            for position, column in enumerate(columns)
        ],
        names=columns,
    )
    return encode_keys(values, columns).cast(pa.binary())


def _all_positions(rows: pa.Table) -> Positions:
    return np.arange(rows.num_rows)


def _selected(
    rows: pa.Table,
    positions: Positions,
    *,
    as_changes: bool,
    group_starts: npt.NDArray[np.int64] | None = None,
) -> pa.Table:
    """The rows at some positions, which ascend within each group. The half of an update whose other
    half is not selected becomes an insert or a delete. The halves of an update are neighbours.
    """
    chosen = rows.take(pa.array(positions))
    if not as_changes or CHANGE_TYPE not in rows.schema.names or not len(positions):
        return chosen
    follows = np.zeros(len(positions) + 1, np.bool_)
    follows[1:-1] = np.diff(positions) == 1
    if group_starts is not None:
        follows[group_starts] = False
    kinds = chosen[CHANGE_TYPE]
    before, after = (
        pc.equal(kinds, kind).to_numpy().astype(np.bool_)
        for kind in (UPDATE_PREIMAGE, UPDATE_POSTIMAGE)
    )
    disappears, appears = pa.array(before & ~follows[1:]), pa.array(after & ~follows[:-1])
    kinds = pc.if_else(disappears, DELETE, pc.if_else(appears, INSERT, kinds))
    return chosen.set_column(chosen.schema.get_field_index(CHANGE_TYPE), CHANGE_TYPE, kinds)


@dataclass(frozen=True)
class _Comparison:
    """One comparison of a condition."""

    field: pa.Field
    operator: str
    value: pa.Scalar


def _comparison(of: str, schema: pa.Schema, text: str) -> _Comparison:
    match = _COMPARISON.fullmatch(text)
    if match is None:
        raise InputError(
            f"{text!r} is no condition.",
            fix=(
                "write COLUMN = VALUE, with =, !=, <, <=, > or >=, joined by `and`; text with"
                " blanks in single quotes."
            ),
        )
    name = match[1] or match[2]
    if name not in schema.names:
        raise UnknownColumn(name, schema.names, where=repr(of))
    column = schema.field(name)
    if pa.types.is_nested(column.type):
        raise InputError(
            f"The column {name!r} is {type_name(column.type)}, which cannot be compared.",
            fix="choose another column.",
        )
    if match[4] is None and match[5].lower() == "null":
        value = pa.scalar(None, column.type)
    else:
        text = match[4].replace("''", "'") if match[4] is not None else match[5]
        value = parse_value(text, column)
    return _Comparison(column, match[3], value)


def _compare(comparison: _Comparison) -> Condition:
    column, operator, value = comparison.field, comparison.operator, comparison.value
    compare = _FUNCTIONS[operator]
    if not value.is_valid:
        return _compare_null(column, operator)
    if pa.types.is_floating(column.type) and value.as_py() != value.as_py():
        return _compare_nan(column, operator)
    if pa.types.is_floating(column.type) and operator in {">", ">=", "!=", "<>"}:
        return lambda rows: pc.fill_null(
            pc.or_(compare(rows[column.name], value), pc.is_nan(rows[column.name])), False
        )
    return lambda rows: pc.fill_null(compare(rows[column.name], value), False)


def _compare_nan(column: pa.Field, operator: str) -> Condition:
    """A comparison with NaN, which equals itself and is larger than all numbers, as in Spark."""
    if operator in {"=", ">="}:
        return lambda rows: pc.fill_null(pc.is_nan(rows[column.name]), False)
    if operator == ">":
        return lambda rows: pc.and_(pc.is_null(rows[column.name]), pc.is_valid(rows[column.name]))
    if operator == "<=":
        return lambda rows: pc.is_valid(rows[column.name])
    return lambda rows: pc.fill_null(pc.invert(pc.is_nan(rows[column.name])), False)


def _compare_null(field: pa.Field, operator: str) -> Condition:
    """A comparison with null, which a key column of an outer join's result can be."""
    if operator == "=":
        return lambda rows: rows[field.name].is_null()
    if operator in {"!=", "<>"}:
        return lambda rows: rows[field.name].is_valid()
    raise InputError(
        f"The column {field.name!r} is compared with null, which has no order.", fix="use = or !=."
    )
