"""Those who send: bare HTTP over one connection, and processes that flood a gateway."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

LINES = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}


def post(
    address: str, path: str, body: bytes, headers: Mapping[str, str] = JSON
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=300)
    try:
        connection.request("POST", path, body, dict(headers))
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, (
            json.loads(text) if text.startswith(b"{") else {"text": text.decode(errors="replace")}
        )
    finally:
        connection.close()


def in_another_process(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def printed(process: subprocess.Popen[str], timeout_s: float = 60) -> str:
    out, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0
    return out.strip()
