"""The list of commands: what it says of each, that a list is all that is loaded to show it, and
completion in a shell.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from headrace.cli.registry import COMMANDS, CommandEntry, load_command

COMMAND = str(Path(sys.executable).with_name("headrace"))
HEAVY = ("numpy", "pyarrow", "pandas", "pyspark", "sqlglot", "starlette")


def first_lines(command: Any) -> str:
    return " ".join(inspect.cleandoc(command.help).split("\n\n")[0].split())


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_the_list_says_of_a_command_what_it_says_of_itself(entry: CommandEntry) -> None:
    assert entry.help == first_lines(load_command(entry))


def imported_by(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
    )


@pytest.mark.parametrize("code", ["import headrace.cli", "import headrace"])
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str) -> None:
    assert imported_by(code).isdisjoint(HEAVY)


def parse_seconds(*arguments: str) -> float:
    """CPU time: what others do on this machine does not count."""
    before = os.times()
    subprocess.run(arguments, capture_output=True, check=True)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def test_help_and_import_are_quick() -> None:
    assert median(parse_seconds(COMMAND, "--help") for _ in range(3)) < 0.6, (
        "0.3 s on a quiet machine"
    )
    assert median(parse_seconds(sys.executable, "-c", "import headrace") for _ in range(3)) < 0.3, (
        "0.2 s on a quiet machine"
    )


def completions(words: str, at: int) -> list[str]:
    """What the shell is offered behind these words."""
    surroundings = os.environ | {
        "_HEADRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(at),
    }
    return subprocess.run(
        [COMMAND], env=surroundings, capture_output=True, text=True, check=False
    ).stdout.split()


@pytest.mark.parametrize(
    ("words", "at", "offered"),
    [
        ("headrace da", 1, "dashboard"),
        ("headrace topic cr", 2, "create"),
        ("headrace consume --fol", 2, "--follow"),
    ],
)
def test_a_shell_completes_commands_and_their_options(words: str, at: int, offered: str) -> None:
    assert offered in completions(words, at)
