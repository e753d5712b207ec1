"""Exact sums of doubles, for many keys at once: a number as the sum of a few doubles that do not overlap, the largest first.

The form is canonical: the first part is the exact sum rounded to the nearest double, the second what remains, rounded, and so on. It
depends on the exact sum alone, so neither the order of additions nor their grouping can be seen in it. Numbers that need more parts than there
is room for (or infinities and NaNs) are left to `exact.py`; here they only are told apart.

The method is error-free addition: a + b = s + e, with s the rounded sum and e what rounding took off, itself a double.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.operators.buffers import Mask

Doubles = npt.NDArray[np.float64]
Expansion = tuple[Doubles, ...]
_BLOCK = 1 << 13  # numbers worked on at a time: a dozen arrays of them fit into a core's own cache
_PASSES = 12


def two_sum(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    """The rounded sum, and what rounding took off. Exact unless the sum is too large for a double."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def two_product(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    """The rounded product, and what rounding took off. Exact for factors and products far from the ends of the range of doubles."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(a: Doubles) -> tuple[Doubles, Doubles]:
    """Two numbers of at most 26 bits each."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def distilled(terms: Sequence[Doubles], parts: int) -> tuple[Expansion, Mask]:
    """The sum of all terms as canonical parts, and which sums cannot be told here: their parts are to be ignored."""
    count = len(terms[0])
    total = tuple(np.zeros(count) for _ in range(parts))
    failed = np.zeros(count, np.bool_)
    with np.errstate(all="ignore"):
        for start in range(0, count, _BLOCK):
            block = slice(start, start + _BLOCK)
            _distil_block([term[block] for term in terms], [part[block] for part in total], failed[block])
    return total, failed


def _distil_block(terms: list[Doubles], total: list[Doubles], failed: Mask) -> None:
    """Pass over the terms from the smallest to the largest until no pass changes them any more; most blocks need two."""
    terms = [term for term in terms if term.any()]
    which: slice | npt.NDArray[np.int64] = slice(None)
    for _ in range(_PASSES):
        if len(terms) < 2:
            break
        terms, settled = _pass(terms)
        if settled.all():
            break
        _put(total, failed, which, [term[settled] for term in terms], settled)
        rest = np.flatnonzero(~settled)
        which = rest if isinstance(which, slice) else which[rest]
        terms = [term[rest] for term in terms]
    else:
        failed[which] = True
        return
    _put(total, failed, which, terms, None)


def _pass(terms: list[Doubles]) -> tuple[list[Doubles], Mask]:
    """One pass, and which rows are settled: left as they were, or of two terms only, which one pass settles."""
    fresh = list(terms)
    settled = np.ones(len(terms[0]), np.bool_)
    for at in range(len(terms) - 2, -1, -1):
        high, low = two_sum(fresh[at], fresh[at + 1])
        settled &= high == terms[at]
        fresh[at], fresh[at + 1] = high, low
    if len(terms) == 2:
        settled[:] = True
    return fresh, settled


def _put(total: list[Doubles], failed: Mask, which: slice | npt.NDArray[np.int64], terms: list[Doubles], settled: Mask | None) -> None:
    """Store settled sums, or mark them as failed: too many parts, not finite, or a tie that further parts would break."""
    where = which if settled is None else (np.flatnonzero(settled) if isinstance(which, slice) else which[settled])
    bad = np.zeros(len(terms[0]) if terms else 0, np.bool_)
    for at, term in enumerate(terms):
        bad |= ~np.isfinite(term)
        if at < len(total):
            total[at][where] = term + 0.0  # no negative zeros
        else:
            bad |= term != 0
    for high, low, next_low in zip(terms, terms[1:], terms[2:], strict=False):
        bad |= (next_low != 0) & ((high + 2 * low) - high == 2 * low)
    if terms:
        failed[where] |= bad
