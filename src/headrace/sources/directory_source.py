"""The source `directory`: files of a directory that grows, each read once.

    incoming/a.csv          read to the end of its last whole line; what is appended is read later
    incoming/b.parquet      read when it is whole: its footer is there
    incoming/c.jsonl.gz     read to its end; of one that is cut off, the rest when it comes
    incoming/.d.csv.tmp     hidden, and so not read

How far each file is read is a row of the compacted topic `__files.NAME`, by the file's path, stored
in the same transaction as the rows of the file. A file is known by its path: what has been read of
it must stay as it was. A file that is shorter or begins otherwise than when it was read is told, as
a dead letter and in the log, and is not read any more.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.cdc.base import TopicRows
from headrace.columnar.columns import CHANGE_TYPE
from headrace.errors import ConfigurationError, InputError, NewerFormat, RetryError, nearest
from headrace.log.dead_letters import DeadLetter
from headrace.log.row_files import (
    BYTE_ORDER_MARK,
    COMPRESSED_SUFFIXES,
    DELIMITERS,
    SUFFIXES,
    Format,
    open_file,
    plain_name,
)
from headrace.log.values import TopicInfo
from headrace.sources.base import RowSource, Source, SourceRows
from headrace.types.text import TextRow

logger = logging.getLogger("headrace.sources")
VERSION = 1
BLOCK_BYTES = 4 << 20
"""How much of a text file is read at a time."""
MAX_RECORD_BYTES = 32 << 20
PARQUET_ROWS = 20_000
PRINT_BYTES = 4_096
"""How much of a file's beginning, and of what was read last, is compared when it has changed."""
CHANGED = "It changed after it was read"
_LEDGER_SCHEMA = "path STRING, generation STRING, state STRING"


@dataclass
class FileState:
    """How far a file is read.

    Attributes:
        bytes: Of a text file, behind the last whole record that was read, decompressed.
        lines: The lines before that.
        rows: Of a Parquet file, the rows that were read.
        size: The file's size when it was last looked at, and with `modified_ns` and `inode` what
            shows that it has changed.
        head: The digest of its first `head_bytes` bytes.
        tail: The digest of the last bytes in front of `bytes`, of an uncompressed text file.
        heading: The names of the columns of a CSV file, and its delimiter.
        is_done: A file that is read as a whole has been read.
        problem: Why it is not read any more.
    """

    bytes: int = 0
    lines: int = 0
    rows: int = 0
    size: int = -1
    modified_ns: int = 0
    inode: int = 0
    head: str = ""
    head_bytes: int = 0
    tail: str = ""
    heading: tuple[str, ...] = ()
    delimiter: str = ","
    is_done: bool = False
    problem: str = ""

    @property
    def progress(self) -> tuple[int, int, bool]:
        return self.bytes, self.rows, self.is_done


class CutOff(Exception):
    """A file ends before its end. The text says how that was found."""


class BadFile(Exception):
    """The rest of a file cannot be read, and will not be. The text says why."""


