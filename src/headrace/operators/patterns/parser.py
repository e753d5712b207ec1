"""The parser of patterns: from text to a tree. Every mistake is reported with its position.

    small{3,} big            three or more small ones, directly followed by a big one
    a -> b ->> c             skipping rows that do not fit: to the next b; to any later c
    a (-> b)+ !x -> c        several b's, rows between; then a c, with no x before it
    (a | b)? c+? PERMUTE(d, e)
    a {- b+ -} c             the rows of b are left out where all rows of matches are emitted
    placed !shipped          nothing shipped until the time is up
    ^ a b $                  from the key's first row on; no row follows until the time is up

`automaton.py` turns the tree into an automaton. Also here: where the search goes on after a match
(`SkipStrategy`), and the defaults and bounds of a pattern step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from headrace.errors import BadPattern, PlanError, nearest
from headrace.expressions.parser import caret_excerpt

# The tree of a pattern


STRICT, SKIP_TILL_NEXT, SKIP_TILL_ANY = 0, 1, 2
"""How a row follows the one before it: directly; as the next one that fits; as any later one that
fits. Numbers, so that the larger of two is the more relaxed one.
"""
CONTIGUITIES = {
    STRICT: "directly",
    SKIP_TILL_NEXT: "skip till next",
    SKIP_TILL_ANY: "skip till any",
}


@dataclass(frozen=True)
class Contiguity:
    """How the row of an element follows the row before it: the mode, and the symbols that no row in
    between may fit.
    """

    mode: int = STRICT
    absent_symbols: tuple[str, ...] = ()

    def then(self, following: Contiguity) -> Contiguity:
        """The contiguity of two elements that follow each other with no row between them."""
        if following == STRICT_CONTIGUITY:
            return self
        absent = (*self.absent_symbols, *following.absent_symbols)
        return Contiguity(max(self.mode, following.mode), tuple(dict.fromkeys(absent)))


STRICT_CONTIGUITY = Contiguity()


@dataclass(frozen=True)
class Symbol:
    """A row that fits a condition, and the position of the symbol in the text. An excluded row
    belongs to the match, and is left out where all rows of matches are emitted.
    """

    name: str
    position: int = 0
    is_excluded: bool = False


@dataclass(frozen=True)
class Concatenation:
    """Elements that follow each other."""

    items: tuple[tuple[Contiguity, Node], ...]


@dataclass(frozen=True)
class Alternation:
    """One of several options; the first that fits is preferred."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repetition:
    """A repeated element: as often as possible (greedy), or as rarely (reluctant)."""

    node: Node
    min_count: int
    max_count: int | None
    is_greedy: bool = True
    position: int = 0


@dataclass(frozen=True)
class Permutation:
    """Elements in any order; the order in which they are written is preferred."""

    nodes: tuple[Node, ...]


Node = Symbol | Concatenation | Alternation | Repetition | Permutation


@dataclass(frozen=True)
class Pattern:
    """A whole pattern. It begins with the first row of its key if it is anchored. From its last row
    until its time is up no row may fit one of the absent symbols; or, with `no_row_follows`, no row
    may follow at all.
    """

    text: str
    root: Node
    is_anchored: bool = False
    absent_symbols: tuple[str, ...] = ()
    no_row_follows: bool = False

    @property
    def waits_for_deadline(self) -> bool:
        """Whether a match is certain only when its time is up."""
        return bool(self.absent_symbols) or self.no_row_follows

    @property
    def symbols(self) -> tuple[str, ...]:
        """All symbols, in the order of the text."""
        symbols: dict[str, None] = {}
        _collect(self.root, symbols)
        return tuple(dict.fromkeys((*symbols, *self.absent_symbols)))

    @property
    def match_symbols(self) -> tuple[str, ...]:
        """The symbols that rows of a match can have."""
        symbols: dict[str, None] = {}
        _collect(self.root, symbols, with_absent=False)
        return tuple(symbols)


def may_be_empty(node: Node) -> bool:
    """Whether a node fits no row at all."""
    if isinstance(node, Symbol):
        return False
    if isinstance(node, Repetition):
        return node.min_count == 0 or may_be_empty(node.node)
    if isinstance(node, Alternation):
        return any(may_be_empty(each) for each in node.options)
    if isinstance(node, Permutation):
        return all(may_be_empty(each) for each in node.nodes)
    return all(may_be_empty(item) for _, item in node.items)


