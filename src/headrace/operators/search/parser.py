"""The parser of queries: from text to a tree. Every mistake is reported with its position.

    storm "heavy rain"~2 -football          words, phrases (moved by two places), what must not be
                                            there
    +wind +(north OR south) harbour         what must be there; the rest adds to the score
    title:budget AND NOT (draft OR "for review")
    (storm flood hail thunder)~2            at least two of them
    colo?r  anal*  brok~1  /stor[mk]s?/     one character, any characters, at most one edit, a
                                            regular expression for whole words
    price:[10 TO 20}  price:>=10  day:[2026-01-01 TO *]  language:en  rating:*  *:*

NOT binds more than AND, AND more than OR, and OR more than standing side by side. Of words side by
side one must match (`default="and"`: all of them).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BadSearch, nearest
from headrace.operators.search.analyzer import Analyzer
from headrace.operators.search.syntax import (
    STRING,
    TEXT,
    AllOf,
    AtLeast,
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
    Regex,
    Test,
    UnfitValue,
    Wildcard,
    Word,
    closed_range,
    with_boost,
)
from headrace.operators.search.vocabulary import whole_word

# The scanner


_SHOWN = 60
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"(?:\\.|[^\s()\[\]{}\":^~\\])+", re.DOTALL)
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"', re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_BOUND = re.compile(r'"((?:\\.|[^"\\])*)"|((?:\\.|[^\s()\]}^\"\\])+)', re.DOTALL)
_PIECES = re.compile(r"\\(.)|([*?])|([^\\*?]+)", re.DOTALL)
_REGEX = re.compile(r"/((?:\\.|[^/\\])+)/(?=[\s()\[\]{}^]|$)", re.DOTALL)
_MAX_NUMBER = 1e15
RESERVED_WORDS = ("AND", "OR", "NOT")


@dataclass(frozen=True)
class RawWord:
    """A word as it is written: plain texts, and `*` and `?` where they are wildcards."""

    raw: str
    position: int
    parts: tuple[str, ...]
    wild: tuple[bool, ...]

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def is_wild(self) -> bool:
        return any(self.wild)


class Scanner:
    """The text of a query, read from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0

    def fail(self, message: str, position: int | None = None, *, fix: str = "") -> NoReturn:
        """Raise `BadSearch` with the part of the line around a position, and a caret under it."""
        position = self.position if position is None else position
        first = max(0, position - _SHOWN // 2)
        shown = re.sub(r"\s", " ", self.text[first : first + _SHOWN])
        before, after = "…" if first else "", "…" if first + _SHOWN < len(self.text) else ""
        caret = " " * (position - first + len(before)) + "^"
        raise BadSearch(
            f"{message} (at character {position}):\n    {before}{shown}{after}\n    {caret}",
            fix=fix,
            position=position,
        )

    def space(self) -> None:
        """Skip white space."""
        if self.text[self.position : self.position + 1].isspace():
            match = _SPACE.match(self.text, self.position)
            self.position = match.end() if match else self.position

    @property
    def next(self) -> str:
        return self.text[self.position : self.position + 1]

    def take(self, sign: str) -> bool:
        """Whether the text goes on with a sign; if so, the scanner moves behind it."""
        if not self.text.startswith(sign, self.position):
            return False
        self.position += len(sign)
        return True

    def operator(self, name: str, sign: str) -> bool:
        """Whether an operator follows, as a word or as a sign; if so, the scanner moves behind
        it.
        """
        self.space()
        if self.text[self.position : self.position + 1] not in (name[0], sign[:1]):
            return False  # the usual case, decided quickly
        if sign and self.take(sign):
            return True
        end = self.position + len(name)
        if self.text.startswith(name, self.position) and (
            end == len(self.text) or self.text[end] in ' \t\r\n("+-'
        ):
            self.position = end
            return True
        return False

    def number(self) -> float | None:
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return min(float(match[0]), _MAX_NUMBER)

    def quoted(self) -> str:
        match = _QUOTED.match(self.text, self.position)
        if match is None:
            self.fail(
                "A quotation mark is never closed",
                fix='close it with ", or write \\" for a quotation mark that is meant so.',
            )
        self.position = match.end()
        return re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL)

    def regex(self) -> str | None:
        """The regular expression between slashes, if one stands here."""
        match = _REGEX.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match[1].replace("\\/", "/")

    def word(self) -> RawWord | None:
        match = _WORD.match(self.text, self.position)
        if match is None:
            if self.next == "\\":
                self.fail(
                    "A backslash stands before nothing",
                    fix="write \\\\ for a backslash that is meant so.",
                )
            return None
        position, self.position = self.position, match.end()
        pieces = [
            (plain or escaped, False) if not wild else (wild, True)
            for escaped, wild, plain in _PIECES.findall(match[0])
        ]
        return RawWord(
            raw=match[0],
            position=position,
            parts=tuple(part for part, _ in pieces),
            wild=tuple(wild for _, wild in pieces),
        )

    def bound(self) -> str | None:
        """One end of a range; None for `*`."""
        self.space()
        match = _BOUND.match(self.text, self.position)
        if match is None:
            self.fail(
                "A range needs two ends", fix="write it as [10 TO 20], {10 TO 20} or [10 TO *]."
            )
        self.position = match.end()
        if match[2] == "*":
            return None
        return re.sub(
            r"\\(.)", r"\1", match[1] if match[1] is not None else match[2], flags=re.DOTALL
        )


