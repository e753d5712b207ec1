"""Loads the pipeline that a Python file declares, for every command that takes a FILE."""

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
    """Run a Python file, and return the pipeline that it declares.

    Args:
        file: The file's path.
        name: The pipeline's name, if the file declares several.

    Raises:
        BadPipelineFile: The file fails, declares no pipeline, or several and `name` does not
            choose one.
    """
    path = Path(file)
    pipelines = pipelines_in(path)
    if name is not None:
        if name not in pipelines:
            raise BadPipelineFile(
                f"{path} declares no pipeline {name!r}: {nearest(name, pipelines)}"
            )
        return pipelines[name]
    if not pipelines:
        raise BadPipelineFile(
            f"{path} declares no pipeline.",
            fix=(
                "make one at the top of the file, as in shop = hr.Pipeline('shop',"
                " log='file:data')."
            ),
        )
    if len(pipelines) > 1:
        raise BadPipelineFile(
            f"{path} declares {len(pipelines)} pipelines: {', '.join(sorted(pipelines))}.",
            fix=f"choose one, as in --pipeline {min(pipelines)}.",
        )
    return next(iter(pipelines.values()))


def pipelines_in(path: Path) -> dict[str, Pipeline]:
    """The pipelines among the top-level names of a file, by the pipelines' own names."""
    pipelines: dict[str, Pipeline] = {}
    for value in vars(run_file(path)).values():
        if isinstance(value, Pipeline):
            if pipelines.get(value.name, value) is not value:
                raise BadPipelineFile(
                    f"{path} declares two pipelines named {value.name!r}.",
                    fix="rename one of them.",
                )
            pipelines[value.name] = value
    return pipelines


def run_file(path: Path) -> ModuleType:
    """Run a file as a module of its own. It can import modules of its directory."""
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
        code = compile(path.read_bytes(), str(path), "exec")
        exec(code, module.__dict__)  # noqa: S102 - the user asked to run this file
    except HeadraceError as error:
        error.add_note(f"in {path}, line {_line_in(error, path)}")
        raise
    except (Exception, SystemExit) as error:
        raise BadPipelineFile(
            f"{path} fails{_line_text(error, path)}: {type(error).__name__}: {error}",
            fix="run it with Python to see more.",
        ) from error
    finally:
        sys.path.remove(folder)
        # Workers cannot import the module. What is not in sys.modules is pickled with its code.
        del sys.modules[name]
    return module


def _line_text(error: BaseException, path: Path) -> str:
    line = error.lineno if isinstance(error, SyntaxError) else _line_in(error, path)
    return f" in line {line}" if line else ""


def _line_in(error: BaseException, path: Path) -> int | None:
    """The line of the file at which it failed: that of the deepest frame in the file."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return lines[-1] if lines else None
