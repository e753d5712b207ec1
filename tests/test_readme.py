"""Every snippet of the README runs: the blocks of a section one after the other, in an empty directory, Python sharing its names."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.testing.kafka_broker import KafkaBroker
from tests.java import require_java

README = Path(__file__).parents[1] / "README.md"
PLACEHOLDER = "kafka://localhost:9092"
# What a comment behind print() says is printed; an ellipsis at its end stands for more.
PROMISES = re.compile(r"print\(.*\) +# (.+?)(?: …)?$", re.MULTILINE)

# Runs (language, first line, text) triples. Compiled with the page's own line numbers, so that a traceback points into it.
DRIVER = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for language, line, text in json.load(sys.stdin):
    if language.startswith("file="):
        open(language.removeprefix("file="), "w").write(text)
    elif language == "python":
        exec(compile("\\n" * line + text, "README.md", "exec"), names)
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
"""


@dataclass(frozen=True)
class Section:
    """A section's title and its snippets."""

    title: str
    blocks: tuple[tuple[str, int, str], ...]

    def needs(self, text: str) -> bool:
        return any(text in block for _, _, block in self.blocks)


def sections(page: str) -> list[Section]:
    """The sections with snippets that run, ```python and ```bash, or are files to save, ```python file=NAME. Others (```console) are for reading."""
    found: dict[str, list[tuple[str, int, str]]] = {}
    title = ""
    for match in re.finditer(r"^## ([^\n]+)$|^```(\w*) ?(file=\S+)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        heading, language, file, text = match.groups()
        title = heading or title
        if language in {"python", "bash"}:
            found.setdefault(title, []).append((file or language, page.count("\n", 0, match.start()) + 1, text))
    return [Section(each, tuple(blocks)) for each, blocks in found.items()]


SECTIONS = sections(README.read_text())


def run_section(section: Section, directory: Path, address: str = PLACEHOLDER) -> subprocess.CompletedProcess[str]:
    blocks = [(language, line, text.replace(PLACEHOLDER, address)) for language, line, text in section.blocks]
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_LOG"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [sys.executable, "-c", DRIVER]
    done = subprocess.run(command, input=json.dumps(blocks), cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{section.title}:\n{done.stdout}\n{done.stderr}"
    return done


def choose(*, spark: bool, kafka: bool) -> list[Section]:
    return [each for each in SECTIONS if (each.needs("hr.spark(") or each.needs("headrace run ")) == spark and each.needs(PLACEHOLDER) == kafka]


def test_the_page_has_its_snippets() -> None:
    assert [each.title for each in SECTIONS] == ["The log in five minutes", "A pipeline in five minutes", "Databases in", "On the command line", "With Spark", "On Kafka"]


@pytest.mark.parametrize("section", choose(spark=False, kafka=False), ids=lambda each: each.title)
def test_snippets_run(section: Section, tmp_path: Path) -> None:
    printed = run_section(section, tmp_path).stdout
    for _, _, text in section.blocks:
        for promised in PROMISES.findall(text):
            assert promised in printed


def test_comments_behind_print_are_promises() -> None:
    promised = PROMISES.findall("print(x)      # ['a'] …\nprint(y, {})      # 1.5 {}\nz = 1      # no promise\n")
    assert promised == ["['a']", "1.5 {}"]


@pytest.mark.spark
@pytest.mark.parametrize("section", choose(spark=True, kafka=False), ids=lambda each: each.title)
def test_snippets_with_spark_run(section: Section, tmp_path: Path) -> None:
    require_java()
    run_section(section, tmp_path)


@pytest.mark.kafka
@pytest.mark.parametrize("section", choose(spark=False, kafka=True), ids=lambda each: each.title)
def test_snippets_with_kafka_run(section: Section, tmp_path: Path, kafka_broker: KafkaBroker) -> None:
    run_section(section, tmp_path, kafka_broker.address)


def test_a_snippet_that_fails_is_noticed(tmp_path: Path) -> None:
    for language, text in (("python", "assert False\n"), ("bash", "false\ntrue\n"), ("bash", "headrace topic list --log file:/dev/null\n")):
        with pytest.raises(AssertionError, match="broken"):
            run_section(Section("broken", ((language, 1, text),)), tmp_path)
