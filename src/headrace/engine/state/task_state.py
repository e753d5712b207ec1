"""The state of everything that one task computes: one transaction of a local store, and at its end
one state file where the changes are few.

A task of a wide job computes the steps of one stage for one shard, and has the local store of that
shard (`open_task_state`). A task that runs a whole job has one store for all of its stages, which
they share (`open_whole_state`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from headrace.engine.state.files import StateFiles, StateIds
from headrace.engine.state.local_store import LocalStore, StoreTransaction
from headrace.engine.state.step_state import StateGrowth, StepState, write_states

MAX_STEPS = 250
"""A local store distinguishes its steps by one byte."""


class TaskState:
    """The states of some steps in one task. `write` makes what changed durable."""

    def __init__(
        self,
        txn: StoreTransaction,
        files: Mapping[str, StateFiles],
        ids: Mapping[str, StateIds],
        how: str,
    ) -> None:
        self.how = how
        """How the local store was brought to the state: see `StoreTransaction.bring_to`."""
        self.steps = {step: StepState(txn, number) for number, step in enumerate(files, 1)}
        self._txn = txn
        self._files = files
        self._ids = ids

    def write(self) -> tuple[dict[str, StateIds], dict[str, StateGrowth]]:
        """Returns the new state ids, and how the state of each step has changed."""
        return write_states(self._txn, self.steps, self._files, self._ids)


@contextmanager
def open_task_state(
    store: Path,
    groups: Sequence[int],
    steps_directory: Path,
    steps: Sequence[str],
    ids: Mapping[str, Mapping[int, str]],
) -> Iterator[TaskState]:
    """The states of some steps, for some key groups, as of `ids`, in the local store at `store`.
    If the body fails, the store stays as it was.
    """
    files = {step: StateFiles(steps_directory / step) for step in steps}
    present = frozenset(groups)
    own_ids = {
        step: {group: name for group, name in ids.get(step, {}).items() if group in present}
        for step in steps
    }
    local_store = LocalStore.open(store, groups)
    try:
        with local_store.transaction() as txn:
            how = txn.bring_to(own_ids, list(steps), files)
            yield TaskState(txn, files, own_ids, how)
    finally:
        local_store.close()


# A whole job in one task


_whole: ContextVar[TaskState | None] = ContextVar("whole", default=None)


def whole_state() -> TaskState | None:
    """The state that all stages share, in a task that runs a whole job."""
    return _whole.get()


@contextmanager
def share_state(state: TaskState) -> Iterator[None]:
    """Let all stages that run meanwhile share a state."""
    token = _whole.set(state)
    try:
        yield
    finally:
        _whole.reset(token)
