"""Calls of functions: by a signature, or by a rule of their own (alternatives, elements, casts by
name, patterns with groups, structs, maps, texts in other formats).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from headrace.errors import BadSchema
from headrace.expressions import arithmetic, casts, literals, time_units, type_rules
from headrace.expressions.lambdas import LAMBDA_FUNCTIONS
from headrace.expressions.nested_values import NESTED_FUNCTIONS
from headrace.expressions.signatures import Binding, call_by_signature
from headrace.expressions.type_rules import BOOLEAN, INT, INTERVAL, STRING
from headrace.expressions.typed_expression import (
    ExpressionRefused,
    TypedExpression,
    branches,
    either,
    failed_any,
    fallible,
    guarded,
    infallible,
    leaf,
    when,
)
from headrace.types.ddl import VARIANT_TYPE, parse_columns
from headrace.types.schema import is_variant, type_name

Handler = Callable[[str, Sequence[TypedExpression]], TypedExpression]
NULL = leaf(type_rules.VOID, "NULL", value=None)


def call(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """A call of any function but struct, if, CASE and those with lambdas or units of time, which
    the type checker handles.
    """
    if name not in _SPECIAL:
        return call_by_signature(name, arguments, others=SPECIAL_NAMES)
    handler, min_arguments, max_arguments = _SPECIAL[name]
    if not min_arguments <= len(arguments) <= max_arguments:
        if min_arguments == max_arguments:
            expected = f"{min_arguments}"
        elif max_arguments == _MANY:
            expected = f"{min_arguments} or more"
        else:
            expected = f"{min_arguments} to {max_arguments}"
        raise ExpressionRefused(
            f"{name} was given {len(arguments)} arguments.", f"it takes {expected}."
        )
    return handler(name, arguments)


def alternatives(
    operands: Sequence[TypedExpression], *, what: str
) -> tuple[pa.DataType, list[TypedExpression]]:
    """Values of which one is the result, and their type. Times are cast to it; numbers are widened
    by Spark.
    """
    kind = casts.common_type(operands, what=what)
    return kind, [
        (
            casts.cast(each, kind, explicit=False)
            if type_rules.is_time(kind) and not each.is_null
            else each
        )
        for each in operands
    ]


def coalesce(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """COALESCE: values are evaluated in order, up to the first that is not null."""
    kind, operands = alternatives(arguments, what=name)
    failed = None
    for operand in reversed(operands):
        failed = either(operand.failed, when(f"{operand.safe} IS NULL", failed, None))
    return TypedExpression(
        kind,
        f"coalesce({', '.join(each.sql for each in operands)})",
        f"coalesce({', '.join(each.safe for each in operands)})",
        failed,
    )


def if_expression(
    condition: TypedExpression,
    then: TypedExpression,
    otherwise: TypedExpression,
    *,
    what: str = "if",
) -> TypedExpression:
    check_boolean(condition, what=what)
    kind, (then, otherwise) = alternatives([then, otherwise], what=what)
    return branches(kind, [condition], [then], otherwise)


def check_boolean(operand: TypedExpression, *, what: str) -> TypedExpression:
    if operand.type not in (BOOLEAN, type_rules.VOID):
        raise ExpressionRefused(
            f"A condition of {what} is {type_name(operand.type)}, not BOOLEAN.",
            "compare it with something, as in 'amount > 0'.",
        )
    return operand


def comparison(sign: str, left: TypedExpression, right: TypedExpression) -> TypedExpression:
    """A comparison. A bare NULL on either side is refused, but for <=>."""
    left, right = comparable_sides(left, right, what=sign)
    return infallible(BOOLEAN, f"({{0}} {sign} {{1}})", left, right)


def comparable_sides(
    left: TypedExpression, right: TypedExpression, *, what: str
) -> tuple[TypedExpression, TypedExpression]:
    """Two values that are compared, with a text literal converted to the other side's type."""
    if what != "<=>" and (left.is_null or right.is_null):
        raise ExpressionRefused(
            f"Nothing is {what} NULL: the result is always null.", "write IS NULL or IS NOT NULL."
        )
    if left.type == STRING and left.is_literal and right.type not in (STRING, type_rules.VOID):
        left = casts.literal_as(left, right.type)
    elif right.type == STRING and right.is_literal and left.type not in (STRING, type_rules.VOID):
        right = casts.literal_as(right, left.type)
    kind = type_rules.least_common_type([left.type, right.type])
    if kind is None or not type_rules.is_comparable(kind):
        raise ExpressionRefused(
            f"{type_name(left.type)} {what} {type_name(right.type)} cannot be compared.",
            "cast one side to the other's type.",
        )
    if type_rules.is_time(kind):
        return casts.cast(left, kind, explicit=False), casts.cast(right, kind, explicit=False)
    return left, right


