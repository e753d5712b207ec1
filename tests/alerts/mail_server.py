"""A mail server for tests: enough of SMTP, without TLS, to accept a mail or to refuse it as a test
demands.
"""

from __future__ import annotations

import socketserver
import threading
from email import message_from_bytes
from email.message import Message


class MailServer:
    """`refuses` is a reply to every RCPT; None takes them."""

    def __init__(self) -> None:
        self.mails: list[Message] = []
        self.refuses: bytes | None = None
        self.logins: list[bytes] = []
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(b"220 ready\r\n")
                for line in self.rfile:
                    word = line[:4].upper()
                    if word == b"DATA":
                        self._take()
                    elif word == b"RCPT" and outer.refuses is not None:
                        self.wfile.write(outer.refuses + b"\r\n")
                    elif word == b"EHLO":
                        self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
                    elif word == b"AUTH":
                        outer.logins.append(line.split()[-1])
                        self.wfile.write(b"235 welcome\r\n")
                    elif word == b"QUIT":
                        self.wfile.write(b"221 bye\r\n")
                        return
                    else:
                        self.wfile.write(b"250 ok\r\n")

            def _take(self) -> None:
                self.wfile.write(b"354 go on\r\n")
                lines = []
                while (line := self.rfile.readline()) not in {b".\r\n", b""}:
                    lines.append(line)
                outer.mails.append(message_from_bytes(b"".join(lines)))
                self.wfile.write(b"250 taken\r\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"smtp://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
