"""Users' functions when they are declared: calls in expressions, `map_batches`, `flat_map`,
`explode` and its relatives, and `sample`. They are checked here, and become steps of the plan.

The steps are in `headrace.plan.function_steps`, and `headrace.engine.user_code` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from headrace.error_policy import DIVERT, STOP, check_error_policy
from headrace.errors import PlanError, StreamOnly, UnfitColumn
from headrace.expressions.function_calls import CallExtractor, is_call_column
from headrace.expressions.user_functions import UserFunction
from headrace.operators.aggregates.specs import AggregateSpec
from headrace.operators.row_functions import RowFunction
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.code_fingerprints import code_fingerprint
from headrace.plan.function_steps import (
    ROW_INDEX,
    BatchCode,
    CallCode,
    CallStep,
    ExplodeCode,
    ExplodeStep,
    MapStep,
    RowsCode,
    SampleCode,
    SampleStep,
)
from headrace.plan.plan import SelectStep, Step, time_column
from headrace.types.schema import parse_schema, type_name


def with_calls(
    step: Step, texts: Sequence[str], named: Mapping[str, str], *, errors: str, where: str
) -> tuple[Step, tuple[str, ...], dict[str, str]]:
    """A step with a column for each call of a user's function in some expressions, and the
    expressions over it. The step itself, if they call none.

    Args:
        step: The step whose rows the expressions are about.
        texts: Expressions.
        named: Further ones, by name.
        errors: What becomes of a row on which a function fails.
        where: The step, for errors.
    """
    extractor = CallExtractor(step.schema.names, where=where)
    rewritten = tuple(extractor.rewrite(text) for text in texts)
    by_name = {name: extractor.rewrite(text) for name, text in named.items()}
    return call_steps(step, extractor, errors=errors, where=where), rewritten, by_name


def with_calls_of_results(
    step: Step, results: Mapping[str, Any], *, errors: str, where: str
) -> tuple[Step, dict[str, Any]]:
    """A step with a column for each call in the expressions of aggregates and of functions over
    rows, and these over it. What is neither is left for a later check.
    """
    extractor = CallExtractor(step.schema.names, where=where)
    rewritten = dict(results)
    for name, spec in results.items():
        if isinstance(spec, AggregateSpec):
            rewritten[name] = spec.with_expressions(extractor.rewrite)
        elif isinstance(spec, RowFunction) and spec.column is not None:
            rewritten[name] = replace(spec, column=extractor.rewrite(spec.column))
    return call_steps(step, extractor, errors=errors, where=where), rewritten


def call_steps(step: Step, extractor: CallExtractor, *, errors: str, where: str) -> Step:
    """The step with the columns of the calls that were taken out of expressions."""
    if extractor.rounds:
        check_error_policy(errors, where=f"The step {where}")
    for each in extractor.rounds:
        if each.arguments:
            step = _with_arguments(step, each.arguments, errors=errors, where=where)
        fields = [call.function.result.with_name(call.name) for call in each.calls]
        functions = {call.function.name: call.function for call in each.calls}
        step = CallStep(
            inputs=(step,),
            schema=pa.schema([*step.schema, *fields]),
            key=step.key,
            is_table=step.is_table,
            computation=CallCode(tuple(step.schema.names), tuple(each.calls)),
            functions=tuple(
                (name, _fingerprint(function, where)) for name, function in functions.items()
            ),
            errors=errors,
            calls=tuple(each.calls),
        )
    return step


def _with_arguments(step: Step, arguments: Mapping[str, str], *, errors: str, where: str) -> Step:
    """The rows with the arguments of calls as columns."""
    earlier = {name: f"`{name}`" for name in step.schema.names if is_call_column(name)}
    selection = cols.select_columns(step, ["*"], {**earlier, **arguments}, where=where)
    return SelectStep(
        inputs=(step,),
        schema=selection.schema,
        key=selection.key_of(step, where=where),
        is_table=step.is_table,
        columns=selection.columns,
        errors=errors,
    )


def _fingerprint(function: UserFunction, where: str) -> str:
    if function.version is not None:
        return f"version {function.version}"
    return code_fingerprint(function, where=f"the function {function.name} of the step {where}")


def refusal_for_table(rows: Relation, operation: str) -> StreamOnly:
    """The error of an operation whose rows could not be retracted when a table's row changes."""
    return StreamOnly(
        f"{rows.step.path} is a table, and {operation} is for streams: the rows that it makes"
        " have no key by which they could be retracted.",
        fix="use changes(), whose rows are events, or compute columns with a function of hr.udf.",
    )


