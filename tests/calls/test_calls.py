"""Recorded calls in whole pipelines, run without Spark: every row has one fate, and what is
recorded is never asked for again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.calls import caller as caller_module
from headrace.calls import recorder as recorder_module
from headrace.calls.caller import Caller
from headrace.errors import (
    CallFailed,
    CallRefused,
    ConfigurationError,
    DuplicateStep,
    FencedError,
    InputError,
    NoFingerprint,
    PlanError,
    StreamOnly,
    UnknownColumn,
)
from headrace.log.dead_letters import read_dead_letters, replay
from headrace.plan.plan import time_column
from headrace.retry import Backoff, CircuitBreaker
from headrace.runtime.versions import ReplayRefused
from headrace.testing.pipelines import PipelineTest
from tests.servers.answer_server import AnswerServer, post
from tests.waits import wait_until

START = datetime(2026, 1, 1, tzinfo=UTC)
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow after milliseconds."""
    quick = Backoff(first_s=0.01, longest_s=0.02)
    monkeypatch.setattr(caller_module, "BACKOFF", quick)
    monkeypatch.setattr(CircuitBreaker, "OPEN_BACKOFF", quick)
    monkeypatch.setattr(recorder_module, "PROGRESS_EVERY_S", 0.0)


def numbers(count: int, *, first: int = 0) -> Rows:
    return [
        {"n": n, "kind": f"k{n % 3}", "at": START + timedelta(seconds=n)}
        for n in range(first, first + count)
    ]


class Doubler:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.keys: list[str] = []

    async def __call__(self, row: dict[str, Any], ctx: hr.RequestContext) -> dict[str, Any]:
        self.asked.append(row["n"])
        self.keys.append(ctx.idempotency_key)
        await asyncio.sleep(0)
        return {"double": 2 * row["n"]}


def answers_of(
    pipeline: hr.Pipeline, function: Any, *, topic: str = "numbers", **settings: Any
) -> hr.Stream:
    rows = pipeline.topic(
        topic,
        schema="n BIGINT NOT NULL, kind STRING, at TIMESTAMP",
        key="kind",
        event_time="at",
    )
    call = {"schema": "double BIGINT", "version": "1", "name": "doubled", **settings}
    return rows.call(function, **call)


def declared(function: Any, *, name: str = "numbers", **settings: Any) -> hr.Pipeline:
    """A pipeline that asks about each number, writes the answers, and counts them in windows."""
    pipeline = hr.Pipeline(name)
    answered = answers_of(pipeline, function, topic=name, **settings)
    pipeline.write("answered" if name == "numbers" else f"{name}.answered", answered)
    windows = answered.window(hr.tumbling("1 minute")).aggregate(
        rows=hr.agg.count(), total=hr.agg.sum("double")
    )
    pipeline.view("windows", windows)
    return pipeline


def values(test: PipelineTest, topic: str = "answered") -> list[tuple[int, int]]:
    return sorted((row["n"], row["double"]) for row in test.log.read(topic).to_pylist())


def asking(port: int) -> Callable[..., Any]:
    async def ask(row: dict[str, Any], ctx: hr.RequestContext) -> Any:
        return await post(port, {"n": row["n"]}, ctx.idempotency_key)

    return ask


# Answers


def test_rows_get_their_answers_in_a_later_tick(tmp_path: Path) -> None:
    asked = Doubler()
    with PipelineTest(declared(asked), tmp_path) as test:
        test.feed("numbers", numbers(10))
        test.cut()
        while test.step():
            continue
        assert values(test) == []  # the pipeline has not waited
        test.settle()
        assert values(test) == [(n, 2 * n) for n in range(10)]
        assert sorted(asked.asked) == list(range(10))


