"""Pipeline files: found, chosen, and explained when they cannot be used."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import BadPipelineFile, UnknownColumn
from headrace.pipeline.loader import load_pipeline

ONE = """
import headrace as hr
shop = hr.Pipeline("shop", log="file:data")
orders = shop.topic("orders", schema="amount DOUBLE")
shop.write("paid", orders.where("amount > 0"))
"""


def written(folder: Path, text: str, name: str = "shop.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_one_pipeline_of_a_file(tmp_path: Path) -> None:
    pipeline = load_pipeline(written(tmp_path, ONE))
    assert (pipeline.name, pipeline.log) == ("shop", "file:data")
    assert pipeline.plan() == load_pipeline(str(tmp_path / "shop.py"), "shop").plan()


def test_the_same_pipeline_under_two_names_is_one(tmp_path: Path) -> None:
    assert load_pipeline(written(tmp_path, ONE + "alias = shop\n")).name == "shop"


def test_one_of_several_pipelines_is_chosen_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, ONE + 'other = hr.Pipeline("other")\n')
    assert load_pipeline(path, "other").name == "other"
    with pytest.raises(
        BadPipelineFile, match=r"declares 2 pipelines: other, shop.*\n.*--pipeline other"
    ):
        load_pipeline(path)
    with pytest.raises(BadPipelineFile, match="no pipeline 'othr': did you mean 'other'"):
        load_pipeline(path, "othr")


def test_a_file_can_import_its_neighbours(tmp_path: Path) -> None:
    written(tmp_path, 'NAME = "from_beside"\n', "neighbour_of_the_shop.py")
    before = list(sys.path)
    assert (
        load_pipeline(
            written(
                tmp_path,
                "import headrace as hr\nfrom neighbour_of_the_shop import NAME\np ="
                " hr.Pipeline(NAME)\n",
            )
        ).name
        == "from_beside"
    )
    assert sys.path == before


def test_classes_of_a_pipeline_file_can_be_pickled_for_workers_without_it(tmp_path: Path) -> None:
    from pyspark import cloudpickle

    path = written(
        tmp_path,
        ONE
        + "FACTOR = 3\nclass Mine:\n    def twice(self, x):\n        return x * FACTOR\nshop.mine ="
        " Mine()\n",
    )
    sent = tmp_path / "sent"
    sent.write_bytes(cloudpickle.dumps(load_pipeline(path).mine))  # type: ignore[attr-defined, no-untyped-call]
    path.unlink()
    script = f"import pickle; print(pickle.loads(open({str(sent)!r}, 'rb').read()).twice(7))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "21"


def test_dataclasses_work_in_a_file(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import"
        " ClassVar\n" + ONE
    )
    assert (
        load_pipeline(
            written(
                tmp_path, text + "@dataclass\nclass Mine:\n    x: int\n    y: ClassVar[int] = 1\n"
            )
        ).name
        == "shop"
    )


def test_names_after_main_are_not_run(tmp_path: Path) -> None:
    assert (
        load_pipeline(
            written(tmp_path, ONE + 'if __name__ == "__main__":\n    raise SystemExit(3)\n')
        ).name
        == "shop"
    )


BAD = [
    ("x = 1\n", "declares no pipeline.*\n.*hr.Pipeline"),
    ("import headrace as hr\nx = (1\n", "fails in line 2: SyntaxError"),
    ("import headrace as hr\n\n1 / 0\n", "fails in line 3: ZeroDivisionError: division by zero"),
    ("import no_such_package\n", "fails in line 1: ModuleNotFoundError"),
    ("raise SystemExit(1)\n", "fails in line 1: SystemExit"),
    (ONE + 'again = hr.Pipeline("shop")\n', "two pipelines named 'shop'"),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=[said for _, said in BAD])
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadPipelineFile, match=said):
        load_pipeline(written(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadPipelineFile, match="There is no file"):
        load_pipeline(tmp_path / "none.py")
    with pytest.raises(BadPipelineFile, match="it is a directory"):
        load_pipeline(tmp_path)


def test_an_error_of_ours_keeps_its_kind_and_gets_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, ONE + 'shop.write("more", orders.where("amont > 0"))\n')
    with pytest.raises(UnknownColumn, match="did you mean 'amount'") as caught:
        load_pipeline(path)
    assert caught.value.__notes__ == [f"in {path}, line 6"]
