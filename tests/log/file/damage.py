"""A small log with a bit of everything, damaged byte by byte, and what must hold then."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CorruptBatch
from headrace.log.file.journal import DurableMarker
from headrace.log.file.log import FileLog
from headrace.log.file.maintenance import create_checkpoint
from headrace.log.file.segment import read_frames, read_segment_header
from headrace.log.values import Finding
from headrace.testing.power_loss import RebootedDisk

SCHEMA = "n BIGINT, text STRING"
STRIDE = (
    47  # `make test` takes every so many bytes, from a random one on; `make test-all` takes all
)


def make_original(root: Path) -> Path:
    """A log with a bit of everything: two segments, the older one with an index; two checkpoints;
    offsets, notes, sequences.

    What was stored since the newer checkpoint is also in the journal, from which recovery repairs
    it.
    """
    with FileLog.open(root, disk=RebootedDisk()) as log:
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
    """The log after a restart that finds nothing to recover."""
    shutil.copytree(original, root)
    with FileLog.open(root, disk=RebootedDisk()) as log:
        create_checkpoint(log)
        create_checkpoint(log)
    return root


Rows = dict[str, list[tuple[int, int, int, str]]]


def rows_of(log: FileLog, **options: Any) -> Rows:
    return {
        topic: [
            (row["_partition"], row["_offset"], row["n"], row["text"])
            for row in log.read(topic, **options).to_pylist()
        ]
        for topic in log.topics()
    }


def positions(size: int, *, every: bool) -> range:
    return range(size) if every else range(random.randrange(STRIDE), size, STRIDE)


def files(root: Path, pattern: str) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob(pattern))


def copy_in_place(original: Path, root: Path) -> None:
    """Copy a log so that it looks as if it had always been there: a directory that is known to be a
    copy is checked more strictly.
    """
    shutil.copytree(original, root)
    marker = DurableMarker.open(RebootedDisk(), root / "journal" / "durable", write=True)
    mark = marker.read()
    if mark is not None:
        marker.publish(mark.lsn, synced=mark.synced, replace=True)
    marker.close()


class Damaged:
    """A copy of the log with one thing wrong."""

    def __init__(self, original: Path, root: Path, name: Path) -> None:
        self.root, self.path = root, root / name
        copy_in_place(original, root)
        self.sound = self.path.read_bytes()

    def flip(self, position: int) -> None:
        self.path.write_bytes(
            self.sound[:position]
            + bytes([self.sound[position] ^ 0x55])
            + self.sound[position + 1 :]
        )

    def cut(self, size: int) -> None:
        self.path.write_bytes(self.sound[:size])

    def renew(self, original: Path) -> None:
        """Undo whatever was done to the copy."""
        shutil.rmtree(self.root)
        copy_in_place(original, self.root)

    def open(self) -> FileLog:
        return FileLog.open(self.root, disk=RebootedDisk())


def names_position(findings: list[Finding], path: Path, first: int, stop: int) -> bool:
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
    log: FileLog, path: Path, position: int, hit: tuple[int, int, int, int] | None, truth: Rows
) -> None:
    """`hit` is the batch that has the flipped byte; None if it is in the header."""
    left = rows_of(log, on_corrupt="skip")
    lost = set(truth["a"]) - set(left["a"])
    if hit is None:
        assert left == truth
        assert names_position(log.verify(), path, 0, position)
        return
    first_byte, stop_byte, first, stop = hit
    assert names_position(log.verify(), path, first_byte, stop_byte)
    if not lost:  # the padding behind a batch
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
        for position in positions(len(damaged.sound), every=every):
            damaged.flip(position)
            changed = damaged.path.read_bytes()
            with damaged.open() as log:
                check_segment_flip(
                    log,
                    damaged.path,
                    position,
                    next((batch for batch in found if batch[0] <= position < batch[1]), None),
                    truth,
                )
            assert damaged.path.read_bytes() == changed, "the damaged file was changed"
        shutil.rmtree(damaged.root)
