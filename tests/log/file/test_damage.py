"""Every byte of a log's files is flipped, and every file cut at every length. Damage is found and
named, and costs what it hit, nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigurationError, CorruptBatch
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.log.file.segment import read_frames, read_segment_header
from headrace.log.values import Finding
from headrace.testing.power_loss import RebootedDisk

SCHEMA = "n BIGINT, text STRING"
STRIDE = 23  # `make test` takes every so many bytes; `make test-all` takes all


def make_original(root: Path) -> Path:
    """A log with a bit of everything: two segments, the older one with an index; two checkpoints;
    offsets, notes, sequences.

    What was stored since the newer checkpoint is also in the journal, from which recovery repairs
    it.
    """
    with FileLog(root, disk=RebootedDisk()) as log:
        log.create_topic("a", SCHEMA, segment_bytes=2600)
        for n in range(3):
            log.producer("a", id="till").append(
                [{"n": 10 * n + i, "text": f"{n}" * 9} for i in range(2)]
            )
            create_checkpoint(log)
        log.create_topic("b", SCHEMA, key="n", partitions=2)
        for n in range(3, 6):
            log.producer("a").append([{"n": 10 * n + i, "text": f"{n}" * 9} for i in range(2)])
            with log.transaction("job") as tx:
                tx.append("b", [{"n": n, "text": "b"}])
                tx.commit_offsets("readers", {"a": {0: n}})
                tx.set_note("last", str(n))
        log.offsets_at("a", 0)  # makes the index
    assert len(list(root.glob("topics/a~*/0/*.segment"))) == 2
    assert len(list(root.rglob("*.index"))) == 1
    return root


def settle(original: Path, root: Path) -> Path:
    """The same log, with nothing to recover."""
    shutil.copytree(original, root)
    with FileLog(root, disk=RebootedDisk()) as log:
        create_checkpoint(log)
        create_checkpoint(log)
    return root


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_original(tmp_path_factory.mktemp("original") / "log")


@pytest.fixture(scope="module")
def settled(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return settle(original, tmp_path_factory.mktemp("settled") / "log")


Rows = dict[str, list[tuple[int, int, int, str]]]


def rows_of(log: FileLog, **options: Any) -> Rows:
    return {
        topic: [
            (row["_partition"], row["_offset"], row["n"], row["text"])
            for row in log.read(topic, **options).to_pylist()
        ]
        for topic in log.topics()
    }


@pytest.fixture(scope="module")
def truth(original: Path) -> Rows:
    with FileLog(original, disk=RebootedDisk()) as log:
        return rows_of(log)


def places(size: int, *, every: bool) -> range:
    return range(0, size, 1 if every else STRIDE)


def files(root: Path, pattern: str) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob(pattern))


class Damaged:
    """A copy of the log with one thing wrong."""

    def __init__(self, original: Path, root: Path, name: Path) -> None:
        self.root, self.path = root, root / name
        shutil.copytree(original, root)
        self.sound = self.path.read_bytes()

    def flip(self, place: int) -> None:
        self.path.write_bytes(
            self.sound[:place] + bytes([self.sound[place] ^ 0x55]) + self.sound[place + 1 :]
        )

    def cut(self, size: int) -> None:
        self.path.write_bytes(self.sound[:size])

    def renew(self, original: Path) -> None:
        """Undo whatever was done to the copy."""
        shutil.rmtree(self.root)
        shutil.copytree(original, self.root)

    def open(self) -> FileLog:
        return FileLog(self.root, disk=RebootedDisk())


def names_place(findings: list[Finding], path: Path, first: int, stop: int) -> bool:
    return any(
        finding.file == str(path) and first <= finding.position <= stop for finding in findings
    )


def batches(path: Path) -> list[tuple[int, int, int, int]]:
    """(first byte, byte behind, first offset, offset behind) of each batch of a sound segment."""
    base = int(path.name[:20])
    file = RebootedDisk().open(path, write=False)
    start, end = read_segment_header(file).size, file.size()
    found = [
        (at, at + h.frame_bytes, base + h.relative, base + h.relative + h.span)
        for at, h, _ in read_frames(file, start, end)
        if h
    ]
    file.close()
    return found


def check_segment_flip(
    log: FileLog, path: Path, place: int, hit: tuple[int, int, int, int] | None, truth: Rows
) -> None:
    """`hit` is the batch that has the flipped byte; None if it is in the header."""
    left = rows_of(log, on_corrupt="skip")
    lost = set(truth["a"]) - set(left["a"])
    if hit is None:
        assert left == truth
        assert names_place(log.verify(), path, 0, place)
        return
    first_byte, stop_byte, first, stop = hit
    assert names_place(log.verify(), path, first_byte, stop_byte)
    if not lost:  # the filling behind a batch
        assert left == truth
        return
    assert left["a"] == [row for row in truth["a"] if not first <= row[1] < stop]
    with pytest.raises(CorruptBatch) as caught:
        log.read("a", 0).to_table()
    assert (caught.value.first, caught.value.stop, caught.value.file, caught.value.position) == (
        first,
        stop,
        str(path),
        first_byte,
    )
    assert log.read("a", 0, stop).to_table().num_rows == len(
        [row for row in truth["a"] if row[1] >= stop]
    )
    assert log.read("a", 0, 0, first).to_table().num_rows == first
    assert (log.store.root / "quarantine" / f"a-0-{first}.json").exists()


def flip_segments(original: Path, tmp_path: Path, truth: Rows, *, every: bool) -> None:
    for name in [name for name in files(original, "*.segment") if "a~" in str(name)]:
        damaged = Damaged(original, tmp_path / "log", name)
        found = batches(original / name)
        for place in places(len(damaged.sound), every=every):
            damaged.flip(place)
            changed = damaged.path.read_bytes()
            with damaged.open() as log:
                check_segment_flip(
                    log,
                    damaged.path,
                    place,
                    next((batch for batch in found if batch[0] <= place < batch[1]), None),
                    truth,
                )
            assert damaged.path.read_bytes() == changed, "the damaged file was changed"
        shutil.rmtree(damaged.root)


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
        for size in places(len(damaged.sound), every=every):
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
                assert names_place(log.verify(), damaged.path, 0, size)
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
        for place in places(len(damaged.sound), every=every):
            damaged.flip(place)
            yield damaged, place, "flipped"
            damaged.renew(original)
            damaged.cut(place)
            yield damaged, place, "cut"
            damaged.renew(original)
        shutil.rmtree(damaged.root)


def damage_journal(original: Path, tmp_path: Path, truth: Rows, *, every: bool) -> None:
    for damaged, place, _ in damages(original, tmp_path, "*.journal", every=every):
        findings = check_rows_are_all_there(damaged, truth)
        healed = damaged.path.read_bytes().startswith(damaged.sound)  # the filling behind a record
        assert healed or names_place(
            findings, damaged.path, 0, max(place, 64) + 16
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


def test_what_says_that_this_is_a_log_is_checked(
    original: Path, tmp_path: Path, truth: Rows
) -> None:
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
