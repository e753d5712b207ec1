"""Loads the pipeline that a file of Python or SQL declares, for every command that takes a FILE."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from headrace.errors import BadPipelineFile, HeadraceError, nearest
from headrace.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from headrace.sql.session import StatementResult

SQL_SUFFIX = ".sql"


def load_pipeline(file: str | Path, name: str | None = None) -> Pipeline:
    """Return the pipeline that a file declares: a Python file is run, and the statements of one of
    SQL, whose name ends in `.sql`, declare a pipeline that is named after it.

    Args:
        file: The file's path.
        name: The pipeline's name, if a Python file declares several; another name for that of SQL.

    Raises:
        BadPipelineFile: The file fails, declares no pipeline, or several and `name` does not
            choose one.
    """
    path = Path(file)
    if path.suffix.lower() == SQL_SUFFIX:
        return load_sql(path, name)[0]
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


def load_sql(path: Path, name: str | None = None) -> tuple[Pipeline, list[StatementResult]]:
    """The pipeline that a file of SQL declares, and what each of its statements has come to.

    Args:
        path: The file.
        name: The pipeline's name; by default that of the file.

    Raises:
        BadPipelineFile: The file cannot be read.
        BadSql: It has several errors. One alone is raised as what it is.
    """
    if not path.is_file():
        raise BadPipelineFile(
            f"There is no file {path}{': it is a directory' if path.is_dir() else ''}.",
            fix="give the path of a file.",
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadPipelineFile(
            f"{path} is no text: byte {error.start:,} is not UTF-8.", fix="save it as UTF-8."
        ) from None
    except OSError as error:
        raise BadPipelineFile(f"{path} cannot be read: {error.strerror}.") from None
    pipeline = Pipeline(name or path.stem)
    pipeline.directory = path.absolute().parent
    return pipeline, pipeline.sql_session().run(text, name=str(path))


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
