"""Partition folders: rows are put into the folders that the values of some columns name.

The names are those of Hive, which other programs read as columns; the files do not have these
columns:

    dt           country         folder
    2026-03-01   'no'            dt=2026-03-01/country=no
    2026-03-01   null            dt=2026-03-01/country=__HIVE_DEFAULT_PARTITION__
    2026-03-02   'a/b'           dt=2026-03-02/country=a%2Fb
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import InputError, TargetMismatch, UnknownColumn
from headrace.sinks.batch import TargetShape

MAX_FOLDERS = 2000
"""Folders that one batch may write to. More are a sign of a column that is too fine."""
MAX_NAME_BYTES = 240
"""Longest name of a folder; file systems allow 255."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_SPECIAL = re.compile(r'[\x00-\x1f\x7f"#%\'*/:=?\\{}\[\]^|<>`]')


def check_partition_columns(shape: TargetShape, columns: Sequence[str]) -> None:
    """Raise InputError if rows cannot be partitioned by some columns."""
    for name in columns:
        if name not in shape.schema.names:
            raise UnknownColumn(name, shape.schema.names, where=f"The topic {shape.topic!r}")
        kind = shape.schema.field(name).type
        is_fit = (
            pa.types.is_string(kind)
            or pa.types.is_integer(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_date32(kind)
        )
        if not is_fit:
            raise InputError(
                f"Rows cannot be partitioned by {name!r}, whose type is {kind}.",
                fix=(
                    "choose a column that is a text, an integer, a boolean or a date. A pipeline"
                    " can make one, such as `to_date(at)`."
                ),
            )
    if set(columns) == set(shape.schema.names):
        raise InputError(
            "Rows cannot be partitioned by all their columns: the files would have none.",
            fix="leave one out of partition_by.",
        )


def split_by_folder(
    rows: pa.Table, columns: Sequence[str]
) -> Iterator[tuple[str | None, npt.NDArray[np.intp]]]:
    """Yield each folder that rows belong to, and the indices of these rows. Rows that cannot be in
    any folder come with None. Without columns, all rows are in the folder "".

    Raises:
        TargetMismatch: There are too many folders.
    """
    if not rows.num_rows:
        return
    if not columns:
        yield "", np.arange(rows.num_rows)
        return
    codes = np.zeros(rows.num_rows, np.int64)
    for name in columns:
        encoded = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        _, codes = np.unique(
            codes * len(encoded.dictionary) + encoded.indices.to_numpy(), return_inverse=True
        )
    _, first, group, counts = np.unique(
        codes, return_index=True, return_inverse=True, return_counts=True
    )
    if len(first) > MAX_FOLDERS:
        raise TargetMismatch(
            f"The rows of one batch belong to {len(first):,} partitions by {', '.join(columns)};"
            f" at most {MAX_FOLDERS:,} are allowed.",
            fix="choose a coarser column for partition_by, such as a date.",
        )
    examples = rows.select(list(columns)).take(pa.array(first))
    names = [
        [_folder_name(name, value) for value in examples[name].combine_chunks()] for name in columns
    ]
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(counts)[:-1])
    for parts, indices in zip(zip(*names, strict=True), members, strict=True):
        is_fit = all(part is not None for part in parts)
        yield "/".join(str(part) for part in parts) if is_fit else None, indices


def _folder_name(column: str, value: pa.Scalar) -> str | None:
    """Return the name of a value's folder; None if it would be too long, or could not be read
    back.
    """
    if not value.is_valid:
        return f"{_escape(column)}={_NULL}"
    try:
        text = value.cast(pa.string()).as_py()
        if pa.scalar(text).cast(value.type) != value:
            return None
    except pa.ArrowInvalid:
        return None
    escaped = _escape(text)
    if escaped == _NULL:
        escaped = f"%5F{_NULL[1:]}"
    name = f"{_escape(column)}={escaped}"
    return name if len(name.encode()) <= MAX_NAME_BYTES else None


def _escape(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", text)


def folder_values(folder: str, schema: pa.Schema) -> dict[str, pa.Scalar]:
    """Return the values that a folder stands for, by column."""
    values: dict[str, pa.Scalar] = {}
    for part in folder.split("/") if folder else ():
        column, _, text = part.partition("=")
        name = unquote(column)
        kind = schema.field(name).type
        values[name] = pa.scalar(None if text == _NULL else unquote(text), pa.string()).cast(kind)
    return values
