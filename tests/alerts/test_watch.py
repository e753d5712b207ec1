"""Rules are parsed, measurements taken, and a rule fires once and resolves once, however the value
fluctuates.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.alerts.alert import TOPIC, AlertMessage
from headrace.alerts.watch import (
    MEASURES,
    Measurements,
    RuleStates,
    Watcher,
    WatchRule,
    parse_rule,
    read_rules,
)
from headrace.errors import InputError
from headrace.gateways.inbox import GatewayStatus
from headrace.gateways.metrics import LOST, GatewayReporter
from headrace.log import dead_letters as dead
from headrace.log.capture_reports import CaptureReporter

SECOND_US = 1_000_000
NOW_US = 1_800_000_000 * SECOND_US


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("orders", "id BIGINT")
        yield opened


def test_rules_are_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text(
        "# what must not happen\nlag rows > 10,000 of billing\n\nwatermark age > 5 minutes of"
        " orders for 30 seconds  # late devices\ndead letters > 0\nlag seconds > 90\n"
    )
    assert read_rules(tmp_path / "rules") == [
        WatchRule("lag rows > 10,000 of billing", "lag rows", 10_000, "billing"),
        WatchRule(
            "watermark age > 5 minutes of orders for 30 seconds",
            "watermark age",
            300,
            "orders",
            30 * SECOND_US,
        ),
        WatchRule("dead letters > 0", "dead letters", 0),
        WatchRule("lag seconds > 90", "lag seconds", 90),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lag > 3", "cannot be read"),
        ("lags rows > 3", "did you mean 'lag rows'"),
        ("lag rows > many", "no number"),
        ("watermark age > soon", "no time"),
        ("lag rows > 3 for ever", "time of a rule"),
    ],
)
def test_a_rule_that_cannot_be_is_explained(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_rule(text)


def status(state: Path, **more: object) -> None:
    state.mkdir(exist_ok=True)
    known = {
        "pipeline": "shop",
        "updated": NOW_US / 1e6,
        "rows_behind": 7,
        "failures": 1,
        "watermarks": {},
        "counts": {},
    }
    (state / "status.json").write_text(json.dumps({**known, **more}))


def test_everything_is_looked_at(log: hr.Log, tmp_path: Path) -> None:
    with log.producer("orders") as producer:
        producer.append([{"id": number} for number in range(5)])
    with log.consumer("orders", "billing") as consumer:
        consumer.poll(max_rows=2)
        consumer.commit()
    dead.divert(log, "orders", [dead.DeadLetter("here", "because")])
    door, reporter = (
        GatewayStatus("door", "statsd", received=9, dropped=2, refused=3, details={LOST: 4}),
        GatewayReporter(log),
    )
    reporter.report(door, NOW_US)
    shop = {"behind_bytes": 5, "lag_seconds": 2.5, "retained_bytes": 7, "stopped": {"t": "gone"}}
    CaptureReporter(log, "shop").report({**shop, "snapshot_rows": 30, "snapshot_about": 100})
    measurements, state, now_s = (
        Measurements(log, [tmp_path / "shop.state"]),
        tmp_path / "shop.state",
        NOW_US / 1e6,
    )
    watermarks = {
        "orders": {"watermark_us": NOW_US - 90 * SECOND_US},
        "empty": {"watermark_us": None},
    }
    status(
        state,
        watermarks=watermarks,
        counts={"window.late": 10, "orders.shed": 100, "orders.rows_in": 5},
        views={"minutes": {"newest": now_s - 40.0}, "empty": {"newest": None}},
    )
    first = measurements.measure(now_s)
    assert set(first) == set(MEASURES)
    assert first["lag rows"]["billing/orders/0"] == 3
    captured = ("capture bytes", "capture seconds", "retained bytes", "stopped tables")
    assert [first[measure]["capture/shop"] for measure in captured] == [5, 2.5, 7, 1]
    assert first["snapshot rows"] == {"capture/shop": 70}
    assert (first["behind rows"], first["dead letters"], first["status age"]) == (
        {"shop": 7.0},
        {"orders": 1},
        {"shop": 0.0},
    )
    assert first["watermark age"] == {"shop/orders": 90.0}
    assert first["view age"] == {"shop/minutes": 40.0}
    assert (first["late rows"], first["failed batches"]) == ({"shop/window": 0.0}, {"shop": 0.0})
    status(state, counts={"window.late": 25, "orders.shed": 100}, failures=3)
    reporter.report(replace(door, dropped=12, refused=4, details={LOST: 5}), NOW_US)
    reporter.report(
        GatewayStatus("window", "http", refused=1), NOW_US
    )  # it was not there at the first look
    later = measurements.measure(now_s + 30)
    assert (later["late rows"], later["failed batches"]) == ({"shop/window": 15.0}, {"shop": 2.0})
    assert later["dropped rows"] == {
        "shop/orders": 0.0,
        "gateway/door": 11.0,
        "gateway/window": 0.0,
    }
    assert later["refused rows"] == {"gateway/door": 1.0, "gateway/window": 1.0}
    status(state, counts={"window.late": 26}, failures=1)  # the pipeline was started anew
    last = measurements.measure(now_s + 61)
    assert (last["late rows"], last["failed batches"]) == ({"shop/window": 16.0}, {"shop": 1.0})
    assert measurements.measure(now_s + 200)["late rows"] == {"shop/window": 0.0}


def test_names_mean_what_is_under_them() -> None:
    rule = parse_rule("lag rows > 1 of billing")
    assert [
        rule.applies_to(of)
        for of in ("billing", "billing/orders/0", "billing2/orders/0", "shop/billing")
    ] == [True, True, False, True]


def test_a_rule_fires_and_resolves_only_when_it_has_held() -> None:
    rule = parse_rule("lag rows > 10 for 10 seconds")
    states, trembling = RuleStates([rule]), [20] * 5 + [5] + [20] * 15 + [5] * 5 + [20] + [5] * 15
    events = [
        (second, event.is_firing)
        for second, value in enumerate(trembling)
        for event in states.update(
            {"lag rows": {"g/t/0": float(value)}}, NOW_US + second * SECOND_US
        )
    ]
    assert events == [(16, True), (37, False)]
    assert not states.firing


def test_a_measurement_that_disappears_is_resolved() -> None:
    states = RuleStates([parse_rule("dead letters > 0 for 0 seconds")])
    assert [
        event.is_firing for event in states.update({"dead letters": {"orders": 1.0}}, NOW_US)
    ] == [True]
    assert [event.is_firing for event in states.update({}, NOW_US + 1)] == [False]


@given(st.lists(st.booleans(), max_size=100), st.integers(0, 5))
def test_firing_and_resolved_take_turns_and_are_never_closer_than_the_rule_says(
    high: list[bool], hold_s: int
) -> None:
    states = RuleStates([WatchRule("r", "lag rows", 10, None, hold_s * SECOND_US)])
    events = [
        (second, event.is_firing)
        for second, is_high in enumerate(high)
        for event in states.update(
            {"lag rows": {"x": 20.0 if is_high else 0.0}}, second * SECOND_US
        )
    ]
    assert [is_firing for _, is_firing in events] == [
        number % 2 == 0 for number in range(len(events))
    ]
    for (second, is_firing), before in zip(events, [(-1, False), *events], strict=False):
        assert all(each is is_firing for each in high[second - hold_s : second + 1])
        assert second - before[0] > hold_s or before[0] == -1


def test_changes_are_recorded_once_over_restarts(log: hr.Log) -> None:
    rules = [parse_rule("dead letters > 0 for 0 seconds")]
    dead.divert(log, "orders", [dead.DeadLetter("here", "because")])
    assert [
        event.text for event in Watcher.open(log, Measurements(log, []), rules).check(NOW_US)
    ] == ["FIRING: dead letters > 0 for 0 seconds: orders has 1"]
    again = Watcher.open(log, Measurements(log, []), rules)
    assert again.check(NOW_US + 1) == []
    log.delete_topic("orders.dead")
    assert [event.is_firing for event in again.check(NOW_US + 2)] == [False]
    messages = [AlertMessage.from_row(row) for row in log.read(TOPIC).to_pylist()]
    assert [(each.pipeline, each.alert, each.state, each.active) for each in messages] == [
        ("watch", "watch", "firing", 1),
        ("watch", "watch", "resolved", 0),
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("lag rows > 0 of biling", "'biling', and a group of that name does not exist.*billing"),
        ("lag rows > 0 of orders", "'orders', and a group"),
        ("dead letters > 0 of order", "'order', and a topic.*orders"),
        ("refused rows > 0 of door", "'door', and a gateway"),
        ("watermark age > 1 minute of payments", "'payments', and an input.*orders"),
        ("late rows > 1 of minute", "'minute', and a step.*minutes.window"),
        ("view age > 1 minute of days", "'days', and a view.*minutes"),
        ("behind rows > 1 of shops", "'shops', and a pipeline.*shop"),
        ("status age > 1 minute of minutes", "'minutes', and a pipeline"),
    ],
)
def test_a_rule_about_what_does_not_exist_watched_in_silence(
    log: hr.Log, tmp_path: Path, rule: str, message: str
) -> None:
    with log.consumer("orders", "billing") as consumer:
        consumer.commit()
    log.reset_group("billing", "orders", "earliest")
    state = tmp_path / "shop.state"
    state.mkdir()
    nodes = [
        {"id": "orders", "kind": "topic"},
        {"id": "minutes.window", "kind": "window"},
        {"id": "view minutes", "kind": "view"},
    ]
    plan = {"version": 1, "pipeline": "shop", "nodes": nodes}
    (state / "plan.json").write_text(json.dumps(plan))
    measurements = Measurements(log, [state])
    right = [
        "lag rows > 0 of billing",
        "dead letters > 0 of orders",
        "dead letters > 0 of minutes.window",
        "watermark age > 1 minute of shop/orders",
        "late rows > 1 of minutes.window",
        "view age > 1 minute of minutes",
        "behind rows > 1 of shop",
        "lag rows > 7",
    ]
    measurements.check_subjects([parse_rule(text) for text in right])
    with pytest.raises(InputError, match=message):
        measurements.check_subjects([parse_rule(rule)])
    with pytest.raises(InputError, match="(?s)does not exist.*To fix:"):
        Measurements(log, []).check_subjects([parse_rule(rule)])
