"""Every snippet of the README runs: a section's in an empty directory and a process of their own
(`docs/snippets`).
"""

import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.docs.pages import KAFKA, ROOT, SPARK
from tests.docs.snippets import Snippet, snippets
from tests.java import require_java

README = ROOT / "README.md"
TITLES = [
    "The log in five minutes",
    "A pipeline in five minutes",
]


def sections() -> dict[str, list[Snippet]]:
    """Their snippets by title; ```console is for reading here."""
    found: dict[str, list[Snippet]] = {}
    for each in snippets(README.read_text()):
        if each.kind != "console":
            found.setdefault(each.section, []).append(each)
    return found


SECTIONS = sections()


def run_section(title: str, blocks: list[Snippet], directory: Path, address: str = KAFKA) -> str:
    given = json.dumps([astuple(each) for each in blocks]).replace(KAFKA, address)
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_LOG"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", "tests.docs.snippets", README.name]
    done = subprocess.run(
        command,
        input=given,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{title}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def choose(*, spark: bool, kafka: bool) -> list[str]:
    def needs(title: str, *texts: str) -> bool:
        return any(text in each.text for each in SECTIONS[title] for text in texts)

    return [
        title
        for title in SECTIONS
        if needs(title, *SPARK) == spark and needs(title, KAFKA) == kafka
    ]


def test_the_page_has_its_snippets() -> None:
    assert list(SECTIONS) == TITLES


@pytest.mark.parametrize("title", choose(spark=False, kafka=False))
def test_snippets_run(title: str, tmp_path: Path) -> None:
    run_section(title, SECTIONS[title], tmp_path)


@pytest.mark.spark
@pytest.mark.parametrize("title", choose(spark=True, kafka=False))
def test_snippets_with_spark_run(title: str, tmp_path: Path) -> None:
    require_java()
    run_section(title, SECTIONS[title], tmp_path)
