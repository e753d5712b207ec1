"""Connections that never have a complete request, for one end of a fight: `python -m
tests.gateways.half_open PORT COUNT` opens so many of all kinds, writes a line, and opens each again
that is closed.
"""

from __future__ import annotations

import selectors
import socket
import sys
from contextlib import suppress

POST = b"POST /topics/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BEGINNINGS = {
    "nothing": b"",
    "half a head": b"POST /topics/orders HTTP/1.1\r\nHost: local",
    "no body": POST + b"Content-Length: 8000000\r\n\r\n",
    "half a body": POST + b"Content-Length: 16000\r\n\r\n" + b"[" + b" " * 8000,
    "a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n[1, 2",
}


def connect(port: int, beginning: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    with suppress(OSError):  # it is closed already: that is for the reader to see
        connection.sendall(beginning)
    return connection


def main(port: int, count: int) -> None:
    selector = selectors.DefaultSelector()
    beginnings = list(BEGINNINGS.values())
    for number in range(count):
        beginning = beginnings[number % len(beginnings)]
        selector.register(connect(port, beginning), selectors.EVENT_READ, beginning)
    print("open", flush=True)
    while True:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            with suppress(OSError):
                if connection.recv(65536):
                    continue
            selector.unregister(connection)
            connection.close()
            with suppress(OSError):
                selector.register(connect(port, key.data), selectors.EVENT_READ, key.data)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
