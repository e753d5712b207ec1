"""Reads what the runner of a pipeline writes into its state directory: `status.json` (how the run
goes; `headrace.run_status` has its fields) and `plan.json` (the steps).

The server may be another process than the runner, so these files are all it knows of the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import ConfigurationError
from headrace.run_status import FILE

PLAN_FILE = "plan.json"


def read_status(directory: Path) -> dict[str, Any] | None:
    """The status of the newest run; None if no pipeline has run with this state directory."""
    try:
        status = json.loads((directory / FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def read_plan(state: Path) -> dict[str, Any] | None:
    """The plan of the newest run; None if there is none, or if a newer Headrace wrote it."""
    try:
        plan = json.loads((state / PLAN_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return plan if isinstance(plan, dict) and plan.get("version") == 1 else None


def pipeline_name(directory: Path) -> str | None:
    """The name of the pipeline; None as long as it has written no status."""
    status = read_status(directory)
    return None if status is None else str(status["pipeline"])


def log_address(state: Path) -> str | None:
    """The address of the log that the pipeline reads."""
    plan = read_plan(state)
    return None if plan is None else plan.get("log")


def check_state(state: Path) -> None:
    """Refuse a directory without a plan: it is more likely misspelt than not yet used."""
    if not (state / PLAN_FILE).exists():
        raise ConfigurationError(
            f"No pipeline has run with the state directory {state}.",
            fix=(
                "name the pipeline's state directory, such as shop.state, or run the pipeline"
                " first."
            ),
        )