MAX_CHARACTERS = 20_000
MAX_CLAUSES = 1_024
MAX_DEPTH = 32
MAX_SLOP = 1_000
MAX_PHRASE = 100
MAX_EDITS = 2
MAX_REGEX = 500
MAX_PATTERNS = 100
"""Words with wildcards or edits, and regular expressions, of which each is held against every word
of the documents.
"""
MIN_PLAIN, MIN_PLAIN_WHEN_LEADING = 1, 3
OR, AND = "or", "and"
_COMPARED = (">=", "<=", ">", "<")


@dataclass(frozen=True)
class Language:
    """How queries are parsed: the fields that they may name, the analyzer of words, and the
    operator between words side by side.
    """

    fields: Fields
    analyzer: Analyzer = field(default_factory=Analyzer)
    default: str = OR

    def parse(self, text: str | None) -> Node:
        """Parse a query.

        Raises:
            BadSearch: the text is no query; the error has the position.
        """
        if text is None or not text.strip():
            raise BadSearch(
                "The query is empty.", fix="write words to look for, or *:* for every document."
            )
        if len(text) > MAX_CHARACTERS:
            raise BadSearch(
                f"The query has {len(text):,} characters; {MAX_CHARACTERS:,} are the most.",
                fix="make several queries of it.",
            )
        return _QueryParser(text, self).query()


@dataclass(frozen=True)
class _Clause:
    sign: str
    position: int
    node: Node | None


