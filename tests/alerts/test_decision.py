"""The messages of an alert: firing, resolved, grouped, silenced, and after a crash."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

import headrace as hr
from headrace.alerts.alert import TOPIC, Alert, AlertMessage
from headrace.alerts.decision import AlertDecider, AlertState, silence
from headrace.errors import (
    ConfigurationError,
    FencedError,
    InputError,
    NoteConflict,
    PlanError,
    RetryError,
    UnknownColumn,
)
from headrace.runtime.services import decide_alerts

SECOND_US = 1_000_000
NOW_US = 1_800_000_000 * SECOND_US


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_table("alert.hot", "room STRING, degrees BIGINT", key="room")
        opened.create_topic("alert.seen", "n BIGINT")
        yield opened


def change(log: hr.Log, **degrees: int | None) -> None:
    with log.producer("alert.hot") as producer:
        for room, value in degrees.items():
            kind = (
                "delete"
                if value is None
                else ("insert" if room not in KNOWN else "update_postimage")
            )
            (KNOWN.discard if value is None else KNOWN.add)(room)
            producer.append([{"room": room, "degrees": value, "_change_type": kind}])


KNOWN: set[str] = set()


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    KNOWN.clear()


def make_decider(log: hr.Log, every_us: int = 0, topic: str = "alert.hot") -> AlertDecider:
    return AlertDecider.open(log, "shop", Alert("hot", topic, (), every_us))


def messages_of(log: hr.Log) -> list[AlertMessage]:
    return [AlertMessage.from_row(row) for row in log.read(TOPIC).to_pylist()]


def summary(log: hr.Log) -> list[tuple[str, list[str], list[str], int]]:
    shown = []
    for each in messages_of(log):
        content = json.loads(each.content)
        shown.append(
            (
                each.state,
                [row["room"] for row in content["fired"]],
                [row["room"] for row in content["resolved"]],
                each.active,
            )
        )
    return shown


def test_a_row_that_comes_fires_and_one_that_goes_resolves(log: hr.Log) -> None:
    alert = make_decider(log)
    change(log, attic=40)
    alert.step(NOW_US)
    change(log, attic=45)  # still too hot: nothing new
    alert.step(NOW_US + 1)
    change(log, attic=None)
    alert.step(NOW_US + 2)
    assert summary(log) == [("firing", ["attic"], [], 1), ("resolved", [], ["attic"], 0)]
    assert json.loads(messages_of(log)[1].content)["resolved"] == [{"room": "attic", "degrees": 45}]


def test_changes_within_the_interval_are_one_message(log: hr.Log) -> None:
    alert = make_decider(log, every_us=60 * SECOND_US)
    change(log, attic=40)
    alert.step(NOW_US)
    change(log, cellar=40, hall=41)
    alert.step(NOW_US + 1 * SECOND_US)
    change(log, attic=None)
    alert.step(NOW_US + 59 * SECOND_US)
    assert len(messages_of(log)) == 1
    alert.step(NOW_US + 60 * SECOND_US)
    assert summary(log)[1:] == [("firing", ["cellar", "hall"], ["attic"], 2)]


def test_rows_of_a_stream_fire_each(log: hr.Log) -> None:
    alert = make_decider(log, topic="alert.seen")
    with log.producer("alert.seen") as producer:
        producer.append([{"n": 1}, {"n": 2}])
    alert.step(NOW_US)
    (message,) = messages_of(log)
    assert (message.state, message.fired, json.loads(message.content)["fired"]) == (
        "firing",
        2,
        [{"n": 1}, {"n": 2}],
    )


def test_after_a_crash_nothing_is_emitted_again_and_waiting_rows_are(log: hr.Log) -> None:
    alert = make_decider(log, every_us=60 * SECOND_US)
    change(log, attic=40)
    alert.step(NOW_US)
    change(log, cellar=40)
    alert.step(NOW_US + 1)  # waits, and is then forgotten
    again = make_decider(log, every_us=60 * SECOND_US)
    again.step(NOW_US + 2)
    assert len(messages_of(log)) == 1
    again.step(NOW_US + 61 * SECOND_US)
    assert summary(log) == [("firing", ["attic"], [], 1), ("firing", ["cellar"], [], 2)]
    assert len({each.id for each in messages_of(log)}) == 2


# Groups


@pytest.fixture
def rooms(log: hr.Log) -> hr.Log:
    log.create_table("alert.rooms", "room STRING, house STRING, degrees BIGINT", key="room")
    return log


def put(log: hr.Log, room: str, house: str, degrees: int | None, kind: str) -> None:
    with log.producer("alert.rooms") as producer:
        producer.append([{"room": room, "house": house, "degrees": degrees, "_change_type": kind}])


def by_house(log: hr.Log, every_us: int = 0) -> AlertDecider:
    return AlertDecider.open(log, "shop", Alert("hot", "alert.rooms", (), every_us, by=("house",)))


def of_groups(log: hr.Log) -> list[tuple[str, str, list[str], list[str], int]]:
    """(house, state, rooms that fired, rooms that were resolved, active) of each message."""
    found = []
    for each in messages_of(log):
        content = json.loads(each.content)
        found.append(
            (
                content["group"]["house"],
                each.state,
                [row["room"] for row in content["fired"]],
                [row["room"] for row in content["resolved"]],
                each.active,
            )
        )
    return found


def test_each_group_has_messages_of_its_own(rooms: hr.Log) -> None:
    alert = by_house(rooms)
    for room, house in (("attic", "north"), ("cellar", "south"), ("hall", "north")):
        put(rooms, room, house, 40, "insert")
    alert.step(NOW_US)
    put(rooms, "cellar", "south", None, "delete")
    alert.step(NOW_US + 1)
    assert of_groups(rooms) == [
        ("north", "firing", ["attic", "hall"], [], 2),
        ("south", "firing", ["cellar"], [], 1),
        ("south", "resolved", [], ["cellar"], 0),
    ]
    assert len({each.id for each in messages_of(rooms)}) == 3
    assert messages_of(rooms)[0].subject() == "[firing] hot, house north: 2 new, 2 active"
    assert json.loads(messages_of(rooms)[0].body())["group"] == {"house": "north"}


def test_a_group_waits_for_its_own_interval_also_over_a_crash(rooms: hr.Log) -> None:
    minute_us = 60 * SECOND_US
    alert = by_house(rooms, minute_us)
    put(rooms, "attic", "north", 40, "insert")
    alert.step(NOW_US)
    put(rooms, "hall", "north", 40, "insert")  # north waits
    put(rooms, "cellar", "south", 40, "insert")  # south has sent no alert yet
    alert.step(NOW_US + 10 * SECOND_US)
    assert [each[:3] for each in of_groups(rooms)] == [
        ("north", "firing", ["attic"]),
        ("south", "firing", ["cellar"]),
    ]
    again = by_house(rooms, minute_us)  # what waits for north comes before what was sent for south
    again.step(NOW_US + 59 * SECOND_US)
    assert len(messages_of(rooms)) == 2
    again.step(NOW_US + minute_us)
    assert of_groups(rooms)[2:] == [("north", "firing", ["hall"], [], 2)]


def test_a_row_that_changes_its_group_leaves_one_and_comes_to_the_other(rooms: hr.Log) -> None:
    alert = by_house(rooms)
    put(rooms, "attic", "north", 40, "insert")
    alert.step(NOW_US)
    put(rooms, "attic", "south", 41, "update_postimage")
    alert.step(NOW_US + 1)
    assert of_groups(rooms)[1:] == [
        ("north", "resolved", [], ["attic"], 0),
        ("south", "firing", ["attic"], [], 1),
    ]


def test_groups_are_bounded(rooms: hr.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.alerts.decision.MAX_GROUPS", 3)
    alert = by_house(rooms, 3600 * SECOND_US)
    for number in range(10):
        put(rooms, f"room{number}", f"house{number}", 40, "insert")
        alert.step(NOW_US + number)
    assert len(messages_of(rooms)) == 10
    assert sorted(AlertState.from_json(rooms.note("alerting.shop.hot")).groups) == [
        json.dumps({"house": f"house{number}"}) for number in (7, 8, 9)
    ]


def test_messages_held_back_by_a_silence_survive_however_many_groups_there_are(
    rooms: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.alerts.decision.MAX_GROUPS", 3)
    alert = by_house(rooms)
    silence(rooms, "shop", "hot", NOW_US + 10 * SECOND_US)
    for number in range(6):
        put(rooms, f"room{number}", f"house{number}", 40, "insert")
        alert.step(NOW_US + number)
    put(rooms, "room5", "house5", None, "delete")  # nothing fires there any more
    alert.step(NOW_US + SECOND_US)
    by_house(rooms).step(NOW_US + 11 * SECOND_US)
    reminders = [
        each
        for each, message in zip(of_groups(rooms), messages_of(rooms), strict=True)
        if not message.is_silenced
    ]
    assert sorted(reminders) == [
        (f"house{number}", "firing", [f"room{number}"], [], 1) for number in range(5)
    ]


def caught_up(alert: AlertDecider, now_us: int) -> None:
    while alert.step(now_us):
        continue


def lines(log: hr.Log, hosts: int, rows: int) -> None:
    with log.producer("alert.lines") as producer:
        producer.append(
            [{"host": f"host{number % hosts}", "text": "é" * 250} for number in range(rows)]
        )


def test_many_rows_of_many_groups_that_wait_are_counted_and_make_no_large_note(log: hr.Log) -> None:
    log.create_topic("alert.lines", "host STRING, text STRING")
    alert, hour_us = (
        AlertDecider.open(
            log, "shop", Alert("hot", "alert.lines", (), 3600 * SECOND_US, by=("host",))
        ),
        3600 * SECOND_US,
    )
    lines(log, 300, 300)
    caught_up(alert, NOW_US)
    lines(log, 300, 12_000)  # all wait, and are more than one group may have waiting
    before = len(messages_of(log))
    caught_up(alert, NOW_US + 1)
    assert len(messages_of(log)) == before
    lines(log, 301, 301)  # and one is new
    caught_up(alert, NOW_US + 2)
    assert len(messages_of(log)) == before + 1
    assert len((log.note("alerting.shop.hot") or "").encode()) < 256 << 10
    again = AlertDecider.open(log, "shop", Alert("hot", "alert.lines", (), hour_us, by=("host",)))
    caught_up(again, NOW_US + hour_us)
    assert sum(each.fired for each in messages_of(log)) == 300 + 12_000 + 301


def test_one_group_with_very_many_rows_is_emitted_early_and_alone(
    log: hr.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.alerts.decision.MAX_WAITING", 50)
    log.create_topic("alert.lines", "host STRING, text STRING")
    alert = AlertDecider.open(
        log, "shop", Alert("hot", "alert.lines", (), 3600 * SECOND_US, by=("host",))
    )
    lines(log, 2, 2)
    caught_up(alert, NOW_US)
    lines(log, 1, 49)
    lines(log, 2, 2)
    caught_up(alert, NOW_US + 1)
    assert [
        (json.loads(each.content)["group"]["host"], each.fired) for each in messages_of(log)[2:]
    ] == [("host0", 50)]


def test_very_many_groups_at_once_are_emitted_together(log: hr.Log) -> None:
    log.create_topic("alert.lines", "host STRING, text STRING")
    lines(log, 250, 500)
    caught_up(
        AlertDecider.open(log, "shop", Alert("hot", "alert.lines", (), 0, by=("host",))), NOW_US
    )
    messages = messages_of(log)
    assert (
        len(messages),
        len({each.id for each in messages}),
        sum(each.fired for each in messages),
    ) == (100, 100, 500)
    assert messages[-1].subject() == "[firing] hot, 151 groups: 302 new"
    assert json.loads(messages[-1].body())["groups"] == 151
    assert (
        messages[-1].text().splitlines()[-1]
        == f"and {302 - len(json.loads(messages[-1].content)['fired'])} more fired"
    )


def test_large_rows_that_fire_make_neither_a_large_message_nor_a_large_note(log: hr.Log) -> None:
    log.create_table("alert.pages", "url STRING, text STRING", key="url")
    alert = AlertDecider.open(log, "shop", Alert("hot", "alert.pages", (), 0))
    with log.producer("alert.pages") as producer:
        producer.append(
            [
                {"url": f"/{number}", "text": "x" * 2_000, "_change_type": "insert"}
                for number in range(500)
            ]
        )
        caught_up(alert, NOW_US)
        producer.append(
            [{"url": f"/{number}", "text": None, "_change_type": "delete"} for number in range(500)]
        )
    assert len(log.note("alerting.shop.hot") or "") < 300_000
    caught_up(AlertDecider.open(log, "shop", alert.alert), NOW_US + 1)
    fired, resolved = messages_of(log)
    assert (fired.fired, resolved.resolved, resolved.active) == (500, 500, 0)
    assert 100 < fired.active < 500  # as many as are remembered
    assert max(len(each.content) for each in (fired, resolved)) < 150_000


def test_a_retried_step_is_logged_once(log: hr.Log, caplog: pytest.LogCaptureFixture) -> None:
    ended = Event()

    class Failing(AlertDecider):
        steps = 0

        def step(self, now_us: int, *, at_once: bool = False) -> bool:
            self.steps += 1
            if self.steps == 3:
                ended.set()
                return super().step(now_us, at_once=at_once)
            raise RetryError("Kafka is away.")

    change(log, attic=40)
    with caplog.at_level(logging.WARNING, "headrace.alerts"):
        decide_alerts(Failing.open(log, "shop", Alert("hot", "alert.hot")), ended)
    assert [record.getMessage() for record in caplog.records] == [
        "The alert hot cannot be decided now, and is tried again: Kafka is away."
    ]
    assert len(messages_of(log)) == 1


def test_state_of_an_older_version_is_read(log: hr.Log) -> None:
    old = json.dumps(
        {
            "version": 1,
            "positions": [[0, 1]],
            "active": {'{"room":"attic"}': '{"room": "attic", "degrees": 40}'},
            "told_us": NOW_US,
            "is_muted": False,
        }
    )
    with log.transaction("older") as tx:
        tx.set_note("alerting.shop.hot", old)
    change(log, attic=40)
    change(log, attic=None)
    alert = make_decider(log, every_us=60 * SECOND_US)
    alert.step(NOW_US + 1)
    assert not messages_of(log)
    alert.step(NOW_US + 60 * SECOND_US)
    assert summary(log) == [("resolved", [], ["attic"], 0)]
    with log.transaction("newer") as tx:
        tx.set_note("alerting.shop.hot", json.dumps({"version": 99}))
    with pytest.raises(ConfigurationError, match="newer version"):
        make_decider(log)


def test_an_older_process_is_refused(log: hr.Log) -> None:
    first = make_decider(log)
    change(log, attic=40)
    first.step(NOW_US)
    second = make_decider(log)
    change(log, cellar=40)
    second.step(NOW_US + 1)
    with pytest.raises((FencedError, NoteConflict)):
        first.step(NOW_US + 2)
    assert len(messages_of(log)) == 2


def test_a_silence_is_recorded_and_what_still_fires_is_emitted_when_it_ends(log: hr.Log) -> None:
    notified: list[AlertMessage] = []
    alert = AlertDecider.open(log, "shop", Alert("hot", "alert.hot"), notified.append)
    silence(log, "shop", "hot", NOW_US + 10 * SECOND_US)
    change(log, attic=40, cellar=41)
    alert.step(NOW_US)
    change(log, cellar=None)
    alert.step(NOW_US + 1)
    assert ([each.is_silenced for each in messages_of(log)], notified) == ([True, True], [])
    alert.step(NOW_US + 11 * SECOND_US)
    alert.step(NOW_US + 12 * SECOND_US)
    assert summary(log)[2:] == [("firing", ["attic"], [], 1)]
    assert [each.is_silenced for each in notified] == [False]


def test_a_message_reads_well(log: hr.Log) -> None:
    alert = make_decider(log)
    change(log, **{f"room{i}": i for i in range(150)})
    alert.step(NOW_US)
    (message,) = messages_of(log)
    lines = message.text().splitlines()
    assert lines[0] == "[firing] hot: 150 new, 150 active"
    assert lines[3] == "fired: room room0, degrees 0"
    assert lines[-1] == "and 50 more fired"
    assert json.loads(message.body())["counts"] == {"fired": 150, "resolved": 0, "active": 150}


def test_invalid_settings_are_refused_at_declaration() -> None:
    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema="n BIGINT")
    with pytest.raises(PlanError, match="cannot be sent to 'sqlite'"):
        shop.alert("big", orders, to=hr.sinks.sqlite("x.db"))
    with pytest.raises(InputError, match="not the address of a mail server"):
        hr.alerts.email("localhost", to="a@example.com")
    with pytest.raises(InputError, match="password of a mail server is written"):
        hr.alerts.email("smtp://localhost", to="a@example.com", password="hunter2")
    with pytest.raises(InputError, match="not a mail address"):
        hr.alerts.email("smtp://localhost", to="a@example.com\nBcc: b@example.com")
    with pytest.raises(UnknownColumn, match="The alert 'big' has no column 'm'"):
        shop.alert("big", orders, by="m")
    shop.alert("big", orders, every="5 minutes", by="n")
    with pytest.raises(PlanError, match="Two outputs have the name 'alert.big'"):
        shop.alert("big", orders)
