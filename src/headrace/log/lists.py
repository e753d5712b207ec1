"""The insides of Arrow's lists and maps, as they are whatever the slicing: elements without gaps, and the offsets that go with them.

`json_text.py` and `row_arrays.py` take such columns apart with it and put them together again.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def compact_offsets(array: pa.Array) -> pa.Int32Array:
    """Where the elements of each list or map start, counted in `elements` or `entries`; a null has none."""
    lengths = np.diff(array.offsets.to_numpy()) if pa.types.is_map(array.type) else pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    if pa.types.is_map(array.type) and array.null_count:
        lengths = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def elements(array: pa.Array) -> pa.Array:
    """The elements of all lists, one after the other."""
    return array.flatten()


def entries(array: pa.MapArray) -> tuple[pa.Array, pa.Array]:
    """The keys and the values of all maps, one after the other."""
    if array.null_count:
        array = array.drop_null()  # a null may have entries too, and they do not count
    offsets = array.offsets
    start, stop = offsets[0].as_py(), offsets[-1].as_py()
    return array.keys.slice(start, stop - start), array.items.slice(start, stop - start)
