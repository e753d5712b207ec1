"""A server that speaks the protocol of S3, for tests: moto, whose objects are in memory. Like this:

with S3Server() as server:
os.environ.update(server.environment)
sink = hr.sinks.parquet(server.new_bucket())
"""

from __future__ import annotations

import importlib.util
import sys
import urllib.request
import uuid
from pathlib import Path

from tests.servers.database_server import DatabaseServer, ServerUnavailable


class S3Server(DatabaseServer):
    kind = "S3"
    user = "root"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which clients find the server, and credentials that it takes."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }

    def new_bucket(self) -> str:
        """Create a bucket, and return a URL in it."""
        name = f"tests-{uuid.uuid4().hex[:12]}"
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        return f"s3://{name}/lake"

    def prepare(self, data: Path) -> None:
        data.mkdir()

    def command(self, data: Path) -> list[str]:
        if not all(map(importlib.util.find_spec, ("moto", "flask"))):
            raise ServerUnavailable("moto is not installed. To fix: pip install 'headrace[dev]'")
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=1).close()
        except OSError:
            return False
        return True
