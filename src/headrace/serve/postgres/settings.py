"""The settings of a session: what clients set when they connect, and SET and SHOW afterwards.

Most are of Postgres and change nothing here; they are kept because clients set them and read them
back. These have an effect:

    TimeZone              the zone in which TIMESTAMP is written as text
    statement_timeout     how long a query may run; at most the server's limit
    headrace.after_token  queries wait until views contain these offsets (what an append returned)
    headrace.at_tick      queries read the views as of this tick
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.durations import to_us
from headrace.errors import InputError, nearest
from headrace.serve.postgres.catalogue_tables import SERVER_VERSION, VERSION_TEXT
from headrace.serve.postgres.errors import (
    FEATURE_NOT_SUPPORTED,
    INVALID_PARAMETER,
    UNDEFINED_SETTING,
    SqlError,
)
from headrace.serve.postgres.values import is_zone

AFTER_TOKEN, AT_TICK = "headrace.after_token", "headrace.at_tick"
REPORTED = (
    "server_version",
    "server_encoding",
    "client_encoding",
    "application_name",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "integer_datetimes",
    "standard_conforming_strings",
    "is_superuser",
    "session_authorization",
    "default_transaction_read_only",
    "in_hot_standby",
)
"""What is reported to clients at the start, and when it changes."""
_FIXED = {
    "server_version": SERVER_VERSION,
    "server_version_num": "150000",
    "server_encoding": "UTF8",
    "integer_datetimes": "on",
    "is_superuser": "off",
    "in_hot_standby": "off",
    "max_identifier_length": "63",
    "max_index_keys": "32",
    "block_size": "8192",
    "lc_collate": "C.UTF-8",
    "lc_ctype": "C.UTF-8",
    "wal_level": "replica",
    "transaction_read_only": "on",
    "transaction_deferrable": "off",
    "headrace.version": VERSION_TEXT,
}
_DEFAULTS = {
    "client_encoding": "UTF8",
    "application_name": "",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "standard_conforming_strings": "on",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "transaction_isolation": "read committed",
    "search_path": '"$user", public',
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "backslash_quote": "safe_encoding",
    "escape_string_warning": "on",
    "client_min_messages": "notice",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "lc_messages": "C.UTF-8",
    "lc_monetary": "C.UTF-8",
    "lc_numeric": "C.UTF-8",
    "lc_time": "C.UTF-8",
    "xmlbinary": "base64",
    "xmloption": "content",
    "row_security": "on",
    "role": "none",
    "jit": "off",
    "work_mem": "4MB",
    "enable_seqscan": "on",
    "synchronize_seqscans": "on",
    "quote_all_identifiers": "off",
    "default_tablespace": "",
    "default_table_access_method": "heap",
    "check_function_bodies": "on",
    "geqo": "on",
    "plan_cache_mode": "auto",
    AFTER_TOKEN: "",
    AT_TICK: "",
}
_LENGTH = re.compile(r"\s*(\d+)\s*(us|ms|s|min|h|d)?\s*")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_MAX_CHARACTERS = 10_000


class SessionSettings:
    """The settings of one session, by name; names do not depend on case."""

    def __init__(self, user: str) -> None:
        self._names = {name.lower(): name for name in (*_FIXED, *_DEFAULTS)}
        self._names["session_authorization"] = "session_authorization"
        self._fixed = {**_FIXED, "session_authorization": user}
        self._values = dict(_DEFAULTS)
        self._before_local: dict[str, str] = {}

    def as_dict(self) -> Mapping[str, str]:
        return {**self._fixed, **self._values}

    def __getitem__(self, name: str) -> str:
        """A setting. SqlError if there is none of this name."""
        known = self._known(name)
        return self._fixed.get(known) or self._values.get(known, "")

    def check(self, name: str) -> None:
        """SqlError if there is no setting of this name."""
        self._known(name)

    def set(self, name: str, value: str | None, *, is_local: bool = False) -> str | None:
        """Set a setting, None to its default; with `is_local` until the end of the transaction.
        Returns its name if it is to be reported to clients.
        """
        known = self._known(name)
        if known in self._fixed:
            if value is None or known == "transaction_read_only":
                return None
            raise SqlError(INVALID_PARAMETER, f'parameter "{known}" cannot be changed')
        checked = _DEFAULTS[known] if value is None else _checked(known, value)
        is_changed = self._values[known] != checked
        if is_local:
            self._before_local.setdefault(known, self._values[known])
        else:
            self._before_local.pop(known, None)
        self._values[known] = checked
        return known if is_changed and known in REPORTED else None

    def end_transaction(self) -> None:
        """Give settings that were set for a transaction their values of before."""
        self._values |= self._before_local
        self._before_local.clear()

    def reset(self) -> list[str]:
        """Set all settings to their defaults. Returns those that are to be reported to clients."""
        names = [self.set(name, None) for name in self._values if name != "application_name"]
        return [name for name in names if name is not None]

    def _known(self, name: str) -> str:
        known = self._names.get(name.lower())
        if known is None:
            raise SqlError(
                UNDEFINED_SETTING,
                f'unrecognized configuration parameter "{name[:80]}"',
                fix=nearest(name.lower(), self._names),
            )
        return known

    # Those with an effect

    @property
    def zone(self) -> str:
        return self._values["TimeZone"]

    @property
    def after_token(self) -> str:
        return self._values[AFTER_TOKEN]

    @property
    def at_tick(self) -> int | None:
        text = self._values[AT_TICK]
        return int(text) if text else None

    def timeout_s(self, default_s: float, max_s: float) -> float:
        """How long a query may run."""
        seconds = _seconds(self._values["statement_timeout"])
        return default_s if not seconds else min(seconds, max_s)


def _checked(name: str, value: str) -> str:
    """A new value of a setting. SqlError if it cannot have it."""
    if len(value) > _MAX_CHARACTERS:
        raise SqlError(INVALID_PARAMETER, f'the value of "{name}" is too long')
    if name == "client_encoding":
        if value.upper().replace("-", "").replace("_", "") not in {"UTF8", "UNICODE", "SQLASCII"}:
            raise SqlError(
                FEATURE_NOT_SUPPORTED, f"the encoding {value!r} is not supported", fix="use UTF8."
            )
        return "UTF8"
    if name == "TimeZone":
        return _zone(value)
    if name == "DateStyle":
        if value and "ISO" not in value.upper():
            raise SqlError(
                FEATURE_NOT_SUPPORTED, "dates are written in ISO form", fix="SET DateStyle = ISO"
            )
        return "ISO, MDY"
    if name == "IntervalStyle":
        return "postgres"
    if name == "statement_timeout":
        if _seconds(value) is None:
            raise SqlError(
                INVALID_PARAMETER, f"{value!r} is no length of time", fix="write 5s or 500ms."
            )
        return value
    if name == AT_TICK and value:
        if not value.isdecimal() or not value.isascii() or len(value) > 18:
            raise SqlError(INVALID_PARAMETER, f"{value[:40]!r} is no tick", fix="give a number.")
        return value
    if name == "bytea_output" and value.lower() != "hex":
        raise SqlError(
            FEATURE_NOT_SUPPORTED, "bytea is written in hex", fix="SET bytea_output = hex"
        )
    return value


def _zone(value: str) -> str:
    if value.upper() in {"UTC", "GMT", "ETC/UTC", "Z", "DEFAULT", "LOCAL", "0"}:
        return "UTC"
    if not is_zone(value):
        raise SqlError(
            INVALID_PARAMETER,
            f"there is no time zone {value[:80]!r}",
            fix="name one, as in Europe/Berlin.",
        )
    return value


def _seconds(text: str) -> float | None:
    match = _LENGTH.fullmatch(text)
    if match is not None:
        return int(match[1]) * _UNITS[match[2] or "ms"]
    try:
        return to_us(text, what="statement_timeout") / 1_000_000
    except InputError:
        return None
