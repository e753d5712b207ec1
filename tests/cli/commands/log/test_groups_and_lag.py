"""`headrace group` and `headrace lag`."""

from datetime import UTC, datetime, timedelta

import pytest

import headrace as hr
from headrace.cli.commands.log.lag import LagAlerts
from headrace.log.values import PartitionLag
from tests.cli.conftest import Run


@pytest.fixture
def behind(log: hr.Log) -> str:
    """The group `billing` has read 4 of the 10 rows of `events`."""
    log.create_topic("events", "n BIGINT")
    with log.producer("events") as producer:
        producer.append([{"n": n} for n in range(10)])
    with log.consumer("events", group="billing") as consumer:
        assert consumer.poll(max_rows=4)
        consumer.commit({"events": {0: 4}})
    return "billing"


def test_list_and_show(run: Run, behind: str) -> None:
    assert run("group", "list", "--json").lines == [
        {"name": behind, "kind": "group", "topics": ["events"], "members": 0, "lag_rows": 6}
    ]
    (shown,) = run("group", "show", behind, "--json").lines
    assert shown["members"] == []
    assert [
        (each["partition"], each["committed"], each["end"], each["rows"])
        for each in shown["positions"]
    ] == [(0, 4, 10, 6)]
    assert behind in run("group", "list").out
    assert "events" in run("group", "show", behind).out


def test_show_names_the_members(run: Run, log: hr.Log, behind: str) -> None:
    with log.consumer("events", group=behind) as consumer:
        consumer.poll()
        (shown,) = run("group", "show", behind, "--json").lines
        assert [each["partitions"] for each in shown["members"]] == [[["events", 0]]]
        assert "events[0]" in run("group", "show", behind).out


def test_an_unknown_group_suggests_the_nearest(run: Run, behind: str) -> None:
    assert "did you mean 'billing'?" in run("group", "show", "biling", code=1).err
    assert "did you mean 'billing'?" in run("lag", "biling", code=1).err
    refused = run("group", "reset", "biling", "--topic", "events", "--to", "end", code=1).err
    assert "did you mean 'billing'?" in refused
    assert "--new" in refused
    assert [group["name"] for group in run("group", "list", "--json").lines] == [behind]


@pytest.mark.parametrize(
    ("to", "after"),
    [("earliest", 0), ("beginning", 0), ("latest", 10), ("end", 10), ("7", 7), ("2001-01-01", 0)],
)
def test_reset_moves_the_group(run: Run, log: hr.Log, behind: str, to: str, after: int) -> None:
    moved = run("group", "reset", behind, "--topic", "events", "--to", to, "--json").lines
    assert moved == [
        {"group": behind, "topic": "events", "partition": 0, "before": 4, "after": after}
    ]
    assert log.committed(behind)["events"] == {0: after}


def test_reset_of_one_partition_leaves_the_others(run: Run, log: hr.Log) -> None:
    log.create_topic("wide", "n BIGINT", partitions=3)
    with log.producer("wide") as producer:
        for partition in range(3):
            producer.append([{"n": 1}, {"n": 2}], partition=partition)
    assert not run("group", "reset", "g", "--topic", "wide", "--to", "latest", "--new").err
    past = run("group", "reset", "g", "--topic", "wide", "--to", "9", "--dry-run")
    assert "the nearest offset instead: wide[0], wide[1], wide[2]." in past.err
    moved = run(
        "group", "reset", "g", "--topic", "wide", "--to", "1", "--partition", 2, "--json"
    ).lines
    assert [(each["partition"], each["before"], each["after"]) for each in moved] == [(2, 2, 1)]
    assert log.committed("g")["wide"] == {0: 2, 1: 2, 2: 1}


@pytest.mark.parametrize(("shift", "after"), [(-3, 1), (3, 7), (-100, 0), (100, 10)])
def test_reset_by_a_number_of_offsets(
    run: Run, log: hr.Log, behind: str, shift: int, after: int
) -> None:
    reset = "group", "reset", behind, "--topic", "events"
    (tried,) = run(*reset, "--shift", shift, "--dry-run", "--json").lines
    assert (tried["before"], tried["after"], tried["dry_run"]) == (4, after, True)
    assert "Would move" in run(*reset, "--shift", shift, "--dry-run").out
    assert log.committed(behind)["events"] == {0: 4}, "nothing has moved"
    said = run(*reset, "--shift", shift)
    assert "Moved" in said.out
    assert ("the nearest offset instead: events[0]" in said.err) == (abs(shift) == 100)
    assert log.committed(behind)["events"] == {0: after}


