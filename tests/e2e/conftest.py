"""For the tests without Spark."""

import os

import pytest


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is lost in a test that takes this: waiting for the disk would prove nothing, and it is most of the time such a test takes."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
