"""Renderings of a plan: as a graph in Mermaid's language, as an SVG picture, and as `plan.json` in
the state directory, which the dashboard reads. The plan as text is `tree` of `plan`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from headrace.atomic_file import write_atomically
from headrace.plan.join_steps import JoinStep, RankStep, SettleStep, TopStep
from headrace.plan.plan import (
    KeyByStep,
    Output,
    PipelinePlan,
    SelectStep,
    Step,
    TopicOutput,
    TopicStep,
    WhereStep,
    step_text,
)
from headrace.plan.window_steps import WindowStep
from headrace.run_status import PLAN_FILE

STREAM, TABLE, STEP, STATE, OUTPUT = "stream", "table", "step", "state", "output"
_SHAPES = {
    STREAM: ('[("', '")]'),
    TABLE: ('[("', '")]'),
    STEP: ('["', '"]'),
    STATE: ('[["', '"]]'),
    OUTPUT: ('(["', '"])'),
}
_MAX_SUMMARY = 80


@dataclass(frozen=True)
class Node:
    """A box of the graph: its kind, title and text."""

    id: str
    kind: str
    title: str
    text: str


@dataclass(frozen=True)
class Graph:
    """A plan as boxes, and arrows between their ids."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]


def graph(plan: PipelinePlan) -> Graph:
    """The graph of a plan: a box per step and output, an arrow per input."""
    steps = plan.steps()
    ids = {step.name: f"s{position}" for position, step in enumerate(steps)}
    nodes = [
        Node(ids[step.name], _kind(step), step.name, shorten(step_text(step))) for step in steps
    ]
    edges = [(ids[source.name], ids[step.name]) for step in steps for source in step.inputs]
    for position, output in enumerate(plan.outputs):
        text = f"{output.kind} of a {'table' if output.input.is_table else 'stream'}"
        nodes.append(Node(f"o{position}", OUTPUT, output.name, text))
        edges.append((ids[output.input.name], f"o{position}"))
    return Graph(tuple(nodes), tuple(dict.fromkeys(edges)))


def _kind(step: Step) -> str:
    if isinstance(step, TopicStep):
        return TABLE if step.is_table else STREAM
    return STATE if step.stateful else STEP


def shorten(text: str, max_characters: int = _MAX_SUMMARY) -> str:
    """The text on one line, cut to a length."""
    line = " ".join(text.split())
    return line if len(line) <= max_characters else line[: max_characters - 1] + "…"


def mermaid(plan: PipelinePlan) -> str:
    """The graph in Mermaid's language, which GitHub and many editors draw."""
    plan_graph = graph(plan)
    lines = ["flowchart LR"]
    for node in plan_graph.nodes:
        before, after = _SHAPES[node.kind]
        lines.append(
            f"    {node.id}{before}<b>{_entities(node.title)}</b><br/>{_entities(node.text)}{after}"
        )
    lines += [f"    {start} --> {end}" for start, end in plan_graph.edges]
    for kind, style in (
        ("stream", "fill:#e8f1fb"),
        ("table", "fill:#e6f4ea"),
        ("state", "fill:#fff4e0"),
        ("output", "fill:#f3e8fb"),
    ):
        members = ",".join(node.id for node in plan_graph.nodes if node.kind == kind)
        if members:
            lines += [f"    classDef {kind} {style},stroke:#5f6b7a", f"    class {members} {kind}"]
    return "\n".join(lines) + "\n"


def _entities(text: str) -> str:
    """Text with everything that Mermaid could interpret as its entities, which begin with #."""
    plain = " _.,-:=+*/…"
    return "".join(
        character if character.isalnum() or character in plain else f"#{ord(character)};"
        for character in text
    )


# Layout: boxes in columns from inputs to outputs, ordered so that few arrows cross. An arrow that
# spans several columns has a free slot in each column between, so that it passes between the boxes.


_SWEEPS = 8


@dataclass(frozen=True)
class Layout:
    """The ids in each column, from top to bottom. `routes` has the ids that each arrow passes, from
    its start to its end.
    """

    columns: tuple[tuple[str, ...], ...]
    routes: tuple[tuple[str, ...], ...]


def layout(graph: Graph) -> Layout:
    """Arrange a graph's boxes in columns."""
    # The nodes come in topological order. An input stands just before the first box that reads it.
    ids, edges = [node.id for node in graph.nodes], graph.edges
    depth = dict.fromkeys(ids, 0)
    for name in ids:
        depth[name] = max((depth[start] + 1 for start, end in edges if end == name), default=0)
    for name in ids:
        read_by = [depth[end] for start, end in edges if start == name]
        if read_by and not any(end == name for _, end in edges):
            depth[name] = min(read_by) - 1
    columns: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in graph.nodes:
        columns[depth[node.id]].append(node.id)
    routes = []
    for start, end in edges:
        between = [f"{start}>{end}:{column}" for column in range(depth[start] + 1, depth[end])]
        for column, name in enumerate(between, depth[start] + 1):
            columns[column].append(name)
        routes.append((start, *between, end))
    _untangle(columns, routes)
    return Layout(tuple(map(tuple, columns)), tuple(routes))


