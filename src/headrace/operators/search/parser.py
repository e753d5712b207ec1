"""A query's text to its tree. Every mistake is told with the place where it is.

    storm "heavy rain"~2 -football          words, phrases (moved by two places), what must not be
    there +wind +(north OR south) harbour         what must be there; the rest adds to the score
    title:budget AND NOT (draft OR "for review") (storm flood hail thunder)~2            at least
    two of them colo?r  anal*  brok~1                   one character, any characters, at most one
    edit price:[10 TO 20}  price:>=10  day:[2026-01-01 TO *]  language:en  rating:*  *:*

NOT binds more than AND, AND more than OR, and OR more than standing side by side. Words side by
side: one of them must fit (`default="and"`: all of them).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.errors import BadSearch, nearest
from headrace.operators.search.analyzer import Analysis
from headrace.operators.search.syntax import (
    STRING,
    TEXT,
    All,
    Any,
    Everything,
    Exists,
    Fields,
    Fuzzy,
    Leaf,
    Node,
    Not,
    Phrase,
    Prefix,
    Range,
    Test,
    UnfitValue,
    Wildcard,
    Word,
    boosted,
    closed,
)

# A query's text, read from left to right; and how its mistakes are told. `parsing` knows the
# grammar.


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
    """A word as it is written. `parts`: plain texts, and `*` and `?` where they are meant so;
    `starts` marks these.
    """

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
        raise BadSearch(
            f"{message} (at character {at}):\n    {before}{shown}{after}\n    {caret}",
            fix=fix,
            position=at,
        )

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
        if self.text.startswith(name, self.at) and (
            end == len(self.text) or self.text[end] in ' \t\r\n("+-'
        ):
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
            self.fail(
                "A quotation mark is never closed",
                fix='close it with ", or write \\" for a quotation mark that is meant so.',
            )
        self.at = found.end()
        return re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL)

    def word(self) -> Written | None:
        found = _WORD.match(self.text, self.at)
        if found is None:
            if self.next == "\\":
                self.fail(
                    "A backslash stands before nothing",
                    fix="write \\\\ for a backslash that is meant so.",
                )
            return None
        at, self.at = self.at, found.end()
        pieces = [
            (plain or escaped, False) if not wild else (wild, True)
            for escaped, wild, plain in _PIECES.findall(found[0])
        ]
        return Written(
            found[0], at, tuple(part for part, _ in pieces), tuple(wild for _, wild in pieces)
        )

    def bound(self) -> str | None:
        """One end of a range; None for `*`."""
        self.space()
        found = _BOUND.match(self.text, self.at)
        if found is None:
            self.fail(
                "A range needs two ends", fix="write it as [10 TO 20], {10 TO 20} or [10 TO *]."
            )
        self.at = found.end()
        if found[2] == "*":
            return None
        return re.sub(
            r"\\(.)", r"\1", found[1] if found[1] is not None else found[2], flags=re.DOTALL
        )


MAX_CHARACTERS = 20_000
MAX_CLAUSES = 1_024
MAX_DEPTH = 32
MAX_SLOP = 1_000
MAX_PHRASE = 100
MAX_EDITS = 2
MIN_PLAIN, MIN_PLAIN_WHEN_LEADING = 1, 3
OR, AND = "or", "and"
_COMPARED = (">=", "<=", ">", "<")


@dataclass(frozen=True)
class Language:
    """How queries are read: the fields they may name, how words are analysed, and what stands
    between words that stand side by side.
    """

    fields: Fields
    analysis: Analysis = field(default_factory=Analysis)
    default: str = OR

    def parse(self, text: str | None) -> Node:
        """A query's tree. BadSearch, with the place, if it cannot be read."""
        if text is None or not text.strip():
            raise BadSearch(
                "The query is empty.", fix="write words to look for, or *:* for every document."
            )
        if len(text) > MAX_CHARACTERS:
            raise BadSearch(
                f"The query has {len(text):,} characters; {MAX_CHARACTERS:,} are the most.",
                fix="make several queries of it.",
            )
        return _Parser(text, self).query()


@dataclass(frozen=True)
class _Signed:
    sign: str
    at: int
    node: Node | None


