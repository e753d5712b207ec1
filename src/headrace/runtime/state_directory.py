"""The state directory of a pipeline, with its state files and views, and how it is matched with the
ledger.

The ledger refers to state files by their ids, and views know their last tick. With another
directory, neither would be found, or they would be those of another run. So the directory and a
note in the log both have an id, and must agree.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from headrace.atomic_file import write_atomically
from headrace.engine.ledger import MAIN_QUERY, Ledger
from headrace.engine.state.files import new_id
from headrace.errors import NewerFormat, StateElsewhere
from headrace.log.api import Log
from headrace.views.file import VIEWS_FILE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


VERSION = 1
_FILE = "state.json"
_USED = ("steps", VIEWS_FILE)


class StateDirectory:
    """A state directory that fits a pipeline's ledger. `find` checks that it does; `remember` makes
    a new directory the pipeline's.
    """

    def __init__(self, pipeline: str, path: Path, id: str, *, is_remembered: bool) -> None:
        self.pipeline = pipeline
        self.path = path
        self.id = id
        self._is_remembered = is_remembered

    @classmethod
    def find(cls, log: Log, pipeline: str, path: Path) -> Self:
        """The state directory at a path, which may be new. Raises StateElsewhere if it is not the
        one that the pipeline's ledger refers to.
        """
        path = path.absolute()
        noted = _parse(log.note(_note(pipeline)))
        directory_id = _read_id(path)
        is_remembered = noted is not None and directory_id == noted["id"]
        has_run = noted is not None and Ledger(log, pipeline).last(MAIN_QUERY) is not None
        if noted is not None and not is_remembered and has_run:
            raise StateElsewhere(
                f"The state of the pipeline {pipeline!r} is not in {path}: the directory that it"
                f" ran with was {noted['path']}.",
                fix=(
                    f"name that directory, with --state {noted['path']} or state=…; if it is lost,"
                    " build everything again: headrace replay FILE --as v2."
                ),
            )
        is_used = any((path / name).exists() for name in _USED)
        if noted is None and directory_id is not None and is_used:
            raise StateElsewhere(
                f"The directory {path} has the state of a pipeline on another log, or on this one"
                " before it was lost.",
                fix="name another directory with --state DIR or state=…; this one is its log's.",
            )
        return cls(pipeline, path, directory_id or new_id(), is_remembered=is_remembered)

    def remember(self, ledger: Ledger) -> None:
        """Write the id, first to the directory, then to the log."""
        if self._is_remembered:
            return
        if _read_id(self.path) is None:
            self.path.mkdir(parents=True, exist_ok=True)
            content = {"version": VERSION, "id": self.id, "pipeline": self.pipeline}
            write_atomically(self.path / _FILE, json.dumps(content).encode(), durable=True)
        tx = ledger.transaction()
        note = {"version": VERSION, "id": self.id, "path": str(self.path)}
        tx.set_note(_note(self.pipeline), json.dumps(note))
        ledger.commit(tx)
        self._is_remembered = True

    def local(self, spark: SparkSession, local: Path | None) -> Path:
        """The directory for local stores on each machine: in `local` if it is given, in the state
        directory on a single machine, and in the temporary directory of each machine of a cluster,
        which shares the state directory.
        """
        if local is not None:
            return local.absolute() / self.id
        on_this_machine = (spark.conf.get("spark.master", "local") or "local").startswith("local")
        if on_this_machine:
            return self.path / "local"
        return Path(tempfile.gettempdir()) / f"headrace-{self.id}"


def _note(pipeline: str) -> str:
    return f"state.{pipeline}"


def _read_id(path: Path) -> str | None:
    """The id in a state directory; None if it has none yet."""
    try:
        stored = _parse((path / _FILE).read_text())
    except FileNotFoundError:
        return None
    return None if stored is None else stored["id"]


def _parse(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    stored = json.loads(text)
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"The state directory has format {stored['version']}; this Headrace knows {VERSION}.",
            fix="upgrade Headrace.",
        )
    return {name: str(value) for name, value in stored.items()}
