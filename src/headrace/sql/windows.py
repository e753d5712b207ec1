"""TUMBLE, HOP, SESSION and SLIDE with EMIT and LATE, as `rows.window(…)` takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.errors import PlanError
from headrace.operators.windows import late_policy
from headrace.operators.windows.late_policy import LatePolicy
from headrace.operators.windows.specs import WindowSpec, hopping, session, sliding, tumbling
from headrace.plan.window_steps import WINDOW_END, WINDOW_START
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.scope import QueryRows, VisibleColumn
from headrace.sql.syntax import LateClause, Select, WindowCall

BOUNDS = (WINDOW_START, WINDOW_END)


def windowed(frame: QueryRows, call: WindowCall) -> QueryRows:
    """Rows that are to be put into windows, with the windows' columns."""
    if frame.window is not None:
        raise SqlRefusal(
            call.span.start,
            "These rows are in windows already.",
            "aggregate them in a query of their own, and put its result into windows by"
            " window_end.",
            PlanError,
        )
    column = frame.column_of(call.time, "a column with the event time")
    if frame.time is None:
        raise SqlRefusal(
            call.time.start,
            f"{call.function} needs an event time, and {frame.rows.step.path} has none.",
            "declare it, as in CREATE TOPIC … WITH (event_time = 'placed_at'), or processing_time ="
            " 'processed_at'; and keep that column in queries in FROM.",
            PlanError,
        )
    if column != frame.time:
        raise SqlRefusal(
            call.time.start,
            f"{call.function} goes by {column!r}, and the event time of these rows is"
            f" {frame.time!r}, by which their watermark goes.",
            f"write {frame.time}; or declare {column!r} as the event time.",
            PlanError,
        )
    bounds = tuple(VisibleColumn(name, name, call.alias) for name in BOUNDS)
    return replace(
        frame.under(call.alias), columns=(*frame.under(call.alias).columns, *bounds), window=call
    )


def window_spec(call: WindowCall) -> WindowSpec:
    """The windows that a call says."""
    options: dict[str, Any] = dict(call.options)
    known = {
        "TUMBLE": {"offset", "timezone"},
        "HOP": {"offset", "timezone"},
        "SESSION": set[str](),
        "SLIDE": set[str](),
    }[call.function]
    for option in options:
        if option not in known:
            raise SqlRefusal(
                call.span.start,
                f"{call.function} has no option {option!r}.",
                f"there is {', '.join(sorted(known))}." if known else "leave it out.",
                PlanError,
            )
    with located(call.span):
        if call.function == "TUMBLE":
            return tumbling(call.durations[0], **options)
        if call.function == "HOP":
            every, size = call.durations
            return hopping(size, every=every, **options)
        if call.function == "SESSION":
            return session(call.durations[0])
        return sliding(call.durations[0])


def late_rows(clause: LateClause | None) -> LatePolicy | None:
    """What becomes of late rows."""
    if clause is None:
        return None
    if clause.kind == "correct":
        return late_policy.correct(clause.value)
    return late_policy.divert(clause.value) if clause.kind == "divert" else late_policy.drop()


def refuse_window_clauses(select: Select) -> None:
    """Raise if a SELECT without windows says when they are emitted. EMIT CHANGES says what holds
    for everything else, too.
    """
    if select.emit == "final":
        raise SqlRefusal(
            select.emit_offset,
            "EMIT FINAL is for windows, which are complete at some time; this SELECT has none.",
            "leave it out, or aggregate windows: FROM TUMBLE(…) GROUP BY window_start, window_end.",
            PlanError,
        )
    if select.late is not None:
        raise SqlRefusal(
            select.late.offset,
            "LATE is for windows, and this SELECT has none.",
            "leave it out, or aggregate windows: FROM TUMBLE(…) GROUP BY window_start, window_end.",
            PlanError,
        )
