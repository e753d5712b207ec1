"""Values of any Arrow type as bytes, and back, a whole column at a time. State without a fixed
width is stored in this form.

The bytes of a value, by type:

- fixed width: as in Arrow, little-endian; a BOOLEAN takes one byte
- STRING, BINARY: unchanged
- STRUCT: for each field a presence byte (1 or 0), its length in 4 bytes if it varies, its bytes
- ARRAY: the count in 4 bytes; a presence byte for each element; each element's length in 4 bytes if
  it varies; the bytes of all elements
- MAP: as an ARRAY of STRUCT
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.buffers import (
    Ints,
    Mask,
    byte_width,
    expand_ranges,
    fixed_width_values,
    offsets_of,
)

Data = npt.NDArray[np.uint8]


def encode(array: pa.Array) -> list[bytes]:
    """The bytes of each value. A null gives no bytes: the caller records separately that it is
    null.
    """
    encoded: list[bytes] = encode_array(array).to_pylist()
    return encoded


def encode_array(array: pa.Array) -> pa.Array:
    """The bytes of each value as a large-binary column; empty for a null."""
    kind = array.type
    if (width := byte_width(kind)) is not None:
        if pa.types.is_boolean(kind):
            data = array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint8)
        else:
            data = fixed_width_values(array, np.uint8).reshape(len(array), width)
            if array.null_count:
                data = np.where(_valid(array)[:, None], data, np.uint8(0))
        return _binary(data, np.arange(len(array) + 1) * width)
    if pa.types.is_struct(kind):
        children = [pc.struct_field(array, at) for at in range(kind.num_fields)]
        return _join([piece for child in children for piece in _field_pieces(child)], len(array))
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return _encode_lists(
            array.cast(pa.list_(_entry_type(kind))) if pa.types.is_map(kind) else array
        )
    return array.cast(pa.binary()).fill_null(b"").cast(pa.large_binary())


def decode(values: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    """The inverse of `encode`, for values none of which was null."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    data = np.frombuffer(b"".join(values), np.uint8) if len(values) else np.zeros(0, np.uint8)
    return _decode(kind, data, np.cumsum(lengths) - lengths, lengths)


def decode_array(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """The inverse of `encode_array`, for a large-binary column without nulls. To read only the
    first fields of a struct, pass a struct type with only those.
    """
    offsets = _large_offsets(values)
    data = (
        np.frombuffer(values.buffers()[2], np.uint8)
        if len(values) and values.buffers()[2] is not None
        else np.zeros(0, np.uint8)
    )
    return _decode(kind, data, offsets[:-1], np.diff(offsets))


# Encoding


def _field_pieces(child: pa.Array) -> list[pa.Array]:
    """A field of a struct as columns of bytes: presence, length if it varies, content."""
    presence = _bytes_of(_valid(child).astype(np.uint8))
    encoded = encode_array(child)
    if byte_width(child.type) is not None:
        return [presence, encoded]
    return [presence, _bytes_of(pc.binary_length(encoded).to_numpy().astype("<u4")), encoded]


def _encode_lists(array: pa.Array) -> pa.Array:
    """Encode each section (counts, presence, lengths, content) for all lists at once, then join the
    sections list by list. Elements of one list are adjacent already, so no bytes are moved.
    """
    offsets, child = offsets_of(array), array.values
    if array.null_count:
        array = array.fill_null(pa.scalar([], array.type))
        offsets, child = offsets_of(array), array.values
    first, last = int(offsets[0]), int(offsets[-1])
    child, offsets = child.slice(first, last - first), offsets - first
    encoded = encode_array(child)
    sections = [
        _bytes_of(np.diff(offsets).astype("<u4")),
        _binary(_valid(child).astype(np.uint8), offsets),
    ]
    if byte_width(child.type) is None:
        sections.append(_binary(pc.binary_length(encoded).to_numpy().astype("<u4"), 4 * offsets))
    starts = _large_offsets(encoded)
    sections.append(
        pa.LargeBinaryArray.from_buffers(
            pa.large_binary(),
            len(array),
            [None, pa.py_buffer(starts[offsets]), encoded.buffers()[2]],
        )
    )
    return _join(sections, len(array))


def _entry_type(kind: pa.MapType) -> pa.DataType:
    return pa.struct(
        [pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]
    )


def _join(pieces: list[pa.Array], count: int) -> pa.Array:
    if not pieces:
        return _binary(np.zeros(0, np.uint8), np.zeros(count + 1, np.int64))
    if len(pieces) == 1:
        return pieces[0]
    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.large_binary()))


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


