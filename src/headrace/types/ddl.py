"""The parser of Spark's DDL column lists, which gives Arrow fields. It needs no JVM, and its errors
point at the position. Other modules use it through `schema`.

Types map to Arrow as in pyspark (pyspark.sql.pandas.types.to_arrow_type). What Arrow cannot express
(CHAR(5), TIME(3), a collation) is stored in the field's metadata under TYPE_KEY.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import pyarrow as pa

from headrace.columnar.columns import TIMESTAMP_TYPE
from headrace.errors import BadSchema

TYPE_KEY = b"headrace.type"
SPARK_METADATA_KEY = b"SPARK::metadata::json"
VARIANT_TYPE = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={b"variant": b"true"}),
    ]
)
TIMESTAMP_NTZ_TYPE = pa.timestamp("us")
_MAX_DEPTH = 64
_T = TypeVar("_T")

_PLAIN: dict[str, pa.DataType] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "BYTE": pa.int8(),
    "SMALLINT": pa.int16(),
    "SHORT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "BINARY": pa.binary(),
    "DATE": pa.date32(),
    "VARIANT": VARIANT_TYPE,
}
_ONLY_NULL = ("VOID", "NULL")
_DAY_TIME = ("DAY", "HOUR", "MINUTE", "SECOND")

_TOKEN = re.compile(
    r"""(?P<skip>\s+|--[^\n]*|/\*.*?\*/)
      | (?P<quoted>`(?:[^`]|``)*`)
      | (?P<string>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
      | (?P<word>\w+)
      | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_STRING_ESCAPE = re.compile(
    r"\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[01][0-7]{2}|.)|''|\"\"", re.DOTALL
)
_ESCAPED = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "0": "\0",
    "b": "\b",
    "Z": "\x1a",
    "%": "\\%",
    "_": "\\_",
}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    position: int

    @property
    def upper(self) -> str:
        return self.text.upper() if self.kind == "word" else self.text


@dataclass(frozen=True)
class _Type:
    """A parsed type: its Arrow type, and its name in Spark where the Arrow type does not determine
    it.
    """

    arrow: pa.DataType
    name: str | None = None


def parse_columns(ddl: str) -> list[pa.Field]:
    """The columns of a DDL list. BadSchema if it cannot be parsed."""
    return _Parser(ddl).columns()


class _Parser:
    """A recursive-descent parser over the tokens, with one method per rule."""

    def __init__(self, ddl: str) -> None:
        self.ddl = ddl
        self.tokens = self._tokens()
        self.at = 0
        self.depth = 0
        self.column = ""
        self.parametric: dict[str, Callable[[], _Type]] = {
            "DECIMAL": self._decimal,
            "DEC": self._decimal,
            "NUMERIC": self._decimal,
            "STRING": self._string,
            "CHAR": lambda: self._sized("CHAR"),
            "CHARACTER": lambda: self._sized("CHAR"),
            "VARCHAR": lambda: self._sized("VARCHAR"),
            "TIME": self._time,
            "TIMESTAMP": self._timestamp,
            "TIMESTAMP_LTZ": lambda: self._microseconds(TIMESTAMP_TYPE),
            "TIMESTAMP_NTZ": lambda: self._microseconds(TIMESTAMP_NTZ_TYPE),
            "INTERVAL": self._interval,
            "GEOMETRY": lambda: self._spatial("geometry"),
            "GEOGRAPHY": lambda: self._spatial("geography"),
            "ARRAY": self._array,
            "MAP": self._map,
            "STRUCT": self._struct,
        }

    def _tokens(self) -> list[_Token]:
        matched = [
            _Token(match.lastgroup or "", match.group(), match.start())
            for match in _TOKEN.finditer(self.ddl)
        ]
        return [token for token in matched if token.kind != "skip"] + [
            _Token("end", "", len(self.ddl))
        ]

    # Rules

    def columns(self) -> list[pa.Field]:
        # Spark allows the whole schema as one struct.
        if self.token.upper == "STRUCT" and self.tokens[self.at + 1].text == "<":
            self.at += 1
            fields = self._fields_in_brackets()
        else:
            fields = self._fields(lambda token: token.kind == "end")
        if self.token.kind != "end":
            self._fail("',' or the end of the schema")
        return fields

    def _fields(self, is_end: Callable[[_Token], bool]) -> list[pa.Field]:
        fields: list[pa.Field] = []
        if is_end(self.token):
            return fields
        while True:
            fields.append(self._field())
            if not self._take(","):
                return fields

    def _field(self) -> pa.Field:
        outer = self.column
        name_token = self.token
        name = self._name()
        self.column = f"{outer}.{name}" if outer else name
        self._take(":")
        parsed = self._type()
        nullable = not self._not_null()
        comment = self._comment()
        if self.token.upper in ("DEFAULT", "GENERATED", "PRIMARY", "UNIQUE", "NULL"):
            self._fail(
                "',' or the end of the column",
                note=f"{self.token.upper} cannot be declared for a topic's column.",
            )
        if not name:
            self._fail("a name that is not empty", token=name_token)
        self.column = outer
        return pa.field(
            name, parsed.arrow, nullable=nullable, metadata=_metadata(parsed.name, comment)
        )

    def _name(self) -> str:
        token = self.token
        if token.kind == "quoted":
            self.at += 1
            return token.text[1:-1].replace("``", "`")
        if token.kind != "word" or token.text.isdigit() or not token.text.isascii():
            self._fail(
                "a column name",
                note=(
                    "a name with other characters than a to z, digits and _ must be in"
                    " `backquotes`."
                ),
            )
        self.at += 1
        return token.text

    def _not_null(self) -> bool:
        if not self._take("NOT"):
            return False
        self._need("NULL")
        return True

    def _comment(self) -> str | None:
        if not self._take("COMMENT"):
            return None
        if self.token.kind != "string":
            self._fail("a comment in quotes")
        parts = []
        while self.token.kind == "string":
            parts.append(_unescape(self.token.text))
            self.at += 1
        return "".join(parts)

    def _type(self) -> _Type:
        token = self.token
        name = token.upper
        if token.kind != "word":
            self._fail("a type")
        if name in _ONLY_NULL:
            raise BadSchema(
                f"Column {self.column!r} has the type {name}, which cannot be stored: it holds"
                " nothing.",
                fix="choose another type.",
            )
        if name not in _PLAIN and name not in self.parametric:
            known = [*_PLAIN, *self.parametric]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            examples = "BIGINT, STRING, DOUBLE, TIMESTAMP or DECIMAL(10, 2)"
            self._fail(
                "a type",
                note=(
                    f"did you mean {close[0]}?"
                    if close
                    else f"use one of Spark's types, such as {examples}."
                ),
            )
        self.at += 1
        return _Type(_PLAIN[name]) if name in _PLAIN else self.parametric[name]()

    def _decimal(self) -> _Type:
        start = self.token
        numbers = self._numbers(at_most=2)
        precision, scale = [*numbers, 0][:2] if numbers else (10, 0)
        if not 1 <= precision <= 38:
            self._fail("a DECIMAL precision from 1 to 38", token=start)
        if scale > precision:
            self._fail(f"a DECIMAL scale of at most the precision, {precision}", token=start)
        return _Type(pa.decimal128(precision, scale))

    def _string(self) -> _Type:
        if not self._take("COLLATE"):
            return _Type(pa.string())
        return _Type(pa.string(), f"STRING COLLATE {self._name()}")

    def _sized(self, name: str) -> _Type:
        start = self.token
        numbers = self._numbers(at_most=1)
        if not numbers or numbers[0] < 1:
            self._fail(f"a length, as in {name}(20)", token=start)
        return _Type(pa.string(), f"{name}({numbers[0]})")

    def _time(self) -> _Type:
        start = self.token
        precision = (self._numbers(at_most=1) or [6])[0]
        if precision > 9:
            self._fail("a TIME precision from 0 to 9", token=start)
        self._zone_words({"WITHOUT": ("TIME", "ZONE")})
        return _Type(pa.time64("ns"), f"TIME({precision})")

    def _timestamp(self) -> _Type:
        with_zone = self._microseconds(TIMESTAMP_TYPE)
        words = self._zone_words({"WITHOUT": ("TIME", "ZONE"), "WITH": ("LOCAL", "TIME", "ZONE")})
        return _Type(TIMESTAMP_NTZ_TYPE) if words == "WITHOUT" else with_zone

    def _microseconds(self, kind: pa.DataType) -> _Type:
        start = self.token
        if self._numbers(at_most=1) not in ([], [6]):
            self._fail(
                "no precision but (6)",
                note="a timestamp holds microseconds; write it without a precision.",
                token=start,
            )
        return _Type(kind)

    def _zone_words(self, allowed: dict[str, tuple[str, ...]]) -> str | None:
        first = self.token.upper
        if first not in allowed:
            return None
        self.at += 1
        for word in allowed[first]:
            self._need(word)
        return first

    def _interval(self) -> _Type:
        start = self.token
        if start.upper in ("YEAR", "MONTH"):
            raise BadSchema(
                f"Column {self.column!r} is an INTERVAL of years and months, which Spark cannot"
                " pass to Python through Arrow.",
                fix="store the number of months as INT, or use INTERVAL DAY TO SECOND.",
            )
        if start.upper not in _DAY_TIME:
            self._fail(
                "DAY, HOUR, MINUTE or SECOND",
                note="an interval is one of days to seconds, such as INTERVAL DAY TO SECOND.",
            )
        self.at += 1
        if not self._take("TO"):
            return _Type(pa.duration("us"), f"INTERVAL {start.upper}")
        stop = self.token
        if stop.upper not in _DAY_TIME[_DAY_TIME.index(start.upper) + 1 :]:
            self._fail(f"a unit smaller than {start.upper}")
        self.at += 1
        return _Type(pa.duration("us"), f"INTERVAL {start.upper} TO {stop.upper}")

    def _spatial(self, kind: str) -> _Type:
        """GEOMETRY and GEOGRAPHY, with the number of their spatial reference system, or ANY."""
        self._need("(")
        token = self.token
        if not (token.text.isdigit() or token.upper == "ANY"):
            self._fail("a spatial reference number, or ANY")
        self.at += 1
        self._need(")")
        srid = "-1" if token.upper == "ANY" else str(int(token.text))
        tag = {kind.encode(): b"true", b"srid": srid.encode()}
        return _Type(
            pa.struct(
                [
                    pa.field("srid", pa.int32(), nullable=False),
                    pa.field("wkb", pa.binary(), nullable=False, metadata=tag),
                ]
            )
        )

    def _array(self) -> _Type:
        return _Type(pa.list_(self._in_brackets(lambda: self._inner("element", nullable=True))))

    def _map(self) -> _Type:
        def entries() -> tuple[pa.Field, pa.Field]:
            key_token = self.token
            key = self._inner("key", nullable=False)
            if pa.types.is_map(key.type) or key.type.equals(VARIANT_TYPE):
                self._fail("a key that can be compared, not a MAP or VARIANT", token=key_token)
            self._need(",")
            return key, self._inner("value", nullable=True)

        key, value = self._in_brackets(entries)
        return _Type(pa.map_(key, value))

    def _struct(self) -> _Type:
        fields = self._fields_in_brackets()
        check_duplicates(fields, where=f"The struct {self.column!r}")
        return _Type(pa.struct(fields))

    def _fields_in_brackets(self) -> list[pa.Field]:
        return self._in_brackets(lambda: self._fields(lambda token: token.text == ">"))

    def _inner(self, name: str, *, nullable: bool) -> pa.Field:
        parsed = self._type()
        return pa.field(
            name, parsed.arrow, nullable=nullable, metadata=_metadata(parsed.name, None)
        )

    def _in_brackets(self, rule: Callable[[], _T]) -> _T:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise BadSchema(
                f"Column {self.column!r} is nested more than {_MAX_DEPTH} levels deep.",
                fix="flatten it.",
            )
        self._need("<")
        parsed = rule()
        self._need(">")
        self.depth -= 1
        return parsed

    def _numbers(self, *, at_most: int) -> list[int]:
        """The numbers of '(10, 2)'; empty if there is no bracket."""
        if not self._take("("):
            return []
        numbers = [self._number()]
        while len(numbers) < at_most and self._take(","):
            numbers.append(self._number())
        self._need(")")
        return numbers

    def _number(self) -> int:
        token = self.token
        if not (token.text.isascii() and token.text.isdigit()):
            self._fail("a number")
        self.at += 1
        return int(token.text)

    # Tokens

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def _take(self, text: str) -> bool:
        if self.token.upper != text or self.token.kind not in ("word", "mark"):
            return False
        self.at += 1
        return True

    def _need(self, text: str) -> None:
        if not self._take(text):
            self._fail(repr(text))

    def _fail(self, expected: str, *, note: str = "", token: _Token | None = None) -> NoReturn:
        token = token or self.token
        actual = "the end" if token.kind == "end" else repr(token.text)
        where = f" (column {self.column!r})" if self.column else ""
        line_start = self.ddl.rfind("\n", 0, token.position) + 1
        line = self.ddl[line_start:].split("\n", 1)[0]
        begin = max(0, token.position - line_start - 60)
        pointer = " " * (token.position - line_start - begin) + "^"
        raise BadSchema(
            f"The schema cannot be read at position {token.position}{where}: expected {expected},"
            f" found {actual}.\n    {line[begin : begin + 120]}\n    {pointer}",
            fix=note
            or "write columns as in Spark's DDL: 'order_id BIGINT NOT NULL, tags ARRAY<STRING>'.",
        )


