"""Finds the pipeline that a Python file declares. Every command that takes a FILE uses this."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from headrace.errors import BadPipelineFile, HeadraceError, nearest
from headrace.pipeline.pipeline import Pipeline


def load_pipeline(file: str | Path, name: str | None = None) -> Pipeline:
    """The one pipeline in a file, or the one with a name. BadPipelineFile if there is none, or more
    than one to choose from.
    """
    path = Path(file)
    found = pipelines_in(path)
    if name is not None:
        if name not in found:
            raise BadPipelineFile(f"{path} declares no pipeline {name!r}: {nearest(name, found)}")
        return found[name]
    if not found:
        raise BadPipelineFile(
            f"{path} declares no pipeline.",
            fix=(
                "make one at the top of the file, as in shop = hr.Pipeline('shop',"
                " log='file:data')."
            ),
        )
    if len(found) > 1:
        raise BadPipelineFile(
            f"{path} declares {len(found)} pipelines: {', '.join(sorted(found))}.",
            fix=f"choose one, as in --pipeline {min(found)}.",
        )
    return next(iter(found.values()))


def pipelines_in(path: Path) -> dict[str, Pipeline]:
    """The pipelines among the names that a file defines, by their own names."""
    module = run_file(path)
    found: dict[str, Pipeline] = {}
    for value in vars(module).values():
        if isinstance(value, Pipeline):
            if found.get(value.name, value) is not value:
                raise BadPipelineFile(
                    f"{path} declares two pipelines named {value.name!r}.",
                    fix="rename one of them.",
                )
            found[value.name] = value
    return found


def run_file(path: Path) -> ModuleType:
    """Run a file as a module of its own; it can import what lies beside it."""
    if not path.is_file():
        raise BadPipelineFile(
            f"There is no file {path}{': it is a directory' if path.is_dir() else ''}.",
            fix="give the path of a Python file.",
        )
    name = f"headrace_pipeline_{path.stem}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # noqa: S102 - running it is what the user asked for
    except HeadraceError as error:
        error.add_note(f"in {path}, line {_line_in(error, path)}")
        raise
    except (Exception, SystemExit) as error:
        raise BadPipelineFile(
            f"{path} fails{_at(error, path)}: {type(error).__name__}: {error}",
            fix="run it with Python to see more.",
        ) from error
    finally:
        sys.path.remove(folder)
        del sys.modules[
            name
        ]  # workers cannot import it: what is not found there is pickled whole, with its code
    return module


def _at(error: BaseException, path: Path) -> str:
    line = error.lineno if isinstance(error, SyntaxError) else _line_in(error, path)
    return f" in line {line}" if line else ""


def _line_in(error: BaseException, path: Path) -> int | None:
    """The line of the file where it went wrong: the deepest frame that is in it."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return lines[-1] if lines else None