# Decoding


def _decode(kind: pa.DataType, data: Data, starts: Ints, lengths: Ints) -> pa.Array:
    if (width := byte_width(kind)) is not None:
        return _decode_fixed(kind, _gather_fixed(data, starts, width))
    if pa.types.is_struct(kind):
        return _decode_structs(kind, data, starts)
    if pa.types.is_list(kind):
        return _decode_lists(kind, data, starts)
    if pa.types.is_map(kind):
        entries = _decode_lists(pa.list_(_entry_type(kind)), data, starts)
        return pa.MapArray.from_arrays(
            entries.offsets, entries.values.field(0), entries.values.field(1), type=kind
        )
    return gather_ranges(data, starts, lengths).cast(pa.binary()).cast(kind)


def _decode_fixed(kind: pa.DataType, data: Data) -> pa.Array:
    if pa.types.is_boolean(kind):
        return pa.array(data != 0)
    return pa.Array.from_buffers(kind, len(data) * 8 // kind.bit_width, [None, pa.py_buffer(data)])


def _decode_structs(kind: pa.StructType, data: Data, starts: Ints) -> pa.Array:
    at = starts.copy()
    children = []
    for field in kind:
        is_present = data[at] != 0
        at += 1
        width = byte_width(field.type)
        if width is None:
            lengths = _integers_at(data, at)
            at += 4
        else:
            lengths = np.full(len(at), width)
        children.append(_with_nulls(is_present, _decode(field.type, data, at, lengths)))
        at += lengths
    return (
        pa.StructArray.from_arrays(children, fields=list(kind))
        if children
        else pa.array([{}] * len(starts), kind)
    )


def _decode_lists(kind: pa.ListType, data: Data, starts: Ints) -> pa.Array:
    counts = _integers_at(data, starts)
    at = starts + 4
    offsets = np.append(0, np.cumsum(counts))
    is_present = data[expand_ranges(at, counts)] != 0
    at = at + counts
    width = byte_width(kind.value_type)
    if width is None:
        lengths = data[expand_ranges(at, 4 * counts)].view("<u4").astype(np.int64)
        at = at + 4 * counts
    else:
        lengths = np.full(int(offsets[-1]), width)
    within = np.append(0, np.cumsum(lengths))
    element_starts = np.repeat(at - within[offsets[:-1]], counts) + within[:-1]
    child = _with_nulls(is_present, _decode(kind.value_type, data, element_starts, lengths))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), child, type=kind)


def _with_nulls(is_present: Mask, values: pa.Array) -> pa.Array:
    if is_present.all():
        return values
    return values.take(pa.array(np.arange(len(values)), mask=~is_present))


def _integers_at(data: Data, starts: Ints) -> Ints:
    return _gather_fixed(data, starts, 4).view("<u4").astype(np.int64)


def _gather_fixed(data: Data, starts: Ints, width: int) -> Data:
    """The bytes of many ranges of the same width, concatenated."""
    if not len(starts):
        return np.zeros(0, np.uint8)
    return np.lib.stride_tricks.sliding_window_view(data, width)[starts].reshape(-1)


def gather_ranges(data: Data, starts: Ints, lengths: Ints) -> pa.Array:
    """The bytes of many ranges as a large-binary column, without a copy of the bytes between them.

    The ranges ascend and do not overlap. The column over all their bounds alternates between a
    range and the gap after it; taking every second element leaves the ranges.
    """
    offsets = np.zeros(2 * len(starts), np.int64)
    offsets[0::2], offsets[1::2] = starts, starts + lengths
    ranges_and_gaps = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(),
        max(len(offsets) - 1, 0),
        [None, pa.py_buffer(offsets), pa.py_buffer(data)],
    )
    return ranges_and_gaps.take(pa.array(np.arange(0, len(offsets), 2)))
