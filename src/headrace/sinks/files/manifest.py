"""Manifests: which files form a table, and the checkpoint of the sink that writes it.

Each commit is a new manifest, under a number that can be used once. So a process that commits from
an older state is refused, and there is nothing to lock. The manifest with the largest number is the
table:

    _headrace/000000000007.json      what is read
    _headrace/000000000006.json      what a reader may just have found

Only the newest manifests are kept. So the number of an older one can become free again, and a
process that was paused for long may publish under it without being refused: `commit` finds that out
afterwards, and such a manifest is never read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from headrace.errors import NewerFormat, TargetMismatch, TargetUnavailable
from headrace.sinks.batch import TargetShape
from headrace.sinks.checkpoint import SinkCheckpoint
from headrace.sinks.files.file_store import FileStore

VERSION = 2
FOLDER = "_headrace"
_RETAINED = 3
_READ_ATTEMPTS = 10


class Slot(NamedTuple):
    """Where a row belongs: the folder of its partition ("" without partitions), and the bucket of
    its key in that. In append mode there is one bucket with many files.
    """

    folder: str
    bucket: int


@dataclass(frozen=True)
class DataFile:
    """A Parquet file of the table."""

    name: str
    size: int | None
    """Bytes; None if an earlier version, which did not store them, wrote the manifest."""


@dataclass(frozen=True)
class TableLayout:
    """How rows are spread over files. It cannot change while there are rows: a key would be looked
    for where it is not.
    """

    mode: str
    key: tuple[str, ...]
    buckets: int
    partition_by: tuple[str, ...]

    @classmethod
    def of(cls, shape: TargetShape, *, buckets: int, partition_by: tuple[str, ...]) -> TableLayout:
        return cls(
            mode=shape.mode,
            key=shape.key,
            buckets=buckets if shape.is_merge else 1,
            partition_by=partition_by,
        )


@dataclass(frozen=True)
class Manifest:
    """The state of a table after a commit."""

    number: int = 0
    checkpoint: SinkCheckpoint | None = None
    layout: TableLayout | None = None
    files: Mapping[Slot, tuple[DataFile, ...]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [file.name for files in self.files.values() for file in files]

    def to_json(self) -> str:
        """Return the manifest as JSON, one file a line."""
        lines = [
            json.dumps([*slot, file.name, file.size])
            for slot, files in self.files.items()
            for file in files
        ]
        applied = self.checkpoint.to_json() if self.checkpoint else None
        layout = asdict(self.layout) if self.layout else None
        head = json.dumps({"version": VERSION, "applied": applied, "layout": layout})
        files = ",\n".join(lines)
        return f'{head[:-1]}, "files": [\n{files}\n]}}\n'

    @classmethod
    def from_json(cls, text: str, number: int) -> Manifest:
        stored = json.loads(text)
        if stored["version"] > VERSION:
            raise NewerFormat(
                "The manifest of the Parquet files was written by a newer Headrace.",
                fix="upgrade Headrace.",
            )
        files: dict[Slot, tuple[DataFile, ...]] = {}
        if stored["version"] == 1:
            for bucket, names in stored["files"].items():
                files[Slot("", int(bucket))] = tuple(DataFile(name, None) for name in names)
        else:
            for folder, bucket, name, size in stored["files"]:
                slot = Slot(folder, bucket)
                files[slot] = (*files.get(slot, ()), DataFile(name, size))
        checkpoint = SinkCheckpoint.from_json(stored["applied"]) if stored["applied"] else None
        return cls(number, checkpoint, _stored_layout(stored.get("layout")), files)


def _stored_layout(stored: dict[str, Any] | None) -> TableLayout | None:
    if stored is None:
        return None
    return TableLayout(
        mode=stored["mode"],
        key=tuple(stored["key"]),
        buckets=stored["buckets"],
        partition_by=tuple(stored["partition_by"]),
    )


def _manifest_name(number: int) -> str:
    return f"{FOLDER}/{number:012d}.json"


def _manifest_numbers(store: FileStore) -> list[int]:
    stems = (PurePosixPath(name).stem for name in store.names(FOLDER, suffix=".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def read_manifest(store: FileStore) -> Manifest:
    """Return the newest manifest, an empty one if there is none.

    Raises:
        NewerFormat: A newer version has written it.
        TargetMismatch: It is damaged.
    """
    for attempt in range(_READ_ATTEMPTS):
        numbers = _manifest_numbers(store)
        if not numbers:
            return Manifest()
        try:
            content = store.read(_manifest_name(numbers[-1]))
        except FileNotFoundError:  # several commits were made since it was listed
            if attempt == _READ_ATTEMPTS - 1:
                raise
            continue
        try:
            return Manifest.from_json(content.to_pybytes().decode(), numbers[-1])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TargetMismatch(
                f"The manifest {_manifest_name(numbers[-1])} of {store.url} is damaged: {error}.",
                fix=(
                    "bring it back from a backup. Or choose another directory with table=…"
                    " (--table …), which gets what the topic has now."
                ),
            ) from error
    raise AssertionError("unreachable")


def commit(store: FileStore, before: Manifest, after: Manifest) -> None:
    """Publish a manifest, and delete what it replaces.

    1. Make the data files durable.
    2. Publish the manifest under the number that follows the one it is based on.
    3. Look whether it is the newest. If it is not, another process has taken over, perhaps long
       ago; then nothing is deleted.
    4. Delete the files that were replaced, and all but a few manifests.

    Raises:
        TargetUnavailable: Another process has published a manifest meanwhile.
    """
    store.sync()  # 1
    published = store.publish(_manifest_name(after.number), after.to_json().encode())  # 2
    numbers = _manifest_numbers(store)
    if not published or numbers[-1:] != [after.number]:  # 3
        raise TargetUnavailable(
            f"Another process has written to {store.url} meanwhile.",
            fix="nothing: its manifest is read again.",
        )
    store.delete(sorted(set(before.names) - set(after.names)))  # 4
    store.delete([_manifest_name(number) for number in numbers[:-_RETAINED]])
