"""Errors as Postgres's clients know them: each has a code of five letters (`SQLSTATE`), by which
drivers choose the exception that they raise.
"""

from __future__ import annotations

import re

from headrace import errors
from headrace.http.responses import Refused
from headrace.serve.postgres.messages import error_response
from headrace.serve.time_travel import TickNotKept

SYNTAX_ERROR = "42601"
UNDEFINED_TABLE = "42P01"
UNDEFINED_COLUMN = "42703"
UNDEFINED_FUNCTION = "42883"
UNDEFINED_PARAMETER = "42P02"
DUPLICATE_CURSOR = "42P03"
DUPLICATE_STATEMENT = "42P05"
INSUFFICIENT_PRIVILEGE = "42501"
READ_ONLY = "25006"
NO_TRANSACTION = "25P01"
IN_FAILED_TRANSACTION = "25P02"
FEATURE_NOT_SUPPORTED = "0A000"
UNDEFINED_SETTING = "42704"
INVALID_PARAMETER = "22023"
INVALID_TEXT = "22P02"
INVALID_CURSOR = "34000"
INVALID_STATEMENT = "26000"
PROTOCOL_VIOLATION = "08P01"
QUERY_CANCELED = "57014"
SHUTDOWN = "57P01"
TOO_MANY_CONNECTIONS = "53300"
LIMIT_EXCEEDED = "54000"
OUT_OF_MEMORY = "53200"
INVALID_PASSWORD = "28P01"  # noqa: S105 - a code
INVALID_AUTHORIZATION = "28000"
INVALID_CATALOG = "3D000"
TICK_NOT_KEPT = "72000"  # a snapshot that is too old
OBJECT_NOT_READY = "55000"
INTERNAL = "XX000"


class SqlError(errors.HeadraceError):
    """A statement cannot run. `state` is its code, `position` the character of the statement, from
    0, at which it went wrong.
    """

    def __init__(
        self, state: str, message: str, *, fix: str = "", position: int | None = None
    ) -> None:
        super().__init__(message, fix=fix)
        self.state = state
        self.position = position


_BY_TEXT = (
    (re.compile(r"took longer than"), QUERY_CANCELED),
    (re.compile(r"of memory"), OUT_OF_MEMORY),
    (re.compile(r"result has more than"), LIMIT_EXCEEDED),
    (re.compile(r"syntax error|Parser Error"), SYNTAX_ERROR),
    (re.compile(r"(?i)column .*(not found|does not exist)"), UNDEFINED_COLUMN),
    (re.compile(r"(?i)function .*(not|does not) |may not use the function"), UNDEFINED_FUNCTION),
    (re.compile(r"only SELECT is allowed"), READ_ONLY),
)


def sql_state(error: BaseException) -> str:
    """The code of an error."""
    if isinstance(error, SqlError):
        return error.state
    if isinstance(error, errors.UnknownView):
        return UNDEFINED_TABLE
    if isinstance(error, (TickNotKept, errors.ChangesGone)):
        return TICK_NOT_KEPT
    if isinstance(error, errors.RetryError):
        return OBJECT_NOT_READY
    if isinstance(error, errors.BadQuery):
        text = str(error)
        return next((state for found, state in _BY_TEXT if found.search(text)), SYNTAX_ERROR)
    if isinstance(error, Refused):
        return LIMIT_EXCEEDED if error.status == 503 else INVALID_PARAMETER
    if isinstance(error, errors.InputError):
        return INVALID_PARAMETER
    return INTERNAL


def error_message(error: errors.HeadraceError, *, offset: int = 0) -> bytes:
    """An error as it is sent. `offset` is where its statement begins in what the client sent."""
    position = getattr(error, "position", None)
    return error_response(
        "ERROR",
        sql_state(error),
        error.message,
        hint=error.fix,
        position=None if position is None else offset + position + 1,
    )
