"""What a subscriber wants of a view's rows and changes: those of one key, or those that meet a simple condition such as `amount >= 100 and region = eu`.

A condition is a comparison of a column with a value, or several joined by `and`. Of an update that crosses the condition only one half is wanted: the row appears (an insert) or
disappears (a delete), so that whoever keeps the rows that meet the condition is told exactly what happens to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import InputError, UnknownColumn
from headrace.log.api import CHANGE_TYPE, DELETE, INSERT, UPDATE, UPDATE_BEFORE
from headrace.log.schema import type_name
from headrace.serve.channels import Select
from headrace.serve.typed_text import typed

Condition = Callable[[pa.Table], pa.ChunkedArray]
_COMPARISON = re.compile(r"\s*(?:\"([^\"]+)\"|([^\s<>=!\"]+))\s*(<=|>=|!=|<>|=|<|>)\s*(?:'((?:[^']|'')*)'|(\S+))\s*")
_FUNCTIONS = {"=": pc.equal, "!=": pc.not_equal, "<>": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
MOST_TEXT = 1_000


def selection(name: str, schema: pa.Schema, key: Sequence[str], texts: Sequence[str], where: str | None, *, as_changes: bool = True) -> Select | None:
    """Of the rows of a view or a topic, those whose key begins with some values and that meet a condition. None if everything is wanted."""
    conditions = _key_conditions(name, schema, key, texts) if texts else []
    if where is not None:
        conditions += [_comparison(name, schema, part) for part in _parts(where)]
    if not conditions:
        return None
    return Selection(name, tuple(texts), where, as_changes, tuple(conditions))


@dataclass(frozen=True)
class Selection:
    """What someone wants, by the text in which they said it."""

    name: str
    key: tuple[str, ...]
    where: str | None
    as_changes: bool
    conditions: tuple[Condition, ...] = field(compare=False, repr=False)

    def __call__(self, rows: pa.Table) -> pa.Table:
        wanted = self.conditions[0](rows)
        for condition in self.conditions[1:]:
            wanted = pc.and_(wanted, condition(rows))
        if not pc.any(wanted).as_py():
            return rows.slice(0, 0)  # the usual case for those who follow one key
        if not self.as_changes or CHANGE_TYPE not in rows.schema.names:
            return rows.filter(wanted)
        return _crossing(rows, wanted.to_numpy().astype(np.bool_)).filter(wanted)


def _key_conditions(name: str, schema: pa.Schema, key: Sequence[str], texts: Sequence[str]) -> list[Condition]:
    if not key:
        raise InputError(f"The view {name!r} is a stream: its rows have no key.", fix="choose rows with where=.")
    if len(texts) > len(key):
        raise InputError(f"{len(texts)} values came for the key of the view {name!r}, which is ({', '.join(key)}).", fix="give key= once for each.")
    return [_compare(schema.field(column), "=", text) for column, text in zip(key, texts, strict=False)]


def _parts(where: str) -> list[str]:
    """Cut at `and`, but not inside quotes."""
    if len(where) > MOST_TEXT:
        raise InputError(f"The condition has {len(where):,} characters; the most is {MOST_TEXT:,}.")
    return re.split(r"\s+and\s+(?=(?:[^']*'[^']*')*[^']*$)", where, flags=re.IGNORECASE)


def _comparison(of: str, schema: pa.Schema, text: str) -> Condition:
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise InputError(
            f"{text!r} is no condition.", fix="write COLUMN = VALUE, with =, !=, <, <=, > or >=, joined by `and`; text with blanks in single quotes."
        )
    name = found[1] or found[2]
    if name not in schema.names:
        raise UnknownColumn(name, schema.names, where=repr(of))
    return _compare(schema.field(name), found[3], found[4].replace("''", "'") if found[4] is not None else found[5])


def _compare(field: pa.Field, operator: str, text: str) -> Condition:
    if pa.types.is_nested(field.type):
        raise InputError(f"The column {field.name!r} is {type_name(field.type)}, which cannot be compared.", fix="choose another column.")
    value, compare = typed(text, field), _FUNCTIONS[operator]
    if not value.is_valid:
        return _null(field, operator)
    return lambda rows: pc.fill_null(compare(rows[field.name], value), False)


def _null(field: pa.Field, operator: str) -> Condition:
    """A part of a key can be null, in an outer join's result."""
    if operator == "=":
        return lambda rows: rows[field.name].is_null()
    if operator in {"!=", "<>"}:
        return lambda rows: rows[field.name].is_valid()
    raise InputError(f"The column {field.name!r} is compared with null, which has no order.", fix="use = or !=.")


def _crossing(rows: pa.Table, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pa.Table:
    """An update's halves stand side by side; one whose other half is not wanted becomes an insert or a delete."""
    kinds = rows[CHANGE_TYPE]
    before, after = (pc.equal(kinds, kind).to_numpy().astype(np.bool_) for kind in (UPDATE_BEFORE, UPDATE))
    next_wanted, last_wanted = np.append(wanted[1:], False), np.insert(wanted[:-1], 0, False)
    disappears, appears = pa.array(before & ~next_wanted), pa.array(after & ~last_wanted)
    crossed = pc.if_else(disappears, DELETE, pc.if_else(appears, INSERT, kinds))
    return rows.set_column(rows.schema.get_field_index(CHANGE_TYPE), CHANGE_TYPE, crossed)
