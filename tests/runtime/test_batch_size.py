"""How many rows a batch takes in: it comes near the target, from either side, and changes nothing
about what is computed.
"""

from pathlib import Path

import pytest

import headrace as hr
from headrace.runtime.batch_size import MAX_ROWS, MIN_ROWS, BatchSize
from headrace.testing.pipelines import PipelineTest


@pytest.mark.parametrize("rows_a_second", [500.0, 20_000.0, 90_000.0])
def test_it_comes_near_the_target_and_follows_when_the_pace_changes(rows_a_second: float) -> None:
    size, cost_s = BatchSize(10.0), 0.3
    for pace in (rows_a_second, rows_a_second / 5, rows_a_second):
        for _ in range(20):
            seconds = cost_s + size.rows / pace
            size.adapt(size.rows, seconds)
        assert 10.0 * 0.5 <= cost_s + size.rows / pace <= 10.0 * 1.25 or size.rows in {
            MIN_ROWS,
            MAX_ROWS,
        }


def test_small_batches_that_are_slow_for_other_reasons_make_it_no_smaller_than_a_tick_of_use() -> (
    None
):
    size = BatchSize(1.0)
    for _ in range(50):
        size.adapt(10, 60.0)
    assert size.rows == MIN_ROWS
    for _ in range(20):
        size.adapt(10, 0.1)
    assert size.rows == MAX_ROWS


def test_what_comes_out_does_not_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.batch_size.MIN_ROWS", 1)
    shown = []
    for target_s in (30.0, 1e-9):
        shop = hr.Pipeline("shop")
        orders = shop.topic("orders", schema="id BIGINT, region STRING")
        shop.view("counts", orders.group_by("region").aggregate(n=hr.agg.count()))
        with PipelineTest(shop, tmp_path / str(target_s)) as test:
            test.runner.leading._size.target_s = target_s
            for _ in range(3):
                test.feed("orders", [{"id": 0, "region": "eu"}])
                test.settle()
            for number in range(12):
                test.feed("orders", [{"id": number, "region": "eu" if number % 3 else "us"}])
                test.cut()
            before = test.runner.batches
            test.settle()
            shown.append((test.view("counts"), test.runner.batches - before))
    assert shown[0][0] == shown[1][0]
    assert shown[0][1] == 1 < shown[1][1]
