"""`headrace view`: list, show by key, by SQL and as it changes, and what it prints when it
cannot be.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO

import pytest

from headrace.types.schema import parse_schema
from headrace.views.store import ViewStore
from tests.cli.conftest import Run
from tests.views.store_contract import COUNTS, changes, inserts, update

REVENUE = parse_schema("region STRING, day DATE, revenue DOUBLE, tax DECIMAL(10, 2), at TIMESTAMP")
AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "shop.state"
    directory.mkdir()
    return directory


@pytest.fixture
def store(state: Path) -> Iterator[ViewStore]:
    with ViewStore.open(state / "views.db") as store:
        store.declare("revenue", REVENUE, ("region", "day"))
        store.declare("counts", COUNTS, ("k",))
        store.declare("events", COUNTS)
        sold = [
            ("eu", AT.date(), 1.5, Decimal("0.30"), AT),
            ("us", AT.date(), float("nan"), None, None),
        ]
        store.commit(
            4,
            1,
            {
                "revenue": inserts(4, *sold, schema=REVENUE),
                "counts": inserts(4, (1, 10), (2, 20), (3, 30)),
            },
        )
        store.commit(5, 1, {"events": inserts(5, *((n, n) for n in range(5)))})
        yield store


def test_list(run: Run, store: ViewStore, state: Path) -> None:
    assert run("view", "list", "--state", state, "--json").lines == [
        {
            "name": "counts",
            "version": None,
            "key": ["k"],
            "rows": 3,
            "tick": 5,
            "schema": "k BIGINT, n BIGINT",
        },
        {
            "name": "events",
            "version": None,
            "key": [],
            "rows": 5,
            "tick": 5,
            "schema": "k BIGINT, n BIGINT",
        },
        {
            "name": "revenue",
            "version": None,
            "key": ["region", "day"],
            "rows": 2,
            "tick": 5,
            "schema": "region STRING, day DATE, revenue DOUBLE, tax DECIMAL(10,2), at TIMESTAMP",
        },
    ]
    shown = run("view", "list", "--state", state).out
    assert "region, day" in shown
    assert "- (stream)" in shown


def test_show_all_rows_with_the_tick(run: Run, store: ViewStore, state: Path) -> None:
    assert run("view", "show", "revenue", "--state", state, "--json").lines == [
        {
            "_tick": 5,
            "region": "eu",
            "day": "2026-01-31",
            "revenue": 1.5,
            "tax": "0.30",
            "at": "2026-01-31T12:00:00.000000Z",
        },
        {
            "_tick": 5,
            "region": "us",
            "day": "2026-01-31",
            "revenue": "NaN",
            "tax": None,
            "at": None,
        },
    ]
    out = run("view", "show", "counts", "--state", state).out
    assert "counts at tick 5: 3 rows" in out
    assert [
        line.split() for line in out.splitlines() if line.strip() and line.split()[0].isdigit()
    ] == [["1", "10"], ["2", "20"], ["3", "30"]]


def test_show_some_rows(run: Run, store: ViewStore, state: Path) -> None:
    out = run("view", "show", "counts", "--max", 2, "--state", state).out
    assert "1 more not shown; --max shows more." in out
    assert [
        row["k"]
        for row in run("view", "show", "counts", "--max", 2, "--state", state, "--json").lines
    ] == [1, 2]
    assert run("view", "show", "events", "--max", 2, "--state", state, "--json").lines == [
        {"k": n, "n": n, "_tick": 5} for n in (3, 4)
    ]
    assert "3 older not shown" in run("view", "show", "events", "--max", 2, "--state", state).out


def test_show_by_key(run: Run, store: ViewStore, state: Path) -> None:
    found = run(
        "view", "show", "revenue", "--key", "eu", "--key", "2026-01-31", "--state", state, "--json"
    ).lines
    assert found == [
        {
            "_tick": 5,
            "region": "eu",
            "day": "2026-01-31",
            "revenue": 1.5,
            "tax": "0.30",
            "at": "2026-01-31T12:00:00.000000Z",
        }
    ]
    shown = run("view", "show", "counts", "--key", 2, "--state", state).out
    assert "counts at tick 5" in shown
    assert "20" in shown
    missing = run("view", "show", "counts", "--key", 9, "--state", state, code=1)
    assert (missing.out, missing.err.strip()) == ("", "counts has no row for 9 at tick 5.")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["counts", "--key", "x"], "'x' is not a whole number"),
        (["revenue", "--key", "eu"], "The key of revenue is (region, day)"),
        (["revenue", "--key", "eu", "--key", "yesterday"], "'day': 'yesterday' is not a date"),
        ([], "Which view?"),
        (["counts", "--key", "1", "--follow"], "Choose one of --key, --sql and --follow"),
        (["--sql", "SELECT 1", "--timeout", "soon"], "soon"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    run: Run, store: ViewStore, state: Path, arguments: list[str], why: str
) -> None:
    done = run("view", "show", *arguments, "--state", state, code=2)
    assert why in " ".join(done.err.replace("│", " ").split())


def test_sql(run: Run, store: ViewStore, state: Path) -> None:
    query = "SELECT sum(n) AS total, count(*) AS rows FROM counts"
    assert run("view", "show", "--sql", query, "--state", state, "--json").lines == [
        {"total": 60, "rows": 3}
    ]
    assert "total" in run("view", "show", "counts", "--sql", query, "--state", state).out
    assert run(
        "view",
        "show",
        "--sql",
        "SELECT k FROM counts ORDER BY k DESC",
        "--max",
        1,
        "--state",
        state,
        "--json",
    ).lines == [{"k": 3}]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["count"], "There is no view 'count': did you mean 'counts'?"),
        (["--sql", "SELECT * FROM revenu"], "There is no view 'revenu': did you mean 'revenue'?"),
        (["count", "--sql", "SELECT 1"], "There is no view 'count'"),
        (["--sql", "DROP VIEW counts"], "The query may not run"),
        (["events", "--key", "1"], "The view 'events' is a stream"),
    ],
)
def test_a_view_that_cannot_be_shown_is_exit_code_1(
    run: Run, store: ViewStore, state: Path, arguments: list[str], why: str
) -> None:
    assert why in run("view", "show", *arguments, "--state", state, code=1).err


def test_the_state_directory_is_found(
    run: Run, store: ViewStore, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(state.parent)
    assert len(run("view", "list", "--json").lines) == 3
    other = state.parent / "other.state"
    other.mkdir()
    (other / "views.db").touch()
    assert "Here are other.state, shop.state" in " ".join(
        run("view", "list", code=2).err.replace("│", " ").split()
    )
    monkeypatch.setenv("HEADRACE_STATE", str(state))
    assert len(run("view", "list", "--json").lines) == 3
    assert "run the pipeline first" in run("view", "list", "--state", state.parent, code=1).err


def next_lines(stream: IO[str], count: int) -> list[str]:
    return [stream.readline().rstrip("\n") for _ in range(count)]


@pytest.mark.parametrize("json", [False, True])
def test_follow(store: ViewStore, state: Path, json: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "view",
        "show",
        "counts",
        "--follow",
        "--state",
        str(state),
        *(["--json"] if json else []),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    try:
        first = next_lines(process.stdout, 3)
        store.commit(
            6, 1, {"counts": changes(*update(6, (1, 10), (1, 11)), (6, "delete", (2, 20)))}
        )
        store.commit(7, 1, {})
        time.sleep(0.5)
        store.commit(8, 1, {"counts": inserts(8, (9, 90))})
        then = next_lines(process.stdout, 4)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        process.stdout.close()
    if json:
        assert first[0] == '{"_tick":5,"_change_type":"insert","k":1,"n":10}'
        assert then[0] == '{"_tick":6,"_change_type":"update_preimage","k":1,"n":10}'
        assert then[-1] == '{"_tick":8,"_change_type":"insert","k":9,"n":90}'
    else:
        assert first == ["5  +  k=1  n=10", "5  +  k=2  n=20", "5  +  k=3  n=30"]
        assert then == ["6  -  k=1  n=10", "6  +  k=1  n=11", "6  -  k=2  n=20", "8  +  k=9  n=90"]
    assert process.returncode == 130


def test_follow_ends_after_so_many_rows(run: Run, store: ViewStore, state: Path) -> None:
    assert run(
        "view", "show", "events", "--follow", "--max", 2, "--state", state, "--json"
    ).lines == [{"_tick": 5, "_change_type": "insert", "k": n, "n": n} for n in (0, 1)]
