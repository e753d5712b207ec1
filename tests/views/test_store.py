"""The embedded view store keeps the contract, also when its process dies, and folds any changelog
as plain Python does.
"""

import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigurationError, CorruptionError, DiskFull, NewerFormat, RetryError
from headrace.types.schema import parse_schema
from headrace.types.sqlite_codec import from_key_values, null_key, to_values
from headrace.views import file as view_file
from headrace.views.reader import ViewReader
from headrace.views.store import ViewStore
from tests.short_forms import examples
from tests.views.store_contract import (
    COUNTS,
    OpenStore,
    ViewContract,
    changes,
    followed,
    inserts,
    rows,
    update,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "views.db"


@pytest.fixture
def open_store(path: Path) -> Iterator[OpenStore]:
    opened: list[ViewStore] = []

    def open_one(**options: Any) -> ViewStore:
        opened.append(ViewStore.open(path, **options))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


class TestEmbeddedViews(ViewContract):
    """SQLite."""


# Any changelog

KEYED = parse_schema("region STRING, part BIGINT, n DOUBLE")
regions, parts, numbers = (
    st.sampled_from(["eu", "us", "", None]),
    st.sampled_from([0, 1, None]),
    st.floats(width=16) | st.none(),
)
ticks_of_edits = st.lists(
    st.dictionaries(st.tuples(regions, parts), st.just("gone") | numbers, max_size=4),
    min_size=1,
    max_size=8,
)
Table = dict[tuple[Any, ...], dict[str, Any]]


def changelog(edits: list[dict[tuple[Any, ...], Any]]) -> tuple[list[list[Any]], list[Table]]:
    """What edits of a table, tick by tick, amount to: each tick's changes, and the table after
    each, the empty one first.
    """
    table: Table = {}
    steps, tables = [], [dict(table)]
    for tick, edit in enumerate(edits, 1):
        step: list[Any] = []
        for key, number in edit.items():
            before, after = (
                table.pop(key, None),
                (None if number == "gone" else {"region": key[0], "part": key[1], "n": number}),
            )
            if after is not None:
                table[key] = after
            if repr(before) == repr(after):
                continue
            if before is not None:
                step.append(
                    (tick, "delete" if after is None else "update_preimage", tuple(before.values()))
                )
            if after is not None:
                step.append(
                    (
                        tick,
                        "insert" if before is None else "update_postimage",
                        tuple(after.values()),
                    )
                )
        steps.append(step)
        tables.append(dict(table))
    return steps, tables


def as_table(read: pa.Table) -> Table:
    return {(row["region"], row["part"]): row for row in read.to_pylist()}


def same(left: Table, right: Table) -> bool:
    """Equal with NaN like NaN, whatever the order."""
    return sorted(map(repr, left.values())) == sorted(map(repr, right.values()))


@settings(max_examples=examples(60), deadline=None)
@given(
    edits=ticks_of_edits,
    spans=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6),
    behind=st.integers(0, 8),
)
def test_any_changelog_folds_however_it_is_committed_and_repeated(
    tmp_path_factory: pytest.TempPathFactory, edits: Any, spans: list[tuple[int, int]], behind: int
) -> None:
    """Each span is a commit of so many ticks by a run that starts again so many ticks before what
    the store has.
    """
    steps, tables = changelog(edits)
    reached = 0
    with ViewStore.open(tmp_path_factory.mktemp("views") / "views.db") as store:
        store.declare("v", KEYED, ("region", "part"))
        for back, length in [*spans, (0, len(steps))]:
            start = max(0, reached - back)
            stop = min(len(steps), start + length)
            store.commit(
                stop,
                1,
                {"v": changes(*(row for step in steps[start:stop] for row in step), schema=KEYED)},
            )
            reached = max(reached, stop)
            assert store.reader.tick("v") == reached
            assert same(as_table(store.reader.table("v")), tables[reached])
        assert reached == len(steps)
        behind = min(behind, reached)
        last = tables[behind]
        for tick, table in followed(store, "v", behind, dict(tables[behind])):
            assert same(table, tables[tick])
            last = table
        assert same(last, tables[-1])


# Many readers


def test_readers_never_see_half_a_commit(open_store: OpenStore) -> None:
    """Money moves between accounts in two views; whoever looks, the total is the same, and both
    views show one tick.
    """
    store = open_store()
    for view in ("first", "second"):
        store.declare(view, COUNTS, ("k",))
    store.commit(
        1,
        1,
        {
            "first": inserts(1, *((k, 100) for k in range(10))),
            "second": inserts(1, *((k, 100) for k in range(10))),
        },
    )
    done, looks, wrong = threading.Event(), [], []

    def look() -> None:
        with ViewReader(store.path) as reader:
            while not done.is_set():
                with reader.snapshot() as snap:
                    total = sum(
                        snap.table(view)["n"].to_pylist()[k]
                        for view in ("first", "second")
                        for k in range(10)
                    )
                    (by_sql,) = snap.sql(
                        "SELECT sum(n) AS n FROM (SELECT n FROM first UNION ALL SELECT n FROM"
                        " second)"
                    )["n"].to_pylist()
                    looks.append(snap.tick("first"))
                    if (total, by_sql) != (2000, 2000) or snap.tick("first") != snap.tick("second"):
                        wrong.append((snap.tick("first"), total, by_sql))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for tick in range(2, 60):
        moved, k = tick - 1, tick % 10
        while len(looks) < tick // 5 and any(thread.is_alive() for thread in threads):
            time.sleep(0.001)  # so that some look between two commits
        before = {view: store.reader.get(view, k) or {} for view in ("first", "second")}
        store.commit(
            tick,
            1,
            {
                view: changes(
                    *update(tick, (k, before[view]["n"]), (k, before[view]["n"] + sign * moved))
                )
                for view, sign in (("first", 1), ("second", -1))
            },
        )
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(set(looks)) > 3


