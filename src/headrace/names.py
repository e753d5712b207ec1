"""The rule for names that users choose: of topics, groups, producers, transactions, views,
pipelines, connectors and versions. It is one rule for all, since they become parts of file names
and of topics.
"""

from __future__ import annotations

import re

from headrace.errors import BadName, HeadraceError

_NAME = re.compile(r"[A-Za-z0-9._-]+")  # Kafka's rule for topics
MAX_NAME = 200
DERIVED_SUFFIX = ".dead"
"""What is appended to a topic's name for its dead letters. It need not fit into `MAX_NAME`: with it
and a number, a name fits into a file's.
"""


def check_name(name: str, *, what: str, error: type[HeadraceError] = BadName) -> str:
    """Refuse a name that breaks the rule; return it otherwise. The error calls it a `what`."""
    fits = len(name.removesuffix(DERIVED_SUFFIX)) <= MAX_NAME
    if not _NAME.fullmatch(name) or not fits or name in {".", ".."}:
        raise error(
            f"{name!r} cannot be a {what}.",
            fix="use 1 to 200 letters, digits, dots, hyphens and underscores.",
        )
    return name
