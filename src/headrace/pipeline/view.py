"""A view that a pipeline declared, from Python: its rows as of a tick, whoever runs the pipeline.
In a notebook it shows them (`notebook`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.durations import to_us
from headrace.errors import ConfigurationError, UnknownView
from headrace.log.values import Duration
from headrace.plan.plan import PipelinePlan, tree
from headrace.plan.rendering import svg

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from headrace.runtime.declaration import DeclaredPipeline
    from headrace.views.reader import Snapshot


@dataclass(frozen=True)
class View:
    """What `Pipeline.view` returns. Its rows are there once the pipeline has run; each call reads
    them as of the newest tick.
    """

    pipeline: DeclaredPipeline = field(repr=False)
    name: str
    state: Path | None = None
    """The pipeline's state directory, if it is not the usual one."""

    def at(self, state: str | Path) -> View:
        """The same view in another state directory: the one given to `run(state=…)` or `headrace
        run --state`.
        """
        return replace(self, state=Path(state))

    @property
    def tick(self) -> int:
        """The tick that it shows."""
        with self.snapshot() as snapshot:
            return snapshot.tick(self.name)

    def to_arrow(self) -> pa.Table:
        with self.snapshot() as snapshot:
            return snapshot.table(self.name)

    def to_pandas(self) -> pd.DataFrame:
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_pylist(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.to_arrow().to_pylist()
        return rows

    def follow(self, duration: Duration = "1 minute", *, changes: int | None = None) -> None:
        """In a notebook: show the rows, and show them anew in the same place whenever they change;
        for so long, or so often, or until the cell is interrupted.
        """
        follow(self, duration, changes)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """All views of the pipeline as of one moment. ConfigurationError if it has not run yet."""
        from headrace.runtime.run import state_of
        from headrace.views.file import VIEWS_FILE
        from headrace.views.reader import ViewReader

        path = state_of(self.pipeline, self.state) / VIEWS_FILE
        if not path.exists():
            raise ConfigurationError(
                f"The view {self.name!r} has no rows yet: there is no {path}.",
                fix=(
                    "run the pipeline first (run(until_caught_up=True), or headrace run FILE); if"
                    " its state is elsewhere, say so with at(DIRECTORY)."
                ),
            )
        with ViewReader(path) as reader, reader.snapshot() as snapshot:
            yield snapshot

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:

        return view_bundle(self)


# How a pipeline and its views show themselves in a notebook: the plan as a graph, a view as a table
# that can follow its changes.
#
# Jupyter asks objects for these by `_repr_mimebundle_`; nothing of Jupyter is imported for that,
# and IPython only to follow a view.


MAX_ROWS = 20
_LOOK_S = 0.2


def plan_bundle(plan: PipelinePlan) -> dict[str, str]:
    """The graph, and for terminals the tree."""
    return {
        "text/plain": tree(plan),
        "text/html": f'<div style="overflow-x:auto">{svg(plan)}</div>',
    }


def view_bundle(view: View) -> dict[str, str]:
    """The first rows and the tick they are of; or what to do if there are none yet."""
    try:
        with view.snapshot() as snapshot:
            rows, count, tick = (
                snapshot.scan(view.name, limit=MAX_ROWS),
                snapshot.count(view.name),
                snapshot.tick(view.name),
            )
    except (ConfigurationError, UnknownView) as error:
        return {"text/plain": str(error), "text/html": f"<p>{escape(str(error))}</p>"}
    said = f"{view.name} at tick {tick}: {count:,} {'row' if count == 1 else 'rows'}"
    more = f"<p>… and {count - len(rows):,} more</p>" if count > len(rows) else ""
    return {
        "text/plain": f"{said}\n{rows.to_pandas().to_string(index=False)}",
        "text/html": f"<p><b>{escape(said)}</b></p>{_table(rows)}{more}",
    }


def follow(view: View, duration: Duration, changes: int | None) -> None:
    """Looks a few times a second; what has not changed is not shown again."""
    try:
        from IPython import display
    except ImportError:
        raise ConfigurationError(
            "Following a view is for notebooks, and there is no IPython here.",
            fix="read it with to_pandas(), or follow it with headrace view show --follow.",
        ) from None
    until = time.monotonic() + to_us(duration, what="duration") / 1e6
    shown = view_bundle(view)
    show: Any = display.display  # IPython does not say what it takes
    handle, seen = show(shown, raw=True, display_id=True), 0
    try:
        while time.monotonic() < until and seen != changes:
            time.sleep(_LOOK_S)
            if (newer := view_bundle(view)) != shown:
                shown, seen = newer, seen + 1
                handle.update(shown, raw=True)
    except KeyboardInterrupt:
        return  # how a person ends it


def _table(rows: pa.Table) -> str:
    headings = "".join(f"<th>{escape(name)}</th>" for name in rows.column_names)
    cells = (
        "".join(f"<td>{escape(_shown(value))}</td>" for value in row.values())
        for row in rows.to_pylist()
    )
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table>"


def _shown(value: Any) -> str:
    return (
        ""
        if value is None
        else f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value)
    )
