"""MATCH_RECOGNIZE: SQL's row pattern recognition, which makes the plan of `stream.match`.

    SELECT card, total FROM payments MATCH_RECOGNIZE (
        PARTITION BY card ORDER BY paid_at
        MEASURES first(small.paid_at) AS first_at, sum(amount) AS total
        ONE ROW PER MATCH
        AFTER MATCH SKIP PAST LAST ROW
        PATTERN (small{3,} big) WITHIN INTERVAL '10' MINUTE
        DEFINE small AS amount < 10, big AS amount > 1000
    ) WHERE total > 2000

The text of a clause is passed on as it is written; `headrace.operators.patterns` parses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.errors import BadQuery, UnknownColumn, nearest
from headrace.operators.patterns.parser import (
    ALL_ROWS,
    ONE_ROW,
    PAST_LAST,
    TO_LAST,
    parse_pattern,
)
from headrace.plan.plan import time_column
from headrace.sql.cursor import Cursor
from headrace.sql.problems import SqlRefusal, located
from headrace.sql.script import QUOTED, STRING, WORD, Span
from headrace.sql.syntax import MatchedRows

if TYPE_CHECKING:
    from headrace.pipeline.stream import Stream

_CLAUSES: tuple[tuple[str, ...], ...] = (
    ("PARTITION", "BY"),
    ("ORDER", "BY"),
    ("MEASURES",),
    ("ONE", "ROW", "PER", "MATCH"),
    ("ALL", "ROWS", "PER", "MATCH"),
    ("AFTER", "MATCH"),
    ("PATTERN",),
    ("SUBSET",),
    ("WITHIN",),
    ("DEFINE",),
)
_FORM = "write FROM topic MATCH_RECOGNIZE (PARTITION BY … ORDER BY … PATTERN (…) DEFINE …)."


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


def matches(source: Stream, item: MatchedRows, name: str | None = None) -> Stream:
    """The stream of matches of MATCH_RECOGNIZE over a stream."""
    return _Matches(source, item.body).stream(name)


class _Matches:
    """The clauses between the brackets of MATCH_RECOGNIZE."""

    def __init__(self, source: Stream, body: Span) -> None:
        self.source = source
        self.body = body
        self.clauses = self._clauses()

    def _fail(self, what: str, span: Span, fix: str = _FORM) -> NoReturn:
        raise SqlRefusal(span.start, f"MATCH_RECOGNIZE cannot be used: {what}.", fix, BadQuery)

    def _clauses(self) -> dict[str, Span]:
        script, body = self.body.script, self.body
        starts: list[tuple[int, tuple[str, ...]]] = []
        cursor = Cursor(body)
        for at in body.top_level():
            cursor.at = at
            words = next((words for words in _CLAUSES if cursor.sees(*words)), None)
            if words is not None and (not starts or at >= starts[-1][0] + len(starts[-1][1])):
                starts.append((at, words))
        if body and (not starts or starts[0][0] != body.first):
            word = body.tokens[0].text
            self._fail(
                f"{word!r} is no clause of it:"
                f" {nearest(word.upper(), [' '.join(each) for each in _CLAUSES])}",
                body,
            )
        clauses: dict[str, Span] = {}
        stops = [*(at for at, _ in starts[1:]), body.stop]
        for (at, words), stop in zip(starts, stops, strict=True):
            if words[0] in clauses:
                self._fail(f"{words[0]} is there twice", Span(script, at, stop))
            clauses[words[0]] = Span(script, at + len(words), stop)
        return clauses

    def stream(self, name: str | None) -> Stream:
        clauses = self.clauses
        for needed in ("ORDER", "PATTERN"):
            if needed not in clauses:
                words = "ORDER BY" if needed == "ORDER" else needed
                self._fail(f"{words} is missing", self.body)
        keyed = self._partitioned(clauses.get("PARTITION"))
        order_by = self._order(keyed, clauses["ORDER"])
        pattern_span = clauses["PATTERN"]
        if len(pattern_span.unwrapped()) == len(pattern_span):
            self._fail("the pattern must stand in parentheses", pattern_span)
        pattern = Span(pattern_span.script, pattern_span.first + 1, pattern_span.stop - 1).text()
        subsets = self._subsets(clauses.get("SUBSET"))
        with located(pattern_span):
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
        with located(self.body):
            found = keyed.match(
                pattern,
                define=define,
                measures=self._aliased(clauses.get("MEASURES"), name_first=False),
                within=self._within(clauses.get("WITHIN")),
                after_match=self._after_match(clauses.get("AFTER"), spelled),
                subsets=subsets,
                rows=self._rows(clauses.get("ONE"), clauses.get("ALL")),
                order_by=order_by,
                name=name,
            )
        return self._without_empty(clauses.get("ALL"), found)

    def _within(self, clause: Span | None) -> str | None:
        """The duration of WITHIN: INTERVAL '10' MINUTE, or '10 minutes'."""
        if clause is None:
            return None
        cursor = Cursor(clause)
        if cursor.token.kind == STRING:
            duration = cursor.string()
        elif cursor.sees("INTERVAL"):
            duration = cursor.interval()
        else:
            cursor.fail("a duration", fix="write WITHIN INTERVAL '10' MINUTE.")
        cursor.finish("the end of WITHIN")
        return duration

    def _without_empty(self, clause: Span | None, found: Stream) -> Stream:
        """The matches, without empty ones if they are to be omitted. Only those have no symbol."""
        from headrace.operators.patterns.conditions import CLASSIFIER
        from headrace.plan.match_steps import MatchStep

        if clause is None or not clause.text().upper().startswith("OMIT"):
            return found
        assert isinstance(found.step, MatchStep)
        if not any(pattern.automaton.may_be_empty for _, pattern in found.step.compiled):
            return found
        return found.where(f"{CLASSIFIER} IS NOT NULL")

    def _partitioned(self, clause: Span | None) -> Stream:
        """The stream, keyed by the columns of PARTITION BY. Without that clause all rows are one
        sequence, which only a stream without a key allows.
        """
        source = self.source
        if clause is not None:
            spelled = _Spelling(source.schema.names)
            names = []
            for part in clause.split():
                if len(part) != 1 or part.tokens[0].kind not in {WORD, QUOTED}:
                    self._fail(
                        f"{part.text()!r} is not a column",
                        part,
                        "name columns; compute others in a query in FROM.",
                    )
                names.append(spelled[part.tokens[0].name])
            with located(clause):
                return source.key_by(*names)
        if source.key:
            self._fail(
                f"PARTITION BY is missing, and {source.step.path} has the key"
                f" {', '.join(source.key)}",
                self.body,
                f"write PARTITION BY {', '.join(source.key)}.",
            )
        return source

    def _order(self, stream: Stream, clause: Span) -> list[str]:
        """The columns by which rows of one time are ordered. Raises unless the clause orders by
        event time first.
        """
        parts = clause.split()
        words = [token.name for token in parts[0].tokens]
        time = time_column(stream.step)
        if (
            time is None
            or not words
            or words[0].lower() != time.name.lower()
            or [each.upper() for each in words[1:]] not in ([], ["ASC"])
        ):
            event_time = "no event time" if time is None else f"the event time {time.name!r}"
            self._fail(
                f"rows are matched in the order of their event time, and {stream.step.path} has"
                f" {event_time}",
                clause,
                f"write ORDER BY {time.name if time else '…'}, and other columns behind it.",
            )
        spelled = _Spelling(stream.schema.names)
        order = []
        for part in parts[1:]:
            tokens = part.tokens
            if len(tokens) not in (1, 2) or [each.upper for each in tokens[1:]] not in (
                [],
                ["ASC"],
                ["DESC"],
            ):
                self._fail(
                    f"{part.text()!r} is no order of a column",
                    part,
                    "write column, or column DESC; nulls come first, and last with DESC.",
                )
            name = spelled[tokens[0].name]
            if name not in stream.schema.names:
                known = nearest(name, stream.schema.names)
                raise SqlRefusal(
                    part.start, f"There is no column {name!r}: {known}", kind=UnknownColumn
                )
            order.append(" ".join([name, *(each.text for each in tokens[1:])]))
        return order

    def _after_match(self, clause: Span | None, spelled: _Spelling) -> str:
        if clause is None:
            return PAST_LAST
        words = clause.text().split()
        lower = [each.lower() for each in words]
        if lower[:2] == ["skip", "to"] and len(words) == 3:
            return f"{TO_LAST} {spelled[words[2]]}"
        return (
            " ".join([*lower[:3], *(spelled[each] for each in words[3:])])
            if lower[2:3] in (["first"], ["last"]) and lower[1:2] == ["to"]
            else " ".join(lower)
        )

    def _rows(self, one: Span | None, clause: Span | None) -> str:
        if one is not None and clause is not None:
            self._fail(
                "ONE ROW PER MATCH and ALL ROWS PER MATCH are both there", clause, "choose one."
            )
        if one is not None and one:
            self._fail(
                f"ONE ROW PER MATCH {one.text().upper()} is not known",
                one,
                "leave it out; partial matches go to a topic with match(timed_out=…).",
            )
        if clause is None:
            return ONE_ROW
        more = " ".join(clause.text().upper().split())
        if more not in {"", "OMIT EMPTY MATCHES", "SHOW EMPTY MATCHES"}:
            self._fail(
                f"ALL ROWS PER MATCH {more} is not known",
                clause,
                "leave it out: rows of no match are not emitted.",
            )
        return ALL_ROWS

    def _subsets(self, clause: Span | None) -> dict[str, list[str]] | None:
        if clause is None:
            return None
        subsets: dict[str, list[str]] = {}
        for part in clause.split():
            cursor = Cursor(part)
            fix = "write SUBSET both = (a, b)."
            name = cursor.name("a subset's name")
            cursor.expect("=", fix=fix)
            members = cursor.names_in_brackets("a symbol")
            cursor.finish("','")
            self._add_once(subsets, name, members, part)
        return subsets

    def _aliased(self, clause: Span | None, *, name_first: bool) -> dict[str, str] | None:
        """The expressions of a clause by name: `expression AS name`, or `name AS expression`."""
        if clause is None:
            return None
        expressions: dict[str, str] = {}
        fix = "write name AS condition in DEFINE, and expression AS name in MEASURES."
        for part in clause.split():
            words = [at for at in part.top_level() if part.script.tokens[at].upper == "AS"]
            if not words:
                self._fail(f"{part.text()!r} has no AS", part, fix)
            cut = words[0] if name_first else words[-1]
            before = Span(part.script, part.first, cut)
            after = Span(part.script, cut + 1, part.stop)
            name, value = (before, after) if name_first else (after, before)
            if len(name) != 1 or name.tokens[0].kind not in {WORD, QUOTED}:
                self._fail(f"{name.text()!r} is not a name", name or part, fix)
            self._add_once(expressions, name.tokens[0].name, value.text(), part)
        return expressions

    def _add_once(self, values: dict[str, Any], name: str, value: Any, part: Span) -> None:
        if name in values:
            self._fail(f"{name!r} is there twice", part, "name each once.")
        values[name] = value