def test_a_preview_shows_recorded_answers_and_calls_nobody(tmp_path: Path) -> None:
    asked = Doubler()
    with PipelineTest(declared(asked), tmp_path) as test:
        with pytest.raises(InputError, match="asks nobody"):
            answers_of(hr.Pipeline("other"), asked).preview(5, log=test.log.address)
        test.feed("numbers", numbers(10))
        test.settle()
        shown = answers_of(hr.Pipeline("numbers"), asked).preview(20, log=test.log.address)
        assert sorted((row["n"], row["double"]) for row in shown.to_pylist()) == values(test)
        assert len(asked.asked) == 10


def test_a_replay_gives_the_same_rows_and_calls_nobody(tmp_path: Path) -> None:
    asked = Doubler()
    with PipelineTest(declared(asked), tmp_path) as test:
        for first in (0, 40, 80):
            test.feed("numbers", numbers(40, first=first))
            test.settle()
        test.settle(final=True)
        before = list(asked.asked)
        version = test.replay("v2")
        version.settle()
        assert version.rows("answered.v2") == test.rows("answered")
        assert version.view("windows.v2") == test.view("windows")
        assert asked.asked == before
        assert not [name for name in test.log.topics() if name.endswith("requests.v2")]


def test_a_new_view_over_answers_asks_nobody(tmp_path: Path) -> None:
    asked = Doubler()
    with PipelineTest(declared(asked), tmp_path) as test:
        test.feed("numbers", numbers(9))
        test.settle()
        edited = declared(asked)
        answered = hr.Stream(edited, edited._outputs["answered"].input)
        edited.view("totals", answered.group_by("kind").aggregate(total=hr.agg.sum("double")))
        test.pipeline = edited
        test.restart()
        test.settle()
        assert sum(row["total"] for row in test.view("totals")) == 72
        assert len(asked.asked) == 9


def test_an_edited_function_is_asked_about_new_rows_only(tmp_path: Path) -> None:
    async def tripled(row: dict[str, Any]) -> dict[str, Any]:
        return {"double": 3 * row["n"]}

    with PipelineTest(declared(Doubler()), tmp_path) as test:
        test.feed("numbers", numbers(2))
        test.settle()
        test.pipeline = declared(tripled, version="2")
        test.restart()
        test.feed("numbers", numbers(2, first=2))
        test.settle()
        assert values(test) == [(0, 0), (1, 2), (2, 6), (3, 9)]
        codes = [row["_code"] for row in test.log.read("__calls.numbers.doubled").to_pylist()]
        assert {code for code in codes if code is not None} == {"version 1", "version 2"}


def test_a_version_with_a_call_that_never_ran_is_refused(tmp_path: Path) -> None:
    plain = hr.Pipeline("numbers")
    rows = plain.topic(
        "numbers",
        schema="n BIGINT NOT NULL, kind STRING, at TIMESTAMP",
        key="kind",
        event_time="at",
    )
    plain.write("answered", rows.with_columns(double="n * 2"))
    with PipelineTest(plain, tmp_path) as test:
        test.feed("numbers", numbers(3))
        test.settle()
        with pytest.raises(ReplayRefused, match="has the call 'doubled'.*never run.*calls nobody"):
            test.replay("v2", pipeline=declared(Doubler()))


def test_calls_in_a_row(tmp_path: Path) -> None:
    first, second = Doubler(), Doubler()

    async def again(row: dict[str, Any], ctx: hr.RequestContext) -> dict[str, Any]:
        answer = await second({"n": row["double"]}, ctx)
        return {"quadruple": answer["double"]}

    pipeline = hr.Pipeline("numbers")
    rows = pipeline.topic(
        "numbers", schema="n BIGINT, kind STRING, at TIMESTAMP", event_time="at", key="kind"
    )
    doubled = rows.call(first, "double BIGINT", name="doubled", version="1")
    both = doubled.where("double > 4").call(again, "quadruple BIGINT", version="1")
    windows = both.window(hr.tumbling("10 seconds")).aggregate(total=hr.agg.sum("quadruple"))
    pipeline.view("windows", windows)
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("numbers", numbers(25))
        test.settle()
        assert [row["total"] for row in test.view("windows")] == [
            4 * sum(range(3, 10)),
            4 * sum(range(10, 20)),
        ]
        assert len(first.asked) == 25
        assert len(second.asked) == 22


