"""Kills processes that commit to a view store, and looks at what they left. Run as a program,
because it forks.

Each tick counts one up in one of seven rows, in two views, and adds a row to a stream. So at tick t
the counts sum to t in each view, the stream has t rows, and the kept changes fold to the rows.
Whatever was killed, and when: a reader that finds anything else is recorded in `disagreements`.
"""

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from headrace.operators.changelog import MalformedChangelog, fold
from headrace.types.schema import parse_schema
from headrace.views.reader import ViewReader
from headrace.views.store import ViewStore

SCHEMA = parse_schema("k BIGINT, n BIGINT")
CHANGES = SCHEMA.append(pa.field("_tick", pa.int64())).append(pa.field("_change_type", pa.string()))
ROWS = 7
TICKS_A_COMMIT = 3
MAX_ROWS = 1_000_000


class TornStore(ViewStore):
    """A store that is wrong on purpose: a view's rows and its tick are committed one after the
    other.
    """

    def _write(self, db, info, rows):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        super()._write(db, info, rows)
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")


def counted(after: int, up_to: int) -> dict[str, pa.Table]:
    """The changes of ticks (after, up_to], always the same."""
    rows, events = [], []
    for tick in range(after + 1, up_to + 1):
        k, n = tick % ROWS, (tick + ROWS - 1) // ROWS if tick % ROWS else tick // ROWS
        if n > 1:
            rows.append({"k": k, "n": n - 1, "_tick": tick, "_change_type": "update_preimage"})
        rows.append(
            {
                "k": k,
                "n": n,
                "_tick": tick,
                "_change_type": "insert" if n == 1 else "update_postimage",
            }
        )
        events.append({"k": k, "n": n, "_tick": tick, "_change_type": "insert"})
    changes = pa.Table.from_pylist(rows, CHANGES)
    return {"first": changes, "second": changes, "events": pa.Table.from_pylist(events, CHANGES)}


def opened(path: Path, kind: type[ViewStore]) -> ViewStore:
    store = kind.open(path)
    for view in ("first", "second"):
        store.declare(view, SCHEMA, ("k",))
    store.declare("events", SCHEMA, max_rows=MAX_ROWS)
    return store


def disagreement(path: Path) -> str | None:
    """What is wrong with what a reader sees, if anything."""
    with ViewReader(path) as reader, reader.snapshot() as snap:
        tick = snap.tick("first")
        expected = {"first": tick, "second": tick, "events": tick}
        ticks = {view: snap.tick(view) for view in expected}
        counts = {view: sum(snap.table(view)["n"].to_pylist()) for view in ("first", "second")}
        counts["events"] = snap.table("events").num_rows
        changes = pa.concat_tables(
            [
                CHANGES.empty_table().drop_columns(["_tick"]),
                *(table for _, table in snap.changes_since("second", 0)),
            ]
        )
        try:
            folded = {row["k"]: row["n"] for row in fold(changes, ("k",)).values()}
        except MalformedChangelog as error:
            return str(error)
        stored = {row["k"]: row["n"] for row in snap.table("second").to_pylist()}
    return (
        None
        if ticks == counts == expected and folded == stored
        else f"ticks {ticks}, counts {counts}, folded {folded}, stored {stored}"
    )


def forked(work: Callable[[], object]) -> int:
    """The child's process id."""
    child = os.fork()
    if child:
        return child
    work()
    os._exit(0)


def killed(child: int) -> bool:
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def commit_and_die(path: Path, kind: type[ViewStore], at_statement: int) -> None:
    store = opened(path, kind)
    left = at_statement

    def count(_statement: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            die()

    assert store._db is not None
    store._db.set_trace_callback(count)
    tick = store.reader.tick("first")
    store.commit(tick + TICKS_A_COMMIT, 1, counted(max(0, tick - 1), tick + TICKS_A_COMMIT))


def every_statement(directory: Path, kind: type[ViewStore]) -> dict[str, object]:
    """One commit after the other, each killed one statement later than the one before, until one
    survives.
    """
    path, kills, wrong = directory / "views.db", 0, []
    opened(path, kind).close()
    while killed(forked(partial(commit_and_die, path, kind, kills))):
        kills += 1
        if (found := disagreement(path)) is not None:
            wrong.append(found)
    return {"kills": kills, "disagreements": wrong}


def commit_for_ever(path: Path, seed: int) -> None:
    """As a run that resumes at the ledger's tick, which may be behind the store's."""
    store, chance = opened(path, ViewStore), random.Random(seed)
    tick = max(0, store.reader.tick("first") - chance.randrange(5))
    while True:
        stop = tick + chance.randrange(1, 2 * TICKS_A_COMMIT)
        store.commit(stop, 1, counted(tick, stop))
        tick = stop


def any_time(directory: Path, kills: int) -> dict[str, object]:
    path, wrong, chance = directory / "views.db", [], random.Random(kills)
    opened(path, ViewStore).close()
    for number in range(kills):
        child = forked(partial(commit_for_ever, path, number))
        time.sleep(chance.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        assert killed(child)
        if (found := disagreement(path)) is not None:
            wrong.append(found)
    with ViewReader(path) as reader:
        return {"kills": kills, "ticks": reader.tick("first"), "disagreements": wrong}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["every-statement", "any-time"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--torn", action="store_true")
    parser.add_argument("--kills", type=int, default=10)
    chosen = parser.parse_args()
    if chosen.how == "every-statement":
        summary = every_statement(chosen.directory, TornStore if chosen.torn else ViewStore)
    else:
        summary = any_time(chosen.directory, chosen.kills)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
