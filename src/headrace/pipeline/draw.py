"""A plan for people: as a tree of text, and as a graph in Mermaid's language. `svg` draws the same graph."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.pipeline.patterns import MatchStep
from headrace.pipeline.plan import Output, PipelinePlan, Step, TopicStep

STREAM, TABLE, STEP, STATE, OUTPUT = "stream", "table", "step", "state", "output"
_SHAPES = {STREAM: ('[("', '")]'), TABLE: ('[("', '")]'), STEP: ('["', '"]'), STATE: ('[["', '"]]'), OUTPUT: ('(["', '"])')}
_MOST_SUMMARY = 80


def tree(plan: PipelinePlan) -> str:
    """Each output, and below it the steps that lead to it. A step that was drawn already is only named."""
    lines = [f"pipeline {plan.name}"]
    drawn: set[str] = set()
    unused = [each.name for each in plan.inputs if not plan.consumers(each)]
    for position, output in enumerate(plan.outputs):
        last = position == len(plan.outputs) - 1 and not unused
        lines.append(f"{_branch(last)}{output.kind} {output.name}")
        lines += _below(output.input, _indent(last), drawn)
    if unused:
        lines.append(f"{_branch(last=True)}not used: {', '.join(unused)}")
    return "\n".join(lines)


def _below(first: Step, indent: str, drawn: set[str]) -> list[str]:
    """Depth first, with a list of what is left to draw instead of recursion."""
    lines: list[str] = []
    left: list[tuple[Step, str, bool]] = [(first, indent, True)]
    while left:
        step, indent, last = left.pop()
        known = step.name in drawn and bool(step.inputs)
        lines.append(f"{indent}{_branch(last)}{step.name}  {'(as above)' if known else _said(step)}{'' if known or not step.stateful else '  [keeps state]'}".rstrip())
        if not known:
            lines += [f"{indent}{_indent(last)}    {line}" for line in _more(step)]
            drawn.add(step.name)
            left += [(each, indent + _indent(last), position == len(step.inputs) - 1) for position, each in enumerate(step.inputs)][::-1]
    return lines


def _more(step: Step) -> list[str]:
    """What else there is to draw of a step: the automaton of its pattern."""
    return step.drawn() if isinstance(step, MatchStep) else []


def _said(step: Step) -> str:
    kind = ("table" if step.is_table else "topic") if isinstance(step, TopicStep) else step.operation
    return f"{kind} {step.summary()}".rstrip()


def _branch(last: bool) -> str:
    return "└─ " if last else "├─ "


def _indent(last: bool) -> str:
    return "   " if last else "│  "


@dataclass(frozen=True)
class Node:
    """A box of the graph: what it is, and what it says."""

    id: str
    kind: str
    title: str
    says: str


@dataclass(frozen=True)
class Graph:
    """A plan as boxes and arrows between their ids."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]


def graph(plan: PipelinePlan) -> Graph:
    steps = plan.steps()
    ids = {step.name: f"s{position}" for position, step in enumerate(steps)}
    nodes = [Node(ids[step.name], _kind(step), step.name, shortened(_said(step))) for step in steps]
    edges = [(ids[given.name], ids[step.name]) for step in steps for given in step.inputs]
    for position, output in enumerate(plan.outputs):
        nodes.append(Node(f"o{position}", OUTPUT, output.name, _output_said(output)))
        edges.append((ids[output.input.name], f"o{position}"))
    return Graph(tuple(nodes), tuple(dict.fromkeys(edges)))


def _kind(step: Step) -> str:
    if isinstance(step, TopicStep):
        return TABLE if step.is_table else STREAM
    return STATE if step.stateful else STEP


def _output_said(output: Output) -> str:
    return f"{output.kind} of a {'table' if output.input.is_table else 'stream'}"


def shortened(text: str, most: int = _MOST_SUMMARY) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def mermaid(plan: PipelinePlan) -> str:
    """The graph in Mermaid's language, which GitHub and many editors draw."""
    drawn = graph(plan)
    lines = ["flowchart LR"]
    for node in drawn.nodes:
        before, after = _SHAPES[node.kind]
        lines.append(f"    {node.id}{before}<b>{_entities(node.title)}</b><br/>{_entities(node.says)}{after}")
    lines += [f"    {start} --> {end}" for start, end in drawn.edges]
    for kind, style in (("stream", "fill:#e8f1fb"), ("table", "fill:#e6f4ea"), ("state", "fill:#fff4e0"), ("output", "fill:#f3e8fb")):
        members = ",".join(node.id for node in drawn.nodes if node.kind == kind)
        if members:
            lines += [f"    classDef {kind} {style},stroke:#5f6b7a", f"    class {members} {kind}"]
    return "\n".join(lines) + "\n"


def _entities(text: str) -> str:
    """Mermaid reads its own entities, with # for &; everything that has a meaning to it is written so."""
    return "".join(each if each.isalnum() or each in " _.,-:=+*/…" else f"#{ord(each)};" for each in text)
