"""The words of a text in SQL as Postgres's clients write it: enough to tell statements apart, to
find their parameters, and to take a schema's name away. What a query means is not decided here.

    SELECT "a;b" FROM public.t; SHOW x     word quoted word word symbol word symbol, word word
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import InputError

WORD, QUOTED, STRING, NUMBER, PARAMETER, SYMBOL = (
    "word",
    "quoted",
    "string",
    "number",
    "parameter",
    "symbol",
)
_TOKEN = re.compile(
    r"""
    (?P<blank>\s+|--[^\n]*)
  | (?P<comment>/\*)
  | (?P<dollar>\$(?:[A-Za-z_][A-Za-z0-9_]*)?\$)
  | (?P<parameter>\$\d+)
  | (?P<escaped>[eE]'(?:[^'\\]|\\.|'')*')
  | (?P<string>(?:[xXbBnN])?'(?:[^']|'')*')
  | (?P<quoted>"(?:[^"]|"")*")
  | (?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)
  | (?P<word>[^\W\d][\w$]*)
  | (?P<symbol>::|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_PART = re.compile(r"/\*|\*/")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


@dataclass(frozen=True)
class SqlToken:
    """One word of a statement, and where it stands in the text."""

    kind: str
    text: str
    start: int
    end: int

    @property
    def lowered(self) -> str:
        return self.text.lower() if self.kind == WORD else ""

    @property
    def name(self) -> str:
        """The name that a word or a quoted identifier stands for."""
        if self.kind == QUOTED:
            return self.text[1:-1].replace('""', '"')
        return self.text.lower() if self.kind == WORD else ""

    @property
    def value(self) -> str:
        """The text that a string stands for; of other words their own text."""
        if self.kind != STRING:
            return self.text
        if self.text[0] in "eE":
            return re.sub(
                r"\\(.)|''",
                lambda match: "'" if match[1] is None else _ESCAPES.get(match[1], match[1]),
                self.text[2:-1],
                flags=re.DOTALL,
            )
        if self.text[0] == "$":
            tag = self.text.index("$", 1) + 1
            return self.text[tag:-tag]
        return self.text[self.text.index("'") + 1 : -1].replace("''", "'")


@dataclass(frozen=True)
class SqlStatement:
    """One statement of a text, without the semicolon."""

    text: str
    tokens: tuple[SqlToken, ...]
    start: int
    """Where it begins in the text that was sent."""

    @property
    def is_empty(self) -> bool:
        return not self.tokens

    def words(self, count: int) -> tuple[str, ...]:
        """The first words, in lower case; empty texts for what is none."""
        return tuple(token.lowered for token in self.tokens[:count])

    def from_token(self, number: int) -> SqlStatement:
        """What follows from a token on, as a statement of its own."""
        if number >= len(self.tokens):
            return SqlStatement("", (), self.start)
        cut = self.tokens[number].start
        shifted = tuple(
            SqlToken(token.kind, token.text, token.start - cut, token.end - cut)
            for token in self.tokens[number:]
        )
        return SqlStatement(self.text[cut:], shifted, self.start + cut)

    def between(self, first: int, last: int) -> SqlStatement:
        """The tokens from one number to before another, as a statement of its own."""
        if last <= first:
            return SqlStatement("", (), self.start)
        part = self.from_token(first)
        kept = part.tokens[: last - first]
        return SqlStatement(part.text[: kept[-1].end], kept, part.start)


def split(text: str) -> list[SqlStatement]:
    """The statements of a text; empty ones are left out.

    Raises:
        InputError: A string, a quoted name or a comment does not end.
    """
    statements: list[SqlStatement] = []
    tokens: list[SqlToken] = []
    for token in [*_tokens(text), SqlToken(SYMBOL, ";", len(text), len(text))]:
        if token.kind == SYMBOL and token.text == ";":
            if tokens:
                statements.append(_statement(text, tokens))
            tokens = []
        else:
            tokens.append(token)
    return statements


def _statement(text: str, tokens: Sequence[SqlToken]) -> SqlStatement:
    start, end = tokens[0].start, tokens[-1].end
    moved = tuple(
        SqlToken(token.kind, token.text, token.start - start, token.end - start) for token in tokens
    )
    return SqlStatement(text[start:end], moved, start)


def _tokens(text: str) -> list[SqlToken]:
    tokens = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # a symbol is any character
        kind, end = match.lastgroup or SYMBOL, match.end()
        if kind == "comment":
            end = _comment_end(text, at)
        elif kind == "dollar":
            end = text.find(match[0], end) + len(match[0])
            if end < at + 2 * len(match[0]):
                raise _unfinished("string", at)
            kind = STRING
        elif kind == SYMBOL and match[0] in "'\"":
            raise _unfinished("string" if match[0] == "'" else "quoted name", at)
        if kind not in {"blank", "comment"}:
            tokens.append(SqlToken(STRING if kind == "escaped" else kind, text[at:end], at, end))
        at = end
    return tokens


def _comment_end(text: str, start: int) -> int:
    """Where a comment ends, which may have others within it."""
    depth, at = 1, start + 2
    while depth:
        match = _COMMENT_PART.search(text, at)
        if match is None:
            raise _unfinished("comment", start)
        depth += 1 if match[0] == "/*" else -1
        at = match.end()
    return at


def _unfinished(what: str, at: int) -> InputError:
    return InputError(f"The {what} that begins at character {at + 1} does not end.")
