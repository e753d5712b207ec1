"""Strikes: a process dies just before or just after a chosen method, for tests of crashes.

`strike` raises `Struck` in this process; `sync_and_die` and `capture_and_die` let a process of its
own kill itself with SIGKILL at that point, which leaves no chance to clean up. A strike that never
happened proves nothing, so all say whether it did.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import headrace as hr

if TYPE_CHECKING:
    import pytest

    from headrace.cdc import Capture
    from headrace.sinks import Sink

SYNC_TIMEOUT_S = 60.0
"""How long a process may take to get to the point where it dies."""


class Struck(BaseException):
    """Where a process would have been killed."""


@dataclass(frozen=True)
class StrikePoint:
    """Where a process dies.

    Attributes:
        owner: The class that has the method.
        method: Its name.
        when: "before" or "after" the method.
        passes: How often it is passed before that.
    """

    owner: type
    method: str
    when: str
    passes: int = 0

    def install(
        self, patch: Callable[[type, str, Any], None], die: Callable[[], None]
    ) -> list[int]:
        """Replace the method by one that calls `die` at this point.

        Args:
            patch: Sets an attribute of a class, such as `setattr`.
            die: Ends the process, or raises.

        Returns:
            A list that grows with each call of the method.
        """
        real = getattr(self.owner, self.method)
        calls: list[int] = []

        @functools.wraps(real)
        def dying(*args: Any, **options: Any) -> Any:
            calls.append(len(calls))
            if len(calls) > self.passes and self.when == "before":
                die()
            result = real(*args, **options)
            if len(calls) > self.passes:
                die()
            return result

        patch(self.owner, self.method, dying)
        return calls


def strike(monkeypatch: pytest.MonkeyPatch, point: StrikePoint) -> list[int]:
    """Raise `Struck` at a point, until `monkeypatch` is undone.

    Args:
        monkeypatch: The fixture of pytest that replaces the method.
        point: Where to die.

    Returns:
        A list that grows with each call of the method: empty if the point was never reached.

    Example:
        >>> calls = strike(monkeypatch, StrikePoint(MyTarget, "merge", "before"))  # doctest: +SKIP
    """

    def die() -> None:
        raise Struck

    return point.install(monkeypatch.setattr, die)


def sync_and_die(sink: Sink, address: str, topic: str, point: StrikePoint) -> int:
    """Run a sink in a process that kills itself at a point.

    Args:
        sink: The sink, which must be picklable: its opener is a function or class of a module.
        address: The log's address.
        topic: The topic to follow.
        point: Where to die.

    Returns:
        How the process ended: `-signal.SIGKILL` if it got to the point, 0 if it caught up instead.
    """
    return _run_and_die(sink, address, topic, point)


def capture_and_die(source: Capture, address: str, point: StrikePoint) -> int:
    """Run a source or a capture in a process that kills itself at a point.

    Args:
        source: The source, which must be picklable: its reader is a function or class of a module.
        address: The log's address.
        point: Where to die.

    Returns:
        How the process ended: `-signal.SIGKILL` if it got to the point, 0 if it caught up instead.
    """
    return _run_and_die(source, address, None, point)


def _run_and_die(
    connector: Sink | Capture, address: str, topic: str | None, point: StrikePoint
) -> int:
    return subprocess.run(
        [sys.executable, "-m", "headrace.testing.strikes"],
        input=pickle.dumps((connector, address, topic, point)),
        check=False,
        timeout=SYNC_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
    ).returncode


def _main() -> None:
    from headrace.sinks.sync import SinkLoop

    connector, address, topic, point = pickle.load(sys.stdin.buffer)
    point.install(setattr, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if topic is None:
        connector.run(log=address, until_caught_up=True)
        return
    with hr.open_log(address) as log:
        SinkLoop(connector, log, topic).run(until_caught_up=True)


if __name__ == "__main__":
    _main()