class DirectorySource(RowSource):
    """Scans the directory, and reads what is new of one file after the other, the oldest first."""

    def __init__(self, source: Source, topic: TopicInfo) -> None:
        super().__init__(source, topic)
        self._directory = Path(source.options["path"])
        self._pattern: str = source.options["pattern"]
        self._format: Format | None = source.options["format"]
        self._every_s: float = source.options["every_s"]
        self._settle_s: float = source.options["settle_s"]
        self._ledger = f"__files.{source.name}"
        self._generation = ""
        self._files: dict[str, FileState] = {}
        self._pending: deque[str] = deque()
        self._still_since: dict[str, tuple[tuple[int, int], float]] = {}
        """Of files that are not whole, their size and time, and since when these are the same."""
        self._parquet: tuple[str, Iterator[pa.RecordBatch]] | None = None
        self._stream: tuple[str, BinaryIO, int, bytes] | None = None
        """An open compressed file: its path, the position, and the bytes behind the last record."""
        self._next_scan_s = 0.0
        self._changed = self._failed = 0

    # The session

    def start(self, position: Any) -> None:
        if not self._directory.is_dir():
            raise ConfigurationError(
                f"The directory {self._directory} of the source {self.source.name!r} does not"
                " exist.",
                fix="create it, or correct the path.",
            )
        self.log.create_topic(
            self._ledger,
            _LEDGER_SCHEMA,
            key="path",
            compact=True,
            segment_bytes=1 << 20,
            exist_ok=True,
        )
        self._files = {}
        self._generation = uuid.uuid4().hex if position is None else position["generation"]
        if position is not None:
            for batch in self.log.read(self._ledger):
                for row in batch.select(["path", "generation", "state"]).to_pylist():
                    if row["generation"] == self._generation:
                        self._files[row["path"]] = _parse_state(row["state"])
        self._changed = self._failed = 0
        for state in self._files.values():
            self._count(state)

    def _count(self, state: FileState) -> None:
        has_changed = state.problem.startswith(CHANGED)
        self._changed += has_changed
        self._failed += state.problem != "" and not has_changed

    def read(self, timeout_s: float) -> SourceRows | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            while self._pending:
                name = self._pending[0]
                rows = self._read_file(name)
                if rows is not None:
                    return rows
                self._pending.popleft()
            now_s = time.monotonic()
            if now_s >= self._next_scan_s:
                self._scan()
                self._next_scan_s = time.monotonic() + self._every_s
                if self._pending:
                    continue
            pause_s = min(self._next_scan_s, deadline_s) - time.monotonic()
            if pause_s > 0:
                time.sleep(pause_s)
            if time.monotonic() >= deadline_s:
                return None

    def is_caught_up(self) -> bool:
        """Not while a file may be taken as whole in a moment."""
        return not self._still_since

    def status(self) -> dict[str, Any]:
        return {
            "files": len(self._files),
            "changed_files": self._changed,
            "failed_files": self._failed,
        }

    def close(self) -> None:
        self._parquet = None
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None

    # Files

    def _scan(self) -> None:
        """Find files that are new or have changed since they were last looked at."""
        found: list[tuple[int, str]] = []
        try:
            for path in self._directory.glob(self._pattern):
                name = path.relative_to(self._directory).as_posix()
                if any(part.startswith(".") for part in Path(name).parts) or not path.is_file():
                    continue
                if self._format is None and _format_of(path) is None:
                    continue
                stat = path.stat()
                state = self._files.get(name)
                if state is None or (not state.problem and self._is_worth_reading(state, stat)):
                    found.append((stat.st_mtime_ns, name))
        except FileNotFoundError:  # gone while it was looked at: the next scan sees the others
            pass
        except OSError as error:
            raise ConfigurationError(
                f"The directory {self._directory} cannot be read: {error.strerror}.",
                fix="correct its permissions.",
            ) from error
        self._pending = deque(name for _, name in sorted(found))

    def _is_worth_reading(self, state: FileState, stat: os.stat_result) -> bool:
        is_same = (state.size, state.modified_ns, state.inode) == _identity(stat)
        is_read = state.is_done or (state.size >= 0 and state.bytes == stat.st_size)
        return not is_same or not is_read

    def _read_file(self, name: str) -> SourceRows | None:
        """Return what comes next of a file; None if there is nothing for now."""
        path = self._directory / name
        state = self._files.get(name) or FileState()
        if state.problem:
            return None
        try:
            stat = path.stat()
        except FileNotFoundError:  # gone while it was waiting
            self._still_since.pop(name, None)
            return None
        except OSError as error:
            raise RetryError(f"{path} cannot be read: {error.strerror}.") from error
        next_state = FileState(**asdict(state))
        letters: list[DeadLetter] = []
        try:
            if state.size >= 0 and (reason := self._change(path, state, stat)):
                return self._give_up(name, state, stat, f"{CHANGED}: {reason}.")
            file_format = self._format or _format_of(path)
            assert file_format is not None
            rows: Any
            if file_format is Format.parquet:
                rows = self._read_parquet(path, name, next_state)
            else:
                rows = self._read_text(path, name, next_state, file_format, letters)
            if (
                rows is None
                and not letters
                and state.size >= 0
                and next_state.progress == state.progress
            ):
                return None
            self._look_at(path, next_state, stat)
            after = path.stat()
        except FileNotFoundError:
            return None
        except BadFile as error:
            return self._give_up(name, state, stat, str(error))
        except (CutOff, OSError) as error:
            if not self._has_settled(name, stat):
                return None
            problem = error.strerror if isinstance(error, OSError) else str(error)
            return self._give_up(
                name, state, stat, f"It is not whole, or cannot be read: {problem}."
            )
        if after.st_ino != stat.st_ino or after.st_size < stat.st_size:
            self.close()
            return None  # replaced while it was read: the next scan compares
        if next_state.is_done or next_state.bytes == stat.st_size:
            self._still_since.pop(name, None)
        return self._part(name, next_state, rows if rows is not None else [], tuple(letters))

    def _part(
        self, name: str, state: FileState, rows: Any, letters: tuple[DeadLetter, ...] = ()
    ) -> SourceRows:
        self._files[name] = state
        text = json.dumps({"version": VERSION, **asdict(state)}, separators=(",", ":"))
        row = pa.RecordBatch.from_pydict(
            {"path": [name], "generation": [self._generation], "state": [text]},
            schema=self.log.topic(self._ledger).arrow_schema,
        )
        return SourceRows(
            rows,
            position={"generation": self._generation, "files": len(self._files)},
            where=name,
            dead_letters=letters,
            notes=(TopicRows(self._ledger, None, "path", row),),
        )

    def _give_up(
        self, name: str, state: FileState, stat: os.stat_result | None, problem: str
    ) -> SourceRows:
        """Tell that a file is not read any more, once."""
        logger.warning("%s is not read any more. %s", self._directory / name, problem)
        state = FileState(**{**asdict(state), "problem": problem})
        if stat is not None:
            state.size, state.modified_ns, state.inode = _identity(stat)
        self._count(state)
        self._still_since.pop(name, None)
        letter = DeadLetter(
            f"source {self.source.name}",
            f"{name}: {problem} What was read of it before is in the topic; give a new file a new"
            " name.",
            row=json.dumps({"file": name, "bytes": state.bytes, "rows": state.rows}),
        )
        return self._part(name, state, [], (letter,))

    # What has changed

    def _change(self, path: Path, state: FileState, stat: os.stat_result) -> str:
        """Return why a file is not what it was when it was read; empty if what was read is still
        there.
        """
        if (state.size, state.modified_ns, state.inode) == _identity(stat):
            return ""
        if stat.st_size < state.head_bytes or (_is_plain(path) and stat.st_size < state.bytes):
            return "it is shorter"
        with path.open("rb") as file:
            if _digest(file.read(state.head_bytes)) != state.head:
                return "it begins otherwise"
            if state.tail:
                file.seek(max(0, state.bytes - PRINT_BYTES))
                if _digest(file.read(min(PRINT_BYTES, state.bytes))) != state.tail:
                    return "what was read last is not there any more"
        if state.is_done and stat.st_size != state.size:
            return "it has another size"
        return ""

    def _look_at(self, path: Path, state: FileState, stat: os.stat_result) -> None:
        """Note by what a change of the file is seen. What was appended since `stat` is seen too."""
        state.size, state.modified_ns, state.inode = _identity(stat)
        with path.open("rb") as file:
            state.head_bytes = min(PRINT_BYTES, stat.st_size)
            if _is_plain(path) and not state.is_done:
                state.head_bytes = min(state.head_bytes, state.bytes)
            state.head = _digest(file.read(state.head_bytes))
            state.tail = ""
            if _is_plain(path) and not state.is_done:
                file.seek(max(0, state.bytes - PRINT_BYTES))
                state.tail = _digest(file.read(min(PRINT_BYTES, state.bytes)))

    def _has_settled(self, name: str, stat: os.stat_result) -> bool:
        """Whether a file has stayed as it is for long enough to be taken as it is."""
        now_s = time.monotonic()
        identity = stat.st_size, stat.st_mtime_ns
        known, since_s = self._still_since.get(name, (identity, now_s))
        if known != identity:
            since_s = now_s
        self._still_since[name] = identity, since_s
        return now_s - since_s >= self._settle_s

    # Parquet

    def _read_parquet(self, path: Path, name: str, state: FileState) -> pa.RecordBatch | None:
        if state.is_done:
            return None
        try:
            if self._parquet is None or self._parquet[0] != name:
                self._parquet = name, _parquet_batches(path, state.rows)
            batch = next(self._parquet[1], None)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            self._parquet = None
            raise CutOff(str(error).splitlines()[0]) from None
        if batch is None:
            self._parquet = None
            state.is_done = True
            return None
        state.rows += batch.num_rows
        return batch

    # Text

    def _read_text(
        self,
        path: Path,
        name: str,
        state: FileState,
        file_format: Format,
        letters: list[DeadLetter],
    ) -> Any:
        """Return the next whole records of a text file, and advance its state behind them. Records
        that are no rows are added to the letters.
        """
        if state.is_done:
            return None
        want = BLOCK_BYTES
        while True:
            block, is_end = self._block(path, name, state, want)
            if state.bytes and state.tail and block and not _begins_a_line(path, state, block):
                raise BadFile(
                    f"Its line {state.lines + 1:,} was read before it was whole: the file had not"
                    " grown for a while, and then went on in the middle of that line."
                )
            rows, bad, end = self._records(block, state, file_format, is_whole=False)
            if is_end and end < len(block):
                # The last record has no end: it is taken as it is if no more comes for a while.
                is_whole = not _is_plain(path) or self._has_settled(name, path.stat())
                if is_whole:
                    rows, bad, end = self._records(block, state, file_format, is_whole=True)
            if end or is_end:
                break
            want *= 2
            if want > MAX_RECORD_BYTES:
                raise BadFile(
                    f"From line {state.lines + 1:,} on there is no end of a record within"
                    f" {MAX_RECORD_BYTES >> 20} MiB: look for a quote that is not closed."
                )
        letters += [
            DeadLetter(f"source {self.source.name}", f"{name}, line {line:,}: {reason}", row=row)
            for line, reason, row in bad
        ]
        state.bytes += end
        state.lines += block.count(b"\n", 0, end)
        if self._stream is not None and self._stream[0] == name:
            _, stream, _, waiting = self._stream
            self._stream = name, stream, state.bytes, waiting[end:]
        if is_end and end == len(block) and not _is_plain(path):
            state.is_done = True
            self.close()
        return rows or None

    def _records(
        self, block: bytes, state: FileState, file_format: Format, *, is_whole: bool
    ) -> tuple[list[Any], list[BadRecord], int]:
        """Return the records of a block, those that are no rows, and the byte behind them."""
        end = len(block) if is_whole else block.rfind(b"\n") + 1
        if file_format is Format.csv:
            return _csv_records(block[:end], state, self.topic.columns, is_whole=is_whole)
        text = block[:end] if state.bytes else block[:end].removeprefix(BYTE_ORDER_MARK)
        return [line for line in text.split(b"\n") if line and not line.isspace()], [], end

    def _block(self, path: Path, name: str, state: FileState, want: int) -> tuple[bytes, bool]:
        """Return the next bytes of a file behind what was read, and whether these are its last."""
        if _is_plain(path):
            with path.open("rb") as file:
                file.seek(state.bytes)
                block = file.read(want + 1)
            return block[:want], len(block) <= want
        if self._stream is None or self._stream[0] != name or self._stream[2] != state.bytes:
            self.close()
            stream = open_file(path)
            self._stream = name, stream, state.bytes, b""
            _decompress(stream, state.bytes, keep=False)
        _, stream, _, waiting = self._stream
        waiting += _decompress(stream, want + 1 - len(waiting), keep=True)
        self._stream = name, stream, state.bytes, waiting
        return waiting[:want], len(waiting) <= want


