"""How a topic's columns change, and what has become of the columns that it had before.

Stored rows are never rewritten when a schema changes: a row keeps the columns that it was appended
with, and a reader converts it. So the names of columns identify them for good. A name that was
renamed or dropped is never given to another column, as in Protobuf and Avro:

    create   id INT, name STRING           {"id": 1, "name": "Ada"}
    add      note STRING
    alter    id BIGINT                     {"id": 3000000000, "name": "Eve", "note": "x"}
    rename   name to full_name             {"id": 3, "full_name": "Bob", "note": null}

    read     {"id": 1, "full_name": "Ada", "note": null}, {"id": 3000000000, "full_name": "Eve", …}

`SchemaHistory` is what the log stores of it beside the schema; `evolve` checks a change and applies
it. `headrace.log.rows` uses the history to accept rows of older producers, the readers of both
backends to find columns in older rows, and pipelines to accept older declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from headrace.errors import IncompatibleChange, UnknownColumn
from headrace.types.ddl import SPARK_METADATA_KEY, TYPE_KEY
from headrace.types.schema import is_spatial, is_variant, parse_schema, to_ddl, type_name
from headrace.types.values import length_limit, time_precision

MAX_CHANGES = 1_000
"""How many changes of columns a topic remembers; every segment's header has them."""
_INTEGER_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""The decimal digits that an integer needs, by its number of bits."""


@dataclass(frozen=True)
class SchemaHistory:
    """What has become of a topic's columns since it was created.

    Example:
        ```python
        history = log.topic("orders").schema_history
        history.present_name("customer")  # "customer_id", if it was renamed
        ```
    """

    added: tuple[str, ...] = ()
    """Columns that were added: rows may leave them out."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(former name, present name) of columns that were renamed."""
    widened: tuple[tuple[str, str], ...] = ()
    """(column, former definition such as `INT NOT NULL`) of columns whose type changed."""
    dropped: tuple[tuple[str, str], ...] = ()
    """(name, last type) of columns that were dropped."""

    def __bool__(self) -> bool:
        return bool(self.added or self.renamed or self.widened or self.dropped)

    def present_name(self, name: str) -> str:
        """The present name of a column.

        Args:
            name: A name that the column has or had.

        Returns:
            The name that it has now; the given one if it was not renamed.

        Example:
            ```python
            history.present_name("customer")  # "customer_id"
            ```
        """
        return dict(self.renamed).get(name, name)

    def former_names(self, name: str) -> list[str]:
        """The names that a column had before.

        Args:
            name: The column's present name.

        Returns:
            Its former names, the oldest first; empty if it was not renamed.

        Example:
            ```python
            history.former_names("customer_id")  # ["customer"]
            ```
        """
        return [former for former, present in self.renamed if present == name]

    def is_dropped(self, name: str) -> bool:
        """Whether a name is that of a column that was dropped.

        Args:
            name: A name.

        Returns:
            True if there was such a column.

        Example:
            ```python
            history.is_dropped("fax")  # True
            ```
        """
        return any(name == dropped for dropped, _ in self.dropped)

    def dump(self) -> dict[str, Any]:
        """Internal: the history as JSON."""
        return {
            "added": list(self.added),
            "renamed": [list(entry) for entry in self.renamed],
            "widened": [list(entry) for entry in self.widened],
            "dropped": [list(entry) for entry in self.dropped],
        }

    @classmethod
    def load(cls, dump: Mapping[str, Any]) -> SchemaHistory:
        """Internal: the inverse of `dump`."""
        return cls(
            added=tuple(dump["added"]),
            renamed=tuple((former, present) for former, present in dump["renamed"]),
            widened=tuple((name, definition) for name, definition in dump["widened"]),
            dropped=tuple((name, kind) for name, kind in dump["dropped"]),
        )


NO_HISTORY = SchemaHistory()
"""The history of a topic whose columns have never changed."""


def definition(field: pa.Field) -> str:
    """A column's type in DDL, with NOT NULL and without its name and comment."""
    metadata = {
        name: value for name, value in (field.metadata or {}).items() if name != SPARK_METADATA_KEY
    }
    plain = field.with_name("c").with_metadata(metadata or None)
    return to_ddl(pa.schema([plain])).removeprefix("c ")


# Changes


