"""Who owns a topic: each topic of a captured table belongs to one capture and one table of it.

A capture deletes rows of its topics that its table does not have, so two of them with one topic
would delete each other's rows. That happens easily: `public.orders` of two databases is `orders`,
and `"a b"` and `a_b` are both `a_b`.

    note cdc.topic.orders    {"version": 1, "capture": "shop", "table": "public.orders"}

The note is stored in the same transaction as the first rows, on the condition that nobody else has
stored one since it was read. Of two captures that start at once one is refused before any of its
rows is visible. A topic that was captured before there were such notes belongs to the capture that
has it in its state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace.errors import ConfigurationError, NewerFormat
from headrace.log.api import Log, Transaction

VERSION = 1
STATES = "cdc."
"""What the names of the notes with captures' states begin with."""
_OWNERS = "cdc.topic."


@dataclass(frozen=True)
class TopicOwner:
    """The capture and the table that a topic belongs to."""

    capture: str
    table: str

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, "capture": self.capture, "table": self.table})


@dataclass(frozen=True)
class TopicClaim:
    """That a topic is to belong to an owner."""

    owner: TopicOwner
    replaces: str | None
    """The note that there is already."""


def owner_name(topic: str) -> str:
    """Return the name of the note that says who owns a topic."""
    return f"{_OWNERS}{topic}"


def _parse_owner(text: str | None, topic: str) -> TopicOwner | None:
    if text is None:
        return None
    stored = json.loads(text)
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"Who owns the topic {topic!r} was noted by a newer Headrace.", fix="upgrade Headrace."
        )
    return TopicOwner(stored["capture"], stored["table"])


class TopicClaims:
    """The topics that one capture has, or is about to have."""

    def __init__(self, log: Log, capture: str) -> None:
        self.log = log
        self.capture = capture
        self.pending: dict[str, TopicClaim] = {}
        """By topic, the notes to store with the next commit."""

    def claim(self, topic: str, table: str) -> None:
        """Check that a table may use a topic, which need not exist, and claim it.

        Raises:
            ConfigurationError: It belongs to another capture, or to another table.
        """
        owner = TopicOwner(self.capture, table)
        if topic in self.pending:
            if self.pending[topic].owner != owner:
                raise _refusal(topic, owner, self.pending[topic].owner)
            return
        stored = self.log.note(owner_name(topic))
        current = _parse_owner(stored, topic)
        if current == owner:
            return
        if topic in self.log.topics():
            if current is None:
                current = _owner_by_state(self.log, topic, besides=owner)
            if current is not None:
                raise _refusal(topic, owner, current)
        self.pending[topic] = TopicClaim(owner, replaces=stored)

    def check_is_free(self, topic: str) -> None:
        """Check that a topic of events is not the topic of a table.

        Raises:
            ConfigurationError: It is.
        """
        current = _parse_owner(self.log.note(owner_name(topic)), topic)
        if current is not None:
            raise ConfigurationError(
                f"Events of {self.capture!r} belong into the topic {topic!r}, which belongs to the"
                f" table {current.table} of the capture {current.capture!r}.",
                fix=f"give {self.capture} topics of its own: prefix={self.capture + '.'!r}.",
            )

    def add_to(self, transaction: Transaction) -> None:
        """Store the claims with a transaction. Its commit raises NoteConflict if another capture
        has claimed one of the topics since.
        """
        for topic, claim in self.pending.items():
            transaction.set_note(owner_name(topic), claim.owner.to_json(), expect=claim.replaces)


def _owner_by_state(log: Log, topic: str, *, besides: TopicOwner) -> TopicOwner | None:
    """Return who has a topic in its state. It was captured before topics had owners. If that is
    the capture that asks, its table is first.
    """
    owners = []
    for name, text in log.notes(STATES).items():
        state = json.loads(text)
        if not isinstance(state, dict) or "position" not in state or "tables" not in state:
            continue  # an owner, or a request for snapshots
        capture = name.removeprefix(STATES)
        owners += [
            TopicOwner(capture, table)
            for table, stored in state["tables"].items()
            if stored["topic"] == topic
        ]
    if not owners or besides in owners:
        return None
    return owners[0]


def _refusal(topic: str, owner: TopicOwner, current: TopicOwner) -> ConfigurationError:
    if current.capture == owner.capture:
        return ConfigurationError(
            f"The topic {topic!r} belongs to the table {current.table}, so {owner.table} cannot use"
            " it too: each would delete the other's rows.",
            fix=(
                f"capture {owner.table} by a capture of its own, with tables=[{owner.table!r}],"
                f" name={owner.capture + '2'!r} and prefix={owner.capture + '2.'!r}; and name the"
                f" other tables of {owner.capture} in its tables=[…]."
            ),
        )
    return ConfigurationError(
        f"The topic {topic!r} belongs to the table {current.table} of the capture"
        f" {current.capture!r}, so {owner.table} of {owner.capture!r} cannot use it too: each would"
        " delete the other's rows.",
        fix=f"give {owner.capture} topics of its own: prefix={owner.capture + '.'!r}.",
    )
