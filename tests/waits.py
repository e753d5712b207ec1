"""Waiting for a condition, instead of sleeping for a fixed time."""

import time
from collections.abc import Callable


def until(is_so: Callable[[], bool], timeout_s: float = 20) -> None:
    """Return once a condition holds; fail if it takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
