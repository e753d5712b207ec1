"""StatsD's lines, read by column: `name:value|kind[|@rate][|#tags]`, as StatsD has them and with DogStatsD's tags and packed values (`name:1:2:3|ms`).

Equal lines are read once: a service counts the same thing again and again. A line that is none of these is malformed; it is counted, and nothing else of its packet is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

COUNTER, GAUGE, TIMER, HISTOGRAM, SET = "counter", "gauge", "timer", "histogram", "set"
_KINDS = {"c": COUNTER, "g": GAUGE, "ms": TIMER, "h": HISTOGRAM, "d": HISTOGRAM, "s": SET}
LONGEST_LINE = 8_192
_LINE = (
    r"^(?P<metric>[^:|@#\s\x00-\x1f\x{FFFD}][^:|\x00-\x1f\x{FFFD}]*):(?P<value>[^|\x00-\x1f\x{FFFD}]+)\|(?P<kind>c|g|ms|h|d|s)"
    r"(?:\|@(?P<rate>[0-9.eE+-]+))?(?:\|#(?P<tags>[^|\x00-\x1f\x{FFFD}]*))?(?:\|[cT][^|\x00-\x1f]*)*$"
)
_NUMBER = r"^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"


@dataclass(frozen=True)
class Values:
    """Different values, in columns, and how often each came. `order` has, for every value that came, in that order, which one it was."""

    metric: pa.Array
    kind: pa.Array
    tags: pa.Array
    value: npt.NDArray[np.float64]
    """Of sets: not a number."""
    member: pa.Array
    """Of sets; else null."""
    is_delta: npt.NDArray[np.bool_]
    """A gauge's value with a sign: so much more or less."""
    rate: npt.NDArray[np.float64]
    times: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    malformed: int

    def __len__(self) -> int:
        return len(self.order)


def read(data: bytes) -> Values:
    """The values of packets that were joined by line ends."""
    text = data.decode(errors="replace")
    lines = pc.list_flatten(pc.split_pattern(pa.array([text], pa.large_string()), "\n"))
    lines = lines.filter(pc.not_equal(pc.binary_length(lines), 0))
    encoded = lines.dictionary_encode()
    order = encoded.indices.to_numpy().astype(np.int64)
    parts = pc.extract_regex(_readable(encoded.dictionary), _LINE)
    metric, value, kind, rate, tags = (parts.field(name) for name in ("metric", "value", "kind", "rate", "tags"))
    kind = _kinds(kind)
    which, value = _unpacked(value, kind)
    if which is not None:
        metric, kind, rate, tags = (column.take(pa.array(which)) for column in (metric, kind, rate, tags))
    return _checked(metric, kind, rate, tags, value, _spread(order, which, len(encoded.dictionary)))


def _readable(lines: pa.Array) -> pa.Array:
    trimmed = pc.utf8_rtrim(lines, "\r")
    return pc.if_else(pc.greater(pc.binary_length(trimmed), LONGEST_LINE), pa.scalar("", trimmed.type), trimmed)


def _kinds(short: pa.Array) -> pa.Array:
    codes = pc.index_in(short, pa.array(list(_KINDS), short.type))
    return pa.array(list(_KINDS.values())).take(codes)


def _unpacked(value: pa.Array, kind: pa.Array) -> tuple[npt.NDArray[np.int64] | None, pa.Array]:
    """`1:2:3` is three values; but for sets, whose members may have any character. Also which line each is of, unless each has one."""
    packed = pc.fill_null(pc.and_(pc.match_substring(value, ":"), pc.not_equal(kind, SET)), False)
    if not pc.any(packed).as_py():
        return None, value
    lists = pc.if_else(packed, pc.split_pattern(value, ":"), _each_alone(value))
    return pc.list_parent_indices(lists).to_numpy().astype(np.int64), pc.list_flatten(lists)


def _each_alone(value: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.arange(len(value) + 1, dtype=np.int32)), value)


def _spread(order: npt.NDArray[np.int64], which: npt.NDArray[np.int64] | None, lines: int) -> npt.NDArray[np.int64]:
    """The order of values, from that of lines."""
    if which is None:
        return order
    counts = np.bincount(which, minlength=lines)
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    lengths = counts[order]
    starts = np.repeat(firsts[order], lengths)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    result: npt.NDArray[np.int64] = starts + within
    return result


def _checked(metric: pa.Array, kind: pa.Array, rate: pa.Array, tags: pa.Array, value: pa.Array, order: npt.NDArray[np.int64]) -> Values:
    """Without what is malformed: no known line, no number, a rate that is none."""
    is_set = pc.equal(kind, SET)
    numbers, is_number = _numbers(value)
    rates, is_rate = _numbers(rate)
    has_rate = pc.not_equal(pc.fill_null(rate, ""), "").to_numpy(zero_copy_only=False)
    rates = np.where(has_rate, rates, 1.0)
    good = pc.is_valid(kind).to_numpy(zero_copy_only=False) & (is_number | _as_bools(is_set)) & (~has_rate | (is_rate & (rates > 0) & (rates <= 1)))
    kept = pa.array(np.flatnonzero(good))
    renumbered = np.where(good, np.cumsum(good) - 1, -1)[order]
    signed = _as_bools(pc.and_(pc.equal(kind, GAUGE), pc.match_substring_regex(value, r"^[+-]")))
    order = renumbered[renumbered >= 0]
    times = np.bincount(order, minlength=len(kept)).astype(np.int64)
    member = pc.if_else(is_set, value, pa.scalar(None, value.type))
    text = [column.take(kept).cast(pa.string()) for column in (metric, kind, _in_order(tags), member)]
    return Values(
        text[0], text[1], text[2], np.where(_as_bools(is_set), np.nan, numbers)[good], text[3], signed[good], rates[good], times, order, int((renumbered < 0).sum())
    )


def _numbers(text: pa.Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """As numbers, 0 where there is none; and where there is one that is finite."""
    matches = pc.match_substring_regex(text, _NUMBER)
    plain = pc.utf8_ltrim(pc.if_else(matches, text, pa.scalar("0", text.type)), "+")
    numbers = pc.fill_null(plain.cast(pa.float64()), 0.0).to_numpy()
    return numbers, _as_bools(matches) & np.isfinite(numbers)


def _as_bools(mask: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return found


def _in_order(tags: pa.Array) -> pa.Array:
    """`b:2,a:1` and `a:1,b:2` are the same tags. There are few different ones."""
    encoded = pc.fill_null(tags, "").dictionary_encode()
    different: list[Any] = encoded.dictionary.to_pylist()
    sorted_tags = pa.array([",".join(sorted(filter(None, each.split(",")))) for each in different], pa.string())
    return sorted_tags.take(encoded.indices)
