"""A query's text, read from left to right; and how its mistakes are told. `parsing` knows the grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from headrace.errors import BadSearch

_SHOWN = 60
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"(?:\\.|[^\s()\[\]{}\":^~\\])+", re.DOTALL)
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"', re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_BOUND = re.compile(r'"((?:\\.|[^"\\])*)"|((?:\\.|[^\s()\]}^\"\\])+)', re.DOTALL)
_PIECES = re.compile(r"\\(.)|([*?])|([^\\*?]+)", re.DOTALL)
WORDS_OF_OURS = ("AND", "OR", "NOT")


@dataclass(frozen=True)
class Written:
    """A word as it is written. `parts`: plain texts, and `*` and `?` where they are meant so; `starts` marks these."""

    raw: str
    at: int
    parts: tuple[str, ...]
    wild: tuple[bool, ...]

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def is_wild(self) -> bool:
        return any(self.wild)


class Scanner:
    """Where we are in a query's text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def fail(self, message: str, at: int | None = None, *, fix: str = "") -> NoReturn:
        """The error, with the line's part around the place, and a caret under it."""
        at = self.at if at is None else at
        first = max(0, at - _SHOWN // 2)
        shown = re.sub(r"\s", " ", self.text[first : first + _SHOWN])
        before, after = "…" if first else "", "…" if first + _SHOWN < len(self.text) else ""
        caret = " " * (at - first + len(before)) + "^"
        raise BadSearch(f"{message} (at character {at}):\n    {before}{shown}{after}\n    {caret}", fix=fix, position=at)

    def space(self) -> None:
        if self.text[self.at : self.at + 1].isspace():
            found = _SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at

    @property
    def next(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, sign: str) -> bool:
        """Whether the text goes on with this sign; if so, behind it."""
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True

    def operator(self, name: str, sign: str) -> bool:
        """Whether an operator follows, as a word or as a sign; if so, behind it."""
        self.space()
        if self.text[self.at : self.at + 1] not in (name[0], sign[:1]):  # mostly
            return False
        if sign and self.take(sign):
            return True
        end = self.at + len(name)
        if self.text.startswith(name, self.at) and (end == len(self.text) or self.text[end] in ' \t\r\n("+-'):
            self.at = end
            return True
        return False

    def number(self) -> float | None:
        found = _NUMBER.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return float(found[0])

    def quoted(self) -> str:
        found = _QUOTED.match(self.text, self.at)
        if found is None:
            self.fail("A quotation mark is never closed", fix='close it with ", or write \\" for a quotation mark that is meant so.')
        self.at = found.end()
        return re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL)

    def word(self) -> Written | None:
        found = _WORD.match(self.text, self.at)
        if found is None:
            if self.next == "\\":
                self.fail("A backslash stands before nothing", fix="write \\\\ for a backslash that is meant so.")
            return None
        at, self.at = self.at, found.end()
        pieces = [(plain or escaped, False) if not wild else (wild, True) for escaped, wild, plain in _PIECES.findall(found[0])]
        return Written(found[0], at, tuple(part for part, _ in pieces), tuple(wild for _, wild in pieces))

    def bound(self) -> str | None:
        """One end of a range; None for `*`."""
        self.space()
        found = _BOUND.match(self.text, self.at)
        if found is None:
            self.fail("A range needs two ends", fix="write it as [10 TO 20], {10 TO 20} or [10 TO *].")
        self.at = found.end()
        if found[2] == "*":
            return None
        return re.sub(r"\\(.)", r"\1", found[1] if found[1] is not None else found[2], flags=re.DOTALL)
