"""Fingerprints of users' Python code: whether a function or class of a plan is the one that it was.

A fingerprint covers the source of a function (not its spaces, comments and docstrings), its
defaults, what it closes over, and the globals that it reads, followed through the user's own
modules. Libraries count by their names: a new release of numpy is no edit.

    RATE = 0.19
    def tax(net): return net * RATE         # "3f0a…"
    RATE = 0.2                              # another fingerprint
    def tax(net):
        \"\"\"The tax of a price.\"\"\"     # the fingerprint of before
        return net*RATE

Code whose source is not in a file, as that of `python -c`, counts by its bytecode, which is another
one in another version of Python.

`processor_steps` puts fingerprints into the identity of steps, so that an edit of code is found as
any other edit is (`fingerprints`, `meanings`).
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import json
import linecache
import logging
import re
import site
import sys
import sysconfig
import textwrap
import uuid
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import NoFingerprint

_PLAIN = (
    bool, int, float, complex, str, bytes, Decimal, Fraction, date, time, timedelta, tzinfo,
    uuid.UUID, PurePath, range, slice,
)  # fmt: skip
_BY_NAME = (ModuleType, BuiltinFunctionType, MethodWrapperType, WrapperDescriptorType)
_ARROW = (pa.DataType, pa.Field, pa.Schema, pa.Scalar)
_NOT_MEMBERS = {
    "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__dict__",
    "__doc__", "__firstlineno__", "__module__", "__parameters__", "__qualname__",
    "__static_attributes__", "__weakref__", "__abstractmethods__", "_abc_impl", "__slotnames__",
}  # fmt: skip
"""What Python keeps in a class: `__slotnames__` is there once one of its objects was pickled."""
_OWN_PACKAGES = {"headrace", "pyspark_headrace"}
_MAX_DEPTH = 50


def code_fingerprint(subject: Any, *, where: str) -> str:
    """The fingerprint of a function, a class or an object with settings.

    Args:
        subject: The function, class or object.
        where: What it is part of, for errors.

    Returns:
        Sixteen characters, the same for the same code in every process.

    Raises:
        NoFingerprint: It reads a value that has no stable text, such as a lock or a connection.
    """
    reader = _CodeReader(where)
    text = json.dumps(reader.describe(subject, path=()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _CodeReader:
    """Describes values in plain values, each object once."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no other object gets the id of one that was described

    def describe(self, value: Any, path: tuple[str, ...]) -> Any:
        """A value in plain values; `path` says how it was reached."""
        if value is None or isinstance(value, enum.Enum):
            return repr(value)
        if isinstance(value, _PLAIN):
            return [type(value).__name__, repr(value)]
        if isinstance(value, _ARROW):
            return [type(value).__name__, str(value)]
        if isinstance(value, re.Pattern):
            return ["pattern", repr(value.pattern), value.flags]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, _BY_NAME) or _is_of_library(value):
            return ["name", _qualified_name(value)]
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        if len(path) > _MAX_DEPTH:
            raise self._refusal(path, "it leads too far")
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return self._describe_object(value, path)

    def _describe_object(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, FunctionType):
            return self._describe_function(value, path)
        if isinstance(value, type):
            return self._describe_class(value, path)
        if isinstance(value, MethodType):
            return ["method", self._all([value.__func__, value.__self__], path)]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self.describe(value.__func__, path)]
        if isinstance(value, property):
            return ["property", self._all([value.fget, value.fset, value.fdel], path)]
        if isinstance(value, functools.cached_property):
            return ["cached_property", self.describe(value.func, path)]
        if isinstance(value, functools.partial):
            return ["partial", self._all([value.func, value.args, value.keywords], path)]
        if isinstance(value, list | tuple):
            return [type(value).__name__, self._all(value, path)]
        if isinstance(value, set | frozenset):
            return ["set", sorted(json.dumps(self.describe(each, path)) for each in value)]
        if isinstance(value, dict):
            pairs = [(self.describe(key, path), self.describe(value[key], path)) for key in value]
            return ["dict", sorted(pairs, key=json.dumps)]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return ["array", str(value.dtype), value.shape, _digest(value.tobytes())]
        if isinstance(value, pa.Array | pa.ChunkedArray | pa.RecordBatch | pa.Table):
            return ["arrow", str(value.type if hasattr(value, "type") else value.schema),
                    _digest(repr(value.to_pylist()).encode())]  # fmt: skip
        if dataclasses.is_dataclass(value):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return ["object", self._all([type(value), fields], path)]
        if not _is_of_library(type(value)) and hasattr(value, "__dict__"):
            return ["object", self._all([type(value), vars(value)], path)]
        raise self._refusal(path, f"it is a {_qualified_name(type(value))}")

    def _all(self, values: Any, path: tuple[str, ...]) -> list[Any]:
        return [self.describe(value, path) for value in values]

    def _describe_function(self, function: FunctionType, path: tuple[str, ...]) -> Any:
        code = function.__code__
        path = (*path, function.__qualname__)
        text = _normalized_source(function)
        described: dict[str, Any] = {
            "source": self._bytecode(code, path) if text is None else text,
            "defaults": self._all([function.__defaults__, function.__kwdefaults__], path),
        }
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a name that is assigned later, such as the function's own
                continue
            described[f"closure {name}"] = self.describe(content, (*path, name))
        for name in sorted(_read_globals(code)):
            if name in function.__globals__:
                value = function.__globals__[name]
                described[f"global {name}"] = self.describe(value, (*path, name))
        return ["function", described]

    def _bytecode(self, code: CodeType, path: tuple[str, ...]) -> Any:
        """What stands for a source that is not in a file. Another version of Python compiles the
        same code differently.
        """
        constants = [
            self._bytecode(each, path) if isinstance(each, CodeType) else self.describe(each, path)
            for each in code.co_consts
        ]
        return [_digest(code.co_code), constants, code.co_names, code.co_varnames]

    def _describe_class(self, cls: type, path: tuple[str, ...]) -> Any:
        path = (*path, cls.__qualname__)
        members = {
            name: self.describe(value, (*path, name))
            for name, value in sorted(vars(cls).items())
            if name not in _NOT_MEMBERS
            and not inspect.isgetsetdescriptor(value)
            and not inspect.ismemberdescriptor(value)
        }
        return ["class", cls.__qualname__, self._all(cls.__bases__, path), members]

    def _refusal(self, path: tuple[str, ...], reason: str) -> NoFingerprint:
        what = ".".join(path) or "it"
        return NoFingerprint(
            f"Edits of the code of {self.where} could not be noticed: {what} has no fingerprint,"
            f" since {reason}.",
            fix=(
                'give the code a version, as in version="1", and another one with each edit that'
                " changes results."
            ),
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _qualified_name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value).__name__)
    return f"{getattr(value, '__module__', None)}.{name}"


