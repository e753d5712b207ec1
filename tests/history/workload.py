"""A generated load: processes that write, move, copy, read and look at one log while the nemesis is
at them; then everything comes to rest, all is read once more, and the history is judged.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import headrace as hr
from tests.history import mutants
from tests.history.checker import Anomaly, Kind, Rules, TopicRules, check, summary
from tests.history.client import (
    PARTITIONS,
    READERS,
    SCHEMA,
    ClientSettings,
    final_audit,
)
from tests.history.faults import KAFKA_NEWEST_KEPT
from tests.history.history import Assign, History, Operation, Outcome
from tests.history.nemesis import Cast, Nemesis

SEGMENT_BYTES = 12_000
RETENTION_BYTES = 36_000
ROW_BYTES = 1_000
"""More than a row of the topic with retention takes, the overhead of an append of its own
included.
"""
LONG_S = float(os.environ.get("HEADRACE_HISTORY_SECONDS", "3600"))
"""How long the long form runs. Set it for a shorter or a longer look."""
ROUND_S = 60.0
CAST = {"write": 2, "move": 2, "copy": 2, "read": 2, "look": 1, "keep": 1}
FAULTS = ("kill", "kill", "kill", "stop", "stop_long", "take_over", "set_clock", "fill_disk")
"""One round of the nemesis, in any order."""


@dataclass
class Load:
    """A load to run on a log.

    Attributes:
        cast: How many processes each role has.
        faults: What the nemesis does, by the names of its methods.
        victims: The roles that it strikes; all if none is named.
        finish_s: How long a role may take to come to its end, when it is told to.
        polls_per_transaction: How often a copier polls before it commits, at most.
        mutant: A defect that all processes have.
        meets_all: The load goes on until it has met all that `Verdict.shortfalls` asks for.
    """

    address: str
    directory: Path
    seed: int = 0
    seconds: float = 5.0
    cast: dict[str, int] = field(default_factory=lambda: dict(CAST))
    faults: tuple[str, ...] = FAULTS
    victims: tuple[str, ...] = ()
    pace_s: float = 0.01
    pause_s: float = 0.2
    session_timeout: str = "1 second"
    finish_s: float = 180.0
    polls_per_transaction: int = 3
    mutant: str = field(default_factory=lambda: os.environ.get(mutants.VARIABLE, ""))
    meets_all: bool = False

    @property
    def is_embedded(self) -> bool:
        return self.address.startswith("file:")

    def run(self) -> Verdict:
        """Run the load, and judge its history."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.create_topics()
        cast = Cast(
            [
                ClientSettings(
                    address=self.address,
                    directory=self.directory,
                    role=role,
                    number=number,
                    seed=self.seed,
                    pace_s=self.pace_s,
                    session_timeout=self.session_timeout,
                    polls_per_transaction=self.polls_per_transaction,
                    mutant=self.mutant,
                )
                for role, total in self.cast.items()
                for number in range(total)
            ]
        )
        nemesis = Nemesis(
            cast,
            self.directory,
            seed=self.seed,
            faults=self.faults,
            victims=self.victims or tuple(self.cast),
        )
        try:
            cast.start_all()
            nemesis.run(
                self.seconds,
                pause_s=self.pause_s,
                is_enough=lambda: not (self.meets_all and self.shortfalls(nemesis.struck)),
            )
            cast.restart_ended()
            # Writers first, so that the others find all rows there.
            stuck = [name for role in self.cast for name in cast.finish(role, self.finish_s)]
        finally:
            cast.end()
        final_audit(self.address, self.directory)
        history = History.load(self.directory)
        anomalies = check(history, self.rules())
        if stuck:  # what was not seen might have been, later
            late = {Kind.UNSEEN, Kind.LOST_EFFECT}
            anomalies = [anomaly for anomaly in anomalies if anomaly.kind not in late]
        return Verdict(history, anomalies, nemesis.struck, stuck)

    def shortfalls(self, struck: Counter[str]) -> list[str]:
        """What the load has not met so far."""
        return Verdict(History.load(self.directory), [], struck).shortfalls(self)

    def create_topics(self) -> None:
        """One plain topic, two that only transactions write, one with retention, one compacted."""
        settings: dict[str, dict[str, Any]] = {
            "kept": {"retention_bytes": RETENTION_BYTES} if self.is_embedded else {},
            "latest": {"compact": True, "segment_age": "2 seconds"},
        }
        with hr.open_log(self.address) as log:
            for topic, partitions in PARTITIONS.items():
                if topic in log.topics():  # of the load before, on the same broker
                    log.delete_topic(topic)
                log.create_topic(
                    topic,
                    SCHEMA,
                    key="key",
                    partitions=partitions,
                    segment_bytes=SEGMENT_BYTES if self.is_embedded else 1 << 20,
                    **settings.get(topic, {}),
                )

    def rules(self) -> Rules:
        kept = (
            (RETENTION_BYTES - SEGMENT_BYTES) // ROW_BYTES
            if self.is_embedded
            else KAFKA_NEWEST_KEPT
        )
        return Rules(
            topics={
                "kept": TopicRules(newest_kept=kept),
                "latest": TopicRules(is_compacted=True),
            },
            groups={READERS: list(PARTITIONS)} if "read" in self.cast else {},
            effects={"copied": "plain"} if "copy" in self.cast else {},
            orders_writes=self.is_embedded,
            has_snapshots=self.is_embedded,
            shows_acknowledged=self.is_embedded,
        )


