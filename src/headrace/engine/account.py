"""The account of a stage's rows that were not used: left out by an aggregate, or too late. A shard's report carries it, the commit makes it exact."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headrace.engine.spec import HostedStep
from headrace.engine.tasks import TICK
from headrace.log.dead import ASIDE, rows_to_texts
from headrace.operators.diverted import Diverted
from headrace.operators.kernel import PutsAside
from headrace.operators.windows.late import LateRows


def account(steps: Iterable[HostedStep], directory: Path) -> dict[str, Any]:
    """For the report: counts by step, files with letters for rows that could not be taken in, late rows by minute and producer, and files with those that go to a topic."""
    report: dict[str, Any] = {"counts": {}, "diverted": {}, "late": {}, "late_rows": {}}
    for step in steps:
        report["counts"] |= {f"{step.name}.{what}": count for what, count in getattr(step.kernel, "counts", {}).items() if count}
        report["counts"] |= {f"{step.name}.{aggregate}.unknown": count for aggregate, count in getattr(step.kernel, "lost", {}).items()}
        if isinstance(diverted := getattr(step.kernel, "diverted", None), Diverted):
            _add_diverted(step.name, diverted.take(), directory, report)
        if isinstance(late := getattr(step.kernel, "late", None), LateRows):
            _add_late(step, late, directory, report)
        if step.aside_topic is not None and isinstance(step.kernel, PutsAside) and (rows := step.kernel.take_aside()).num_rows:
            report["late_rows"][step.aside_topic] = write_rows(directory, f"aside-{step.name}", rows)
    return report


def _add_diverted(step: str, rows: pa.Table, directory: Path, report: dict[str, Any]) -> None:
    if not rows.num_rows:
        return
    report["counts"][f"{step}.diverted"] = rows.num_rows
    names = [name for name in rows.column_names if not name.startswith("_")]
    reasons = pc.binary_join_element_wise(rows["_aggregate"], rows["_reason"], ": ")
    nowhere = [pa.nulls(rows.num_rows, kind) for kind in (pa.int32(), pa.int64())]
    letters = pa.Table.from_arrays([rows_to_texts(rows.select(names)), rows[TICK], reasons, *nowhere], schema=ASIDE)
    report["diverted"][step] = write_rows(directory, f"diverted-{step}", letters)


def _add_late(step: HostedStep, late: LateRows, directory: Path, report: dict[str, Any]) -> None:
    counted = late.take_counts()
    if counted.num_rows:
        minutes, producers = counted["minute"].cast(pa.int64()).to_pylist(), counted["producer"].to_pylist()
        texts = [None if producer is None else str(producer) for producer in producers]
        report["late"][step.name] = [list(each) for each in zip(minutes, texts, counted["rows"].to_pylist(), strict=True)]
    rows = late.take_rows()
    if step.late_topic is not None and rows.num_rows:
        names = [field.name for field in step.inputs[0].schema if not field.name.startswith("_")]
        report["late_rows"][step.late_topic] = write_rows(directory, f"late-{step.name}", rows.select([*names, TICK]))


def write_rows(directory: Path, name: str, rows: pa.Table) -> str:
    """Rows in a file that the commit will read; returns its name."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{os.urandom(4).hex()}.arrow"
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)
    return path.name