# Event time


def test_rows_whose_answers_are_slow_are_not_late(tmp_path: Path) -> None:
    """Each minute's first row is answered last, when the watermark of the input is long past."""

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.3 if row["n"] % 60 == 0 else 0)
        return {"double": 2 * row["n"]}

    pipeline = declared(ask)
    with PipelineTest(pipeline, tmp_path) as test:
        stop = threading.Event()
        assert test._calls is not None
        (caller,) = test._calls.callers.values()
        thread = threading.Thread(target=caller.run, args=(stop,))
        thread.start()
        for minute in range(4):
            test.feed("numbers", numbers(60, first=60 * minute))
            for _ in range(4):
                test.cut()
                while test.step():
                    continue
        stop.set()
        thread.join()
        test.settle(final=True)
        assert [(row["rows"], row["total"]) for row in test.view("windows")] == [
            (60, 2 * sum(range(60 * minute, 60 * minute + 60))) for minute in range(4)
        ]
        assert "__late.numbers" not in test.log.topics()


def test_windows_behind_a_call_close_when_its_input_is_idle(tmp_path: Path) -> None:
    with PipelineTest(declared(Doubler()), tmp_path) as test:
        test.feed("numbers", numbers(10))
        test.settle()
        assert test.view("windows") == []
        test.pass_time("5 minutes")
        test.settle()
        assert [row["rows"] for row in test.view("windows")] == [10]
        ticks = test.runner.tick
        for _ in range(3):
            test.settle()
        assert test.runner.tick == ticks  # nothing goes on for its own sake


def test_rows_that_became_dead_letters_do_not_hold_event_time_back(tmp_path: Path) -> None:
    async def never(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 0:
            raise CallRefused("no such number")
        return {"double": 2 * row["n"]}

    with PipelineTest(declared(never), tmp_path) as test:
        test.feed("numbers", numbers(1))
        test.settle()
        test.feed("numbers", numbers(100, first=1))
        test.settle()
        assert [row["rows"] for row in test.view("windows")] == [59]


def test_the_result_has_the_event_time_of_its_rows() -> None:
    pipeline = declared(Doubler())
    time = time_column(pipeline._outputs["answered"].input)
    assert time is not None
    assert time.name == "at"


# The order of rows


@pytest.mark.parametrize("ordered", [True, False])
def test_answers_keep_the_order_of_their_rows_if_asked_to(tmp_path: Path, ordered: bool) -> None:
    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.05 if row["n"] == 0 else 0)
        return {"double": 2 * row["n"]}

    with PipelineTest(declared(ask, ordered=ordered), tmp_path) as test:
        test.feed("numbers", numbers(20))
        test.settle()
        recorded = [row["n"] for row in test.log.read("__calls.numbers.doubled").to_pylist()]
        recorded = [n for n in recorded if n is not None]
        waited = [row["n"] for row in test.log.read("__calls.numbers.doubled.requests").to_pylist()]
        assert sorted(recorded) == sorted(waited) == list(range(20))
        assert (recorded == waited) == ordered


# The cache


