"""The plan as a file in the state directory, in plain values: who shows a pipeline (`headrace dashboard`, `headrace top`) need not load the file that declares it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.pipeline.plan import Output, PipelinePlan, Step, TopicOutput, TopicStep
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
    is_topic = isinstance(output, TopicOutput)
    topic = {"topic": output.name} if is_topic else {}
    return _node(f"{'write' if is_topic else 'view'} {output.name}", "written" if is_topic else "view", output.name, [output.input.name], of=output.input.operation, **topic)


def _source(plan: PipelinePlan, topic: str) -> str:
    """The node that stands for a topic: where it is written, or where it is read."""
    written = [f"write {output.name}" for output in plan.outputs if isinstance(output, TopicOutput) and output.name == topic]
    read = [step.name for step in plan.inputs if step.topic == topic]
    return (written or read or [topic])[0]
