"""Parses an expression's text to sqlglot's tree, in Spark's dialect. Calls stay as they are
written; `functions` decides what a function is.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parsers.spark import SparkParser

from headrace.errors import BadExpression

MAX_CHARACTERS = 20_000


_SPECIAL_SYNTAX = (
    "CAST",
    "TRY_CAST",
    "EXTRACT",
    "POSITION",
    "SUBSTRING",
    "SUBSTR",
    "TRIM",
)


class Dialect(Spark):
    """Spark's dialect without sqlglot's interpretation of functions, which renames and rearranges
    them.
    """

    class Parser(SparkParser):
        FUNCTIONS: ClassVar = {}
        FUNCTION_PARSERS: ClassVar = {
            name: SparkParser.FUNCTION_PARSERS[name] for name in _SPECIAL_SYNTAX
        }


_DIALECT = Dialect()


def parse_sql(text: str, *, where: str) -> exp.Expr:
    """The tree of one expression. Raises BadExpression, with the position, if it cannot be
    parsed.
    """
    if not isinstance(text, str):
        raise BadExpression(
            f"The step {where} was given a {type(text).__name__}, not an expression.",
            fix="write Spark SQL in a text, as in 'amount * 2'.",
        )
    if not text.strip():
        raise BadExpression(
            f"The step {where} has an empty expression.", fix="write Spark SQL, as in 'amount * 2'."
        )
    if len(text) > MAX_CHARACTERS:
        raise BadExpression(
            f"The step {where} has an expression of {len(text):,} characters.",
            fix="split it with with_columns.",
        )
    try:
        trees = _DIALECT.parse(text)
    except ParseError as error:
        _fail(text, error, where=where)
    except TokenError as error:
        raise BadExpression(
            f"The step {where} has an expression that cannot be read: {text!r}."
            f" {_first_line(error)}",
            fix="close quotes and comments.",
        ) from None
    except RecursionError:
        raise BadExpression(
            f"The step {where} has an expression that is nested too deeply.",
            fix="split it with with_columns.",
        ) from None
    if len(trees) != 1 or trees[0] is None:
        raise BadExpression(
            f"The step {where} has {text!r}, which is more than one expression.",
            fix="leave out the semicolon.",
        )
    return trees[0]


def _fail(text: str, error: ParseError, *, where: str) -> NoReturn:
    details = error.errors[0] if error.errors else {}
    line, column = int(details.get("line") or 1), int(details.get("col") or 1)
    highlight = str(details.get("highlight") or "")
    start = max(0, column - len(highlight))
    what = f"near {highlight!r}" if highlight.strip() else "at its end"
    raise BadExpression(
        f"The step {where} has an expression that cannot be read at line {line}, position"
        f" {start + 1}, {what}:\n{caret_excerpt(text, line, start)}",
        fix="write it as Spark SQL does, as in \"amount * 2 > 10 AND region = 'north'\".",
    ) from None


def caret_excerpt(text: str, line: int, start: int) -> str:
    """A line of the text, with a caret below a position."""
    shown = text.splitlines()[line - 1] if text.splitlines() else ""
    begin = max(0, start - 60)
    return f"    {shown[begin : begin + 120]}\n    {' ' * (start - begin)}^"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else ""
