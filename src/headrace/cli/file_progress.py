"""How far files have been stored in a topic, for `headrace produce`: running it again goes on where
it stopped, and storing a file twice takes `--again`.

A file is known by its name and by its content up to where it was stored:

    orders.csv, 25,000 rows, a bad one at 20,001      20,000 rows are stored, and with them
                                                      (bytes 1 to 812,345, SHA-256 9f…)
    the line is corrected, the command runs again     the first 812,345 bytes are the same:
                                                      5,000 rows are stored

Each append is a transaction that stores its rows and the new position in one note, so that a crash
leaves both or none. The note has the positions of several files of one name, and says which of them
stopped at a bad row: another file of that name is refused then, since it may be the same one with
more than the bad row changed.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from headrace.cli.output import count_text
from headrace.columnar.columns import CHANGE_TYPE, UPDATE_POSTIMAGE
from headrace.errors import (
    FencedError,
    HeadraceError,
    InputError,
    NewerFormat,
    NoteConflict,
    RetryError,
    TransactionFenced,
)
from headrace.log.api import Log
from headrace.log.row_files import Format, ReadMeter, open_file, plain_name, skip_to
from headrace.log.rows import with_change_type
from headrace.log.values import AppendResult, Headers, TopicInfo

VERSION = 1
MAX_FILES = 50
_BYTES_BEHIND_A_RECORD = b"\n}"
_BYTES_BEFORE_A_RECORD = (b"", b"\n", b"\r")


@dataclass(frozen=True)
class StoredPart:
    """The part of a file that is stored: its length and SHA-256, and its rows. Of a Parquet file,
    whose rows are not in the order of its bytes, the length and SHA-256 are those of the file.
    """

    bytes: int = 0
    digest: str = ""
    rows: int = 0


def stored_part(path: Path, parts: list[StoredPart], file_format: Format) -> StoredPart:
    """The longest of some parts with which a file begins."""
    found = StoredPart()
    if not parts:
        return found
    meter = ReadMeter()
    with open_file(path) as stream:
        if file_format is Format.parquet:
            skip_to(stream, meter, path.stat().st_size)
            whole = [part for part in parts if part.digest == meter.position().digest]
            return max(whole, key=lambda part: part.rows, default=found)
        for part in sorted(parts, key=lambda part: part.bytes):
            skip_to(stream, meter, part.bytes - 1)
            last = stream.read(1)
            meter.add(last)
            if meter.bytes < part.bytes:
                break
            if meter.position().digest != part.digest:
                continue
            if last in _BYTES_BEHIND_A_RECORD or _next_byte(path, part.bytes) in (
                _BYTES_BEFORE_A_RECORD
            ):
                found = part
    return found


def _next_byte(path: Path, position: int) -> bytes:
    with open_file(path) as stream:
        skip_to(stream, ReadMeter(), position)
        return stream.read(1)


class FileProgress:
    """Stores the rows of one file, each append with the position behind it."""

    def __init__(self, log: Log, info: TopicInfo, path: Path, file_format: Format) -> None:
        self._info, self._path = info, path
        self._id = _note_name(info, path)
        # Opening the transaction ends that of an earlier command, so that its outcome is known.
        self._transaction = log.transaction(self._id)
        self._note = log.note(self._id)
        parts, stopped = _load(self._note)
        self.part = stored_part(path, parts, file_format)
        self._others = [part for part in parts if part != self.part]
        self._stopped = next((part for part in self._others if part.digest == stopped), None)
        if not self.part.rows and self._stopped is not None:
            raise InputError(
                f"{path} does not begin with the {count_text(self._stopped.rows, 'row')} of a file"
                " of that name that an earlier command stored before it met a bad row. Nothing was"
                " stored, since rows that are in both would be stored twice.",
                fix=(
                    "if it is the same file, leave its beginning as it was and correct only the bad"
                    " row and what is behind it. If it is another one, give it another name; or"
                    " store all of it with --again."
                ),
            )

    def append(
        self,
        batch: pa.RecordBatch | None,
        headers: Headers | None,
        partition: int | None,
        part: StoredPart,
    ) -> AppendResult:
        """Store rows, and that the file is stored up to `part`."""
        self._transaction = self._transaction.next()
        note = _dump([*self._others, part], self._stopped)
        try:
            if batch is not None:
                if self._info.is_table and CHANGE_TYPE not in batch.schema.names:
                    batch = with_change_type(batch, UPDATE_POSTIMAGE)
                self._transaction.append(
                    self._info.name, batch, headers=headers, partition=partition
                )
            self._transaction.set_note(self._id, note, expect=self._note)
            result = self._transaction.commit()
        except (NoteConflict, TransactionFenced):
            raise FencedError(
                f"Another command is storing {self._path.name} in {self._info.name}.",
                fix="wait for its end, then run this one again: it goes on behind it.",
            ) from None
        except RetryError as error:
            error.add_note("Running the command again goes on where it stopped.")
            raise
        self.part, self._note = part, note
        return result

    def stop(self) -> None:
        """Remember that the file stopped at a bad row. Without the memory the next command still
        finds the part that is stored, as long as it has not changed.
        """
        with suppress(HeadraceError):
            self._transaction = self._transaction.next()
            note = _dump([*self._others, self.part], self.part)
            self._transaction.set_note(self._id, note, expect=self._note)
            self._transaction.commit()

    def close(self) -> None:
        self._transaction.close()


def forget_stop(log: Log, info: TopicInfo, path: Path) -> None:
    """Forget that a file of this name stopped at a bad row."""
    name = _note_name(info, path)
    note = log.note(name)
    parts, stopped = _load(note)
    if stopped:
        with log.transaction(name) as transaction:
            transaction.set_note(name, _dump(parts, None), expect=note)


def _note_name(info: TopicInfo, path: Path) -> str:
    identity = f"{info.id or info.name}/{plain_name(path)}".encode()
    return f"produce.{info.name[:100]}.{hashlib.sha256(identity).hexdigest()[:24]}"


def _dump(parts: list[StoredPart], stopped: StoredPart | None) -> str:
    files = [asdict(part) for part in parts[-MAX_FILES:]]
    mark = {} if stopped is None else {"stopped": stopped.digest}
    return json.dumps({"version": VERSION, "files": files, **mark})


def _load(note: str | None) -> tuple[list[StoredPart], str]:
    """The stored parts of a note, and the digest of the one that stopped at a bad row."""
    if note is None:
        return [], ""
    stored = json.loads(note)
    if stored["version"] > VERSION:
        raise NewerFormat(
            "The progress of this file was stored by a newer Headrace"
            f" (format {stored['version']}, this one reads {VERSION}).",
            fix="upgrade headrace.",
        )
    return [StoredPart(**part) for part in stored["files"]], stored.get("stopped", "")
