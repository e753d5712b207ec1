"""Sums of doubles: exact, rounded once, and the same bytes in whichever order and grouping."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.operators.aggregates.float_sums import (
    ExactColumns,
    ExactSum,
    distil,
    exact,
    two_product,
    two_sum,
)
from tests.operators.histories import doubles
from tests.short_forms import examples


def summed(
    values: list[float], cuts: list[int], parts: int = 3
) -> tuple[list[float], bytes, float]:
    """Parts, tail and value of a sum, added up in pieces as the cuts say."""
    columns = ExactColumns(parts)
    total = columns.of_values(np.zeros(1), None)
    for first, stop in zip([0, *cuts], [*cuts, len(values)], strict=True):
        piece = columns.of_values(np.array(values[first:stop]), None)
        total = (
            columns.add(total, columns.reduce(piece, np.zeros(stop - first, np.int64)))
            if stop > first
            else total
        )
    value = float(columns.rounded(total)[0])
    stored, tails = columns.close_states(total)
    return [float(part[0]) for part in stored], tails[0] if tails else b"", value


def reference(values: list[float]) -> float:
    total = ExactSum()
    for value in values:
        total += exact(value)
    return total.rounded()


@given(values=st.lists(doubles(), min_size=1, max_size=30), data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_order_and_grouping_cannot_be_seen(values: list[float], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    once, other = summed(values, []), summed(shuffled, cuts)
    assert repr(once) == repr(other)
    assert repr(once[2]) == repr(reference(values))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(max_examples=examples(200), deadline=None)
def test_as_accurate_as_fsum(values: list[float]) -> None:
    try:
        expected = math.fsum(values)
    except OverflowError:
        return
    assert summed(values, [])[2] == expected


def test_added_values_can_be_retracted() -> None:
    columns = ExactColumns(3)
    values = np.array(
        [1e300, 1.0, math.inf, -1e-300, math.nan, 2.0**-1074, -math.inf, 1.7e308, 1.7e308]
    )
    coming = columns.reduce(columns.of_values(values, None), np.zeros(len(values), np.int64))
    going = columns.reduce(
        columns.of_values(np.delete(values, 1), -np.ones(len(values) - 1, np.int64)),
        np.zeros(len(values) - 1, np.int64),
    )
    rest, tails = columns.close_states(columns.add(coming, going))
    assert tails is None
    assert [float(part[0]) for part in rest] == [1.0, 0.0, 0.0]


def test_few_numbers_need_the_slow_way() -> None:
    """Amounts of money in one key, a million of them: the parts suffice."""
    amounts = np.round(np.random.default_rng(7).lognormal(4, 3, 100_000), 2)
    columns = ExactColumns(3)
    parts, tails = columns.close_states(
        columns.reduce(columns.of_values(amounts, None), np.zeros(len(amounts), np.int64))
    )
    assert tails is None
    assert parts[0][0] == math.fsum(amounts.tolist())


@pytest.mark.parametrize("terms", [2, 3, 6])
def test_distilled_parts_are_canonical(terms: int) -> None:
    """The first part is the rounded sum, the next the rounded rest: as exact integers say."""
    chance = random.Random(terms)
    columns = [
        np.array(
            [math.ldexp(chance.uniform(-1, 1), chance.randint(-60, 60)) for _ in range(20_000)]
        )
        for _ in range(terms)
    ]
    total, failed = distil(columns, 4)
    assert failed.mean() < 0.2
    for at in np.flatnonzero(~failed)[:2000].tolist():
        expected = sum((exact(float(column[at])) for column in columns), ExactSum()).parts(4)
        assert [float(part[at]) for part in total] == expected


def test_ties_are_not_left_to_chance() -> None:
    tie, below = 2.0**-53, 2.0**-120
    total, failed = distil([np.array([1.0, 1.0]), np.array([tie, tie]), np.array([below, 0.0])], 3)
    assert failed.tolist() == [True, False]
    assert [float(part[1]) for part in total] == [1.0, tie, 0.0]
    assert summed([1.0, tie, below], [])[0] == [1 + 2.0**-52, -tie, below]


@given(st.floats(-1e100, 1e100), st.floats(-1e100, 1e100))
@settings(max_examples=examples(200), deadline=None)
def test_error_free_operations(a: float, b: float) -> None:
    from fractions import Fraction

    high, low = (float(each[0]) for each in two_sum(np.array([a]), np.array([b])))
    assert Fraction(high) + Fraction(low) == Fraction(a) + Fraction(b)
    if abs(a) > 1e-100 and abs(b) > 1e-100:
        high, low = (float(each[0]) for each in two_product(np.array([a]), np.array([b])))
        assert Fraction(high) + Fraction(low) == Fraction(a) * Fraction(b)
