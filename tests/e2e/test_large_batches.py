"""What is large passes, on Spark and at its real size: strings of 100 MB, one key with millions of
rows, thousands of ticks without rows. Memory stays bounded; each test runs in a process of its own,
whose memory and whose children's memory is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]
CHILD = Path(__file__).with_name("large_batches.py")


def run(tmp_path: Path, what: str) -> dict[str, Any]:
    """What the child found, and the largest memory of a Python process."""
    done = subprocess.run(
        [sys.executable, str(CHILD), what, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize("width", ["one", "wide", "auto"])
def test_strings_of_100_mb(tmp_path: Path, width: str) -> None:
    """30 of them, 3 GB in all: more than an Arrow string column can hold."""
    outcome = run(tmp_path, f"strings-{width}")
    assert outcome["rows"] == 30
    assert outcome["bytes"] == 30 * 100_000_000
    assert outcome["peak_mib"] < 6_000


def test_a_hot_key_of_5_million_rows(tmp_path: Path) -> None:
    outcome = run(tmp_path, "hot-key")
    assert outcome["count"] == 5_000_000
    assert outcome["sum"] == 5_000_000 * 4_999_999 // 2
    assert outcome["peak_mib"] < 3_000


def test_2_000_ticks_of_nothing(tmp_path: Path) -> None:
    outcome = run(tmp_path, "nothing")
    assert outcome["tick"] >= 2_000
    assert outcome["count"] == 1
    assert outcome["peak_mib"] < 1_000
