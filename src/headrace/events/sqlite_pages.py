"""Pages of an SQLite file, and of its write-ahead log, as bytes: whether a value may be cut over two of them, in free and superseded pages too. Used by `scanning`.

SQLite keeps a long text in a chain of pages: each begins with the number of the next (4 bytes) and is filled to its end. So a value that is cut has its beginning at the end of one page and the rest behind the
first four bytes of another. Which page follows which is not asked: chains of free pages are broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

_HEADER_BYTES, _WAL_HEADER_BYTES, _WAL_FRAME_BYTES = 100, 32, 24
_NEXT_BYTES = 4
_LARGEST_PAGE = 65536


def is_cut_over_pages(path: Path, patterns: Sequence[bytes]) -> bool:
    """Whether one page ends with the beginning of a value, and another has the rest where such a page goes on; at least two bytes on each side."""
    ends: set[tuple[int, int]] = set()
    starts: set[tuple[int, int]] = set()
    cuts = [(number, cut) for number, pattern in enumerate(patterns) for cut in range(2, len(pattern) - 1)]
    for page in _pages(path):
        ends.update((number, cut) for number, cut in cuts if page.endswith(patterns[number][:cut]))
        starts.update((number, cut) for number, cut in cuts if page.startswith(patterns[number][cut:], _NEXT_BYTES))
    return bool(ends & starts)


def _pages(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        if path.name.endswith("-wal"):
            size, between = int.from_bytes(head[8:12], "big"), _WAL_FRAME_BYTES
            file.seek(_WAL_HEADER_BYTES)
        else:
            size, between = int.from_bytes(head[16:18], "big"), 0
            file.seek(0)
        size = _LARGEST_PAGE if size == 1 else size
        while 512 <= size <= _LARGEST_PAGE and len(page := file.read(between + size)) == between + size:
            yield page[between:]
