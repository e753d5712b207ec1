"""Windows and late policies as plans hold them: what is refused, how they print, and that they are
values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest

from headrace.errors import BadDuration, PlanError
from headrace.operators.windows import late_policy as late
from headrace.operators.windows import specs

MINUTE = 60_000_000


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (specs.tumbling("1 minute"), "tumbling(1 minute)"),
        (
            specs.tumbling(timedelta(days=1), offset="30 hours", timezone="Europe/Berlin"),
            "tumbling(1 day, offset=6 hours, timezone=Europe/Berlin)",
        ),
        (specs.hopping("1 hour", every="25 minutes"), "hopping(1 hour, every=25 minutes)"),
        (specs.sliding("90 seconds"), "sliding(90 seconds)"),
        (specs.session("30 minutes"), "session(30 minutes)"),
        (late.drop(), "drop()"),
        (late.correct("0 seconds"), "correct(0 seconds)"),
        (late.correct("1 hour"), "correct(1 hour)"),
        (late.divert("late"), "divert(late)"),
    ],
)
def test_specs_print_and_have_an_identity(spec: Any, text: str) -> None:
    assert str(spec) == text
    assert json.loads(json.dumps(specs.identity(spec)))["kind"] == text.partition("(")[0]
    assert hash(spec) == hash(
        type(spec)(
            **{name: value for name, value in specs.identity(spec).items() if name != "kind"}
        )
    )


def test_identities_differ() -> None:
    some: list[Any] = [
        specs.tumbling("1 hour"),
        specs.hopping("1 hour", every="1 hour"),
        specs.sliding("1 hour"),
        specs.session("1 hour"),
        late.drop(),
    ]
    assert len({json.dumps(specs.identity(each)) for each in some}) == len(some)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: specs.tumbling("0 seconds"), PlanError, "size of a tumbling window is zero"),
        (lambda: specs.tumbling("-1 second"), BadDuration, "negative"),
        (lambda: specs.tumbling(cast("str", 60)), BadDuration, "has no unit"),
        (lambda: specs.tumbling("11 years"), BadDuration, "unknown unit"),
        (lambda: specs.tumbling("4000 days"), PlanError, "longer than 10 years"),
        (
            lambda: specs.tumbling("1 day", timezone="Europe/Berln"),
            PlanError,
            "did you mean 'Europe/Berlin'",
        ),
        (lambda: specs.tumbling("1 day", timezone="../etc/passwd"), PlanError, "no time zone"),
        (
            lambda: specs.hopping("1 minute", every="0 seconds"),
            PlanError,
            "hop of a hopping window is zero",
        ),
        (
            lambda: specs.hopping("1 minute", every="2 minutes"),
            PlanError,
            "leaves out the rows in between",
        ),
        (lambda: specs.hopping("1 day", every="1 second"), PlanError, "more than 2,000 of them"),
        (lambda: specs.sliding("0 ms"), PlanError, "size of a sliding window is zero"),
        (lambda: specs.session("0 ms"), PlanError, "gap of a session window is zero"),
        (lambda: specs.session("-5 minutes"), BadDuration, "negative"),
        (lambda: late.correct("200000 days"), PlanError, "longer than 10 years"),
        (lambda: late.divert(""), PlanError, "cannot be diverted"),
        (lambda: specs.check_emit("finall"), PlanError, "did you mean 'final'"),
    ],
)
def test_invalid_windows_are_refused(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_lateness_of_each_policy() -> None:
    assert [
        late.drop().lateness_us,
        late.divert("late").lateness_us,
        late.correct("2 minutes").lateness_us,
    ] == [0, 0, 2 * MINUTE]
