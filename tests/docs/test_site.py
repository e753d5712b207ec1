"""The guide as a site: it is built without a warning, nothing in it comes from another host, and
every drawing can be read in light and dark.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

CONCEPTS = [
    "log",
    "groups-and-queues",
    "ticks-and-time",
    "windows",
    "joins",
    "patterns",
    "search",
    "processors",
    "change-capture",
    "event-sourcing",
    "exactly-once",
    "replay",
]
ELSEWHERE = re.compile(r"(?:https?:)?//")
# What a browser loads by itself; a link is followed by a person.
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "link": "href",
    "object": "data",
    "use": "href",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return into


class Loads(HTMLParser):
    """What a page has the browser load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if (
            tag in LOADED
            and given.get("rel") != "canonical"
            and (address := given.get(LOADED[tag]))
        ):
            self.found.append(address)


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    pages = {path: Loads(path.read_text()).found for path in site.rglob("*.html")}
    assert len(pages) > 30
    assert all(pages.values()), "a page loads its style and script at least"
    assert [
        (path.name, address)
        for path, found in pages.items()
        for address in found
        if ELSEWHERE.match(address)
    ] == []
    styles = list(site.rglob("*.css"))
    assert [
        path.name
        for path in styles
        if re.search(r"url\(['\"]?(?:https?:)?//|@import", path.read_text())
    ] == []


def test_every_loaded_file_exists(site: Path) -> None:
    missing = [
        (path.name, address)
        for path in site.rglob("*.html")
        if path.name != "404.html"  # names everything from the root of a server
        for address in Loads(path.read_text()).found
        if not address.startswith("data:")
        and not (path.parent / address.partition("?")[0].partition("#")[0]).exists()
    ]
    assert missing == []


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert {page for page in pages_by_name() if f'href="{page}"' not in home} <= {"index.html"}


def pages_by_name() -> Iterator[str]:
    return (
        path.relative_to(DOCS).with_suffix(".html").as_posix()
        for path in sorted(DOCS.rglob("*.md"))
    )


def test_tests_that_are_named_are_there() -> None:
    named = re.findall(
        r"`((?:tests|examples)/[\w/.]+)`",
        "\n".join(path.read_text() for path in DOCS.rglob("*.md")),
    )
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_has_a_drawing_and_an_example(name: str) -> None:
    page = (DOCS / "concepts" / f"{name}.md").read_text()
    assert f"](../drawings/{name}.svg)" in page
    assert "```python\n" in page


@pytest.mark.parametrize(
    "path", sorted((DOCS / "drawings").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_drawing_says_what_it_is_and_has_both_colours(path: Path) -> None:
    drawing = path.read_text()
    assert "<title" in drawing
    assert "<desc" in drawing
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+)", line))
        for line in drawing.splitlines()
        if "svg { --" in line
    )
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        assert all(
            contrast(colours[ink], colours[paper]) >= 4.5
            for ink in ("ink", "soft", "accent", "warm")
            for paper in ("paper", "fill")
        ), colours
    assert any(path.name in page.read_text() for page in DOCS.rglob("*.md")), "no page shows it"


def contrast(one: str, other: str) -> float:
    """By the rule of the Web Content Accessibility Guidelines."""
    darker, lighter = sorted((brightness(one), brightness(other)))
    return (lighter + 0.05) / (darker + 0.05)


def brightness(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