def test_equal_arguments_are_asked_about_once(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(rows: Rows) -> Rows:
        asked.extend(row["kind"] for row in rows)
        return [{"double": len(row["kind"])} for row in rows]

    pipeline = declared(ask, arguments="kind", cache="1 day", batch=8)
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("numbers", numbers(30))
        test.settle()
        test.feed("numbers", numbers(30, first=30))
        test.settle()
        test.restart()  # the cache is read from the recorded answers
        test.feed("numbers", numbers(30, first=60))
        test.settle()
        assert len(values(test)) == 90
        assert sorted(asked) == ["k0", "k1", "k2"]


def test_an_old_answer_does_not_stand_any_more(tmp_path: Path) -> None:
    asked = Doubler()
    with PipelineTest(declared(asked, arguments="n", cache="10 milliseconds"), tmp_path) as test:
        for _ in range(2):
            test.feed("numbers", numbers(1))
            test.settle()
        assert asked.asked == [0, 0]


# Limits


def test_no_more_calls_than_concurrency_are_in_flight(tmp_path: Path) -> None:
    in_flight, most = 0, 0

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.005)
        in_flight -= 1
        return {"double": row["n"]}

    with PipelineTest(declared(ask, concurrency=7), tmp_path) as test:
        test.feed("numbers", numbers(100))
        test.settle()
        assert most == 7
        assert len(values(test)) == 100


def test_calls_begin_at_a_limited_rate(tmp_path: Path) -> None:
    times = []

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        times.append(asyncio.get_running_loop().time())
        return {"double": row["n"]}

    with PipelineTest(declared(ask, max_per_second=100), tmp_path) as test:
        test.feed("numbers", numbers(21))
        test.settle()
        assert max(times) - min(times) >= 0.19


def test_a_client_is_entered_once_and_left(tmp_path: Path) -> None:
    events = []

    @asynccontextmanager
    async def pool() -> AsyncIterator[str]:
        events.append("entered")
        yield "a pool"
        events.append("left")

    async def ask(row: dict[str, Any], ctx: hr.RequestContext) -> dict[str, Any]:
        events.append(ctx.client)
        return {"double": row["n"]}

    with PipelineTest(declared(ask, client=pool), tmp_path) as test:
        test.feed("numbers", numbers(2))
        test.settle()
        assert events[:4] == ["entered", "a pool", "a pool", "left"]


def test_a_client_that_cannot_be_opened_ends_the_run(tmp_path: Path) -> None:
    class Broken:
        async def __aenter__(self) -> None:
            raise OSError("no route")

        async def __aexit__(self, *_: object) -> None: ...

    with PipelineTest(declared(plain, client=Broken), tmp_path) as test:
        test.feed("numbers", numbers(1))
        with pytest.raises(ConfigurationError, match="client of the step 'doubled'.*no route"):
            test.settle()


# Failures


def test_every_row_has_one_fate_at_a_server_that_fails_stalls_and_answers_twice(
    tmp_path: Path,
) -> None:
    with AnswerServer(tmp_path / "server", fail=0.2, stall=0.05, twice=0.2) as server:
        pipeline = declared(asking(server.port), timeout="300 milliseconds", retries=2)
        with PipelineTest(pipeline, tmp_path) as test:
            test.feed("numbers", numbers(300))
            test.settle()
            check_fates(test, 300)
            asked = server.asked()
            assert len(asked) == 300  # one key for each row, whatever the number of tries
            assert max(asked.values()) <= 3
            test.restart()
            test.settle()
            assert server.asked() == asked


def check_fates(test: PipelineTest, count: int) -> None:
    """Every row has an answer or a dead letter, and not both."""
    answered = [n for n, _ in values(test)]
    dead = []
    if "doubled.dead" in test.log.topics():
        letters = read_dead_letters(test.log, "doubled")
        dead = [int(letter["row"].split('"n":')[1].split(",")[0]) for letter in letters]
        assert all(letter["place"] == "call numbers.doubled" for letter in letters)
    assert sorted(answered + dead) == list(range(count))


def test_dead_letters_are_asked_about_again(tmp_path: Path) -> None:
    is_broken = True

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        if is_broken and row["n"] == 1:
            raise CallRefused("odd")
        return {"double": 2 * row["n"]}

    with PipelineTest(declared(ask), tmp_path) as test:
        test.feed("numbers", numbers(3))
        test.settle()
        is_broken = False
        assert replay(test.log, "doubled").replayed == 1
        assert replay(test.log, "doubled").replayed == 0
        test.settle()
        assert values(test) == [(0, 0), (1, 2), (2, 4)]


