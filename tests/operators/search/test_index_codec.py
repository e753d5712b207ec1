"""An index of queries goes to bytes and comes back; bytes that are no index are refused."""

from dataclasses import dataclass

import numpy as np
import pytest

from headrace.operators.search.index_codec import UnreadableIndex, decode, encode


@dataclass(frozen=True)
class Leaf:
    word: str
    boost: float


@dataclass(frozen=True)
class Tree:
    children: tuple[Leaf, ...]
    weights: np.ndarray


CLASSES = {"Leaf": Leaf, "Tree": Tree}


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, 2.5, "å", b"\x00\xff", True, ()),
        {3: ("a", ("b",)), -1: ()},
        tuple(f"text {n}" for n in range(100)),
        tuple(bytes([n]) * n for n in range(100)),
        (Leaf("storm", 2.0), Leaf("", float("inf"))),
    ],
)
def test_values_come_back(value: object) -> None:
    assert decode(encode(value), CLASSES) == value


def test_arrays_come_back_with_their_type() -> None:
    tree = Tree((Leaf("storm", 1.0),), np.array([1, -2, 3], np.int32))
    again = decode(encode(tree), CLASSES)
    assert again.children == tree.children
    assert again.weights.dtype == np.int32
    assert again.weights.tolist() == [1, -2, 3]


def test_other_bytes_are_refused() -> None:
    content = encode(Tree((Leaf("storm", 1.0),), np.arange(100)))
    for wrong in (b"", b"HRQI", content[:-1], content[:20], b"X" + content, content[:4] + b"\x09"):
        with pytest.raises(UnreadableIndex):
            decode(wrong, CLASSES)
    with pytest.raises(UnreadableIndex):
        decode(content, {"Leaf": Leaf})