def element(
    sequence: TypedExpression, index: TypedExpression, *, from_zero: bool
) -> TypedExpression:
    """`items[0]` and `element_at(items, 1)`. An index outside of an array is a failure; a key that
    a map does not have gives null.
    """
    if pa.types.is_map(sequence.type):
        key = Binding({"K": sequence.type.key_type}).fit(index, "K")
        if key is None:
            raise ExpressionRefused(
                f"The map's keys are {type_name(sequence.type.key_type)}, not"
                f" {type_name(index.type)}.",
                "cast the key.",
            )
        return infallible(
            sequence.type.item_type,
            "{0}[{1}]" if from_zero else "element_at({0}, {1})",
            sequence,
            key,
        )
    if (
        not pa.types.is_list(sequence.type)
        or not type_rules.is_integer(index.type)
        or index.type == type_rules.BIGINT
    ):
        raise ExpressionRefused(
            f"{type_name(sequence.type)} has no element at a {type_name(index.type)}.",
            "take elements of an ARRAY by an INT, of a MAP by its key.",
        )
    if from_zero:
        outside = "({1} < 0 OR {1} >= size({0}))"
        return fallible(
            sequence.type.value_type,
            "{0}[{1}]",
            "get({0}, {1})",
            sequence,
            index,
            failed_if=outside,
        )
    outside = "({1} = 0 OR abs(CAST({1} AS BIGINT)) > size({0}))"
    return fallible(
        sequence.type.value_type,
        "element_at({0}, {1})",
        "try_element_at({0}, nullif({1}, 0))",
        sequence,
        index,
        failed_if=outside,
    )


