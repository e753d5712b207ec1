"""The installed command, as a shell sees it: exit codes, pipes, signals, and what it says when
something is wrong.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

import headrace as hr
from headrace.cli.output import (
    bytes_text,
    count_text,
    format_cell,
    make_table,
    seconds_text,
    to_json_value,
)
from tests.cli.conftest import Run

COMMAND = str(Path(sys.executable).with_name("headrace"))


def environment(address: str | None) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in {"HEADRACE_LOG", "COLUMNS"}
    }
    return kept | ({"HEADRACE_LOG": address} if address else {})


def shell(script: str, address: str | None) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which `headrace` is the installed command."""
    path = f"{Path(COMMAND).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        env=environment(address) | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version(run: Run) -> None:
    assert run("version").out == f"headrace {hr.__version__}\n"
    assert run("version", "--json").lines == [{"headrace": hr.__version__}]
    assert run("--version").out == f"headrace {hr.__version__}\n"


def test_help_names_the_environment_variable(run: Run) -> None:
    assert "HEADRACE_LOG" in run("topic", "list", "--help").out


def test_tables_show_times_short_and_numbers_on_the_right() -> None:
    assert format_cell(datetime(2026, 1, 31, 12, 0, 1, tzinfo=UTC)) == "2026-01-31 12:00:01Z"
    assert (
        format_cell(datetime(2026, 1, 31, 12, 0, 1, 500, tzinfo=UTC))
        == "2026-01-31 12:00:01.000500Z"
    )
    columns = make_table(
        ["n", "price", "yes", "text"], [[1, Decimal("1.50"), True, "a"], [None, None, None, None]]
    ).columns
    assert [column.justify for column in columns] == ["right", "right", "left", "left"]


def test_things_are_counted_in_words() -> None:
    assert [count_text(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]


def test_every_command_helps_with_an_example(run: Run) -> None:
    groups = {
        "": ["produce", "consume", "lag", "demo", "version"],
        "topic": ["create", "list", "show", "alter", "delete"],
        "group": ["list", "show", "reset"],
        "log": ["verify", "stats", "compact"],
        "queue": ["receive", "ack", "nack"],
        "dead": ["list", "show", "replay"],
    }
    for group, commands in groups.items():
        for command in commands:
            assert (
                f"Example: headrace {group} {command}".replace("  ", " ")
                in run(*filter(None, [group]), command, "--help").out
            )


def test_no_log_is_wrong_usage_and_says_how() -> None:
    done = shell("headrace topic list", None)
    assert done.returncode == 2
    assert "--log" in done.stderr
    assert "HEADRACE_LOG" in done.stderr
    assert done.stdout == ""


def test_the_log_can_be_named_before_or_behind_the_command(tmp_path: Path) -> None:
    there, elsewhere = f"file:{tmp_path}/a", f"file:{tmp_path}/b"
    script = (
        f"headrace topic create t --schema 'n INT' --log {there} && headrace --log {there} topic"
        f" list --json && headrace topic list --json --log {there}"
    )
    done = shell(script, elsewhere)
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()[1:]] == ["t", "t"]


def test_an_error_is_short_unless_debugging(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a log")
    short = shell("headrace topic list", f"file:{tmp_path}/file")
    assert short.returncode == 1
    assert short.stderr.startswith("Error: ")
    assert "Traceback" not in short.stderr
    assert "Traceback" in shell("headrace --debug topic list", f"file:{tmp_path}/file").stderr


def test_a_closed_pipe_ends_quietly(address: str, log: hr.Log) -> None:
    log.create_topic("t", "n BIGINT, s STRING")
    with log.producer("t") as producer:
        producer.append([{"n": n, "s": "x" * 100} for n in range(20_000)])
    done = shell("set -o pipefail; headrace consume t --json | head -n 1", address)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["n"] == 0


def test_rows_nobody_took_are_not_committed(address: str, log: hr.Log) -> None:
    log.create_topic("t", "n BIGINT, s STRING")
    with log.producer("t") as producer:
        for first in range(0, 20_000, 1_000):
            producer.append([{"n": n, "s": "x" * 100} for n in range(first, first + 1_000)])
    shell("headrace consume t --json --group g | head -n 1", address)
    assert log.committed("g").get("t", {}).get(0, 0) < 20_000


def start(address: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [COMMAND, *arguments],
        env=environment(address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_follow_shows_rows_as_they_come_and_ends_on_ctrl_c(address: str, log: hr.Log) -> None:
    log.create_topic("t", "n BIGINT")
    with (
        start(address, "consume", "t", "--follow", "--json") as reader,
        log.producer("t") as producer,
    ):
        assert reader.stdout is not None
        for n in range(3):
            producer.append({"n": n})
            assert json.loads(reader.stdout.readline())["n"] == n
        reader.send_signal(signal.SIGINT)
        out, err = reader.communicate(timeout=30)
    assert (reader.returncode, out, err) == (130, "", "")


def test_following_from_an_offset_past_the_end_waited_and_said_nothing(
    address: str, log: hr.Log
) -> None:
    log.create_topic("t", "n BIGINT")
    with (
        start(address, "consume", "t", "--follow", "--from", "1", "--json") as reader,
        log.producer("t") as producer,
    ):
        assert reader.stderr is not None
        assert reader.stdout is not None
        assert reader.stderr.readline() == (
            "Waiting for offset 1 of t: partition 0 has the offsets 0 to 0.\n"
        )
        producer.append([{"n": 0}, {"n": 1}])
        assert json.loads(reader.stdout.readline())["n"] == 1
        reader.send_signal(signal.SIGINT)
        reader.communicate(timeout=30)


def test_produce_does_not_hold_back_rows_while_its_sender_pauses(address: str, log: hr.Log) -> None:
    log.create_topic("t", "n BIGINT")
    with start(address, "produce", "t") as writer:
        assert writer.stdin is not None
        for n in range(2):
            writer.stdin.write(json.dumps({"n": n}) + "\n")
            writer.stdin.flush()
            deadline = time.monotonic() + 30
            while log.end_offsets("t")[0] <= n and time.monotonic() < deadline:
                time.sleep(0.02)
            assert log.end_offsets("t") == {0: n + 1}
        out, err = writer.communicate(timeout=30)
    assert (writer.returncode, err) == (0, "")
    assert "Stored 2 rows" in out


def test_a_person_who_waits_sees_progress(address: str, log: hr.Log, tmp_path: Path) -> None:
    log.create_topic("t", "n BIGINT")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(1000)))
    terminal, its_end = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        done = subprocess.run(
            [COMMAND, "produce", "t", str(file)],
            env=environment(address),
            stdout=subprocess.PIPE,
            stderr=its_end,
            timeout=60,
            check=True,
        )
        os.close(its_end)
        shown = screen.read(100_000)
    assert done.stdout == b"Stored 1,000 rows in t.\n"
    assert str(file.stat().st_size).encode() in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (4 * 86400 + 3 * 3600, "4 d 3 h")],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (64_000_000, "64.0 MB"), (3 * 10**15, "3000.0 TB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_json_has_no_numbers_that_are_none() -> None:
    assert to_json_value([float("nan"), float("inf"), -float("inf"), 1.5, True]) == [
        "NaN",
        "Infinity",
        "-Infinity",
        1.5,
        True,
    ]


def test_a_pipelines_file_is_not_its_state(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "status", "shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "No pipeline has run with the state directory shop.py" in done.stderr
