"""Positions in the WAL of a server, and whether a server is the one that a position is of.

An LSN means something on one server only, and there on one timeline: after a failover, a restore or
with another address the same number stands for other changes, and what is in between would be
missing without a word. So a position says where it is from:

    16/B374D848@7412345678901234567.2      the LSN, the system's identifier, the timeline

A position of before there were these is an LSN as a decimal number. It goes on, and is replaced by
one of the new form with the next commit.

    timeline 1    ─────────────F──────P        F: where timeline 2 leaves timeline 1
    timeline 2                 └───Q─────▶     P: our position; what follows F is not on timeline 2
                                               Q: a slot made after the failover is behind P, and
                                                  yet misses what timeline 2 has between F and Q
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import ConfigurationError

START_OVER = (
    "run it once with --start-over: it creates a new slot, reads all tables again, and deletes rows"
    " that are not there any more. Of several changes of a row meanwhile, only the last is seen."
)
_POSITION = re.compile(r"([0-9A-F]+)/([0-9A-F]+)@([0-9]+)\.([0-9]+)")
_FORK = re.compile(r"^\s*(\d+)\s+([0-9A-F]+)/([0-9A-F]+)", re.MULTILINE)


@dataclass(frozen=True)
class PostgresPosition:
    """An LSN, and the server and timeline that it is of; None in a position of before these were
    stored.
    """

    lsn: int
    system: str | None = None
    timeline: int | None = None

    @staticmethod
    def parse(text: str) -> PostgresPosition:
        """Return the position that a text stands for."""
        if text.isdecimal():
            return PostgresPosition(int(text))
        match = _POSITION.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"{text!r} is no position of a Postgres database.",
                fix="give the capture a name that no capture of another database has.",
            )
        high, low, system, timeline = match.groups()
        return PostgresPosition((int(high, 16) << 32) | int(low, 16), system, int(timeline))

    def __str__(self) -> str:
        return f"{format_lsn(self.lsn)}@{self.system}.{self.timeline}"

    def at(self, lsn: int) -> PostgresPosition:
        """Return another position of the same server and timeline."""
        return replace(self, lsn=lsn)


def format_lsn(lsn: int) -> str:
    """Return an LSN as Postgres writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def server_end(cursor: Any) -> PostgresPosition:
    """Return the end of the server's WAL, with who the server is.

    Args:
        cursor: A cursor of a replication connection.
    """
    cursor.execute("IDENTIFY_SYSTEM")
    system, timeline, end, *_ = cursor.fetchone()
    high, low = end.split("/")
    return PostgresPosition((int(high, 16) << 32) | int(low, 16), str(system), int(timeline))


def check_same_history(cursor: Any, position: PostgresPosition, end: PostgresPosition) -> None:
    """Check that what follows a position on this server is what followed it where it was stored.

    Args:
        cursor: A cursor of a replication connection.
        position: The stored position.
        end: The end of the server's WAL.

    Raises:
        ConfigurationError: It is another server, or one that lacks changes that the log has.
    """
    if position.system is not None and position.system != end.system:
        raise ConfigurationError(
            f"This is another server: its system identifier is {end.system}, and the position"
            f" {format_lsn(position.lsn)} is of the server {position.system}. The same position"
            " stands for other changes here.",
            fix=f"correct the address; or, if this server has taken over, {START_OVER}",
        )
    if position.lsn > end.lsn:
        raise ConfigurationError(
            f"The server's WAL ends at {format_lsn(end.lsn)}, and the log has changes up to"
            f" {format_lsn(position.lsn)}: the server was restored to an earlier state, or it is"
            " another one.",
            fix=f"correct the address; or, if this server has taken over, {START_OVER}",
        )
    if position.timeline is None or position.timeline == end.timeline:
        return
    fork = _fork(cursor, position.timeline, end.timeline or 0)
    if fork is None or fork < position.lsn:
        left = f"left it at {format_lsn(fork)}" if fork is not None else "does not descend from it"
        raise ConfigurationError(
            f"After a failover the server is on timeline {end.timeline}, and the log has changes of"
            f" timeline {position.timeline} up to {format_lsn(position.lsn)}. The server's timeline"
            f" {left}: the log has changes that the server lost, and lacks some that it has.",
            fix=START_OVER,
        )


def _fork(cursor: Any, before: int, now: int) -> int | None:
    """Return where a timeline was left on the way to the current one; None if it was not on it."""
    if now < before:
        return None
    cursor.execute(f"TIMELINE_HISTORY {now}")
    _, content = cursor.fetchone()
    history = bytes(content).decode() if not isinstance(content, str) else content
    for timeline, high, low in _FORK.findall(history):
        if int(timeline) == before:
            return (int(high, 16) << 32) | int(low, 16)
    return None