def _collect(node: Node, symbols: dict[str, None], *, with_absent: bool = True) -> None:
    if isinstance(node, Symbol):
        symbols[node.name] = None
    elif isinstance(node, Repetition):
        _collect(node.node, symbols, with_absent=with_absent)
    elif isinstance(node, Concatenation):
        for contiguity, item in node.items:
            symbols.update(dict.fromkeys(contiguity.absent_symbols) if with_absent else {})
            _collect(item, symbols, with_absent=with_absent)
    else:
        for child in node.options if isinstance(node, Alternation) else node.nodes:
            _collect(child, symbols, with_absent=with_absent)


MAX_CHARACTERS = 10_000
MAX_DEPTH = 50
_TOKENS = re.compile(
    r"\s*(?:(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<sign>\{-|-\}|->>|->|[(){}|?*+,!^$]))"
)
_FIX = 'write it as in "a b+ (c | d)?", "a -> b" or "placed !shipped".'


@dataclass(frozen=True)
class _PatternToken:
    kind: str
    text: str
    position: int


def parse_pattern(text: Any, *, where: str = "a pattern") -> Pattern:
    """Parse the text of a pattern.

    Args:
        text: the pattern.
        where: the name of the step, for errors.

    Returns:
        The tree.

    Raises:
        BadPattern: the text is no pattern; the message points at the position.
    """
    if not isinstance(text, str) or not text.strip():
        raise BadPattern(f"The step {where} has an empty pattern.", fix=_FIX)
    if len(text) > MAX_CHARACTERS:
        raise BadPattern(
            f"The step {where} has a pattern of {len(text):,} characters.",
            fix=f"use at most {MAX_CHARACTERS:,}.",
        )
    return _PatternParser(text, where).pattern()


