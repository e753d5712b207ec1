"""Rows that are missing in views on purpose: those of their inputs that were left out because too many waited (`hr.shed`), counted exactly. `GET /views` tells it with each view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.serve.board import read_plan
from headrace.serve.run_status import read_run

_SHED = ".shed"


def left_out(directory: Path) -> dict[str, dict[str, int]]:
    """By view: its topics and how many rows of each were left out. Views that miss nothing are not in it."""
    run, plan = read_run(directory), read_plan(directory)
    counts = {} if run is None else run.get("counts", {})
    shed = {name.removesuffix(_SHED): count for name, count in counts.items() if name.endswith(_SHED) and count}
    if not shed or plan is None:
        return {}
    nodes = {node["id"]: node for node in plan["nodes"]}
    of_views = {node["label"]: _topics(node["id"], nodes) for node in plan["nodes"] if node["kind"] == "view"}
    missing = {view: {topic: shed[topic] for topic in sorted(topics & shed.keys())} for view, topics in of_views.items()}
    return {view: topics for view, topics in missing.items() if topics}


def _topics(start: str, nodes: dict[str, dict[str, Any]]) -> set[str]:
    """What a node reads, directly or not."""
    found, seen, ahead = set(), {start}, [start]
    while ahead:
        node = nodes.get(ahead.pop())
        if node is None:
            continue
        if "topic" in node:
            found.add(node["topic"])
        ahead += [each for each in node["inputs"] if each not in seen]
        seen.update(node["inputs"])
    return found
