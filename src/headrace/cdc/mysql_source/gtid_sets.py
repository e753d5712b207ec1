"""Which transactions have been taken in, by their global ids: MariaDB names the last one of each domain, MySQL has sets of ranges for each source."""

from __future__ import annotations

import re
from collections.abc import Mapping

_RANGE = re.compile(r"\d+(-\d+)?")


def mariadb_set(text: str) -> dict[str, str]:
    """`0-1-7,1-1-3`: by domain."""
    return {each.split("-", maxsplit=1)[0]: each for each in text.split(",") if each}


def mysql_set(text: str) -> dict[str, str]:
    """`uuid:1-7:9,uuid:3`: the ranges by source. What a source's tag marks (`uuid:tag:5`) is a source of its own."""
    found: dict[str, str] = {}
    for each in "".join(text.split()).split(","):
        uuid, *parts = each.split(":")
        source = uuid
        for part in parts:
            if _RANGE.fullmatch(part):
                found[source] = f"{found[source]}:{part}" if source in found else part
            else:
                source = f"{uuid}:{part}"
    return found


def mysql_text(gtids: Mapping[str, str]) -> str:
    return ",".join(f"{source}:{ranges}" for source, ranges in gtids.items())


def with_transaction(ranges: str, number: int) -> str:
    """One more number. Nearly always it follows the last one."""
    head, _, last = ranges.rpartition(":")
    start, _, end = last.partition("-")
    if last and int(end or start) + 1 == number:
        return f"{head}:{start}-{number}" if head else f"{start}-{number}"
    return _merged([*(_bounds(each) for each in ranges.split(":") if each), (number, number)])


def _bounds(text: str) -> tuple[int, int]:
    start, _, end = text.partition("-")
    return int(start), int(end or start)


def _merged(ranges: list[tuple[int, int]]) -> str:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return ":".join(f"{start}-{end}" if start != end else str(start) for start, end in merged)