def _begins_a_line(path: Path, state: FileState, block: bytes) -> bool:
    with path.open("rb") as file:
        file.seek(state.bytes - 1)
        return file.read(1) == b"\n" or block[:1] in {b"\n", b"\r"}


def _parse_state(text: str) -> FileState:
    stored = json.loads(text)
    if stored.pop("version") > VERSION:
        raise NewerFormat(
            "How far files are read was stored by a newer Headrace.", fix="upgrade Headrace."
        )
    return FileState(**{**stored, "heading": tuple(stored["heading"])})


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _format_of(path: Path) -> Format | None:
    return SUFFIXES.get(Path(plain_name(path)).suffix.lower())


def _is_plain(path: Path) -> bool:
    return path.suffix.lower() not in COMPRESSED_SUFFIXES


def _decompress(stream: BinaryIO, size: int, *, keep: bool) -> bytes:
    """Read decompressed bytes, fewer at the end of the file. Raises CutOff if it ends before."""
    parts: list[bytes] = []
    while size > 0:
        try:
            part = stream.read(min(size, 1 << 20))
        except (EOFError, OSError, zlib.error, InputError) as error:
            raise CutOff(str(error)) from None
        if not part:
            break
        size -= len(part)
        if keep:
            parts.append(part)
    return b"".join(parts)


