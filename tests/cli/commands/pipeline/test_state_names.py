"""`headrace state` of a version: its steps by their plain names or in full, and one object that
says that all is sound. The ledger is real; no pipeline runs.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import headrace as hr
from headrace.engine.ledger import MAIN_QUERY, Ledger, LedgerEntry
from headrace.engine.state.files import StateFiles
from tests.cli.conftest import Run


@pytest.fixture
def state(tmp_path: Path, log: hr.Log) -> Path:
    """A state directory with the version v2 of `shop`, whose step `totals.aggregate` keeps one
    key.
    """
    directory = tmp_path / "shop.state"
    files = StateFiles(directory / "versions" / "v2" / "steps" / "totals.aggregate.v2")
    name = files.write(
        pa.array([b"key"], pa.binary()),
        pa.array([b"value"], pa.binary()),
        np.array([5], np.uint8),
        {5: None},
    )
    ledger = Ledger.open(log, "shop.v2")
    ledger.take_over()
    tx = ledger.transaction()
    ledger.add(tx, LedgerEntry(ledger.epoch, MAIN_QUERY, 7, {"totals.aggregate.v2": {5: name}}))
    ledger.commit(tx)
    return directory


@pytest.mark.parametrize("step", ["totals.aggregate", "totals.aggregate.v2"])
def test_a_step_of_a_version_is_named_in_full_or_not(run: Run, state: Path, step: str) -> None:
    command = ("state", "show", "shop", step, "--as", "v2", "--state", state)
    assert run(*command).out.startswith("totals.aggregate.v2 at tick 7\n")
    assert [row["_bytes"] for row in run(*command, "--json").lines] == [5]


def test_a_misspelt_step_of_a_version(run: Run, state: Path) -> None:
    refused = run(
        "state", "show", "shop", "totals.agregate", "--as", "v2", "--state", state, code=1
    ).err
    assert "did you mean 'totals.aggregate.v2'?" in refused


def test_sound_files_are_called_so(run: Run, state: Path) -> None:
    (sound,) = run("state", "verify", "shop", "--as", "v2", "--state", state, "--json").lines
    assert sound == {
        "damage": None,
        "message": "Every state file that the ledger refers to exists and is intact.",
    }
    (file,) = (state / "versions").rglob("*.state")
    file.unlink()
    (damage,) = run(
        "state", "verify", "shop", "--as", "v2", "--state", state, "--json", code=4
    ).lines
    assert file.name in damage["damage"]


def test_a_pipeline_that_began_and_has_no_batch_yet_is_not_called_unknown(
    run: Run, tmp_path: Path, log: hr.Log
) -> None:
    Ledger.open(log, "shop").take_over()
    refused = run(
        "state", "show", "shop", "totals.aggregate", "--state", tmp_path / "shop.state", code=1
    ).err
    assert "has not finished a batch" in refused
