"""The parser of conditions and measures, which users write in Spark SQL. Expressions are parsed and
compiled by `headrace.expressions`; what is added here are the terms of a match: columns of a
symbol's rows, prev, first and last, aggregates, classifier() and match_number(), FINAL and RUNNING.

A condition is split at its ANDs into what a row alone decides, what needs rows before it, and what
needs the match so far:

    amount > 10 AND amount > prev(amount) AND amount > avg(b.amount)

    by_row        amount > 10              a bit of the row, computed when it arrives
    by_neighbors  amount > prev(amount)    computed when the row is certain to be in order
    by_match      amount > avg(b.amount)   computed during matching
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import TokenError
from sqlglot.tokenizer_core import Token, TokenType

from headrace.errors import BadExpression, BadPattern, UnknownColumn, nearest
from headrace.expressions.compiler import Compiler
from headrace.expressions.evaluator import ColumnReference, Node
from headrace.expressions.function_calls import CallExtractor, called_function, may_have_calls
from headrace.expressions.parser import parse_sql, to_sql
from headrace.expressions.typed_expression import ExpressionRefused
from headrace.operators.aggregates.specs import UnfitType
from headrace.operators.patterns.conditions import (
    AGGREGATES,
    CLASSIFIER,
    COUNT,
    FIRST,
    LAST,
    MATCH_NUMBER,
    NAVIGATION,
    ConditionExpression,
    RowExpression,
    Term,
)

# FINAL and RUNNING, which SQL writes before a call in a measure, as calls around it: `final sum(a)
# - sum(a)` becomes `final(sum(a)) - sum(a)`


FINAL, RUNNING = "final", "running"


def parenthesize_modifiers(text: str) -> str:
    """The text with parentheses behind FINAL and RUNNING. A text that cannot be tokenized is
    returned unchanged: the parser reports it.
    """
    try:
        tokens = list(Spark().tokenize(text))
    except TokenError:
        return text
    # The modifiers that get an opening parenthesis, and how many are closed behind which tokens.
    opened, closed = set(), dict[int, int]()
    for number, (token, following) in enumerate(pairwise(tokens)):
        if (
            token.text.lower() in (FINAL, RUNNING)
            and following.token_type not in (TokenType.L_PAREN, TokenType.DOT)
            and (following.text[:1].isalpha() or following.text[:1] == "_")
        ):
            opened.add(number)
            end = _call_end(tokens, number + 1)
            closed[end] = closed.get(end, 0) + 1
    parts, index = [], 0
    for number, token in enumerate(tokens):
        parts += [
            text[index : token.end + 1],
            "(" if number in opened else "",
            ")" * closed.get(number, 0),
        ]
        index = token.end + 1
    return "".join([*parts, text[index:]])


def _call_end(tokens: list[Token], index: int) -> int:
    """The last token of a call, or of a column."""
    while index + 2 < len(tokens) and tokens[index + 1].token_type == TokenType.DOT:
        index += 2
    if index + 1 >= len(tokens) or tokens[index + 1].token_type != TokenType.L_PAREN:
        return index
    depth = 0
    for number in range(index + 1, len(tokens)):
        depth += (tokens[number].token_type == TokenType.L_PAREN) - (
            tokens[number].token_type == TokenType.R_PAREN
        )
        if depth == 0:
            return number
    return len(tokens) - 1


MAX_BACK = 1000
MAX_DEPTH = 100
MAX_SHOWN = 1000
"""The most characters of a text that an error shows whole."""
PATTERN_FUNCTIONS = (*NAVIGATION, *AGGREGATES, CLASSIFIER, MATCH_NUMBER)


@dataclass(frozen=True)
class PatternNames:
    """The names in a pattern: the columns of its rows, its symbols, and subsets of these."""

    schema: pa.Schema
    symbols: tuple[str, ...]
    subsets: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def members(self, name: str) -> tuple[str, ...] | None:
        """The symbols that a name stands for; None if it is no such name."""
        known = {**{symbol: (symbol,) for symbol in self.symbols}, **dict(self.subsets)}
        alike = {each.lower(): members for each, members in known.items()}
        return known.get(name) or alike.get(name.lower())


@dataclass(frozen=True)
class Definition:
    """The condition of a symbol: the parts that a row alone decides, as Spark SQL; the part that
    needs rows before it in its key; and the part that needs the match so far.
    """

    symbol: str
    by_row: tuple[str, ...] = ()
    by_neighbors: ConditionExpression | None = None
    by_match: ConditionExpression | None = None

    @property
    def condition(self) -> str:
        """What a row alone decides, as one condition."""
        return (
            self.by_row[0]
            if len(self.by_row) == 1
            else " AND ".join(f"({each})" for each in self.by_row)
        )


def parse_measure_sql(text: Any, *, where: str) -> exp.Expr:
    """Parse a measure, which may have FINAL or RUNNING before calls, with sqlglot."""
    if isinstance(text, str):
        text = parenthesize_modifiers(text)
    return parse_sql(text, where=where, max_characters=None)


def rewrite_calls(text: str, extractor: CallExtractor, names: PatternNames, *, where: str) -> str:
    """A condition or measure with columns instead of the calls of users' functions.

        tax(b.amount) > sum(tax(a.amount))     b.__call_0 > sum(a.__call_0)

    Raises:
        BadExpression: A call looks at several rows.
    """
    if not may_have_calls(text):
        return text
    tree = parse_measure_sql(text, where=where)

    def replaced(node: exp.Expr) -> exp.Expr:
        function = called_function(node)
        if function is None:
            return node
        columns = list(node.find_all(exp.Column))
        symbols = {each.table for each in columns if names.members(each.table)}
        calls = [each for each in node.find_all(exp.Anonymous) if each is not node]
        of_match = [each for each in calls if str(each.this).lower() in PATTERN_FUNCTIONS]
        unnamed = any(not names.members(each.table) for each in columns)
        if of_match or len(symbols) > 1 or (symbols and unnamed):
            call = f"{function.name}({', '.join(map(to_sql, node.expressions))})"
            raise BadExpression(
                f"The step {where} has {call!r}, which looks at several rows of a match: a"
                " function is computed of one row, before the rows are matched.",
                fix="call it within first(…), last(…), prev(…) or an aggregate, as in"
                " first(tax(a.amount)), and name one symbol in it.",
            )
        for each in columns:
            if names.members(each.table):
                each.set("table", None)
        column = exp.to_identifier(extractor.column_of(node), quoted=True)
        return exp.column(column, table=next(iter(symbols), None))

    rewritten = tree.transform(replaced)
    return to_sql(rewritten) if rewritten != tree else text


def compile_measure(text: str, names: PatternNames, *, where: str) -> ConditionExpression:
    """Compile a measure: an expression over the rows of a match."""
    return _compile(parse_measure_sql(text, where=where), text, names, where=where, is_measure=True)


def compile_row_condition(
    symbol: str, text: str, names: PatternNames, *, where: str
) -> ConditionExpression:
    """Compile what a row alone decides about a symbol.

    Raises:
        BadExpression: the text is no condition, or more than can be computed here.
    """
    result = _compile_conjunction(
        [parse_sql(text, where=where, max_characters=None)], text, names, symbol, where
    )
    assert result is not None
    return result


def _compile(
    tree: exp.Expr, text: str, names: PatternNames, *, where: str, is_measure: bool = False
) -> ConditionExpression:
    reader = _TermReader(names, text, where, is_measure=is_measure)
    try:
        node = reader.compiler.node(tree)
    except ExpressionRefused as refused:
        shown = text if len(text) <= MAX_SHOWN else f"{text[:80]} …"
        raise BadExpression(
            f"The step {where} cannot use {shown!r}: {refused.message}",
            fix=refused.fix
            or "use arithmetic, comparisons, AND, OR, NOT, CASE, and the functions of patterns.",
        ) from None
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError, UnfitType) as error:
        message = str(error).splitlines()[0]
        raise BadExpression(
            f"The step {where} cannot compute {text!r}: {message}",
            fix="cast what is of another type, as in CAST(amount AS DOUBLE).",
        ) from None
    return ConditionExpression(text, node, tuple(reader.terms))


def parse_definition(
    symbol: str, text: str, names: PatternNames, before: Collection[str], *, where: str
) -> Definition:
    """Parse the condition of a symbol and split it at its ANDs. `before` are the symbols that a
    match can have before it.
    """
    by_row: list[str] = []
    by_neighbors: list[exp.Expr] = []
    by_match: list[exp.Expr] = []
    whole = parse_sql(text, where=where, max_characters=None)
    parts = list(whole.flatten()) if isinstance(whole, exp.And) else [whole]
    for part in parts:
        plain = _without_own_name(part, symbol, names)
        if not _looks_at_match(plain, names):
            by_row.append(text if len(parts) == 1 and plain == part else to_sql(plain))
            continue
        expression = _compile(part, text, names, where=where)
        _check_order(symbol, expression, before, where=where)
        needs_match = not all(
            term.kind == LAST and not term.offset and term.symbols in (None, (symbol,))
            for term in expression.terms
        )
        (by_match if needs_match else by_neighbors).append(part)
    return Definition(
        symbol=symbol,
        by_row=tuple(by_row),
        by_neighbors=_compile_conjunction(by_neighbors, text, names, symbol, where),
        by_match=_compile_conjunction(by_match, text, names, symbol, where),
    )


def _compile_conjunction(
    parts: Sequence[exp.Expr], text: str, names: PatternNames, symbol: str, where: str
) -> ConditionExpression | None:
    if not parts:
        return None
    result = _compile(exp.and_(*parts) if len(parts) > 1 else parts[0], text, names, where=where)
    if result.type != pa.bool_():
        raise BadExpression(
            f"The step {where} defines {symbol!r} by {text!r}, which is {result.type} and no"
            " condition.",
            fix="compare it with something.",
        )
    own = (symbol,)
    return replace(
        result,
        terms=tuple(
            (
                replace(term, symbols=None)
                if term.kind == LAST and term.symbols == own and not term.offset
                else term
            )
            for term in result.terms
        ),
    )


def _check_order(
    symbol: str, expression: ConditionExpression, before: Collection[str], *, where: str
) -> None:
    for term in expression.terms:
        later = [name for name in term.symbols or () if name != symbol and name not in before]
        if term.symbols and len(later) == len(term.symbols):
            raise BadPattern(
                f"The step {where} defines {symbol!r} by {expression.text!r}, which looks at"
                f" {later[0]!r}: no row of that comes before one of {symbol!r}.",
                fix=(
                    "look at symbols that come before, or put the condition on the one that comes"
                    " last."
                ),
            )


def _without_own_name(tree: exp.Expr, symbol: str, names: PatternNames) -> exp.Expr:
    """Replace `big.amount` in the condition of `big` by the row's own amount."""

    def plain(node: exp.Expr) -> exp.Expr:
        own = (
            isinstance(node, exp.Column)
            and node.table
            and not isinstance(node.this, exp.Star)
            and names.members(node.table) == (symbol,)
        )
        return exp.column(node.this) if own and not _inside_a_call(node) else node

    return tree.copy().transform(plain)