class _Parser:
    """One function for each rule of the grammar. A node is None where analysis leaves nothing of
    it, as of a stop word.
    """

    def __init__(self, text: str, language: Language) -> None:
        self._scan, self._language = Scanner(text), language
        self._fields, self._analysis = language.fields, language.analysis
        self._depth = self._clauses = 0

    def query(self) -> Node:
        node = self._list(None)
        if self._scan.next:
            self._scan.fail(
                f"{self._scan.next!r} closes nothing",
                fix="leave it out, or write a backslash before it.",
            )
        if node is None:
            raise BadSearch(
                "Nothing of the query is left to look for: it has no words, or only stop words.",
                fix="name at least one word.",
                position=0,
            )
        return node

    # What connects

    def _list(self, field: str | None) -> Node | None:
        return self._together(self._parts(field), least=None, at=self._scan.at)

    def _parts(self, field: str | None) -> list[_Signed]:
        """What stands side by side, up to the end or to what closes a group."""
        parts: list[_Signed] = []
        self._scan.space()
        while self._scan.next and self._scan.next not in ")]}":
            parts.append(self._either(field))
            self._scan.space()
        return parts

    def _together(self, parts: list[_Signed], least: int | None, at: int) -> Node | None:
        """Clauses side by side, by their signs."""
        there = [(each.sign, each.node) for each in parts if each.node is not None]
        plain = "+" if self._language.default == AND and least is None else ""
        must = [node for sign, node in there if (sign or plain) == "+"]
        may = [node for sign, node in there if not (sign or plain)]
        without = [Not(node) for sign, node in there if sign == "-"]
        if least is not None and least > len(may):
            self._scan.fail(
                f"At least {least} of {len(may)} clauses can never fit",
                at,
                fix=f"ask for {len(may)} at most; clauses with + or - do not count.",
            )
        if not there:
            return None
        needed = [
            *must,
            *([_one_of(may, least or 1)] if may and (least is not None or not must) else []),
            *without,
        ]
        maybe = may if must and least is None else []
        return needed[0] if len(needed) == 1 and not maybe else All(tuple(needed), tuple(maybe))

    def _either(self, field: str | None) -> _Signed:
        found = [self._both(field)]
        while self._scan.operator("OR", "||"):
            found.append(self._both(field))
        if len(found) == 1:
            return found[0]
        for each in found:
            if each.sign == "+":
                self._scan.fail(
                    "What must be there cannot be one side of OR",
                    each.at,
                    fix="leave out the +, or the OR.",
                )
        nodes = [node for each in found if (node := _plain(each)) is not None]
        return _Signed("", found[0].at, _one_of(nodes, 1) if nodes else None)

    def _both(self, field: str | None) -> _Signed:
        found = [self._signed(field)]
        while self._scan.operator("AND", "&&"):
            found.append(self._signed(field))
        if len(found) == 1:
            return found[0]
        nodes = [node for each in found if (node := _plain(each)) is not None]
        return _Signed(
            "",
            found[0].at,
            None if not nodes else nodes[0] if len(nodes) == 1 else All(tuple(nodes)),
        )

    def _signed(self, field: str | None) -> _Signed:
        self._scan.space()
        at = self._scan.at
        self._deeper(at)
        if self._scan.operator("NOT", "!") or self._scan.take("-"):
            inner = self._signed(field)
            signed = (
                _Signed("-", at, inner.node) if inner.sign != "-" else _Signed("", at, inner.node)
            )
        elif self._scan.take("+"):
            inner = self._signed(field)
            signed = _Signed("-" if inner.sign == "-" else "+", at, inner.node)
        else:
            signed = _Signed("", at, self._boosted(self._clause(field)))
        self._depth -= 1
        return signed

    def _deeper(self, at: int) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._scan.fail(
                f"The query is more than {MAX_DEPTH} levels deep",
                at,
                fix="write it with fewer parentheses.",
            )

    def _boosted(self, node: Node | None) -> Node | None:
        if not self._scan.take("^"):
            return node
        factor = self._scan.number()
        if factor is None:
            self._scan.fail("A boost is a number", fix="write it as in storm^2 or storm^0.5.")
        return None if node is None else boosted(node, factor)

    # What is looked for

    def _clause(self, field: str | None) -> Node | None:
        scan = self._scan
        at = scan.at
        self._clauses += 1
        if self._clauses > MAX_CLAUSES:
            scan.fail(
                f"The query has more than {MAX_CLAUSES:,} clauses",
                at,
                fix="make several queries of it.",
            )
        if scan.take("("):
            return self._group(field, at)
        if scan.next == '"':
            return self._quoted(field, scan.quoted(), at)
        if scan.next and scan.next in "[{":
            return self._range(field, at)
        written = scan.word()
        if written is None:
            scan.fail(
                (
                    "A word is missing"
                    if not scan.next or scan.next in ")]}"
                    else f"{scan.next!r} stands where a word should be"
                ),
                at,
                fix=_HOW,
            )
        if written.raw in WORDS_OF_OURS:
            scan.fail(
                f"{written.raw} stands where a word should be",
                at,
                fix=f'write {written.raw.lower()} or "{written.raw}" for the word.',
            )
        if scan.next == ":":
            return self._of_field(written)
        return self._word(field, written)

    def _of_field(self, written: Written) -> Node | None:
        name, scan = written.text, self._scan
        scan.take(":")
        if written.raw == "*":
            if scan.take("*"):
                return Leaf(Everything())
            scan.fail(
                "*: stands before *, for every document",
                written.at,
                fix="write *:*, or name a field.",
            )
        if name not in self._fields.kinds:
            fix = (
                "name one of the fields; if the colon belongs to the word, write \\: or put it in"
                " quotation marks."
            )
            scan.fail(
                f"There is no field {name!r}: {nearest(name, self._fields.kinds)}",
                written.at,
                fix=fix,
            )
        scan.space()
        for sign in _COMPARED:
            if scan.take(sign):
                return self._compared(name, sign)
        if scan.take("("):
            return self._group(name, scan.at - 1)
        self._deeper(written.at)
        clause = self._clause(name)
        self._depth -= 1
        return clause

    def _group(self, field: str | None, at: int) -> Node | None:
        scan = self._scan
        parts = self._parts(field)
        if not scan.take(")"):
            scan.fail(
                "A parenthesis is never closed",
                at,
                fix="close it with ), or write \\( for one that is meant so.",
            )
        if not parts:
            scan.fail("There is nothing between the parentheses", at, fix="leave them out.")
        least = None
        if scan.take("~"):
            least = int(scan.number() or 0)
            if least < 1:
                scan.fail(
                    "(…)~ asks for at least so many of the clauses",
                    fix="write a number from 1 on, as in (a b c)~2.",
                )
        return self._together(parts, least, at)

    def _quoted(self, field: str | None, text: str, at: int) -> Node | None:
        if self._kind(field) != TEXT:
            return self._exact(str(field), text, at)
        slop = 0
        if self._scan.take("~"):
            slop = int(self._scan.number() or 0)
            if slop > MAX_SLOP:
                self._scan.fail(
                    f"A phrase is moved by at most {MAX_SLOP:,} places",
                    at,
                    fix="use AND, where the places do not matter.",
                )
        return self._phrase(field, text, slop, at)

    def _phrase(self, field: str | None, text: str, slop: int, at: int) -> Node | None:
        words = [
            (word, place)
            for place, word in enumerate(self._analysis.words(text))
            if word is not None
        ]
        if not words:
            return None
        if len(words) == 1:
            return Leaf(Word(field, words[0][0]))
        if len(words) > MAX_PHRASE:
            self._scan.fail(
                f"A phrase has {len(words):,} words; {MAX_PHRASE} are the most",
                at,
                fix="look for a part of it.",
            )
        return Leaf(
            Phrase(field, tuple((word, place - words[0][1]) for word, place in words), slop)
        )

    def _word(self, field: str | None, written: Written) -> Node | None:
        scan, kind = self._scan, self._kind(field)
        if written.raw == "*":
            return Leaf(Everything() if field is None else Exists(field))
        if kind not in {TEXT, STRING}:
            if written.is_wild:
                scan.fail(
                    f"The field {field!r} has values, not words",
                    written.at,
                    fix=f"name a value or a range: {field}:5, {field}:[1 TO 9], {field}:*.",
                )
            return self._exact(str(field), written.text, written.at)
        if written.is_wild:
            return Leaf(self._wild(field, written))
        if scan.take("~"):
            return self._fuzzy(field, written)
        return (
            self._phrase(field, written.text, 0, written.at)
            if kind == TEXT
            else Leaf(Word(field, written.text))
        )

    def _wild(self, field: str | None, written: Written) -> Test:
        """Prefixes are the most frequent kind. Of text the plain parts are folded as words are."""
        plain = sum(
            len(part) for part, wild in zip(written.parts, written.wild, strict=True) if not wild
        )
        least = MIN_PLAIN_WHEN_LEADING if written.wild[0] else MIN_PLAIN
        if plain < least:
            self._scan.fail(
                f"{written.raw} would fit nearly every word",
                written.at,
                fix=f"give at least {least} characters beside * and ?.",
            )
        parts = tuple(
            part if wild else self._folded(field, part, written)
            for part, wild in zip(written.parts, written.wild, strict=True)
        )
        if len(parts) == 2 and written.wild == (False, True) and parts[1] == "*":
            return Prefix(field, parts[0])
        return Wildcard(
            field,
            tuple(
                "\0" + part if wild else part
                for part, wild in zip(parts, written.wild, strict=True)
            ),
        )

    def _folded(self, field: str | None, part: str, written: Written) -> str:
        """A part of a word, as the words of documents are written: not stemmed, since it is
        none.
        """
        if self._kind(field) != TEXT:
            return part
        words = Analysis().words(part)
        if len(words) != 1 or words[0] is None:
            self._scan.fail(
                f"{written.raw} is more than one word",
                written.at,
                fix=(
                    "use * and ? within words; put what stands between words in quotation marks,"
                    " without them."
                ),
            )
        return words[0]

    def _fuzzy(self, field: str | None, written: Written) -> Node | None:
        scan = self._scan
        edits = scan.number()
        if edits is not None and (edits > MAX_EDITS or edits != int(edits)):
            scan.fail(
                f"A word may be at most {MAX_EDITS} edits away",
                written.at,
                fix="write word~1 or word~2.",
            )
        text: str | None = written.text
        if self._kind(field) == TEXT:
            words = self._analysis.words(written.text)
            if len(words) > 1:
                scan.fail(
                    f"{written.raw} is more than one word",
                    written.at,
                    fix="use ~ behind one word, or behind a phrase in quotation marks.",
                )
            text = words[0] if words else None
        if text is None:
            return None
        chosen = (
            int(edits) if edits is not None else 0 if len(text) < 3 else 1 if len(text) < 6 else 2
        )
        return Leaf(Fuzzy(field, text, chosen) if chosen else Word(field, text))

    # Values of filter columns

    def _kind(self, field: str | None) -> str:
        return TEXT if field is None else self._fields.kinds[field]

    def _exact(self, field: str, text: str, at: int) -> Node:
        if self._kind(field) == STRING:
            return Leaf(Word(field, text))
        return self._between(field, (text, text), at, text)

    def _compared(self, field: str, sign: str) -> Node:
        at = self._scan.at
        value = self._scan.bound()
        if value is None:
            self._scan.fail("A comparison needs a value", at, fix=f"write it as in {field}:>=10.")
        ends = (value, None) if sign[0] == ">" else (None, value)
        return self._between(
            field, ends, at, f"{sign}{value}", with_low="=" in sign, with_high="=" in sign
        )

    def _range(self, field: str | None, at: int) -> Node:
        scan = self._scan
        if field is None:
            scan.fail("A range belongs to a field", at, fix="name it: price:[10 TO 20].")
        with_low = scan.next == "["
        scan.at += 1
        low = scan.bound()
        if not scan.operator("TO", ""):
            scan.fail("TO is missing between the ends of a range", fix="write it as [10 TO 20].")
        high = scan.bound()
        scan.space()
        if not (scan.next and scan.next in "]}"):
            scan.fail(
                "A range is never closed", at, fix="close it with ], or with } without its end."
            )
        with_high = scan.next == "]"
        scan.at += 1
        return self._between(
            field, (low, high), at, scan.text[at : scan.at], with_low=with_low, with_high=with_high
        )

    def _between(
        self,
        field: str,
        ends: tuple[str | None, str | None],
        at: int,
        written: str,
        *,
        with_low: bool = True,
        with_high: bool = True,
    ) -> Node:
        kind = self._kind(field)
        if kind in {TEXT, STRING}:
            self._scan.fail(
                f"The field {field!r} has {'words' if kind == TEXT else 'texts'}, and ranges are"
                " for numbers and times",
                at,
                fix=f"name a value: {field}:value, or the beginning of one: {field}:val*.",
            )
        try:
            return Leaf(
                Range(field, *closed(kind, *ends, with_low=with_low, with_high=with_high), written)
            )
        except UnfitValue as unfit:
            self._scan.fail(f"The field {field!r} takes {unfit}", at, fix="write such a value.")


_HOW = (
    'write words, "phrases", field:value, (groups) and AND, OR, NOT between them; a backslash'
    " before a sign that is meant so."
)


def _plain(signed: _Signed) -> Node | None:
    return Not(signed.node) if signed.sign == "-" and signed.node is not None else signed.node


def _one_of(nodes: list[Node], least: int) -> Node:
    return nodes[0] if len(nodes) == 1 else Any(tuple(nodes), least)
