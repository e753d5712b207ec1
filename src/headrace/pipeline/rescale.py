"""How many shards a pipeline is to have: a note in the log, which the next run uses and a run under way takes on between two batches.

The number of shards changes how fast a pipeline is and nothing else: state lies in 128 key groups, and shards only share them out.
"""

from __future__ import annotations

from headrace.engine.state_files import GROUPS
from headrace.errors import ConfigurationError
from headrace.log.api import Log


def remembered_shards(log: Log, pipeline: str) -> int | None:
    """The number that was chosen with `headrace rescale`, if one was."""
    stored = log.note(_note(pipeline))
    return None if stored is None else int(stored)


def remember_shards(log: Log, pipeline: str, shards: int | None) -> None:
    """Choose a number; None leaves it to each run again."""
    if shards is not None and not 1 <= shards <= GROUPS:
        raise ConfigurationError(
            f"{shards} cannot be a number of shards.", fix=f"choose one from 1 to {GROUPS}: there are {GROUPS} key groups to share out."
        )
    with log.transaction(f"rescale.{pipeline}") as tx:  # not the runner's own transaction, or it would be fenced
        tx.set_note(_note(pipeline), None if shards is None else str(shards))


def _note(pipeline: str) -> str:
    return f"shards.{pipeline}"
