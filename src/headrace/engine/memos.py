"""What a kernel made of its state and would like to find again: a file beside the local store of its shard. It may be gone at any time, and is checked when it is read.

| bytes | |
|---|---|
| 4 | `HRm` and the version |
| 16 | digest of what follows |
| | what the kernel wrote |

Nothing depends on it, so nothing waits for the disk.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

_MAGIC = b"HRm\x01"
_DIGEST = 16


def write_memo(path: Path, content: bytes) -> None:
    """A disk that is full is no reason to fail."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        fresh.write_bytes(_MAGIC + _digest(content) + content)
        fresh.replace(path)
        return
    fresh.unlink(missing_ok=True)


def read_memo(path: Path) -> bytes | None:
    """None if there is none, or if it is not what was written."""
    with suppress(OSError):
        found = path.read_bytes()
        start = len(_MAGIC) + _DIGEST
        if found.startswith(_MAGIC) and found[len(_MAGIC) : start] == _digest(found[start:]):
            return found[start:]
    return None


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST).digest()
