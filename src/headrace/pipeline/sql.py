"""`pipeline.sql(…)`: SQL's row pattern recognition, which makes the plan of `stream.match`.

    SELECT card, total FROM payments MATCH_RECOGNIZE (
        PARTITION BY card ORDER BY paid_at
        MEASURES first(small.paid_at) AS first_at, sum(amount) AS total
        ONE ROW PER MATCH
        AFTER MATCH SKIP PAST LAST ROW
        PATTERN (small{3,} big) WITHIN INTERVAL '10' MINUTE
        DEFINE small AS amount < 10, big AS amount > 1000
    ) WHERE total > 2000

`sqlglot` tokenizes the text, and parses what stands around MATCH_RECOGNIZE. The text of a clause is
passed on as it is written; `headrace.operators.patterns` parses it.
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
    excerpt_at,
    parse_pattern,
)
from headrace.plan.plan import time_column

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream


_OPENING = {TokenType.L_PAREN, TokenType.L_BRACE, TokenType.L_BRACKET}
_CLOSING = {TokenType.R_PAREN, TokenType.R_BRACE, TokenType.R_BRACKET}
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
    """The stream of matches of a query with MATCH_RECOGNIZE. `find_input` gets a topic by name."""
    return _Query(find_input, query).stream(name)


@dataclass(frozen=True)
class _TokenRange:
    """A range of tokens, by index: from the first up to but not including `stop`."""

    first: int
    stop: int


class _Spelling:
    """Finds a name as it was declared. In SQL, case does not matter."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __getitem__(self, name: str) -> str:
        """The declared spelling, if exactly one name fits; otherwise the name as it is, which a
        later check refuses.
        """
        matching = [declared for declared in self._names if declared.lower() == name.lower()]
        return matching[0] if len(matching) == 1 else name


