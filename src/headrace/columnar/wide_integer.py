"""Integers of two or three 64-bit words, for many keys at once: sums that cannot overflow, however
many rows are added and retracted.

A wide integer is a tuple of arrays of words in two's complement, the lowest word first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.columnar.buffers import Ints, Mask

Words = npt.NDArray[np.uint64]
Wide = tuple[Words, ...]
_LOW = np.int64(0xFFFFFFFF)


def add(left: Wide, right: Wide) -> Wide:
    total = []
    carry = np.zeros(len(left[0]), np.bool_)
    for a, b in zip(left, right, strict=True):
        once = a + b
        twice = once + carry
        carry = (once < a) | (twice < once)
        total.append(twice)
    return tuple(total)


def from_integers(values: Ints, words: int) -> Wide:
    return values.view(np.uint64), *([_sign(values)] * (words - 1))


def from_limbs(limbs: Sequence[Ints], words: int) -> Wide:
    """The sum of signed limbs that are 32 bits apart, the lowest first."""
    total = from_integers(limbs[0], words)
    for at, limb in enumerate(limbs[1:], 1):
        total = add(total, _shifted(limb, 32 * at, words))
    return total


def _shifted(values: Ints, bits: int, words: int) -> Wide:
    at, offset = divmod(bits, 64)
    parts = [np.zeros(len(values), np.uint64)] * at
    if offset:
        parts += [
            values.view(np.uint64) << np.uint64(offset),
            (values >> np.int64(64 - offset)).view(np.uint64),
        ]
    else:
        parts += [values.view(np.uint64)]
    return tuple([*parts, *([_sign(values)] * words)][:words])


def segment_sums(values: Ints, signs: Ints | None, starts: Ints, words: int) -> Wide:
    """The sum of each segment; `signs` is -1 for values that are retracted."""
    lowest, highest = int(values.min(initial=0)), int(values.max(initial=0))
    max_rows = int(np.diff(starts, append=len(values)).max(initial=1))
    if max(-lowest, highest) * max_rows < 1 << 63:
        signed = values if signs is None else values * signs
        return from_integers(
            signed if len(starts) == len(values) else np.add.reduceat(signed, starts), words
        )
    return limb_sums([values & _LOW, values >> np.int64(32)], signs, starts, words)


def limb_sums(limbs: Sequence[Ints], signs: Ints | None, starts: Ints, words: int) -> Wide:
    """The sum of each segment for values given as 32-bit limbs, of which the highest is signed."""
    return from_limbs(
        [np.add.reduceat(limb if signs is None else limb * signs, starts) for limb in limbs], words
    )


def split_limbs(word: Words, *, signed: bool) -> tuple[Ints, Ints]:
    """The low and the high half of each word."""
    halves = word.view(np.int64)
    return halves & _LOW, (
        halves >> np.int64(32) if signed else (word >> np.uint64(32)).view(np.int64)
    )


def fits_one_word(wide: Wide) -> Mask:
    """Mask of the integers that fit into 64 bits."""
    sign = _sign(wide[0].view(np.int64))
    fits: Mask = wide[1] == sign
    for word in wide[2:]:
        fits &= word == sign
    return fits


def to_python(wide: Wide, which: Ints) -> list[int]:
    """The integers at some indices as Python integers, for the few that need exact arithmetic."""
    signed = [word[which].tolist() for word in wide[:-1]] + [
        wide[-1].view(np.int64)[which].tolist()
    ]
    return [
        sum(part << (64 * at) for at, part in enumerate(parts))
        for parts in zip(*signed, strict=True)
    ]


def from_python(values: Sequence[int], words: int) -> Wide:
    mask = (1 << 64) - 1
    return tuple(
        np.array([value >> (64 * at) & mask for value in values], np.uint64) for at in range(words)
    )


def within(wide: Wide, limit: int) -> Mask:
    """Mask of the integers between -limit and limit; `limit` must fit into two words."""
    high, low = wide[1].view(np.int64), wide[0]
    fits = np.ones(len(low), np.bool_)
    for word in wide[2:]:
        fits &= word == _sign(high)
    return fits & ~_above(high, low, limit) & ~_below(high, low, -limit)


def _above(high: Ints, low: Words, bound: int) -> Mask:
    bound_high, bound_low = np.int64(bound >> 64), np.uint64(bound & ((1 << 64) - 1))
    above: Mask = (high > bound_high) | ((high == bound_high) & (low > bound_low))
    return above


def _below(high: Ints, low: Words, bound: int) -> Mask:
    bound_high, bound_low = np.int64(bound >> 64), np.uint64(bound & ((1 << 64) - 1))
    below: Mask = (high < bound_high) | ((high == bound_high) & (low < bound_low))
    return below


def _sign(values: Ints) -> Words:
    return (values >> np.int64(63)).view(np.uint64)
