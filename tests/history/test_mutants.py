"""The log, broken on purpose, under load. Each defect must be found, as the anomaly that it is; the
healthy log under the same loads has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.history.checker import Kind
from tests.history.mutants import MUTANTS
from tests.history.workload import Load
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.process

ATTEMPTS = 20
"""How many loads a defect has to show in. Nearly all show in the first one; those that need a
process to be stopped at one moment may take several.
"""


@dataclass(frozen=True)
class Case:
    """A defect, what it shows as, and the smallest load in which it does."""

    mutant: str
    kinds: set[Kind]
    cast: dict[str, int]
    faults: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    seconds: float = 0.5
    pace_s: float = 0.005
    polls: int = 3
    is_any: bool = False
    """Whether one of the kinds is enough."""

    def __str__(self) -> str:
        return "-".join([self.mutant, *sorted(self.kinds)]).replace(" ", "_")

    def load(self, directory: Path, address: str = "", **options: Any) -> Load:
        return Load(
            address=address or f"file:{directory / 'log'}",
            directory=directory / "history",
            cast=self.cast,
            faults=self.faults,
            victims=self.victims,
            seconds=self.seconds,
            pace_s=self.pace_s,
            polls_per_transaction=self.polls,
            pause_s=0.1,
            finish_s=20.0 if address else 5.0,
            session_timeout="600 milliseconds",
            **options,
        )


WRITE, MOVE, COPY, READ = {"write": 1}, {"move": 1}, {"copy": 2}, {"read": 2}
LOOK, KEEP = {"look": 1}, {"keep": 1}
CASES = [
    Case("early_ack", {Kind.STALE_READ}, WRITE | LOOK),
    Case("no_producer_fence", {Kind.ZOMBIE_WRITE}, WRITE, ("take_over",), pace_s=0.03),
    Case("no_duplicate_check", {Kind.DUPLICATE}, WRITE),
    Case("no_transaction_fence", {Kind.ZOMBIE_WRITE}, MOVE, ("take_over",), pace_s=0.03),
    Case(
        "no_member_fence",
        {Kind.DUPLICATE_EFFECT},
        WRITE | COPY,
        ("stop_long",) * 3,
        ("copy",),
        pace_s=0.03,
        polls=1,
    ),
    Case(
        "lost_partitions_are_forgotten",
        {Kind.DUPLICATE_EFFECT},
        WRITE | COPY,
        ("stop_long",) * 3,
        ("copy",),
        pace_s=0.03,
        polls=6,
    ),
    Case("rows_at_once", {Kind.ABORTED_READ, Kind.PRECOMMITTED_READ}, MOVE | LOOK),
    Case("one_commit_per_partition", {Kind.FRACTURED_READ}, MOVE | LOOK),
    Case("one_commit_per_partition", {Kind.LOST_WRITE}, MOVE, ("kill",) * 3, ("move",)),
    Case("offsets_before_rows", {Kind.LOST_EFFECT}, WRITE | COPY, ("kill",) * 3, ("copy",)),
    Case(
        "commits_ahead",
        {Kind.UNSEEN, Kind.NONMONOTONIC_POLL},
        WRITE | READ,
        ("kill",) * 3,
        ("read",),
        is_any=True,
    ),
    Case("poll_skips", {Kind.POLL_SKIP}, WRITE | READ),
    Case("poll_goes_back", {Kind.NONMONOTONIC_POLL}, WRITE | READ),
    Case("early_retention", {Kind.EARLY_REMOVAL}, WRITE | KEEP | LOOK, seconds=1.5),
    Case("compaction_keeps_the_oldest", {Kind.LOST_WRITE}, WRITE | KEEP, seconds=1.5),
]
KAFKA_CASES = [
    Case("kafka_no_transaction_fence", {Kind.ZOMBIE_WRITE}, MOVE, ("take_over",), pace_s=0.03),
    pytest.param(
        Case("kafka_owner_is_not_compared", {Kind.ZOMBIE_WRITE}, MOVE, ("take_over",), pace_s=0.03),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Case(
            "kafka_offsets_before_rows", {Kind.LOST_EFFECT}, WRITE | COPY, ("kill",) * 3, ("copy",)
        ),
        marks=pytest.mark.slow,
    ),
]


def check_case(case: Case, directory: Path, address: str = "") -> None:
    found: set[Kind] = set()
    for attempt in range(ATTEMPTS):
        load = case.load(directory / str(attempt), address, seed=attempt, mutant=case.mutant)
        found |= {anomaly.kind for anomaly in load.run().anomalies}
        if case.kinds <= found or (case.is_any and case.kinds & found):
            return
    pytest.fail(f"{case.mutant} was found as {sorted(found)}, and not as {sorted(case.kinds)}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_load_finds(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.parametrize("case", KAFKA_CASES, ids=str)
def test_a_load_on_kafka_finds(case: Case, kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    check_case(case, tmp_path, kafka_broker.address)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_load_finds_nothing_in_the_healthy_log(case: Case, tmp_path: Path) -> None:
    verdict = case.load(tmp_path).run()
    assert not verdict.anomalies, verdict


def test_every_mutant_has_a_load() -> None:
    on_kafka = {name for name in MUTANTS if name.startswith("kafka_")}
    assert {case.mutant for case in CASES} | on_kafka == set(MUTANTS)
