"""Which expressions Arrow computes with exactly Spark's results; they are compiled, and the others
are left to Spark.

Columns, literals, arithmetic with a DOUBLE result, comparisons, logic, CASE and IS NULL are
computed as they are. Everything else here is computed optimistically: a value that may differ from
Spark's, or an operation that fails on a row, is noticed, and its batch is computed again by Spark.
So are arithmetic on integers and decimals, fields of JSON texts, and the functions of
`arrow_functions`. The tests compare every expression that is compiled here with Spark, on rows with
edge cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import pyarrow as pa
from sqlglot import exp

from headrace.columnar.json_fields import NAME
from headrace.expressions.arrow_functions import accepts_format, accepts_pattern
from headrace.expressions.compiler import Compiler
from headrace.expressions.evaluator import (
    Cast,
    ColumnReference,
    Constant,
    FunctionCall,
    Infallible,
    JsonField,
    JsonNumber,
    Node,
    cast,
    operation,
)
from headrace.expressions.expression import Expression
from headrace.expressions.parser import COMPARISONS, parse_sql
from headrace.expressions.type_checker import TypeChecker
from headrace.expressions.type_rules import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    INTEGERS,
    STRING,
    TIMESTAMP,
    decimal_type,
    is_integer,
    wider_type,
)
from headrace.expressions.typed_expression import ExpressionRefused, TypedExpression

_ARITHMETIC = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}
_TIME_FIELDS = ("year", "quarter", "month", "day", "hour", "minute", "second")
_SAME = {
    "lcase": "lower",
    "ucase": "upper",
    "len": "length",
    "char_length": "length",
    "character_length": "length",
    "dayofmonth": "day",
    "substr": "substring",
    "nvl": "coalesce",
    "ifnull": "coalesce",
    "date": "to_date",
}


_UNFIT = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError)


class _LeftToSpark(Exception):
    """Arrow's result may differ from Spark's."""


def compile_to_arrow(
    expression: Expression, schema: pa.Schema, *, optimistic: bool = False
) -> Node | None:
    """The tree that computes an expression over a schema; None if Spark must compute it. With
    `optimistic`, also where some values may turn out to need Spark.
    """
    if expression.column is not None:
        return ColumnReference(expression.column, expression.type)
    if expression.type is None or (expression.failed is not None and not optimistic):
        return None
    tree = parse_sql(expression.text, where="expression")
    try:
        node = _SparkSubset(schema, optimistic=optimistic).node(tree)
    except (_LeftToSpark, ExpressionRefused, *_UNFIT):
        return None
    if node.type != expression.type:
        return None
    return node if expression.failed is None else Infallible(node, node.type)


class _SparkSubset:
    """Resolves leaves with the types that Spark gives them, and refuses operators on types for
    which the evaluator's results may differ from Spark's.
    """

    def __init__(self, schema: pa.Schema, *, optimistic: bool) -> None:
        self._checker = TypeChecker(schema, where="expression")
        self._compiler = Compiler(self.resolve)
        self._optimistic = optimistic
        self._checked: dict[int, TypedExpression] = {}

    def node(self, tree: exp.Expr) -> Node:
        """The tree that computes a node of sqlglot's. Raises _LeftToSpark if there is none."""
        return self._compiler.node(tree)

    def _check(self, tree: exp.Expr) -> TypedExpression:
        """The typed expression of a node; cached, since each node is asked for by its parent
        too.
        """
        if id(tree) not in self._checked:
            self._checked[id(tree)] = self._checker.check(tree)
        return self._checked[id(tree)]

    def _require(self, is_exact: bool) -> None:
        if not is_exact:
            raise _LeftToSpark

    def resolve(self, tree: exp.Expr) -> Node | None:
        """Called with each node before its children: see `compiler.Resolve`."""
        match tree:
            case exp.Column() | exp.Literal() | exp.Boolean() | exp.Neg():
                return self._leaf(self._check(tree))
            case exp.Null() | exp.Paren():
                return None
            case exp.Add() | exp.Sub() | exp.Mul() | exp.Div() | exp.Mod():
                return self._arithmetic(_ARITHMETIC[type(tree)], tree, tree.this, tree.expression)
            case exp.EQ() | exp.NEQ() | exp.LT() | exp.LTE() | exp.GT() | exp.GTE():
                return self._comparison(COMPARISONS[type(tree)], tree.this, tree.expression)
            case exp.And() | exp.Or():
                self._require(all(self._check(side).type == BOOLEAN for side in tree.flatten()))
            case exp.Not():
                self._require(self._check(tree.this).type == BOOLEAN)
            case exp.Is():
                self._require(
                    isinstance(tree.expression, exp.Null) or self._check(tree.this).type == BOOLEAN
                )
            case exp.In():
                # Spark finds one type for all values together.
                kinds = {self._check(each).type for each in (tree.this, *tree.expressions)}
                self._require(kinds == {STRING} or all(map(is_integer, kinds)))
            case exp.Between():
                low = self._comparison(">=", tree.this, tree.args["low"])
                return operation("and", low, self._comparison("<=", tree.this, tree.args["high"]))
            case exp.Case():
                return self._case(tree)
            case exp.If():
                return self._alternatives(
                    tree, [tree.this], [tree.args["true"]], tree.args.get("false")
                )
            case exp.Cast():  # and TryCast
                return self._cast(tree)
            case exp.DPipe():
                return self._concat([tree.this, tree.expression])
            case exp.Extract():
                return self._time_field(tree.this.name.lower(), tree.expression)
            case exp.Substring():
                parts = (tree.this, tree.args.get("start"), tree.args.get("length"))
                return self._substring([each for each in parts if each is not None])
            case exp.Anonymous():
                return self._call(tree)
            case _:
                raise _LeftToSpark
        return None

    def _leaf(self, operand: TypedExpression) -> Node:
        if operand.column is not None:
            return ColumnReference(operand.column, operand.type)
        if operand.is_literal and (
            is_integer(operand.type) or operand.type in (DOUBLE, STRING, BOOLEAN)
        ):
            return Constant(operand.value, operand.type)
        if operand.is_literal and pa.types.is_decimal(operand.type):
            # Next to a number that becomes a DOUBLE; elsewhere the operation is refused.
            return Constant(float(operand.value), DOUBLE)
        raise _LeftToSpark

    # Arithmetic and comparisons

    def _arithmetic(self, sign: str, tree: exp.Expr, left: exp.Expr, right: exp.Expr) -> Node:
        kind, operands = self._check(tree).type, [self._check(side) for side in (left, right)]
        if kind == DOUBLE and sign != "%":
            self._require(all(map(_becomes_double, operands)))
            return operation(sign, self.node(left), self.node(right))
        if pa.types.is_decimal(kind):
            self._require(self._optimistic and sign in ("+", "-", "*"))
            result = operation(sign, self._decimal(left), self._decimal(right))
            self._require(result.type == kind)
            return result
        if sign == "%":  # a divisor of -1 overflows
            divisor = operands[1]
            self._require(divisor.is_literal and divisor.value not in (0, -1))
        else:
            self._require(self._optimistic)
        self._require(all(is_integer(each.type) for each in operands) and is_integer(kind))
        result = operation(sign, self.node(left), self.node(right))
        return result if kind == BIGINT else cast(result, kind)

    def _decimal(self, tree: exp.Expr) -> Node:
        """An operand of arithmetic or of a comparison, as a decimal."""
        operand = self._check(tree)
        self._require(is_integer(operand.type) or pa.types.is_decimal(operand.type))
        if operand.is_literal:
            kind = decimal_type(operand.type, int(operand.value))
            return Constant(Decimal(operand.value), kind)
        node = self.node(tree)
        return cast(node, decimal_type(node.type)) if is_integer(node.type) else node

    def _comparison(self, sign: str, left: exp.Expr, right: exp.Expr) -> Node:
        operands = [self._check(side) for side in (left, right)]
        kinds = {operand.type for operand in operands}
        if DOUBLE in kinds:
            self._require(all(map(_becomes_double, operands)))
        elif any(map(pa.types.is_decimal, kinds)):
            self._require(all(is_integer(kind) or pa.types.is_decimal(kind) for kind in kinds))
            wider = wider_type(*(operand.type for operand in operands))
            self._require(wider is not None)
            return operation(sign, *(Cast(self._decimal(side), wider) for side in (left, right)))
        else:
            self._require(
                all(map(is_integer, kinds)) or kinds in ({STRING}, {TIMESTAMP}, {DATE}, {BOOLEAN})
            )
        return operation(sign, self.node(left), self.node(right))

    # Alternatives and casts

    def _case(self, tree: exp.Case) -> Node:
        value, branches = tree.this, tree.args["ifs"]
        conditions = [
            branch.this if value is None else exp.EQ(this=value, expression=branch.this)
            for branch in branches
        ]
        results = [branch.args["true"] for branch in branches]
        return self._alternatives(tree, conditions, results, tree.args.get("default"))

    def _alternatives(
        self,
        tree: exp.Expr,
        conditions: Sequence[exp.Expr],
        results: Sequence[exp.Expr],
        default: exp.Expr | None,
    ) -> Node:
        kind = self._check(tree).type
        self._require(not pa.types.is_null(kind) and not pa.types.is_nested(kind))
        parts: list[Node] = []
        for condition, result in zip(conditions, results, strict=True):
            test = self.node(condition)
            self._require(test.type == BOOLEAN)
            parts += [test, self._as_type(result, kind)]
        parts.append(Constant(None, kind) if default is None else self._as_type(default, kind))
        return operation("case", *parts)

    def _as_type(self, tree: exp.Expr, kind: pa.DataType) -> Node:
        """A value that may be the result of an expression of some type."""
        operand = self._check(tree)
        if operand.is_null:
            return Constant(None, kind)
        if operand.type == kind and not (pa.types.is_decimal(kind) and operand.is_literal):
            return self.node(tree)
        self._require(
            (kind == DOUBLE and _becomes_double(operand))
            or (is_integer(kind) and is_integer(operand.type))
        )
        return cast(self.node(tree), kind)

    def _cast(self, tree: exp.Cast) -> Node:
        """Casts that cannot fail; a field of a JSON text as a number."""
        kind = self._check(tree).type
        if isinstance(tree.this, exp.Anonymous) and tree.this.name.lower() == "get_json_object":
            self._require(isinstance(tree, exp.TryCast) and kind in (INT, BIGINT, DOUBLE))
            return JsonNumber(self._json_field(tree.this, floating=kind == DOUBLE), kind)
        operand = self._check(tree.this)
        if operand.type == TIMESTAMP and kind == DATE:
            return self._function("to_date", tree.this, DATE)
        is_widened = is_integer(operand.type) and (
            kind in (DOUBLE, STRING)
            or (is_integer(kind) and INTEGERS.index(operand.type) <= INTEGERS.index(kind))
        )
        self._require(is_widened or (operand.type == FLOAT and kind == DOUBLE))
        return cast(self.node(tree.this), kind)

    # Functions

    def _call(self, tree: exp.Anonymous) -> Node:
        written = str(tree.this).lower()
        name, arguments = _SAME.get(written, written), tree.expressions
        kind = self._check(tree).type
        kinds = [self._check(each).type for each in arguments]
        if name == "get_json_object":
            return self._json_field(tree)
        if name in _TIME_FIELDS and len(arguments) == 1:
            return self._time_field(name, arguments[0])
        if name == "mod":
            return self._arithmetic("%", tree, *arguments)
        if name == "if":
            return self._alternatives(tree, arguments[:1], arguments[1:2], (*arguments, None)[2])
        if name == "coalesce":
            return operation("coalesce", *(self._as_type(each, kind) for each in arguments))
        if name == "concat":
            return self._concat(arguments)
        if name in ("isnull", "isnotnull"):
            is_null = operation("is null", self.node(arguments[0]))
            return is_null if name == "isnull" else operation("not", is_null)
        if name == "substring":
            return self._substring(arguments)
        if name == "to_date" and kinds == [TIMESTAMP]:
            return self._function(name, arguments[0], DATE)
        if not kinds or kinds[0] not in (STRING, TIMESTAMP):
            raise _LeftToSpark
        return self._function(name, arguments[0], kind, *arguments[1:])

    def _function(
        self, name: str, operand: exp.Expr, kind: pa.DataType, *parameters: exp.Expr
    ) -> Node:
        """A call of a function of `arrow_functions` whose further arguments are written out."""
        self._require(not self._check(operand).is_literal)
        checked = [self._check(each) for each in parameters]
        self._require(all(each.is_literal and each.value is not None for each in checked))
        values = tuple(each.value for each in checked)
        match name, values:
            case (("lower" | "upper" | "to_date"), ()):
                self._require(self._optimistic)
            case "length", ():
                pass
            case (("startswith" | "endswith" | "contains"), (str(),)):
                pass
            case "split_part", (str() as delimiter, int() as part):
                self._require(delimiter != "" and part != 0)
            case "replace", (str() as searched, *replacement):
                self._require(searched != "")
                values = (searched, *(replacement or [""]))
            case "regexp_extract", (str() as pattern, *group):
                self._require(accepts_pattern(pattern))
                values = (pattern, *(group or [1]))
            case "date_format", (str() as pattern,):
                self._require(self._optimistic and accepts_format(pattern))
            case _:
                raise _LeftToSpark
        return FunctionCall(name, self.node(operand), values, kind)

    def _time_field(self, name: str, operand: exp.Expr) -> Node:
        kind = self._check(operand).type
        self._require(self._optimistic and name in _TIME_FIELDS and kind in (TIMESTAMP, DATE))
        self._require(not self._check(operand).is_literal)
        return FunctionCall(name, self.node(operand), (), INT)

    def _substring(self, arguments: Sequence[exp.Expr]) -> Node:
        checked = [self._check(each) for each in arguments]
        self._require(checked[0].type == STRING and not checked[0].is_literal)
        self._require(all(each.is_literal and is_integer(each.type) for each in checked[1:]))
        start, length = (*(int(each.value) for each in checked[1:]), None)[:2]
        self._require(isinstance(start, int) and start > 0 and (length is None or length >= 0))
        return FunctionCall("substring", self.node(arguments[0]), (start, length), STRING)

    def _concat(self, arguments: Sequence[exp.Expr]) -> Node:
        self._require(all(self._check(each).type == STRING for each in arguments))
        self._require(not all(self._check(each).is_literal for each in arguments))
        return operation("concat", *map(self.node, arguments))

    def _json_field(self, tree: exp.Anonymous, *, floating: bool = False) -> JsonField:
        self._require(self._optimistic)
        column, path = (self._check(each) for each in tree.expressions)
        name = str(path.value).removeprefix("$.")
        if (
            column.column is None
            or column.type != STRING
            or path.value != f"$.{name}"
            or not NAME.fullmatch(name)
        ):
            raise _LeftToSpark
        return JsonField(ColumnReference(column.column, STRING), name, floating)


def _becomes_double(operand: TypedExpression) -> bool:
    """Whether Arrow converts a value to DOUBLE as Spark does. A decimal that is no literal may be
    rounded differently.
    """
    return (
        is_integer(operand.type)
        or operand.type in (FLOAT, DOUBLE)
        or (operand.is_literal and bool(pa.types.is_decimal(operand.type)))
    )