def concat(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """Texts, bytes or arrays, concatenated; null if one is null."""
    kind = casts.common_type(arguments, what=name)
    if kind not in (STRING, type_rules.BINARY) and not pa.types.is_list(kind):
        raise ExpressionRefused(
            f"{name} takes texts, bytes or arrays, not {type_name(kind)}.",
            "cast numbers and times: CAST(… AS STRING).",
        )
    return infallible(
        kind,
        f"concat({', '.join(f'{{{position}}}' for position in range(len(arguments)))})",
        *arguments,
    )


def _same_type(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`greatest`, `least` and `array`, whose arguments have one type."""
    kind, operands = alternatives(arguments, what=name)
    slots = ", ".join(f"{{{index}}}" for index in range(len(operands)))
    return infallible(pa.list_(kind) if name == "array" else kind, f"{name}({slots})", *operands)


def _nullif(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    left, right = comparable_sides(*arguments, what="=")
    return infallible(left.type, "nullif({0}, {1})", left, right)


def _nvl2(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    condition = infallible(BOOLEAN, "({0} IS NOT NULL)", arguments[0])
    return if_expression(condition, arguments[1], arguments[2], what="nvl2")


def _is_null(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return infallible(BOOLEAN, f"({{0}} IS {'' if name == 'isnull' else 'NOT '}NULL)", arguments[0])


def _round(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return arithmetic.round_number(name, arguments[0], arguments[1] if len(arguments) > 1 else None)


def _try_arithmetic(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`try_add` and others, whose null is no failure."""
    sign = {
        "try_add": "+",
        "try_subtract": "-",
        "try_multiply": "*",
        "try_divide": "/",
        "try_mod": "%",
    }[name]
    result = arithmetic.arithmetic(sign, *arguments)
    return TypedExpression(result.type, result.safe, result.safe, failed_any(arguments))


def _cast_by_name(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return casts.cast(arguments[0], parse_columns(f"x {name}")[0].type)


def _regexp_extract(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    group = arguments[2] if len(arguments) > 2 else leaf(INT, "1", value=1)
    for each in (arguments[1], group):
        literals.check("literal", each, function=name)
    groups = literals.count_groups(arguments[1].value)
    if not isinstance(group.value, int) or not 0 <= group.value <= groups:
        raise ExpressionRefused(
            f"The pattern {arguments[1].value!r} has {groups} groups, and {name} asks for"
            f" {group.value!r}.",
            "0 is the whole match.",
        )
    check_strings(name, arguments[:2])
    kind = STRING if name == "regexp_extract" else pa.list_(STRING)
    return infallible(kind, f"{name}({{0}}, {{1}}, {group.value})", *arguments[:2])


def _regexp_replace(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    for each in arguments[1:]:
        literals.check("literal", each, function=name)
    literals.replacement(arguments[2].value, literals.count_groups(arguments[1].value))
    check_strings(name, arguments)
    return infallible(STRING, f"{name}({{0}}, {{1}}, {{2}})", *arguments)


def check_strings(name: str, arguments: Sequence[TypedExpression]) -> Sequence[TypedExpression]:
    for each in arguments:
        if each.type != STRING:
            raise ExpressionRefused(
                f"{name} takes texts, not {type_name(each.type)}.", "cast it: CAST(… AS STRING)."
            )
    return arguments


# Texts in other formats


def _parsed(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """from_json, from_csv and from_xml: a text by a schema, maybe with options in a map."""
    check_strings(name, arguments[:2])
    literals.check("literal", arguments[1], function=name)
    kind = _schema(name, str(arguments[1].value))
    template = f"{name}({', '.join(f'{{{each}}}' for each in range(len(arguments)))})"
    _check_options(name, arguments[2:])
    if name == "from_json" and len(arguments) == 2:
        return infallible(kind, template, *arguments)
    return guarded(kind, template, *arguments)


def _schema(name: str, text: str) -> pa.DataType:
    """The type that a schema's text means: columns, or one type. Values can always be null."""
    try:
        kind = pa.struct(parse_columns(text))
    except BadSchema as error:
        try:
            kind = parse_columns(f"x {text}")[0].type
        except BadSchema:
            raise ExpressionRefused(
                f"The schema of {name} cannot be read: {error.message}", error.fix
            ) from None
    if not pa.types.is_nested(kind) or (name != "from_json" and not pa.types.is_struct(kind)):
        raise ExpressionRefused(
            f"{name} cannot give {type_name(kind)}.",
            "name columns, as in 'a INT, b STRING'; CAST converts a single value.",
        )
    return _nullable(kind)


def _nullable(kind: pa.DataType) -> pa.DataType:
    """A type without NOT NULL within."""
    if is_variant(kind):
        return kind
    if pa.types.is_list(kind):
        return pa.list_(_nullable(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_nullable(kind.key_type), _nullable(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct(
            [member.with_type(_nullable(member.type)).with_nullable(True) for member in kind]
        )
    return kind


def _check_options(name: str, options: Sequence[TypedExpression]) -> None:
    for each in options:
        if each.type != pa.map_(STRING, STRING):
            raise ExpressionRefused(
                f"The options of {name} are {type_name(each.type)}.",
                "write them as in map('timestampFormat', 'dd/MM/yyyy').",
            )


def _written(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """to_json, to_csv and to_xml: a text of a nested value, maybe with options in a map."""
    kind = arguments[0].type
    if not pa.types.is_nested(kind) or (name != "to_json" and not pa.types.is_struct(kind)):
        taken = "structs, arrays and maps" if name == "to_json" else "structs"
        raise ExpressionRefused(
            f"{name} takes {taken}, not {type_name(kind)}.", f"wrap it: {name}(struct(…))."
        )
    _check_options(name, arguments[1:])
    if len(arguments) == 1 and name == "to_json":
        return infallible(STRING, f"{name}({{0}})", *arguments)
    slots = ", ".join(f"{{{each}}}" for each in range(len(arguments)))
    return guarded(STRING, f"{name}({slots})", *arguments)


def _variant_get(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    value, path = arguments[:2]
    check_strings(name, [path])
    if not is_variant(value.type):
        raise ExpressionRefused(
            f"{name} takes a VARIANT, not {type_name(value.type)}.", "parse_json makes one."
        )
    kind = value.type
    template = f"{name}({{0}}, {{1}})"
    if len(arguments) > 2:
        literals.check("literal", arguments[2], function=name)
        text = str(arguments[2].value)
        try:
            kind = _nullable(parse_columns(f"x {text}")[0].type)
        except BadSchema as error:
            raise ExpressionRefused(f"{name} has no type {text!r}.", error.fix) from None
        template = f"{name}({{0}}, {{1}}, {literals.quoted_text(text)})"
    return guarded(kind, template, value, path)


def _to_variant(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if not pa.types.is_nested(arguments[0].type):
        raise ExpressionRefused(
            f"{name} takes structs, arrays and maps, not {type_name(arguments[0].type)}.",
            f"wrap it: {name}(struct(…)).",
        )
    return guarded(VARIANT_TYPE, f"{name}({{0}})", *arguments)


def _to_number(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    check_strings(name, arguments)
    literals.check("number_format", arguments[1], function=name)
    before, behind = literals.number_digits(arguments[1].value)
    kind = pa.decimal128(before + behind, behind)
    if name == "try_to_number":
        return infallible(kind, "try_to_number({0}, {1})", *arguments)
    return fallible(kind, "to_number({0}, {1})", "try_to_number({0}, {1})", *arguments)


# Other rules


def like(
    word: str, value: TypedExpression, pattern: TypedExpression, *, negated: bool = False
) -> TypedExpression:
    """LIKE, ILIKE or RLIKE with a pattern that is written out."""
    if value.type != STRING or pattern.type != STRING or not pattern.is_literal:
        raise ExpressionRefused(
            f"{word} takes a text and a pattern that is written out.",
            f"write it as in \"name {word} 'A%'\", and cast what is no text.",
        )
    if word == "RLIKE":
        literals.pattern(pattern.value)
    else:
        literals.like_pattern(pattern.value)
    no = "NOT " if negated else ""
    return infallible(BOOLEAN, f"({{0}} {no}{word} {{1}})", value, pattern)


def _like_by_name(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    word = {"like": "LIKE", "ilike": "ILIKE"}.get(name, "RLIKE")
    return like(word, *arguments)


def _decode(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    """`decode(bytes, charset)`, or `decode(value, search, result, …, default)`, which is a CASE."""
    if len(arguments) == 2:
        text = arguments[0]
        if text.type not in (STRING, type_rules.BINARY):
            raise ExpressionRefused(f"{name} takes bytes, not {type_name(text.type)}.")
        literals.check("charset", arguments[1], function=name)
        return guarded(STRING, "decode({0}, {1})", *arguments)
    value, *others = arguments
    has_default = len(others) % 2 == 1
    pairs = others[:-1] if has_default else others
    conditions = [comparison("<=>", value, search) for search in pairs[::2]]
    results = [*pairs[1::2], *(others[-1:] if has_default else [])]
    kind, operands = alternatives(results, what=name)
    return branches(
        kind, conditions, operands[: len(conditions)], operands[-1] if has_default else None
    )


def _date_part(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    literals.check("literal", arguments[0], function=name)
    return time_units.part(str(arguments[0].value), arguments[1], what=name)


def _null_if_zero(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    operand = arguments[0]
    zero = leaf(INT, "0", value=0)
    if not type_rules.is_number(operand.type):
        raise ExpressionRefused(f"{name} takes numbers, not {type_name(operand.type)}.")
    if name == "nullifzero":
        return infallible(operand.type, "nullifzero({0})", operand)
    kind = casts.common_type([operand, zero], what=name)
    return infallible(kind, "zeroifnull({0})", operand)


def _positive(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    kind = arguments[0].type
    if not type_rules.is_number(kind) and kind not in (INTERVAL, type_rules.MONTHS):
        raise ExpressionRefused(f"{name} takes numbers, not {type_name(kind)}.")
    return infallible(kind, "positive({0})", *arguments)


def _shift(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    shifted = arithmetic.shift({"shiftleft": "<<"}.get(name, ">>"), *arguments)
    return infallible(shifted.type, f"{name}({{0}}, {{1}})", *arguments)


def _type_of(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return infallible(STRING, "typeof({0})", *arguments)


def _floor_or_ceil(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if len(arguments) == 1:
        return arithmetic.floor_or_ceil(name, arguments[0])
    return arithmetic.floor_to_digits(name, *arguments)


def _without_arguments(name: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    if not arguments:
        raise ExpressionRefused(
            f"{name}() is not deterministic, and a replay must give the same rows.",
            "put the time into the rows when they are appended; unix_timestamp(at) is allowed.",
        )
    return call_by_signature(name, arguments)


def _positive_remainder(_: str, arguments: Sequence[TypedExpression]) -> TypedExpression:
    return arithmetic.positive_remainder(*arguments)


_MANY = 1000
_SPECIAL: dict[str, tuple[Handler, int, int]] = {
    "coalesce": (coalesce, 1, _MANY),
    "ifnull": (coalesce, 2, 2),
    "nvl": (coalesce, 2, 2),
    "nvl2": (_nvl2, 3, 3),
    "nullif": (_nullif, 2, 2),
    "isnull": (_is_null, 1, 1),
    "isnotnull": (_is_null, 1, 1),
    "equal_null": (lambda _, arguments: comparison("<=>", *arguments), 2, 2),
    "greatest": (_same_type, 2, _MANY),
    "least": (_same_type, 2, _MANY),
    "array": (_same_type, 1, _MANY),
    "concat": (concat, 1, _MANY),
    "element_at": (lambda _, arguments: element(*arguments, from_zero=False), 2, 2),
    "abs": (lambda _, arguments: arithmetic.absolute_value(arguments[0]), 1, 1),
    "negative": (lambda _, arguments: arithmetic.negate(arguments[0]), 1, 1),
    "mod": (lambda _, arguments: arithmetic.arithmetic("%", *arguments), 2, 2),
    "pmod": (_positive_remainder, 2, 2),
    "round": (_round, 1, 2),
    "bround": (_round, 1, 2),
    **dict.fromkeys(("floor", "ceil", "ceiling"), (_floor_or_ceil, 1, 2)),
    "positive": (_positive, 1, 1),
    "div": (lambda _, arguments: arithmetic.whole_division(*arguments), 2, 2),
    **dict.fromkeys(("shiftleft", "shiftright", "shiftrightunsigned"), (_shift, 2, 2)),
    **dict.fromkeys(("nullifzero", "zeroifnull"), (_null_if_zero, 1, 1)),
    **dict.fromkeys(("like", "ilike", "rlike", "regexp"), (_like_by_name, 2, 2)),
    **dict.fromkeys(("regexp_extract", "regexp_extract_all"), (_regexp_extract, 2, 3)),
    "regexp_replace": (_regexp_replace, 3, 3),
    "decode": (_decode, 2, _MANY),
    "typeof": (_type_of, 1, 1),
    "to_number": (_to_number, 2, 2),
    "try_to_number": (_to_number, 2, 2),
    **dict.fromkeys(("from_json", "from_csv", "from_xml"), (_parsed, 2, 3)),
    **dict.fromkeys(("to_json", "to_csv", "to_xml"), (_written, 1, 2)),
    **dict.fromkeys(("variant_get", "try_variant_get"), (_variant_get, 2, 3)),
    "to_variant_object": (_to_variant, 1, 1),
    **NESTED_FUNCTIONS,
    **dict.fromkeys(("date_part", "datepart"), (_date_part, 2, 2)),
    **dict.fromkeys(("unix_timestamp", "to_unix_timestamp"), (_without_arguments, 0, 2)),
    **dict.fromkeys(
        ("try_add", "try_subtract", "try_multiply", "try_divide", "try_mod"),
        (_try_arithmetic, 2, 2),
    ),
    **dict.fromkeys(
        (
            "boolean",
            "tinyint",
            "smallint",
            "int",
            "bigint",
            "float",
            "double",
            "string",
            "binary",
            "date",
            "timestamp",
            "decimal",
        ),
        (_cast_by_name, 1, 1),
    ),
}
SPECIAL_NAMES = frozenset(
    (
        *_SPECIAL,
        *("if", "struct", "case", "cast", "try_cast", "extract", "timestampadd", "timestampdiff"),
        *LAMBDA_FUNCTIONS,
    )
)
"""The names of functions with rules of their own."""
