"""What is wrong in a text of SQL: each problem with its place, and the one error that all problems
of a text become.

    shop.sql, line 3, position 6: There is no topic, table or view 'ordrs': did you mean 'orders'?
        FROM ordrs
             ^
      To fix: declare it before this statement.

A single problem keeps the class of the error that it is (`UnknownColumn`, `PlanError`, …), so that
callers handle SQL as they handle Python. Several become one `BadSql`, which has them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import BadQuery, BadSql, HeadraceError, PlanError, SqlProblem

MAX_PROBLEMS = 50
"""How many problems of one text are shown."""


class TextPlaces(Protocol):
    """A text in which offsets are places."""

    name: str

    def place(self, offset: int) -> str: ...

    def excerpt(self, offset: int) -> str: ...

    def line_and_position(self, offset: int) -> tuple[int, int]: ...


class TextPart(Protocol):
    """A part of a text."""

    @property
    def start(self) -> int: ...


@dataclass
class SqlRefusal(Exception):
    """Something in a text that cannot be used, by the offset at which it stands. The statement is
    given up, and the next one is looked at.
    """

    offset: int
    message: str
    fix: str = ""
    kind: type[HeadraceError] = BadQuery
    cause: HeadraceError | None = None


FOREIGN = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""What a declaration raises that was given an option of a kind that nobody checks."""


@contextmanager
def located(span: TextPart) -> Iterator[None]:
    """Give errors that are raised inside the place of a part of the text."""
    try:
        yield
    except HeadraceError as error:
        raise SqlRefusal(span.start, error.message, error.fix, type(error), error) from None
    except RecursionError:
        raise SqlRefusal(
            span.start, "This is nested too deeply.", "split it, with WITH name AS (SELECT …)."
        ) from None
    except FOREIGN as error:
        reason = str(error).partition("() ")[2] or str(error)
        raise SqlRefusal(
            span.start, f"This cannot be declared so: {reason}.", "correct the options.", PlanError
        ) from None


def text_of(script: TextPlaces, refusal: SqlRefusal) -> str:
    """What happened, where, and the line with a caret below the place."""
    head, *rest = refusal.message.split("\n", 1)
    excerpt = script.excerpt(refusal.offset)
    return "\n".join([f"{script.place(refusal.offset)}: {head}", excerpt, *rest])


def error_of(script: TextPlaces, refusals: Sequence[SqlRefusal]) -> HeadraceError:
    """The error to raise for the refusals of a text, of which there is at least one."""
    if len(refusals) == 1:
        (refusal,) = refusals
        error = refusal.kind.__new__(refusal.kind)
        HeadraceError.__init__(error, text_of(script, refusal), fix=refusal.fix)
        if refusal.cause is not None:
            of_cause = {
                name: value
                for name, value in vars(refusal.cause).items()
                if name not in {"message", "fix"}
            }
            vars(error).update(of_cause)
        return error
    problems = tuple(
        SqlProblem(
            line=script.line_and_position(refusal.offset)[0],
            position=script.line_and_position(refusal.offset)[1],
            message=refusal.message,
            fix=refusal.fix,
        )
        for refusal in refusals
    )
    texts = [
        f"{text_of(script, refusal)}" + (f"\n  To fix: {refusal.fix}" if refusal.fix else "")
        for refusal in refusals[:MAX_PROBLEMS]
    ]
    if len(refusals) > MAX_PROBLEMS:
        texts.append(f"… and {len(refusals) - MAX_PROBLEMS:,} more.")
    name = script.name or "The SQL"
    return BadSql(
        f"{name} has {len(refusals):,} errors, and nothing of it was run.\n\n" + "\n\n".join(texts),
        problems,
    )