class _QueryParser:
    """A recursive-descent parser: one method for each rule of the grammar. A node is None where the
    analyzer leaves nothing of it, as of a stop word.
    """

    def __init__(self, text: str, language: Language) -> None:
        self._scan, self._language = Scanner(text), language
        self._fields, self._analyzer = language.fields, language.analyzer
        self._depth = self._clause_count = self._pattern_count = 0

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
        return self._combine_clauses(
            self._clauses(field), min_count=None, position=self._scan.position
        )

    def _clauses(self, field: str | None) -> list[_Clause]:
        """The clauses side by side, up to the end or to what closes a group."""
        clauses: list[_Clause] = []
        self._scan.space()
        while self._scan.next and self._scan.next not in ")]}":
            clauses.append(self._disjunction(field))
            self._scan.space()
        return clauses

    def _combine_clauses(
        self, clauses: list[_Clause], min_count: int | None, position: int
    ) -> Node | None:
        """One node of clauses side by side, by their signs."""
        signed = [(clause.sign, clause.node) for clause in clauses if clause.node is not None]
        default_sign = "+" if self._language.default == AND and min_count is None else ""
        must = [node for sign, node in signed if (sign or default_sign) == "+"]
        should = [node for sign, node in signed if not (sign or default_sign)]
        must_not = [Not(node) for sign, node in signed if sign == "-"]
        if min_count is not None and min_count > len(should):
            self._scan.fail(
                f"At least {min_count} of {len(should)} clauses can never fit",
                position,
                fix=f"ask for {len(should)} at most; clauses with + or - do not count.",
            )
        if not signed:
            return None
        decides = bool(should) and (min_count is not None or not must)
        required = [*must, *([_any_of(should, min_count or 1)] if decides else []), *must_not]
        optional = should if must and min_count is None else []
        if len(required) == 1 and not optional:
            return required[0]
        return AllOf(tuple(required), tuple(optional))

    def _disjunction(self, field: str | None) -> _Clause:
        clauses = [self._conjunction(field)]
        while self._scan.operator("OR", "||"):
            clauses.append(self._conjunction(field))
        if len(clauses) == 1:
            return clauses[0]
        for clause in clauses:
            if clause.sign == "+":
                self._scan.fail(
                    "What must be there cannot be one side of OR",
                    clause.position,
                    fix="leave out the +, or the OR.",
                )
        nodes = [node for clause in clauses if (node := _signed_node(clause)) is not None]
        return _Clause("", clauses[0].position, _any_of(nodes, 1) if nodes else None)

    def _conjunction(self, field: str | None) -> _Clause:
        clauses = [self._clause_with_sign(field)]
        while self._scan.operator("AND", "&&"):
            clauses.append(self._clause_with_sign(field))
        if len(clauses) == 1:
            return clauses[0]
        nodes = [node for clause in clauses if (node := _signed_node(clause)) is not None]
        return _Clause(
            "",
            clauses[0].position,
            None if not nodes else nodes[0] if len(nodes) == 1 else AllOf(tuple(nodes)),
        )

    def _clause_with_sign(self, field: str | None) -> _Clause:
        self._scan.space()
        position = self._scan.position
        self._descend(position)
        if self._scan.operator("NOT", "!") or self._scan.take("-"):
            inner = self._clause_with_sign(field)
            signed = (
                _Clause("-", position, inner.node)
                if inner.sign != "-"
                else _Clause("", position, inner.node)
            )
        elif self._scan.take("+"):
            inner = self._clause_with_sign(field)
            signed = _Clause("-" if inner.sign == "-" else "+", position, inner.node)
        else:
            signed = _Clause("", position, self._parse_boost(self._clause(field)))
        self._depth -= 1
        return signed

    def _descend(self, position: int) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._scan.fail(
                f"The query is more than {MAX_DEPTH} levels deep",
                position,
                fix="write it with fewer parentheses.",
            )

    def _parse_boost(self, node: Node | None) -> Node | None:
        if not self._scan.take("^"):
            return node
        factor = self._scan.number()
        if factor is None:
            self._scan.fail("A boost is a number", fix="write it as in storm^2 or storm^0.5.")
        return None if node is None else with_boost(node, factor)

    # What is looked for

    def _clause(self, field: str | None) -> Node | None:
        scan = self._scan
        position = scan.position
        self._clause_count += 1
        if self._clause_count > MAX_CLAUSES:
            scan.fail(
                f"The query has more than {MAX_CLAUSES:,} clauses",
                position,
                fix="make several queries of it.",
            )
        if scan.take("("):
            return self._group(field, position)
        if scan.next == '"':
            text = scan.quoted()
            if self._kind(field) != TEXT:
                return self._exact_clause(str(field), text, position)
            slop = 0
            if self._scan.take("~"):
                slop = int(self._scan.number() or 0)
                if slop > MAX_SLOP:
                    self._scan.fail(
                        f"A phrase is moved by at most {MAX_SLOP:,} places",
                        position,
                        fix="use AND, where the places do not matter.",
                    )
            return self._phrase_clause(field, text, slop, position)
        if scan.next and scan.next in "[{":
            return self._range_clause(field, position)
        regex = scan.regex() if scan.next == "/" else None
        if regex is not None:
            return self._regex_clause(field, regex, position)
        raw_word = scan.word()
        if raw_word is None:
            scan.fail(
                (
                    "A word is missing"
                    if not scan.next or scan.next in ")]}"
                    else f"{scan.next!r} stands where a word should be"
                ),
                position,
                fix=_HOW,
            )
        if raw_word.raw in RESERVED_WORDS:
            scan.fail(
                f"{raw_word.raw} stands where a word should be",
                position,
                fix=f'write {raw_word.raw.lower()} or "{raw_word.raw}" for the word.',
            )
        if scan.next == ":":
            return self._field_clause(raw_word)
        return self._word_clause(field, raw_word)

    def _field_clause(self, raw_word: RawWord) -> Node | None:
        name, scan = raw_word.text, self._scan
        scan.take(":")
        if raw_word.raw == "*":
            if scan.take("*"):
                return Leaf(Everything())
            scan.fail(
                "*: stands before *, for every document",
                raw_word.position,
                fix="write *:*, or name a field.",
            )
        if name not in self._fields.kinds:
            fix = (
                "name one of the fields; if the colon belongs to the word, write \\: or put it in"
                " quotation marks."
            )
            scan.fail(
                f"There is no field {name!r}: {nearest(name, self._fields.kinds)}",
                raw_word.position,
                fix=fix,
            )
        scan.space()
        for sign in _COMPARED:
            if scan.take(sign):
                return self._comparison(name, sign)
        if scan.take("("):
            return self._group(name, scan.position - 1)
        self._descend(raw_word.position)
        clause = self._clause(name)
        self._depth -= 1
        return clause

    def _group(self, field: str | None, position: int) -> Node | None:
        scan = self._scan
        clauses = self._clauses(field)
        if not scan.take(")"):
            scan.fail(
                "A parenthesis is never closed",
                position,
                fix="close it with ), or write \\( for one that is meant so.",
            )
        if not clauses:
            scan.fail("There is nothing between the parentheses", position, fix="leave them out.")
        min_count = None
        if scan.take("~"):
            min_count = int(scan.number() or 0)
            if min_count < 1:
                scan.fail(
                    "(…)~ asks for at least so many of the clauses",
                    fix="write a number from 1 on, as in (a b c)~2.",
                )
        return self._combine_clauses(clauses, min_count, position)

    def _phrase_clause(self, field: str | None, text: str, slop: int, position: int) -> Node | None:
        words = [
            (word, index)
            for index, word in enumerate(self._analyzer.words(text))
            if word is not None
        ]
        if not words:
            return None
        if len(words) == 1:
            return Leaf(Word(field, words[0][0]))
        if len(words) > MAX_PHRASE:
            self._scan.fail(
                f"A phrase has {len(words):,} words; {MAX_PHRASE} are the most",
                position,
                fix="look for a part of it.",
            )
        return Leaf(
            Phrase(field, tuple((word, index - words[0][1]) for word, index in words), slop)
        )

    def _word_clause(self, field: str | None, raw_word: RawWord) -> Node | None:
        scan, kind = self._scan, self._kind(field)
        if raw_word.raw == "*":
            return Leaf(Everything() if field is None else Exists(field))
        if kind not in {TEXT, STRING}:
            if raw_word.is_wild:
                scan.fail(
                    f"The field {field!r} has values, not words",
                    raw_word.position,
                    fix=f"name a value or a range: {field}:5, {field}:[1 TO 9], {field}:*.",
                )
            return self._exact_clause(str(field), raw_word.text, raw_word.position)
        if raw_word.is_wild:
            return Leaf(self._wildcard_test(field, raw_word))
        if scan.take("~"):
            return self._fuzzy_clause(field, raw_word)
        return (
            self._phrase_clause(field, raw_word.text, 0, raw_word.position)
            if kind == TEXT
            else Leaf(Word(field, raw_word.text))
        )

    def _regex_clause(self, field: str | None, regex: str, position: int) -> Node:
        if self._kind(field) not in {TEXT, STRING}:
            self._scan.fail(
                f"The field {field!r} has values, not words",
                position,
                fix=f"name a value or a range: {field}:5, {field}:[1 TO 9], {field}:*.",
            )
        self._count_pattern(position)
        if len(regex) > MAX_REGEX:
            self._scan.fail(
                f"A regular expression has {len(regex):,} characters; {MAX_REGEX} are the most",
                position,
                fix="make several of it, with OR between them.",
            )
        try:
            # By itself too: a) | (b would end the parentheses around it.
            for text in (regex, whole_word(regex)):
                pc.match_substring_regex(pa.array([""]), text)
        except pa.ArrowInvalid as error:
            self._scan.fail(
                f"The regular expression cannot be used: {str(error).splitlines()[0]}",
                position,
                fix="write it as RE2 has them, or put a backslash before / if none is meant.",
            )
        return Leaf(Regex(field, regex))

    def _count_pattern(self, position: int) -> None:
        self._pattern_count += 1
        if self._pattern_count > MAX_PATTERNS:
            self._scan.fail(
                f"The query has more than {MAX_PATTERNS} words with wildcards or edits, or regular"
                " expressions",
                position,
                fix="make several queries of it.",
            )

    def _wildcard_test(self, field: str | None, raw_word: RawWord) -> Test:
        """A prefix or wildcard. In a text field the plain parts are folded as words are."""
        self._count_pattern(raw_word.position)
        plain = sum(
            len(part) for part, wild in zip(raw_word.parts, raw_word.wild, strict=True) if not wild
        )
        min_plain = MIN_PLAIN_WHEN_LEADING if raw_word.wild[0] else MIN_PLAIN
        if plain < min_plain:
            self._scan.fail(
                f"{raw_word.raw} would fit nearly every word",
                raw_word.position,
                fix=f"give at least {min_plain} characters beside * and ?.",
            )
        parts = tuple(
            part if wild else self._fold_part(field, part, raw_word)
            for part, wild in zip(raw_word.parts, raw_word.wild, strict=True)
        )
        if len(parts) == 2 and raw_word.wild == (False, True) and parts[1] == "*":
            return Prefix(field, parts[0])
        return Wildcard(
            field,
            tuple(
                "\0" + part if wild else part
                for part, wild in zip(parts, raw_word.wild, strict=True)
            ),
        )

    def _fold_part(self, field: str | None, part: str, raw_word: RawWord) -> str:
        """A part of a word, folded as the words of documents are: not stemmed, since it is no whole
        word.
        """
        if self._kind(field) != TEXT:
            return part
        words = Analyzer().words(part)
        if len(words) != 1 or words[0] is None:
            self._scan.fail(
                f"{raw_word.raw} is more than one word",
                raw_word.position,
                fix=(
                    "use * and ? within words; put what stands between words in quotation marks,"
                    " without them."
                ),
            )
        return words[0]

    def _fuzzy_clause(self, field: str | None, raw_word: RawWord) -> Node | None:
        scan = self._scan
        edits = scan.number()
        if edits is not None and (edits > MAX_EDITS or edits != int(edits)):
            scan.fail(
                f"A word may be at most {MAX_EDITS} edits away",
                raw_word.position,
                fix="write word~1 or word~2.",
            )
        text: str | None = raw_word.text
        if self._kind(field) == TEXT:
            words = self._analyzer.words(raw_word.text)
            if len(words) > 1:
                scan.fail(
                    f"{raw_word.raw} is more than one word",
                    raw_word.position,
                    fix="use ~ behind one word, or behind a phrase in quotation marks.",
                )
            text = words[0] if words else None
        if text is None:
            return None
        chosen = (
            int(edits) if edits is not None else 0 if len(text) < 3 else 1 if len(text) < 6 else 2
        )
        if not chosen:
            return Leaf(Word(field, text))
        self._count_pattern(raw_word.position)
        return Leaf(Fuzzy(field, text, chosen))

    # Values of filter columns

    def _kind(self, field: str | None) -> str:
        return TEXT if field is None else self._fields.kinds[field]

    def _exact_clause(self, field: str, text: str, position: int) -> Node:
        if self._kind(field) == STRING:
            return Leaf(Word(field, text))
        return self._range_leaf(field, (text, text), position, text)

    def _comparison(self, field: str, sign: str) -> Node:
        position = self._scan.position
        value = self._scan.bound()
        if value is None:
            self._scan.fail(
                "A comparison needs a value", position, fix=f"write it as in {field}:>=10."
            )
        ends = (value, None) if sign[0] == ">" else (None, value)
        return self._range_leaf(
            field, ends, position, f"{sign}{value}", with_low="=" in sign, with_high="=" in sign
        )

    def _range_clause(self, field: str | None, position: int) -> Node:
        scan = self._scan
        if field is None:
            scan.fail("A range belongs to a field", position, fix="name it: price:[10 TO 20].")
        with_low = scan.next == "["
        scan.position += 1
        low = scan.bound()
        if not scan.operator("TO", ""):
            scan.fail("TO is missing between the ends of a range", fix="write it as [10 TO 20].")
        high = scan.bound()
        scan.space()
        if not (scan.next and scan.next in "]}"):
            scan.fail(
                "A range is never closed",
                position,
                fix="close it with ], or with } without its end.",
            )
        with_high = scan.next == "]"
        scan.position += 1
        return self._range_leaf(
            field,
            (low, high),
            position,
            scan.text[position : scan.position],
            with_low=with_low,
            with_high=with_high,
        )

    def _range_leaf(
        self,
        field: str,
        ends: tuple[str | None, str | None],
        position: int,
        source_text: str,
        *,
        with_low: bool = True,
        with_high: bool = True,
    ) -> Node:
        kind = self._kind(field)
        if kind in {TEXT, STRING}:
            self._scan.fail(
                f"The field {field!r} has {'words' if kind == TEXT else 'texts'}, and ranges are"
                " for numbers and times",
                position,
                fix=f"name a value: {field}:value, or the beginning of one: {field}:val*.",
            )
        try:
            return Leaf(
                Range(
                    field,
                    *closed_range(kind, *ends, with_low=with_low, with_high=with_high),
                    source_text,
                )
            )
        except UnfitValue as unfit:
            self._scan.fail(
                f"The field {field!r} takes {unfit}", position, fix="write such a value."
            )


_HOW = (
    'write words, "phrases", field:value, (groups) and AND, OR, NOT between them; a backslash'
    " before a sign that is meant so."
)


def _signed_node(clause: _Clause) -> Node | None:
    if clause.node is None or clause.sign != "-":
        return clause.node
    return Not(clause.node)


def _any_of(nodes: list[Node], min_count: int) -> Node:
    return nodes[0] if len(nodes) == 1 else AtLeast(tuple(nodes), min_count)