def test_reset_needs_to_or_shift(run: Run, behind: str) -> None:
    run("group", "reset", behind, "--topic", "events", code=2)
    run("group", "reset", behind, "--topic", "events", "--to", "end", "--shift", 1, code=2)


def test_delete_needs_yes_and_no_member(run: Run, log: hr.Log, behind: str) -> None:
    assert "--yes" in run("group", "delete", behind, code=2).err
    with log.consumer("events", group=behind):
        assert "stop them" in run("group", "delete", behind, "--yes", code=1).err
    assert "did you mean 'billing'?" in run("group", "delete", "biling", "--yes", code=1).err
    assert run("group", "delete", behind, "--yes", "--json").lines == [{"deleted": behind}]
    assert run("group", "list", "--json").lines == []


def test_lag_shows_rows_and_seconds(run: Run, behind: str) -> None:
    (line,) = run("lag", "--json").lines
    assert {
        name: line[name]
        for name in ("event", "group", "topic", "partition", "committed", "end", "rows", "alert")
    } == {
        "event": "lag",
        "group": behind,
        "topic": "events",
        "partition": 0,
        "committed": 4,
        "end": 10,
        "rows": 6,
        "alert": False,
    }
    assert 0 <= line["seconds"] < 300
    assert behind in run("lag").out


def test_a_passed_threshold_is_exit_code_3(run: Run, behind: str) -> None:
    run("lag", behind, "--alert-rows", 6)
    assert "ALERT" in run("lag", behind, "--alert-rows", 5, code=3).out
    run("lag", behind, "--alert-seconds", 3600)
    run("lag", behind, "--alert-seconds", 0, code=3)


def test_watch_prints_the_start_of_an_alert(run: Run, behind: str) -> None:
    watched = run(
        "lag", behind, "--watch", "--every", "50 ms", "--for", "200 ms", "--alert-rows", 5, code=3
    )
    assert watched.out.count("ALERT") == 1
    assert "6 rows" in watched.out
    events = [
        each["event"]
        for each in run(
            "lag",
            "--watch",
            "--every",
            "50 ms",
            "--for",
            "200 ms",
            "--alert-rows",
            5,
            "--json",
            code=3,
        ).lines
    ]
    assert events.count("alert_start") == 1
    assert events.count("lag") > 1


def test_watch_without_an_alert_ends_well(run: Run, behind: str) -> None:
    assert (
        run("lag", behind, "--watch", "--every", "50 ms", "--for", "100 ms", "--alert-rows", 6).out
        == ""
    )


def at(rows: int, seconds: float = 0.0, partition: int = 0) -> PartitionLag:
    return PartitionLag(
        group="g", topic="t", partition=partition, committed=0, end=rows, rows=rows, seconds=seconds
    )


def test_alerts_start_once_and_end_once() -> None:
    alerts = LagAlerts(rows=5, seconds=None)
    heard = [alerts.update([at(rows)]) for rows in (5, 6, 9, 5, 7)]
    assert [(len(started), len(ended)) for started, ended in heard] == [
        (0, 0),
        (1, 0),
        (0, 0),
        (0, 1),
        (1, 0),
    ]


def test_each_partition_alerts_for_itself() -> None:
    alerts = LagAlerts(rows=None, seconds=10)
    started, _ = alerts.update([at(1, 11, partition=0), at(1, 9, partition=1)])
    assert [each.partition for each in started] == [0]
    started, ended = alerts.update([at(1, 11, partition=1)])
    assert ([each.partition for each in started], [each.partition for each in ended]) == ([1], [0])


def test_a_group_that_has_read_everything_is_not_late() -> None:
    assert not LagAlerts(rows=None, seconds=10).is_exceeded(
        at(0, seconds=timedelta(days=1).total_seconds())
    )
    assert LagAlerts(rows=None, seconds=10).is_exceeded(
        at(1, seconds=(datetime.now(UTC) - datetime(2020, 1, 1, tzinfo=UTC)).total_seconds())
    )