def _untangle(columns: list[list[str]], routes: Iterable[tuple[str, ...]]) -> None:
    """Sort each column by the mean row of its neighbours, alternately from left and right."""
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for route in routes:
        for start, end in pairwise(route):
            after.setdefault(start, []).append(end)
            before.setdefault(end, []).append(start)
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for position in range(1, len(columns)) if forward else range(len(columns) - 2, -1, -1):
            fixed = {
                name: row for row, name in enumerate(columns[position + (-1 if forward else 1)])
            }
            _sort(columns[position], fixed, before if forward else after)


def _sort(column: list[str], fixed: dict[str, int], neighbours: dict[str, list[str]]) -> None:
    own = {name: row for row, name in enumerate(column)}

    def mean(name: str) -> float:
        rows = [fixed[other] for other in neighbours.get(name, ()) if other in fixed]
        return sum(rows) / len(rows) if rows else own[name]

    column.sort(key=mean)


# SVG


_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 230, 62, 56, 18, 24
_LINE = 36  # characters of a line that fit a box
_FILLS = {STREAM: "#e8f1fb", TABLE: "#e6f4ea", STEP: "#ffffff", STATE: "#fff4e0", OUTPUT: "#f3e8fb"}
_CLASS = "headrace-plan"
_STYLE = "".join(  # for this picture alone: in a notebook, others are on the same page
    f".{_CLASS} {rule}"
    for rule in (
        "text{font-family:system-ui,sans-serif;fill:#1d2733}",
        ".name{font-size:13px;font-weight:600}",
        ".says{font-size:11px;fill:#4a5665}",
        "rect{stroke:#5f6b7a;stroke-width:1.2}",
        "path{fill:none;stroke:#5f6b7a;stroke-width:1.4}",
    )
)

_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    ' orient="auto"><path d="M0 0L8 4L0 8z" style="fill:#5f6b7a;stroke:none"/></marker></defs>'
)


