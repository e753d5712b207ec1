"""Offsets that a transaction leaves out, as mirrors of compacted topics do: nothing is stored at
them, and nothing is missing.
"""

from pathlib import Path

import pytest

import headrace as hr
from headrace.log.file import transaction as transactions


@pytest.mark.parametrize("spilled", [False, True])
def test_rows_behind_a_gap_have_the_offsets_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spilled: bool
) -> None:
    """Also where the transaction is staged in files, whose frames are copied."""
    if spilled:
        monkeypatch.setattr(transactions, "MAX_BYTES_IN_MEMORY", 0)
    address = f"file:{tmp_path / 'log'}"
    with hr.open_log(address) as log:
        log.create_topic("rows", "n INT", partitions=2)
        with log.transaction("tests") as transaction:
            transaction.append("rows", [{"n": 1}, {"n": 2}], partition=1)
            transaction.skip_offsets("rows", 1, 5_000_000_000)
            transaction.append("rows", [{"n": 3}], partition=1)
            transaction.skip_offsets("rows", 0, 7)
            transaction.skip_offsets("rows", 0, 0)
        with log.producer("rows") as producer:
            producer.append({"n": 4}, partition=1)
    with hr.open_log(address) as log:
        stored = [(row["_offset"], row["n"]) for row in log.read("rows").to_pylist()]
        assert stored == [(0, 1), (1, 2), (5_000_000_002, 3), (5_000_000_003, 4)]
        assert log.end_offsets("rows") == {0: 7, 1: 5_000_000_004}
        assert log.read_control("rows", 1) == []
        assert log.stats("rows")[0].rows == 4
        assert not log.verify()


def test_a_gap_is_the_same_after_a_checkpoint_and_in_a_backup(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'log'}"
    with hr.open_log(address) as log:
        log.create_topic("rows", "n INT")
        for n in range(5):
            with log.transaction("tests") as transaction:
                transaction.skip_offsets("rows", 0, 1000)
                transaction.append("rows", {"n": n})
        log.maintain()
        log.backup(tmp_path / "copy")
        expected = log.read("rows").to_pylist()
    for directory in ("log", "copy"):
        with hr.open_log(f"file:{tmp_path / directory}") as log:
            assert log.read("rows").to_pylist() == expected
            assert log.end_offsets("rows") == {0: 5005}
            assert not log.verify()
