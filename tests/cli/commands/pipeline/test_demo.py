"""`headrace demo` as a newcomer starts it: it ends well, also by Ctrl-C, and says what is missing.
What its summary checks is in tests/demo.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import headrace as hr
from tests.cli.conftest import Run
from tests.java import require_java

DEMO = [sys.executable, "-m", "headrace.cli", "demo"]


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Somebody listens there; if it is not this test, it is somebody else."""
    with socket.socket() as listening:
        with suppress(OSError):
            listening.bind(("127.0.0.1", port))
            listening.listen()
        yield


@pytest.mark.usefixtures("spark")
def test_a_bounded_demo_ends_with_a_summary_in_which_every_number_is_right(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_HOME", "")  # which the demo sets in its own process
    with taken(8765):
        summary = run("demo", "--for", "4s", "--keep", tmp_path / "shop").out
    assert "BAD" not in summary
    assert "(port 8765 is taken)" in summary
    came_in, count_text = re.findall(
        r"exactly once: ([\d,]+) orders in, ([\d,]+) counted", summary
    )[0]
    assert came_in == count_text
    assert int(came_in.replace(",", "")) > 1000
    assert re.search(r"numbers move: [\d,]+ orders are counted", summary)
    assert re.search(r"All 15 as it should be; numbers moved after [\d.]+ (s|min)", summary)
    assert (tmp_path / "shop" / "shop.db").exists()


@pytest.mark.spark
@pytest.mark.parametrize(
    "moment", ["the shop is open", pytest.param("numbers move", marks=pytest.mark.slow)]
)
def test_ctrl_c_ends_it_cleanly_at_any_moment_and_leaves_nothing(
    tmp_path: Path, moment: str
) -> None:
    require_java()
    with subprocess.Popen(
        [*DEMO, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(tmp_path),
    ) as running:
        assert running.stdout is not None
        shown = []
        for line in running.stdout:
            shown.append(line)
            if moment in line:
                running.send_signal(signal.SIGINT)
                break
        rest, complaints = running.communicate(timeout=300)
    assert (running.returncode, rest.splitlines()[-1:]) == (0, ["The shop is closed."]), (
        "".join(shown),
        rest,
        complaints,
    )
    assert "Traceback" not in complaints
    assert [path.name for path in tmp_path.glob("headrace-demo-*")] == []


def test_without_java_it_says_what_to_install(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in _environment(tmp_path).items() if name != "JAVA_HOME"
    } | {"PATH": str(tmp_path)}
    done = subprocess.run(
        DEMO, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 1
    assert "Spark needs Java" in done.stderr
    assert "apt-get install default-jre-headless" in done.stderr
    assert "brew install openjdk" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--for", "2 hours"], "from 1 second to 1 hour"),
        (["--for", "7200"], "not from 1 second to 1 hour"),
        (["--for", "soon"], "--for"),
        (["--keep", "full"], "is not empty"),
        (["--keep", "file"], "cannot be the demo's directory: File exists"),
    ],
    ids=["too long", "too many seconds", "no duration", "a directory in use", "a file"],
)
def test_options_that_are_refused(
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    reason: str,
) -> None:
    require_java()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    refused = run("demo", "--port", "0", *arguments, code=1)
    assert reason in refused.err
    assert "Traceback" not in refused.err


def test_a_log_with_topics_of_the_same_names_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_java()
    address = f"file:{tmp_path / 'elsewhere'}"
    with hr.open_log(address) as log:
        log.create_topic("orders", "order_id BIGINT")
    monkeypatch.setenv("SHOP_HOME", "")  # which the demo sets in its own process
    refused = run("demo", "--port", "0", "--log", address, code=1)
    assert "topics of the demo's names already: orders" in refused.err


def _environment(tmp_path: Path) -> dict[str, str]:
    """Without a display, and with temporary files where the test can see them."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in {"DISPLAY", "WAYLAND_DISPLAY", "DEMO_SECONDS"}
    } | {"TMPDIR": str(tmp_path)}
