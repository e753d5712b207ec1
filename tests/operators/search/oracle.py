"""The reference: every query against every document, character by character and word by word."""

from __future__ import annotations

import itertools
import re
import unicodedata
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from headrace.operators.search.character_table import (
    ALONE,
    BREAK,
    JOINED,
    character_kind,
    fold_character,
)
from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import (
    AllOf,
    Everything,
    Exists,
    Fuzzy,
    Leaf,
    Node,
    Not,
    Phrase,
    Prefix,
    Range,
    Test,
    Wildcard,
    Word,
)

Document = dict[str, Any]


def words_of(text: str | None) -> list[str]:
    """Words of a text, one character after the other."""
    words: list[str] = []
    current, kind = "", BREAK
    for character in text or "":
        if character_kind(character) != JOINED:
            before, kind = kind, character_kind(character)
            if kind == ALONE or kind != before:
                words.append(current)
                current = ""
        if kind != BREAK:
            current += fold_character(character)
    return [unicodedata.normalize("NFC", word) for word in [*words, current] if word]


def fits(node: Node, document: Document, language: Language) -> bool:
    if isinstance(node, Leaf):
        return passes(node.test, document, language)
    if isinstance(node, Not):
        return not fits(node.child, document, language)
    if isinstance(node, AllOf):
        return all(fits(child, document, language) for child in node.children)
    return sum(fits(child, document, language) for child in node.children) >= node.min_count


def score(node: Node, document: Document, language: Language) -> float:
    if isinstance(node, Not):
        return 0.0
    if isinstance(node, Leaf):
        return node.boost * passes(node.test, document, language)
    return sum(
        score(child, document, language)
        for child in (*node.children, *(node.optional if isinstance(node, AllOf) else ()))
    )


def passes(test: Test, document: Document, language: Language) -> bool:
    if isinstance(test, Everything):
        return True
    if isinstance(test, Range):
        value = _number(document[test.field])
        return value is not None and test.low <= value <= test.high
    fields = language.fields.text if test.field is None else (test.field,)
    if isinstance(test, Exists) and test.field not in language.fields.text:
        return _number(document[test.field]) is not None
    return any(_in_words(test, _words(document, field, language)) for field in fields)


def _words(document: Document, field: str, language: Language) -> list[str]:
    if field in language.fields.text:
        return words_of(document[field])
    return [] if document[field] is None else [document[field]]


def _in_words(test: Test, words: list[str]) -> bool:
    if isinstance(test, Exists):
        return bool(words)
    if isinstance(test, Word):
        return test.text in words
    if isinstance(test, Prefix):
        return any(word.startswith(test.text) for word in words)
    if isinstance(test, Wildcard):
        parts = [{"\0*": ".*", "\0?": "."}.get(part, re.escape(part)) for part in test.parts]
        return any(re.fullmatch("".join(parts), word, re.DOTALL) for word in words)
    if isinstance(test, Fuzzy):
        return any(edits(test.text, word) <= test.edits for word in words)
    assert isinstance(test, Phrase)
    return has_phrase(test, words)


def has_phrase(test: Phrase, words: list[str]) -> bool:
    """Any choice of positions, all different, that are moved by amounts which differ by at most the
    slop.
    """
    positions = [
        [at for at, word in enumerate(words) if word == wanted] for wanted, _ in test.words
    ]
    for chosen in itertools.product(*positions):
        moved = [at - offset for at, (_, offset) in zip(chosen, test.words, strict=True)]
        if len(set(chosen)) == len(chosen) and max(moved) - min(moved) <= test.slop:
            return True
    return False


def edits(one: str, other: str) -> int:
    table = {(row, 0): row for row in range(len(one) + 1)} | {
        (0, column): column for column in range(len(other) + 1)
    }
    for row in range(1, len(one) + 1):
        for column in range(1, len(other) + 1):
            differ = one[row - 1] != other[column - 1]
            best = min(
                table[row - 1, column] + 1,
                table[row, column - 1] + 1,
                table[row - 1, column - 1] + differ,
            )
            if (
                row > 1
                and column > 1
                and one[row - 1] == other[column - 2]
                and one[row - 2] == other[column - 1]
            ):
                best = min(best, table[row - 2, column - 2] + 1)
            table[row, column] = best
    return table[len(one), len(other)]


def _number(value: Any) -> Any:
    if isinstance(value, datetime):
        return round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1_000_000)
    if isinstance(value, date):
        return (value - date(1970, 1, 1)).days
    if isinstance(value, Decimal):
        return float(value)
    return None if value is None or value != value else value  # noqa: PLR0124
