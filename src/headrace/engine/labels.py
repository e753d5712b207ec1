"""Labels that Spark sends to a chosen partition.

Spark places a row by the Murmur3 hash of its label. The labels 0, 1, 2, … collide (0 and 1 land in the same of two partitions, and half the
machine is idle), so for each shard a label is searched that leads to the partition of the same number.
"""

from __future__ import annotations

from functools import cache
from itertools import count

_SEED = 42
_MASK = 0xFFFFFFFF


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def spark_hash(label: int) -> int:
    """Spark's hash of an INT, as a signed 32-bit number."""
    mixed = _rotated(label * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
    value = (_rotated(_SEED ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    value ^= 4  # an INT has four bytes
    value = (value ^ (value >> 16)) * 0x85EBCA6B & _MASK
    value = (value ^ (value >> 13)) * 0xC2B2AE35 & _MASK
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


@cache
def labels(shards: int) -> tuple[int, ...]:
    """For each shard the smallest label that `repartition(shards, "label")` sends to the partition of that number."""
    found: dict[int, int] = {}
    for label in count():
        found.setdefault(spark_hash(label) % shards, label)
        if len(found) == shards:
            return tuple(found[shard] for shard in range(shards))
    raise AssertionError
