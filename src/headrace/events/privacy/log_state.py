"""What a log knows besides its rows, and how it is cleaned of a person's values: notes, producers'
ids, and names.

A checkpoint has all of it, and the log writes it anew each time: what is not removed here comes
back with every checkpoint. What can be cleaned is cleaned by its structure, in one commit
(`scrub`). What cannot is a name that somebody has chosen; `obstacles` says so before anything is
changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.durations import from_us
from headrace.events.privacy.spellings import Spellings
from headrace.log.file.segment import producer_hash
from headrace.log.file.state import PRODUCER_RETENTION_US, salvaged_name

if TYPE_CHECKING:
    from headrace.log.file.commit_draft import CommitDraft
    from headrace.log.file.log import FileLog
    from headrace.log.file.state import State

NoteCleaner = Callable[[str, str, Callable[[str], bool]], str]
"""Returns a note, given by name and text, without the rows that are erased."""
RowTest = Callable[[Mapping[str, Any]], bool]
"""Whether a row, as JSON, names the person or an entity that is erased."""


def scrub(log: FileLog, spellings: Spellings, is_named: RowTest, clean: NoteCleaner) -> int:
    """Remove what the log knows of a person besides rows. Returns how many notes and producers'
    ids were cleaned.
    """

    def decide(draft: CommitDraft) -> int:
        notes = cleaned_notes(draft.state.notes, spellings, is_named, clean)
        for name, text in notes.items():
            draft.do("note", name, text)
        producers = [
            (topic, producer)
            for topic, _, producer in (name.partition("\0") for name in draft.state.producers)
            if not producer.startswith("#") and spellings.are_in_text(producer)
        ]
        for topic, producer in producers:
            # By the hash that its frames have: if it comes back, it goes on where it was.
            salvaged = salvaged_name(topic, producer_hash(topic, producer))
            draft.do("inherit", salvaged, f"{topic}\0{producer}")
        return len(notes) + len(producers)

    return log.committer.submit(decide)


def cleaned_notes(
    notes: Mapping[str, str], spellings: Spellings, is_named: RowTest, clean: NoteCleaner
) -> dict[str, str]:
    """The notes that change, with what is left of them."""

    def is_erased(text: str) -> bool:
        return spellings.are_in_text(text) or any(map(is_named, json_rows(text)))

    cleaned: dict[str, str] = {}
    for name, text in notes.items():
        after = clean(name, text, is_erased)
        if after != text:
            cleaned[name] = after
    return cleaned


def json_rows(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, at any depth, also in texts within it."""
    try:
        waiting = [json.loads(text)]
    except ValueError:
        return
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, str) and item[:1] in {"{", "["}:
            try:
                waiting.append(json.loads(item))
            except ValueError:
                continue


def obstacles(state: State, spellings: Spellings, clean: NoteCleaner) -> list[str]:
    """What has a value in a place from which it cannot be removed, in words."""
    if not spellings:
        return []
    return [*_names(state, spellings), *_notes(state, spellings, clean)]


def _names(state: State, spellings: Spellings) -> Iterator[str]:
    for name, topic in state.topics.items():
        if spellings.are_in_text(name) or spellings.are_in_text(json.dumps(topic.settings)):
            yield (
                f"the topic {name!r} has one of the values in its name or its columns: copy what"
                " you need of it to a topic of another name, and delete it with `headrace topic"
                " delete`"
            )
    for name, group in state.groups.items():
        if spellings.are_in_text(name) or spellings.are_in_text(json.dumps(group.dump())):
            yield (
                f"the consumer group {name!r}, or a member of it, has one of the values in its"
                " name: once its readers use another group, at the same offsets (`headrace group"
                " reset`), delete it with `headrace group delete`"
            )
    for name, seen_us in state.transactions_seen_us.items():
        if spellings.are_in_text(name):
            until = from_us(seen_us + PRODUCER_RETENTION_US) + timedelta(days=1)
            yield (
                f"the transaction id {name!r} has one of the values: the log forgets it 30 days"
                f" after its last use, so give its program another id, and repeat this after"
                f" {until:%d %B %Y}"
            )


def _notes(state: State, spellings: Spellings, clean: NoteCleaner) -> Iterator[str]:
    """Notes that still have a value after what `scrub` does."""
    left = {**state.notes, **cleaned_notes(state.notes, spellings, lambda _row: False, clean)}
    for name, text in left.items():
        if spellings.are_in_text(name) or spellings.are_in_text(text):
            yield f"the note {name!r} has one of the values: {_note_advice(name)}"


def _note_advice(name: str) -> str:
    kind, _, of = name.partition(".")
    if kind == "state":
        return (
            f"the state directory of the pipeline {of!r} has it in its path: move the"
            " directory, and run the pipeline from there once"
        )
    if kind == "cdc":
        return "the capture is in the middle of a table: let its snapshot finish"
    return (
        "the program that stored it must store another content, or set it to None in a transaction"
    )


def checkpoint_places(content: Mapping[str, Any], spellings: Spellings) -> list[str]:
    """Which parts of a checkpoint have a value, in words."""
    state = content["state"]
    return [
        f"{kind} {name!r}"
        for kind, part in (
            ("the topic", "topics"),
            ("a producer of", "producers"),
            ("the transaction id", "transactions"),
            ("the group", "groups"),
            ("the queue", "queues"),
            ("the note", "notes"),
        )
        for name, item in state[part].items()
        if spellings.are_in_text(name) or spellings.are_in_text(json.dumps(item))
    ]
