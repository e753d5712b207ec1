"""A checkpoint is written while others commit: what it holds must be the state as of its place in
the journal, and nothing later.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.log.file.state import State
from tests.crash.power import Run
from tests.crash.workloads import WORKLOADS, Workload, shrink


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_a_dump_stays_as_it_was_when_the_state_moves_on(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    taken: list[tuple[dict[str, Any], str]] = []
    apply = State.apply

    def watched(state: State, *arguments: Any) -> None:
        apply(state, *arguments)
        dump = state.dump()
        taken.append((dump, json.dumps(dump)))

    monkeypatch.setattr(State, "apply", watched)
    run = Run(tmp_path)
    workload(run)
    run.finish()
    assert len(taken) > 3
    for dump, text in taken:
        assert json.dumps(dump) == text
