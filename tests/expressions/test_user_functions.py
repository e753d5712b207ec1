"""Users' functions: what they are given, what they may return, and how calls leave expressions."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle

import headrace as hr
from headrace.errors import BadExpression, BadSchema, PlanError
from headrace.expressions.function_calls import CallExtractor
from headrace.expressions.user_functions import user_function
from headrace.types.values import Misfit

NUMBERS = pa.array([1.0, None, 3.0])


@hr.udf("DOUBLE", name="test_doubled")
def doubled(x: Any) -> Any:
    """Twice the value."""
    return pc.multiply(x, 2)


@hr.udf("DOUBLE", name="test_doubled_numpy", inputs="numpy")
def doubled_numpy(x: Any) -> Any:
    assert isinstance(x, np.ndarray)
    return x * 2


@hr.udf("DOUBLE", name="test_doubled_pandas", inputs="pandas")
def doubled_pandas(x: Any) -> Any:
    assert isinstance(x, pd.Series)
    return x * 2


@hr.udf("DOUBLE", name="test_doubled_each", each_row=True)
def doubled_each(x: Any, times: int = 2) -> Any:
    return None if x is None else x * times


@pytest.mark.parametrize("function", [doubled, doubled_numpy, doubled_pandas, doubled_each])
def test_a_function_gets_columns_or_values(function: Any) -> None:
    assert function.compute([NUMBERS], 3).to_pylist() == [2.0, None, 6.0]
    assert function.compute([NUMBERS.slice(0, 0)], 0).to_pylist() == []


def test_a_function_can_still_be_called_and_pickled() -> None:
    assert doubled(NUMBERS).to_pylist() == [2.0, None, 6.0]
    assert doubled.__doc__ == "Twice the value."
    assert user_function("TEST_DOUBLED") is doubled
    again = pickle.loads(cloudpickle.dumps(doubled))  # type: ignore[no-untyped-call]
    assert again.compute([NUMBERS], 3).to_pylist() == [2.0, None, 6.0]


def returning(value: Any, kind: str = "INT", *, each_row: bool = False) -> Any:
    return hr.udf(kind, name="test_returning", each_row=each_row)(lambda _: value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returning(pa.array([1, 2])), "2 values for 3 rows"),
        (returning(3), "returned a int, not a column"),
        (returning(pa.array(["a", "b", "c"])), "string"),
        (returning(pa.array([1, 2, 2**40])), "1099511627776"),
        (returning([1, 2, "3"]), "'3' is a str"),
        (returning(pa.array([1, None, 2]), "INT NOT NULL"), "NOT NULL"),
        (returning("x", each_row=True), "'x' is a str"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(function: Any, message: str) -> None:
    with pytest.raises((Misfit, pa.ArrowException), match=message):
        function.compute([NUMBERS], 3)


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (lambda: hr.udf("DOUBLE", name="lower")(len), PlanError, "built-in function lower"),
        (lambda: hr.udf("DOUBLE")(lambda x: x), PlanError, "'<lambda>'"),
        (lambda: hr.udf("DOUBLE", name="class")(len), PlanError, "'class'"),
        (lambda: hr.udf("DOUBLE", inputs="polars"), PlanError, "inputs='polars'"),
        (lambda: hr.udf("DUBLE", name="test_typed")(len), BadSchema, "DUBLE"),
    ],
)
def test_what_cannot_be_a_function_is_refused(
    declare: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        declare()


def extracted(*texts: str) -> tuple[list[str], list[tuple[dict[str, str], list[str]]]]:
    extractor = CallExtractor(["a", "b", "odd name"], where="step")
    rewritten = [extractor.rewrite(text) for text in texts]
    rounds = [
        (
            each.arguments,
            [f"{call.name}={call.function.name}{call.arguments}" for call in each.calls],
        )
        for each in extractor.rounds
    ]
    return rewritten, rounds


def test_expressions_without_calls_stay_as_they_are() -> None:
    texts = ["a  +  b", "odd name", "lower('test_doubled(a)')", "a -- test_doubled("]
    assert extracted(*texts[:2]) == (texts[:2], [])
    assert extracted(*texts[2:])[1] == []


def test_calls_become_columns_round_by_round() -> None:
    texts, rounds = extracted("test_doubled(test_doubled_each(a, 3) + 1) > b", "Test_Doubled(a)")
    assert texts == ["`__call_3` > b", "`__call_4`"]
    assert rounds == [
        (
            {"__argument_0": "3"},
            ["__call_1=test_doubled_each('a', '__argument_0')", "__call_4=test_doubled('a',)"],
        ),
        (
            {"__argument_2": "`__call_1` + 1"},
            ["__call_3=test_doubled('__argument_2',)"],
        ),
    ]


def test_the_same_call_is_made_once() -> None:
    texts, rounds = extracted("test_doubled(a) + test_doubled(a)", "test_doubled(`odd name`)")
    assert texts == ["`__call_0` + `__call_0`", "`__call_1`"]
    assert [len(calls) for _, calls in rounds] == [2]


def test_a_call_in_a_branch_and_in_brackets_is_found() -> None:
    texts, _ = extracted("CASE WHEN a > 1 THEN (test_doubled(b)) ELSE test_doubled(-b) END AS c")
    assert "test_doubled" not in texts[0]
    assert texts[0].endswith("AS c")


@pytest.mark.parametrize("call", ["test_doubled()", "test_doubled(a, b)", "test_doubled_each()"])
def test_a_call_has_as_many_arguments_as_the_function_takes(call: str) -> None:
    with pytest.raises(PlanError, match="arguments, and was given"):
        extracted(call)


def test_a_function_cannot_be_called_within_a_lambda() -> None:
    extractor = CallExtractor(["xs"], where="orders.select")
    with pytest.raises(BadExpression, match=r"calls test_doubled\(\) within a lambda"):
        extractor.rewrite("transform(xs, x -> test_doubled(x))")
