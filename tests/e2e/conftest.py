"""Faults for the tests without Spark, and a receiver of alerts."""

import os
from collections.abc import Iterator

import pytest

from headrace.testing.fault_points import POINTS, inject_faults
from tests.e2e.faults import Faults
from tests.sinks.webhook_receiver import WebhookReceiver


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is lost in a test that takes this: waiting for the disk would prove nothing, and it
    is most of the time such a test takes.
    """
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Faults]:
    """The faults that happen just now, in a list of one: put others in their place, and those
    happen.
    """
    current = [Faults(frozenset())]

    def strike(point: str) -> None:
        current[0].strike(point)

    inject_faults(POINTS, strike, monkeypatch.setattr)
    return current


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    """Somebody who hears of alerts."""
    running = WebhookReceiver()
    yield running
    running.stop()
