"""What a notebook shows of a pipeline and its views. The example notebook is executed whole, with
Spark.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import ConfigurationError
from headrace.pipeline.view import MAX_ROWS, View
from headrace.testing.pipelines import PipelineTest
from tests.java import require_java

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def shop() -> tuple[hr.Pipeline, View]:
    pipeline = hr.Pipeline("shop")
    orders = pipeline.topic("orders", schema="region STRING, amount DOUBLE")
    return pipeline, pipeline.view(
        "regions", orders.group_by("region").aggregate(revenue=hr.agg.sum("amount"))
    )


def test_a_pipeline_shows_its_graph() -> None:
    pipeline, _ = shop()
    shown = pipeline._repr_mimebundle_(include=None, exclude=None)
    assert shown["text/plain"].startswith("pipeline shop\n└─ view regions")
    assert "<svg" in shown["text/html"]
    assert "regions.aggregate" in shown["text/html"]


def test_a_pipeline_without_outputs_says_what_it_is() -> None:
    assert hr.Pipeline("empty")._repr_mimebundle_() == {
        "text/plain": "<Pipeline 'empty': 0 inputs, 0 outputs>"
    }


def test_a_view_that_has_no_rows_yet_says_what_to_do(tmp_path: Path) -> None:
    _, view = shop()
    waiting = view.at(tmp_path)
    assert "run the pipeline first" in waiting._repr_mimebundle_()["text/html"]
    with pytest.raises(ConfigurationError, match="has no rows yet"):
        waiting.to_pylist()


def test_a_view_shows_its_rows_as_of_a_tick(tmp_path: Path) -> None:
    pipeline, view = shop()
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("orders", [{"region": "<north>", "amount": 2.5}, {"region": None, "amount": 1.0}])
        test.settle()
        there = view.at(test.state)
        shown = there._repr_mimebundle_()
        rows = [{"region": None, "revenue": 1.0}, {"region": "<north>", "revenue": 2.5}]
        assert (there.tick, sorted(there.to_pylist(), key=lambda row: row["revenue"])) == (1, rows)
        assert sorted(there.to_pandas()["revenue"]) == [1.0, 2.5]
    assert shown["text/plain"].splitlines()[0] == "regions at tick 1: 2 rows"
    assert "<td>&lt;north&gt;</td><td>2.5</td>" in shown["text/html"]


def test_of_many_rows_the_first_are_shown(tmp_path: Path) -> None:
    pipeline, view = shop()
    with PipelineTest(pipeline, tmp_path) as test:
        test.feed("orders", [{"region": f"r{n:03}", "amount": 1.0} for n in range(MAX_ROWS + 5)])
        test.settle()
        shown = view.at(test.state)._repr_mimebundle_()["text/html"]
    assert shown.count("<tr>") == MAX_ROWS + 1
    assert "and 5 more" in shown


@pytest.mark.spark
def test_the_example_runs_and_its_table_follows(tmp_path: Path) -> None:
    require_java()
    assert all(not cell.get("outputs") for cell in cells(NOTEBOOK)), (
        "outputs are not kept in the repository"
    )
    copy = Path(shutil.copy(NOTEBOOK, tmp_path))
    execute = [
        sys.executable,
        "-c",
        "from nbclient.cli import main; main()",
        str(copy),
        "--inplace",
        "--timeout=300",
        "--startup_timeout=300",
    ]
    done = subprocess.run(
        execute, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    graph, table, followed = filter(None, map(_html, cells(copy)))
    assert "<svg" in graph
    assert "at tick 1: 2 rows" in table
    assert "<td>north</td><td>3</td>" in followed


def cells(notebook: Path) -> list[Any]:
    found: list[Any] = json.loads(notebook.read_text())["cells"]
    return found


def _html(cell: Any) -> str:
    return "".join(
        "".join(output.get("data", {}).get("text/html", "")) for output in cell.get("outputs", ())
    )
