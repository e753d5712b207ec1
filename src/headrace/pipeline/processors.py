"""Processors when they are declared: what `process(…)` of streams and tables checks, and the step
that it adds to the plan.

The step is in `headrace.plan.processor_steps`, the kernel in `headrace.operators.processors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from headrace.durations import to_us
from headrace.error_policy import DIVERT, STOP, check_error_policy
from headrace.errors import PlanError, nearest
from headrace.operators.processors.processor import Declaration, Processor, read_declaration
from headrace.pipeline.relation import Relation
from headrace.plan import columns as cols
from headrace.plan.code_fingerprints import code_fingerprint
from headrace.plan.plan import Step
from headrace.plan.processor_steps import OutputCode, OutputStep, ProcessStep, UpsertStep
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
) -> Step:
    """Check `rows.process(processor, key=…)`, and make its step; of a processor with several
    outputs that of the main one, and of one with a primary key its table.
    """
    where = rows.step_label("process", name)
    own = _instance(processor, where)
    sources = [rows, *(_checked_input(each, value, rows, where) for each, value in inputs.items())]
    declaration = read_declaration(own, inputs, where=where)
    output = cols.check_columns(declaration.output, where=f"The output of the step {where}")
    by = cols.key_columns(key, rows.schema, where=where)
    outputs = {"output": output}
    for side in declaration.sides:
        label = f"The output {side.name!r} of the step {where}"
        outputs[side.name] = cols.check_columns(side.schema, where=label)
    for source in sources[1:]:
        cols.key_columns(by, source.schema, where=where)
    for column in by:
        kind = rows.schema.field(column).type
        others = [source.schema.field(column).type for source in sources[1:]]
        for attribute, schema in outputs.items():
            if column not in schema.names:
                raise PlanError(
                    f"The step {where} emits rows without the key column {column!r}.",
                    fix=f'add it: {attribute} = "{column} {type_name(kind)}, …".',
                )
        for other in (*(schema.field(column).type for schema in outputs.values()), *others):
            if other != kind:
                raise PlanError(
                    f"The step {where} has the key column {column!r} as {type_name(kind)} and as"
                    f" {type_name(other)}.",
                    fix="give it one type in all inputs and in the output.",
                )
    table_key = _table_key(declaration, by, where)
    version = type(own).version
    step: Step = ProcessStep(
        name=name or "",
        inputs=tuple(source.step for source in sources),
        schema=declaration.emitted,
        key=table_key or by,
        is_table=bool(table_key),
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
    if declaration.sides:
        step = _output_step(step, None, output)
    if table_key:
        step = UpsertStep(inputs=(step,), schema=output, key=table_key, is_table=True)
    return step


def _output_step(step: Step, output: str | None, schema: pa.Schema) -> OutputStep:
    is_table = step.is_table and output is None
    return OutputStep(
        inputs=(step,),
        schema=schema,
        key=step.key if output is None else step.shard_key,
        is_table=is_table,
        computation=OutputCode(output, tuple(schema.names)),
        functions=(),
        errors=STOP,
        output=output,
    )


def side_step(rows: Relation, output: str) -> OutputStep:
    """Check `rows.side(output)`, and make its step."""
    step = rows.step.input if isinstance(rows.step, UpsertStep) else rows.step
    source = step.input if isinstance(step, OutputStep) and step.output is None else None
    if not isinstance(source, ProcessStep):
        raise PlanError(
            f"{rows.step.path} has no side outputs.",
            fix="take what process(…) returned, of a class with an attribute hr.side_output(…).",
        )
    schemas = {side.name: side.schema for side in source.declaration.sides}
    if output not in schemas:
        raise PlanError(
            f"{rows.step.path} has no side output {output!r}: {nearest(str(output), schemas)}"
        )
    return _output_step(source, output, schemas[output])


def _table_key(declaration: Declaration, by: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The primary key of the table that a processor emits; none if it emits a stream."""
    if not declaration.table_key:
        return ()
    key = cols.key_columns(declaration.table_key, declaration.output, where=where)
    if missing := [name for name in by if name not in key]:
        raise PlanError(
            f"The step {where} emits a table with the key {', '.join(key)}, which lacks"
            f" {', '.join(map(repr, missing))} of the processor's key: rows of two of its keys"
            " could replace one another.",
            fix=f"write table_key = {(*missing, *key)!r}.",
        )
    return key


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
