"""A receiver of webhooks, as a user may have one: an HTTP server that keeps the rows it is sent by
key, and drops repeats by id. It misbehaves on request.
"""

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str]]
OK: Answer = (204, {})


class WebhookReceiver:
    """`behave` decides what to answer: it gets the request's headers and its rows; what it does not
    answer with 2xx is not kept.
    """

    def __init__(self, *, secret: bytes | None = None, port: int = 0) -> None:
        self.secret = secret
        self.behave: Callable[[Any, list[dict[str, Any]]], Answer | None] = lambda *_: OK
        self.requests: list[dict[str, str]] = []
        self.rows: list[dict[str, Any]] = []
        self.tables: dict[str, dict[str, Any]] = {}
        self.ids: set[str] = set()
        self.repeats = 0
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = receiver.take(dict(self.headers.items()), body)
                if answer is None:  # nonsense, and the connection is closed
                    self.wfile.write(b"nonsense\r\n\r\n")
                    self.close_connection = True
                    return
                status, headers = answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Silence."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?token=abc"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, headers: dict[str, str], body: bytes) -> Answer | None:
        with self._lock:
            if self.secret is not None and not self._is_signed(headers, body):
                return 401, {}
            message = json.loads(body)
            answer = self.behave(headers, message.get("rows", []))
            self.requests.append(headers)
            if answer is not None and 200 <= answer[0] < 300:
                for row in message.get("rows", []):
                    self._keep(message["table"], row)
            return answer

    def _keep(self, table: str, entry: dict[str, Any]) -> None:
        if entry["id"] in self.ids:
            self.repeats += 1
        self.ids.add(entry["id"])
        self.rows.append(entry)
        row = entry["row"]
        kept = self.tables.setdefault(table, {})
        key = (
            entry["id"] if "id" not in row and "k" not in row else str(row.get("id", row.get("k")))
        )
        if entry["change"] == "insert":
            kept[entry["id"]] = {
                **row,
                "_partition": entry["partition"],
                "_offset": entry["offset"],
            }
        elif entry["change"] == "delete":
            kept.pop(key, None)
        else:
            kept[key] = row

    def _is_signed(self, headers: dict[str, str], body: bytes) -> bool:
        assert self.secret is not None
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(self.secret, signed, hashlib.sha256).digest()).decode()
        new_partitions = abs(time.time() - int(headers["webhook-timestamp"])) < 300
        return new_partitions and hmac.compare_digest(
            headers.get("webhook-signature", ""), f"v1,{expected}"
        )