def test_a_server_that_is_away_and_comes_back_costs_no_row(tmp_path: Path) -> None:
    server = AnswerServer(tmp_path / "server", delay_s=0.005)
    server.start()
    try:
        pipeline = declared(asking(server.port), retries=1_000, concurrency=5)
        with PipelineTest(pipeline, tmp_path) as test:
            test.feed("numbers", numbers(200))
            settled = threading.Thread(target=test.settle)
            settled.start()
            wait_until(lambda: len(server.asked()) > 20)
            server.kill()
            assert test._calls is not None
            (caller,) = test._calls.callers.values()
            wait_until(lambda: caller.status.failed > 0)
            server.start()
            settled.join()
            assert values(test) == [(n, 2 * n) for n in range(200)]
    finally:
        server.kill()


def test_the_circuit_breaker_pauses_calls_to_a_dead_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CircuitBreaker, "OPEN_BACKOFF", Backoff(first_s=600, longest_s=600))
    tries = 0

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        nonlocal tries
        tries += 1
        raise OSError("no route")

    with PipelineTest(declared(ask, concurrency=3, retries=100), tmp_path) as test:
        test.feed("numbers", numbers(50))
        test.cut()
        test.step()
        assert test._calls is not None
        (caller,) = test._calls.callers.values()
        stop = threading.Event()
        thread = threading.Thread(target=caller.run, args=(stop,))
        thread.start()
        wait_until(lambda: caller.status.is_breaker_open)
        stop.set()
        thread.join()
        assert 8 <= tries <= 8 + 3
        assert "paused by its circuit breaker" in str(caller.status)
        assert "OSError: no route" in str(caller.status)


@pytest.mark.parametrize("ordered", [False, True])
def test_answers_that_do_not_fit_become_dead_letters(tmp_path: Path, ordered: bool) -> None:
    wrong: list[Any] = [
        {"double": "many"},
        {"twice": 4},
        {},
        None,
        {"double": 2**70},
        {"double": 4, "more": 5},
        {"double": 1},
    ]

    async def ask(row: dict[str, Any]) -> Any:
        return wrong[row["n"]]

    with PipelineTest(declared(ask, retries=1, ordered=ordered), tmp_path) as test:
        test.feed("numbers", numbers(len(wrong)))
        test.settle()
        reasons = sorted(letter["reason"] for letter in read_dead_letters(test.log, "doubled"))
        assert [reason.partition("the last: ")[2] for reason in reasons] == [
            "'double' does not fit: 'many' is a str, not an int",
            "'double' does not fit: Python int too large to convert to C long",
            "it returned 'more', which the schema does not have",
            "it returned 'twice', which the schema does not have",
            "it returned a NoneType, not a dictionary",
            "it returned no 'double'",
        ]
        assert len(reasons) == 6
        assert values(test) == [(6, 1)]


def test_a_row_without_an_answer_can_have_null(tmp_path: Path) -> None:
    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 1:
            raise ValueError("odd")
        return {"double": 2 * row["n"]}

    pipeline = declared(ask, errors="null", retries=0, schema="double BIGINT NOT NULL")
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("numbers", numbers(3))
        test.settle()
        rows = {row["n"]: row["double"] for row in test.log.read("answered").to_pylist()}
        assert rows == {0: 0, 1: None, 2: 4}
        assert "doubled.dead" not in test.log.topics()


