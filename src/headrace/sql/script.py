"""A text of SQL: its tokens, its statements, and the places in it.

`Script` cuts the text into tokens once; a statement, a clause and an expression are a `Span`, which
is a range of tokens. The text of a span is passed on as it was written, but for comments.

Strings, names in backticks and comments are as in Spark SQL. What a text may be is bounded here:
its length, that of a statement, and how deep brackets are nested.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from headrace.expressions.parser import caret_excerpt
from headrace.sql.problems import SqlRefusal

MAX_TEXT = 4_000_000
MAX_STATEMENT = 200_000
MAX_DEPTH = 100
_TOKEN = re.compile(
    r"""
    (?P<space>\s+|--[^\n]*)
  | (?P<comment>/\*)
  | (?P<string>[rR]'[^']*'|[rR]"[^"]*"|(?:[xX])?'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
  | (?P<quoted>`(?:[^`]|``)*`)
  | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?:BD|[LSYDF])?(?![A-Za-z0-9_])|\d+)
  | (?P<word>[^\W\d]\w*)
  | (?P<sign><=>|=>|->|::|<>|<=|>=|!=|==|\|\||[-+*/%&|^~!=<>(){}\[\],.;:?@$\#])
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")
OPENING = {"(": ")", "[": "]", "{": "}"}
CLOSING = frozenset(OPENING.values())
WORD, QUOTED, STRING, NUMBER, SIGN = "word", "quoted", "string", "number", "sign"


@dataclass(frozen=True, slots=True)
class Token:
    """A token: its kind, its text as it is written, and where it stands in the script's text."""

    kind: str
    text: str
    start: int
    stop: int
    depth: int
    """How many brackets are open before it; of a closing bracket, before its opening one."""

    @property
    def upper(self) -> str:
        """The word in capitals; of what is no word, the sign, or nothing."""
        return self.text.upper() if self.kind == WORD else self.text if self.kind == SIGN else ""

    @property
    def name(self) -> str:
        """The name that a word or a name in backticks is."""
        return self.text[1:-1].replace("``", "`") if self.kind == QUOTED else self.text

    @property
    def value(self) -> str:
        """The value of a string, without its quotes and escapes."""
        text = self.text
        if text[0] in "rR":
            return text[2:-1]
        return re.sub(r"\\(.)", _unescaped, text[1:-1], flags=re.DOTALL)


def _unescaped(match: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}.get(match[1], match[1])


