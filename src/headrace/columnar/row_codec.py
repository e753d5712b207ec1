"""Values of any Arrow type as bytes, one by one, and back, whole columns at a time: how states that
have no fixed width are stored.

| type | bytes of a value |
|---|---|
| fixed width | as Arrow has it, little-endian; BOOLEAN one byte |
| STRING, BINARY | as they are |
| STRUCT | for each part: 1 if it is there (else 0); its length if it varies, in 4 bytes; its bytes
|
| ARRAY | how many, in 4 bytes; for each 1 if it is there; for each its length if it varies; the
bytes of all |
| MAP | as an ARRAY of STRUCT |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import Ints, Mask, fixed_width, offsets_of, runs

Data = npt.NDArray[np.uint8]
_NOTHING = pa.scalar(b"", pa.large_binary())


def encode(array: pa.Array) -> list[bytes]:
    """The bytes of each value. A null has none: the one who stores it must know."""
    encoded: list[bytes] = encode_array(array).to_pylist()
    return encoded


def encode_array(array: pa.Array) -> pa.Array:
    """The same as a column of large binary."""
    return _encoded(array)


def decode(values: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    """The values whose bytes these are; none of them null."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    data = np.frombuffer(b"".join(values), np.uint8) if len(values) else np.zeros(0, np.uint8)
    return _decoded(kind, data, np.cumsum(lengths) - lengths, lengths)


