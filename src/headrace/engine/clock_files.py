"""The clocks' state on disk: one file a batch under a random id, durable before the id is in the ledger, like any state. And the parts that read tasks leave."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine import named_files
from headrace.engine.clocks import PARTS, BatchClocks, ClockSpec, ClockState, InputClock, batch_clocks
from headrace.operators.kernel import UNSTARTED

VERSION = 1
_SUFFIX = ".clocks"
_SCHEMA = pa.schema([("input", pa.string()), ("producer", pa.string()), ("newest_us", pa.int64()), ("active_us", pa.int64())])


def write_clocks(directory: Path, state: ClockState) -> str:
    """Store the clocks; returns their id."""
    inputs = {name: {"complete_us": clock.complete_us, "begun": clock.begun} for name, clock in state.inputs.items()}
    table = pa.concat_tables([_rows(name, clock) for name, clock in state.inputs.items()] or [_SCHEMA.empty_table()])
    return named_files.store(directory, _SUFFIX, table, {"version": VERSION, "inputs": inputs})


def _rows(name: str, clock: InputClock) -> pa.Table:
    count = len(clock.producers)
    columns = [pa.repeat(pa.scalar(name), count), clock.producers, pa.array(clock.newest_us), pa.array(clock.active_us)]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def read_clocks(directory: Path, name: str | None) -> ClockState:
    """The clocks of an id; without one, those of a pipeline that has not begun."""
    if name is None:
        return ClockState()
    table, about = named_files.read(directory / f"{name}{_SUFFIX}", newest_version=VERSION)
    return ClockState({name: _clock(table, name, known) for name, known in about["inputs"].items()})


def _clock(table: pa.Table, name: str, known: dict[str, Any]) -> InputClock:
    rows = table.filter(pc.equal(table["input"], name)).combine_chunks()
    producers = rows["producer"].combine_chunks() if rows.num_rows else pa.array([], pa.string())
    newest, active = (np.array(rows[column].to_numpy()) for column in ("newest_us", "active_us"))
    return InputClock(known["complete_us"], producers, newest, active, known["begun"])


def sweep_clocks(directory: Path, kept: set[str], *, begun_s: float, older_than_s: float = 60.0) -> None:
    """Remove the clocks that no ledger entry refers to and that were old when the runner's last commit began. Those of a newer runner are younger, however long
    this one was held up since.
    """
    for path in directory.glob(f"*{_SUFFIX}"):
        if path.name.removesuffix(_SUFFIX) not in kept and path.stat().st_mtime < begun_s - older_than_s:
            path.unlink(missing_ok=True)


# What read tasks leave for the shards behind the shuffle, and for the driver


def write_part(directory: Path, name: str, number: int, rows: pa.Table) -> None:
    """The newest times that one read task found. Another attempt of the task replaces it by the same."""
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".clock-{name}-{number}-{os.urandom(4).hex()}"
    with pa.ipc.new_file(str(fresh), rows.schema) as writer:
        writer.write_table(rows)
    fresh.rename(directory / f"clock-{name}-{number}.part")


def read_parts(directory: Path, name: str) -> pa.Table:
    found = [pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all() for path in sorted(directory.glob(f"clock-{name}-*.part"))]
    return pa.concat_tables(found) if found else PARTS.empty_table()


@dataclass(frozen=True)
class ClockWork:
    """What the clocks of a batch are computed from: how each input's clock goes, the clocks as of the tick before, and the ticks."""

    specs: tuple[ClockSpec, ...] = ()
    id: str | None = None
    before_us: int = UNSTARTED
    ticks: tuple[int, ...] = ()
    times_us: tuple[int, ...] = ()

    def clocks(self, directory: Path, job_directory: Path, names: Collection[str]) -> tuple[BatchClocks, ClockState]:
        """The clocks of some inputs, which must all have been read: behind a shuffle those upstream have."""
        specs = [spec for spec in self.specs if spec.name in names]
        parts = {spec.name: read_parts(job_directory, spec.name) for spec in specs if not spec.follows_ticks}
        return batch_clocks(specs, replace(read_clocks(directory, self.id), time_us=self.before_us), parts, self.ticks, self.times_us)
