"""The benchmarks' arithmetic and runner: ratios read the same way for both kinds of unit, sides
alternate, and a missed bar fails the run.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import report

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ours", "theirs", "better", "ratio"),
    [(200, 100, "higher", 2.0), (50, 100, "lower", 2.0), (400, 100, "lower", 0.25)],
)
def test_ratio_says_how_many_times_as_good_we_are(
    ours: float, theirs: float, better: report.Better, ratio: float
) -> None:
    assert report.ratio_of(ours, theirs, better) == ratio


def test_paired_alternates_sides_and_takes_medians() -> None:
    order: list[str] = []
    ours, theirs = iter([99.0, 1.0, 3.0, 2.0]), iter([99.0, 30.0, 10.0, 20.0])

    def side(name: str, figures: Iterator[float]) -> float:
        order.append(name)
        return float(next(figures))

    medians = report.paired(
        lambda: side("o", ours), lambda: side("t", theirs), repeats=3, warmups=1
    )
    assert medians == (2.0, 20.0)
    assert "".join(order) == "ot" + "ot" + "to" + "ot"


def test_compare_judges_against_the_bar() -> None:
    missed = report.compare(
        "log",
        "x",
        "rows/s",
        ours=lambda: 150,
        peer="p",
        theirs=lambda: 100,
        bar=2,
        better="higher",
        repeats=1,
    )
    met = report.within("log", "lag", "ms", ours=lambda: 20, limit=50, repeats=3)
    assert (missed.ratio, missed.ok) == (1.5, False)
    assert (met.ratio, met.ok, met.theirs) == (2.5, True, 50)


def run_runner(tmp_path: Path, only: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the runner with made-up benchmarks."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    for file in ("__init__.py", "__main__.py", "report.py"):
        (package / file).write_text((ROOT / "benchmarks" / file).read_text())
    for name, body in modules.items():
        (package / f"bench_{name}.py").write_text(
            "import os\nfrom benchmarks.report import Unavailable, within\n\ndef results():\n"
            + body
        )
    command = [sys.executable, "-m", "benchmarks", *([only] if only else [])]
    return subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )


def line(ours: int) -> str:
    return (
        "    os.system('echo chatter'); print('chatter')\n    yield within('b', 'w', 'ms',"
        f" ours=lambda: {ours}, limit=50, params={{'n': 1}})\n"
    )


def test_standard_output_holds_results_only(tmp_path: Path) -> None:
    done = run_runner(tmp_path, "log", log_append=line(10), log_read=line(25), other=line(99))
    fields = ["bench", "what", "unit", "ours", "peer", "theirs", "ratio", "bar", "ok", "params"]
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert [list(each) for each in lines] == [fields, fields]
    assert [each["ours"] for each in lines] == [10, 25]
    assert done.returncode == 0
    assert "chatter" in done.stderr


def test_a_missed_bar_fails_the_run(tmp_path: Path) -> None:
    done = run_runner(tmp_path, "", slow=line(99), fast=line(1))
    assert done.returncode == 1
    assert sorted(json.loads(text)["ok"] for text in done.stdout.splitlines()) == [False, True]


def test_a_crash_is_shown_and_the_others_still_run(tmp_path: Path) -> None:
    done = run_runner(tmp_path, "", a=f"{line(1)}    raise RuntimeError('boom')\n", b=line(2))
    assert done.returncode == 1
    assert "boom" in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_a_missing_peer_is_skipped_with_its_reason(tmp_path: Path) -> None:
    done = run_runner(tmp_path, "", a="    raise Unavailable('no broker here')\n    yield\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no broker here" in done.stderr


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    done = run_runner(tmp_path, "lag", log=line(1))
    assert done.returncode == 2
    assert "log" in done.stderr
