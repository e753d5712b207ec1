"""A version next to its pipeline: compared, served instead of it at once, also to subscribers, and
the old view dropped.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.run_status import VERSION
from headrace.serve.stores import SERVED_FILE, switch
from headrace.views.store import ViewStore
from tests.cli.conftest import Run, address, run
from tests.serve.conftest import Client, receive
from tests.views.store_contract import COUNTS, changes, inserts

__all__ = ["address", "run"]


@pytest.fixture
def v2(state: Path, store: ViewStore) -> Iterator[ViewStore]:
    """The version v2 of `counts`: without the key 1, with another number for 2, and with a key of
    its own.
    """
    directory = state / "versions" / "v2"
    directory.mkdir(parents=True)
    with ViewStore.open(directory / "views.db") as version:
        version.declare("counts.v2", COUNTS, ("k",))
        version.commit(3, 1, {"counts.v2": inserts(3, (2, 22), (3, 30), (4, 40))})
        yield version


# Served


def test_a_version_is_read_by_its_full_name_and_after_a_switch_by_the_plain_one(
    client: Client, v2: ViewStore, state: Path
) -> None:
    assert client.get("/views/counts", key=2).json["row"]["n"] == 20
    assert client.get("/views/counts.v2", key=2).json == {
        "view": "counts.v2",
        "version": "v2",
        "tick": 3,
        "row": {"k": 2, "n": 22},
    }
    switch(state, "counts", "v2")
    assert client.get("/views/counts", key=2).json == {
        "view": "counts",
        "version": "v2",
        "tick": 3,
        "row": {"k": 2, "n": 22},
    }
    assert {(each["name"], each["version"]) for each in client.get("/views").json["views"]} == {
        ("counts", "v2"),
        ("counts.v2", "v2"),
        ("events", None),
    }
    switch(state, "counts", None)
    assert client.get("/views/counts", key=2).json["row"]["n"] == 20


def test_a_query_never_reads_the_old_one_unawares(
    client: Client, v2: ViewStore, state: Path
) -> None:
    switch(state, "counts", "v2")
    refused = client.sql("SELECT sum(n) AS total FROM Counts")
    assert (refused.status, refused.json["message"]) == (
        409,
        "The view 'counts' is served from its version 'v2'.",
    )
    assert client.sql('SELECT sum(n) AS total FROM "counts.v2"', version="v2").json["rows"] == [
        {"total": 92}
    ]
    assert client.sql("SELECT count(*) AS n FROM events").status == 200


def test_an_unknown_name_suggests_the_nearest_of_all_versions(
    client: Client, v2: ViewStore
) -> None:
    for path, query in (
        ("/views/counts.v3", {}),
        ("/views/counts.v3", {"key": 1}),
        ("/views/counts.v3/changes", {}),
    ):
        refused = client.get(path, **query)
        assert (refused.status, refused.json["error"]) == (404, "UnknownView")
        assert "did you mean 'counts.v2'" in refused.json["message"]
    refused = client.sql('SELECT * FROM "counts.v2"')
    assert (refused.status, refused.json["message"]) == (
        404,
        "The view 'counts.v2' belongs to the version 'v2'.",
    )
    assert '"version": "v2"' in refused.json["fix"]
    refused = client.sql("SELECT 1", version="v3")
    assert (refused.status, refused.json["message"]) == (
        404,
        "There is no version 'v3': did you mean 'v2'?",
    )


def test_subscribers_are_switched_too(
    client: Client, v2: ViewStore, store: ViewStore, state: Path
) -> None:
    with client.follow("/views/counts/changes") as subscriber:
        assert receive(subscriber).id == "4"
        switch(state, "counts", "v2")
        snapshot = receive(subscriber)
        assert (snapshot.kind, snapshot.id, [row["n"] for row in snapshot.data["rows"]]) == (
            "snapshot",
            "v2:3",
            [22, 30, 40],
        )
        store.commit(5, 1, {"counts": inserts(5, (50, 50))})
        v2.commit(4, 1, {"counts.v2": changes((4, "delete", (4, 40)))})
        assert receive(subscriber).id == "v2:4"
    with client.follow("/views/counts/changes", last="v2:3") as resumed:
        assert receive(resumed).data == {
            "tick": 4,
            "changes": [{"_change_type": "delete", "k": 4, "n": 40}],
        }
    with client.follow("/views/counts/changes", last="4") as of_the_old_one:
        assert (receive(of_the_old_one).kind, of_the_old_one.last) == ("snapshot", "v2:4")
    with client.follow("/views/counts.v2/changes", last="3") as by_full_name:
        assert receive(by_full_name).id == "4"


def test_a_damaged_or_newer_file_is_not_taken_for_an_empty_one(
    client: Client, v2: ViewStore, state: Path
) -> None:
    (state / SERVED_FILE).write_text("{")
    assert client.get("/views/counts").status == 500
    (state / SERVED_FILE).write_text(json.dumps({"format": 2, "views": {}}))
    assert "upgrade" in client.get("/views/counts").json["fix"]


# On the command line


def test_diff(run: Run, v2: ViewStore, state: Path) -> None:
    shown = run("view", "diff", "counts", "counts.v2", "--state", state, code=5).out
    assert "counts at tick 4, counts.v2 at tick 3: 1 row the same" in shown
    assert "1 row only in counts\n" in shown
    assert "1 key with different rows\n" in shown
    assert [line.split() for line in shown.splitlines()[-5:-3]] == [
        ["counts", "2", "20"],
        ["counts.v2", "2", "22"],
    ]
    assert shown.endswith("They show different ticks. Compare both at one: --at-tick 3.\n")
    assert run("view", "diff", "counts", "counts.v2", "--state", state, "--json", code=5).lines == [
        {
            "left_tick": 4,
            "right_tick": 3,
            "same": 1,
            "different": 1,
            "only_left": 1,
            "only_right": 1,
            "columns_only_left": [],
            "columns_only_right": [],
            "different_rows": [{"left": {"k": 2, "n": 20}, "right": {"k": 2, "n": 22}}],
            "only_left_rows": [{"k": 1, "n": 10}],
            "only_right_rows": [{"k": 4, "n": 40}],
        }
    ]
    (same,) = run("view", "diff", "counts", "counts", "--state", state, "--json").lines
    assert (same["same"], same["different"]) == (3, 0)
    (empty,) = run(
        "view", "diff", "counts", "counts.v2", "--at-tick", 0, "--state", state, "--json"
    ).lines
    assert (empty["same"], empty["left_tick"], empty["right_tick"]) == (0, 0, 0)


def test_diff_of_streams_counts_rows(run: Run, store: ViewStore, state: Path) -> None:
    store.declare("others", COUNTS)
    store.commit(
        5,
        1,
        {
            "events": inserts(5, (1, 1), (1, 1), (2, 2)),
            "others": inserts(5, (2, 2), (1, 1), (3, 3)),
        },
    )
    (found,) = run("view", "diff", "events", "others", "--state", state, "--json", code=5).lines
    assert (found["same"], found["only_left"], found["only_right"]) == (2, 1, 1)


def test_diff_shows_so_many_rows_of_each_kind(run: Run, v2: ViewStore, state: Path) -> None:
    v2.commit(4, 1, {"counts.v2": inserts(4, (5, 50))})
    command = ("view", "diff", "counts", "counts.v2", "--max", 1, "--state", state)
    (found,) = run(*command, "--json", code=5).lines
    assert (found["only_right"], found["only_right_rows"]) == (2, [{"k": 4, "n": 40}])
    assert "2 rows only in counts.v2, of which 1 is shown\n" in run(*command, code=5).out


def test_a_version_is_listed_and_shown(run: Run, v2: ViewStore, state: Path) -> None:
    assert [
        (line["name"], line["version"])
        for line in run("view", "list", "--state", state, "--json").lines
    ] == [
        ("counts", None),
        ("counts.v2", "v2"),
        ("events", None),
    ]
    assert run("view", "show", "counts.v2", "--key", 4, "--state", state, "--json").lines == [
        {"_tick": 3, "k": 4, "n": 40}
    ]
    (first,) = run(
        "view", "show", "counts.v2", "--follow", "--max", 1, "--state", state, "--json"
    ).lines
    assert (first["_tick"], first["n"]) == (3, 22)
    query = 'SELECT sum(n) AS total FROM "counts.v2"'
    assert run("view", "show", "--sql", query, "--state", state, "--json").lines == [{"total": 92}]
    assert run(
        "view", "show", "counts.v2", "--sql", "SELECT 1 AS one", "--state", state, "--json"
    ).lines == [{"one": 1}]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("show", "counts.v3"), "did you mean 'counts.v2'?"),
        (("diff", "counts", "count.v2"), "did you mean 'counts.v2'?"),
        (("drop", "count.v2", "--yes"), "did you mean 'counts.v2'?"),
        (("switch", "count", "--back"), "did you mean 'counts'?"),
        (("show", "--sql", "SELECT * FROM counts.v2"), 'write it in double quotes: "counts.v2"'),
        (
            ("show", "--sql", 'SELECT * FROM counts JOIN "counts.v2" USING (k)'),
            "names views of several versions",
        ),
    ],
)
def test_the_errors_of_commands(
    run: Run, v2: ViewStore, state: Path, arguments: tuple[str, ...], why: str
) -> None:
    assert why in run("view", *arguments, "--state", state, code=1).err


def test_switched_versions_are_listed_and_shown(run: Run, v2: ViewStore, state: Path) -> None:
    run("view", "switch", "counts", "v2", "--state", state)
    assert (
        run("view", "switch", "counts", "v2", "--state", state).out
        == "counts is already counts.v2.\n"
    )
    listed = [line.split() for line in run("view", "list", "--state", state).out.splitlines()]
    assert ["counts", "version", "v2", "k", "3", "3", "k,", "n"] in listed
    assert ["events", "the", "pipeline"] in [words[:3] for words in listed]
    assert [
        row["n"] for row in run("view", "show", "counts", "--state", state, "--json").lines
    ] == [22, 30, 40]
    assert (
        "counts, served from counts.v2, at tick 3: 3 rows"
        in run("view", "show", "counts", "--state", state).out
    )
    for name in ((), ("counts",)):
        refused = run(
            "view", "show", *name, "--sql", "SELECT * FROM counts", "--state", state, code=1
        ).err
        assert "'counts' is served from its version 'v2'" in refused
        assert '"counts.v2"' in refused
    assert run(
        "view", "show", "--sql", "SELECT count(*) AS n FROM events", "--state", state, "--json"
    ).lines == [{"n": 0}]
    assert run("view", "diff", "counts", "counts.v2", "--state", state, code=5).out.startswith(
        "counts at tick 4, counts.v2 at tick 3"
    )


def test_a_follower_on_the_command_line_is_switched_too(v2: ViewStore, state: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "view",
        "show",
        "counts",
        "--follow",
        "--max",
        "6",
        "--state",
        str(state),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().split()[-1] for _ in range(3)] == ["n=10", "n=20", "n=30"]
        switch(state, "counts", "v2")
        out, complaints = process.communicate(timeout=30)
    assert [line.split()[-1] for line in out.splitlines()] == ["n=22", "n=30", "n=40"]
    assert complaints == "counts is now served from counts.v2; all its rows follow.\n"


def test_switch_and_drop(run: Run, v2: ViewStore, store: ViewStore, state: Path) -> None:
    def refused(*arguments: object) -> str:
        return run("view", *arguments, "--state", state, code=1).err

    assert "There is no version 'v3': did you mean 'v2'?" in refused("switch", "counts", "v3")
    assert "There is no view 'count.v2': did you mean 'counts.v2'" in refused(
        "switch", "count", "v2"
    )
    run("view", "switch", "counts", "--state", state, code=2)
    assert (
        run("view", "switch", "counts", "v2", "--state", state).out == "counts is now counts.v2.\n"
    )
    assert "counts.v2 is served as counts" in refused("drop", "counts.v2", "--yes")
    assert run("view", "drop", "counts", "--yes", "--state", state).out == "Dropped counts.\n"
    assert [line["name"] for line in run("view", "list", "--state", state, "--json").lines] == [
        "counts",
        "counts.v2",
        "events",
    ]
    assert "There is no view 'counts'" in refused("drop", "counts", "--yes")
    assert "of the pipeline itself to switch back to" in refused("switch", "counts", "--back")
    store.declare("counts", COUNTS, ("k",))  # as the next run of the pipeline does
    assert (
        run("view", "switch", "counts", "--back", "--state", state).out
        == "counts is now the view of the pipeline itself.\n"
    )
    assert "already" in run("view", "switch", "counts", "--back", "--state", state).out
    assert (
        run("view", "switch", "counts", "counts.v2", "--state", state).out
        == "counts is now counts.v2.\n"
    )
    assert (
        run("view", "switch", "counts", "--none", "--state", state).out
        == "counts is now the view of the pipeline itself.\n"
    )
    run("view", "drop", "counts.v2", "--yes", "--state", state)
    assert v2.reader.views() == []


def test_dropping_a_version_asks_for_confirmation(run: Run, store: ViewStore, state: Path) -> None:
    assert "give --yes to drop it" in run("view", "drop", "counts", "--state", state, code=2).err
    assert len(store.reader.views()) == 2
    write_run(state, updated=time.time() - 3_600)
    done = run("view", "drop", "counts", "--yes", "--state", state)
    assert (
        done.out == "Dropped counts. The next run of shop rebuilds it, as long as it declares it.\n"
    )
    assert run("view", "drop", "events", "--yes", "--json", "--state", state).lines == [
        {"dropped": "events", "built_again_by": None}
    ]


def write_run(state: Path, updated: float) -> None:
    """As a run of the pipeline `shop`, with the view `counts`, does on another machine."""
    figures = dict.fromkeys(
        (
            "epoch",
            "shards",
            "started",
            "updated",
            "tick",
            "newest_tick",
            "batch_seconds",
            "batch_rows",
            "rows_per_second",
            "rows_behind",
            "state_bytes",
            "batches",
        ),
        0,
    )
    status = {
        "version": VERSION,
        **figures,
        "pipeline": "shop",
        "process": os.getpid(),
        "updated": updated,
        "queries": {"main": {"tick": 4, "outputs": ["counts"]}},
    }
    (state / "status.json").write_text(json.dumps(status))


def test_a_view_that_a_pipeline_keeps_is_not_dropped(
    run: Run, store: ViewStore, state: Path
) -> None:
    write_run(state, updated=time.time())
    assert (
        "'shop' is running and writes counts"
        in run("view", "drop", "counts", "--yes", "--state", state, code=1).err
    )
    run("view", "drop", "events", "--yes", "--state", state)