class Script:
    """A text of SQL.

    Args:
        text: The text.
        name: What errors call it, such as the file's name.
    """

    def __init__(self, text: str, name: str = "") -> None:
        self.text = text
        self.name = name
        if len(text) > MAX_TEXT:
            raise SqlRefusal(
                0,
                f"The text has {len(text):,} characters, and may have {MAX_TEXT:,}.",
                "split it into several files.",
            )
        self.tokens = list(self._tokenize())

    def _tokenize(self) -> Iterator[Token]:
        text, at = self.text, 0
        open_brackets: list[tuple[str, int]] = []
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._unreadable(at)
            kind = str(match.lastgroup)
            if kind == "comment":
                at = self._comment_end(at)
                continue
            if kind != "space":
                sign = match[0] if kind == SIGN else ""
                if sign == ";":  # a bracket that is not closed is a problem of its own statement
                    open_brackets.clear()
                if sign in CLOSING and open_brackets and open_brackets[-1][0] == sign:
                    open_brackets.pop()
                yield Token(kind, match[0], at, match.end(), len(open_brackets))
                if sign in OPENING:
                    open_brackets.append((OPENING[sign], at))
                    if len(open_brackets) > MAX_DEPTH:
                        raise SqlRefusal(
                            at,
                            f"More than {MAX_DEPTH} brackets are open here.",
                            "split the statement, with WITH name AS (SELECT …).",
                        )
            at = match.end()

    def _comment_end(self, at: int) -> int:
        """The offset behind a comment, which may have others inside."""
        depth = 0
        for edge in _COMMENT_EDGE.finditer(self.text, at):
            depth += 1 if edge[0] == "/*" else -1
            if depth == 0:
                return edge.end()
        raise SqlRefusal(at, "This comment is not closed.", "close it with */.")

    def _unreadable(self, at: int) -> SqlRefusal:
        sign = self.text[at]
        if sign in "'\"`":
            what = "name" if sign == "`" else "string"
            return SqlRefusal(at, f"This {what} is not closed.", f"close it with {sign}.")
        return SqlRefusal(at, f"{sign!r} is no part of SQL.", "remove it, or quote it.")

    # Statements

    def statements(self) -> list[Span]:
        """The statements, which semicolons separate, without empty ones."""
        ends = [at for at, token in enumerate(self.tokens) if token.text == ";"]
        spans = [
            Span(self, before + 1, end) for before, end in pairwise([-1, *ends, len(self.tokens)])
        ]
        return [span for span in spans if span]

    # Places

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def line_and_position(self, offset: int) -> tuple[int, int]:
        """The line and the position in it of an offset, both counted from 1."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def place(self, offset: int) -> str:
        """How errors call an offset."""
        line, position = self.line_and_position(offset)
        file = f"{self.name}, " if self.name else ""
        place = f"{file}line {line}, position {position}"
        return place if self.name else place.capitalize()

    def excerpt(self, offset: int) -> str:
        """The line of an offset, with a caret below it."""
        line, position = self.line_and_position(offset)
        start = self._line_starts[line - 1]
        end = self.text.find("\n", start)
        shown = self.text[start : len(self.text) if end < 0 else end]
        return caret_excerpt(shown.replace("\t", " ").replace("\r", " "), 1, position - 1)


@dataclass(frozen=True)
class Span:
    """A range of a script's tokens: from the first up to but not including `stop`."""

    script: Script
    first: int
    stop: int

    def __bool__(self) -> bool:
        return self.first < self.stop

    def __len__(self) -> int:
        return max(0, self.stop - self.first)

    @property
    def tokens(self) -> list[Token]:
        return self.script.tokens[self.first : self.stop]

    @property
    def start(self) -> int:
        """The offset of the first token; of an empty span, that of the next token or the end."""
        tokens = self.script.tokens
        if self.first < len(tokens):
            return tokens[self.first].start
        return tokens[-1].stop if tokens else 0

    @property
    def end(self) -> int:
        """The offset behind the last token."""
        return self.script.tokens[self.stop - 1].stop if self else self.start

    def text(self) -> str:
        """The tokens' text as it is written, without comments."""
        return "".join(piece for piece, _ in self.pieces())

    def pieces(self) -> Iterator[tuple[str, int | None]]:
        """The span's text in pieces: the tokens' texts with their indices, and the gaps between
        them. A gap with a comment is one space.
        """
        before: int | None = None
        for index in range(self.first, self.stop):
            token = self.script.tokens[index]
            if before is not None and before < token.start:
                gap = self.script.text[before : token.start]
                yield (gap if gap.isspace() else " "), None
            yield token.text, index
            before = token.stop

    @property
    def depth(self) -> int:
        """How many brackets are open before the span."""
        return self.script.tokens[self.first].depth if self else 0

    def top_level(self) -> list[int]:
        """The indices of the tokens outside of the brackets that the span opens."""
        depth, tokens = self.depth, self.script.tokens
        return [at for at in range(self.first, self.stop) if tokens[at].depth == depth]

    def closing(self, opening: int) -> int:
        """The index of the bracket that closes the one at an index.

        Raises:
            SqlRefusal: There is none in the span.
        """
        tokens = self.script.tokens
        wanted, depth = OPENING[tokens[opening].text], tokens[opening].depth
        for at in range(opening + 1, self.stop):
            if tokens[at].depth == depth and tokens[at].text == wanted:
                return at
            if tokens[at].depth < depth or (tokens[at].depth == depth):
                break
        raise SqlRefusal(
            tokens[opening].start,
            f"This {tokens[opening].text!r} is not closed.",
            f"close it with {wanted!r}.",
        )

    def check_brackets(self) -> None:
        """Raise SqlRefusal for the first bracket that is not closed, or that closes none."""
        pending: list[Token] = []
        for token in self.tokens:
            if token.kind != SIGN:
                continue
            if token.text in OPENING:
                pending.append(token)
            elif token.text in CLOSING:
                if not pending:
                    raise SqlRefusal(
                        token.start, f"This {token.text!r} closes no bracket.", "remove it."
                    )
                if OPENING[pending[-1].text] != token.text:
                    break
                pending.pop()
        if pending:
            raise SqlRefusal(
                pending[-1].start,
                f"This {pending[-1].text!r} is not closed.",
                f"close it with {OPENING[pending[-1].text]!r}.",
            )

    def split(self, sign: str = ",") -> list[Span]:
        """The parts that a sign or a word separates, outside of brackets."""
        tokens = self.script.tokens
        cuts = [at for at in self.top_level() if tokens[at].upper == sign]
        return [
            Span(self.script, before + 1, cut)
            for before, cut in pairwise([self.first - 1, *cuts, self.stop])
        ]

    def unwrapped(self) -> Span:
        """The span without the brackets around the whole of it."""
        span = self
        while (
            len(span) >= 2
            and span.tokens[0].text == "("
            and span.script.tokens[span.stop - 1].text == ")"
            and span.closing(span.first) == span.stop - 1
        ):
            span = Span(span.script, span.first + 1, span.stop - 1)
        return span

    def conjuncts(self) -> list[Span]:
        """The conditions that AND connects at the top; the span alone if OR does."""
        span = self.unwrapped()
        tokens = span.script.tokens
        cuts: list[int] = []
        cases = betweens = 0
        for at in span.top_level():
            word = tokens[at].upper
            if word in {"CASE", "END"}:
                cases += 1 if word == "CASE" else -1
            elif cases:
                continue
            elif word == "BETWEEN":
                betweens += 1
            elif word == "OR":
                return [span]
            elif word == "AND":
                if betweens:
                    betweens -= 1
                else:
                    cuts.append(at)
        parts = [
            Span(span.script, before + 1, cut)
            for before, cut in pairwise([span.first - 1, *cuts, span.stop])
        ]
        return [inner for part in parts for inner in (part.conjuncts() if cuts else [part])]
