"""Parses an expression's text to sqlglot's tree, in Spark's dialect: of steps, and of conditions
and measures of patterns. Calls stay as they are written; who uses the tree decides what a function
is.
"""

from __future__ import annotations

from typing import ClassVar

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import TokenType

from headrace.errors import BadExpression

COMPARISONS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
"""How SQL writes the comparisons that steps and patterns have in common."""

MAX_CHARACTERS = 20_000


class Dialect(Spark):
    """Spark's dialect without sqlglot's interpretation of functions, which renames and rearranges
    them. Stored fingerprints have conditions of patterns as this dialect renders them.
    """

    class Parser(SparkParser):
        FUNCTIONS: ClassVar = {}
        FUNCTION_PARSERS: ClassVar = {
            **{
                name: SparkParser.FUNCTION_PARSERS[name]
                for name in ("CAST", "TRY_CAST", "EXTRACT", "SUBSTRING", "TRIM")
            },
            "POSITION": lambda self: self._parse_position_call(),
            "SUBSTR": lambda self: self._parse_substr_call(),
        }
        NO_PAREN_FUNCTIONS: ClassVar = {}

        def _parse_position_call(self) -> exp.Expr:
            """position(a, b) and POSITION(a IN b)."""
            arguments = self._parse_csv(self._parse_bitwise)
            if self._match(TokenType.IN):
                arguments = [exp.In(this=arguments[0], field=self._parse_bitwise())]
            return exp.Anonymous(this="position", expressions=arguments)

        def _parse_substr_call(self) -> exp.Expr:
            """substr(a, 1, 2) and SUBSTR(a FROM 1 FOR 2)."""
            parts = self._parse_substring().args
            arguments = [parts.get(name) for name in ("this", "start", "length")]
            return exp.Anonymous(
                this="substr", expressions=[each for each in arguments if each is not None]
            )


_DIALECT = Dialect()


def to_sql(tree: exp.Expr) -> str:
    """The text of a tree. Its spaces, and the case of its words, need not be the user's."""
    return tree.sql(dialect=_DIALECT)


def parse_sql(text: str, *, where: str, max_characters: int | None = MAX_CHARACTERS) -> exp.Expr:
    """The tree of one expression.

    Args:
        text: The expression.
        where: How errors call the step.
        max_characters: How long the text may be; None for any length.

    Raises:
        BadExpression: The text is no single expression; the message has the position.
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
    if max_characters is not None and len(text) > max_characters:
        raise BadExpression(
            f"The step {where} has an expression of {len(text):,} characters.",
            fix="split it with with_columns.",
        )
    try:
        trees = _DIALECT.parse(text)
    except ParseError as error:
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
    except TokenError as error:
        raise BadExpression(
            f"The step {where} has an expression that cannot be read: {text[:200]!r}."
            f" {str(error).partition(chr(10))[0]}",
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


def caret_excerpt(text: str, line: int, start: int) -> str:
    """A line of the text, with a caret below a position."""
    shown = text.splitlines()[line - 1] if text.splitlines() else ""
    begin = max(0, start - 60)
    return f"    {shown[begin : begin + 120]}\n    {' ' * (start - begin)}^"
