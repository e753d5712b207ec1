"""The messages of Postgres's protocol, version 3: how they are cut out of the bytes that a client
sends, and how the server's are written.

    client   Q SELECT 1              P B D E S (parse, bind, describe, execute, sync)
    server   T D C Z                 1 2 T D C Z

A message is a letter, its length as four bytes, and its content. The first one of a connection has
no letter. Nothing here knows what the messages mean: `connection.py` does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_STARTUP_BYTES = 10_000
MAX_MESSAGE_BYTES = 16 << 20
MAX_FIELDS = 32_767

PROTOCOL_3 = 0x0003_0000
SSL_REQUEST = 80_877_103
GSS_REQUEST = 80_877_104
CANCEL_REQUEST = 80_877_102

TEXT, BINARY = 0, 1
IDLE, IN_TRANSACTION, FAILED = b"I", b"T", b"E"

_INT32 = struct.Struct(">i")
_INT16 = struct.Struct(">h")
_HEAD = struct.Struct(">cI")


class ProtocolError(Exception):
    """What a client sent is no message of the protocol: its connection is closed."""


class MessageReader:
    """The content of one message, read from left to right. ProtocolError if it is too short."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def int32(self) -> int:
        return int(self._number(_INT32))

    def int16(self) -> int:
        return int(self._number(_INT16))

    def count(self) -> int:
        """A number of fields that follow."""
        number = self.int16() & 0xFFFF
        if number > MAX_FIELDS:
            raise ProtocolError(f"a message has {number} fields")
        return number

    def letter(self) -> bytes:
        return self.take(1)

    def text(self) -> str:
        """A text that ends with a zero byte. UTF-8, as the server says at the start."""
        end = self._content.find(b"\0", self._at)
        if end < 0:
            raise ProtocolError("a text in a message does not end")
        part = self._content[self._at : end]
        self._at = end + 1
        try:
            return part.decode()
        except UnicodeDecodeError:
            raise ProtocolError("a text in a message is not UTF-8") from None

    def take(self, length: int) -> bytes:
        if length < 0 or self._at + length > len(self._content):
            raise ProtocolError("a message is shorter than it says")
        part = self._content[self._at : self._at + length]
        self._at += length
        return part

    def end(self) -> None:
        if self._at != len(self._content):
            raise ProtocolError("a message is longer than what it contains")

    def _number(self, form: struct.Struct) -> int:
        if self._at + form.size > len(self._content):
            raise ProtocolError("a message is shorter than it says")
        (number,) = form.unpack_from(self._content, self._at)
        self._at += form.size
        return int(number)


class MessageBuffer:
    """Cuts what a client sends into messages. Only what has come is kept: a length that a message
    announces reserves nothing.
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        self._data += data

    def startup(self) -> bytes | None:
        """The content of a first message, which has no letter; None if it is not complete."""
        if len(self._data) < _INT32.size:
            return None
        (length,) = _INT32.unpack_from(self._data)
        if not 8 <= length <= MAX_STARTUP_BYTES:
            raise ProtocolError("this is not Postgres's protocol")
        if len(self._data) < length:
            return None
        content = bytes(self._data[4:length])
        del self._data[:length]
        return content

    def message(self) -> tuple[bytes, bytes] | None:
        """The letter and the content of the next message; None if it is not complete."""
        if len(self._data) < _HEAD.size:
            return None
        kind, length = _HEAD.unpack_from(self._data)
        if not 4 <= length <= MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length:,} bytes; at most {MAX_MESSAGE_BYTES:,}")
        if len(self._data) <= length:
            return None
        content = bytes(self._data[5 : length + 1])
        del self._data[: length + 1]
        return kind, content


# The server's messages


def message(kind: bytes, content: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(content) + 4) + content


def _text(value: str) -> bytes:
    return value.replace("\0", "").encode() + b"\0"


AUTHENTICATION_OK = message(b"R", _INT32.pack(0))
PARSE_COMPLETE = message(b"1")
BIND_COMPLETE = message(b"2")
CLOSE_COMPLETE = message(b"3")
NO_DATA = message(b"n")
EMPTY_QUERY = message(b"I")
PORTAL_SUSPENDED = message(b"s")
COPY_DONE = message(b"c")
READY = {status: message(b"Z", status) for status in (IDLE, IN_TRANSACTION, FAILED)}


def authentication(code: int, content: bytes = b"") -> bytes:
    """A step of authentication: 10 offers mechanisms, 11 and 12 continue and end SCRAM."""
    return message(b"R", _INT32.pack(code) + content)


def parameter_status(name: str, value: str) -> bytes:
    return message(b"S", _text(name) + _text(value))


def backend_key(process: int, secret: int) -> bytes:
    return message(b"K", struct.pack(">Ii", process, secret))


def negotiate_version(options: Sequence[str]) -> bytes:
    """The newest minor version is 0, and these options are not known."""
    return message(b"v", _INT32.pack(0) + _INT32.pack(len(options)) + b"".join(map(_text, options)))


def command_complete(tag: str) -> bytes:
    return message(b"C", _text(tag))


@dataclass(frozen=True)
class ColumnDescription:
    """One column of a result, as it is described to clients."""

    name: str
    oid: int
    size: int
    modifier: int = -1
    format: int = TEXT


def row_description(columns: Sequence[ColumnDescription]) -> bytes:
    parts = [_INT16.pack(len(columns))]
    for column in columns:
        parts.append(_text(column.name))
        parts.append(
            struct.pack(">ihihih", 0, 0, column.oid, column.size, column.modifier, column.format)
        )
    return message(b"T", b"".join(parts))


def parameter_description(oids: Sequence[int]) -> bytes:
    return message(b"t", _INT16.pack(len(oids)) + b"".join(_INT32.pack(oid) for oid in oids))


def data_row(values: Sequence[bytes | None]) -> bytes:
    """One row. `rows.encode_rows` writes many at once."""
    parts = [_INT16.pack(len(values))]
    for value in values:
        if value is None:
            parts.append(b"\xff\xff\xff\xff")
        else:
            parts += (_INT32.pack(len(value)), value)
    return message(b"D", b"".join(parts))


def copy_out(columns: int) -> bytes:
    """The beginning of COPY … TO STDOUT in text."""
    return message(b"H", struct.pack(">bh", 0, columns) + b"\0\0" * columns)


def error_response(
    severity: str,
    state: str,
    text: str,
    *,
    hint: str | None = None,
    position: int | None = None,
    kind: bytes = b"E",
) -> bytes:
    """An error, or with `kind` N a notice. `position` counts characters of the query from 1."""
    fields = [b"S" + _text(severity), b"V" + _text(severity), b"C" + _text(state)]
    fields.append(b"M" + _text(text))
    if hint:
        fields.append(b"H" + _text(hint))
    if position is not None:
        fields.append(b"P" + _text(str(position)))
    return message(kind, b"".join(fields) + b"\0")
