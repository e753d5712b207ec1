"""The parser of conditions and measures, which users write in Spark SQL; it builds the trees of
`conditions.py`.

A condition is split at its ANDs into what a row alone decides, what needs rows before it, and what
needs the match so far:

    amount > 10 AND amount > prev(amount) AND amount > avg(b.amount)

    by_row        amount > 10              a bit of the row, computed when it arrives
    by_neighbors  amount > prev(amount)    computed when the row is certain to be in order
    by_match      amount > avg(b.amount)   computed during matching
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import pyarrow as pa
from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token, TokenType

from headrace.durations import to_us
from headrace.errors import BadExpression, BadPattern, UnknownColumn, nearest
from headrace.operators.aggregates.specs import UnfitType
from headrace.operators.patterns.conditions import (
    AGGREGATES,
    CLASSIFIER,
    COUNT,
    FIRST,
    FUNCTIONS,
    LAST,
    MATCH_NUMBER,
    NAVIGATION,
    ConditionExpression,
    Convert,
    Literal,
    Node,
    Operation,
    Term,
    TermReference,
)
from headrace.operators.patterns.parser import caret_excerpt

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
    opened, closed = _call_bounds(tokens)
    parts, index = [], 0
    for number, token in enumerate(tokens):
        parts += [
            text[index : token.end + 1],
            "(" if number in opened else "",
            ")" * closed.get(number, 0),
        ]
        index = token.end + 1
    return "".join([*parts, text[index:]])


def _call_bounds(tokens: list[Token]) -> tuple[set[int], dict[int, int]]:
    """The indices of the modifiers that get an opening parenthesis, and how many are closed behind
    which tokens.
    """
    opened, closed = set(), dict[int, int]()
    for index in range(len(tokens) - 1):
        if (
            tokens[index].text.lower() in (FINAL, RUNNING)
            and tokens[index + 1].token_type not in (TokenType.L_PAREN, TokenType.DOT)
            and _is_name(tokens[index + 1])
        ):
            opened.add(index)
            end = _call_end(tokens, index + 1)
            closed[end] = closed.get(end, 0) + 1
    return opened, closed


def _is_name(token: Token) -> bool:
    return token.text[:1].isalpha() or token.text[:1] == "_"


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
PATTERN_FUNCTIONS = (*NAVIGATION, *AGGREGATES, CLASSIFIER, MATCH_NUMBER)
_ARITHMETIC: dict[type[exp.Expr], str] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
}
_COMPARISONS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_CASTS = {
    "DOUBLE": pa.float64(),
    "FLOAT": pa.float32(),
    "BIGINT": pa.int64(),
    "INT": pa.int32(),
    "STRING": pa.string(),
    "BOOLEAN": pa.bool_(),
}


class PatternDialect(Spark):
    """Spark's dialect, with function calls left as they are written."""

    class Parser(SparkParser):
        FUNCTIONS: ClassVar = {}
        FUNCTION_PARSERS: ClassVar = {
            name: SparkParser.FUNCTION_PARSERS[name]
            for name in ("CAST", "TRY_CAST", "EXTRACT", "SUBSTRING", "TRIM")
        }
        NO_PAREN_FUNCTIONS: ClassVar = {}


_DIALECT = PatternDialect()


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


def parse_sql(text: Any, *, where: str) -> exp.Expr:
    """Parse one expression with sqlglot.

    Raises:
        BadExpression: the text is no single expression; the message points at the position.
    """
    if not isinstance(text, str) or not text.strip():
        raise BadExpression(
            f"The step {where} has {text!r} where an expression is needed.",
            fix="write Spark SQL, as in 'amount > 1000'.",
        )
    try:
        trees = _DIALECT.parse(text)
    except ParseError as error:
        error_details = error.errors[0] if error.errors else {}
        start = max(
            0, int(error_details.get("col") or 1) - len(str(error_details.get("highlight") or ""))
        )
        raise BadExpression(
            f"The step {where} has an expression that cannot be read:"
            f"\n{caret_excerpt(text, start)}",
            fix="write it as Spark SQL does.",
        ) from None
    except (TokenError, RecursionError):
        raise BadExpression(
            f"The step {where} has an expression that cannot be read: {text[:80]!r}.",
            fix="close quotes, and nest less.",
        ) from None
    if len(trees) != 1 or trees[0] is None:
        raise BadExpression(
            f"The step {where} has {text!r}, which is more than one expression.",
            fix="leave out the semicolon.",
        )
    return trees[0]


