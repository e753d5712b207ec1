"""Recorded calls when they are declared: what `stream.call(…)` checks, and the steps and topics
that it adds to the plan.

The steps are in `headrace.plan.answer_steps`, what runs the calls in `headrace.calls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headrace.calls.call import Call, ClientFactory, Function, is_async
from headrace.durations import to_us
from headrace.error_policy import NULL, check_error_policy
from headrace.errors import PlanError, UnknownColumn
from headrace.log.values import CALL_ID, COMPLETE_TO, Duration, requests_topic
from headrace.names import check_name
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.answer_steps import AnswersStep, RequestsOutput, answer_fields
from headrace.plan.code_fingerprints import code_fingerprint
from headrace.plan.event_time import AnswerTime
from headrace.plan.plan import SelectStep, WhereStep, time_column
from headrace.types.schema import parse_schema

MAX_CONCURRENCY = 10_000
MAX_BATCH = 10_000


def call_step(
    rows: Relation,
    function: Function,
    schema: str,
    *,
    arguments: str | Sequence[str] | None,
    concurrency: int,
    timeout: Duration,
    retries: int,
    max_per_second: float | None,
    batch: int | None,
    cache: Duration | None,
    ordered: bool,
    client: ClientFactory | None,
    errors: str,
    keep: Duration | None,
    partitions: int,
    version: str | None,
    name: str | None,
) -> SelectStep:
    """Check `rows.call(function, schema)`, add the call to the pipeline, and make the step with its
    answered rows.
    """
    own_name = name or getattr(function, "__name__", type(function).__name__)
    if name is None and own_name == "<lambda>":
        raise PlanError(
            "A call was given a lambda, which has no name to find its answers by.",
            fix='give the call one: name="geocode".',
        )
    where = cols.check_step_name(own_name)
    _check_function(function, where)
    check_name(requests_topic(rows.pipeline.name, where), what="call name", error=PlanError)
    answer = cols.check_columns(parse_schema(schema), where=f"The answer of the step {where}")
    if not answer.names:
        raise PlanError(f"The step {where} has answers without a column.", fix="declare one.")
    row = cols.check_columns(
        pa.schema([*rows.schema, *answer]), where=f"The result of the step {where}"
    )
    time = time_column(rows.step)
    technical = answer_fields(has_time=time is not None)
    for field in technical:
        if field.name in {each.lower() for each in row.names}:
            raise PlanError(
                f"The result of the step {where} has a column {field.name!r}, a name that recorded"
                " answers have themselves.",
                fix="rename it.",
            )
    call = Call(
        pipeline=rows.pipeline.name,
        name=where,
        function=function,
        client=client,
        schema=answer,
        arguments=_argument_columns(arguments, rows.schema, where),
        code=(
            code_fingerprint(function, where=f"the step {where}")
            if version is None
            else f"version {version}"
        ),
        concurrency=_whole("concurrency", concurrency, 1, MAX_CONCURRENCY, where),
        timeout_s=_positive_us(timeout, f"timeout of the step {where}") / 1e6,
        retries=_whole("retries", retries, 0, 1_000, where),
        max_per_second=_rate(max_per_second, where),
        batch=None if batch is None else _whole("batch", batch, 1, MAX_BATCH, where),
        ordered=ordered,
        cache_us=0 if cache is None else _positive_us(cache, f"cache of the step {where}"),
        errors=check_error_policy(errors, where=f"The step {where}"),
        has_time=time is not None,
    )
    settings: tuple[tuple[str, Any], ...] = ()
    if keep is not None:
        _positive_us(keep, f"time that the step {where} keeps answers")
        settings = (("retention", keep),)
    read = [field for field in technical if field.name in {CALL_ID, COMPLETE_TO}]
    stored = pa.schema([*(field.with_nullable(True) for field in row), *read])
    answers = AnswersStep(
        name=where,
        topic=call.answers_topic,
        requests=call.requests_topic,
        schema=stored,
        key=rows.key,
        event_time=None if time is None else AnswerTime(time.name, complete=COMPLETE_TO),
        row_time=time,
        partitions=partitions,
        settings=settings,
    )
    requests = RequestsOutput(
        name=call.requests_topic, input=rows.step, partitions=partitions, call=where
    )
    rows.pipeline.add_call(call, answers, requests)
    answered = WhereStep(
        name=f"{where}.answered",
        inputs=(answers,),
        schema=stored,
        key=rows.key,
        condition=f"{CALL_ID} IS NOT NULL",
    )
    if call.errors == NULL:
        row = pa.schema([*rows.schema, *(field.with_nullable(True) for field in answer)])
    return SelectStep(
        name=f"{where}.rows",
        inputs=(answered,),
        schema=row,
        key=rows.key,
        columns=tuple((column, f"`{column}`") for column in row.names),
    )


def _check_function(function: Any, where: str) -> None:
    if not callable(function):
        raise PlanError(
            f"The step {where} was given a {type(function).__name__}.",
            fix="give it a function: async def ask(row): ….",
        )
    if not is_async(function):
        raise PlanError(
            f"The step {where} was given a function that is not async: one call would hold up all"
            " others.",
            fix=(
                "write async def and await an asynchronous client; what only exists blocking goes"
                " into a thread: return await asyncio.to_thread(ask, row)."
            ),
        )


def _argument_columns(
    arguments: str | Sequence[str] | None, schema: pa.Schema, where: str
) -> tuple[str, ...]:
    if arguments is None:
        return tuple(schema.names)
    names = (arguments,) if isinstance(arguments, str) else tuple(arguments)
    for name in names:
        if name not in schema.names:
            raise UnknownColumn(name, schema.names, where=f"The step {where}")
    if not names:
        raise PlanError(
            f"The step {where} gives its function no columns.", fix="leave arguments= out for all."
        )
    return names


def _whole(option: str, value: Any, least: int, most: int, where: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise PlanError(
            f"The step {where} has {option}={value!r}.",
            fix=f"give a whole number from {least} to {most:,}.",
        )
    return value


def _rate(max_per_second: Any, where: str) -> float | None:
    if max_per_second is None:
        return None
    if isinstance(max_per_second, bool) or not isinstance(max_per_second, int | float):
        raise PlanError(
            f"The step {where} has max_per_second={max_per_second!r}.", fix="give a number."
        )
    if not 0 < max_per_second < float("inf"):
        raise PlanError(
            f"The step {where} has max_per_second={max_per_second!r}.",
            fix="give more than 0; 0.1 is one call in ten seconds.",
        )
    return float(max_per_second)


def _positive_us(duration: Duration, what: str) -> int:
    us = to_us(duration, what=what)
    if us <= 0:
        raise PlanError(
            f"The {what} is zero.", fix="give a duration above zero, such as '30 seconds'."
        )
    return us
