"""examples/shop.py is short, shows every family, and is what an installed `headrace demo` runs."""

import subprocess
import sys
import tomllib
from pathlib import Path

from shop_demo.showing import shop_file

from headrace.pipeline.loader import load_pipeline
from headrace.plan.join_steps import JoinStep

ROOT = Path(__file__).parents[2]


def test_the_pipeline_is_one_short_file() -> None:
    assert shop_file() == ROOT / "examples" / "shop.py"
    assert len(shop_file().read_text().splitlines()) < 250


def test_the_pipeline_shows_every_kind_of_step() -> None:
    shop = load_pipeline(shop_file())
    plan = shop.plan()
    operations = {step.operation for step in plan.steps()}
    assert operations >= {"window", "join", "match", "search", "top", "aggregate"}
    joins = [
        (step.is_table, step.inputs[1].is_table, "as of" in step.summary())
        for step in plan.steps()
        if isinstance(step, JoinStep)
    ]
    assert sorted(joins) == [
        (False, False, False),
        (False, True, False),
        (False, True, True),
        (True, True, False),
    ]
    assert {step.captured_by for step in plan.inputs if step.captured_by} == {"shop"}
    assert {*shop.alerts} == {"fraud"}
    assert any(step.device_time is not None for step in plan.inputs)


def test_run_alone_it_prints_its_plan() -> None:
    done = subprocess.run(
        [sys.executable, shop_file()], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("pipeline shop\n├─ view revenue\n")


def test_the_demo_is_part_of_the_wheel() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]["force-include"]
    assert included == {
        name: f"headrace/{name}"
        for name in (
            "examples/shop.py",
            *(
                f"examples/shop_demo/{part}.py"
                for part in ("__init__", "checks", "showing", "world")
            ),
        )
    }
