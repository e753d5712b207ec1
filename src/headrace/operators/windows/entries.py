"""How windows lie in the state: one entry for each group and window, found again by its group and window, or by its end.

| bytes of a name | what |
|---|---|
| 1 | `w` if the window waits to be told, `p` if it has been (or tells every change) |
| 8 | its end, big-endian in order; so a scan finds what a clock has passed |
| 8 | its start, likewise |
| … | the group's key |

All entries of a group are filed under the key group of the group's own key. A store cuts long names: then the group's key stands at the end of the value too, and
its length behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.operators.buffers import Mask, fixed_width
from headrace.operators.kernel import Groups, KeyedState, Times
from headrace.operators.keys import key_groups

WAITING, TOLD = b"w", b"p"
_HEAD = 17
_CUT_FROM = 400  # names this long may have been cut by the store
_SIGN = np.uint64(1 << 63)
_NOTHING = pa.scalar(b"", pa.binary())


@dataclass(frozen=True)
class Windows:
    """Windows of groups: the key bytes of each one's group, when it starts and ends, and the key group it is filed under."""

    by: pa.Array
    starts: Times
    ends: Times
    groups: Groups

    def __len__(self) -> int:
        return len(self.starts)

    @staticmethod
    def of(by: pa.Array, starts: Times, ends: Times) -> Windows:
        return Windows(by, starts, ends, key_groups(by))

    def take(self, which: npt.NDArray[np.int64] | Mask) -> Windows:
        at = np.flatnonzero(which) if which.dtype == np.bool_ else which
        return Windows(self.by.take(pa.array(at)), self.starts[at], self.ends[at], self.groups[at])

    def names(self, waiting: Mask) -> pa.Array:
        """The names of their entries."""
        head = np.empty((len(self), _HEAD), np.uint8)
        head[:, 0] = np.where(waiting, WAITING[0], TOLD[0])
        head[:, 1:9], head[:, 9:17] = _ordered(self.ends), _ordered(self.starts)
        if pa.types.is_fixed_size_binary(self.by.type):
            return _fixed(np.hstack([head, fixed_width(self.by, np.uint8).reshape(-1, self.by.type.byte_width)]))
        return pc.binary_join_element_wise(_fixed(head).cast(pa.binary()), self.by, _NOTHING)


NO_WINDOWS = Windows(pa.nulls(0, pa.binary()), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8))


def scan_until(state: KeyedState, tag: bytes, after_us: int, until_us: int) -> tuple[list[bytes], Windows]:
    """The entries of windows that end after one time and at another at the latest: their names in the state, and the windows."""
    names, values, groups = state.scan(prefix(tag, after_us + 1), prefix(tag, until_us + 1))
    by, heads = _alike(names) or _unlike(names, values)
    times = (np.ascontiguousarray(heads).view(">u8") ^ _SIGN).astype(np.uint64).view(np.int64)
    return names, Windows(by, times[:, 1].copy(), times[:, 0].copy(), groups)


def _alike(names: list[bytes]) -> tuple[pa.Array, npt.NDArray[np.uint8]] | None:
    """The groups' keys, and the windows' ends and starts, of names of one length; None if they are not."""
    if not names or not _HEAD < len(names[0]) < _CUT_FROM or len(data := b"".join(names)) != len(names) * len(names[0]):
        return None
    if len(set(map(len, names))) > 1:
        return None
    matrix = np.frombuffer(data, np.uint8).reshape(len(names), -1)
    return _fixed(matrix[:, _HEAD:]), matrix[:, 1:_HEAD]


def _unlike(names: list[bytes], values: list[bytes]) -> tuple[pa.Array, npt.NDArray[np.uint8]]:
    by = [name[_HEAD:] if len(name) < _CUT_FROM else _long_key(value) for name, value in zip(names, values, strict=True)]
    return pa.array(by, pa.binary()), np.frombuffer(b"".join([name[1:_HEAD] for name in names]), np.uint8).reshape(-1, _HEAD - 1)


def first_end(state: KeyedState, tag: bytes) -> int | None:
    """The earliest end of all windows under a tag."""
    name = state.first(tag, bytes([tag[0] + 1]))
    return None if name is None else int.from_bytes(name[1:9], "big") - (1 << 63)


def bounds_of(name: bytes) -> tuple[int, int]:
    """The start and the end of the window whose entry has this name."""
    return int.from_bytes(name[9:17], "big") - (1 << 63), int.from_bytes(name[1:9], "big") - (1 << 63)


def prefix(tag: bytes, end_us: int) -> bytes:
    """What the names of windows that end then or later begin with, or come after."""
    return tag + (end_us + (1 << 63)).to_bytes(9, "big")[1:] if end_us < 1 << 63 else bytes([tag[0] + 1])


def with_long_keys(names: pa.Array, values: pa.Array) -> pa.Array:
    """Values as they are stored: with the group's key where the name is long."""
    if not len(names) or pc.max(pc.binary_length(names)).as_py() < _CUT_FROM:
        return values
    pairs = zip(names.to_pylist(), values.to_pylist(), strict=True)
    return pa.array(
        [value if len(name) < _CUT_FROM else value + name[_HEAD:] + len(name[_HEAD:]).to_bytes(4, "big") for name, value in pairs], pa.binary()
    )


def _long_key(value: bytes) -> bytes:
    size = int.from_bytes(value[-4:], "big")
    return value[-4 - size : -4]


def _fixed(data: npt.NDArray[np.uint8]) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(data.shape[1]), len(data), [None, pa.py_buffer(np.ascontiguousarray(data))])


def _ordered(times: Times) -> npt.NDArray[np.uint8]:
    return (times.view(np.uint64) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)


def joined(first: pa.Array, second: pa.Array) -> pa.Array:
    """Key bytes, one after the other; of a fixed width if all have it."""
    if not len(second):
        return first
    if pa.types.is_fixed_size_binary(first.type):
        width = first.type.byte_width
        if pa.types.is_fixed_size_binary(second.type) and second.type.byte_width == width:
            return pa.concat_arrays([first, second])
        if pa.types.is_binary(second.type) and bool(pc.all(pc.equal(pc.binary_length(second), width)).as_py()):
            return pa.concat_arrays([first, second.cast(first.type)])
    return pa.concat_arrays([first.cast(pa.binary()), second.cast(pa.binary())])
