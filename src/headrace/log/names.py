"""Which names topics, groups, producers and transactions may have, on every backend: Kafka's rule for topics."""

from __future__ import annotations

import re

from headrace.errors import BadName, HeadraceError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


def check_name(name: str, *, what: str, error: type[HeadraceError] = BadName) -> str:
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise error(f"{name!r} cannot be a {what}.", fix="use 1 to 200 letters, digits, dots, hyphens and underscores.")
    return name
