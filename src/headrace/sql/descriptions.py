"""SHOW, DESCRIBE and EXPLAIN: what was declared, as rows.

SHOW VIEWS                  names and columns of what was declared
SHOW COLUMNS FROM orders    and DESCRIBE orders, DESCRIBE SELECT …
EXPLAIN SELECT …            the steps of a query: what each keeps in state, and for which
                            watermark it waits; EXPLAIN alone explains the whole pipeline
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.durations import format_us
from headrace.errors import PlanError
from headrace.plan.plan import PipelinePlan, Step, TopicStep, time_column
from headrace.sql.catalog import SqlCatalog
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.query import rows_of
from headrace.sql.query_parser import read_query
from headrace.sql.script import Span
from headrace.types.schema import type_name

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream, Table

_SHOWN = {
    "TOPICS": ("topic", "stream"),
    "TABLES": ("table",),
    "STREAMS": ("stream", "topic"),
    "VIEWS": ("view", "temporary view"),
    "SOURCES": ("source",),
    "SINKS": ("sink",),
    "ALERTS": ("alert",),
    "FUNCTIONS": ("function",),
}
_QUERY_STARTS = frozenset({"SELECT", "WITH", "("})


def show(cursor: Cursor, catalog: SqlCatalog) -> pa.Table:
    """SHOW VIEWS and its siblings, SHOW COLUMNS FROM name, SHOW CREATE name."""
    what = cursor.expect_one(
        (*_SHOWN, "ALL", "COLUMNS", "CREATE"),
        fix=f"there is {', '.join(_SHOWN)}, ALL, COLUMNS FROM name and CREATE name.",
    )
    if what == "COLUMNS":
        cursor.expect_one(("FROM", "IN"))
        return describe(cursor, catalog)
    if what == "CREATE":
        return _created(cursor, catalog)
    cursor.finish()
    kinds = _SHOWN.get(what)
    rows = catalog.rows()
    described = []
    known = set()
    for each in catalog.declared.values():
        known.add(each.name)
        if kinds is None or each.kind in kinds:
            described.append(_described(each.name, each.kind, rows.get(each.name)))
    for name, found in rows.items():  # declared in Python
        kind = kind_of(found)
        if name not in known and (kinds is None or kind in kinds):
            described.append(_described(name, kind, found))
    return _table(("name", "kind", "key", "columns"), sorted(described))


def _described(name: str, kind: str, rows: Stream | Table | None) -> tuple[str, ...]:
    if rows is None:
        return name, kind, "", ""
    return name, kind, ", ".join(rows.key), ", ".join(rows.schema.names)


def kind_of(rows: Stream | Table) -> str:
    """What rows are called that no statement has declared."""
    if isinstance(rows.step, TopicStep):
        return "table" if rows.step.is_table else "topic"
    return "view" if rows.step.is_table else "stream"


def _created(cursor: Cursor, catalog: SqlCatalog) -> pa.Table:
    cursor.take_one(("VIEW", "TABLE", "TOPIC", "STREAM", "SOURCE", "SINK", "ALERT", "FUNCTION"))
    offset = cursor.offset
    name = cursor.path("a name")
    cursor.finish()
    declared = catalog.declared.get(name.lower())
    if declared is None:
        from headrace.errors import nearest

        known = [each.name for each in catalog.declared.values()]
        raise SqlRefusal(
            offset, f"No statement has declared {name!r}: {nearest(name, known)}", kind=PlanError
        )
    return _table(("name", "statement"), [(declared.name, declared.text)])


def describe(cursor: Cursor, catalog: SqlCatalog) -> pa.Table:
    """DESCRIBE name or DESCRIBE query: the columns, their types, and what they are."""
    rows = _rows(cursor, catalog)
    step = getattr(rows, "step", None)  # a table in a file has none
    time = None if step is None else time_column(step)
    described = []
    for field in rows.schema:
        roles = []
        if field.name in rows.key:
            roles.append("key")
        if time is not None and field.name == time.name:
            roles.append("event time")
        described.append(
            (field.name, type_name(field.type), "yes" if field.nullable else "no", ", ".join(roles))
        )
    return _table(("column", "type", "nullable", "role"), described)


def _rows(cursor: Cursor, catalog: SqlCatalog) -> Stream | Table:
    cursor.take_one(("TABLE", "VIEW", "TOPIC", "STREAM", "QUERY", "EXTENDED", "FORMATTED"))
    if cursor.sees_any(_QUERY_STARTS):
        query = read_query(cursor)
        cursor.finish()
        return rows_of(query, catalog.find)
    offset = cursor.offset
    name = cursor.path("a name, or a query")
    cursor.finish()
    return catalog.find(name, offset)


def explain(cursor: Cursor, catalog: SqlCatalog) -> pa.Table:
    """EXPLAIN query, EXPLAIN name, EXPLAIN: steps, state and watermarks."""
    cursor.take_one(("EXTENDED", "FORMATTED", "VERBOSE"))
    whole = Span(cursor.script, cursor.span.first, cursor.stop)
    if cursor.sees("CREATE"):  # EXPLAIN CREATE VIEW … AS query explains the query
        cursor.until({"AS"})
        cursor.expect("AS", fix="EXPLAIN explains queries: EXPLAIN SELECT ….")
    with located(whole):
        if cursor.is_done:
            plan: PipelinePlan = catalog.pipeline.plan()
        else:
            plan = catalog.pipeline.plan_of(_rows(cursor, catalog))
    return explained(plan)


def explained(plan: PipelinePlan) -> pa.Table:
    """A plan as rows, from its inputs on: what each step does, keeps, and waits for."""
    used = _used(plan)
    rows = [
        (
            step.name,
            f"{step.operation} {step.summary()}".strip(),
            ", ".join(each.name for each in step.inputs),
            state_of(step),
            awaited(step),
        )
        for step in plan.steps()
        if step.name in used
    ]
    return _table(("step", "does", "reads", "keeps", "waits_for"), rows)


def _used(plan: PipelinePlan) -> set[str]:
    """The steps that an output needs."""
    used: set[str] = set()
    pending: list[Step] = [output.input for output in plan.outputs]
    while pending:
        step = pending.pop()
        if step.name not in used:
            used.add(step.name)
            pending += step.inputs
    return used


def state_of(step: Step) -> str:
    """What a step keeps between batches, and for how long."""
    if not step.keeps_state:
        return ""
    key = ", ".join(step.shard_key)
    kept = f"per {key}" if key else "in one shard"
    if step.ttl is not None:
        return f"state {kept}, for {format_us(step.ttl)} after the newest row"
    if step.settled_keys():
        return f"state {kept}, until the horizon passes"
    return f"state {kept}"


def awaited(step: Step) -> str:
    """Which watermark a step waits for."""
    if isinstance(step, TopicStep):
        return ""
    timed = [(each, time) for each in step.inputs if (time := time_column(each)) is not None]
    kernel_waits = step.keeps_state and step.watermark_inputs and _goes_by_time(step)
    if not kernel_waits or not timed:
        return ""
    return ", ".join(f"{each.name}.{time.name}" for each, time in timed)


def _goes_by_time(step: Step) -> bool:
    from headrace.operators.kernel import TimedKernel

    return isinstance(step.kernel(), TimedKernel)


def _table(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> pa.Table:
    listed = list(rows)
    columns = [pa.array([row[at] for row in listed], pa.string()) for at in range(len(names))]
    return pa.table(columns, names=list(names))
