"""Engines that are wrong on purpose, each in one way that a fault brings to light: the property
must fail on every one of them, or it proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.engine import reports
from headrace.engine.ledger import LedgerEntry
from headrace.engine.state.local_store import _STAMP as STAMP
from headrace.engine.state.local_store import StoreTransaction
from headrace.errors import HeadraceError
from headrace.runtime.query import ComputedBatch, Query
from headrace.testing.fault_points import IN_TASKS, ON_THE_DRIVER
from headrace.views.file import read_view
from headrace.views.store import ViewStore
from tests.e2e.faults import Faults
from tests.e2e.pipeline_lives import Life, Move, TickRows, live

pytestmark = pytest.mark.usefixtures("no_syncs")
Patch = Callable[[Any, str, Any], None]


def lives() -> list[Life]:
    """Some rows, tasks that are run twice, and a fault at every point once: of those in tasks, of
    those on the driver, and here and there.
    """
    rng = Random(11)
    ticks: list[TickRows] = [
        {
            "orders": [
                {"k": rng.choice([None, 0, 1, 2]), "v": rng.randrange(5), "note": rng.choice("ab")}
                for _ in range(6)
            ],
            "late_orders": [],
            "people": [
                {
                    "id": rng.randrange(3),
                    "city": rng.choice(["Oslo", "Rome"]),
                    "age": rng.randrange(80),
                    "_change_type": "insert",
                }
                for _ in range(3)
            ],
        }
        for _ in range(4)
    ]
    moves = [
        Move(1, restart=number % 2 == 1, shards=1 + number % 3, lose_store=False, late_tasks=0)
        for number in range(4)
    ]
    strikes: list[frozenset[int | str]] = [
        frozenset(),
        frozenset(ON_THE_DRIVER),
        frozenset(IN_TASKS),
        frozenset(range(5, 400, 37)),
    ]
    return [
        Life(ticks, 1, moves, strike, 0.3, number, frozenset())
        for number, strike in enumerate(strikes)
    ]


def takes_ticks_again(patch: Patch) -> None:
    def advance(store: ViewStore, db: Any, name: str, tick: int, changes: Any) -> None:
        info = read_view(db, name)
        if changes is not None and changes.num_rows:
            store._write(db, info, changes)
        db.execute(
            "UPDATE _views SET tick = ? WHERE number = ?", (max(tick, info.tick), info.number)
        )

    patch(ViewStore, "_advance", advance)


def believes_its_store(patch: Patch) -> None:
    real = StoreTransaction.bring_to

    def bring_to(txn: StoreTransaction, *args: Any) -> str:
        return "there" if txn.txn.get(STAMP) is not None else real(txn, *args)

    patch(StoreTransaction, "bring_to", bring_to)


def undoes_nothing(patch: Patch) -> None:
    patch(StoreTransaction, "_undo", lambda _txn, name: name is not None)


def keeps_older_ids(patch: Patch) -> None:
    """As if state ids came into the ledger one batch too late."""
    real = Query.commit

    def commit(query: Query, batch: ComputedBatch) -> None:
        ids = {step: dict(found) for step, found in batch.context.ids.items()}
        batch.entry = replace(batch.entry, states=ids)
        real(query, batch)

    patch(Query, "commit", commit)


def commits_nothing_with_the_rows(patch: Patch) -> None:
    """The ledger stays a tick behind the topics."""
    real = LedgerEntry.to_json
    patch(LedgerEntry, "to_json", lambda entry: real(replace(entry, tick=max(0, entry.tick - 1))))


def adds_up_attempts(patch: Patch) -> None:
    """Each attempt's report is found, not just one."""
    real = reports.write_report

    def write_report(job: reports.JobFiles, name: str, report: dict[str, Any]) -> None:
        real(job, name, report)
        real(job, f"{name}-{os.urandom(4).hex()}", report)

    for module in ("dead_letters", "map_tasks", "shard", "outputs"):
        patch(
            __import__(f"headrace.engine.{module}", fromlist=["write_report"]),
            "write_report",
            write_report,
        )


MUTANTS = [
    takes_ticks_again,
    believes_its_store,
    undoes_nothing,
    keeps_older_ids,
    commits_nothing_with_the_rows,
    adds_up_attempts,
]


def lived(life: Life, faults: list[Faults], root: Path) -> bool:
    faults[0] = Faults(life.faults)
    try:
        live(life, faults[0], root)
    except (AssertionError, HeadraceError):
        return False
    return True


def test_the_engine_itself_lives_through_all_of_it(tmp_path: Path, faults: list[Faults]) -> None:
    assert all(lived(life, faults, tmp_path / str(number)) for number, life in enumerate(lives()))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: list[Faults],
    mutant: Callable[[Patch], None],
) -> None:
    mutant(monkeypatch.setattr)
    assert not all(
        lived(life, faults, tmp_path / str(number)) for number, life in enumerate(lives())
    )