class _PatternParser:
    """A recursive-descent parser: one method for each rule of the grammar."""

    def __init__(self, text: str, where: str) -> None:
        self._text, self._where = text, where
        self._tokens = self._split()
        self._index, self._depth, self._exclusions = 0, 0, 0

    def _split(self) -> list[_PatternToken]:
        tokens, position = [], 0
        while self._text[position:].strip():
            match = _TOKENS.match(self._text, position)
            if match is None:
                position += len(self._text[position:]) - len(self._text[position:].lstrip())
                self._fail(f"{self._text[position]!r} means nothing here", position)
            kind = match.lastgroup or ""
            tokens.append(_PatternToken(kind, match[kind], match.start(kind)))
            position = match.end()
        return [*tokens, _PatternToken("end", "", len(self._text.rstrip()))]

    # Tokens

    @property
    def _next(self) -> _PatternToken:
        return self._tokens[self._index]

    def _accept(self, *signs: str) -> _PatternToken | None:
        """The next token, if it is one of these signs; None, and nothing is consumed, if it is
        not.
        """
        token = self._next
        if token.kind != "sign" or token.text not in signs:
            return None
        self._index += 1
        return token

    def _expect(self, sign: str) -> None:
        if self._accept(sign) is None:
            self._fail(f"{sign!r} was expected", self._next.position)

    def _fail(self, what: str, position: int) -> NoReturn:
        raise BadPattern(
            f"The step {self._where} has a pattern that cannot be read at position {position + 1}:"
            f" {what}.\n{excerpt_at(self._text, position)}",
            fix=_FIX,
        )

    # Rules

    def pattern(self) -> Pattern:
        """The rule for the whole text."""
        is_anchored = self._accept("^") is not None
        root, absent_symbols = self._alternation(top=True)
        no_row_follows = self._accept("$") is not None
        if self._next.kind != "end":
            messages = {
                ")": "there is no '(' for this ')'",
                "^": "'^' stands at the beginning only",
            }
            self._fail(
                messages.get(self._next.text, f"{self._next.text!r} was not expected"),
                self._next.position,
            )
        return Pattern(
            text=self._text,
            root=root,
            is_anchored=is_anchored,
            absent_symbols=absent_symbols,
            no_row_follows=no_row_follows,
        )

    def _alternation(self, *, top: bool = False) -> tuple[Node, tuple[str, ...]]:
        options: list[Node] = []
        start = self._next.position
        absent_symbols: tuple[str, ...] = ()
        while True:
            option, absent_at_end = self._concatenation(top=top)
            options.append(option)
            absent_symbols += absent_at_end
            if self._accept("|") is None:
                break
        if absent_symbols and len(options) > 1:
            self._fail("what must be absent at the end cannot be one of several choices", start)
        return (options[0] if len(options) == 1 else Alternation(tuple(options))), absent_symbols

    def _concatenation(self, *, top: bool) -> tuple[Node, tuple[str, ...]]:
        """Elements with the contiguity of each; and the symbols that must be absent behind the
        last, which only the whole pattern can have.
        """
        items: list[tuple[Contiguity, Node]] = []
        contiguity, last = STRICT_CONTIGUITY, self._next
        while True:
            arrow = self._accept("->", "->>")
            if arrow is not None:
                last = arrow
                if top and not items:
                    self._fail(
                        "nothing comes before the first row, so nothing can be skipped",
                        arrow.position,
                    )
                mode = SKIP_TILL_NEXT if arrow.text == "->" else SKIP_TILL_ANY
                contiguity = replace(contiguity, mode=max(contiguity.mode, mode))
            if (sign := self._accept("!")) is not None:
                last = sign
                contiguity = self._absence(contiguity, items, sign)
                continue
            if not self._starts_element():
                break
            if contiguity.absent_symbols and not contiguity.mode:
                self._fail(
                    "the rows on either side of what must be absent follow each other directly:"
                    " write -> before this one",
                    self._next.position,
                )
            items.append((contiguity, self._element()))
            contiguity = STRICT_CONTIGUITY
        if contiguity != STRICT_CONTIGUITY and not (contiguity.absent_symbols and top):
            self._fail(
                (
                    "what must be absent is only known here when something follows it"
                    if contiguity.absent_symbols
                    else "something must follow"
                ),
                last.position,
            )
        if not items:
            self._fail("a symbol was expected", self._next.position)
        plain = len(items) == 1 and items[0][0] == STRICT_CONTIGUITY
        return (items[0][1] if plain else Concatenation(tuple(items))), contiguity.absent_symbols

    def _absence(
        self, contiguity: Contiguity, items: list[tuple[Contiguity, Node]], sign: _PatternToken
    ) -> Contiguity:
        if not items:
            self._fail(
                "what must be absent stands behind a row, not before the first", sign.position
            )
        names: list[str] = []
        if self._accept("("):
            names.append(self._name())
            while self._accept("|"):
                names.append(self._name())
            self._expect(")")
        else:
            names.append(self._name())
        if (more := self._accept("?", "*", "+", "{")) is not None:
            self._fail("what must be absent has no number", more.position)
        return replace(contiguity, absent_symbols=(*contiguity.absent_symbols, *names))

    def _name(self) -> str:
        if self._next.kind != "name":
            self._fail("a symbol was expected", self._next.position)
        self._index += 1
        return self._tokens[self._index - 1].text

    def _starts_element(self) -> bool:
        return self._next.kind == "name" or (
            self._next.kind == "sign" and self._next.text in ("(", "{-")
        )

    def _element(self) -> Node:
        node = self._atom()
        while (sign := self._accept("?", "*", "+", "{")) is not None:
            if isinstance(node, Repetition):
                self._fail(
                    "a number was given already: put the element in parentheses", sign.position
                )
            min_count, max_count = self._bounds(sign)
            if max_count is None and may_be_empty(node):
                self._fail(
                    "what may be left out cannot be repeated for ever: write a* instead of (a?)*",
                    sign.position,
                )
            node = Repetition(node, min_count, max_count, self._accept("?") is None, sign.position)
        return node

    def _atom(self) -> Node:
        token = self._next
        self._index += 1
        if token.kind == "name" and token.text.upper() == "PERMUTE" and self._next.text == "(":
            self._index += 1
            self._deeper(token)
            nodes = [self._alternation()[0]]
            while self._accept(","):
                nodes.append(self._alternation()[0])
            self._depth -= 1
            self._expect(")")
            if not 2 <= len(nodes) <= MAX_PERMUTED:
                self._fail(f"PERMUTE takes from 2 to {MAX_PERMUTED} elements", token.position)
            return Permutation(tuple(nodes))
        if token.kind == "name":
            return Symbol(token.text, token.position, self._exclusions > 0)
        self._deeper(token)
        is_exclusion = token.text == "{-"
        self._exclusions += is_exclusion
        node, _ = self._alternation()
        self._exclusions -= is_exclusion
        self._depth -= 1
        if self._accept("-}" if is_exclusion else ")") is None:
            self._fail(
                (
                    f"this {token.text!r} is not closed"
                    if self._next.kind == "end"
                    else f"{self._next.text!r} was not expected"
                ),
                token.position if self._next.kind == "end" else self._next.position,
            )
        return (
            node
            if isinstance(node, Symbol | Alternation)
            else Concatenation(
                node.items if isinstance(node, Concatenation) else ((STRICT_CONTIGUITY, node),)
            )
        )

    def _deeper(self, token: _PatternToken) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"parentheses are nested more than {MAX_DEPTH} deep", token.position)

    def _bounds(self, sign: _PatternToken) -> tuple[int, int | None]:
        if sign.text != "{":
            return {"?": (0, 1), "*": (0, None), "+": (1, None)}[sign.text]
        min_count = self._number()
        max_count = min_count
        if self._accept(","):
            max_count = self._number()
        elif min_count is None:
            self._fail("a number was expected", self._next.position)
        self._expect("}")
        if max_count is not None and (max_count < (min_count or 0) or max_count == 0):
            self._fail(
                "the upper bound must be at least 1, and not below the lower one", sign.position
            )
        return min_count or 0, max_count

    def _number(self) -> int | None:
        token = self._next
        if token.kind != "number":
            return None
        self._index += 1
        if len(token.text) > 6:
            self._fail("this number is too large", token.position)
        return int(token.text)