def _inside_a_call(node: exp.Expr) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, exp.Anonymous) and str(parent.this).lower() in PATTERN_FUNCTIONS:
            return True
        parent = parent.parent
    return False


def _looks_at_match(tree: exp.Expr, names: PatternNames) -> bool:
    for node in tree.walk():
        if isinstance(node, exp.Anonymous) and str(node.this).lower() in (
            *PATTERN_FUNCTIONS,
            "next",
        ):
            return True
        if (
            isinstance(node, exp.Column)
            and node.table
            and (names.members(node.table) or node.table not in names.schema.names)
        ):
            return True
    return False


class _TermReader:
    """Resolves what an expression reads of a match to terms, and collects them. An expression reads
    each term as a column, by its number.
    """

    def __init__(
        self, names: PatternNames, text: str, where: str, *, is_measure: bool = False
    ) -> None:
        self.names, self.text, self.where, self.is_measure = names, text, where, is_measure
        self.terms: list[Term] = []
        self.compiler = Compiler(
            self.resolve,
            over="over the rows of a match",
            functions=PATTERN_FUNCTIONS,
            max_depth=MAX_DEPTH,
        )
        self._final = False

    def resolve(self, tree: exp.Expr) -> Node | None:
        """The node of a column or of a pattern's function; None for everything else."""
        if isinstance(tree, exp.Column):
            return self._reference(self._column_term(tree, LAST))
        if not isinstance(tree, exp.Anonymous):
            return None
        name = str(tree.this).lower()
        if name == "next":
            raise ExpressionRefused(
                "next() looks at rows that come later.",
                "put the condition on the symbol that comes later, with prev().",
            )
        if name in (FINAL, RUNNING) and self.is_measure:
            if len(tree.expressions) != 1:
                raise ExpressionRefused(
                    f"{name} stands before one call.", f"write it as in {name} sum(amount)."
                )
            before, self._final = self._final, name == FINAL
            result = self.compiler.node(tree.expressions[0])
            self._final = before
            return result
        if name in (CLASSIFIER, MATCH_NUMBER):
            return self._reference(self._match_term(tree, name))
        if name in NAVIGATION:
            return self._reference(self._navigation(tree))
        if name in AGGREGATES:
            return self._reference(self._aggregate(name, tree.expressions))
        return None

    def _reference(self, term: Term) -> Node:
        term = replace(term, final=self._final)
        if term not in self.terms:
            self.terms.append(term)
        return ColumnReference(self.terms.index(term), term.type(self.names.schema))

    def _column_term(self, tree: exp.Expr, kind: str, offset: int = 0, look_back: int = 0) -> Term:
        """A column of a row, `amount` or `big.amount`, or an expression over columns of one row."""
        if isinstance(tree, exp.Star) or isinstance(tree.this, exp.Star):
            raise ExpressionRefused(
                f"{to_sql(tree)} is not a column.", "only count() takes all columns."
            )
        if not isinstance(tree, exp.Column):
            return self._expression_term(tree, kind, offset, look_back)
        symbols, columns = self._symbols(tree), self.names.schema.names
        alike = [name for name in columns if name.lower() == tree.name.lower()]
        if tree.name not in columns and len(alike) != 1:
            raise UnknownColumn(tree.name, columns, where=f"The input of the step {self.where}")
        return Term(
            kind=kind,
            symbols=symbols,
            column=tree.name if tree.name in columns else alike[0],
            offset=offset,
            look_back=look_back,
        )

    def _expression_term(self, tree: exp.Expr, kind: str, offset: int, look_back: int) -> Term:
        """A term of an expression: all of its columns are of the rows of one symbol, or of all."""
        columns: list[str] = []
        symbols: set[tuple[str, ...] | None] = set()

        def resolve(part: exp.Expr) -> Node | None:
            if isinstance(part, exp.Column):
                term = self._column_term(part, LAST)
                symbols.add(term.symbols)
                if str(term.column) not in columns:
                    columns.append(str(term.column))
                return ColumnReference(columns.index(str(term.column)), term.type(schema))
            if isinstance(part, exp.Anonymous) and str(part.this).lower() in (
                *PATTERN_FUNCTIONS,
                FINAL,
                RUNNING,
            ):
                raise ExpressionRefused(
                    f"{to_sql(tree)} looks at other rows within what is computed of one row.",
                    "aggregate plain expressions, as in sum(a.price * a.quantity).",
                )
            return None

        schema = self.names.schema
        node = Compiler(
            resolve,
            over="over a row of a match",
            functions=PATTERN_FUNCTIONS,
            max_depth=MAX_DEPTH,
        ).node(tree)
        if len(symbols) > 1:
            raise ExpressionRefused(
                f"{to_sql(tree)} has columns of different symbols: it is computed of one row.",
                "name the same symbol before each column, or a subset of them.",
            )
        plain = exp.column
        text = to_sql(
            tree.copy().transform(
                lambda each: plain(each.this) if isinstance(each, exp.Column) else each
            )
        )
        expression = RowExpression(text, node, tuple(columns))
        return Term(
            kind=kind,
            symbols=next(iter(symbols), None),
            column=expression.name,
            offset=offset,
            look_back=look_back,
            expression=expression,
        )

    def _symbols(self, tree: exp.Column) -> tuple[str, ...] | None:
        """The symbols before the dot; None if there are none."""
        if not tree.table:
            return None
        members = self.names.members(tree.table)
        if members is None:
            known = (*self.names.symbols, *(name for name, _ in self.names.subsets))
            raise BadPattern(
                f"The step {self.where} has {self.text!r}, and {tree.table!r} is no symbol of the"
                f" pattern: {nearest(tree.table, known)}"
            )
        return members

    def _match_term(self, tree: exp.Anonymous, name: str) -> Term:
        """The term of classifier(), classifier(both) or match_number()."""
        if name == MATCH_NUMBER and not self.is_measure:
            raise ExpressionRefused(
                "a match has a number when it is certain, so conditions cannot look at it.",
                "use match_number() in measures.",
            )
        if not tree.expressions:
            return Term(name)
        argument, *more = tree.expressions
        members = (
            self.names.members(argument.name)
            if isinstance(argument, exp.Column) and not argument.table
            else None
        )
        if name == MATCH_NUMBER or more or members is None:
            raise ExpressionRefused(
                f"{name}() takes {'nothing' if name == MATCH_NUMBER else 'a symbol, or nothing'}.",
                "write it as in classifier(both), with the name of a subset.",
            )
        return Term(name, members)

    def _navigation(self, tree: exp.Anonymous) -> Term:
        """The term of first(a.x, 1), last(a.x), prev(x, 2) or prev(last(a.x), 1)."""
        name = str(tree.this).lower()
        if not 1 <= len(tree.expressions) <= 2:
            raise ExpressionRefused(f"{name}() takes a column, and how many rows from it.")
        inner = tree.expressions[0]
        offset = int(name == "prev")
        if len(tree.expressions) > 1:
            number = tree.expressions[1]
            if (
                not isinstance(number, exp.Literal)
                or number.is_string
                or not str(number.this).isdigit()
                or int(number.this) > MAX_BACK
            ):
                raise ExpressionRefused(
                    f"how many rows {name}() goes must be a whole number up to {MAX_BACK}."
                )
            offset = int(number.this)
        if name != "prev":
            return self._column_term(inner, name, offset)
        if isinstance(inner, exp.Anonymous) and str(inner.this).lower() in (FIRST, LAST):
            return replace(self._navigation(inner), look_back=offset)
        return self._column_term(inner, LAST, look_back=offset)

    def _aggregate(self, name: str, arguments: Sequence[exp.Expr]) -> Term:
        """The term of count(*), count(a.*), or an aggregate over a column."""
        if len(arguments) != 1:
            raise ExpressionRefused(f"{name}() takes one column.")
        (tree,) = arguments
        if name == COUNT and isinstance(tree, exp.Star):
            return Term(COUNT)
        if name == COUNT and isinstance(tree, exp.Column) and isinstance(tree.this, exp.Star):
            return Term(COUNT, self._symbols(tree))
        term = self._column_term(tree, LAST)
        kind = term.type(self.names.schema)
        if name != COUNT and pa.types.is_nested(kind):
            raise ExpressionRefused(f"{name}() does not take {term.column!r}, which is {kind}.")
        return replace(term, kind=name)