def test_a_run_that_stops_at_a_failure_loses_nothing(tmp_path: Path) -> None:
    is_broken = True

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        if is_broken and row["n"] == 1:
            raise ValueError("odd")
        return {"double": 2 * row["n"]}

    with PipelineTest(declared(ask, errors="stop", retries=0), tmp_path) as test:
        test.feed("numbers", numbers(3))
        with pytest.raises(CallFailed, match="'doubled' has no answer for the row {'n': 1.*odd"):
            test.settle()
        is_broken = False
        test.restart()
        test.settle()
        assert values(test) == [(0, 0), (1, 2), (2, 4)]


def test_a_call_that_ignores_its_cancellation_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_module, "GRACE_S", 0.1)

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        while row["n"] == 1:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        return {"double": 2 * row["n"]}

    pipeline = declared(ask, timeout="50 milliseconds", retries=0, concurrency=1)
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("numbers", numbers(3))
        test.settle()
        assert values(test) == [(0, 0), (2, 4)]
        (letter,) = read_dead_letters(test.log, "doubled")
        assert "no answer within 0.05 s, nor an end after it" in letter["reason"]


def test_a_function_that_holds_the_event_loop_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_module, "MAX_BLOCKED_S", 0.1)
    blocked, release = threading.Event(), threading.Event()

    async def ask(row: dict[str, Any]) -> dict[str, Any]:
        blocked.set()
        release.wait(30)
        return {"double": 2 * row["n"]}

    with PipelineTest(declared(ask, timeout="50 milliseconds"), tmp_path) as test:
        test.feed("numbers", numbers(1))
        test.cut()
        test.step()
        assert test._calls is not None
        calls = test._calls
        (caller,) = calls.callers.values()
        stop = threading.Event()
        thread = threading.Thread(target=caller.run, args=(stop,))
        thread.start()
        try:
            blocked.wait(30)
            wait_until(lambda: caller.blocked_s > 0.2)
            with pytest.raises(CallFailed, match=r"(?s)held the event loop.*asyncio.to_thread"):
                calls.check()
        finally:
            stop.set()
            release.set()
            thread.join()


def test_the_rows_of_a_failed_batch_have_a_last_try_each(tmp_path: Path) -> None:
    sizes = []

    async def ask(rows: Rows, ctx: hr.RequestContext) -> Rows:
        sizes.append(len(rows))
        assert len(ctx.idempotency_keys) == len(rows)
        if any(row["n"] == 3 for row in rows):
            raise ValueError("three")
        return [{"double": 2 * row["n"]} for row in rows]

    with PipelineTest(declared(ask, batch=10, retries=1), tmp_path) as test:
        test.feed("numbers", numbers(10))
        test.settle()
        assert len(values(test)) == 9
        assert sizes == [10, 10, *[1] * 10]


def test_an_older_caller_is_fenced(tmp_path: Path) -> None:
    with PipelineTest(declared(Doubler()), tmp_path) as test:
        assert test._calls is not None
        (older,) = test._calls.callers.values()
        test.feed("numbers", numbers(2))
        test.cut()
        test.step()
        newer = Caller.open(test.log, older.call)
        with pytest.raises(FencedError):
            older.run(threading.Event(), until_quiet=True)
        newer.run(threading.Event(), until_quiet=True)
        recorded = test.log.read("__calls.numbers.doubled").to_pylist()
        assert sorted(row["n"] for row in recorded if row["n"] is not None) == [0, 1]


def test_a_commit_that_failed_with_an_error_yet_succeeded_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Doubler()
    with PipelineTest(declared(asked), tmp_path) as test:
        test.feed("numbers", numbers(5))
        test.cut()
        test.step()
        assert test._calls is not None
        (caller,) = test._calls.callers.values()
        kind: Any = type(caller.recorder._transaction)
        commit, failures = kind.commit, iter([True, False, True])

        def failing(tx: Any) -> Any:
            result = commit(tx)
            if tx.id == caller.call.owner and next(failures, False):
                raise hr.errors.RetryError("The outcome is not known.", fix="look.")
            return result

        monkeypatch.setattr(kind, "commit", failing)
        test.settle()
        assert values(test) == [(n, 2 * n) for n in range(5)]
        assert sorted(asked.asked) == list(range(5))


