"""Fingerprints of code: what is an edit, and what is none."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import NoFingerprint
from headrace.plan.code_fingerprints import code_fingerprint

_FILES = itertools.count()


def load(folder: Path, source: str) -> dict[str, Any]:
    """The names that a file declares, run as a pipeline's file is."""
    path = folder / f"module_{next(_FILES)}.py"
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "users_module"}
    exec(compile(source, str(path), "exec"), names)
    return names


def fingerprint(folder: Path, source: str, name: str = "f") -> str:
    return code_fingerprint(load(folder, source)[name], where="step")


BASE = """
import math
RATE = 2
def helper(x):
    return x + 1
def f(x, scale=3):
    return math.floor(helper(x) * RATE * scale)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    return x + 1", "    # what is added\n    return (x+1)"),
        ("def helper(x):", 'def helper(x):\n    """One more."""'),
        ("RATE = 2", "RATE = 1 + 1\nOTHER = 3"),
        ("import math", "import math\nimport json"),
    ],
)
def test_spaces_comments_and_unused_names_are_no_edit(
    tmp_path: Path, before: str, after: str
) -> None:
    assert fingerprint(tmp_path, BASE) == fingerprint(tmp_path, BASE.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("RATE = 2", "RATE = 3"),
        ("RATE = 2", "RATE = 2.0"),
        ("x + 1", "x + 2"),
        ("scale=3", "scale=4"),
        ("import math", "import math as other\nclass math:\n    floor = round"),
        ("floor", "ceil"),
    ],
)
def test_what_changes_results_is_an_edit(tmp_path: Path, before: str, after: str) -> None:
    assert fingerprint(tmp_path, BASE) != fingerprint(tmp_path, BASE.replace(before, after))


CLASS = """
import enum
class Base:
    limit = 3
    def of(self, x):
        return x < self.limit
class Kind(enum.Enum):
    LOW = 1
class Sub(Base):
    def __init__(self, name):
        self.name = name
    @property
    def upper(self):
        return self.name.upper(), Kind.LOW
    @staticmethod
    def double(x):
        return 2 * x
f = Sub("a")
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("limit = 3", "limit = 4"),
        ("x < self.limit", "x <= self.limit"),
        ('Sub("a")', 'Sub("b")'),
        ("upper()", "lower()"),
        ("2 * x", "3 * x"),
        ("class Sub(Base)", "class Other(Base):\n    pass\nclass Sub(Other)"),
        ("Kind.LOW", "Kind(1).name"),
    ],
)
def test_members_bases_and_settings_of_a_class_count(
    tmp_path: Path, before: str, after: str
) -> None:
    assert fingerprint(tmp_path, CLASS) == fingerprint(tmp_path, f"# a comment\n{CLASS}")
    assert fingerprint(tmp_path, CLASS) != fingerprint(tmp_path, CLASS.replace(before, after))


def closure(factor: Any) -> Callable[[int], Any]:
    return lambda x: x * factor


VALUES: list[Any] = [
    1,
    1.0,
    "1",
    b"1",
    True,
    None,
    Decimal(1),
    (1, 2),
    [1, 2],
    {1, 2},
    {"a": 1},
    {"a": 2},
    re.compile("a"),
    re.compile("a", re.IGNORECASE),
    np.array([1, 2]),
    np.array([1, 3]),
    pa.array([1, 2]),
    pa.int32(),
    len,
    max,
    np.add,
    functools.partial(max, 3),
    functools.partial(max, 4),
    Path("a"),
]


def test_closures_count_by_value_and_type() -> None:
    found = [code_fingerprint(closure(value), where="step") for value in VALUES]
    assert len(set(found)) == len(VALUES)
    assert found == [code_fingerprint(closure(value), where="step") for value in VALUES]


def test_lambdas_on_one_line_are_told_apart() -> None:
    lambdas = [lambda x: x + 1, lambda x: x + 2, lambda x: x + 1]  # fmt: skip
    first, second, third = (code_fingerprint(each, where="step") for each in lambdas)
    assert first == third != second


def test_functions_that_call_each_other_have_fingerprints(tmp_path: Path) -> None:
    mutual = "def f(x):\n    return x and g(x - 1)\ndef g(x):\n    return f(x)\n"
    edited = mutual.replace("return f(x)", "return f(x) + 1")
    assert fingerprint(tmp_path, mutual) == fingerprint(tmp_path, mutual)
    assert fingerprint(tmp_path, mutual) != fingerprint(tmp_path, edited)


def test_the_same_code_has_one_fingerprint_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "users_code.py").write_text(BASE.replace("RATE = 2", "RATE = {'a', 'b', 'c'}"))
    program = (
        "from headrace.plan.code_fingerprints import code_fingerprint\n"
        "import users_code\nprint(code_fingerprint(users_code.f, where='step'))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def without_source(body: str) -> FunctionType:
    names: dict[str, Any] = {}
    exec(f"def f(x): return {body}", names)
    function: FunctionType = names["f"]
    return function


def test_code_without_a_source_counts_by_what_it_does() -> None:
    bodies = ["x", "x + 1", "x + 2", "[y + 1 for y in x]", "[y + 2 for y in x]", "len(x)", "max(x)"]
    found = [code_fingerprint(without_source(body), where="step") for body in bodies]
    assert len(set(found)) == len(bodies)
    assert found == [code_fingerprint(without_source(body), where="step") for body in bodies]


def test_pickling_an_object_of_a_class_was_an_edit_of_the_class(tmp_path: Path) -> None:
    names = load(tmp_path, "class Watched:\n    def add(self, x):\n        return x\n")
    before = code_fingerprint(names["Watched"](), where="step")
    names["Watched"]().__reduce_ex__(2)  # as pickle does
    assert "__slotnames__" in vars(names["Watched"])
    assert code_fingerprint(names["Watched"](), where="step") == before


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        (closure(threading.Lock()), "factor has no fingerprint, since it is a _thread.lock"),
        (closure(iter([])), "since it is a builtins.list_iterator"),
    ],
    ids=["lock", "iterator"],
)
def test_code_whose_edits_go_unnoticed_needs_a_version(subject: Any, reason: str) -> None:
    with pytest.raises(NoFingerprint, match=re.escape(reason)) as caught:
        code_fingerprint(subject, where="the step totals")
    assert "the step totals" in str(caught.value)
    assert 'version="1"' in str(caught.value)
