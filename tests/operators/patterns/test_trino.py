"""Trino's matches of random patterns over random rows, beside ours. Trino runs in a process of its
own, from Maven Central; the first run downloads about 100 MB.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from headrace.errors import BadPattern
from headrace.operators.patterns.compiled_pattern import PatternSpec
from tests.operators.patterns.pattern_driver import Feed, feed_to, row, settings

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "trino"
CASES = 250
MEASURES = (
    ("f", "first(id)"),
    ("l", "last(id)"),
    ("n", "count(*)"),
    ("bs", "count(b.*)"),
    ("total", "sum(v)"),
    ("top", "max(a.v)"),
    ("weighted", "sum(b.v * 2 + b.id)"),
    ("scaled", "last(a.v * 10 - 1)"),
    ("number", "match_number()"),
)
BY_ROW: tuple[tuple[str, Callable[[int], bool]], ...] = (
    ("true", lambda _: True),
    ("v < 5", lambda value: value < 5),
    ("v > 2", lambda value: value > 2),
    ("v % 2 = 0", lambda value: value % 2 == 0),
)
BY_MATCH = (
    "avg({0}.v) < 4",
    "sum({0}.v) < 12",
    "v > {1}.v",
    "v >= first({1}.v)",
    "v > prev(v)",
    "count({0}.*) <= 2",
    "last({0}.v, 1) IS NULL OR v > last({0}.v, 1)",
    "v <> max({1}.v)",
    "sum(v) % 3 <> 0",
    "sum({0}.v * {0}.v - 1) < 20",
    "min({0}.v) > 0 OR v < first(v)",
)


@dataclass(frozen=True)
class Case:
    pattern: str
    by_row: dict[str, int]
    by_match: dict[str, str]
    values: list[int]
    after: str

    def spec(self) -> PatternSpec:
        define = tuple((name, text) for name, text in self.by_match.items() if name in self.pattern)
        return PatternSpec(self.pattern, define, MEASURES, 1_000, self.after)

    def query(self) -> str:
        define = ", ".join(
            f"{name} AS ({BY_ROW[which][0]})"
            + (f" AND ({self.by_match[name]})" if name in self.by_match else "")
            for name, which in self.by_row.items()
            if name in self.pattern
        )
        rows = ", ".join(f"({at}, {value})" for at, value in enumerate(self.values))
        measures = ", ".join(f"{text} AS {name}" for name, text in MEASURES)
        return (
            f"SELECT {', '.join(name for name, _ in MEASURES)} FROM (VALUES {rows}) t(id, v)"
            f" MATCH_RECOGNIZE (ORDER BY id MEASURES {measures} ONE ROW PER MATCH"
            f" AFTER MATCH {self.after} PATTERN ({self.pattern}) DEFINE {define}) ORDER BY number"
        )


def random_pattern(random: Random, depth: int) -> str:
    if depth == 0:
        return random.choice("abc")
    kind = random.choice(["symbol", "group", "or", "both", "both", "permute"])
    if kind == "symbol":
        text = random.choice("abc")
    elif kind == "permute":
        text = "PERMUTE(a, b)"
    else:
        sign = " | " if kind == "or" else " "
        parts = [random_pattern(random, depth - 1) for _ in range(random.randint(1, 3))]
        text = f"({sign.join(parts)})"
    return text + random.choice(
        ["", "", "", "?", "*", "+", "+?", "*?", "??", "{2}", "{1,3}", "{2,}"]
    )


def random_cases() -> list[Case]:
    """Cases that can be used: patterns with a, b and c in which conditions look at what may come
    before.
    """
    random, cases = Random(23), list[Case]()
    while len(cases) < CASES:
        parts = [random_pattern(random, 2) for _ in range(random.randint(1, 3))]
        by_match = {}
        for name in "abc":
            if random.random() < 0.5:
                other = random.choice([each for each in "abc" if each != name])
                by_match[name] = random.choice(BY_MATCH).format(name, other)
        case = Case(
            pattern=" ".join(parts),
            by_row={name: random.randrange(len(BY_ROW)) for name in "abc"},
            by_match=by_match,
            values=[random.randint(0, 7) for _ in range(random.randint(1, 12))],
            after=random.choice(["skip past last row", "skip to next row"]),
        )
        try:
            settings(case.spec())
        except BadPattern:
            continue
        cases.append(case)
    return cases


def our_matches(case: Case, *, one_by_one: bool) -> list[tuple[object, ...]]:
    def fits(value: int) -> str:
        return "".join(name for name, which in case.by_row.items() if BY_ROW[which][1](value))

    rows = [row(0, at, fits(value), at, value) for at, value in enumerate(case.values)]
    feed = Feed([*([each] for each in rows), []], [*range(1, len(rows) + 1), 1_000_000])
    cuts = list(range(len(feed.ticks))) if one_by_one else []
    emitted = feed_to(settings(case.spec()), feed, cuts).emitted
    found = [tuple(each[name] for name, _ in MEASURES) for each in emitted]
    return sorted(found, key=lambda match: match[-1])


@pytest.fixture(scope="module")
def trino() -> list[str]:
    """The command that answers queries."""
    maven, java = shutil.which("mvn"), shutil.which("java")
    if maven is None or java is None:
        pytest.skip("Maven and Java are needed for Trino.")
    sources = [HERE / "pom.xml", *sorted((HERE / "src").rglob("*.java"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace"
    directory = cache / f"trino-{digest}"
    if not (directory / "target" / "built").exists():
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(HERE, directory)
        command = [maven, "-q", "-B", "compile", "dependency:copy-dependencies"]
        subprocess.run(
            [*command, "-DoutputDirectory=target/lib"], cwd=directory, check=True, timeout=1200
        )
        (directory / "target" / "built").touch()
    target = directory / "target"
    return [
        java,
        "-Xmx1g",
        "-cp",
        f"{target / 'classes'}{os.pathsep}{target / 'lib'}/*",
        "peers.TrinoPeer",
    ]


def trino_answers(command: list[str], queries: list[str]) -> list[str]:
    done = subprocess.run(
        command, input="\n".join(queries), capture_output=True, text=True, check=True, timeout=1200
    )
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith(("rows:", "error:"))]


def test_random_patterns_match_as_in_trino(trino: list[str]) -> None:
    cases = random_cases()
    answers = trino_answers(trino, [case.query() for case in cases])
    assert len(answers) == len(cases)
    matched = 0
    for case, answer in zip(cases, answers, strict=True):
        assert answer.startswith("rows:"), (case, answer)
        rows = answer.removeprefix("rows:").replace("null", "None").split(";")
        expected = [tuple(literal_eval(each)) for each in rows if each]
        for one_by_one in (False, True):
            assert our_matches(case, one_by_one=one_by_one) == expected, (case, one_by_one)
        matched += len(expected)
    assert matched > CASES / 2, "the cases are no cases if little matches"
