"""A pattern's text to its tree. Every mistake is told with the place where it is.

small{3,} big            three or more small ones, directly followed by a big one
a -> b ->> c             skipping what does not fit: to the next b; to any later c
a (-> b)+ !x -> c        several b's, rows between; then a c, with no x before it
(a | b)? c+? PERMUTE(d, e)
placed !shipped          nothing shipped until the time is up
^ a b $                  from the key's first row on; no row follows until the time is up
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from headrace.errors import BadPattern
from headrace.operators.patterns.syntax import ANY, DIRECTLY, NEXT, Either, Link, Node, Pattern, Permute, Repeat, Sequence, Symbol, may_be_empty

MOST_CHARACTERS = 10_000
MOST_DEPTH = 50
_TOKENS = re.compile(r"\s*(?:(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<sign>->>|->|[(){}|?*+,!^$]))")
_FIX = 'write it as in "a b+ (c | d)?", "a -> b" or "placed !shipped".'


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


def parse_pattern(text: Any, *, where: str = "a pattern") -> Pattern:
    """The tree of a pattern. BadPattern, with the place, if it cannot be read."""
    if not isinstance(text, str) or not text.strip():
        raise BadPattern(f"The step {where} has an empty pattern.", fix=_FIX)
    if len(text) > MOST_CHARACTERS:
        raise BadPattern(f"The step {where} has a pattern of {len(text):,} characters.", fix=f"use at most {MOST_CHARACTERS:,}.")
    return _Parser(text, where).pattern()


class _Parser:
    """One function for each rule of the grammar."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        self._tokens = self._split()
        self._at, self._depth = 0, 0

    def _split(self) -> list[_Token]:
        tokens, at = [], 0
        while self._text[at:].strip():
            found = _TOKENS.match(self._text, at)
            if found is None:
                at += len(self._text[at:]) - len(self._text[at:].lstrip())
                self._fail(f"{self._text[at]!r} means nothing here", at)
            kind = found.lastgroup or ""
            tokens.append(_Token(kind, found[kind], found.start(kind)))
            at = found.end()
        return [*tokens, _Token("end", "", len(self._text.rstrip()))]

    # Tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _takes(self, *signs: str) -> _Token | None:
        """The next token, if it is one of these signs."""
        token = self._next
        if token.kind != "sign" or token.text not in signs:
            return None
        self._at += 1
        return token

    def _expect(self, sign: str) -> None:
        if self._takes(sign) is None:
            self._fail(f"{sign!r} was expected", self._next.at)

    def _fail(self, what: str, at: int) -> NoReturn:
        raise BadPattern(f"The step {self._where} has a pattern that cannot be read at position {at + 1}: {what}.\n{pointed(self._text, at)}", fix=_FIX)

    # Rules

    def pattern(self) -> Pattern:
        """The whole text."""
        anchored = self._takes("^") is not None
        root, absent = self._either(top=True)
        alone = self._takes("$") is not None
        if self._next.kind != "end":
            said = {")": "there is no '(' for this ')'", "^": "'^' stands at the beginning only"}
            self._fail(said.get(self._next.text, f"{self._next.text!r} was not expected"), self._next.at)
        return Pattern(self._text, root, anchored, absent, alone)

    def _either(self, *, top: bool = False) -> tuple[Node, tuple[str, ...]]:
        options: list[Node] = []
        begins = self._next.at
        absent: tuple[str, ...] = ()
        while True:
            option, found = self._sequence(top=top)
            options.append(option)
            absent += found
            if self._takes("|") is None:
                break
        if absent and len(options) > 1:
            self._fail("what must be absent at the end cannot be one of several choices", begins)
        return (options[0] if len(options) == 1 else Either(tuple(options))), absent

    def _sequence(self, *, top: bool) -> tuple[Node, tuple[str, ...]]:
        """Elements with what lies before each; and what must be absent behind the last, which only the whole pattern can have."""
        items: list[tuple[Link, Node]] = []
        link, last = DIRECTLY, self._next
        while True:
            arrow = self._takes("->", "->>")
            if arrow is not None:
                last = arrow
                if top and not items:
                    self._fail("nothing comes before the first row, so nothing can be skipped", arrow.at)
                link = replace(link, mode=max(link.mode, NEXT if arrow.text == "->" else ANY))
            if (sign := self._takes("!")) is not None:
                last = sign
                link = self._absence(link, items, sign)
                continue
            if not self._begins_element():
                break
            if link.absent and not link.mode:
                self._fail("the rows on either side of what must be absent follow each other directly: write -> before this one", self._next.at)
            items.append((link, self._element()))
            link = DIRECTLY
        if link != DIRECTLY and not (link.absent and top):
            self._fail("what must be absent is only known here when something follows it" if link.absent else "something must follow", last.at)
        if not items:
            self._fail("a symbol was expected", self._next.at)
        plain = len(items) == 1 and items[0][0] == DIRECTLY
        return (items[0][1] if plain else Sequence(tuple(items))), link.absent

    def _absence(self, link: Link, items: list[tuple[Link, Node]], sign: _Token) -> Link:
        if not items:
            self._fail("what must be absent stands behind a row, not before the first", sign.at)
        names: list[str] = []
        if self._takes("("):
            names.append(self._name())
            while self._takes("|"):
                names.append(self._name())
            self._expect(")")
        else:
            names.append(self._name())
        if (more := self._takes("?", "*", "+", "{")) is not None:
            self._fail("what must be absent has no number", more.at)
        return replace(link, absent=(*link.absent, *names))

    def _name(self) -> str:
        if self._next.kind != "name":
            self._fail("a symbol was expected", self._next.at)
        self._at += 1
        return self._tokens[self._at - 1].text

    def _begins_element(self) -> bool:
        return self._next.kind == "name" or (self._next.kind == "sign" and self._next.text == "(")

    def _element(self) -> Node:
        node = self._atom()
        while (sign := self._takes("?", "*", "+", "{")) is not None:
            if isinstance(node, Repeat):
                self._fail("a number was given already: put the element in parentheses", sign.at)
            least, most = self._bounds(sign)
            if most is None and may_be_empty(node):
                self._fail("what may be left out cannot be repeated for ever: write a* instead of (a?)*", sign.at)
            node = Repeat(node, least, most, self._takes("?") is None, sign.at)
        return node

    def _atom(self) -> Node:
        token = self._next
        self._at += 1
        if token.kind == "name" and token.text.upper() == "PERMUTE" and self._next.text == "(":
            self._at += 1
            return self._permutation(token)
        if token.kind == "name":
            return Symbol(token.text, token.at)
        self._deeper(token)
        node, _ = self._either()
        self._depth -= 1
        if self._takes(")") is None:
            self._fail("this '(' is not closed" if self._next.kind == "end" else f"{self._next.text!r} was not expected", token.at if self._next.kind == "end" else self._next.at)
        return node if isinstance(node, Symbol | Either) else Sequence(node.items if isinstance(node, Sequence) else ((DIRECTLY, node),))

    def _deeper(self, token: _Token) -> None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self._fail(f"parentheses are nested more than {MOST_DEPTH} deep", token.at)

    def _permutation(self, token: _Token) -> Node:
        self._deeper(token)
        nodes = [self._either()[0]]
        while self._takes(","):
            nodes.append(self._either()[0])
        self._depth -= 1
        self._expect(")")
        if not 2 <= len(nodes) <= MOST_PERMUTED:
            self._fail(f"PERMUTE takes from 2 to {MOST_PERMUTED} elements", token.at)
        return Permute(tuple(nodes))

    def _bounds(self, sign: _Token) -> tuple[int, int | None]:
        if sign.text != "{":
            return {"?": (0, 1), "*": (0, None), "+": (1, None)}[sign.text]
        least = self._number()
        most = least
        if self._takes(","):
            most = self._number()
        elif least is None:
            self._fail("a number was expected", self._next.at)
        self._expect("}")
        if most is not None and (most < (least or 0) or most == 0):
            self._fail("the upper bound must be at least 1, and not below the lower one", sign.at)
        return least or 0, most

    def _number(self) -> int | None:
        token = self._next
        if token.kind != "number":
            return None
        self._at += 1
        if len(token.text) > 6:
            self._fail("this number is too large", token.at)
        return int(token.text)


MOST_PERMUTED = 5


def pointed(text: str, at: int) -> str:
    """The line with a mark below a place."""
    before = text[:at]
    line = text.splitlines()[before.count("\n")] if text else ""
    start = at - (before.rfind("\n") + 1)
    begin = max(0, start - 60)
    return f"    {line[begin : begin + 120]}\n    {' ' * (start - begin)}^"
