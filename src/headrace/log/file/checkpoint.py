"""Checkpoints: the state as of a position of the journal, so that opening a log does not read its whole past.

The two newest are kept, with the journal since the older one: a damaged checkpoint costs time, not data.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from headrace.errors import NewerFormat
from headrace.log.file.disk import Disk

SUFFIX = ".checkpoint"
KEPT = 2
VERSION = 1


def save(disk: Disk, directory: Path, lsn: int, base: int, state: dict[str, Any]) -> None:
    """Store a state as of `lsn`, a position in the journal file that starts at `base`."""
    text = json.dumps({"version": VERSION, "lsn": lsn, "base": base, "state": state}, separators=(",", ":")).encode()
    disk.replace_file(directory / f"{lsn:020d}{SUFFIX}", [b"%08x\n" % zlib.crc32(text), text])


def positions(directory: Path) -> list[int]:
    """Where there are checkpoints, newest first."""
    return sorted((int(path.name[: -len(SUFFIX)]) for path in directory.glob(f"*{SUFFIX}") if path.name[0] != "."), reverse=True)


def load(directory: Path, lsn: int) -> dict[str, Any] | None:
    """A checkpoint, or None if it is damaged."""
    try:
        crc, text = (directory / f"{lsn:020d}{SUFFIX}").read_bytes().split(b"\n", 1)
        if int(crc, 16) != zlib.crc32(text):
            return None
    except (OSError, ValueError):
        return None
    content: dict[str, Any] = json.loads(text)
    if content["version"] > VERSION:
        raise NewerFormat(f"The checkpoint at {lsn} has format {content['version']}; this Headrace knows {VERSION}.", fix="upgrade Headrace.")
    return content


def forget_old(disk: Disk, directory: Path, journal_bases: list[int]) -> None:
    """Remove checkpoints behind the newest two, and journal files that only they needed."""
    kept = positions(directory)[:KEPT]
    for lsn in positions(directory)[KEPT:]:
        disk.unlink(directory / f"{lsn:020d}{SUFFIX}")
    if len(kept) < KEPT:
        return
    needed = max((base for base in journal_bases if base <= kept[-1]), default=0)
    for base in journal_bases:
        if base < needed:
            disk.unlink(directory / f"{base:020d}.journal")