def _is_of_library(value: Any) -> bool:
    """Whether a function or class belongs to Python, to an installed package or to Headrace. Such
    code counts by its name.
    """
    if not isinstance(value, type | FunctionType) and not hasattr(value, "__qualname__"):
        return False
    if isinstance(value, MethodType | staticmethod | classmethod):
        return False
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == "__main__":
        return False
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root == "builtins" or root in _OWN_PACKAGES:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["purelib"], paths["platlib"], *site.getsitepackages()})


def _read_globals(code: CodeType) -> set[str]:
    """The global names that code reads, in functions inside it too."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _read_globals(constant)
    return names


# Sources


def _normalized_source(function: FunctionType) -> str | None:
    """The source without spaces, comments and docstrings; None if it is not to be had."""
    try:
        if function.__name__ == "<lambda>":
            tree: ast.AST | None = _lambda_tree(function.__code__)
        else:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            _drop_docstring(node)
    return ast.unparse(tree)


def _drop_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:] or [ast.Pass()]


def _lambda_tree(code: CodeType) -> ast.AST | None:
    """The lambda of a code object: of those in its file whose body has all its instructions, the
    innermost.
    """
    lines = linecache.getlines(code.co_filename)
    places = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in code.co_positions()
        if line is not None and column is not None and end_line is not None and end_column
    ]
    if not lines or not places:
        return None
    first = min(start for start, _ in places)
    last = max(end for _, end in places)
    around = [
        node
        for node in ast.walk(ast.parse("".join(lines)))
        if isinstance(node, ast.Lambda)
        and (node.body.lineno, node.body.col_offset) <= first
        and last <= (node.body.end_lineno or 0, node.body.end_col_offset or 0)
    ]
    # Of two that are one within the other, the inner one begins later.
    return max(around, key=lambda node: (node.lineno, node.col_offset), default=None)
