"""What gateways tell of themselves: every one is known, however quiet, and one that cannot tell
works all the same.
"""

import logging
from threading import Event

import pytest

import headrace as hr
from headrace.gateways import Gateway
from headrace.gateways.base import GatewayServer
from headrace.gateways.inbox import GatewayStatus
from headrace.gateways.metrics import TOPIC, GatewayReporter, GatewayReports

NOW_US = 1_800_000_000_000_000


def test_a_quiet_gateway_is_known_behind_many_rows_of_a_busy_one(log: hr.Log) -> None:
    GatewayReporter(log).report(GatewayStatus("quiet", "http", received=5, refused=5), NOW_US)
    GatewayReporter(log).report(GatewayStatus("busy", "http", received=1), NOW_US)
    _, busy = (
        log.read(TOPIC).to_table().drop_columns(["_partition", "_offset", "_timestamp"]).to_pylist()
    )
    with log.producer(TOPIC) as producer:
        producer.append([{**busy, "received": number} for number in range(12_000)])
    reports = GatewayReports(log)
    assert {name: row["received"] for name, row in reports.read().items()} == {
        "quiet": 5,
        "busy": 11_999,
    }
    assert log.topic(TOPIC).compact
    GatewayReporter(log).report(GatewayStatus("quiet", "http", received=6, refused=6), NOW_US)
    assert reports.read()["quiet"]["refused"] == 6


def test_a_gateway_that_may_not_tell_goes_on_and_warns_once(
    log: hr.Log, caplog: pytest.LogCaptureFixture
) -> None:
    log.create_topic(TOPIC, "other BIGINT")  # nothing of ours fits
    reporter = GatewayReporter(log)
    with caplog.at_level(logging.WARNING, "headrace.gateways"):
        for received in range(1, 4):
            reporter.report(GatewayStatus("door", "http", received=received), NOW_US)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    log.delete_topic(TOPIC)
    reporter.report(GatewayStatus("door", "http", received=4), NOW_US)
    assert GatewayReports(log).read()["door"]["received"] == 4


class _Broken(GatewayServer):
    """Cannot go on, and cannot tell either."""

    def start(self) -> None:
        self.failure = OSError("the socket is gone")

    def stop(self) -> None:
        """There is nothing to end."""

    def report(self) -> None:
        raise RuntimeError("the log is gone too")


def test_the_error_that_ended_a_gateway_is_raised(log: hr.Log) -> None:
    stop = Event()
    stop.set()
    with pytest.raises(OSError, match="the socket is gone"):
        Gateway(name="door", kind="http", opener=_Broken, topics=("orders",)).run(
            log=log.address, stop=stop
        )