# Declarations


async def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {"double": row["n"]}


def blocking(row: dict[str, Any]) -> dict[str, Any]:
    return {"double": row["n"]}


LOCK = threading.Lock()


async def with_a_lock(row: dict[str, Any]) -> dict[str, Any]:
    with LOCK:
        return {"double": row["n"]}


@pytest.mark.parametrize(
    ("function", "settings", "error", "text"),
    [
        (blocking, {}, PlanError, "'doubled'|doubled was given a function that is not async"),
        (3, {}, PlanError, "was given a int"),
        (with_a_lock, {"version": None}, NoFingerprint, "LOCK"),
        (plain, {"concurrency": 0}, PlanError, "concurrency=0"),
        (plain, {"retries": -1}, PlanError, "retries=-1"),
        (plain, {"batch": 0}, PlanError, "batch=0"),
        (plain, {"timeout": "0 seconds"}, PlanError, "timeout of the step doubled"),
        (plain, {"max_per_second": 0}, PlanError, "max_per_second=0"),
        (plain, {"errors": "ignore"}, PlanError, "errors='ignore'"),
        (plain, {"arguments": "nn"}, UnknownColumn, "no column 'nn'"),
        (plain, {"schema": "n BIGINT"}, PlanError, "the column 'n' twice"),
        (plain, {"schema": "_call STRING"}, PlanError, "'_call', a name that recorded answers"),
    ],
)
def test_bad_declarations(function: Any, settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        declared(function, **settings)


def test_two_calls_need_two_names() -> None:
    pipeline = hr.Pipeline("numbers")
    rows = pipeline.topic("numbers", schema="n BIGINT")
    rows.call(plain, "double BIGINT")
    with pytest.raises(DuplicateStep, match="Two calls have the name 'plain'"):
        rows.call(plain, "double BIGINT")


def test_a_call_needs_another_name_than_the_topics() -> None:
    rows = hr.Pipeline("numbers").topic("numbers", schema="n BIGINT")
    with pytest.raises(DuplicateStep, match="the name of an input topic"):
        rows.call(plain, "double BIGINT", name="numbers")


def test_a_lambda_needs_a_name() -> None:
    rows = hr.Pipeline("numbers").topic("numbers", schema="n BIGINT")
    with pytest.raises(PlanError, match="a lambda, which has no name"):
        rows.call(lambda _row: plain({"n": 0}), "double BIGINT")


def test_tables_are_refused() -> None:
    table = hr.Pipeline("numbers").table("numbers", schema="n BIGINT", key="n")
    with pytest.raises(StreamOnly, match="call is for streams"):
        table.call(plain, "double BIGINT")


def test_rows_without_event_time_need_no_progress(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("numbers")
    rows = pipeline.topic("numbers", schema="n BIGINT")
    pipeline.write("answered", rows.call(plain, "double BIGINT"), partitions=1)
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("numbers", [{"n": n} for n in range(4)])
        test.settle()
        assert values(test) == [(n, n) for n in range(4)]
        recorded = test.log.read("__calls.numbers.plain").to_table()
        assert recorded.num_rows == 4
        assert "_complete_to" not in recorded.column_names


@pytest.mark.parametrize("partitions", [1, 3])
def test_partitions_of_a_call(tmp_path: Path, partitions: int) -> None:
    pipeline = declared(Doubler(), partitions=partitions, key="n", ordered=True)
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("numbers", numbers(130))
        test.settle()
        assert values(test) == [(n, 2 * n) for n in range(130)]
        assert [row["rows"] for row in test.view("windows")] == [60, 60]


@pytest.fixture(autouse=True)
def no_pending_threads() -> Iterator[None]:
    """No caller outlives its test."""
    before = threading.active_count()
    yield
    wait_until(lambda: threading.active_count() <= before)
