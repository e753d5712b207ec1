"""Every snippet of the README runs: the snippets of a section one after the other in an empty
directory, and those that need Spark in the tests' session.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import KAFKA, ROOT, SPARK
from tests.docs.snippets import Page, Snippet, snippets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

README = ROOT / "README.md"
TITLES = [
    "The log in five minutes",
    "A pipeline in five minutes",
]


def sections() -> dict[str, list[Snippet]]:
    """The snippets to run by the title of their section; ```console is for reading here."""
    by_title: dict[str, list[Snippet]] = {}
    for snippet in snippets(README.read_text()):
        if snippet.kind != "console":
            by_title.setdefault(snippet.section, []).append(snippet)
    return by_title


SECTIONS = sections()
ON_SPARK = [
    title
    for title, section in SECTIONS.items()
    if any(text in snippet.text for snippet in section for text in SPARK)
]


def run_section(title: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.delenv("HEADRACE_LOG", raising=False)
    Page(README.name).run(SECTIONS[title])


def test_the_readme_has_these_sections_with_snippets() -> None:
    assert list(SECTIONS) == TITLES
    assert not any(KAFKA in snippet.text for section in SECTIONS.values() for snippet in section)


@pytest.mark.parametrize("title", [title for title in SECTIONS if title not in ON_SPARK])
def test_a_section_runs(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_section(title, tmp_path, monkeypatch)


@pytest.mark.parametrize("title", ON_SPARK)
def test_a_section_with_spark_runs(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: "SparkSession"
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda _session: None)  # the session is shared
    run_section(title, tmp_path, monkeypatch)
