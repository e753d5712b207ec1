"""Histories of the embedded log, under load and under faults, have no anomaly.

HEADRACE_HISTORY_SECONDS=600 python -m pytest -n 0 -s -m slow tests/history/test_embedded.py
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.history.workload import LONG_S, ROUND_S, Load, run_rounds

pytestmark = pytest.mark.process


def test_a_short_history_is_sound(tmp_path: Path) -> None:
    run_rounds(Load(address="file:", directory=tmp_path, seed=random.getrandbits(32)), 0)


@pytest.mark.slow
def test_an_hours_history_is_sound(tmp_path: Path) -> None:
    seed = random.getrandbits(32)
    run_rounds(Load(address="file:", directory=tmp_path, seed=seed, seconds=ROUND_S), LONG_S)
