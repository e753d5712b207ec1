"""`headrace serve`: says where it listens, serves, and ends at Ctrl-C; what it refuses."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from headrace.views.store import ViewStore
from tests.cli.conftest import Run
from tests.views.store_contract import COUNTS, inserts


def test_views_are_served_until_a_signal(tmp_path: Path) -> None:
    with ViewStore.open(tmp_path / "views.db") as store:
        store.declare("counts", COUNTS, ("k",))
        store.commit(1, 1, {"counts": inserts(1, (1, 10))})
        command = [sys.executable, "-m", "headrace.cli", "serve", str(tmp_path), "--port", "0"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            address = process.stdout.readline().partition(" at ")[2].split()[0].rstrip(".")
            with urllib.request.urlopen(f"{address}/views/counts?key=1", timeout=20) as answer:
                assert json.load(answer)["row"] == {"k": 1, "n": 10}
            process.send_signal(signal.SIGINT)
            _, complaints = process.communicate(timeout=30)
        assert (process.returncode, complaints) == (0, "Stopping.\n")


def test_a_directory_without_views_is_refused(run: Run, tmp_path: Path) -> None:
    refused = run("serve", tmp_path / "nosuch.state", "--port", 0, code=1).err
    assert refused == run("view", "list", "--state", tmp_path / "nosuch.state", code=1).err
    assert "There are no views in" in refused


def test_a_pipeline_s_file_is_no_state_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "shop.py").touch()
    for command in (
        ("serve", tmp_path / "shop.py"),
        ("view", "list", "--state", tmp_path / "shop.py"),
    ):
        assert "name its state directory" in run(*command, code=1).err


def test_arguments_that_are_refused(run: Run, tmp_path: Path) -> None:
    ViewStore.open(tmp_path / "views.db").close()
    assert "--token-file" in run("serve", tmp_path, "--host", "0.0.0.0", "--port", 0, code=1).err
    short = tmp_path / "token"
    short.write_text("short")
    assert "16 or more" in run("serve", tmp_path, "--token-file", short, code=1).err
    assert (
        "There is no log in"
        in run("serve", tmp_path, "--log", f"file:{tmp_path / 'none'}", "--port", 0, code=1).err
    )