@dataclass(frozen=True)
class ColumnChange:
    """A change of a topic's columns, as a user asks for it."""

    add: str | None = None
    """Nullable columns to add, as DDL."""
    alter: str | None = None
    """Columns with their new, wider types, as DDL."""
    drop: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    """(present name, new name)."""

    @classmethod
    def of(
        cls,
        *,
        add: str | None = None,
        alter: str | None = None,
        drop: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> ColumnChange:
        return cls(
            add=add,
            alter=alter,
            drop=(drop,) if isinstance(drop, str) else tuple(drop or ()),
            rename=tuple((rename or {}).items()),
        )

    def __bool__(self) -> bool:
        return bool(self.add or self.alter or self.drop or self.rename)


def evolve(
    schema: pa.Schema,
    history: SchemaHistory,
    change: ColumnChange,
    *,
    key: tuple[str, ...],
    where: str,
) -> tuple[pa.Schema, SchemaHistory]:
    """A declared schema and its history after a change. All names in a change are those of the
    schema before it.

    Raises:
        IncompatibleChange: Stored rows could not be read, or columns would be mixed up.
        UnknownColumn: There is no column of a name.
        BadSchema: A DDL cannot be read.
    """
    fields = list(schema)
    if change.alter is not None:
        for wanted in parse_schema(change.alter):
            position = _position(fields, wanted.name, where)
            before = fields[position]
            _check_not_key(before.name, key, where, "its type cannot change")
            fields[position] = _widened(before, wanted, where)
            if definition(before) != definition(fields[position]):
                entry = (before.name, definition(before))
                known = [each for each in history.widened if each != entry]
                history = replace(history, widened=(*known, entry))
    for name in change.drop:
        field = fields.pop(_position(fields, name, where))
        _check_not_key(name, key, where, "it cannot be dropped")
        history = _without(history, name, type_name(field.type))
    for name, new_name in change.rename:
        position = _position(fields, name, where)
        _check_not_key(name, key, where, "it cannot be renamed")
        if new_name == name:
            continue
        others = [field for field in fields if field.name != name]
        _check_free(new_name, others, history, column=name, where=where)
        fields[position] = fields[position].with_name(new_name)
        history = _with_new_name(history, name, new_name)
    if change.add is not None:
        for field in parse_schema(change.add):
            _check_free(field.name, fields, history, column=None, where=where)
            if not field.nullable:
                raise IncompatibleChange(
                    f"The new column {field.name!r} is NOT NULL, but rows stored before have no"
                    " value for it.",
                    fix="add it without NOT NULL.",
                )
            fields.append(field)
            history = replace(history, added=(*history.added, field.name))
    if not fields:
        raise IncompatibleChange(
            f"{where} would have no column left.", fix="keep a column, or leave the topic as it is."
        )
    _check_count(history, where)
    evolved = pa.schema(fields, schema.metadata)
    parse_schema(to_ddl(evolved))  # refuses reserved names
    return evolved, history


def _position(fields: list[pa.Field], name: str, where: str) -> int:
    names = [field.name for field in fields]
    if name not in names:
        raise UnknownColumn(name, names, where=where)
    return names.index(name)


def _check_not_key(name: str, key: tuple[str, ...], where: str, why: str) -> None:
    if name in key:
        raise IncompatibleChange(
            f"{where} has the key {', '.join(key)}: {name!r} decides in which partition a row is,"
            f" and which rows belong together, so {why}.",
            fix="create another topic with the key you want and copy the rows.",
        )


def _check_free(
    name: str,
    fields: Iterable[pa.Field],
    history: SchemaHistory,
    *,
    column: str | None,
    where: str,
) -> None:
    """Refuse a name that a column has, or that another one had: stored rows still have it."""
    lower = name.lower()
    if any(field.name.lower() == lower for field in fields):
        raise IncompatibleChange(
            f"There is a column {name!r} already.",
            fix="choose another name; a type is widened with alter_columns.",
        )
    own = set() if column is None else set(history.former_names(column))
    retired = [former for former, _ in (*history.renamed, *history.dropped) if former not in own]
    if any(former.lower() == lower for former in retired):
        raise IncompatibleChange(
            f"{where} had another column {name!r}, and rows that are stored still have its values:"
            " they would become values of the new one.",
            fix="choose another name.",
        )


def _without(history: SchemaHistory, name: str, kind: str) -> SchemaHistory:
    """A history after a column was dropped: all its names are retired."""
    names = [*history.former_names(name), name]
    return SchemaHistory(
        added=tuple(each for each in history.added if each != name),
        renamed=tuple(entry for entry in history.renamed if entry[1] != name),
        widened=tuple(entry for entry in history.widened if entry[0] != name),
        dropped=(*history.dropped, *((each, kind) for each in names)),
    )


def _with_new_name(history: SchemaHistory, name: str, new_name: str) -> SchemaHistory:
    """A history after a column was renamed. It may have its former name again."""
    formers = [*history.former_names(name), name]
    others = [entry for entry in history.renamed if entry[1] != name]
    own = [(former, new_name) for former in formers if former != new_name]
    return replace(
        history,
        added=tuple(new_name if each == name else each for each in history.added),
        renamed=(*others, *own),
        widened=tuple((new_name if of == name else of, was) for of, was in history.widened),
    )


def _check_count(history: SchemaHistory, where: str) -> None:
    count = sum(
        len(part) for part in (history.added, history.renamed, history.widened, history.dropped)
    )
    if count > MAX_CHANGES:
        raise IncompatibleChange(
            f"{where} has changed more than {MAX_CHANGES} columns since it was created.",
            fix="create another topic with the columns you want and copy the rows.",
        )


# Widening


def _widened(before: pa.Field, wanted: pa.Field, where: str) -> pa.Field:
    """A column with its new definition. Its comment stays unless there is a new one."""
    if before.nullable and not wanted.nullable:
        raise IncompatibleChange(
            f"The column {before.name!r} of {where[0].lower()}{where[1:]} may be null, and stored"
            " rows may have nulls: it cannot become NOT NULL.",
            fix="leave out NOT NULL.",
        )
    if not widens(before, wanted):
        raise IncompatibleChange(
            f"The column {before.name!r} of {where[0].lower()}{where[1:]} is {definition(before)};"
            f" not every value of it is a {definition(wanted)}.",
            fix=(
                "name a wider type: a larger integer (or DOUBLE or a DECIMAL that has its digits),"
                " DOUBLE for FLOAT, a DECIMAL with more digits on both sides, a longer VARCHAR, or"
                " the type without NOT NULL. Any other change is a new column."
            ),
        )
    old, new = before.metadata or {}, wanted.metadata or {}
    if SPARK_METADATA_KEY in old and SPARK_METADATA_KEY not in new:
        wanted = wanted.with_metadata({**new, SPARK_METADATA_KEY: old[SPARK_METADATA_KEY]})
    return wanted


def widens(before: pa.Field, after: pa.Field) -> bool:
    """Whether every value of a column is a value of another one, at any depth."""
    if before.nullable and not after.nullable:
        return False
    old, new = before.type, after.type
    if any(is_variant(kind) or is_spatial(kind) for kind in (old, new)):
        return bool(old.equals(new, check_metadata=True))
    if pa.types.is_nested(old) or pa.types.is_nested(new):
        return _nested_widens(old, new)
    if old.equals(new):
        return _length_fits(before, after)
    if pa.types.is_integer(old):
        return _integer_widens(old, new)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        whole_digits = new.precision - new.scale
        return bool(new.scale >= old.scale and whole_digits >= old.precision - old.scale)
    return bool(pa.types.is_float32(old) and pa.types.is_float64(new))


def _length_fits(before: pa.Field, after: pa.Field) -> bool:
    """Whether two columns of one Arrow type differ at most in that the second takes longer texts,
    or finer times. Another collation or interval is another type.
    """
    names = [(field.metadata or {}).get(TYPE_KEY, b"") for field in (before, after)]
    if names[0] == names[1]:
        return True
    if not all(name.startswith((b"CHAR(", b"VARCHAR(", b"TIME(")) for name in names if name):
        return False
    for limit in (length_limit, time_precision):
        old, new = limit(before), limit(after)
        if new is not None and (old is None or old > new):
            return False
    return True


def _integer_widens(old: pa.DataType, new: pa.DataType) -> bool:
    if pa.types.is_decimal(new):
        return bool(new.precision - new.scale >= _INTEGER_DIGITS[old.bit_width])
    if pa.types.is_float64(new):
        return bool(old.bit_width <= 32)
    return bool(pa.types.is_integer(new) and old.bit_width <= new.bit_width)


def _nested_widens(old: pa.DataType, new: pa.DataType) -> bool:
    if old.id != new.id or old.num_fields != new.num_fields:
        return False
    if pa.types.is_map(old):  # the key of a map is part of the key's text
        return bool(old.key_type.equals(new.key_type)) and widens(old.item_field, new.item_field)
    if pa.types.is_list(old):
        return widens(old.value_field, new.value_field)
    return all(
        part.name == other.name and widens(part, other)
        for part, other in zip(old, new, strict=True)
    )


# Older declarations


def differences(
    declared: pa.Schema, schema: pa.Schema, history: SchemaHistory
) -> Iterator[tuple[str, str]]:
    """How a declaration differs from a topic's schema, beyond what the topic's history explains.

    Yields:
        (kind, text), with the kind "unknown" for a declared column that the topic lacks, "more" for
        one that the declaration lacks and that was not added later, "type" for another type, and
        "order" for another order of the same columns.
    """
    stored = {field.name: field for field in schema}
    present = [history.present_name(field.name) for field in declared]
    for field, name in zip(declared, present, strict=True):
        if name not in stored:
            was = " any more" if history.is_dropped(name) else ""
            yield "unknown", f"{field.name!r} is not in the topic{was}"
    for name in stored:
        if name not in present and name not in history.added:
            yield "more", f"{name!r} is in the topic only"
    for field, name in zip(declared, present, strict=True):
        known = stored.get(name)
        if known is None or _text(field, name) == _text(known, name):
            continue
        if (name, definition(field)) not in history.widened:
            yield "type", f"{_text(known, name)} is declared as {_text(field, field.name)}"
    if sorted(present) == sorted(stored) and present != list(stored):
        yield "order", "its columns have another order"


def _text(field: pa.Field, name: str) -> str:
    return to_ddl(pa.schema([field.with_name(name)]))
