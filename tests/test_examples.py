"""Every example runs, in an empty directory, and says what it should."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.java import require_java

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "01_produce_and_consume": "stored 1000\nfast read 1000\nslow read 300\nslow is behind by 700\n",
    "02_exactly_once": "crashed with 300 receipts\nin the end 1000 receipts for 1000 payments\n",
    "03_queue": 'sent to ada@example.com\nsent to grace@example.com\ndead: {"recipient":"nobody","body":"Hello"}\n',
    "04_spark": "after run 1: 40 hot readings\nafter run 2: 40 hot readings\n",
    "05_pipeline": (
        "revenue as of tick 1\n{'region': 'north', 'orders': 172, 'revenue': 600.0}\n{'region': 'south', 'orders': 85, 'revenue': 297.0}\n"
        "every number is as it should be\n"
    ),
    "06_windows": (
        "1. Two tills, rows out of order. Till b is behind:\n"
        "   orders waits for the producer b: its newest row is of 2026-03-01 12:00:05.000+00:00\n"
        "2. Till b goes on, and the first minute is published, with the hour it is part of:\n"
        "   minutes: 12:00 north 8.00\n   hours: 12:00 north 8.00\n"
        "3. A row of the first minute comes late, and corrects both:\n"
        "   minutes: update_preimage 12:00 north 8.00\n   minutes: update_postimage 12:00 north 108.00\n"
        "   hours: update_preimage 12:00 north 8.00\n   hours: update_postimage 12:00 north 108.00\n"
    ),
}
ON_SPARK = {"04_spark", "05_pipeline", "06_windows"}


def test_every_example_is_tested() -> None:
    assert sorted(EXPECTED) == sorted(path.stem for path in EXAMPLES.glob("[0-9]*.py"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.spark if name in ON_SPARK else ()) for name in EXPECTED])
def test_examples_run(name: str, tmp_path: Path) -> None:
    if name in ON_SPARK:
        require_java()
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, EXPECTED[name]), done.stderr
