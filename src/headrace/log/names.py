"""Which names topics, groups, producers and transactions may have, on every backend: Kafka's rule for topics. And the words for a place in one."""

from __future__ import annotations

import re
from typing import TypeVar

from headrace.errors import BadName, HeadraceError

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_PLACES = {"beginning": "earliest", "end": "latest"}


def check_name(name: str, *, what: str, error: type[HeadraceError] = BadName) -> str:
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise error(f"{name!r} cannot be a {what}.", fix="use 1 to 200 letters, digits, dots, hyphens and underscores.")
    return name


def place_word(to: T) -> T | str:
    """Two words for one thing: "beginning" is "earliest", "end" is "latest". Offsets and times stay what they are."""
    return _PLACES.get(to, to) if isinstance(to, str) else to
