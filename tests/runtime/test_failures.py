"""What is shown of a batch that failed: the error of ours, or else the last one, without the traces
around it.
"""

import pytest

from headrace.errors import BadExpression, BadRows, DiskFull, LogUnavailable
from headrace.operators.changelog import MalformedChangelog
from headrace.operators.kernel import AggregateFailed, GroupFull, PatternFull
from headrace.runtime.failures import failure_reason, is_permanent

WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "shard.py", line 62, in _run
    store.close()
  File "aggregation.py", line 144, in _advance_one
    raise AggregateFailed(step=self.step_name)
headrace.operators.kernel.AggregateFailed: The aggregate 's' failed on the row {'k': 1}: ValueError: broken on purpose
Traceback (most recent call last):
  File "shop.py", line 16, in add
    raise ValueError("broken on purpose")
ValueError: broken on purpose
  To fix: mend it and run again."""  # noqa: E501 - as it comes

CHAINED = """Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times
Traceback (most recent call last):
  File "a.py", line 1, in f
    x[0]
    ~^^^
IndexError: list index out of range

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in f
    raise OSError
OSError: [Errno 28] No space left on device

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


class Captured(Exception):
    """As Spark hands a worker's error over: all in one text."""


def test_an_error_of_ours_is_shown_with_its_fix_and_the_users_own_trace() -> None:
    reason = failure_reason(Captured(WORKER)).splitlines()
    assert (
        reason[0]
        == "AggregateFailed: The aggregate 's' failed on the row {'k': 1}: ValueError: broken on"
        " purpose"
    )
    assert reason[-1] == "  To fix: mend it and run again."
    assert any("shop.py" in line for line in reason)
    assert not any("shard.py" in line for line in reason)


def test_of_several_errors_the_last_is_shown_and_nothing_of_the_jvm() -> None:
    assert failure_reason(Captured(CHAINED)) == "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("gone"), "OSError: gone"),
        (DiskFull("No room.", fix="make room."), "DiskFull: No room.\n  To fix: make room."),
        (
            Captured("Traceback (most recent call last):\nand nothing else"),
            "Traceback (most recent call last):\nand nothing else",
        ),
    ],
)
def test_other_errors_are_shown_as_they_are(error: Exception, reason: str) -> None:
    assert failure_reason(error) == reason


def test_what_is_shown_is_bounded() -> None:
    assert len(failure_reason(OSError("x" * 100_000))) < 3_000


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (BadRows("Row 0 has no column 'm'."), True),
        (BadExpression("It cannot be read."), True),
        (
            Captured(
                'Traceback (most recent call last):\n  File "a.py"\nheadrace.errors.BadPartition:'
                " There is no partition 3."
            ),
            True,
        ),
        (Captured(WORKER), True),
        (AggregateFailed(step="s", aggregate="a", row=None, cause="bad", trace=""), True),
        (GroupFull(step="s", aggregate="a", group={}, max_values=1), True),
        (PatternFull(step="s"), True),
        (MalformedChangelog("A row that is absent is removed."), True),
        (LogUnavailable("The broker does not answer."), False),
        (DiskFull("No room."), False),
        (Captured(CHAINED), False),
        (OSError("gone"), False),
    ],
)
def test_what_does_not_pass_by_itself_is_distinguished_from_what_may(
    error: Exception, lasting: bool
) -> None:
    assert is_permanent(error) is lasting