MAX_PERMUTED = 5


def excerpt_at(text: str, position: int) -> str:
    """The line of a position, with a caret below the position."""
    before = text[:position]
    return caret_excerpt(text, before.count("\n") + 1, position - (before.rfind("\n") + 1))


# Options of a pattern step


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
class SkipStrategy:
    """Where the next match may begin after a match; with the symbol for the strategies that skip to
    the first or last row of one.
    """

    kind: str = PAST_LAST
    symbol: str | None = None

    @property
    def is_sequential(self) -> bool:
        """Whether where a match may begin depends on the matches before it."""
        return self.kind not in {NEXT_ROW, NO_SKIP}

    def __str__(self) -> str:
        return self.kind if self.symbol is None else f"{self.kind} {self.symbol}"


DEFAULT_SKIP_STRATEGY = SkipStrategy()


def parse_skip_strategy(text: str, symbols: tuple[str, ...], *, where: str) -> SkipStrategy:
    """Parse `after_match=` as users write it, such as "skip to last b".

    Raises:
        PlanError: there is no such strategy.
        BadPattern: the symbol is not one of the pattern.
    """
    plain = " ".join(str(text).split())
    for kind in (PAST_LAST, NEXT_ROW, NO_SKIP):
        if plain.lower() == kind:
            return SkipStrategy(kind)
    # The words are case-insensitive, the symbol is not.
    match = _SKIP_TO.fullmatch(plain) or _SKIP_TO.fullmatch(
        f"{' '.join(plain.split()[:-1]).lower()} {plain.split()[-1] if plain else ''}"
    )
    if match is None:
        kinds = [PAST_LAST, NEXT_ROW, f"{TO_FIRST} a", f"{TO_LAST} a", NO_SKIP]
        raise PlanError(
            f"The step {where} has after_match={text!r}: {nearest(plain, kinds)}",
            fix=f"use one of {', '.join(map(repr, kinds))}.",
        )
    if match[2] not in symbols:
        raise BadPattern(
            f"The step {where} skips to {match[2]!r}, which is no symbol of the pattern:"
            f" {nearest(match[2], symbols)}"
        )
    return SkipStrategy(f"skip to {match[1]}", match[2])
