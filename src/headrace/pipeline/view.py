"""`View`: a pipeline's view, read from Python. It has the rows as of the newest tick, whichever
process runs the pipeline.

In a notebook a pipeline shows its graph and a view its rows, and `follow` shows them anew as they
change. Jupyter finds these by `_repr_mimebundle_`; IPython is imported by `follow` only. Views over
HTTP are in `headrace.serve`, the files they are read from in `headrace.views`.
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

    from headrace.runtime.declared_pipeline import DeclaredPipeline
    from headrace.views.reader import Snapshot

MAX_ROWS = 20
"""How many rows a view shows in a notebook."""
_POLL_S = 0.2


@dataclass(frozen=True)
class View:
    """A view of a pipeline, as `Pipeline.view` returns it. It has rows once the pipeline has run;
    each call reads them as of the newest tick.

    Example:
        ```python
        revenue_view = shop.view("revenue", revenue)
        print(revenue_view)  # read it with revenue_view.to_pandas() once the pipeline has run
        ```
    """

    pipeline: DeclaredPipeline = field(repr=False)
    name: str
    state: Path | None = None
    """The pipeline's state directory; None for the default one."""

    def at(self, state: str | Path) -> View:
        """Read the view in another state directory.

        Args:
            state: The directory that was given to `run(state=…)` or `headrace run --state`.

        Returns:
            A view that reads there.

        Example:
            ```python
            elsewhere = shop.view("revenue", revenue).at("/srv/shop.state")
            ```
        """
        return replace(self, state=Path(state))

    @property
    def tick(self) -> int:
        """The newest tick that the view's rows include.

        Raises:
            ConfigurationError: The pipeline has not run yet.
        """
        with self.snapshot() as snapshot:
            return snapshot.tick(self.name)

    def to_arrow(self) -> pa.Table:
        """Read all rows as an Arrow table.

        Returns:
            The rows as of the newest tick.

        Raises:
            ConfigurationError: The pipeline has not run yet.

        Example:
            ```python
            def rows():
                return shop.view("revenue", revenue).to_arrow()
            ```
        """
        with self.snapshot() as snapshot:
            return snapshot.table(self.name)

    def to_pandas(self) -> pd.DataFrame:
        """Read all rows as a DataFrame of pandas.

        Returns:
            The rows as of the newest tick.

        Raises:
            ConfigurationError: The pipeline has not run yet.

        Example:
            ```python
            def frame():
                return shop.view("revenue", revenue).to_pandas()
            ```
        """
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def to_pylist(self) -> list[dict[str, Any]]:
        """Read all rows as dictionaries.

        Returns:
            The rows as of the newest tick.

        Raises:
            ConfigurationError: The pipeline has not run yet.

        Example:
            ```python
            def rows():
                return shop.view("revenue", revenue).to_pylist()
            ```
        """
        rows: list[dict[str, Any]] = self.to_arrow().to_pylist()
        return rows

    def follow(self, duration: Duration = "1 minute", *, changes: int | None = None) -> None:
        """Show the rows in a notebook, and update them in the same cell as they change. It ends
        after a time, after a number of changes, or when the cell is interrupted.

        Args:
            duration: How long to follow.
            changes: How many changes to show at most.

        Raises:
            ConfigurationError: There is no IPython here.

        Example:
            ```python
            def watch():
                shop.view("revenue", revenue).follow("10 minutes")
            ```
        """
        try:
            from IPython import display
        except ImportError:
            raise ConfigurationError(
                "Following a view is for notebooks, and there is no IPython here.",
                fix="read it with to_pandas(), or follow it with headrace view show --follow.",
            ) from None
        until = time.monotonic() + to_us(duration, what="duration") / 1e6
        shown = view_bundle(self)
        show: Any = display.display  # IPython's signature is not typed
        handle = show(shown, raw=True, display_id=True)
        seen = 0
        try:
            while time.monotonic() < until and seen != changes:
                time.sleep(_POLL_S)
                if (newer := view_bundle(self)) != shown:
                    shown = newer
                    seen += 1
                    handle.update(shown, raw=True)
        except KeyboardInterrupt:
            return  # interrupting the cell is how a person ends it

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Read all views of the pipeline as of one moment.

        Yields:
            A snapshot; its methods take a view's name.

        Raises:
            ConfigurationError: The pipeline has not run yet.

        Example:
            ```python
            def both():
                with shop.view("revenue", revenue).snapshot() as snapshot:
                    return snapshot.tick("revenue"), snapshot.table("revenue")
            ```
        """
        from headrace.runtime.run import state_of
        from headrace.views.file import VIEWS_FILE
        from headrace.views.reader import ViewReader

        file = state_of(self.pipeline, self.state) / VIEWS_FILE
        if not file.exists():
            raise ConfigurationError(
                f"The view {self.name!r} has no rows yet: there is no {file}.",
                fix=(
                    "run the pipeline first (run(until_caught_up=True), or headrace run FILE); if"
                    " its state is elsewhere, say so with at(DIRECTORY)."
                ),
            )
        with ViewReader(file) as reader, reader.snapshot() as snapshot:
            yield snapshot

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return view_bundle(self)


# What a notebook shows


def plan_bundle(plan: PipelinePlan) -> dict[str, str]:
    """A plan for a notebook: the graph, and the tree for terminals."""
    return {
        "text/plain": tree(plan),
        "text/html": f'<div style="overflow-x:auto">{svg(plan)}</div>',
    }


def view_bundle(view: View) -> dict[str, str]:
    """A view for a notebook: its first rows and their tick, or what to do if it has none yet."""
    try:
        with view.snapshot() as snapshot:
            rows = snapshot.scan(view.name, limit=MAX_ROWS)
            count = snapshot.count(view.name)
            tick = snapshot.tick(view.name)
    except (ConfigurationError, UnknownView) as error:
        return {"text/plain": str(error), "text/html": f"<p>{escape(str(error))}</p>"}
    title = f"{view.name} at tick {tick}: {count:,} {'row' if count == 1 else 'rows'}"
    more = f"<p>… and {count - len(rows):,} more</p>" if count > len(rows) else ""
    return {
        "text/plain": f"{title}\n{rows.to_pandas().to_string(index=False)}",
        "text/html": f"<p><b>{escape(title)}</b></p>{html_table(rows)}{more}",
    }


def html_table(rows: pa.Table) -> str:
    """Rows as a table of HTML."""
    headings = "".join(f"<th>{escape(name)}</th>" for name in rows.column_names)
    lines = [
        "".join(f"<td>{escape(_cell(value))}</td>" for value in row.values())
        for row in rows.to_pylist()
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