def map_step(
    rows: Relation,
    function: Callable[..., Any],
    schema: str,
    *,
    each_row: bool,
    errors: str,
    version: str | None,
    name: str | None,
) -> Step:
    """Check `map_batches` (`flat_map` with `each_row`), and make its step."""
    operation = "flat_map" if each_row else "map_batches"
    where = rows.step_label(operation, name)
    if not callable(function):
        raise PlanError(
            f"The step {where} was given a {type(function).__name__}.", fix="give it a function."
        )
    result = cols.check_columns(parse_schema(schema), where=f"The result of the step {where}")
    if ROW_INDEX in result.names:
        raise PlanError(
            f"The step {where} declares a column {ROW_INDEX!r}, a name that is reserved.",
            fix="rename it.",
        )
    time = time_column(rows.step)
    keeps_time = time is not None and time.name in result.names
    if time is not None and keeps_time:
        kinds = [each.field(time.name).type for each in (rows.schema, result)]
        if kinds[0] != kinds[1]:
            raise UnfitColumn(
                f"The step {where} has the event time {time.name!r} as {type_name(kinds[1])}; it is"
                f" {type_name(kinds[0])}.",
                fix="declare the type that it has, or another name.",
            )
    own_name = getattr(function, "__name__", type(function).__name__)
    code = (RowsCode if each_row else BatchCode)(
        function, tuple(rows.schema.names), result, time.name if time and keeps_time else None
    )
    return MapStep(
        name=name or "",
        inputs=(rows.step,),
        schema=result,
        computation=code,
        functions=(
            (
                own_name,
                f"version {version}"
                if version is not None
                else code_fingerprint(function, where=f"the step {where}"),
            ),
        ),
        errors=check_error_policy(errors, where=f"The step {where}", supported=(STOP, DIVERT)),
    )


def explode_step(
    rows: Relation,
    column: str,
    names: Sequence[str],
    *,
    position: str | None,
    outer: bool,
    name: str | None,
    operation: str = "explode",
) -> Step:
    """Check `explode`, `posexplode` or `inline`, and make its step."""
    where = rows.step_label(operation, name)
    if column not in rows.schema.names:
        cols.key_columns(column, rows.schema, where=where)  # says what there is
    kind = rows.schema.field(column).type
    is_map = bool(pa.types.is_map(kind))
    if not (is_map or pa.types.is_list(kind)):
        raise UnfitColumn(
            f"The step {where} makes rows of the column {column!r}, which is {type_name(kind)}.",
            fix="name a column of type ARRAY or MAP.",
        )
    is_of_structs = not is_map and bool(pa.types.is_struct(kind.value_type))
    if operation == "inline" and not is_of_structs:
        raise UnfitColumn(
            f"The step {where} makes rows of the column {column!r}, which is {type_name(kind)}.",
            fix="name a column of type ARRAY<STRUCT<…>>, or use explode.",
        )
    is_inline = is_of_structs and (operation == "inline" or len(names) != 1)
    parts = (
        [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
        if is_map
        else list(kind.value_type)
        if is_inline
        else [pa.field(column, kind.value_type)]
    )
    if names and len(names) != len(parts):
        raise PlanError(
            f"The step {where} names {len(names)} columns for {len(parts)}:"
            f" {', '.join(part.name for part in parts)}.",
            fix="name each of them, or none.",
        )
    fields = [
        part.with_name(new).with_nullable(True)
        for part, new in zip(parts, names or [part.name for part in parts], strict=True)
    ]
    kept = [each for each in rows.schema.names if each != column]
    positions = [] if position is None else [pa.field(position, pa.int32())]
    schema = pa.schema([*(rows.schema.field(each) for each in kept), *positions, *fields])
    cols.check_columns(schema, where=f"The result of the step {where}")
    return ExplodeStep(
        name=name or "",
        inputs=(rows.step,),
        schema=schema,
        key=rows.step.key if set(rows.step.key) <= set(kept) else (),
        computation=ExplodeCode(
            column, tuple(kept), is_map, is_inline, position is not None, outer
        ),
        functions=(),
        errors=STOP,
        column=column,
        outer=outer,
    )


def sample_step(
    rows: Relation, fraction: float, by: str | Sequence[str] | None, seed: int, name: str | None
) -> Step:
    """Check `sample`, and make its step."""
    where = rows.step_label("sample", name)
    number: Any = fraction
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= 1:
        raise PlanError(
            f"The step {where} keeps {fraction!r} of the rows.",
            fix="give a fraction above 0 and up to 1: 0.01 keeps about every hundredth row.",
        )
    if type(seed) is not int:
        raise PlanError(f"The step {where} has seed={seed!r}.", fix="give a whole number.")
    columns = () if by is None else cols.key_columns(by, rows.schema, where=where)
    if rows.step.is_table:
        columns = columns or rows.step.key
        if not set(columns) <= set(rows.step.key):
            raise PlanError(
                f"The step {where} samples a table by {', '.join(columns)}, and its key is"
                f" {', '.join(rows.step.key)}: a row whose other columns change would come and go.",
                fix="leave out by=, or name columns of the key.",
            )
    return SampleStep(
        name=name or "",
        inputs=(rows.step,),
        schema=rows.schema,
        key=rows.step.key,
        is_table=rows.step.is_table,
        computation=SampleCode(tuple(rows.schema.names), columns, float(fraction), seed),
        functions=(),
        errors=STOP,
        by=columns,
        fraction=float(fraction),
        seed=seed,
    )