def svg(plan: PipelinePlan) -> str:
    """The plan as an SVG picture."""
    plan_graph = graph(plan)
    plan_layout = layout(plan_graph)
    nodes = {node.id: node for node in plan_graph.nodes}
    tallest = max(map(len, plan_layout.columns))
    corners = {
        name: (
            _MARGIN + column * (_WIDTH + _GAP_X),
            _MARGIN + round((row + (tallest - len(names)) / 2) * (_HEIGHT + _GAP_Y)),
        )
        for column, names in enumerate(plan_layout.columns)
        for row, name in enumerate(names)
    }
    width = 2 * _MARGIN + len(plan_layout.columns) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + tallest * (_HEIGHT + _GAP_Y) - _GAP_Y
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{_CLASS}" width="{width}"'
            f' height="{height}" viewBox="0 0 {width} {height}" role="img">'
        ),
        f"<title>The pipeline {escape(plan.name)}</title><style>{_STYLE}</style>",
        _TIP,
        f'<rect width="{width}" height="{height}" style="fill:#ffffff;stroke:none"/>',
        *(_arrow([corners[name] for name in route]) for route in plan_layout.routes),
        *(_box(nodes[name], *corner) for name, corner in corners.items() if name in nodes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arrow(corners: list[tuple[int, int]]) -> str:
    """A line from the right side of the first box to the left side of the last, level through the
    slots between.
    """
    x, y = corners[0][0] + _WIDTH, corners[0][1] + _HEIGHT // 2
    path = f"M{x} {y}"
    for left, top in corners[1:]:
        middle, level = (x + left) // 2, top + _HEIGHT // 2
        path += f"C{middle} {y} {middle} {level} {left} {level}"
        x, y = left, level
        if (left, top) != corners[-1]:
            x = left + _WIDTH
            path += f"L{x} {y}"
    return f'<path d="{path}" marker-end="url(#tip)"/>'


def _box(node: Node, x: int, y: int) -> str:
    """A box with the name and, below it, the step's text on at most two lines. The whole text shows
    when the pointer rests on the box.
    """
    lines = _wrapped(node.text)
    inset = 26 if node.kind == OUTPUT else 10
    text = "".join(
        f'<text class="says" x="{x + inset}" y="{y + 38 + 15 * row}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    )
    return (
        f'<g><title>{escape(node.title)}: {escape(node.text)}</title><rect x="{x}" y="{y}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" rx="{_HEIGHT // 2 if node.kind == OUTPUT else 6}"'
        f' style="fill:{_FILLS[node.kind]}"/><text class="name" x="{x + inset}"'
        f' y="{y + 20}">{escape(shorten(node.title, 29))}</text>{text}</g>'
    )


def _wrapped(text: str) -> list[str]:
    """The text on one or two lines, broken between words where there are any."""
    if len(text) <= _LINE:
        return [text]
    cut = text.rfind(" ", 1, _LINE + 1)
    cut = cut if cut > 0 else _LINE
    return [text[:cut], shorten(text[cut:].strip(), _LINE)]


# plan.json: the plan in plain values, so that `headrace dashboard` and `headrace top` need not load
# the file that declares the pipeline.


VERSION = 1


class PlannedSink(Protocol):
    """What plan.json says about a sink."""

    @property
    def kind(self) -> str: ...

    @property
    def table(self) -> str | None: ...

    @property
    def follows(self) -> str | None: ...


def write_plan(
    directory: Path, plan: PipelinePlan, sinks: Mapping[str, PlannedSink], log: str
) -> None:
    """Write plan.json. `log` is the log's address, by which a reader finds the topics."""
    content = {"version": VERSION, "pipeline": plan.name, "log": log, "nodes": nodes(plan, sinks)}
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(
        directory / PLAN_FILE, json.dumps(content, default=str).encode(), durable=False
    )


def nodes(plan: PipelinePlan, sinks: Mapping[str, PlannedSink]) -> list[dict[str, Any]]:
    """The nodes of plan.json, each after what it reads: captures, topics, steps, outputs, sinks."""
    captures = [
        _node(f"capture {name}", "capture", name, [])
        for name in dict.fromkeys(step.captured_by for step in plan.inputs if step.captured_by)
    ]
    steps = [_step_node(step) for step in plan.steps()]
    outputs = [_output_node(output) for output in plan.outputs]
    followers = [
        _node(
            f"sink {name}",
            "sink",
            sink.kind,
            [_topic_node(plan, sink.follows or name)],
            about=sink.table or sink.follows or name,
        )
        for name, sink in sinks.items()
    ]
    return [*captures, *steps, *outputs, *followers]


def _node(identity: str, kind: str, label: str, inputs: list[str], **more: Any) -> dict[str, Any]:
    return {"id": identity, "kind": kind, "label": label, "inputs": inputs, **more}


def _step_node(step: Step) -> dict[str, Any]:
    if isinstance(step, TopicStep):
        captured = [f"capture {step.captured_by}"] if step.captured_by else []
        return _node(
            step.name,
            "table" if step.is_table else "topic",
            step.name,
            captured,
            topic=step.topic,
            about=step.summary(),
            stateful=step.is_table,
        )
    more: dict[str, Any] = {"window": str(step.window)} if isinstance(step, WindowStep) else {}
    if isinstance(step, JoinStep):
        more["on"] = list(step.left.on)
    return _node(
        step.name,
        step.operation,
        step.name,
        [each.name for each in step.inputs],
        about=step.summary(),
        stateful=step.stateful,
        **more,
    )


def _output_node(output: Output) -> dict[str, Any]:
    if isinstance(output, TopicOutput):
        return _node(
            f"write {output.name}",
            "written",
            output.name,
            [output.input.name],
            of=output.input.operation,
            topic=output.name,
        )
    return _node(
        f"view {output.name}",
        "view",
        output.name,
        [output.input.name],
        of=output.input.operation,
        **_ranking(output.input),
    )


def _ranking(step: Step) -> dict[str, Any]:
    """The order of a ranking's rows, by the view's names of columns: `order` has columns, each with
    whether the largest comes first, within each group of `per`.
    """
    if isinstance(step, TopStep):
        return {"order": [list(each) for each in step.order], "per": list(step.per)}
    if isinstance(step, RankStep):
        order = [[step.rank, False]] if step.rank is not None else []
        return {"order": order, "per": list(step.per)} if order else {}
    if not isinstance(step, SelectStep | WhereStep | KeyByStep | SettleStep):
        return {}
    before = _ranking(step.input)
    if not before or not isinstance(step, SelectStep):
        return before
    names = {
        expression.column: name
        for (name, _), expression in zip(
            reversed(step.columns), reversed(step.expressions), strict=True
        )
    }
    order = [[names[column], largest] for column, largest in before["order"] if column in names]
    return (
        {"order": order, "per": [names[column] for column in before["per"] if column in names]}
        if order
        else {}
    )


def _topic_node(plan: PipelinePlan, topic: str) -> str:
    """The id of a topic's node: where it is written, or else where it is read."""
    written = [
        f"write {output.name}"
        for output in plan.outputs
        if isinstance(output, TopicOutput) and output.name == topic
    ]
    read = [step.name for step in plan.inputs if step.topic == topic]
    return (written or read or [topic])[0]
