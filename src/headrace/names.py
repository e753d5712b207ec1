"""The rule for names that users choose: of topics, groups, producers, transactions, views,
pipelines, connectors and versions. It is one rule for all, since they become parts of file names
and of topics.
"""

from __future__ import annotations

import re

from headrace.errors import BadName, HeadraceError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # Kafka's rule for topics


def check_name(name: str, *, what: str, error: type[HeadraceError] = BadName) -> str:
    """Refuse a name that breaks the rule; return it otherwise. The error calls it a `what`."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise error(
            f"{name!r} cannot be a {what}.",
            fix="use 1 to 200 letters, digits, dots, hyphens and underscores.",
        )
    return name