@dataclass
class Verdict:
    """What a load did, what was done to it, and what was wrong with it."""

    history: History
    anomalies: list[Anomaly]
    struck: Counter[str]
    stuck: list[str] = field(default_factory=list)

    def shortfalls(self, load: Load) -> list[str]:
        """What a load of all roles should have met and did not: faults that met nobody at work
        prove nothing.
        """
        operations = self.history.operations
        errors = " ".join(operation.error for operation in operations)
        assigned = [
            action
            for operation in operations
            for action in operation.actions
            if isinstance(action, Assign)
        ]
        met = {f"{fault} met nobody": self.struck[fault] > 0 for fault in set(load.faults)}
        for role in load.cast:
            kinds = {operation.kind for operation in operations if _did(operation, role)}
            met[f"{role} did nothing"] = bool(kinds - {"open"})
        met["no partition moved"] = len(assigned) > len(
            {(action.topic, action.partition) for action in assigned}
        )
        met["nobody was fenced"] = "Fenced" in errors
        met["retention removed nothing"] = any(
            operation.starts.get(("kept", 0), 0) > 0 for operation in operations
        )
        if load.is_embedded:
            met["the disk was never full"] = "DiskFull" in errors
            met["compaction removed nothing"] = any(
                operation.rows_removed for operation in operations
            )
        return [text for text, is_met in met.items() if not is_met]

    def __str__(self) -> str:
        counts = Counter(
            f"{operation.process.split('-')[0]} {operation.kind} {operation.outcome}"
            for operation in self.history.operations
        )
        rows = sum(
            len(operation.sends)
            for operation in self.history.operations
            if operation.outcome is Outcome.OK
        )
        done = ", ".join(f"{name}: {number}" for name, number in sorted(counts.items()))
        struck = ", ".join(f"{name}: {number}" for name, number in sorted(self.struck.items()))
        return f"{rows} rows; {done}; struck: {struck}\n{summary(self.anomalies)}"


def _did(operation: Operation, role: str) -> bool:
    return operation.outcome is Outcome.OK and operation.process.startswith(f"{role}-")


def run_rounds(load: Load, seconds: float) -> None:
    """One load after the other, each on a log of its own and under another seed, for so long. The
    files of a sound round are removed; those of the first that is not stay for a look.
    """
    deadline = time.monotonic() + seconds
    for number in count():
        directory = load.directory / f"round-{number}"
        address = f"file:{directory / 'log'}" if load.is_embedded else load.address
        round_ = replace(
            load, address=address, directory=directory, seed=load.seed + number, meets_all=True
        )
        verdict = round_.run()
        print(f"round {number}, seed {round_.seed}: {verdict}", flush=True)  # seen with `-s`
        assert not verdict.anomalies, f"seed {round_.seed}, in {directory}: {verdict}"
        assert not verdict.stuck, f"{verdict.stuck} did not come to their ends: {verdict}"
        shortfalls = verdict.shortfalls(round_)
        assert not shortfalls, f"{shortfalls}: {verdict}"
        shutil.rmtree(directory)
        if time.monotonic() > deadline:
            return
