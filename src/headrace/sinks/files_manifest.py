"""The manifest of a directory of Parquet files: which files are the table, and the sink's ledger. Each commit is a new one, under the next number.

A manifest appears whole or not at all, and a number can be taken once: so whoever writes from an older state is refused, and there is nothing to lock.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import NewerFormat, TargetUnavailable
from headrace.log.file.disk import Disk
from headrace.sinks.applied import Applied

VERSION = 1
DIRECTORY = "_headrace"
_KEPT = 3


@dataclass(frozen=True)
class Manifest:
    """`files` are the data files by bucket (in append mode there is one bucket, with many files)."""

    number: int = 0
    applied: Applied | None = None
    files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "applied": self.applied.to_json() if self.applied else None,
                "files": {str(bucket): names for bucket, names in self.files.items()},
            }
        )


def _path(directory: Path, number: int) -> Path:
    return directory / DIRECTORY / f"{number:012d}.json"


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in (directory / DIRECTORY).glob("*.json"))


def read(directory: Path) -> Manifest:
    """The newest one."""
    numbers = _numbers(directory)
    if not numbers:
        return Manifest()
    stored = json.loads(_path(directory, numbers[-1]).read_text())
    if stored["version"] > VERSION:
        raise NewerFormat(f"The manifest in {directory} was written by a newer Headrace.", fix="upgrade Headrace.")
    files = {int(bucket): tuple(names) for bucket, names in stored["files"].items()}
    return Manifest(numbers[-1], Applied.from_json(stored["applied"]) if stored["applied"] else None, files)


def publish(directory: Path, manifest: Manifest) -> None:
    """Make a manifest the newest, if its number is free."""
    waiting = directory / DIRECTORY / f"{uuid.uuid4().hex}.tmp"
    with waiting.open("w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(waiting, _path(directory, manifest.number))
    except FileExistsError:
        raise TargetUnavailable("Another process has written to the directory meanwhile.", fix="nothing: it is looked at again.") from None
    finally:
        waiting.unlink()
    Disk().sync_directory(directory / DIRECTORY)


def forget_older(directory: Path) -> None:
    """A few stay, so that whoever just found one can read it."""
    for number in _numbers(directory)[:-_KEPT]:
        _path(directory, number).unlink(missing_ok=True)
    for left in (directory / DIRECTORY).glob("*.tmp"):
        left.unlink(missing_ok=True)
