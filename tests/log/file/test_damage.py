"""Every byte of a log's files is flipped, and every file cut at every length. Damage is found and
named, and costs what it hit, nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import ConfigurationError
from headrace.log.file.log import FileLog
from headrace.log.values import Finding
from headrace.testing.power_loss import RebootedDisk
from tests.log.file.damage import (
    Damaged,
    Rows,
    batches,
    files,
    flip_segments,
    make_original,
    names_position,
    positions,
    rows_of,
    settle,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_original(tmp_path_factory.mktemp("original") / "log")


@pytest.fixture(scope="module")
def settled(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return settle(original, tmp_path_factory.mktemp("settled") / "log")


@pytest.fixture(scope="module")
def truth(original: Path) -> Rows:
    with FileLog.open(original, disk=RebootedDisk()) as log:
        return rows_of(log)


def test_a_flipped_byte_of_a_segment_costs_one_batch(
    settled: Path, tmp_path: Path, truth: Rows
) -> None:
    flip_segments(settled, tmp_path, truth, every=False)


@pytest.mark.slow
def test_any_flipped_byte_of_a_segment_costs_one_batch(
    settled: Path, tmp_path: Path, truth: Rows
) -> None:
    flip_segments(settled, tmp_path, truth, every=True)


def cut_segments(original: Path, tmp_path: Path, truth: Rows, *, every: bool) -> None:
    for name in [name for name in files(original, "*.segment") if "a~" in str(name)]:
        damaged = Damaged(original, tmp_path / "log", name)
        found = batches(original / name)
        for size in positions(len(damaged.sound), every=every):
            damaged.cut(size)
            with damaged.open() as log:
                lost = {
                    offset
                    for _, stop_byte, first, stop in found
                    if stop_byte > size
                    for offset in range(first, stop)
                }
                left = rows_of(log, on_corrupt="skip")
                unpadded = [row for row in truth["a"] if row[1] not in lost]
                assert left["b"] == truth["b"]
                assert set(unpadded) <= set(left["a"]) <= set(truth["a"])
                assert left["a"] == sorted(left["a"])
                assert names_position(log.verify(), damaged.path, 0, size)
                if size >= found[0][0]:
                    log.producer("a").append({"n": 99, "text": "behind the damage"})
                    assert rows_of(log, on_corrupt="skip")["a"][-1][2] == 99
            damaged.renew(original)
        shutil.rmtree(damaged.root)


def test_a_segment_that_is_cut_loses_what_was_cut(
    settled: Path, tmp_path: Path, truth: Rows
) -> None:
    cut_segments(settled, tmp_path, truth, every=False)


@pytest.mark.slow
def test_a_segment_cut_anywhere_loses_what_was_cut(
    settled: Path, tmp_path: Path, truth: Rows
) -> None:
    cut_segments(settled, tmp_path, truth, every=True)


def check_rows_are_all_there(damaged: Damaged, truth: Rows) -> list[Finding]:
    """Rows do not depend on the damaged file. The log can be written, and read again by another
    process.
    """
    with damaged.open() as log:
        findings = log.verify()
        assert rows_of(log) == truth
        log.producer("a").append({"n": 99, "text": "new"})
    with damaged.open() as log:
        assert rows_of(log)["b"] == truth["b"]
        assert rows_of(log)["a"] == [*truth["a"], (0, len(truth["a"]), 99, "new")]
    return findings


def damages(
    original: Path, tmp_path: Path, pattern: str, *, every: bool
) -> Iterator[tuple[Damaged, int, str]]:
    """Each flip and each cut of the files of one kind."""
    for name in files(original, pattern):
        damaged = Damaged(original, tmp_path / "log", name)
        for position in positions(len(damaged.sound), every=every):
            damaged.flip(position)
            yield damaged, position, "flipped"
            damaged.renew(original)
            damaged.cut(position)
            yield damaged, position, "cut"
            damaged.renew(original)
        shutil.rmtree(damaged.root)


def damage_journal(original: Path, tmp_path: Path, truth: Rows, *, every: bool) -> None:
    for damaged, position, _ in damages(original, tmp_path, "*.journal", every=every):
        findings = check_rows_are_all_there(damaged, truth)
        healed = damaged.path.read_bytes().startswith(damaged.sound)  # the padding behind a record
        assert healed or names_position(
            findings, damaged.path, 0, max(position, 64) + 16
        )  # a header is 64 bytes, and zeros may heal a record


def test_rows_survive_a_damaged_journal(original: Path, tmp_path: Path, truth: Rows) -> None:
    damage_journal(original, tmp_path, truth, every=False)


@pytest.mark.slow
def test_rows_survive_any_damage_to_the_journal(
    original: Path, tmp_path: Path, truth: Rows
) -> None:
    damage_journal(original, tmp_path, truth, every=True)


def damage_checkpoints(original: Path, tmp_path: Path, truth: Rows, *, every: bool) -> None:
    for damaged, _, _ in damages(original, tmp_path, "*.checkpoint", every=every):
        findings = check_rows_are_all_there(damaged, truth)
        assert [(finding.kind, finding.file) for finding in findings] == [
            ("corrupt", str(damaged.path))
        ]


def test_a_damaged_checkpoint_costs_nothing(original: Path, tmp_path: Path, truth: Rows) -> None:
    damage_checkpoints(original, tmp_path, truth, every=False)


@pytest.mark.slow
def test_no_damage_to_a_checkpoint_costs_anything(
    original: Path, tmp_path: Path, truth: Rows
) -> None:
    damage_checkpoints(original, tmp_path, truth, every=True)


def test_a_damaged_index_is_named_and_built_again(
    settled: Path, tmp_path: Path, truth: Rows
) -> None:
    for damaged, _, _ in damages(settled, tmp_path, "*.index", every=True):
        with damaged.open() as log:
            assert [(finding.kind, finding.file) for finding in log.verify()] == [
                ("stale", str(damaged.path))
            ]
            assert rows_of(log) == truth
            assert log.offsets_at("a", "2000-01-01 00:00:00") == {0: 0}
            assert log.verify() == []


def test_a_damaged_marker_costs_nothing(original: Path, tmp_path: Path, truth: Rows) -> None:
    for damaged, _, _ in damages(original, tmp_path, "durable", every=True):
        assert check_rows_are_all_there(damaged, truth) == []


def test_a_marker_damaged_while_the_log_is_open_is_named(
    original: Path, tmp_path: Path, truth: Rows
) -> None:
    damaged = Damaged(original, tmp_path / "log", Path("journal/durable"))
    with damaged.open() as log:
        damaged.flip(20)
        assert [(finding.kind, finding.file) for finding in log.verify()] == [
            ("corrupt", str(damaged.path))
        ]
        assert rows_of(log) == truth
        log.producer("a").append({"n": 99, "text": "new"})
        assert log.verify() == []


def test_the_marker_file_of_a_log_is_checked(original: Path, tmp_path: Path, truth: Rows) -> None:
    refusals = set()
    for damaged, _, _ in damages(original, tmp_path, "headrace.json", every=True):
        try:
            log = damaged.open()
        except ConfigurationError as error:
            refusals.add(error.message)
        else:
            assert rows_of(log) == truth
            log.close()
    assert refusals
    assert all(str(tmp_path) in message for message in refusals)


def test_no_single_file_of_the_journal_is_indispensable(
    original: Path, tmp_path: Path, truth: Rows
) -> None:
    removed = [name for name in files(original, "journal/*") if name.name != "lock"]
    assert {name.suffix for name in removed} == {".journal", ".checkpoint", ""}
    for name in removed:
        damaged = Damaged(original, tmp_path / "log", name)
        damaged.path.unlink()
        check_rows_are_all_there(damaged, truth)
        shutil.rmtree(damaged.root)


def test_rows_survive_the_loss_of_the_whole_journal(
    original: Path, tmp_path: Path, truth: Rows
) -> None:
    """As long as the marker says that there was one."""
    damaged = Damaged(original, tmp_path / "log", Path("journal/durable"))
    for path in [
        *damaged.root.glob("journal/*.journal"),
        *damaged.root.glob("journal/*.checkpoint"),
    ]:
        path.unlink()
    check_rows_are_all_there(damaged, truth)
