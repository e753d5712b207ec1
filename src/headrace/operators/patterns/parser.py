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

from headrace.errors import BadPattern, PlanError, nearest

# A pattern as a tree: what `parsing` makes of its text, and `automaton` takes apart.


STRICT, NEXT, ANY = 0, 1, 2
"""How a row follows the one before it: directly; as the next one that fits; as any later one that
fits.
"""
CONTIGUITIES = {STRICT: "directly", NEXT: "skip till next", ANY: "skip till any"}


@dataclass(frozen=True)
class Link:
    """What lies before an element: how far its row may be from the one before, and which symbols no
    row in between may fit.
    """

    mode: int = STRICT
    absent: tuple[str, ...] = ()

    def then(self, other: Link) -> Link:
        """Both, one after the other, with nothing between them."""
        if other == DIRECTLY:
            return self
        return Link(max(self.mode, other.mode), tuple(dict.fromkeys((*self.absent, *other.absent))))


DIRECTLY = Link()


@dataclass(frozen=True)
class Symbol:
    """A row that fits a condition. `at`: where it stands in the text."""

    name: str
    at: int = 0


@dataclass(frozen=True)
class Sequence:
    """One after the other."""

    items: tuple[tuple[Link, Node], ...]


@dataclass(frozen=True)
class Either:
    """The first that fits."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """So many times: as often as possible, or (reluctant) as rarely."""

    node: Node
    least: int
    most: int | None
    greedy: bool = True
    at: int = 0


@dataclass(frozen=True)
class Permute:
    """All of them in any order; the order in which they are written comes first."""

    nodes: tuple[Node, ...]


Node = Symbol | Sequence | Either | Repeat | Permute


@dataclass(frozen=True)
class Pattern:
    """A whole pattern. `from_first`: it begins with the first row of its key. `absent`: symbols
    that no row may fit from its last row until its time is up; `alone`: no row at all.
    """

    text: str
    root: Node
    from_first: bool = False
    absent: tuple[str, ...] = ()
    alone: bool = False

    @property
    def waits(self) -> bool:
        """Whether it is known only when its time is up."""
        return bool(self.absent) or self.alone

    @property
    def symbols(self) -> tuple[str, ...]:
        """All names, in the order of the text."""
        found: dict[str, None] = {}
        _collect(self.root, found)
        return tuple(dict.fromkeys((*found, *self.absent)))

    @property
    def taken(self) -> tuple[str, ...]:
        """The names of symbols that rows of a match can have."""
        found: dict[str, None] = {}
        _collect(self.root, found, absent=False)
        return tuple(found)


def may_be_empty(node: Node) -> bool:
    """Whether a node fits no row at all."""
    if isinstance(node, Symbol):
        return False
    if isinstance(node, Repeat):
        return node.least == 0 or may_be_empty(node.node)
    if isinstance(node, Either):
        return any(may_be_empty(each) for each in node.options)
    return all(
        may_be_empty(each)
        for each in (node.nodes if isinstance(node, Permute) else (item for _, item in node.items))
    )


def _collect(node: Node, found: dict[str, None], *, absent: bool = True) -> None:
    if isinstance(node, Symbol):
        found[node.name] = None
    elif isinstance(node, Repeat):
        _collect(node.node, found, absent=absent)
    elif isinstance(node, Sequence):
        for link, item in node.items:
            found.update(dict.fromkeys(link.absent) if absent else {})
            _collect(item, found, absent=absent)
    else:
        for each in node.options if isinstance(node, Either) else node.nodes:
            _collect(each, found, absent=absent)


MAX_CHARACTERS = 10_000
MAX_DEPTH = 50
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
    if len(text) > MAX_CHARACTERS:
        raise BadPattern(
            f"The step {where} has a pattern of {len(text):,} characters.",
            fix=f"use at most {MAX_CHARACTERS:,}.",
        )
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
        raise BadPattern(
            f"The step {self._where} has a pattern that cannot be read at position {at + 1}:"
            f" {what}.\n{pointed(self._text, at)}",
            fix=_FIX,
        )

    # Rules

    def pattern(self) -> Pattern:
        """The whole text."""
        anchored = self._takes("^") is not None
        root, absent = self._either(top=True)
        alone = self._takes("$") is not None
        if self._next.kind != "end":
            said = {")": "there is no '(' for this ')'", "^": "'^' stands at the beginning only"}
            self._fail(
                said.get(self._next.text, f"{self._next.text!r} was not expected"), self._next.at
            )
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
        """Elements with what lies before each; and what must be absent behind the last, which only
        the whole pattern can have.
        """
        items: list[tuple[Link, Node]] = []
        link, last = DIRECTLY, self._next
        while True:
            arrow = self._takes("->", "->>")
            if arrow is not None:
                last = arrow
                if top and not items:
                    self._fail(
                        "nothing comes before the first row, so nothing can be skipped", arrow.at
                    )
                link = replace(link, mode=max(link.mode, NEXT if arrow.text == "->" else ANY))
            if (sign := self._takes("!")) is not None:
                last = sign
                link = self._absence(link, items, sign)
                continue
            if not self._begins_element():
                break
            if link.absent and not link.mode:
                self._fail(
                    "the rows on either side of what must be absent follow each other directly:"
                    " write -> before this one",
                    self._next.at,
                )
            items.append((link, self._element()))
            link = DIRECTLY
        if link != DIRECTLY and not (link.absent and top):
            self._fail(
                (
                    "what must be absent is only known here when something follows it"
                    if link.absent
                    else "something must follow"
                ),
                last.at,
            )
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
                self._fail(
                    "what may be left out cannot be repeated for ever: write a* instead of (a?)*",
                    sign.at,
                )
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
            self._fail(
                (
                    "this '(' is not closed"
                    if self._next.kind == "end"
                    else f"{self._next.text!r} was not expected"
                ),
                token.at if self._next.kind == "end" else self._next.at,
            )
        return (
            node
            if isinstance(node, Symbol | Either)
            else Sequence(node.items if isinstance(node, Sequence) else ((DIRECTLY, node),))
        )

    def _deeper(self, token: _Token) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"parentheses are nested more than {MAX_DEPTH} deep", token.at)

    def _permutation(self, token: _Token) -> Node:
        self._deeper(token)
        nodes = [self._either()[0]]
        while self._takes(","):
            nodes.append(self._either()[0])
        self._depth -= 1
        self._expect(")")
        if not 2 <= len(nodes) <= MAX_PERMUTED:
            self._fail(f"PERMUTE takes from 2 to {MAX_PERMUTED} elements", token.at)
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


MAX_PERMUTED = 5


def pointed(text: str, at: int) -> str:
    """The line with a mark below a place."""
    before = text[:at]
    line = text.splitlines()[before.count("\n")] if text else ""
    start = at - (before.rfind("\n") + 1)
    begin = max(0, start - 60)
    return f"    {line[begin : begin + 120]}\n    {' ' * (start - begin)}^"


# What a pattern step is told, as plain values: which rows fit which symbol, what a match gives, how
# long it may take, and where the next one may begin.


PAST_LAST, NEXT_ROW, TO_FIRST, TO_LAST, NO_SKIP = (
    "skip past last row",
    "skip to next row",
    "skip to first",
    "skip to last",
    "no skip",
)
ONE_ROW, ALL_ROWS = "one", "all"
DROP, STOP = "drop", "stop"
MAX_ROWS = 10_000
MAX_MATCHES = 1_000
MAX_RULES = 500
_SKIP_TO = re.compile(r"skip\s+to\s+(first|last)\s+(\w+)")


@dataclass(frozen=True)
class AfterMatch:
    """Where the next match may begin. `symbol`: for those that go to the first or last row of
    one.
    """

    kind: str = PAST_LAST
    symbol: str | None = None

    @property
    def in_turn(self) -> bool:
        """Whether where a match may begin depends on those before it."""
        return self.kind not in {NEXT_ROW, NO_SKIP}

    def __str__(self) -> str:
        return self.kind if self.symbol is None else f"{self.kind} {self.symbol}"


SKIP_PAST_LAST = AfterMatch()


def after_match(text: str, symbols: tuple[str, ...], *, where: str) -> AfterMatch:
    """`after_match=` as users write it."""
    plain = " ".join(str(text).split())
    for kind in (PAST_LAST, NEXT_ROW, NO_SKIP):
        if plain.lower() == kind:
            return AfterMatch(kind)
    found = _SKIP_TO.fullmatch(plain) or _SKIP_TO.fullmatch(
        f"{' '.join(plain.split()[:-1]).lower()} {plain.split()[-1] if plain else ''}"
    )
    if found is None:
        kinds = [PAST_LAST, NEXT_ROW, f"{TO_FIRST} a", f"{TO_LAST} a", NO_SKIP]
        raise PlanError(
            f"The step {where} has after_match={text!r}: {nearest(plain, kinds)}",
            fix=f"use one of {', '.join(map(repr, kinds))}.",
        )
    if found[2] not in symbols:
        raise BadPattern(
            f"The step {where} skips to {found[2]!r}, which is no symbol of the pattern:"
            f" {nearest(found[2], symbols)}"
        )
    return AfterMatch(f"skip to {found[1]}", found[2])
