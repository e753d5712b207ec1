"""Processors when they are declared: what `process(…)` of streams and tables checks, and the step
that it adds to the plan.

The step is in `headrace.plan.processor_steps`, the kernel in `headrace.operators.processors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.durations import to_us
from headrace.error_policy import DIVERT, STOP, check_error_policy
from headrace.errors import PlanError
from headrace.operators.processors.processor import Processor, read_declaration
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.code_fingerprints import code_fingerprint
from headrace.plan.processor_steps import ProcessStep
from headrace.types.schema import type_name


def process_step(
    rows: Relation,
    processor: type[Processor] | Processor,
    key: str | Sequence[str],
    inputs: Mapping[str, Any],
    *,
    errors: str,
    ttl: Any,
    name: str | None,
) -> ProcessStep:
    """Check `rows.process(processor, key=…)`, and make its step."""
    where = rows.step_label("process", name)
    own = _instance(processor, where)
    sources = [rows, *(_checked_input(each, value, rows, where) for each, value in inputs.items())]
    declaration = read_declaration(own, inputs, where=where)
    output = cols.check_columns(declaration.output, where=f"The output of the step {where}")
    by = cols.key_columns(key, rows.schema, where=where)
    for source in sources[1:]:
        cols.key_columns(by, source.schema, where=where)
    for column in by:
        kind = rows.schema.field(column).type
        others = [source.schema.field(column).type for source in sources[1:]]
        if column not in output.names:
            raise PlanError(
                f"The step {where} emits rows without the key column {column!r}.",
                fix=f'add it to the output: output = "{column} {type_name(kind)}, …".',
            )
        for other in (output.field(column).type, *others):
            if other != kind:
                raise PlanError(
                    f"The step {where} has the key column {column!r} as {type_name(kind)} and as"
                    f" {type_name(other)}.",
                    fix="give it one type in all inputs and in the output.",
                )
    version = type(own).version
    return ProcessStep(
        name=name or "",
        inputs=tuple(source.step for source in sources),
        schema=output,
        key=by,
        processor=own,
        declaration=declaration,
        by=by,
        input_names=tuple(inputs),
        code=(
            code_fingerprint(own, where=f"the step {where}")
            if version is None
            else f"version {version}"
        ),
        errors=check_error_policy(errors, where=f"The step {where}", supported=(DIVERT, STOP)),
        ttl_us=None if ttl is None else _ttl_us(ttl, where),
    )


def _instance(processor: Any, where: str) -> Processor:
    """The processor itself: a class is called without arguments."""
    if isinstance(processor, type) and issubclass(processor, Processor):
        try:
            processor = processor()
        except TypeError as error:
            raise PlanError(
                f"The step {where} was given the class {processor.__qualname__}, which cannot be"
                f" made without arguments: {error}.",
                fix=f"give it an instance: {processor.__qualname__}(…).",
            ) from None
    if not isinstance(processor, Processor):
        raise PlanError(
            f"The step {where} was given a {type(processor).__name__}.",
            fix="give it a class that extends hr.Processor, or an instance of one.",
        )
    return processor


def _checked_input(name: str, value: Any, rows: Relation, where: str) -> Relation:
    if not isinstance(value, Relation):
        raise PlanError(
            f"The step {where} was given {name}={value!r}.",
            fix="give streams or tables; other options of process are key, errors, ttl, name.",
        )
    if value.pipeline is not rows.pipeline:
        raise PlanError(
            f"The step {where} was given {name}=, which is of another pipeline.",
            fix="write it to a topic, and read that topic here.",
        )
    return value


def _ttl_us(ttl: Any, where: str) -> int:
    ttl_us = to_us(ttl, what=f"ttl of the step {where}")
    if ttl_us <= 0:
        raise PlanError(
            f"The step {where} keeps keys for no time at all.",
            fix='give a ttl above zero, such as ttl="7 days", or none.',
        )
    return ttl_us
