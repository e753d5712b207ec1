"""What a run does beside its batches, seldom and a little at a time: it sweeps state that nobody needs any more, and notices when another number of shards was chosen."""

from __future__ import annotations

import logging
import time

from headrace.engine.state_files import StateIds
from headrace.engine.sweeping import Sweeper
from headrace.errors import HeadraceError
from headrace.pipeline.rescale import remembered_shards
from headrace.pipeline.runner import Runner

logger = logging.getLogger("headrace.pipeline")
ENTRIES_KEPT = 10
LOOK_EVERY_S = 2.0


class Upkeep:
    """Of one runner. `fixed_shards`: the run was told how many shards to have, and stays with that."""

    def __init__(self, runner: Runner, *, fixed_shards: bool = False) -> None:
        self.runner, self.fixed_shards = runner, fixed_shards
        self.sweeper = Sweeper(runner.state, runner.local, self._roots, lambda: runner.shards, lambda: {query.name for query in runner.queries})
        self._next_look_s = 0.0

    def attend(self) -> None:
        """Called between batches."""
        try:
            self._notice_shards()
            self.sweeper.work()
        except (HeadraceError, OSError) as error:  # no reason to stop: if it is one, the next batch will tell
            logger.warning("The upkeep of %s was put off: %s", self.runner.plan.name, error)
            self.sweeper.postpone()

    def _notice_shards(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        chosen = None if self.fixed_shards else remembered_shards(self.runner.log, self.runner.plan.name)
        if chosen is not None and chosen != self.runner.shards:
            logger.info("%s goes on with %d shards instead of %d.", self.runner.plan.name, chosen, self.runner.shards)
            self.runner.shards = chosen

    def _roots(self) -> dict[str, list[StateIds]]:
        """What must stay: the states of the newest entry of every query, and of the entries just before."""
        ledger = self.runner.ledger
        ledger.check_newest()
        found: dict[str, list[StateIds]] = {}
        for entry in [*(query.entry for query in self.runner.queries), *ledger.recent(ENTRIES_KEPT)]:
            for step, ids in entry.states.items():
                found.setdefault(step, []).append(dict(ids))
        return found
