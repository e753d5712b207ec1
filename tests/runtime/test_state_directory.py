"""A pipeline goes on with the state directory that its ledger speaks of, wherever that was moved,
and with no other. And where state is kept by default.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headrace as hr
from headrace.errors import StateElsewhere
from headrace.pipeline.loader import load_pipeline
from headrace.runtime.run import state_of
from headrace.runtime.state_directory import StateDirectory
from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark


def shop() -> hr.Pipeline:
    pipeline = hr.Pipeline("shop")
    totals = pipeline.topic("orders", schema="k BIGINT").group_by("k").aggregate(n=hr.agg.count())
    pipeline.view("shown", totals)
    pipeline.write("told", totals)
    return pipeline


def feed(test: PipelineTest) -> None:
    test.feed("orders", [{"k": 0}])
    test.settle()


def test_another_directory_is_refused_and_says_which_it_was(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        feed(test)
        test.state = tmp_path / "elsewhere"
        with pytest.raises(
            StateElsewhere, match=rf"not in .*elsewhere(.|\n)*--state {tmp_path / 'state'}"
        ):
            test.restart()
        test.state = tmp_path / "state"
        test.restart()
        feed(test)
        assert test.view("shown") == [{"k": 0, "n": 2}]


def test_a_directory_that_was_moved_is_the_same(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        feed(test)
        test.runner.close()
        test.state = (tmp_path / "state").rename(tmp_path / "moved")
        test.restart()
        feed(test)
        assert test.view("shown") == [{"k": 0, "n": 2}]


def test_the_state_of_another_log_is_refused(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        feed(test)
    with pytest.raises(StateElsewhere, match="on another log"):
        PipelineTest(shop(), tmp_path, log=f"file:{tmp_path / 'other'}")


def test_before_the_first_batch_the_directory_may_change(tmp_path: Path) -> None:
    with PipelineTest(shop(), tmp_path) as test:
        test.state = tmp_path / "elsewhere"
        test.restart()
        feed(test)
        assert test.view("shown") == [{"k": 0, "n": 1}]


def test_what_a_machine_has_at_hand_is_on_a_disk_of_its_own(tmp_path: Path) -> None:
    spark: Any = PlainSpark()
    cluster: Any = SimpleNamespace(conf={"spark.master": "spark://somewhere:7077"})
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        home = StateDirectory.find(log, "shop", tmp_path / "state")
        assert home.local(spark, None) == tmp_path / "state" / "local"
        assert home.local(cluster, None) == Path(tempfile.gettempdir()) / f"headrace-{home.id}"
        assert home.local(cluster, tmp_path / "disk") == tmp_path / "disk" / home.id


def test_state_is_beside_the_file_whoever_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    file = folder / "shop.py"
    said = (
        "import headrace as hr\nfrom headrace.runtime.run import state_of\nshop ="
        " hr.Pipeline('shop')\nprint(state_of(shop, None))\n"
    )
    file.write_text(said)
    monkeypatch.chdir(tmp_path)
    assert state_of(load_pipeline(file), None) == folder / "shop.state"
    ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    assert Path(ran.stdout.strip()) == folder / "shop.state"
    names: dict[str, Any] = {}
    exec("import headrace as hr\nshop = hr.Pipeline('shop')", names)
    assert state_of(names["shop"], None) == tmp_path / "shop.state"
    assert state_of(names["shop"], "there") == Path("there")
