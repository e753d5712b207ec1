"""What the runtime needs of a declared pipeline, as a protocol. `headrace.pipeline.Pipeline` meets
it; nothing here imports that class, so that imports point one way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace.alerts.alert import Alert
    from headrace.calls.call import Call
    from headrace.cdc.declaration import Capture
    from headrace.gateways.declaration import Gateway
    from headrace.plan.answer_steps import AnswersStep, RequestsOutput
    from headrace.plan.plan import PipelinePlan, Step
    from headrace.sinks.declaration import Sink


class DeclaredPipeline(Protocol):
    """A pipeline as its author declared it: the plan, and its background services."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> str | None:
        """The address of the log; None if it is given when the pipeline is run."""

    @property
    def directory(self) -> Path:
        """The directory of the file that declares the pipeline."""

    @property
    def ingested(self) -> Mapping[str, Any]:
        """Streaming DataFrames, or functions that make them from a session, by the name of their
        ingest.
        """

    @property
    def captures(self) -> Mapping[str, Capture]: ...

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """Sinks by the derived topic that each follows, or by name if it `follows` an input's."""

    @property
    def gateways(self) -> Mapping[str, Gateway]: ...

    @property
    def alerts(self) -> Mapping[str, Alert]: ...

    @property
    def calls(self) -> Mapping[str, Call]: ...

    def add_call(self, call: Call, answers: AnswersStep, requests: RequestsOutput) -> None:
        """Add a recorded call, its answers as an input, and its requests as an output."""

    def plan(self) -> PipelinePlan: ...

    def topic_of(self, step: Step) -> str | None:
        """The derived topic that a step's rows are written to, if there is one."""
