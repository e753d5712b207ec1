"""The recorded calls of a run: opens a caller for each (`headrace.calls`), runs them in the
background, and says to the runner what it must know: whether a row still waits for its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

from headrace.calls.caller import Caller
from headrace.log.api import Log
from headrace.plan.answer_steps import AnswersStep, RequestsOutput
from headrace.plan.plan import PipelinePlan, topological_order
from headrace.runtime.services import background

if TYPE_CHECKING:
    from headrace.calls.call import Call
    from headrace.runtime.runner import Runner

PATIENCE_S = 20.0


class Calls:
    """The callers of a run. `open` takes over from those of an older run; `attach` introduces them
    to a runner, which may be another one after Spark has died.
    """

    def __init__(self, log: Log, calls: Mapping[str, Call], plan: PipelinePlan) -> None:
        self.log = log
        self.callers: dict[str, Caller] = {}
        self._calls = calls
        self._runner: Runner | None = None
        self._rounds = 0
        self._goals: dict[str, dict[int, int]] | None = None
        self._answer_ends: dict[str, dict[int, int]] = {}
        topics = {call.answers_topic for call in calls.values()}
        self._following_topics = {
            output.call: topics - _answers_upstream(output)
            for output in plan.outputs
            if isinstance(output, RequestsOutput)
        }
        """Call -> the topics of answers that its rows are not computed from."""

    def open(self) -> None:
        """Take over all calls. Must come before the first tick is cut."""
        for name, call in self._calls.items():
            is_own_tick = partial(self._is_own_tick, name)
            self.callers[name] = Caller.open(self.log, call, is_own_tick=is_own_tick)

    def attach(self, runner: Runner) -> None:
        self._runner = runner
        runner.context.is_answered = self.is_answered
        runner.waits_for_answers = self.waits_for_answers
        runner.call_status = self.status

    @contextmanager
    def running(self, stop: Event) -> Iterator[None]:
        """Call in the background of the body."""
        services = {f"call {name}": caller.run for name, caller in self.callers.items()}
        with background(services, stop, patience_s=PATIENCE_S):
            yield

    def answer_all(self) -> bool:
        """Call in this thread until no row waits. Returns whether anything was recorded: for
        tests, which run a pipeline step by step.
        """
        before = self._ends_of_answers()
        for caller in self.callers.values():
            caller.run(Event(), until_quiet=True)
        return self._ends_of_answers() != before

    # What the runner asks

    def is_answered(self, name: str) -> bool:
        """Whether no row of a call waits for its answer."""
        caller = self.callers.get(name)
        if caller is None or not caller.is_quiet:
            return False
        ends = self.log.end_offsets(caller.call.requests_topic)
        return all(caller.recorder.lows.get(partition, 0) >= end for partition, end in ends.items())

    def waits_for_answers(self) -> bool:
        """Whether a run that is to catch up must go on: its outputs have all ticks, and rows still
        wait, or answers are not in a tick yet. Each round answers the rows of the round before; of
        calls in a row, each takes one.
        """
        runner = self._runner
        if runner is None or not self.callers:
            return False
        if self._goals is None:
            self._answer_ends = {}
            self._goals = {
                name: self.log.end_offsets(caller.call.requests_topic)
                for name, caller in self.callers.items()
            }
        for name, goals in self._goals.items():
            caller = self.callers[name]
            if any(
                caller.recorder.lows.get(partition, 0) < goal for partition, goal in goals.items()
            ):
                return True
        if not self._answer_ends:
            self._answer_ends = self._ends_of_answers()
        last = runner.journal.at(runner.tick)
        assert last is not None
        for topic, ends in self._answer_ends.items():
            if any(last.end(topic, partition) < end for partition, end in ends.items()):
                return True
        self._goals = None
        self._rounds += 1
        if self._rounds < len(self.callers) or not all(map(self.is_answered, self.callers)):
            return True
        self._rounds = 0
        return False

    def check(self) -> None:
        """Raise CallFailed if a function does not give its event loop back."""
        for caller in self.callers.values():
            caller.check_blocked()

    def status(self) -> dict[str, str]:
        return {name: str(caller.status) for name, caller in self.callers.items()}

    def _ends_of_answers(self) -> dict[str, dict[int, int]]:
        topics = [caller.call.answers_topic for caller in self.callers.values()]
        return {topic: self.log.end_offsets(topic) for topic in topics}

    def _is_own_tick(self, name: str, number: int) -> bool:
        """Whether a tick took in nothing but answers that a call's rows are not computed from: if
        such a tick moved event time on for it, the two would go on for ever.
        """
        if self._runner is None:
            return False
        before, tick = self._runner.journal.at(number - 1), self._runner.journal.at(number)
        if before is None or tick is None or tick.number != number:
            return False
        changed = {topic for topic, ends in tick.ends.items() if ends != before.ends.get(topic)}
        return bool(changed) and changed <= self._following_topics.get(name, set())


def _answers_upstream(output: RequestsOutput) -> set[str]:
    """The topics of answers that the rows of a call are computed from."""
    steps = topological_order([output.input])
    return {step.topic for step in steps if isinstance(step, AnswersStep)}