class _Query:
    """One query: its tokens, and those between which MATCH_RECOGNIZE stands."""

    def __init__(self, find_input: Callable[[str], Stream], text: Any) -> None:
        self.find_input = find_input
        self.text = text
        self.tokens = self._tokenize()
        # The indices of MATCH_RECOGNIZE and of the parenthesis that closes it.
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
        self.first, self.last = first, self._find_closing(first + 1)

    def _fail(
        self,
        what: str,
        at: int,
        fix: str = (
            "write SELECT … FROM topic MATCH_RECOGNIZE (PARTITION BY … ORDER BY … PATTERN (…)"
            " DEFINE …)."
        ),
    ) -> NoReturn:
        raise BadQuery(f"The query cannot be used: {what}.\n{excerpt_at(self.text, at)}", fix=fix)

    def _tokenize(self) -> list[Token]:
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

    def _find_closing(self, opening: int) -> int:
        depth = 0
        for at in range(opening, len(self.tokens)):
            kind = self.tokens[at].token_type
            depth += (kind in _OPENING) - (kind in _CLOSING)
            if depth == 0:
                return at
        return self._fail("this '(' is not closed", self.tokens[opening].start)

    # The clauses

    def _clauses(self) -> dict[str, _TokenRange]:
        body = _TokenRange(self.first + 2, self.last)
        starts = [
            (at, words)
            for at in self._top_level_tokens(body)
            for words in _CLAUSES
            if self._begins_with(at, words)
        ]
        if body.first < body.stop and (not starts or starts[0][0] != body.first):
            token = self.tokens[body.first]
            self._fail(
                f"{token.text!r} is no clause of MATCH_RECOGNIZE:"
                f" {nearest(token.text.upper(), [each[0] for each in _CLAUSES])}",
                token.start,
            )
        clauses: dict[str, _TokenRange] = {}
        for (at, words), stop in zip(
            starts, [*(at for at, _ in starts[1:]), self.last], strict=True
        ):
            if words[0] in clauses:
                self._fail(f"{words[0]} is there twice", self.tokens[at].start)
            clauses[words[0]] = _TokenRange(at + len(words), stop)
        return clauses

    def _top_level_tokens(self, part: _TokenRange) -> list[int]:
        """The indices of tokens outside of parentheses."""
        depth = 0
        indices = []
        for at in range(part.first, part.stop):
            kind = self.tokens[at].token_type
            depth -= kind in _CLOSING
            if depth == 0:
                indices.append(at)
            depth += kind in _OPENING
        return indices

    def _begins_with(self, at: int, words: Sequence[str]) -> bool:
        """Whether the tokens from an index on are these words."""
        return [
            " ".join(token.text.upper().split()) for token in self.tokens[at : at + len(words)]
        ] == list(words)

    def _text_of(self, part: _TokenRange) -> str:
        """The tokens' text as it is written, without comments."""
        tokens = self.tokens[part.first : part.stop]
        gaps = [self.text[left.end + 1 : right.start] for left, right in pairwise(tokens)]
        between = ["", *(gap if not gap.strip() else " " for gap in gaps)]
        return "".join(
            space + self.text[token.start : token.end + 1]
            for space, token in zip(between, tokens, strict=False)
        )

    def _offset_of(self, part: _TokenRange) -> int:
        return int(self.tokens[min(part.first, len(self.tokens) - 1)].start)

    def _comma_separated(self, clause: _TokenRange) -> list[_TokenRange]:
        """The parts that commas separate."""
        commas = [
            at
            for at in self._top_level_tokens(clause)
            if self.tokens[at].token_type == TokenType.COMMA
        ]
        bounds = [clause.first - 1, *commas, clause.stop]
        return [_TokenRange(first + 1, stop) for first, stop in pairwise(bounds)]

    def _aliased(self, clause: _TokenRange | None, *, name_first: bool) -> dict[str, str] | None:
        """The expressions of a clause by name: `expression AS name`, or `name AS expression`."""
        if clause is None:
            return None
        expressions: dict[str, str] = {}
        for part in self._comma_separated(clause):
            words = [
                at
                for at in self._top_level_tokens(part)
                if self.tokens[at].token_type == TokenType.ALIAS
            ]
            if not words:
                self._fail(
                    f"{self._text_of(part)!r} has no AS",
                    self._offset_of(part),
                    "write name AS condition in DEFINE, and expression AS name in MEASURES.",
                )
            cut = words[0] if name_first else words[-1]
            before = self._text_of(_TokenRange(part.first, cut))
            after = self._text_of(_TokenRange(cut + 1, part.stop))
            name, value = (before, after) if name_first else (after, before)
            self._add_once(expressions, self._name(name, part), value, part)
        return expressions

    def _name(self, text: str, part: _TokenRange) -> str:
        plain = text.strip("`")
        if not plain or (plain == text and len(text.split()) > 1):
            self._fail(
                f"{text!r} is not a name",
                self._offset_of(part),
                "write name AS condition in DEFINE, and expression AS name in MEASURES.",
            )
        return plain

    def _add_once(self, values: dict[str, Any], name: str, value: Any, part: _TokenRange) -> None:
        if name in values:
            self._fail(f"{name!r} is there twice", self._offset_of(part), "name each once.")
        values[name] = value

    # The plan

    def stream(self, name: str | None) -> Stream:
        """The matches, with the SELECT and WHERE of the query over them."""
        clauses = self._clauses()
        for needed in ("ORDER BY", "PATTERN"):
            if needed not in clauses:
                self._fail(f"{needed} is missing", self.tokens[self.first].start)
        keyed = self._partitioned_input(clauses.get("PARTITION BY"))
        order_by = self._order(keyed, clauses["ORDER BY"])
        text = self._text_of(clauses["PATTERN"])
        if not text.startswith("(") or not text.endswith(")"):
            self._fail("the pattern must stand in parentheses", self._offset_of(clauses["PATTERN"]))
        pattern = text[1:-1].strip()
        subsets = self._subsets(clauses.get("SUBSET"))
        symbols = parse_pattern(pattern, where=keyed.step_label("match", name)).symbols
        spelled = _Spelling((*symbols, *(subsets or {})))
        define = self._aliased(clauses.get("DEFINE"), name_first=True)
        if define is not None:
            define = {spelled[symbol]: condition for symbol, condition in define.items()}
        if subsets is not None:
            subsets = {
                subset: [spelled[symbol] for symbol in members]
                for subset, members in subsets.items()
            }
        matches = keyed.match(
            pattern,
            define=define,
            measures=self._aliased(clauses.get("MEASURES"), name_first=False),
            within=_duration(self._text_of(clauses["WITHIN"])) if "WITHIN" in clauses else None,
            after_match=self._after_match(clauses.get("AFTER"), spelled),
            subsets=subsets,
            rows=self._rows(clauses.get("ONE"), clauses.get("ALL")),
            order_by=order_by,
            name=name,
        )
        return self._select_and_where(self._without_empty(clauses.get("ALL"), matches))

    def _without_empty(self, clause: _TokenRange | None, matches: Stream) -> Stream:
        """The matches, without empty ones if they are to be omitted. Only those have no symbol."""
        from headrace.operators.patterns.conditions import CLASSIFIER
        from headrace.plan.match_steps import MatchStep

        if clause is None or not self._text_of(clause).upper().startswith("OMIT"):
            return matches
        assert isinstance(matches.step, MatchStep)
        if not any(pattern.automaton.may_be_empty for _, pattern in matches.step.compiled):
            return matches
        return matches.where(f"{CLASSIFIER} IS NOT NULL")

    def _partitioned_input(self, clause: _TokenRange | None) -> Stream:
        """The topic, keyed by the columns of PARTITION BY. Without that clause all rows are one
        sequence, which only a topic without a key allows.
        """
        before = self.tokens[: self.first]
        if len(before) < 2 or before[-2].token_type != TokenType.FROM:
            self._fail(
                "a topic was expected between FROM and MATCH_RECOGNIZE",
                self.tokens[self.first].start,
            )
        source = self.find_input(before[-1].text.strip("`"))
        if clause is not None:
            spelled = _Spelling(source.schema.names)
            return source.key_by(
                *(spelled[self._column(part)] for part in self._comma_separated(clause))
            )
        if source.key:
            self._fail(
                f"PARTITION BY is missing, and {source.step.path} has the key"
                f" {', '.join(source.key)}",
                self.tokens[self.first].start,
                f"write PARTITION BY {', '.join(source.key)}.",
            )
        return source

    def _column(self, part: _TokenRange) -> str:
        if part.stop - part.first != 1:
            self._fail(
                f"{self._text_of(part)!r} is not a column",
                self._offset_of(part),
                "name columns; compute others with with_columns first.",
            )
        return str(self.tokens[part.first].text)

    def _order(self, stream: Stream, clause: _TokenRange) -> list[str]:
        """The columns by which rows of one time are ordered. Raises unless the query orders by
        event time first.
        """
        parts = [self._text_of(part).split() for part in self._comma_separated(clause)]
        words = parts[0]
        time = time_column(stream.step)
        if (
            time is None
            or not words
            or words[0].strip("`").lower() != time.name.lower()
            or [each.upper() for each in words[1:]] not in ([], ["ASC"])
        ):
            event_time = "no event time" if time is None else f"the event time {time.name!r}"
            self._fail(
                f"rows are matched in the order of their event time, and {stream.step.path} has"
                f" {event_time}",
                self._offset_of(clause),
                f"write ORDER BY {time.name if time else '…'}, and other columns behind it.",
            )
        spelled = _Spelling(stream.schema.names)
        order = []
        for part, given in zip(self._comma_separated(clause)[1:], parts[1:], strict=True):
            if len(given) not in (1, 2) or [each.upper() for each in given[1:]] not in (
                [],
                ["ASC"],
                ["DESC"],
            ):
                self._fail(
                    f"{self._text_of(part)!r} is no order of a column",
                    self._offset_of(part),
                    "write column, or column DESC; nulls come first, and last with DESC.",
                )
            order.append(" ".join([spelled[given[0].strip("`")], *given[1:]]))
        return order

    def _after_match(self, clause: _TokenRange | None, spelled: _Spelling) -> str:
        if clause is None:
            return PAST_LAST
        words = self._text_of(clause).split()
        lower = [each.lower() for each in words]
        if lower[:2] == ["skip", "to"] and len(words) == 3:
            return f"{TO_LAST} {spelled[words[2]]}"
        return (
            " ".join([*lower[:3], *(spelled[each] for each in words[3:])])
            if lower[2:3] in (["first"], ["last"]) and lower[1:2] == ["to"]
            else " ".join(lower)
        )

    def _rows(self, one: _TokenRange | None, clause: _TokenRange | None) -> str:
        if one is not None and clause is not None:
            self._fail(
                "ONE ROW PER MATCH and ALL ROWS PER MATCH are both there",
                self._offset_of(clause),
                "choose one.",
            )
        if one is not None and one.first < one.stop:
            self._fail(
                f"ONE ROW PER MATCH {self._text_of(one).upper()} is not known",
                self._offset_of(one),
                "leave it out; partial matches go to a topic with match(timed_out=…).",
            )
        if clause is None:
            return ONE_ROW
        more = self._text_of(clause).upper()
        if more not in {"", "OMIT EMPTY MATCHES", "SHOW EMPTY MATCHES"}:
            self._fail(
                f"ALL ROWS PER MATCH {more} is not known",
                self._offset_of(clause),
                "leave it out: rows of no match are not emitted.",
            )
        return ALL_ROWS

    def _subsets(self, clause: _TokenRange | None) -> dict[str, list[str]] | None:
        if clause is None:
            return None
        subsets: dict[str, list[str]] = {}
        for part in self._comma_separated(clause):
            name, equals, members = self._text_of(part).partition("=")
            if not equals or not members.strip().startswith("("):
                self._fail(
                    f"{self._text_of(part)!r} is no subset",
                    self._offset_of(part),
                    "write SUBSET both = (a, b).",
                )
            self._add_once(
                subsets,
                name.strip(),
                [each.strip() for each in members.strip().strip("()").split(",")],
                part,
            )
        return subsets

    # The query around MATCH_RECOGNIZE

    def _select_and_where(self, matches: Stream) -> Stream:
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
        unsupported = [
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
        if unsupported:
            self._fail(
                f"{unsupported[0].strip('_').upper()} cannot stand around MATCH_RECOGNIZE here",
                0,
                "use what sql() gives as any other stream: group_by, window, join.",
            )
        if (where := tree.args.get("where")) is not None:
            matches = matches.where(_unqualified(where.this).sql(dialect=_DIALECT))
        if not (len(tree.expressions) == 1 and isinstance(tree.expressions[0], exp.Star)):
            matches = matches.select(
                *(_unqualified(each).sql(dialect=_DIALECT) for each in tree.expressions)
            )
        return matches


def _unqualified(tree: exp.Expr) -> exp.Expr:
    return tree.transform(
        lambda node: exp.column(node.this) if isinstance(node, exp.Column) and node.table else node
    )


def _duration(text: str) -> str:
    """A duration from the text of WITHIN: INTERVAL '10' MINUTE, or '10 minutes'."""
    words = text.replace("'", " ").split()
    plain = " ".join(words[1:] if words and words[0].upper() == "INTERVAL" else words).lower()
    if not plain:
        raise PlanError("WITHIN has no duration.", fix="write WITHIN INTERVAL '10' MINUTE.")
    return plain
