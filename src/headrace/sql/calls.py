"""Calls in an expression that go by more than one row: aggregates, and functions OVER rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import PlanError
from headrace.operators.aggregates import functions as agg
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.scope import QueryRows
from headrace.sql.script import NUMBER, STRING, WORD, Span


@dataclass(frozen=True)
class SqlCall:
    """A call in an expression: name(arguments) [FILTER (WHERE …)] [IGNORE NULLS] [OVER …]."""

    span: Span
    name: str
    arguments: Span
    filter: Span | None = None
    over: Span | None = None
    over_name: str | None = None
    ignores_nulls: bool = False

    @property
    def is_over(self) -> bool:
        return self.over is not None or self.over_name is not None


def function_calls(span: Span) -> Iterator[SqlCall]:
    """The aggregates and functions OVER rows in an expression; those inside others come alone with
    the arguments of these.
    """
    tokens = span.script.tokens
    at = span.first
    while at < span.stop:
        token = tokens[at]
        is_call = (
            token.kind == WORD
            and at + 1 < span.stop
            and tokens[at + 1].text == "("
            and (at == span.first or tokens[at - 1].text != ".")
        )
        if not is_call:
            at += 1
            continue
        call = _call(span, at)
        if call.is_over or call.name in AGGREGATES:
            yield call
            at = call.span.stop
        else:
            at += 1


def _call(span: Span, at: int) -> SqlCall:
    cursor = Cursor(Span(span.script, at, span.stop))
    name = cursor.name().upper()
    arguments = cursor.brackets()
    condition = over = over_name = None
    ignores_nulls = False
    if cursor.sees("FILTER", "("):
        cursor.at += 1
        inner = Cursor(cursor.brackets())
        inner.expect("WHERE", fix="write FILTER (WHERE condition).")
        condition = inner.rest()
    if cursor.take("IGNORE", "NULLS"):
        ignores_nulls = True
    else:
        cursor.take("RESPECT", "NULLS")
    if cursor.take("OVER"):
        if cursor.token.text == "(":
            over = cursor.brackets()
        else:
            over_name = cursor.name("a window")
    return SqlCall(
        Span(span.script, at, cursor.at),
        name,
        arguments,
        condition,
        over,
        over_name,
        ignores_nulls,
    )


# Aggregates


_Make = Callable[..., AggregateSpec]
AGGREGATES: dict[str, _Make] = {
    "COUNT": agg.count,
    "COUNT_IF": agg.count_if,
    "SUM": agg.sum,
    "AVG": agg.avg,
    "MEAN": agg.avg,
    "MIN": agg.min,
    "MAX": agg.max,
    "MIN_BY": agg.min_by,
    "MAX_BY": agg.max_by,
    "FIRST": agg.first,
    "FIRST_VALUE": agg.first,
    "ANY_VALUE": agg.first,
    "LAST": agg.last,
    "LAST_VALUE": agg.last,
    "STDDEV": agg.stddev,
    "STDDEV_SAMP": agg.stddev,
    "STDDEV_POP": lambda column, **more: agg.stddev(column, population=True, **more),
    "VARIANCE": agg.variance,
    "VAR_SAMP": agg.variance,
    "VAR_POP": lambda column, **more: agg.variance(column, population=True, **more),
    "MEDIAN": agg.median,
    "COLLECT_LIST": agg.collect,
    "ARRAY_AGG": agg.collect,
    "COLLECT": agg.collect,
    "COLLECT_SET": agg.collect_set,
    "APPROX_COUNT_DISTINCT": agg.approx_distinct,
    "APPROX_DISTINCT": agg.approx_distinct,
    "APPROX_PERCENTILE": agg.quantiles,
    "PERCENTILE_APPROX": agg.quantiles,
    "QUANTILES": agg.quantiles,
    "RATE": agg.rate,
    "DECAYED_SUM": agg.decayed_sum,
    "HEAVY_HITTERS": agg.heavy_hitters,
    "BLOOM": agg.bloom,
    "COUNT_DISTINCT": agg.count_distinct,
}
"""The aggregates by the names that SQL has for them."""
_TWO_EXPRESSIONS = frozenset({"MIN_BY", "MAX_BY"})
_VALUES_BEHIND = frozenset({"APPROX_PERCENTILE", "PERCENTILE_APPROX", "QUANTILES"})
_REWRITTEN = {
    "STRING_AGG": "collect the values: array_join(collect_list(x), ',').",
    "LISTAGG": "collect the values: array_join(collect_list(x), ',').",
    "BOOL_AND": "write min(x), where x is BOOLEAN.",
    "EVERY": "write min(x), where x is BOOLEAN.",
    "BOOL_OR": "write max(x), where x is BOOLEAN.",
    "CORR": "sum x * y, x, y, x * x and y * y, and compute it of these.",
    "MODE": "use heavy_hitters(x, max_values => 1).",
    "PERCENTILE": "write median(x), or approx_percentile(x, 0.9).",
}


def refuse_unknown_aggregates(span: Span) -> None:
    """Raise SqlRefusal for aggregates of other systems, with what to write instead."""
    tokens = span.script.tokens
    for at in range(span.first, span.stop - 1):
        fix = _REWRITTEN.get(tokens[at].upper)
        if fix is not None and tokens[at + 1].text == "(":
            raise SqlRefusal(
                tokens[at].start, f"There is no aggregate {tokens[at].text!r}.", fix, PlanError
            )


def aggregate_spec(call: SqlCall, frame: QueryRows) -> AggregateSpec:
    """The aggregate that a call is, over the columns of a frame."""
    where = None if call.filter is None else frame.compiled(call.filter, what="a condition").text
    options: dict[str, Any] = {} if where is None else {"where": where}
    if call.ignores_nulls:
        if call.name not in {"FIRST", "FIRST_VALUE", "LAST", "LAST_VALUE", "ANY_VALUE"}:
            raise SqlRefusal(
                call.span.start, "IGNORE NULLS is for first and last.", "leave it out.", PlanError
            )
        options["ignore_nulls"] = True
    parts, named = _arguments(call.arguments)
    options |= named
    make = AGGREGATES[call.name]
    with located(call.span):
        try:
            if call.name == "COUNT":
                return _count(call, parts, frame, options)
            if parts and parts[0].tokens and parts[0].tokens[0].upper == "DISTINCT":
                return _distinct(call, parts, frame, options)
            texts: list[Any] = []
            for at, part in enumerate(parts):
                if at == 0 or call.name in _TWO_EXPRESSIONS or call.name == "COUNT_DISTINCT":
                    texts.append(_expression(part, frame))
                elif call.name in _VALUES_BEHIND:
                    texts.append(_numbers(part))
                else:
                    texts.append(_literal(part))
            return make(*texts, **options)
        except TypeError as error:
            raise SqlRefusal(
                call.span.start,
                f"{call.name.lower()} cannot be called so: {_plain(error)}.",
                "the reference of hr.agg has its arguments; options are written name => value.",
                PlanError,
            ) from None


def _plain(error: TypeError) -> str:
    return str(error).partition("() ")[2] or str(error)


def _arguments(span: Span) -> tuple[list[Span], dict[str, Any]]:
    """The arguments of a call, and its options: name => value."""
    if not span:
        return [], {}
    plain, named = [], {}
    for part in span.split():
        tokens = part.tokens
        if len(tokens) > 2 and tokens[0].kind == WORD and tokens[1].text == "=>":
            cursor = Cursor(Span(part.script, part.first + 2, part.stop))
            named[tokens[0].text.lower()] = cursor.value()
            cursor.finish("')'")
        else:
            plain.append(part)
    return plain, named


def _expression(part: Span, frame: QueryRows) -> str:
    for inner in function_calls(part):
        raise SqlRefusal(
            inner.span.start,
            f"{inner.name.lower()}(…) stands inside another aggregate.",
            "compute the inner one in a query in FROM.",
            PlanError,
        )
    return frame.compiled(part).text


def _count(
    call: SqlCall, parts: Sequence[Span], frame: QueryRows, options: dict[str, Any]
) -> AggregateSpec:
    first = parts[0] if parts else None
    if first is None or (len(parts) == 1 and first.text() == "*"):
        return agg.count(**options)
    if first.tokens and first.tokens[0].upper == "DISTINCT":
        return _distinct(call, parts, frame, options)
    if len(parts) == 1 and len(first) == 1 and first.tokens[0].kind in {NUMBER, STRING}:
        return agg.count(**options)
    if len(parts) > 1:
        raise SqlRefusal(
            call.span.start, "count takes one expression.", "write count(DISTINCT a, b).", PlanError
        )
    return agg.count(_expression(first, frame), **options)


def _distinct(
    call: SqlCall, parts: Sequence[Span], frame: QueryRows, options: dict[str, Any]
) -> AggregateSpec:
    """An aggregate of distinct values: a count of them, or one that they do not change."""
    first = Span(parts[0].script, parts[0].first + 1, parts[0].stop)
    if call.name == "COUNT":
        texts = [_expression(part, frame) for part in (first, *parts[1:])]
        return agg.count_distinct(texts[0], *texts[1:], **options)
    if call.name in {"MIN", "MAX"}:
        return AGGREGATES[call.name](_expression(first, frame), **options)
    if call.name in {"COLLECT_LIST", "ARRAY_AGG", "COLLECT"}:
        return agg.collect_set(_expression(first, frame), **options)
    raise SqlRefusal(
        call.span.start,
        f"{call.name.lower()}(DISTINCT …) is not there.",
        "aggregate distinct rows: FROM (SELECT DISTINCT … FROM …).",
        PlanError,
    )


def _literal(part: Span) -> Any:
    cursor = Cursor(part)
    value = cursor.value()
    cursor.finish("a value")
    return value


def _numbers(part: Span) -> Any:
    """A number, or several: 0.5, array(0.5, 0.9), (0.5, 0.9)."""
    cursor = Cursor(part)
    cursor.take("ARRAY")
    value = cursor.value()
    cursor.finish("a number")
    return value


def default_name(call: SqlCall) -> str:
    """The name of an aggregate's column that has none: count, sum_amount."""
    parts, _ = _arguments(call.arguments)
    words = [
        token.name.lower()
        for part in parts[:1]
        for token in part.tokens
        if token.kind == WORD and token.upper != "DISTINCT"
    ]
    return "_".join([call.name.lower(), *words[-1:]])
