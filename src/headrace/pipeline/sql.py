"""`pipeline.sql(…)`: SQL's row pattern recognition as a second spelling of `stream.match`, with the
same plan.

    SELECT card, total FROM payments MATCH_RECOGNIZE (
        PARTITION BY card ORDER BY paid_at
        MEASURES first(small.paid_at) AS first_at, sum(amount) AS total
        ONE ROW PER MATCH
        AFTER MATCH SKIP PAST LAST ROW
        PATTERN (small{3,} big) WITHIN INTERVAL '10' MINUTE
        DEFINE small AS amount < 10, big AS amount > 1000
    ) WHERE total > 2000

`sqlglot` cuts the text into tokens and reads everything around and inside the clauses; what stands
in a clause is taken as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from headrace.errors import BadQuery, PlanError, nearest
from headrace.operators.patterns.parser import (
    ALL_ROWS,
    ONE_ROW,
    PAST_LAST,
    TO_LAST,
    caret_excerpt,
    parse_pattern,
)
from headrace.plan.plan import time_column

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream


_OPENS, _CLOSES = (
    {TokenType.L_PAREN, TokenType.L_BRACE, TokenType.L_BRACKET},
    {
        TokenType.R_PAREN,
        TokenType.R_BRACE,
        TokenType.R_BRACKET,
    },
)
_CLAUSES = (
    ("PARTITION BY",),
    ("ORDER BY",),
    ("MEASURES",),
    ("ONE", "ROW", "PER", "MATCH"),
    ("ALL", "ROWS", "PER", "MATCH"),
    ("AFTER", "MATCH"),
    ("PATTERN",),
    ("SUBSET",),
    ("WITHIN",),
    ("DEFINE",),
)
_DIALECT = Spark()


def stream_from_sql(find_input: Callable[[str], Stream], query: str, name: str | None) -> Stream:
    """The stream that a query with MATCH_RECOGNIZE gives."""
    return _Query(find_input, query).stream(name)


@dataclass(frozen=True)
class _Part:
    """Some tokens: from one up to but not including another."""

    first: int
    stop: int


class _Spelled:
    """Names as they are spelled where they come from: in SQL, small and capital letters are the
    same.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __getitem__(self, name: str) -> str:
        """The only one that is alike; if there is none, who looks for the name says so."""
        alike = [each for each in self._names if each.lower() == name.lower()]
        return alike[0] if len(alike) == 1 else name


