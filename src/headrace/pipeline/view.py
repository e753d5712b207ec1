"""A view that a pipeline declared, from Python: its rows as of a tick, whoever runs the pipeline. In a notebook it shows them (`notebook`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError
from headrace.log.values import Duration

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from headrace.pipeline.pipeline import Pipeline
    from headrace.sinks.view_reader import Snapshot


@dataclass(frozen=True)
class View:
    """What `Pipeline.view` returns. Its rows are there once the pipeline has run; each call reads them as of the newest tick."""

    pipeline: Pipeline = field(repr=False)
    name: str
    state: Path | None = None
    """The pipeline's state directory, if it is not the usual one."""

    def at(self, state: str | Path) -> View:
        """The same view in another state directory: the one given to `run(state=…)` or `headrace run --state`."""
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
        """In a notebook: show the rows, and show them anew in the same place whenever they change; for so long, or so often, or until the cell is interrupted."""
        from headrace.pipeline.notebook import follow

        follow(self, duration, changes)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """All views of the pipeline as of one moment. ConfigurationError if it has not run yet."""
        from headrace.pipeline.running import state_of
        from headrace.sinks.view_file import VIEWS_FILE
        from headrace.sinks.view_reader import ViewReader

        place = state_of(self.pipeline, self.state) / VIEWS_FILE
        if not place.exists():
            raise ConfigurationError(
                f"The view {self.name!r} has no rows yet: there is no {place}.",
                fix="run the pipeline first (run(until_caught_up=True), or headrace run FILE); if its state is elsewhere, say so with at(DIRECTORY).",
            )
        with ViewReader(place) as reader, reader.snapshot() as snapshot:
            yield snapshot

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from headrace.pipeline.notebook import view_bundle

        return view_bundle(self)
