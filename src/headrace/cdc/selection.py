"""Which columns and rows of a captured table its topic has: columns can be left out, masked and
hashed, and rows filtered.

    exclude=["customers.password"], hash=["customers.email"], where={"customers": "id > 1"}

    table          id  email    password          topic     id  email (SHA-256)
                   1   a@b.c    1234
                   2   d@e.f    5678                        2   87f2…

A rule names a column as `table.column`; the table may be a pattern, such as `*.password`. What a
rule hides does not get into the log: neither do the texts of such values in `_marks`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.cdc.base import CaptureSpec, TableShape
from headrace.columnar.columns import (
    CHANGE_FIELD,
    CHANGE_TYPE,
    DELETE,
    HIDDEN_FIELDS,
    INSERT,
    MARKS,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)
from headrace.errors import ConfigurationError, InputError, nearest
from headrace.expressions.evaluator import Node
from headrace.expressions.expression import parse_expression
from headrace.expressions.spark_subset import compile_to_arrow

_WILDCARDS = set("*?[")


@dataclass(frozen=True)
class CaptureSelection:
    """The rules of a capture.

    Attributes:
        include: Columns; of a table that one of them names, only those and the key.
        exclude: Columns that are left out.
        mask: By column, the text that stands in its place.
        hash: Columns that are replaced by the SHA-256 of the salt and the value's text, in hex.
        salt: In front of each value that is hashed.
        where: By table, a condition in Spark's SQL; only rows for which it is true are captured.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    mask: Mapping[str, str] = field(default_factory=dict)
    hash: tuple[str, ...] = ()
    salt: str = field(default="", repr=False)
    where: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in self._column_rules():
            if "." not in rule:
                raise InputError(
                    f"The rule {rule!r} names no table.",
                    fix=f"write it as table.column, as in {'orders.' + rule!r} or {'*.' + rule!r}.",
                )

    @property
    def is_empty(self) -> bool:
        return not any((*self._column_rules(), *self.where))

    def _column_rules(self) -> Iterator[str]:
        yield from (*self.include, *self.exclude, *self.mask, *self.hash)

    def check_tables(self, tables: Sequence[str]) -> None:
        """Check that each rule is about a captured table. Raises ConfigurationError."""
        rules = [rule.rpartition(".")[0] for rule in self._column_rules()]
        for pattern in (*rules, *self.where):
            if not any(_is_table(pattern, table) for table in tables):
                raise ConfigurationError(
                    f"A rule is about the table {pattern!r}, which is not captured:"
                    f" {nearest(pattern, tables)}",
                    fix="correct the name; else what it should hide would be captured.",
                )

    def of(self, shape: TableShape) -> TableSelection:
        """Return the rules of one table.

        Raises:
            ConfigurationError: A rule names a column that does not exist, hides a key, or a
                condition cannot be used.
        """
        names = [name for name, _ in shape.columns]
        included = _matching(self.include, shape)
        excluded = _matching(self.exclude, shape)
        hashed = _matching(self.hash, shape)
        masked = {
            name: text for rule, text in self.mask.items() for name in _matching((rule,), shape)
        }
        if included:
            excluded |= {*names} - included - {*shape.key} - {shape.copies}
        if hidden_key := (excluded | masked.keys()) & {*shape.key}:
            raise ConfigurationError(
                f"The column {min(hidden_key)!r} is part of the key of {shape.name}, so it can be"
                " neither left out nor masked.",
                fix="hash it, or choose other columns.",
            )
        conditions = [text for table, text in self.where.items() if _is_table(table, shape.name)]
        if len(conditions) > 1:
            raise ConfigurationError(
                f"where= has {len(conditions)} conditions for {shape.name}.",
                fix="join them by AND.",
            )
        return TableSelection(
            shape, excluded, masked, hashed, self.salt, conditions[0] if conditions else None
        )