def _parquet_batches(path: Path, start: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file from a row on."""
    position = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if position + count > start:
                for batch in file.iter_batches(batch_size=PARQUET_ROWS, row_groups=[group]):
                    skipped = min(max(0, start - position), batch.num_rows)
                    position += batch.num_rows
                    if skipped < batch.num_rows:
                        yield batch.slice(skipped)
            else:
                position += count


# CSV

BadRecord = tuple[int, str, str]
"""The line of a record that is no row, why, and its text."""


def _csv_records(
    block: bytes, state: FileState, columns: Sequence[str], *, is_whole: bool
) -> tuple[list[TextRow], list[BadRecord], int]:
    """Return the whole records of a block of CSV, those that are no rows, and the byte behind them.
    The first record of a file names its columns.
    """
    csv.field_size_limit(MAX_RECORD_BYTES)
    lines = [line + b"\n" for line in block.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    if not state.bytes:
        lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
    skipped = sum(map(len, lines)) - len(block)
    used = 0
    is_text = True

    def texts() -> Iterator[str]:
        nonlocal used, is_text
        for line in lines:
            used += len(line)
            try:
                yield line.decode()
            except UnicodeDecodeError:
                is_text = False
                yield line.decode(errors="replace")

    if not state.heading:
        state.delimiter = _delimiter(lines[0].decode(errors="replace"), columns)
    rows: list[TextRow] = []
    bad: list[BadRecord] = []
    end = 0
    reader = csv.reader(texts(), strict=True, delimiter=state.delimiter)
    while True:
        is_text = True
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if used - skipped == len(block) and not is_whole:
                break  # a quote is open: the rest of the record is yet to come
            line = state.lines + reader.line_num
            raise BadFile(f"Line {line:,} is not CSV: {error}.") from None
        end = used - skipped
        line = state.lines + reader.line_num
        if not fields:
            continue
        if not state.heading:
            state.heading = _heading(fields, columns)
        elif not is_text:
            bad.append((line, "it is not UTF-8 text", state.delimiter.join(fields)))
        elif len(fields) != len(state.heading):
            reason = f"it has {len(fields)} fields, but the heading has {len(state.heading)}"
            bad.append((line, reason, state.delimiter.join(fields)))
        else:
            values = zip(state.heading, fields, strict=True)
            rows.append(TextRow(line, {name: field or None for name, field in values}))
    return rows, bad, end


def _delimiter(heading: str, columns: Sequence[str]) -> str:
    """Return the delimiter with which a heading names the most columns of the topic."""

    def known(delimiter: str) -> int:
        try:
            names = next(csv.reader([heading], delimiter=delimiter), [])
        except csv.Error:
            return 0
        return len(set(names) & set(columns))

    return max(DELIMITERS, key=known)


def _heading(fields: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    if len(set(fields)) < len(fields):
        raise BadFile("Its first line names a column twice.")
    if unknown := [name for name in fields if name not in {*columns, CHANGE_TYPE}]:
        raise BadFile(
            f"Its first line names the column {unknown[0]!r}, which the topic does not have:"
            f" {nearest(unknown[0], columns)}"
        )
    return tuple(fields)
