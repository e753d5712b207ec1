"""Local stores that a worker process keeps open between batches. Mapping a large store anew costs a page fault for every page that a batch touches: of a batch of
10,000 random keys among 5 million, more than a third of its time.

A handle is used again only if its file is still the one that is there, as long as it must be, and begins as a store does: reading from a map whose file was cut
short or written over ends the process.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lmdb

DATA = "data.mdb"
_MAP_BYTES = 1 << 36
_MOST_IDLE = 16
_MAGIC = (0xBEEFC0DE).to_bytes(4, "little")
_MAGIC_AT, _PAGES = 16, 2  # each of the first two pages says what it is, behind its header
_idle: OrderedDict[Path, tuple[Any, int, int]] = OrderedDict()  # with the file's inode and the size of its pages


def opened(directory: Path) -> Any:
    """The environment in a directory: one that was given back, or a new one. Raises `lmdb.Error` if what is there is no store, or is damaged."""
    env, inode, page_bytes = _idle.pop(directory, (None, 0, 0))
    if env is not None:
        if _begins_as_a_store(directory / DATA, inode, page_bytes) and not _is_short(env, directory):
            return env
        env.close()
    directory.mkdir(parents=True, exist_ok=True)
    env = lmdb.open(str(directory), map_size=_MAP_BYTES, sync=False, metasync=False, max_readers=16)
    if _is_short(env, directory):
        env.close()
        raise lmdb.CorruptedError(f"{directory} was cut short")
    return env


def give_back(directory: Path, env: Any) -> None:
    """Done with it for now."""
    try:
        _idle[directory] = env, (directory / DATA).stat().st_ino, env.stat()["psize"]
    except OSError:  # it was thrown away meanwhile
        env.close()
    while len(_idle) > _MOST_IDLE:
        _, (oldest, *_) = _idle.popitem(last=False)
        oldest.close()


def _begins_as_a_store(path: Path, inode: int, page_bytes: int) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_PAGES * page_bytes)
            same = os.fstat(file.fileno()).st_ino == inode
    except OSError:
        return False
    return same and all(head[page * page_bytes + _MAGIC_AT :][:4] == _MAGIC for page in range(_PAGES))


def _is_short(env: Any, directory: Path) -> bool:
    return bool((env.info()["last_pgno"] + 1) * env.stat()["psize"] > (directory / DATA).stat().st_size)