def decode_array(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same from a column of large binary, none null. Of a struct its first parts can be read
    alone: give a struct of those.
    """
    offsets = _large_offsets(values)
    data = (
        np.frombuffer(values.buffers()[2], np.uint8)
        if len(values) and values.buffers()[2] is not None
        else np.zeros(0, np.uint8)
    )
    return _decoded(kind, data, offsets[:-1], np.diff(offsets))


def width_of(kind: pa.DataType) -> int | None:
    """How many bytes each value has; None if that varies."""
    if pa.types.is_boolean(kind):
        return 1
    return (
        kind.bit_width // 8 if pa.types.is_primitive(kind) or pa.types.is_decimal128(kind) else None
    )


# Writing


def _encoded(array: pa.Array) -> pa.Array:
    kind = array.type
    if (width := width_of(kind)) is not None:
        return _fixed(array, width)
    if pa.types.is_struct(kind):
        children = [pc.struct_field(array, at) for at in range(kind.num_fields)]
        return _joined([piece for child in children for piece in _part(child)], len(array))
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _list(_as_list(array))
    return array.cast(pa.binary()).fill_null(b"").cast(pa.large_binary())


def _fixed(array: pa.Array, width: int) -> pa.Array:
    if pa.types.is_boolean(array.type):
        data = array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint8)
    else:
        data = fixed_width(array, np.uint8).reshape(len(array), width)
        if array.null_count:
            data = np.where(_valid(array)[:, None], data, np.uint8(0))
    return _binary(data, np.arange(len(array) + 1) * width)


def _part(child: pa.Array) -> list[pa.Array]:
    """A struct's part: whether it is there, its length if it varies, its bytes."""
    there, encoded = _bytes_of(_valid(child).astype(np.uint8)), _encoded(child)
    return (
        [there, encoded]
        if width_of(child.type) is not None
        else [there, _bytes_of(pc.binary_length(encoded).to_numpy().astype("<u4")), encoded]
    )


def _list(array: pa.Array) -> pa.Array:
    """Sections of all lists side by side, then put together list by list: bytes of neighbours need
    no move.
    """
    offsets, child = offsets_of(array), array.values
    if array.null_count:
        array = array.fill_null(pa.scalar([], array.type))
        offsets, child = offsets_of(array), array.values
    first, last = int(offsets[0]), int(offsets[-1])
    child, offsets = child.slice(first, last - first), offsets - first
    encoded = _encoded(child)
    sections = [
        _bytes_of(np.diff(offsets).astype("<u4")),
        _binary(_valid(child).astype(np.uint8), offsets),
    ]
    if width_of(child.type) is None:
        sections.append(_binary(pc.binary_length(encoded).to_numpy().astype("<u4"), 4 * offsets))
    starts = _large_offsets(encoded)
    sections.append(
        pa.LargeBinaryArray.from_buffers(
            pa.large_binary(),
            len(array),
            [None, pa.py_buffer(starts[offsets]), encoded.buffers()[2]],
        )
    )
    return _joined(sections, len(array))


def _as_list(array: pa.Array) -> pa.Array:
    return array.cast(pa.list_(_entry(array.type))) if pa.types.is_map(array.type) else array


def _entry(kind: pa.MapType) -> pa.DataType:
    return pa.struct(
        [pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]
    )


def _joined(pieces: list[pa.Array], count: int) -> pa.Array:
    if not pieces:
        return _binary(np.zeros(0, np.uint8), np.zeros(count + 1, np.int64))
    return pc.binary_join_element_wise(*pieces, _NOTHING) if len(pieces) > 1 else pieces[0]


def _bytes_of(values: npt.NDArray[np.generic]) -> pa.Array:
    return _binary(values, np.arange(len(values) + 1) * values.dtype.itemsize)


def _binary(values: npt.NDArray[np.generic], offsets: Ints) -> pa.Array:
    buffers = [
        None,
        pa.py_buffer(offsets.astype(np.int64)),
        pa.py_buffer(np.ascontiguousarray(values)),
    ]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _large_offsets(array: pa.Array) -> Ints:
    return (
        np.frombuffer(array.buffers()[1], np.int64, count=len(array) + 1, offset=array.offset * 8)
        if len(array)
        else np.zeros(1, np.int64)
    )


def _valid(array: pa.Array) -> Mask:
    valid: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


# Reading


def _decoded(kind: pa.DataType, data: Data, starts: Ints, lengths: Ints) -> pa.Array:
    if (width := width_of(kind)) is not None:
        return _fixed_from(kind, _fixed_at(data, starts, width))
    if pa.types.is_struct(kind):
        return _struct_from(kind, data, starts)
    if pa.types.is_list(kind):
        return _list_from(kind, data, starts)
    if pa.types.is_map(kind):
        entries = _list_from(pa.list_(_entry(kind)), data, starts)
        return pa.MapArray.from_arrays(
            entries.offsets, entries.values.field(0), entries.values.field(1), type=kind
        )
    return cut_out(data, starts, lengths).cast(pa.binary()).cast(kind)


def _fixed_from(kind: pa.DataType, data: Data) -> pa.Array:
    if pa.types.is_boolean(kind):
        return pa.array(data != 0)
    return pa.Array.from_buffers(kind, len(data) * 8 // kind.bit_width, [None, pa.py_buffer(data)])


def _struct_from(kind: pa.StructType, data: Data, starts: Ints) -> pa.Array:
    at = starts.copy()
    children = []
    for field in kind:
        there = data[at] != 0
        at += 1
        width = width_of(field.type)
        if width is None:
            lengths = _integers_at(data, at)
            at += 4
        else:
            lengths = np.full(len(at), width)
        children.append(_where(there, _decoded(field.type, data, at, lengths)))
        at += lengths
    return (
        pa.StructArray.from_arrays(children, fields=list(kind))
        if children
        else pa.array([{}] * len(starts), kind)
    )


def _list_from(kind: pa.ListType, data: Data, starts: Ints) -> pa.Array:
    counts = _integers_at(data, starts)
    at = starts + 4
    offsets = np.append(0, np.cumsum(counts))
    there = _gathered(data, at, counts) != 0
    at = at + counts
    width = width_of(kind.value_type)
    if width is None:
        lengths = _gathered(data, at, 4 * counts).view("<u4").astype(np.int64)
        at = at + 4 * counts
    else:
        lengths = np.full(int(offsets[-1]), width)
    within = np.append(0, np.cumsum(lengths))
    element_starts = np.repeat(at - within[offsets[:-1]], counts) + within[:-1]
    child = _where(there, _decoded(kind.value_type, data, element_starts, lengths))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), child, type=kind)


def _where(there: Mask, values: pa.Array) -> pa.Array:
    return values if there.all() else values.take(pa.array(np.arange(len(values)), mask=~there))


def _integers_at(data: Data, starts: Ints) -> Ints:
    return _fixed_at(data, starts, 4).view("<u4").astype(np.int64)


def _gathered(data: Data, starts: Ints, lengths: Ints) -> Data:
    """The bytes of many runs, side by side."""
    return data[runs(starts, lengths)]


def _fixed_at(data: Data, starts: Ints, width: int) -> Data:
    """The bytes of many runs of one width, side by side."""
    if not len(starts):
        return np.zeros(0, np.uint8)
    return np.lib.stride_tricks.sliding_window_view(data, width)[starts].reshape(-1)


def cut_out(data: Data, starts: Ints, lengths: Ints) -> pa.Array:
    """The bytes of many runs as a column of large binary. The runs lie one behind the other,
    perhaps with gaps: every second piece is one of them.
    """
    offsets = np.zeros(2 * len(starts), np.int64)
    offsets[0::2], offsets[1::2] = starts, starts + lengths
    pieces = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        max(len(offsets) - 1, 0),
        [None, pa.py_buffer(offsets), pa.py_buffer(data)],
    )
    return pieces.take(pa.array(np.arange(0, len(offsets), 2)))
