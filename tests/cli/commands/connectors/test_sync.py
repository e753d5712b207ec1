"""`headrace sync`: a topic into SQLite, compared, killed, and ended by SIGTERM."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace as hr
from tests.cli.conftest import Run
from tests.sinks.webhook_receiver import WebhookReceiver


@pytest.fixture
def accounts(log: hr.Log) -> str:
    log.create_table("accounts", "id BIGINT, name STRING", key="id")
    with log.producer("accounts") as producer:
        producer.upsert([{"id": number, "name": f"n{number}"} for number in range(100)])
    return "accounts"


def test_sync_and_check(run: Run, accounts: str, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    done = run(
        "sync",
        accounts,
        f"sqlite:{path}",
        "--table",
        "people",
        "--name",
        "copy",
        "--batch-rows",
        "30",
        "--until-caught-up",
    )
    assert "copy: ended cleanly; 100 rows" in done.out
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*), min(name) FROM people").fetchone() == (100, "n0")
    assert (
        "Equal: 100 rows, as of offset 100 of partition 0."
        in run("sync", accounts, f"sqlite:{path}", "--table", "people", "--check").out
    )

    with sqlite3.connect(path) as db:
        db.execute("UPDATE people SET name = 'else' WHERE id = 7")
        db.execute("DELETE FROM people WHERE id = 8")
        db.execute("INSERT INTO people VALUES (1000, 'more')")
    out = run("sync", accounts, f"sqlite:{path}", "--table", "people", "--check", code=5).out
    assert "id 7: name is else, in the log n7" in out
    assert "id 8: not in the target" in out
    assert "id 1,000: not in the log" in out
    assert "Different: 1 missing, 1 extra, 1 different, of 100 rows" in out
    (found,) = run(
        "sync", accounts, f"sqlite:{path}", "--table", "people", "--check", "--json", code=5
    ).lines
    assert found["counts"] == {"missing": 1, "extra": 1, "different": 1}


def test_partitioned_files(run: Run, accounts: str, tmp_path: Path) -> None:
    sink = f"parquet:{tmp_path / 'lake'}"
    run("sync", accounts, sink, "--partition-by", "name", "--until-caught-up")
    assert len(list((tmp_path / "lake").glob("name=n*/*.parquet"))) == 100
    done = run("sync", accounts, sink, "--partition-by", "name", "--check")
    assert "Equal: 100 rows" in done.out
    done = run("sync", accounts, "sqlite:x.db", "--partition-by", "name", code=1)
    assert "hr.sinks.sqlite has no setting 'partition_by'" in done.err


def test_a_sink_declared_in_a_file(run: Run, accounts: str, tmp_path: Path) -> None:
    file = tmp_path / "targets.py"
    file.write_text(
        f"import headrace as hr\nshop = hr.sinks.sqlite({str(tmp_path / 'x.db')!r}, name='shop')\n"
    )
    assert (
        "shop: ended cleanly; 100 rows"
        in run("sync", accounts, f"{file}:shop", "--until-caught-up").out
    )
    done = run("sync", accounts, f"{file}:shop", "--commit-interval", "1 s", "--until-caught-up")
    assert "shop: ended cleanly; 0 rows" in done.out
    done = run("sync", accounts, f"{file}:shop", "--partition-by", "name", code=1)
    assert "give partition_by=… where" in done.err
    assert (
        "did you mean 'shop'"
        in run("sync", accounts, f"{file}:shp", "--until-caught-up", code=1).err
    )


def test_arguments_that_are_refused(run: Run, accounts: str, tmp_path: Path) -> None:
    assert (
        "no topic 'acounts': did you mean 'accounts'"
        in run("sync", "acounts", f"sqlite:{tmp_path / 'x.db'}", "--until-caught-up", code=1).err
    )
    assert "is not a sink: did you mean 'sqlite'" in run("sync", accounts, "sqlit:x", code=1).err
    assert (
        "no table 'accounts'"
        in run("sync", accounts, f"sqlite:{tmp_path / 'x.db'}", "--no-create", code=1).err
    )


def test_rows_to_a_webhook(run: Run, accounts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = WebhookReceiver()
    to = f"webhook:{receiver.url}"
    assert (
        "HEADRACE_WEBHOOK_INTERNAL=127.0.0.1"
        in run("sync", accounts, to, "--until-caught-up", code=1).err
    )
    monkeypatch.setenv("HEADRACE_WEBHOOK_INTERNAL", "127.0.0.1")
    assert (
        "accounts.webhook: ended cleanly; 100 rows"
        in run("sync", accounts, to, "--until-caught-up").out
    )
    assert [entry["row"]["id"] for entry in receiver.rows] == list(range(100))
    assert "cannot be read back" in run("sync", accounts, to, "--check", code=1).err
    receiver.stop()


def started(address: str, path: Path, *options: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "sync",
        "accounts",
        f"sqlite:{path}",
        "--log",
        address,
        *options,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    )


def count(path: Path) -> int:
    try:
        db = sqlite3.connect(path)
        found = int(db.execute("SELECT count(*) FROM accounts").fetchone()[0])
        db.close()
        return found
    except sqlite3.OperationalError:
        return 0


def test_an_unreachable_server_ends_a_run_that_is_to_catch_up(
    run: Run, accounts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried for ever."""
    monkeypatch.setattr("headrace.sinks.sync.CATCH_UP_PATIENCE_S", 0.5)
    monkeypatch.setenv("HEADRACE_WEBHOOK_INTERNAL", "127.0.0.1")
    done = run("sync", accounts, "webhook:http://127.0.0.1:9/", "--until-caught-up", code=1)
    assert "cannot be connected to" in done.err
    assert "ended cleanly" not in done.out


@pytest.mark.process
def test_a_sync_that_could_do_nothing_does_not_end_cleanly(address: str, accounts: str) -> None:
    """Ended by SIGTERM while its receiver was away, it said that it had ended cleanly."""
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "sync",
        accounts,
        "webhook:http://127.0.0.1:9/",
    ]
    process = subprocess.Popen(
        [*command, "--log", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HEADRACE_WEBHOOK_INTERNAL": "127.0.0.1"},
    )
    assert process.stderr is not None
    assert "cannot be connected to" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert "stopped while it could not work; 0 rows" in out
    assert "cannot be connected to" in out
    assert process.returncode == 1


@pytest.mark.process
def test_killed_while_it_applies_and_ended_by_sigterm(
    run: Run, log: hr.Log, address: str, accounts: str, tmp_path: Path
) -> None:
    path = tmp_path / "shop.db"
    with log.producer(accounts) as producer:
        producer.upsert([{"id": number, "name": f"m{number}"} for number in range(300_000)])
    process = started(address, path)
    deadline = time.monotonic() + 60
    while count(path) == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert count(path) > 0
    run("sync", accounts, f"sqlite:{path}", "--check")

    process = started(address, path)
    while count(path) < 300_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    run("sync", accounts, f"sqlite:{path}", "--check")
