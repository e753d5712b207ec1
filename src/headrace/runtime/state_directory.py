"""The directory with a pipeline's state and views, and the one that the log's ledger speaks of:
they are told apart by an id, which both have.

The ledger names state files by their ids, and views know their last tick. With another directory
neither would be found, or they would be those of another run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

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
    """StateElsewhere if a directory is not the one that the pipeline's ledger speaks of. A new one
    is made the pipeline's with `remember`.
    """

    def __init__(self, log: Log, pipeline: str, path: Path) -> None:
        self.path, self._pipeline, self._note = path.absolute(), pipeline, f"state.{pipeline}"
        stored, known = _read(log.note(self._note)), self._known()
        self._is_remembered = stored is not None and known == stored["id"]
        if (
            stored is not None
            and not self._is_remembered
            and Ledger(log, pipeline).last(MAIN_QUERY) is not None
        ):
            raise StateElsewhere(
                f"The state of the pipeline {pipeline!r} is not in {self.path}: the directory that"
                f" it ran with was {stored['path']}.",
                fix=(
                    f"name that directory, with --state {stored['path']} or state=…; if it is lost,"
                    " build everything anew: headrace replay FILE --as v2."
                ),
            )
        if (
            stored is None
            and known is not None
            and any((self.path / name).exists() for name in _USED)
        ):
            raise StateElsewhere(
                f"The directory {self.path} has the state of a pipeline on another log, or on this"
                " one before it was lost.",
                fix="name another directory with --state DIR or state=…, or remove this one.",
            )
        self.id = known or new_id()

    def remember(self, ledger: Ledger) -> None:
        """First the directory says what it is, then the log."""
        if self._is_remembered:
            return
        if self._known() is None:
            self._write()
        tx = ledger.transaction()
        tx.set_note(
            self._note, json.dumps({"version": VERSION, "id": self.id, "path": str(self.path)})
        )
        ledger.commit(tx)
        self._is_remembered = True

    def local(self, spark: SparkSession, given: Path | None) -> Path:
        """Where each machine keeps the state that it has at hand. A cluster's machines share the
        state directory, which is no place for that.
        """
        if given is not None:
            return given.absolute() / self.id
        on_this_machine = (spark.conf.get("spark.master", "local") or "local").startswith("local")
        return (
            self.path / "local"
            if on_this_machine
            else Path(tempfile.gettempdir()) / f"headrace-{self.id}"
        )

    def _known(self) -> str | None:
        try:
            stored = _read((self.path / _FILE).read_text())
        except FileNotFoundError:
            return None
        return None if stored is None else stored["id"]

    def _write(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"version": VERSION, "id": self.id, "pipeline": self._pipeline}
        write_atomically(self.path / _FILE, json.dumps(content).encode(), durable=True)


def _read(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    stored = json.loads(text)
    if stored["version"] > VERSION:
        raise NewerFormat(
            f"The state directory has format {stored['version']}; this Headrace knows {VERSION}.",
            fix="upgrade Headrace.",
        )
    return {name: str(value) for name, value in stored.items()}
