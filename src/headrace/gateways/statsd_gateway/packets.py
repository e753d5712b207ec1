"""UDP packets, many with one call to the system. Python's own `recv` takes one at a time; `recvmmsg` takes all that wait, so a flood costs little more than its bytes.

What the system had no room for is counted by it, in /proc/net/udp.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from pathlib import Path

import numpy as np

from headrace.errors import ConfigurationError

PACKETS_A_CALL = 256
SLOT_BYTES = 64 << 10
"""No UDP packet is larger."""
BUFFER_BYTES = 32 << 20
"""Asked of the system; without the right to it, it gives less (net.core.rmem_max)."""
_SO_RCVBUFFORCE = 33
_MSG_WAITFORONE = 0x10000
_QUIET = {errno.EAGAIN, errno.EINTR, errno.ECONNREFUSED}


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p), ("name_length", ctypes.c_uint32), ("parts", ctypes.POINTER(_Iovec)), ("part_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t), ("flags", ctypes.c_int),
    )  # fmt: skip


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint32))


def opened(host: str, port: int) -> socket.socket:
    """A socket that listens, with as much room as the system gives."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"Cannot listen on {host}, port {port}: {error.strerror or error}.", fix="choose another --host or --port.") from None
    try:
        _make_room(listening)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigurationError(f"Cannot listen on {host}, port {port} (UDP): {error.strerror or error}.", fix="choose another --host or --port.") from None
    return listening


def _make_room(listening: socket.socket) -> None:
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, BUFFER_BYTES)
    except OSError:
        return  # it takes a right that only few processes have


class Packets:
    """Receives from a socket. It belongs to one thread."""

    def __init__(self, listening: socket.socket, *, wait_s: float) -> None:
        listening.setblocking(True)
        whole, part = int(wait_s), int(wait_s % 1 * 1_000_000)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, part))
        self._socket = listening
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "recvmmsg", None)
        self._slots = bytearray(PACKETS_A_CALL * SLOT_BYTES)
        self._view = memoryview(self._slots)
        self._messages = self._prepared()
        self._raw = np.frombuffer(memoryview(self._messages), np.uint8).reshape(PACKETS_A_CALL, ctypes.sizeof(_Message))

    def _prepared(self) -> ctypes.Array[_Message]:
        address = ctypes.addressof((ctypes.c_char * len(self._slots)).from_buffer(self._slots))
        self._parts = (_Iovec * PACKETS_A_CALL)(*(_Iovec(address + i * SLOT_BYTES, SLOT_BYTES) for i in range(PACKETS_A_CALL)))
        messages = (_Message * PACKETS_A_CALL)()
        for i in range(PACKETS_A_CALL):
            messages[i].header.parts, messages[i].header.part_count = ctypes.pointer(self._parts[i]), 1
        return messages

    def receive(self) -> list[memoryview]:
        """What waits, or what comes first; nothing if none came in time. What it returns is good until the next call."""
        if self._call is None:
            return self._receive_one()
        count = self._call(self._socket.fileno(), self._messages, PACKETS_A_CALL, _MSG_WAITFORONE, None)
        if count < 0:
            if (number := ctypes.get_errno()) in _QUIET:
                return []
            raise OSError(number, os.strerror(number))
        at, view = _Message.length.offset, self._view
        lengths = np.ascontiguousarray(self._raw[:count, at : at + 4]).view(np.uint32).ravel().tolist()
        return [view[start : start + length] for start, length in zip(range(0, count * SLOT_BYTES, SLOT_BYTES), lengths, strict=True)]

    def _receive_one(self) -> list[memoryview]:
        try:
            return [self._view[: self._socket.recv_into(self._slots)]]
        except OSError as error:
            if error.errno in _QUIET:
                return []
            raise


def lost(listening: socket.socket) -> int:
    """Packets for which the system had no room, since the socket was opened; 0 where it does not say."""
    inode = str(os.fstat(listening.fileno()).st_ino)
    table = Path("/proc/net/udp6" if listening.family == socket.AF_INET6 else "/proc/net/udp")
    try:
        rows = (line.split() for line in table.read_text().splitlines()[1:])
        return next((int(row[12]) for row in rows if row[9] == inode), 0)
    except OSError:
        return 0
