"""`headrace demo` as a newcomer starts it: it ends well, also by Ctrl-C, and says what is missing.
What its summary notices is in tests/demo.
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


@pytest.mark.spark
def test_a_bounded_demo_ends_with_a_summary_in_which_every_number_is_right(tmp_path: Path) -> None:
    require_java()
    with taken(8765):
        done = subprocess.run(
            [*DEMO, "--for", "4s", "--keep", tmp_path / "shop"],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            env=_environment(tmp_path),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout
    assert "(port 8765 is taken)" in done.stdout
    came_in, count_text = re.findall(
        r"exactly once: ([\d,]+) orders in, ([\d,]+) counted", done.stdout
    )[0]
    assert came_in == count_text
    assert int(came_in.replace(",", "")) > 1000
    assert re.search(r"numbers move: [\d,]+ orders are counted", done.stdout)
    assert re.search(r"All 15 as it should be; numbers moved after [\d.]+ (s|min)", done.stdout)
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
    ("arguments", "said"),
    [
        (["--for", "2 hours"], "from 1 second to 1 hour"),
        (["--for", "soon"], "--for"),
        (["--keep", "."], "is not empty"),
    ],
    ids=["too long", "no duration", "a directory in use"],
)
def test_what_it_cannot_do_it_says(tmp_path: Path, arguments: list[str], said: str) -> None:
    require_java()
    (tmp_path / "something").touch()
    done = subprocess.run(
        [*DEMO, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=_environment(tmp_path),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert said in done.stderr


def _environment(tmp_path: Path) -> dict[str, str]:
    """Without a display, and with temporary files where the test can see them."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in {"DISPLAY", "WAYLAND_DISPLAY", "DEMO_SECONDS"}
    } | {"TMPDIR": str(tmp_path)}


def refused(tmp_path: Path, *options: str) -> str:
    done = subprocess.run(
        [*DEMO, "--port", "0", *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=_environment(tmp_path),
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    require_java()
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert "cannot be the demo's directory: File exists" in refused(
        tmp_path, "--keep", str(tmp_path / "file")
    )
    assert "is not empty" in refused(tmp_path, "--keep", str(tmp_path / "full"))
    assert "not from 1 second to 1 hour" in refused(tmp_path, "--for", "7200")


def test_it_does_not_mix_with_a_shop_in_earnest(tmp_path: Path) -> None:
    require_java()
    address = f"file:{tmp_path / 'log'}"
    with hr.open_log(address) as log:
        log.create_topic("orders", "order_id BIGINT")
    assert "topics of the demo's names already: orders" in refused(tmp_path, "--log", address)
