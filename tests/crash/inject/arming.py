"""Which points are to be struck in a run: those that have a file in a directory."""

from __future__ import annotations

import os
from pathlib import Path


def armed(name: str) -> Path:
    """The file that says that a point is to be struck."""
    return Path(os.environ["HEADRACE_ARMED"]) / name.replace(" ", "_")
