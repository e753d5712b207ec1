"""The log as plain tables, each row with the tick that it was taken in with: what the second computation starts from. It uses the recorded ticks and nothing of the engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd

from headrace.log.api import Log

Frame = pd.DataFrame
Row = dict[str, Any]


class Recorded:
    """Topics as DataFrames, in the pipeline's order; `tick` is added: which one a row belongs to."""

    def __init__(self, log: Log, pipeline: str) -> None:
        self._log = log
        self._ticks = list(_ticks(log.read(f"__ticks.{pipeline}").to_pylist()))

    def rows(self, topic: str) -> Frame:
        """All rows that were ever appended to a topic."""
        frame = self._log.read(topic).to_pandas()
        frame["tick"] = 0
        for partition in frame["_partition"].unique():
            which = frame["_partition"] == partition
            ends = [ends.get(topic, {}).get(str(partition), 0) for _, ends in self._ticks]
            frame.loc[which, "tick"] = np.searchsorted(ends, frame.loc[which, "_offset"].to_numpy(), side="right")
        return frame.sort_values(["tick", "_partition", "_offset"], kind="stable").reset_index(drop=True)

    def device_rows(self, topic: str) -> Frame:
        """With the time at which things happened: by the device's clock, and put right by how far that was off when the row was sent."""
        frame = self.rows(topic)
        frame["event_time"] = frame["happened"] + (frame["received"] - frame["sent"])
        return frame

    def newest(self, topic: str, key: str) -> Frame:
        """What a table's topic amounts to."""
        return self.rows(topic).drop_duplicates(key, keep="last").sort_values(key).reset_index(drop=True)


def _ticks(rows: list[Row]) -> list[tuple[int, dict[str, dict[str, int]]]]:
    """Number and ends of each tick. Most are recorded as what changed since the one before."""
    found: list[tuple[int, dict[str, dict[str, int]]]] = []
    ends: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: int(row["tick"])):
        changed = json.loads(row["ends"])
        ends = {topic: {**ends.get(topic, {}), **changed.get(topic, {})} for topic in {**ends, **changed}}
        found.append((row["tick"], ends))
    return found
