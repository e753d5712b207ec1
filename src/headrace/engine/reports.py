"""A task's report: a small file for the commit. Whichever attempt's is found, it stands for the same rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_report(directory: Path, name: str, report: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".{name}-{os.urandom(4).hex()}"
    fresh.write_text(json.dumps(report))
    fresh.rename(directory / f"{name}.json")
