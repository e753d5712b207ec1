"""How wide a batch runs: by what it would cost, and not to and fro."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.errors import ConfigurationError
from headrace.runtime.batch_size import MAX_ROWS_IN_ONE_TASK, BatchWidth, Width


def run(width: BatchWidth, rows: int, seconds: dict[Width, float], batches: int) -> list[Width]:
    """The widths of some batches, each of which takes as long as its width does."""
    chosen = []
    for _ in range(batches):
        chosen.append(width.choose(rows))
        width.learn(chosen[-1], rows, seconds[chosen[-1]])
    return chosen


def test_small_batches_run_in_one_task_and_large_ones_wide() -> None:
    width = BatchWidth()
    width.expect(shuffles=16)
    assert width.choose(1_000) == "one"
    assert width.choose(MAX_ROWS_IN_ONE_TASK + 1) == "wide"
    width.row_bytes = 1e6
    assert width.choose(1_000) == "wide", "the rows are large"


def test_what_spark_sql_computes_runs_wide_and_says_which_step() -> None:
    width = BatchWidth("one")
    assert width.choose(10, sql_steps=["clean.select"]) == "wide"
    assert "clean.select" in width.reason


def test_it_goes_by_what_batches_cost() -> None:
    width = BatchWidth()
    width.expect(shuffles=16)
    assert set(run(width, 1_000, {"one": 0.3, "wide": 2.0}, 10)) == {"one"}
    assert run(width, 400_000, {"one": 20.0, "wide": 1.0}, 20)[-5:] == ["wide"] * 5
    assert run(width, 1_000, {"one": 0.3, "wide": 2.0}, 20)[-5:] == ["one"] * 5


def test_batches_of_about_equal_cost_do_not_alternate() -> None:
    width = BatchWidth()
    width.expect(shuffles=1)
    chosen = run(width, 1_000, {"one": 0.30, "wide": 0.28}, 50)
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes <= 1


def test_a_slow_machine_does_not_make_the_other_width_look_fast() -> None:
    width = BatchWidth()
    width.expect(shuffles=16)
    assert set(run(width, 1_000, {"one": 2.0, "wide": 20.0}, 20)) == {"one"}


def test_after_a_failure_in_one_task_the_next_attempt_runs_wide() -> None:
    width = BatchWidth()
    width.expect(shuffles=16)
    assert width.choose(1_000) == "one"
    width.avoid("one")
    assert width.choose(1_000) == "wide"
    assert width.choose(1_000) == "one"


def test_a_width_can_be_pinned() -> None:
    width = BatchWidth("wide")
    assert width.choose(1) == "wide"
    width.pin("one")
    assert width.choose(10**9) == "one"
    with pytest.raises(ConfigurationError, match="auto, one, wide"):
        BatchWidth("two")