def selection_of(capture: CaptureSpec) -> CaptureSelection:
    """Return the rules of a capture. Raises InputError if one cannot be read."""
    return CaptureSelection(
        include=capture.include,
        exclude=capture.exclude,
        mask=capture.mask,
        hash=capture.hash,
        salt=capture.salt,
        where=capture.where,
    )


def _is_table(pattern: str, table: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (table, table.partition(".")[2]) if name)


def _matching(rules: Sequence[str], shape: TableShape) -> set[str]:
    """Return the columns of a table that rules name."""
    names = [name for name, _ in shape.columns]
    found: set[str] = set()
    for rule in rules:
        table, _, column = rule.rpartition(".")
        if not _is_table(table, shape.name):
            continue
        matching = {name for name in names if fnmatchcase(name, column)}
        if not matching and not _WILDCARDS & {*rule}:
            raise ConfigurationError(
                f"The rule {rule!r} is about a column that {shape.name} does not have:"
                f" {nearest(column, names)}",
                fix=(
                    "correct the rule: the column may have been renamed, and would be captured as"
                    " it is. Then request a snapshot of the table."
                ),
            )
        found |= matching
    return found


class TableSelection:
    """The columns and rows of one table that its topic has."""

    def __init__(
        self,
        source: TableShape,
        excluded: set[str],
        masked: Mapping[str, str],
        hashed: set[str],
        salt: str,
        condition: str | None,
    ) -> None:
        self._masked = masked
        self._hashed = hashed
        self._salt = salt.encode()
        self._hidden = excluded | masked.keys() | hashed
        self._condition: Node | None = None
        self._condition_columns: set[str] = set()
        if condition is not None:
            self._set_condition(source, condition)
        replaced = {*masked, *hashed}
        columns = tuple(
            (name, "STRING" if name in replaced else kind)
            for name, kind in source.columns
            if name not in excluded
        )
        self.shape = replace(source, columns=columns)
        self.is_identity = not self._hidden and condition is None
        rules = [sorted(excluded), sorted(masked.items()), sorted(hashed), salt, condition]
        text = json.dumps(rules).encode()
        self.digest = "" if self.is_identity else hashlib.sha256(text).hexdigest()[:16]
        """Identifies the rules. When they change, the table is read again."""

    def _set_condition(self, source: TableShape, condition: str) -> None:
        where = f"where= of {source.name}"
        try:
            expression = parse_expression(condition, source.schema, where=where)
        except InputError as error:
            raise ConfigurationError(error.message, fix=error.fix) from error
        node = compile_to_arrow(expression, source.schema)
        if node is None or expression.type is None or not pa.types.is_boolean(expression.type):
            raise ConfigurationError(
                f"The condition {condition!r} of {source.name} is not one that a capture can"
                " compute.",
                fix=(
                    "compare columns, as in \"amount > 10 AND region = 'north'\"; filter by more in"
                    " a pipeline."
                ),
            )
        self._condition = node
        self._condition_columns = {
            name for name, _ in source.columns if name.lower() in condition.lower()
        }

    def apply(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows as the topic has them. Raises ConfigurationError if a value that a
        condition needs was not sent.
        """
        if self.is_identity or not rows.num_rows:
            return rows if self.is_identity else self._columns(rows)
        if self._condition is not None:
            rows = self._filtered(rows, self._condition)
        return self._columns(rows)

    def _columns(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        schema = self.shape.batch_schema
        arrays = []
        for column in schema.names:
            if column in self._masked:
                values = pa.repeat(self._masked[column], rows.num_rows)
                is_delete = pc.equal(rows.column(CHANGE_TYPE), DELETE)
                values = pc.if_else(is_delete, pa.scalar(None, pa.string()), values)
            elif column in self._hashed:
                values = hashed_values(rows.column(column), self._salt)
            elif column == MARKS:
                values = self._without_hidden(rows.column(column))
            else:
                values = rows.column(column)
            arrays.append(values)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _without_hidden(self, marks: pa.Array) -> pa.Array:
        """Return marks without those of hidden columns. That a hashed value is unchanged stays."""
        if marks.null_count == len(marks) or not self._hidden:
            return marks
        return pa.array([self._visible_marks(text) for text in marks.to_pylist()], pa.string())

    def _visible_marks(self, text: str | None) -> str | None:
        if text is None:
            return None
        marks = {
            name: mark
            for name, mark in json.loads(text).items()
            if name not in self._hidden or (name in self._hashed and "unchanged" in mark)
        }
        return json.dumps(marks, ensure_ascii=False) if marks else None

    # Rows

    def _filtered(self, rows: pa.RecordBatch, condition: Node) -> pa.RecordBatch:
        """Return the changes of the rows for which the condition is true. A row that it is not true
        for any more is deleted.
        """
        self._check_known(rows)
        values = condition.evaluate(rows)
        if isinstance(values, pa.Scalar):
            values = pa.repeat(values, rows.num_rows)
        is_true = pc.fill_null(values, False).to_numpy(zero_copy_only=False)
        changes = rows.column(CHANGE_TYPE)
        kinds = {
            kind: pc.equal(changes, kind).to_numpy(zero_copy_only=False)
            for kind in (INSERT, DELETE, UPDATE_PREIMAGE, UPDATE_POSTIMAGE)
        }
        before, after = kinds[UPDATE_PREIMAGE], kinds[UPDATE_POSTIMAGE]
        # A preimage is in front of its postimage, and goes unless both are true.
        next_is_true, was_true = np.roll(is_true, -1), np.roll(is_true, 1)
        comes = after & is_true & np.roll(before, 1) & ~was_true
        goes = after & ~is_true
        left = kinds[DELETE] | (kinds[INSERT] & is_true) | after | (before & is_true & next_is_true)
        if comes.any() or goes.any():
            rows = _as_deletes(rows, pa.array(goes), {*self.shape.key})
            new = pc.if_else(pa.array(goes), DELETE, pc.if_else(pa.array(comes), INSERT, changes))
            rows = rows.set_column(rows.schema.get_field_index(CHANGE_TYPE), CHANGE_FIELD, new)
        return rows if left.all() else rows.filter(pa.array(left))

    def _check_known(self, rows: pa.RecordBatch) -> None:
        marks = rows.column(MARKS)
        if marks.null_count == len(marks):
            return
        for text in marks.drop_null().to_pylist():
            unknown = [
                name
                for name, mark in json.loads(text).items()
                if name in self._condition_columns and "unchanged" in mark
            ]
            if unknown:
                raise ConfigurationError(
                    f"The condition of {self.shape.name} needs the column {unknown[0]!r}, which the"
                    " database did not send, since an update left its large value unchanged.",
                    fix=(
                        f"ALTER TABLE {self.shape.name} REPLICA IDENTITY FULL, then request a"
                        " snapshot of it; or choose another condition."
                    ),
                )


def _as_deletes(rows: pa.RecordBatch, mask: pa.Array, key: set[str]) -> pa.RecordBatch:
    """Return rows, of which some keep their key and the hidden columns only."""
    kept = key | {hidden.name for hidden in HIDDEN_FIELDS if hidden.name != MARKS} | {CHANGE_TYPE}
    arrays = [
        rows.column(name)
        if name in kept
        else pc.if_else(mask, pa.scalar(None, rows.schema.field(name).type), rows.column(name))
        for name in rows.schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)


def hashed_values(values: pa.Array, salt: bytes) -> pa.Array:
    """Return the SHA-256 of the salt and each value's text, in hex. Each value is hashed once."""
    encoded = values.dictionary_encode()
    distinct = encoded.dictionary
    if not pa.types.is_binary(distinct.type):
        distinct = distinct.cast(pa.string()).cast(pa.binary())
    digests = [hashlib.sha256(salt + value).hexdigest() for value in distinct.to_pylist()]
    return pa.array(digests, pa.string()).take(encoded.indices)
