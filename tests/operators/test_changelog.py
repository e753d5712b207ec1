"""Changes: what is refused, what counts as a change, and folding."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from headrace.operators.changelog import MalformedChangelog, check_ticks, differs, fold

SCHEMA = pa.schema(
    [("k", pa.float64()), ("n", pa.int64()), ("_change_type", pa.string()), ("_tick", pa.int64())]
)


def changelog(*rows: tuple[float, int, str, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA)


def test_changes_fold_to_the_table_they_tell_of() -> None:
    emitted = changelog(
        (1.0, 5, "insert", 0),
        (math.nan, 1, "insert", 0),
        (1.0, 5, "update_preimage", 1),
        (1.0, 6, "update_postimage", 1),
        (math.nan, 1, "delete", 2),
    )
    check_ticks(emitted, ["k"])
    assert fold(emitted, ["k"]) == {(1.0,): {"k": 1.0, "n": 6}}
    half = fold(emitted.slice(0, 2), ["k"])
    assert fold(emitted.slice(2), ["k"], half) == fold(emitted, ["k"])


@pytest.mark.parametrize(
    "rows",
    [
        [(1.0, 5, "delete", 0)],
        [(1.0, 5, "insert", 0), (1.0, 6, "delete", 1)],
        [(1.0, 5, "insert", 0), (1.0, 6, "insert", 1)],
        [(1.0, 5, "insert", 0), (1.0, 6, "update_postimage", 1)],
        [(1.0, 5, "update_preimage", 1)],
    ],
)
def test_changes_that_no_table_can_have_made_are_refused(
    rows: list[tuple[float, int, str, int]],
) -> None:
    with pytest.raises(MalformedChangelog, match="for the key"):
        fold(changelog(*rows), ["k"])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(1.0, 5, "insert", 1), (2.0, 5, "insert", 0)], "not in order of tick"),
        ([(1.0, 5, "insert", 1), (1.0, 5, "delete", 1)], "In tick 1 the key"),
        ([(1.0, 5, "update_postimage", 1)], "In tick 1 the key"),
    ],
)
def test_ticks_are_checked(rows: list[tuple[float, int, str, int]], why: str) -> None:
    with pytest.raises(MalformedChangelog, match=why):
        check_ticks(changelog(*rows), ["k"])


@pytest.mark.parametrize(
    ("kind", "before", "after", "expected"),
    [
        (pa.int64(), [1, None, None, 2], [1, None, 2, None], [False, False, True, True]),
        (pa.float64(), [math.nan, 0.0, 1.0], [math.nan, -0.0, 1.0], [False, True, False]),
        (pa.float32(), [math.nan, 0.5], [math.nan, 0.25], [False, True]),
        (pa.string(), ["a", "", None], ["a", None, None], [False, True, False]),
        (
            pa.list_(pa.float64()),
            [[1.0, math.nan], [1.0], [], None, [None]],
            [[1.0, math.nan], [2.0], None, None, []],
            [False, True, True, False, True],
        ),
        (
            pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int64()))]),
            [{"a": 1, "b": [1]}, {"a": 1, "b": [1]}, None],
            [{"a": 1, "b": [1]}, {"a": 1, "b": []}, {"a": None, "b": None}],
            [False, True, True],
        ),
        (
            pa.list_(pa.struct([("a", pa.string())])),
            [[{"a": "x"}], [{"a": "x"}]],
            [[{"a": "x"}], [{"a": None}]],
            [False, True],
        ),
        (
            pa.map_(pa.string(), pa.int64()),
            [[("a", 1)], [("a", 1)]],
            [[("a", 1)], [("a", 2)]],
            [False, True],
        ),
        (pa.binary(), [b"a", b"b"], [b"a", b"c"], [False, True]),
    ],
    ids=str,
)
def test_which_values_are_a_change(
    kind: pa.DataType, before: list[Any], after: list[Any], expected: list[bool]
) -> None:
    left, right = pa.array(before, kind), pa.array(after, kind)
    assert differs(left, right).tolist() == expected
    assert differs(left.slice(1), right.slice(1)).tolist() == expected[1:]
    assert differs(left.slice(0, 0), right.slice(0, 0)).tolist() == []
