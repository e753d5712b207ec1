"""The plan as a file in the state directory, in plain values: who shows a pipeline (`headrace dashboard`, `headrace top`) need not load the file that declares it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.pipeline.plan import KeyByStep, Output, PipelinePlan, SelectStep, Step, TopicOutput, TopicStep, WhereStep
from headrace.pipeline.table_ops import SettleStep, TopStep
from headrace.pipeline.windowing import WindowStep

if TYPE_CHECKING:
    from headrace.pipeline.pipeline import Pipeline

FILE = "plan.json"
VERSION = 1


def write_plan(directory: Path, plan: PipelinePlan, pipeline: Pipeline, log: str) -> None:
    """`log`: its address, without which topics cannot be shown."""
    told = {"version": VERSION, "pipeline": plan.name, "log": log, "nodes": nodes(plan, pipeline)}
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".{FILE}-{os.urandom(4).hex()}"  # another run may be writing its own
    fresh.write_text(json.dumps(told, default=str))
    fresh.replace(directory / FILE)


def nodes(plan: PipelinePlan, pipeline: Pipeline) -> list[dict[str, Any]]:
    """What there is to draw, each behind what it reads: captures, topics, steps, outputs, sinks."""
    captures = [_node(f"capture {name}", "capture", name, []) for name in dict.fromkeys(step.captured_by for step in plan.inputs if step.captured_by)]
    steps = [_step(step) for step in plan.steps()]
    outputs = [_output(output) for output in plan.outputs]
    sinks = [_node(f"sink {topic}", "sink", sink.kind, [_source(plan, topic)], about=sink.table or topic) for topic, sink in pipeline.sinks.items()]
    return [*captures, *steps, *outputs, *sinks]


def _node(identity: str, kind: str, label: str, inputs: list[str], **more: Any) -> dict[str, Any]:
    return {"id": identity, "kind": kind, "label": label, "inputs": inputs, **more}


def _step(step: Step) -> dict[str, Any]:
    if isinstance(step, TopicStep):
        captured = [f"capture {step.captured_by}"] if step.captured_by else []
        return _node(step.name, "table" if step.is_table else "topic", step.name, captured, topic=step.topic, about=step.summary(), stateful=step.is_table)
    more = {"window": str(step.window)} if isinstance(step, WindowStep) else {}
    return _node(step.name, step.operation, step.name, [each.name for each in step.inputs], about=step.summary(), stateful=step.stateful, **more)


def _output(output: Output) -> dict[str, Any]:
    if isinstance(output, TopicOutput):
        return _node(f"write {output.name}", "written", output.name, [output.input.name], of=output.input.operation, topic=output.name)
    return _node(f"view {output.name}", "view", output.name, [output.input.name], of=output.input.operation, **_ranking(output.input))


def _ranking(step: Step) -> dict[str, Any]:
    """How a leaderboard's rows are in order, by the view's own names of columns: `order` has columns, each with whether the largest is first; it is so within each of `per`."""
    if isinstance(step, TopStep):
        return {"order": [list(each) for each in step.order], "per": list(step.per)}
    if not isinstance(step, SelectStep | WhereStep | KeyByStep | SettleStep):
        return {}
    before = _ranking(step.input)
    if not before or not isinstance(step, SelectStep):
        return before
    names = {expression.column: name for (name, _), expression in zip(reversed(step.columns), reversed(step.expressions), strict=True)}
    order = [[names[column], largest] for column, largest in before["order"] if column in names]
    return {"order": order, "per": [names[column] for column in before["per"] if column in names]} if order else {}


def _source(plan: PipelinePlan, topic: str) -> str:
    """The node that stands for a topic: where it is written, or where it is read."""
    written = [f"write {output.name}" for output in plan.outputs if isinstance(output, TopicOutput) and output.name == topic]
    read = [step.name for step in plan.inputs if step.topic == topic]
    return (written or read or [topic])[0]
