"""Logs as Spark's Python processes have them: opened when first needed, then kept, since opening one for each task would cost more than a small task itself.

A process keeps a few. A log whose directory was replaced since is opened anew, and so is one that failed in a commit (`forget`).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from headrace.log import open_log
from headrace.log.api import Log
from headrace.log.spark.options import Address

MOST_OPEN_LOGS = 8
Identity = tuple[int, int] | None
_open: OrderedDict[Address, tuple[int, Identity, Log]] = OrderedDict()


def shared_log(address: Address) -> Log:
    """This process's handle of a log. Never makes a new log: a misspelt address is an error."""
    kept = _open.get(address)
    if kept is not None and kept[:2] == (os.getpid(), _identity(address)):
        _open.move_to_end(address)
        return kept[2]
    forget(address)
    log = open_log(address.log, create=False) if address.log.startswith("file:") else open_log(address.log, **dict(address.client))
    _open[address] = (os.getpid(), _identity(address), log)
    while len(_open) > MOST_OPEN_LOGS:
        forget(next(iter(_open)))
    return log


def forget(address: Address) -> None:
    """Close a log's handle; the next one who needs it opens it again."""
    process, _, log = _open.pop(address, (0, None, None))
    if log is not None and process == os.getpid():  # a parent's handle, inherited by a fork, is not ours to close
        log.close()


def _identity(address: Address) -> Identity:
    """What tells a directory's log from another one that was made in its place."""
    if not address.log.startswith("file:"):
        return None
    try:
        about = (Path(address.log.removeprefix("file:")) / "headrace.json").stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns
