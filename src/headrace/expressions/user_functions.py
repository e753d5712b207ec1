"""Users' own functions: `hr.udf`, and the names by which expressions call them.

    @hr.udf("DOUBLE")
    def tax(amount):                            # Arrow arrays in, an Arrow array out
        return pc.multiply(amount, 0.19)

    orders.with_columns(tax="tax(amount) + 1")

`function_calls` finds the calls in an expression. `plan.function_steps` has the step that computes
them, and `engine.user_code` runs it.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import PlanError, nearest
from headrace.expressions.functions import SPECIAL_NAMES
from headrace.expressions.signatures import signatures
from headrace.types.schema import parse_schema
from headrace.types.values import Misfit, column_converter, fit_column

ARROW, NUMPY, PANDAS = "arrow", "numpy", "pandas"
_KINDS = (ARROW, NUMPY, PANDAS)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A user's function with the type of its result. It can still be called as it was written."""

    function: Callable[..., Any]
    name: str
    result: pa.Field
    inputs: str = ARROW
    each_row: bool = False
    version: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.function.__doc__)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def check_arguments(self, count: int) -> None:
        """Raise PlanError unless the function takes so many arguments."""
        least, most = self._arity
        if not least <= count <= most:
            wanted = f"{least}" if least == most else f"{least} to {most:g}"
            raise PlanError(
                f"{self.name}() takes {wanted} arguments, and was given {count}.",
                fix="correct the call, or the function.",
            )

    @cached_property
    def _arity(self) -> tuple[int, float]:
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # some functions written in C
            return 0, float("inf")
        positional = [each for each in parameters if each.kind in _POSITIONAL]
        is_open = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
        least = sum(each.default is inspect.Parameter.empty for each in positional)
        return least, float("inf") if is_open else len(positional)

    def compute(self, columns: Sequence[pa.Array], length: int) -> pa.Array:
        """Call the function for some rows.

        Args:
            columns: The arguments, each a column.
            length: The number of rows.

        Returns:
            The result as a column of the declared type.

        Raises:
            Misfit: The result has another length or does not fit the type.
            Exception: Whatever the function raises.
        """
        if self.each_row:
            rows = zip(*(column.to_pylist() for column in columns), strict=True)
            values = [self.function(*row) for row in (rows if columns else [()] * length)]
            return self._converted(values)
        returned = self.function(*map(self._argument, columns))
        if isinstance(returned, pa.ChunkedArray):
            returned = returned.combine_chunks()
        if isinstance(returned, list):
            array = self._converted(returned)
        elif isinstance(returned, pa.Array):
            array = fit_column(returned, self.result)
        elif isinstance(returned, np.ndarray) or hasattr(returned, "to_numpy"):
            array = fit_column(pa.array(returned, from_pandas=True), self.result)
        else:
            raise Misfit(f"it returned a {type(returned).__name__}, not a column")
        if len(array) != length:
            raise Misfit(f"it returned {len(array):,} values for {length:,} rows")
        return array

    def _converted(self, values: list[Any]) -> pa.Array:
        converter = column_converter(self.result)
        try:
            return converter.array(values)
        except (Misfit, pa.ArrowException, OverflowError, ValueError, TypeError):
            raise Misfit(converter.find_misfit(values)[1]) from None

    def _argument(self, column: pa.Array) -> Any:
        if self.inputs == NUMPY:
            return column.to_numpy(zero_copy_only=False)
        return column.to_pandas() if self.inputs == PANDAS else column


_registered: dict[str, UserFunction] = {}


def udf(
    type: str,
    *,
    each_row: bool = False,
    inputs: str = ARROW,
    name: str | None = None,
    version: str | None = None,
) -> Callable[[Callable[..., Any]], UserFunction]:
    """Make a function callable by its name in expressions of pipelines.

    By default the function gets each argument as an Arrow array and returns an array with as many
    values. It must be deterministic, and treat each row by itself: how many rows a call has may be
    different in a replay.

    Args:
        type: The type of the result, as in a schema: `"DOUBLE"`, `"ARRAY<STRING>"`.
        each_row: Whether the function takes and returns single Python values. Slower and easier.
        inputs: What the arguments are: `"arrow"`, `"numpy"` arrays or `"pandas"` series.
        name: The name in expressions, if not the function's own.
        version: The function's version, instead of its fingerprint: code of the same version
            counts as the same.

    Returns:
        A decorator. The decorated function can still be called as it was written.

    Raises:
        PlanError: The name is that of a built-in function, or `inputs` is none of the three.
        BadSchema: The type is none.

    Example:
        ```python
        @hr.udf("DOUBLE")
        def tax(amount):
            return pc.multiply(amount, 0.19)

        taxed = orders.with_columns(tax="tax(amount)")
        ```
    """
    if inputs not in _KINDS:
        raise PlanError(f"udf was given inputs={inputs!r}: {nearest(str(inputs), _KINDS)}")

    def register(function: Callable[..., Any]) -> UserFunction:
        own_name: str = name if name is not None else str(getattr(function, "__name__", ""))
        lower = own_name.lower()
        if not own_name.isidentifier() or keyword.iskeyword(own_name):
            raise PlanError(
                f"A function has the name {own_name!r}, which an expression cannot call.",
                fix='give it a name: hr.udf("DOUBLE", name="tax").',
            )
        if lower in signatures() or lower in SPECIAL_NAMES:
            raise PlanError(
                f"There is a built-in function {lower}() already.",
                fix=f'give it another name: hr.udf("{type}", name="my_{lower}").',
            )
        (result,) = parse_schema(f"`{own_name}` {type}")
        made = UserFunction(function, own_name, result, inputs, each_row, version)
        _registered[lower] = made
        return made

    return register


def user_function(name: str) -> UserFunction | None:
    """The function that expressions call by this name; None if there is none."""
    return _registered.get(name.lower())


def user_function_names() -> list[str]:
    """The names of all functions."""
    return list(_registered)