def parse_measure_sql(text: Any, *, where: str) -> exp.Expr:
    """Parse a measure, which may have FINAL or RUNNING before calls, with sqlglot."""
    return parse_sql(parenthesize_modifiers(text) if isinstance(text, str) else text, where=where)


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
    result = _compile_conjunction([parse_sql(text, where=where)], text, names, symbol, where)
    assert result is not None
    return result


def _compile(
    tree: exp.Expr, text: str, names: PatternNames, *, where: str, is_measure: bool = False
) -> ConditionExpression:
    reader = ExpressionReader(names, text, where, is_measure=is_measure)
    expression = ConditionExpression(text, reader.node(tree), tuple(reader.terms))
    try:
        expression.type(names.schema)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError, UnfitType) as error:
        message = str(error).splitlines()[0]
        raise BadExpression(
            f"The step {where} cannot compute {text!r}: {message}",
            fix="cast what is of another type, as in CAST(amount AS DOUBLE).",
        ) from None
    return expression


def parse_definition(
    symbol: str, text: str, names: PatternNames, before: Collection[str], *, where: str
) -> Definition:
    """Parse the condition of a symbol and split it at its ANDs. `before` are the symbols that a
    match can have before it.
    """
    by_row: list[str] = []
    by_neighbors: list[exp.Expr] = []
    by_match: list[exp.Expr] = []
    whole = parse_sql(text, where=where)
    parts = list(whole.flatten()) if isinstance(whole, exp.And) else [whole]
    for part in parts:
        plain = _without_own_name(part, symbol, names)
        if not _looks_at_match(plain, names):
            by_row.append(
                text if len(parts) == 1 and plain == part else plain.sql(dialect=_DIALECT)
            )
            continue
        expression = _compile(part, text, names, where=where)
        _check_order(symbol, expression, before, where=where)
        needs_match = not all(_is_by_neighbors(term, symbol) for term in expression.terms)
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
    if result.type(names.schema) != pa.bool_():
        raise BadExpression(
            f"The step {where} defines {symbol!r} by {text!r}, which is {result.type(names.schema)}"
            " and no condition.",
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


def _is_by_neighbors(term: Term, symbol: str) -> bool:
    return (
        term.kind == LAST
        and not term.offset
        and (term.symbols is None or term.symbols == (symbol,))
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


class ExpressionReader:
    """Builds the tree of an expression from sqlglot's. What has no handler here is refused."""

    def __init__(
        self, names: PatternNames, text: str, where: str, *, is_measure: bool = False
    ) -> None:
        self.names, self.text, self.where, self.is_measure = names, text, where, is_measure
        self.terms: list[Term] = []
        self._final = False
        self._depth = 0

    def node(self, tree: exp.Expr) -> Node:
        handler = self._handlers.get(type(tree))
        if handler is None:
            self._refuse(
                f"{type(tree).__name__} ({tree.sql(dialect=_DIALECT)}) is not among what can be"
                " computed over a match"
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise BadExpression(
                f"The step {self.where} cannot use {self.text[:80]!r} …: it is nested more than"
                f" {MAX_DEPTH} deep.",
                fix="write it with fewer parts.",
            )
        result = handler(self, tree)
        self._depth -= 1
        return result

    def _refuse(
        self,
        what: str,
        fix: str = (
            "use arithmetic, comparisons, AND, OR, NOT, CASE, and the functions of patterns."
        ),
    ) -> NoReturn:
        raise BadExpression(f"The step {self.where} cannot use {self.text!r}: {what}.", fix=fix)

    # Terms

    def _reference(self, term: Term) -> Node:
        term = replace(term, final=self._final)
        if term not in self.terms:
            self.terms.append(term)
        return TermReference(self.terms.index(term))

    def _column(self, tree: exp.Column) -> Node:
        return self._reference(self._column_term(tree, LAST))

    def _column_term(self, tree: exp.Expr, kind: str, offset: int = 0, look_back: int = 0) -> Term:
        if not isinstance(tree, exp.Column) or isinstance(tree.this, exp.Star):
            self._refuse(
                f"{tree.sql(dialect=_DIALECT)} is not a column",
                "compute it before the pattern, with with_columns(…), and name that column.",
            )
        return Term(
            kind=kind,
            symbols=self._symbols(tree),
            column=self._name(tree),
            offset=offset,
            look_back=look_back,
        )

    def _symbols(self, tree: exp.Column) -> tuple[str, ...] | None:
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

    def _name(self, tree: exp.Column) -> str:
        if tree.name in self.names.schema.names:
            return tree.name
        alike = [name for name in self.names.schema.names if name.lower() == tree.name.lower()]
        if len(alike) != 1:
            raise UnknownColumn(
                tree.name, self.names.schema.names, where=f"The input of the step {self.where}"
            )
        return str(alike[0])

    def _call(self, tree: exp.Anonymous) -> Node:
        name = str(tree.this).lower()
        if name == "next":
            self._refuse(
                "next() looks at rows that come later",
                "put the condition on the symbol that comes later, with prev().",
            )
        if name in (FINAL, RUNNING) and self.is_measure:
            return self._modified(tree, name)
        if name in (CLASSIFIER, MATCH_NUMBER):
            return self._reference(self._match_term(tree, name))
        if name in NAVIGATION:
            return self._reference(self._navigation(tree))
        if name in AGGREGATES:
            return self._reference(self._aggregate(name, tree.expressions))
        if name not in FUNCTIONS:
            known = (*FUNCTIONS, *PATTERN_FUNCTIONS)
            self._refuse(
                f"there is no function {name}() over the rows of a match", nearest(name, known)
            )
        least, most = FUNCTIONS[name]
        if not least <= len(tree.expressions) <= most:
            self._refuse(
                f"{name}() takes {least} {'argument' if most == least else 'or more arguments'}"
            )
        return Operation(name, tuple(self.node(each) for each in tree.expressions))

    def _modified(self, tree: exp.Anonymous, name: str) -> Node:
        if len(tree.expressions) != 1:
            self._refuse(f"{name} stands before one call", f"write it as in {name} sum(amount).")
        before, self._final = self._final, name == FINAL
        result = self.node(tree.expressions[0])
        self._final = before
        return result

    def _match_term(self, tree: exp.Anonymous, name: str) -> Term:
        """The term of classifier(), classifier(both) or match_number()."""
        if name == MATCH_NUMBER and not self.is_measure:
            self._refuse(
                "a match has a number when it is certain, so conditions cannot look at it",
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
            self._refuse(
                f"{name}() takes {'nothing' if name == MATCH_NUMBER else 'a symbol, or nothing'}",
                "write it as in classifier(both), with the name of a subset.",
            )
        return Term(name, members)

    def _navigation(self, tree: exp.Anonymous) -> Term:
        """The term of first(a.x, 1), last(a.x), prev(x, 2) or prev(last(a.x), 1)."""
        name = str(tree.this).lower()
        if not 1 <= len(tree.expressions) <= 2:
            self._refuse(f"{name}() takes a column, and how many rows from it")
        inner = tree.expressions[0]
        offset = (
            self._offset(name, tree.expressions[1:])
            if len(tree.expressions) > 1
            else int(name == "prev")
        )
        if name != "prev":
            return self._column_term(inner, name, offset)
        if isinstance(inner, exp.Anonymous) and str(inner.this).lower() in (FIRST, LAST):
            return replace(self._navigation(inner), look_back=offset)
        return self._column_term(inner, LAST, look_back=offset)

    def _offset(self, name: str, arguments: Sequence[exp.Expr]) -> int:
        (tree,) = arguments
        if (
            not isinstance(tree, exp.Literal)
            or tree.is_string
            or not str(tree.this).isdigit()
            or int(tree.this) > MAX_BACK
        ):
            self._refuse(f"how many rows {name}() goes must be a whole number up to {MAX_BACK}")
        return int(tree.this)

    def _aggregate(self, name: str, arguments: Sequence[exp.Expr]) -> Term:
        if len(arguments) != 1:
            self._refuse(f"{name}() takes one column")
        (tree,) = arguments
        if name == COUNT and isinstance(tree, exp.Star):
            return Term(COUNT)
        if name == COUNT and isinstance(tree, exp.Column) and isinstance(tree.this, exp.Star):
            return Term(COUNT, self._symbols(tree))
        term = self._column_term(tree, LAST)
        kind = self.names.schema.field(term.column or "").type
        if name != COUNT and pa.types.is_nested(kind):
            self._refuse(f"{name}() does not take {term.column!r}, which is {kind}")
        return replace(term, kind=name)

    # Everything else

    def _literal(self, tree: exp.Literal) -> Node:
        text = str(tree.this)
        if tree.is_string:
            return Literal(text, pa.string())
        return (
            Literal(int(text), pa.int64())
            if text.isdigit() and int(text) < 2**63
            else Literal(float(text), pa.float64())
        )

    def _boolean(self, tree: exp.Boolean) -> Node:
        return Literal(bool(tree.this), pa.bool_())

    def _null(self, _: exp.Null) -> Node:
        return Literal(None, pa.null())

    def _interval(self, tree: exp.Interval) -> Node:
        number, unit = tree.this, tree.args.get("unit")
        if not isinstance(number, exp.Literal) or unit is None:
            self._refuse(
                "an interval must be a number and one unit", "write it as in INTERVAL '90' MINUTE."
            )
        return Literal(
            to_us(f"{number.this} {unit.name.lower()}", what="interval"), pa.duration("us")
        )

    def _paren(self, tree: exp.Paren) -> Node:
        return self.node(tree.this)

    def _operation(self, tree: exp.Expr) -> Node:
        name = _ARITHMETIC.get(type(tree)) or _COMPARISONS[type(tree)]
        return Operation(name, (self.node(tree.this), self.node(tree.expression)))

    def _logic(self, tree: exp.Expr) -> Node:
        return Operation(
            "and" if isinstance(tree, exp.And) else "or",
            tuple(self.node(each) for each in tree.flatten()),
        )

    def _not(self, tree: exp.Not) -> Node:
        return Operation("not", (self.node(tree.this),))

    def _negative(self, tree: exp.Neg) -> Node:
        return Operation("negative", (self.node(tree.this),))

    def _is(self, tree: exp.Is) -> Node:
        operand = self.node(tree.this)
        if isinstance(tree.expression, exp.Null):
            return Operation("is null", (operand,))
        if isinstance(tree.expression, exp.Boolean):
            return Operation(
                "is true", (operand if tree.expression.this else Operation("not", (operand,)),)
            )
        return self._refuse(f"{tree.sql(dialect=_DIALECT)!r} is not IS NULL, IS TRUE or IS FALSE")

    def _in(self, tree: exp.In) -> Node:
        if not tree.expressions:
            self._refuse("IN takes a list of values")
        value = self.node(tree.this)
        return Operation(
            "or",
            (
                Literal(False, pa.bool_()),
                *(Operation("=", (value, self.node(each))) for each in tree.expressions),
            ),
        )

    def _between(self, tree: exp.Between) -> Node:
        value = self.node(tree.this)
        return Operation(
            "and",
            (
                Operation(">=", (value, self.node(tree.args["low"]))),
                Operation("<=", (value, self.node(tree.args["high"]))),
            ),
        )

    def _like(self, tree: exp.Like) -> Node:
        pattern = self.node(tree.expression)
        if not (isinstance(pattern, Literal) and pattern.type == pa.string()):
            self._refuse("LIKE takes a text in quotes")
        return Operation("like", (self.node(tree.this), pattern))

    def _case(self, tree: exp.Case) -> Node:
        value = None if tree.this is None else self.node(tree.this)
        parts: list[Node] = []
        for branch in tree.args["ifs"]:
            condition = self.node(branch.this)
            parts += [
                condition if value is None else Operation("=", (value, condition)),
                self.node(branch.args["true"]),
            ]
        default = tree.args.get("default")
        return Operation(
            "case", (*parts, Literal(None, pa.null()) if default is None else self.node(default))
        )

    def _cast(self, tree: exp.Cast) -> Node:
        kind = _CASTS.get(tree.to.sql("spark").upper())
        if kind is None:
            self._refuse(
                f"a cast to {tree.to.sql('spark')} is not among what can be computed over a match",
                f"cast to one of {', '.join(_CASTS)}.",
            )
        return Convert(self.node(tree.this), kind)

    _handlers: ClassVar[dict[type[exp.Expr], Callable[[ExpressionReader, Any], Node]]] = {
        exp.Column: _column,
        exp.Anonymous: _call,
        exp.Literal: _literal,
        exp.Boolean: _boolean,
        exp.Null: _null,
        exp.Interval: _interval,
        exp.Paren: _paren,
        **dict.fromkeys((*_ARITHMETIC, *_COMPARISONS), _operation),
        exp.And: _logic,
        exp.Or: _logic,
        exp.Not: _not,
        exp.Neg: _negative,
        exp.Is: _is,
        exp.In: _in,
        exp.Between: _between,
        exp.Like: _like,
        exp.Case: _case,
        exp.Cast: _cast,
        exp.TryCast: _cast,
    }
