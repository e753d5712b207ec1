"""A position in a statement's tokens, from which the parsers read: words, names, literals, lists in
brackets. What is not there is refused with what was expected and the nearest word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from headrace.errors import nearest
from headrace.sql.problems import SqlRefusal
from headrace.sql.script import NUMBER, QUOTED, STRING, WORD, Script, Span, Token

_UNITS = (
    "YEAR",
    "MONTH",
    "WEEK",
    "DAY",
    "HOUR",
    "MINUTE",
    "SECOND",
    "MILLISECOND",
    "MICROSECOND",
)
_END = Token("end", "", 0, 0, 0)


class Cursor:
    """Reads the tokens of a span from its beginning."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.script: Script = span.script
        self.at = span.first
        self.stop = span.stop

    # Looking

    @property
    def token(self) -> Token:
        """The next token; one without text at the end."""
        return self.script.tokens[self.at] if self.at < self.stop else _END

    @property
    def is_done(self) -> bool:
        return self.at >= self.stop

    @property
    def offset(self) -> int:
        """Where the next token stands; behind the last one at the end."""
        if self.at < self.stop:
            return self.script.tokens[self.at].start
        return self.script.tokens[self.stop - 1].stop if self.stop else 0

    def peek(self, ahead: int = 1) -> Token:
        """The token that comes so many tokens later."""
        at = self.at + ahead
        return self.script.tokens[at] if at < self.stop else _END

    def sees(self, *words: str) -> bool:
        """Whether these words or signs come next."""
        return all(self.peek(ahead).upper == word for ahead, word in enumerate(words))

    def sees_any(self, words: Iterable[str]) -> bool:
        return self.token.upper in words

    # Reading

    def take(self, *words: str) -> bool:
        """Read these words or signs if they come next. Returns whether they did."""
        if not self.sees(*words):
            return False
        self.at += len(words)
        return True

    def expect(self, *words: str, fix: str = "") -> None:
        """Read these words or signs, which must come next."""
        if not self.take(*words):
            self.fail(" ".join(words), fix=fix)

    def take_one(self, words: Iterable[str]) -> str | None:
        """Read one of these words if it comes next."""
        word = self.token.upper
        if word and word in words:
            self.at += 1
            return word
        return None

    def expect_one(self, words: Iterable[str], *, fix: str = "") -> str:
        """Read one of these words, which must come next."""
        words = list(words)
        word = self.take_one(words)
        if word is None:
            self.fail(_alternatives(words), known=words, fix=fix)
        return word

    def name(self, what: str = "a name") -> str:
        """Read a name, which may be in backticks."""
        token = self.token
        if token.kind not in {WORD, QUOTED}:
            self.fail(what)
        self.at += 1
        return token.name

    def path(self, what: str = "a name") -> str:
        """Read a name that may have dots."""
        parts = [self.name(what)]
        while self.token.text == "." and self.peek().kind in {WORD, QUOTED}:
            self.at += 1
            parts.append(self.name(what))
        return ".".join(parts)

    def string(self, what: str = "a text in quotes") -> str:
        """Read a string; several that stand side by side are one."""
        if self.token.kind != STRING:
            self.fail(what)
        parts = []
        while self.token.kind == STRING:
            parts.append(self.token.value)
            self.at += 1
        return "".join(parts)

    def integer(self, what: str = "a whole number") -> int:
        token = self.token
        if token.kind != NUMBER or not token.text.isdigit():
            self.fail(what)
        self.at += 1
        return int(token.text)

    def interval(self) -> str:
        """Read INTERVAL '1' HOUR, INTERVAL 1 HOUR or INTERVAL '1 hour 30 minutes'. Returns the
        duration as Python spells it.
        """
        fix = "write INTERVAL '10' MINUTE, INTERVAL 10 MINUTES or INTERVAL '1 hour 30 minutes'."
        self.expect("INTERVAL", fix=fix)
        parts = []
        while self.token.kind in {STRING, NUMBER}:
            if self.token.kind == STRING:
                amount = self.string().strip()
            else:
                amount = self.token.text
                self.at += 1
            unit = self.token.upper.removesuffix("S")
            if unit in _UNITS:
                self.at += 1
                parts.append(f"{amount} {unit.lower()}")
            elif amount and not amount.replace(".", "").replace("-", "").isdigit():
                parts.append(amount)
            else:
                self.fail("a unit", known=_UNITS, fix=fix)
        if not parts:
            self.fail("a number", fix=fix)
        return " ".join(parts)

    def brackets(self, what: str = "(") -> Span:
        """Read what stands in brackets. Returns it without them."""
        if self.token.text != "(":
            self.fail(what)
        closing = self._whole().closing(self.at)
        inside = Span(self.script, self.at + 1, closing)
        self.at = closing + 1
        return inside

    def names_in_brackets(self, what: str = "a column") -> list[str]:
        """Read (a, b, c)."""
        cursor = Cursor(self.brackets())
        names = [cursor.name(what)]
        while cursor.take(","):
            names.append(cursor.name(what))
        cursor.finish()
        return names

    def until(self, words: Iterable[str]) -> Span:
        """Read up to one of some words outside of brackets, or to the end."""
        words = frozenset(words)
        first, depth = self.at, self.token.depth
        tokens = self.script.tokens
        cases = 0
        while self.at < self.stop:
            token = tokens[self.at]
            if token.depth < depth:
                break
            if token.depth == depth:
                is_function = token.upper in {"LEFT", "RIGHT"} and self.peek().text == "("
                if token.upper in words and not cases and not is_function:
                    break
                cases += (token.upper == "CASE") - (token.upper == "END" and cases > 0)
            self.at += 1
        return Span(self.script, first, self.at)

    def rest(self) -> Span:
        """Read up to the end."""
        first, self.at = self.at, self.stop
        return Span(self.script, first, self.stop)

    def value(self) -> Any:
        """Read the value of an option: a text, a number, TRUE, FALSE, a duration, a name, or a list
        of these in brackets.
        """
        token = self.token
        if token.text == "(":
            cursor = Cursor(self.brackets())
            values = [cursor.value()]
            while cursor.take(","):
                values.append(cursor.value())
            cursor.finish()
            return values
        if token.kind == STRING:
            return self.string()
        if token.upper == "INTERVAL":
            return self.interval()
        if token.kind == NUMBER or (token.text == "-" and self.peek().kind == NUMBER):
            sign = -1 if self.take("-") else 1
            text = self.token.text
            self.at += 1
            try:
                return sign * (int(text) if text.isdigit() else float(text))
            except ValueError:
                self.at -= 1
                self.fail("a number")
        if token.upper in {"TRUE", "FALSE"}:
            self.at += 1
            return token.upper == "TRUE"
        return self.path("a value")

    def finish(self, expected: str = "the end of the statement", known: Iterable[str] = ()) -> None:
        """Raise unless everything was read."""
        if not self.is_done:
            self.fail(expected, known=known)

    # Refusing

    def fail(self, expected: str, *, known: Iterable[str] = (), fix: str = "") -> NoReturn:
        """Refuse what comes next: something else was expected."""
        came = f"came {self.token.text[:60]!r}" if not self.is_done else "the text ends"
        known = list(known)
        # A misspelt word may have been read as a name: FROM orders WHER …
        before = self.peek(-1) if self.at > self.span.first else _END
        for token in (self.token, before):
            hint = nearest(token.upper, known) if token.kind == WORD and known else ""
            if hint.startswith("did you mean") and token.upper not in known:
                raise SqlRefusal(
                    token.start,
                    f"{expected} was expected here, and came {token.text[:60]!r}: {hint}",
                    fix,
                )
        raise SqlRefusal(self.offset, f"{expected} was expected here, and {came}.", fix)

    def _whole(self) -> Span:
        return Span(self.script, self.span.first, self.stop)


def _alternatives(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
