"""The hook for lag: called once when a group falls behind and once when it has caught up, whatever
goes wrong in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import InputError, UnknownGroup
from headrace.log.lag_watch import LagAlert, LagWatch
from tests.waits import wait_until


@pytest.fixture
def log(tmp_path: Path) -> Iterator[hr.Log]:
    """The group `g` is 5 rows behind."""
    with hr.open_log(f"file:{tmp_path / 'log'}") as opened:
        opened.create_topic("t", schema="n BIGINT")
        with opened.producer("t") as producer:
            producer.append([{"n": n} for n in range(5)])
        opened.reset_group("g", "t", "earliest")
        yield opened


def test_each_start_and_end_of_lag_is_reported_once(log: hr.Log) -> None:
    alerts: list[LagAlert] = []
    watch = log.watch_lag(alerts.append, rows=4, group="g", every="10 ms")
    wait_until(lambda: len(alerts) == 1)
    log.reset_group("g", "t", "latest")
    wait_until(lambda: len(alerts) == 2)
    watch.stop()
    assert [(alert.firing, alert.lag.rows) for alert in alerts] == [(True, 5), (False, 0)]


def test_a_hook_that_raises_is_called_again_next_time(
    log: hr.Log, caplog: pytest.LogCaptureFixture
) -> None:
    alerts: list[bool] = []

    def hook(alert: LagAlert) -> None:
        alerts.append(alert.firing)
        raise RuntimeError("the pager is out of order")

    watch = log.watch_lag(hook, rows=1, every="10 ms")
    wait_until(lambda: alerts == [True])
    log.reset_group("g", "t", "latest")
    wait_until(lambda: alerts == [True, False])
    watch.stop()
    assert "the pager is out of order" in caplog.text


def test_a_deleted_topic_is_behind_no_more(log: hr.Log) -> None:
    alerts: list[bool] = []
    watch = log.watch_lag(lambda alert: alerts.append(alert.firing), rows=1, every="10 ms")
    wait_until(lambda: alerts == [True])
    log.delete_topic("t")
    wait_until(lambda: alerts == [True, False])
    watch.stop()


def test_a_hook_may_stop_its_watch(log: hr.Log) -> None:
    stopped: list[bool] = []

    def hook(_alert: LagAlert) -> None:
        wait_until(lambda: bool(watches))
        watches[0].stop()
        stopped.append(True)

    watches: list[LagWatch] = []
    watches.append(log.watch_lag(hook, rows=1, every="10 ms"))
    wait_until(lambda: stopped == [True])


def test_an_unknown_group_or_a_missing_threshold_is_refused(log: hr.Log) -> None:
    with pytest.raises(UnknownGroup, match="did you mean 'g'|there is 'g'"):
        log.watch_lag(print, rows=1, group="h")
    with pytest.raises(InputError, match="threshold"):
        log.watch_lag(print)