class _Query:
    """One query, taken apart."""

    def __init__(self, find_input: Callable[[str], Stream], text: Any) -> None:
        self.find_input, self.text = find_input, text
        self.tokens = self._split()
        self.first, self.last = self._bounds()

    def _fail(
        self,
        what: str,
        at: int,
        fix: str = "write SELECT … FROM topic MATCH_RECOGNIZE (PARTITION BY … ORDER BY … PATTERN (…) DEFINE …).",
    ) -> NoReturn:
        raise BadQuery(
            f"The query cannot be used: {what}.\n{caret_excerpt(self.text, at)}", fix=fix
        )

    def _split(self) -> list[Token]:
        if not isinstance(self.text, str) or not self.text.strip():
            raise BadQuery(
                "The query is empty.", fix="write SELECT … FROM topic MATCH_RECOGNIZE (…)."
            )
        try:
            return list(_DIALECT.tokenize(self.text))
        except TokenError as error:
            raise BadQuery(
                f"The query cannot be read: {str(error).splitlines()[0]}",
                fix="close quotes and comments.",
            ) from None

    def _bounds(self) -> tuple[int, int]:
        """The tokens of MATCH_RECOGNIZE and of the parenthesis that closes it."""
        first = next(
            (at for at, token in enumerate(self.tokens) if token.text.upper() == "MATCH_RECOGNIZE"),
            None,
        )
        if first is None:
            self._fail(
                "there is no MATCH_RECOGNIZE in it, which is what sql() is for",
                0,
                "use select, where, group_by, window and join for everything else.",
            )
        if first + 1 >= len(self.tokens) or self.tokens[first + 1].token_type != TokenType.L_PAREN:
            self._fail("'(' was expected behind MATCH_RECOGNIZE", self.tokens[first].end)
        last = self._closing(first + 1)
        return first, last

    def _closing(self, opening: int) -> int:
        depth = 0
        for at in range(opening, len(self.tokens)):
            kind = self.tokens[at].token_type
            depth += (kind in _OPENS) - (kind in _CLOSES)
            if depth == 0:
                return at
        return self._fail("this '(' is not closed", self.tokens[opening].start)

    # The clauses

    def _clauses(self) -> dict[str, _Part]:
        inside = _Part(self.first + 2, self.last)
        begins = [
            (at, words)
            for at in self._top_level(inside)
            for words in _CLAUSES
            if self._reads(at, words)
        ]
        if inside.first < inside.stop and (not begins or begins[0][0] != inside.first):
            token = self.tokens[inside.first]
            self._fail(
                f"{token.text!r} is no clause of MATCH_RECOGNIZE:"
                f" {nearest(token.text.upper(), [each[0] for each in _CLAUSES])}",
                token.start,
            )
        found: dict[str, _Part] = {}
        for (at, words), behind in zip(
            begins, [*(at for at, _ in begins[1:]), self.last], strict=True
        ):
            if words[0] in found:
                self._fail(f"{words[0]} is there twice", self.tokens[at].start)
            found[words[0]] = _Part(at + len(words), behind)
        return found

    def _top_level(self, part: _Part) -> list[int]:
        """Tokens that stand in no parentheses of their own."""
        depth, found = 0, []
        for at in range(part.first, part.stop):
            kind = self.tokens[at].token_type
            depth -= kind in _CLOSES
            if depth == 0:
                found.append(at)
            depth += kind in _OPENS
        return found

    def _reads(self, at: int, words: Sequence[str]) -> bool:
        """Whether a clause begins here."""
        return [
            " ".join(token.text.upper().split()) for token in self.tokens[at : at + len(words)]
        ] == list(words)

    def _said(self, part: _Part) -> str:
        """Tokens as they are written, without comments."""
        tokens = self.tokens[part.first : part.stop]
        gaps = [self.text[one.end + 1 : other.start] for one, other in pairwise(tokens)]
        between = ["", *(gap if not gap.strip() else " " for gap in gaps)]
        return "".join(
            space + self.text[token.start : token.end + 1]
            for space, token in zip(between, tokens, strict=False)
        )

    def _at(self, part: _Part) -> int:
        return int(self.tokens[min(part.first, len(self.tokens) - 1)].start)

    def _parts(self, clause: _Part) -> list[_Part]:
        """What commas separate."""
        commas = [
            at for at in self._top_level(clause) if self.tokens[at].token_type == TokenType.COMMA
        ]
        bounds = [clause.first - 1, *commas, clause.stop]
        return [_Part(first + 1, stop) for first, stop in pairwise(bounds)]

    def _named(self, clause: _Part | None, *, name_first: bool) -> dict[str, str] | None:
        """`expression AS name`, or `name AS expression`."""
        if clause is None:
            return None
        found: dict[str, str] = {}
        for part in self._parts(clause):
            words = [
                at for at in self._top_level(part) if self.tokens[at].token_type == TokenType.ALIAS
            ]
            if not words:
                self._fail(
                    f"{self._said(part)!r} has no AS",
                    self._at(part),
                    "write name AS condition in DEFINE, and expression AS name in MEASURES.",
                )
            cut = words[0] if name_first else words[-1]
            before, behind = (
                self._said(_Part(part.first, cut)),
                self._said(_Part(cut + 1, part.stop)),
            )
            name, value = (before, behind) if name_first else (behind, before)
            self._put(found, self._name(name, part), value, part)
        return found

    def _name(self, said: str, part: _Part) -> str:
        plain = said.strip("`")
        if not plain or (plain == said and len(said.split()) > 1):
            self._fail(
                f"{said!r} is not a name",
                self._at(part),
                "write name AS condition in DEFINE, and expression AS name in MEASURES.",
            )
        return plain

    def _put(self, found: dict[str, Any], name: str, value: Any, part: _Part) -> None:
        if name in found:
            self._fail(f"{name!r} is there twice", self._at(part), "name each once.")
        found[name] = value

    # What it means

    def stream(self, name: str | None) -> Stream:
        clauses = self._clauses()
        for needed in ("ORDER BY", "PATTERN"):
            if needed not in clauses:
                self._fail(f"{needed} is missing", self.tokens[self.first].start)
        keyed = self._keyed(clauses.get("PARTITION BY"))
        self._check_order(keyed, clauses["ORDER BY"])
        pattern = self._pattern(clauses["PATTERN"])
        subsets = self._subsets(clauses.get("SUBSET"))
        spelled = _Spelled(
            (
                *parse_pattern(pattern, where=keyed.step_label("match", name)).symbols,
                *(subsets or {}),
            )
        )
        define = self._named(clauses.get("DEFINE"), name_first=True)
        found = keyed.match(
            pattern,
            define=(
                None
                if define is None
                else {spelled[symbol]: condition for symbol, condition in define.items()}
            ),
            measures=self._named(clauses.get("MEASURES"), name_first=False),
            within=_duration(self._said(clauses["WITHIN"])) if "WITHIN" in clauses else None,
            after_match=self._after(clauses.get("AFTER"), spelled),
            subsets=(
                None
                if subsets is None
                else {
                    subset: [spelled[each] for each in members]
                    for subset, members in subsets.items()
                }
            ),
            rows=self._rows(clauses.get("ONE"), clauses.get("ALL")),
            name=name,
        )
        return self._around(found)

    def _keyed(self, clause: _Part | None) -> Stream:
        """Without PARTITION BY all rows are one sequence, as those of a topic without a key are."""
        source = self._source()
        if clause is not None:
            return source.key_by(
                *(_Spelled(source.schema.names)[self._column(part)] for part in self._parts(clause))
            )
        if source.key:
            self._fail(
                f"PARTITION BY is missing, and {source.step.path} has the key"
                f" {', '.join(source.key)}",
                self.tokens[self.first].start,
                f"write PARTITION BY {', '.join(source.key)}.",
            )
        return source

    def _pattern(self, clause: _Part) -> str:
        text = self._said(clause)
        if not text.startswith("(") or not text.endswith(")"):
            self._fail("the pattern must stand in parentheses", self._at(clause))
        return text[1:-1].strip()

    def _column(self, part: _Part) -> str:
        if part.stop - part.first != 1:
            self._fail(
                f"{self._said(part)!r} is not a column",
                self._at(part),
                "name columns; compute others with with_columns first.",
            )
        return str(self.tokens[part.first].text)

    def _check_order(self, stream: Stream, clause: _Part) -> None:
        """Rows are matched in the order of their event time, whatever a query says; so it must say
        that.
        """
        words = self._said(clause).split()
        time = time_column(stream.step)
        if (
            time is None
            or not words
            or words[0].strip("`").lower() != time.name.lower()
            or [each.upper() for each in words[1:]] not in ([], ["ASC"])
        ):
            said = "no event time" if time is None else f"the event time {time.name!r}"
            self._fail(
                f"rows are matched in the order of their event time, and {stream.step.path} has"
                f" {said}",
                self._at(clause),
                f"write ORDER BY {time.name if time else '…'}.",
            )

    def _after(self, clause: _Part | None, spelled: _Spelled) -> str:
        if clause is None:
            return PAST_LAST
        words = self._said(clause).split()
        lower = [each.lower() for each in words]
        if lower[:2] == ["skip", "to"] and len(words) == 3:
            return f"{TO_LAST} {spelled[words[2]]}"
        return (
            " ".join([*lower[:3], *(spelled[each] for each in words[3:])])
            if lower[2:3] in (["first"], ["last"]) and lower[1:2] == ["to"]
            else " ".join(lower)
        )

    def _rows(self, one: _Part | None, clause: _Part | None) -> str:
        if one is not None and clause is not None:
            self._fail(
                "ONE ROW PER MATCH and ALL ROWS PER MATCH are both there",
                self._at(clause),
                "choose one.",
            )
        if one is not None and one.first < one.stop:
            self._fail(
                f"ONE ROW PER MATCH {self._said(one).upper()} is not known",
                self._at(one),
                "leave it out; partial matches go to a topic with match(timed_out=…).",
            )
        if clause is None:
            return ONE_ROW
        more = self._said(clause).upper()
        if more not in {"", "OMIT EMPTY MATCHES", "SHOW EMPTY MATCHES"}:
            self._fail(
                f"ALL ROWS PER MATCH {more} is not known",
                self._at(clause),
                "leave it out: rows of no match are not told.",
            )
        return ALL_ROWS

    def _subsets(self, clause: _Part | None) -> dict[str, list[str]] | None:
        if clause is None:
            return None
        found: dict[str, list[str]] = {}
        for part in self._parts(clause):
            name, equals, members = self._said(part).partition("=")
            if not equals or not members.strip().startswith("("):
                self._fail(
                    f"{self._said(part)!r} is no subset",
                    self._at(part),
                    "write SUBSET both = (a, b).",
                )
            self._put(
                found,
                name.strip(),
                [each.strip() for each in members.strip().strip("()").split(",")],
                part,
            )
        return found

    # Around it

    def _source(self) -> Stream:
        before = self.tokens[: self.first]
        if len(before) < 2 or before[-2].token_type != TokenType.FROM:
            self._fail(
                "a topic was expected between FROM and MATCH_RECOGNIZE",
                self.tokens[self.first].start,
            )
        return self.find_input(before[-1].text.strip("`"))

    def _around(self, found: Stream) -> Stream:
        """The SELECT and WHERE of the query, over the matches."""
        text = (
            f"{self.text[: self.tokens[self.first].start]}"
            f" {self.text[self.tokens[self.last].end + 1 :]}"
        )
        try:
            tree, *more = [each for each in _DIALECT.parse(text) if each is not None]
        except ParseError as error:
            raise BadQuery(
                f"The query around MATCH_RECOGNIZE cannot be read: {str(error).splitlines()[0]}",
                fix="write SELECT columns FROM topic MATCH_RECOGNIZE (…) WHERE condition.",
            ) from None
        if not isinstance(tree, exp.Select) or more:
            self._fail("it is more than one query" if more else "it is no SELECT", 0)
        other = [
            part
            for part in (
                "joins",
                "group",
                "order",
                "limit",
                "having",
                "distinct",
                "laterals",
                "with_",
            )
            if tree.args.get(part)
        ]
        if other:
            self._fail(
                f"{other[0].strip('_').upper()} cannot stand around MATCH_RECOGNIZE here",
                0,
                "use what sql() gives as any other stream: group_by, window, join.",
            )
        if (where := tree.args.get("where")) is not None:
            found = found.where(_without_table(where.this).sql(dialect=_DIALECT))
        if not (len(tree.expressions) == 1 and isinstance(tree.expressions[0], exp.Star)):
            found = found.select(
                *(_without_table(each).sql(dialect=_DIALECT) for each in tree.expressions)
            )
        return found


def _without_table(tree: exp.Expr) -> exp.Expr:
    return tree.transform(
        lambda node: exp.column(node.this) if isinstance(node, exp.Column) and node.table else node
    )


def _duration(text: str) -> str:
    """INTERVAL '10' MINUTE, or '10 minutes'."""
    words = text.replace("'", " ").split()
    plain = " ".join(words[1:] if words and words[0].upper() == "INTERVAL" else words).lower()
    if not plain:
        raise PlanError("WITHIN says no time.", fix="write WITHIN INTERVAL '10' MINUTE.")
    return plain
