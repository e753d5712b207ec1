"""Arrow columns of one type into another, only where every value stays the same; and what a schema demands beyond its types.

`rows.py` uses it for Arrow tables and pandas frames. Arrow's own casts are too willing (a bool becomes 1, a text is parsed), so what may become what is
a list here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.log.lists import compact_offsets, elements, entries
from headrace.log.row_values import Misfit, length_limit, time_precision

types = pa.types
_MS_PER_DAY = 24 * 3600 * 1000


def fit(array: pa.Array, field: pa.Field) -> pa.Array:
    """`array` as `field` wants it. Raises Misfit or one of Arrow's errors; `culprit` then finds the row."""
    fitted = array if array.type.equals(field.type) else cast(array, field)
    check(fitted, field)
    return fitted


def culprit(array: pa.Array, field: pa.Field, error: Exception, fits: Callable[[pa.Array, pa.Field], object] = fit) -> tuple[int, str]:
    """The first row that does not fit, and why, by halving: a look at every row on its own would take long. `error` is that of the whole."""
    reason, low, high = str(error), 0, len(array)
    while low < high:
        middle = (low + high) // 2
        try:
            fits(array.slice(low, middle + 1 - low), field)
            low = middle + 1
        except (Misfit, pa.ArrowException) as narrower:
            reason, high = str(narrower), middle
    return min(low, max(len(array) - 1, 0)), reason


# What a schema demands beyond its types


def needs_check(field: pa.Field) -> bool:
    """Whether arrays of exactly this type can still break the schema: a null where none may be, a text that is too long."""
    kind = field.type
    if not field.nullable or length_limit(field) is not None or time_precision(field) is not None:
        return True
    if types.is_map(kind):
        return True  # its keys
    return bool(types.is_nested(kind)) and any(needs_check(kind.field(position)) for position in range(kind.num_fields))


def check(array: pa.Array, field: pa.Field) -> None:
    """Refuse nulls where none may be, texts longer than declared, and times finer than declared, at any depth."""
    if not field.nullable and array.null_count:
        raise Misfit("it is null, but the column is NOT NULL")
    if (limit := length_limit(field)) is not None and (pc.max(pc.utf8_length(array)).as_py() or 0) > limit:
        raise Misfit(f"it has more than the {limit} characters declared")
    if (precision := time_precision(field)) is not None:
        _check_time(array, precision)
    for child, part in _children(array, field.type):
        try:
            check(child, part)
        except Misfit as error:
            raise Misfit(f"in {part.name!r}: {error}") from None


def _children(array: pa.Array, kind: pa.DataType) -> list[tuple[pa.Array, pa.Field]]:
    """The parts of a nested column that can break the schema. What lies beneath a null does not count."""
    if types.is_map(kind):
        parts = list(zip(entries(array), (kind.key_field, kind.item_field), strict=True))
    elif types.is_list(kind):
        parts = [(elements(array), kind.value_field)]
    elif types.is_struct(kind):
        present = array.drop_null() if array.null_count else array
        parts = list(zip(present.flatten(), kind, strict=True))
    else:
        return []
    return [(child, part) for child, part in parts if needs_check(part)]


def _check_time(array: pa.Array, precision: int) -> None:
    """NANOSECONDS % 10^(9 - precision) must be zero: Spark would cut the rest off in silence."""
    nanoseconds = array.drop_null().cast(pa.int64()).to_numpy()
    if np.any(nanoseconds % 10 ** (9 - precision)):
        raise Misfit(f"it is finer than the {precision} digits of a second declared")


# Casts that lose nothing


def cast(array: pa.Array, field: pa.Field) -> pa.Array:
    """`array` with the type of `field`, every value unchanged, or Misfit."""
    source, target = array.type, field.type
    if source.equals(target) and not types.is_nested(target):
        return array
    if types.is_null(source):
        return pa.nulls(len(array), target)
    if types.is_dictionary(source):
        return cast(array.dictionary_decode(), field)
    if types.is_run_end_encoded(source):
        return cast(pc.run_end_decode(array), field)
    if types.is_nested(target):
        return _cast_nested(array, field)
    for is_target, step in _CASTS:
        if is_target(target) and (fitted := step(array, target)) is not None:
            return fitted
    raise _mismatch(source, target)