# Dying


def crashes(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.crash.view_crashes", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def test_killed_at_every_statement_of_a_commit(tmp_path: Path) -> None:
    summary = crashes("every-statement", str(tmp_path))
    assert summary["kills"] > 15
    assert summary["disagreements"] == []


def test_a_store_that_commits_in_two_steps_would_be_caught(tmp_path: Path) -> None:
    assert crashes("every-statement", str(tmp_path), "--torn")["disagreements"]


@pytest.mark.parametrize("kills", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_at_any_time_and_gone_on(tmp_path: Path, kills: int) -> None:
    summary = crashes("any-time", str(tmp_path), "--kills", str(kills))
    assert summary["kills"] == kills
    assert summary["ticks"] > kills // 2  # on a busy machine a life can be too short for a commit
    assert summary["disagreements"] == []


# The file


def test_readers_in_other_processes_see_what_was_committed(
    path: Path, open_store: OpenStore
) -> None:
    store = open_store()
    store.declare("counts", COUNTS, ("k",))
    store.commit(3, 1, {"counts": inserts(3, (1, 41))})
    script = (
        "from pathlib import Path; from headrace.views.reader import ViewReader;"
        f" print(ViewReader(Path({str(path)!r})).get('counts', 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "{'k': 1, 'n': 41}"


def test_a_newer_format_is_refused(path: Path, open_store: OpenStore) -> None:
    open_store().close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(NewerFormat, match="format 3; this version of Headrace reads up to 2"):
        ViewStore.open(path)
    with pytest.raises(NewerFormat), ViewReader(path) as reader:
        reader.views()


def test_a_foreign_database_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE precious (x)")
    db.close()
    with pytest.raises(ConfigurationError, match="not a view store"):
        ViewStore.open(path)


def test_a_damaged_file_is_named(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(CorruptionError, match="views.db is damaged") as caught:
        ViewStore.open(path)
    assert "headrace replay" in caught.value.fix


def test_a_reader_before_the_first_run_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="views.db does not exist") as caught:
        ViewReader(path).views()
    assert "run the pipeline first" in caught.value.fix
    path.touch()
    with pytest.raises(ConfigurationError, match="holds no views yet"):
        ViewReader(path).views()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        ViewStore.open(tmp_path / "missing" / "views.db")


def test_a_store_for_reading_does_not_write(path: Path, open_store: OpenStore) -> None:
    store = open_store()
    store.declare("counts", COUNTS, ("k",))
    reading = open_store(write=False)
    assert rows(reading) == []
    with pytest.raises(ConfigurationError, match="for reading only"):
        reading.commit(1, 1, {})
    with pytest.raises(ConfigurationError, match="for reading only"):
        reading.declare("counts", COUNTS, ("k",))


def test_a_writer_that_waits_too_long_may_try_again(
    path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_file, "BUSY_SECONDS", 0.1)
    store = open_store()
    store.declare("counts", COUNTS, ("k",))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(RetryError, match="Another process"):
        store.commit(1, 1, {})
    other.execute("ROLLBACK")
    other.close()
    store.commit(1, 1, {})
    assert store.reader.tick("counts") == 1


def test_a_commit_without_room_stores_nothing(open_store: OpenStore) -> None:
    store = open_store()
    for view in ("first", "second"):
        store.declare(view, COUNTS, ("k",))
    store.commit(1, 1, {"first": inserts(1, (1, 1))})
    assert store._db is not None
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages + 5}")
    large = {"first": inserts(2, (2, 2)), "second": inserts(2, *((k, k) for k in range(10_000)))}
    with pytest.raises(DiskFull, match="What it holds is intact"):
        store.commit(2, 2, large)
    assert [store.reader.tick(view) for view in ("first", "second")] == [1, 1]
    assert (rows(store, "first"), rows(store, "second")) == ([(1, 1)], [])
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.commit(2, 1, large)  # the epoch of the commit that failed was not taken either
    assert [len(rows(store, view)) for view in ("first", "second")] == [2, 10_000]


def test_changes_that_are_let_go_take_no_room(open_store: OpenStore) -> None:
    store = open_store(max_changes=16)
    store.declare("counts", COUNTS, ("k",))
    assert store._db is not None
    for tick in range(1, 60):
        store.commit(tick, 1, {"counts": inserts(tick, *((k, tick) for k in range(tick % 25)))})
        (kept,) = store._db.execute("SELECT coalesce(sum(rows), 0) FROM _changes").fetchone()
        (info,) = store.reader.views()
        assert kept == info.kept_rows <= 16
        assert store._db.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM _changes"
        ).fetchone() == (info.kept_bytes,)


def test_two_writers_are_one_after_the_other(open_store: OpenStore) -> None:
    """Two runs of one pipeline, computing the same ticks at once: each tick is there once, whoever
    was first.
    """
    stores = [open_store(), open_store()]
    for store in stores:
        store.declare("events", COUNTS)

    def run(store: ViewStore) -> None:
        for tick in range(1, 60):
            store.commit(tick, 1, {"events": inserts(tick, (tick, tick))})

    threads = [threading.Thread(target=run, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row[2] for row in rows(stores[0], "events")] == list(range(1, 60))


def test_a_commit_is_on_disk_before_it_returns(path: Path, open_store: OpenStore) -> None:
    store = open_store()
    assert store._db is not None
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)


# Format 1


ODD_KEYS: list[tuple[str, list[Any]]] = [
    ("DECIMAL(10, 2)", [Decimal("-9.50"), Decimal("9.50"), Decimal("100.00"), None]),
    ("DECIMAL(38, 10)", [Decimal("-9.5"), Decimal("9.5"), Decimal("1e20"), None]),
    ("DATE", [date(1, 1, 1), date(1969, 1, 1), date(2026, 1, 1), None]),
    ("TIMESTAMP", [datetime(1969, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC), None]),
]


def as_format_1(path: Path, schema: pa.Schema) -> None:
    """Turn a store with the one view `odd` back into what the format before was."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        rows = db.execute("SELECT c0, c1 FROM _rows_1 ORDER BY c0").fetchall()
        db.execute("DROP TABLE _rows_1")
        db.execute("CREATE TABLE _rows_1 (c0 TEXT, c1 INTEGER, PRIMARY KEY (c0)) WITHOUT ROWID")
        nulls = null_key(schema.field("k").type)
        keys = from_key_values([None if k == nulls else k for k, _ in rows], schema.field("k").type)
        for key, (_, n) in zip(to_values(keys), rows, strict=True):
            db.execute("INSERT INTO _rows_1 VALUES (?, ?)", (b"" if key is None else key, n))
        db.execute("CREATE VIEW odd AS SELECT c0 AS k, c1 AS n FROM _rows_1")
        db.execute("ALTER TABLE _views DROP COLUMN generation")
        db.execute("PRAGMA user_version = 1")
        db.execute("COMMIT")


@pytest.mark.parametrize(("kind", "keys"), ODD_KEYS, ids=[kind for kind, _ in ODD_KEYS])
@pytest.mark.parametrize("is_reader", [False, True], ids=["writer", "reader"])
def test_a_store_of_format_1_is_converted(
    path: Path, kind: str, keys: list[Any], is_reader: bool
) -> None:
    schema = parse_schema(f"k {kind}, n BIGINT")
    with ViewStore.open(path) as store:
        store.declare("odd", schema, ("k",))
        store.commit(
            1, 1, {"odd": inserts(1, *((k, n) for n, k in enumerate(keys)), schema=schema)}
        )
    as_format_1(path, schema)
    if is_reader:
        with ViewReader(path) as reader:
            assert reader.table("odd")["n"].to_pylist() == list(range(len(keys)))
            assert reader.sql("SELECT n FROM odd ORDER BY k NULLS LAST")["n"].to_pylist() == list(
                range(len(keys))
            )
    with ViewStore.open(path) as store:
        store.declare("odd", schema, ("k",))
        for n, key in enumerate(keys):
            assert store.reader.get("odd", (key,)) == {"k": key, "n": n}
        store.commit(2, 1, {"odd": changes((2, "delete", (keys[0], 0)), schema=schema)})
        assert store.reader.table("odd")["k"].to_pylist() == keys[1:]


@pytest.mark.parametrize(("kind", "keys"), ODD_KEYS, ids=[kind for kind, _ in ODD_KEYS])
def test_ranges_of_decimal_keys_went_by_their_text(path: Path, kind: str, keys: list[Any]) -> None:
    schema = parse_schema(f"k {kind}, n BIGINT")
    with ViewStore.open(path) as store:
        store.declare("odd", schema, ("k",))
        shuffled = [*enumerate(keys)][::-1]
        store.commit(1, 1, {"odd": inserts(1, *((k, n) for n, k in shuffled), schema=schema)})
        assert store.reader.table("odd")["k"].to_pylist() == keys
        for n, key in enumerate(keys[:-1]):
            assert store.reader.scan("odd", start=key)["k"].to_pylist() == keys[n:]
            assert store.reader.scan("odd", stop=key)["k"].to_pylist() == keys[:n]
