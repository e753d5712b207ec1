"""Calls of users' functions in expressions: each is taken out, and becomes a column of its own.

    with_columns(gross="tax(lower(region), amount) * 2")

    arguments   __argument_0 = lower(region)
    calls       __call_0 = tax(__argument_0, amount)
    expression  gross = __call_0 * 2

Calls within the arguments of others come in an earlier round. The columns are gone in the result of
the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

from sqlglot import exp

from headrace.errors import BadExpression, HeadraceError
from headrace.expressions.parser import parse_sql, to_sql
from headrace.expressions.user_functions import UserFunction, user_function, user_function_names

Given = ParamSpec("Given")
Result = TypeVar("Result")
CALL_PREFIX, ARGUMENT_PREFIX = "__call_", "__argument_"


_written: ContextVar[dict[str, str]] = ContextVar("written")
"""The calls of the present operation as they are written, by their columns."""


def is_call_column(name: str) -> bool:
    """Whether a column was made for a call, and is gone in the result of the operation."""
    return name.startswith((CALL_PREFIX, ARGUMENT_PREFIX))


@dataclass(frozen=True)
class FunctionCallColumn:
    """The column of a call: its name, the function, and the columns that are its arguments."""

    name: str
    function: UserFunction
    arguments: tuple[str, ...]


@dataclass
class CallRound:
    """Calls that need no result of one another. `arguments` are expressions by their columns."""

    arguments: dict[str, str] = field(default_factory=dict)
    calls: list[FunctionCallColumn] = field(default_factory=list)


class CallExtractor:
    """Takes the calls out of the expressions of one operation.

    Args:
        columns: The columns that the expressions may read.
        where: The step, for errors.
    """

    def __init__(self, columns: Collection[str], *, where: str) -> None:
        self.columns, self.where = columns, where
        self.rounds: list[CallRound] = []
        self._known: dict[str, tuple[str, int]] = {}
        self._arguments: dict[tuple[int, str], str] = {}
        self._count = 0

    def rewrite(self, text: str) -> str:
        """An expression with columns instead of calls; the text itself if there are none."""
        if text in self.columns or not may_have_calls(text):
            return text
        tree = parse_sql(text, where=self.where)
        rewritten = self._without_calls(tree.copy())
        return text if rewritten == tree else to_sql(rewritten)

    def column_of(self, call: exp.Expr) -> str:
        """The column of a call of a user's function."""
        return str(self._without_calls(call.copy()).name)

    def _without_calls(self, tree: exp.Expr) -> exp.Expr:
        """A tree with columns instead of calls."""
        calls = [node for node in _bottom_up(tree) if called_function(node) is not None]
        rounds: dict[int, int] = {}
        for node in calls:
            function = called_function(node)
            assert function is not None
            arguments = list(node.expressions)
            function.check_arguments(len(arguments))
            if node.find_ancestor(exp.Lambda) is not None:
                raise BadExpression(
                    f"The step {self.where} calls {function.name}() within a lambda,"
                    " and a Python function is called once for a whole column.",
                    fix=f"let {function.name}() take the array, or use stream.explode(…) first.",
                )
            inner = (rounds.get(id(each), -1) for top in arguments for each in top.walk())
            number = max(inner, default=-1) + 1
            column = self._call(function, arguments, number)
            replacement = exp.column(exp.to_identifier(column, quoted=True))
            rounds[id(replacement)] = number
            if node is tree:
                tree = replacement
            else:
                node.replace(replacement)
        return tree

    def _call(self, function: UserFunction, given: Iterable[exp.Expr], number: int) -> str:
        """The column of a call in a round; the same one for the same call."""
        while len(self.rounds) <= number:
            self.rounds.append(CallRound())
        names = tuple(self._argument(each, number) for each in given)
        key = f"{function.name}({', '.join(names)})"
        if key not in self._known:
            arguments = [as_written(to_sql(each)) for each in given]
            column = f"{CALL_PREFIX}{self._next()}"
            self.rounds[number].calls.append(FunctionCallColumn(column, function, names))
            self._known[key] = column, number
            self._note(column, f"{function.name}({', '.join(arguments)})")
        return self._known[key][0]

    def _argument(self, node: exp.Expr, number: int) -> str:
        """The column that an argument is, or that it becomes in a round."""
        is_plain = isinstance(node, exp.Column) and len(node.parts) == 1
        if is_plain and (node.name in self.columns or is_call_column(node.name)):
            return node.name
        text = to_sql(node)
        if (number, text) not in self._arguments:
            name = self._arguments[number, text] = f"{ARGUMENT_PREFIX}{self._next()}"
            self.rounds[number].arguments[name] = text
        return self._arguments[number, text]

    def _note(self, column: str, call: str) -> None:
        """Remember how a call is written, for errors."""
        if (written := _written.get(None)) is not None:
            written[column] = call

    def _next(self) -> int:
        self._count += 1
        return self._count - 1


def as_written(text: str) -> str:
    """A text with the calls of the present operation instead of their columns."""
    for column, call in reversed(_written.get({}).items()):
        text = text.replace(f"`{column}`", call).replace(column, call)
    return text


def shows_calls(operation: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let the errors of an operation show calls as they are written, not the columns that they
    became.
    """

    @wraps(operation)
    def showing(*arguments: Given.args, **named: Given.kwargs) -> Result:
        token = _written.set({})
        try:
            return operation(*arguments, **named)
        except HeadraceError as error:
            error.message, error.fix = as_written(error.message), as_written(error.fix)
            error.args = tuple(
                as_written(each) if isinstance(each, str) else each for each in error.args
            )
            raise
        finally:
            _written.reset(token)

    return showing


def may_have_calls(text: str) -> bool:
    """Whether an expression may call a function: false for most that call none."""
    lower = str(text).lower()  # what is no text is refused when it is parsed
    return "(" in lower and any(name in lower for name in user_function_names())


def called_function(node: exp.Expr) -> UserFunction | None:
    """The user's function that a node calls; None if it is no such call."""
    return user_function(str(node.this)) if isinstance(node, exp.Anonymous) else None


def _bottom_up(tree: exp.Expr) -> Iterator[exp.Expr]:
    """All nodes, each after those below it."""
    yield from reversed(list(tree.bfs()))