def _mismatch(source: pa.DataType, target: pa.DataType) -> Misfit:
    return Misfit(f"the rows have it as Arrow's {source}, the topic as {target}, and that is not cast without loss or guessing")


Cast = Callable[[pa.Array, pa.DataType], pa.Array | None]


def _from(*sources: Callable[[pa.DataType], bool]) -> Cast:
    """A plain safe cast (Arrow checks overflow and lost digits), from some kinds of types only."""

    def step(array: pa.Array, target: pa.DataType) -> pa.Array | None:
        return array.cast(target) if any(is_source(array.type) for is_source in sources) else None

    return step


def _to_float32(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if not types.is_float64(array.type):
        return _from(types.is_integer, types.is_floating)(array, target)
    fitted = array.cast(target)
    same = pc.or_(pc.equal(fitted.cast(array.type), array), pc.is_nan(array))
    if pc.all(same).as_py() is False:
        raise Misfit("it has more digits than a FLOAT holds; round it to 32 bits first, or declare DOUBLE")
    return fitted


def _to_decimal(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if types.is_integer(array.type):
        array = array.cast(pa.decimal128(20, 0))
    return array.cast(target) if types.is_decimal(array.type) else None


def _to_date(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if not types.is_date64(array.type):
        return None
    if np.any(array.drop_null().cast(pa.int64()).to_numpy() % _MS_PER_DAY):
        raise Misfit("it is not a whole day")
    return array.cast(target)


def _to_timestamp(array: pa.Array, target: pa.DataType) -> pa.Array | None:
    if not types.is_timestamp(array.type):
        return None
    if target.tz is None and array.type.tz is not None:
        raise Misfit("it has a time zone, and a TIMESTAMP_NTZ has none")
    return array.cast(target)  # without a zone it is taken as UTC


_CASTS: tuple[tuple[Callable[[pa.DataType], bool], Cast], ...] = (
    (types.is_integer, _from(types.is_integer)),
    (types.is_float64, _from(types.is_integer, types.is_floating)),
    (types.is_float32, _to_float32),
    (types.is_decimal, _to_decimal),
    (types.is_string, _from(types.is_large_string, types.is_string_view)),
    (types.is_binary, _from(types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)),
    (types.is_date32, _to_date),
    (types.is_timestamp, _to_timestamp),
    (types.is_time64, _from(types.is_time)),
    (types.is_duration, _from(types.is_duration)),
)


def _cast_nested(array: pa.Array, field: pa.Field) -> pa.Array:
    source, target = array.type, field.type
    if types.is_struct(target) and types.is_struct(source):
        return _cast_struct(array, target)
    if types.is_map(target) and types.is_map(source):
        keys, items = entries(array)
        parts = cast(keys, target.key_field), cast(items, target.item_field)
        return pa.MapArray.from_arrays(compact_offsets(array), *parts, type=target, mask=_mask(array))
    if types.is_list(target) and not types.is_map(source) and _is_list(source):
        return pa.ListArray.from_arrays(compact_offsets(array), cast(elements(array), target.value_field), type=target, mask=_mask(array))
    raise _mismatch(source, target)


def _is_list(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view))


def _cast_struct(array: pa.StructArray, target: pa.StructType) -> pa.StructArray:
    present = [child.name for child in array.type]
    wanted = [child.name for child in target]
    if sorted(present) != sorted(wanted):
        raise Misfit(f"it has the fields {', '.join(present)}, not {', '.join(wanted)}")
    parts = array.flatten()
    children = [cast(parts[present.index(child.name)], child) for child in target]
    return pa.StructArray.from_arrays(children, fields=list(target), mask=_mask(array))


def _mask(array: pa.Array) -> pa.BooleanArray | None:
    return array.is_null() if array.null_count else None