def check_duplicates(fields: list[pa.Field], *, where: str) -> None:
    """BadSchema if two names are equal without regard to case: Spark resolves columns so."""
    seen: dict[str, str] = {}
    for field in fields:
        folded = field.name.lower()
        if folded in seen:
            raise BadSchema(
                f"{where} has the column {field.name!r} twice (first as {seen[folded]!r}).",
                fix="rename one; Spark ignores the case of names.",
            )
        seen[folded] = field.name


def _unescape(literal: str) -> str:
    """The text of a literal as Spark reads it, with doubled quotes, backslash escapes, and octal
    and Unicode numbers.
    """
    quote, inner = literal[0], literal[1:-1]

    def replace(match: re.Match[str]) -> str:
        escape = match[1]
        if escape is None:
            return quote if match[0][0] == quote else match[0]
        if len(escape) > 1:
            return chr(int(escape[1:], 16) if escape[0] in "uU" else int(escape, 8))
        return _ESCAPED.get(escape, escape)

    return _STRING_ESCAPE.sub(replace, inner)


def _metadata(type_name: str | None, comment: str | None) -> dict[bytes, bytes] | None:
    metadata = {}
    if type_name is not None:
        metadata[TYPE_KEY] = type_name.encode()
    if comment is not None:
        metadata[SPARK_METADATA_KEY] = json.dumps({"comment": comment}).encode()
    return metadata or None
