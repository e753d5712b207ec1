"""Waiting for a condition, instead of sleeping for a fixed time."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = 20,
    *,
    interval_s: float = 0.02,
    describe: Callable[[], object] = lambda: "",
) -> None:
    """Return once a condition is true. Fail after `timeout_s`, with what `describe` returns
    then.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still false after {timeout_s} s. {describe()}"
        time.sleep(interval_s)
