"""The pages of the guide, and what each needs to run."""

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.snippets import Page, Snippet, snippets

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
KAFKA = "kafka://localhost:9092"
POSTGRES = "postgresql://shop@localhost/shop"
PORTS = ("8765", "8766", "54320")
# Its commands start a cluster of several processes: tests/e2e/test_cluster.py does that. Here they
# are only held against what the command takes.
NEEDS_A_CLUSTER = "how-to/cluster.md"
SPARK = ("hr.spark(", "headrace run ", "headrace replay ")


def pages(*, spark: bool = False, server: str | None = None) -> list[str]:
    """The pages with snippets, by what they need."""
    return [
        name
        for name, blocks in _all()
        if _needs(blocks, *SPARK) == spark and _server(blocks) == server
    ]


def _all() -> list[tuple[str, list[Snippet]]]:
    found = (
        (path.relative_to(DOCS).as_posix(), snippets(path.read_text()))
        for path in sorted(DOCS.rglob("*.md"))
    )
    return [(name, blocks) for name, blocks in found if blocks and name != NEEDS_A_CLUSTER]


def _needs(blocks: list[Snippet], *texts: str) -> bool:
    return any(text in block.text for block in blocks for text in texts)


def _server(blocks: list[Snippet]) -> str | None:
    return next((server for server in (KAFKA, POSTGRES) if _needs(blocks, server)), None)


def run_page(
    name: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    replacements: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A page's snippets, in a directory; gives back the names that they left."""
    blocks = snippets((DOCS / name).read_text())
    if _needs(blocks, "curl ") and shutil.which("curl") is None and os.environ.get("CI") != "true":
        pytest.skip("curl is not installed. To fix: apt-get install curl")
    monkeypatch.chdir(directory)
    monkeypatch.delenv("HEADRACE_LOG", raising=False)
    ports = {port: str(_free_port()) for port in PORTS}
    return Page(name, {**ports, **(replacements or {})}).run(blocks)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
