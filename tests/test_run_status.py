"""The status file of a run, where it is damaged or of another version."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.commands.pipeline.run import echo_takeover
from headrace.errors import CorruptionError, NewerFormat
from headrace.run_status import FILE, Status, read_status, running_elsewhere, write_status

STATUS = Status(
    pipeline="shop",
    process=os.getpid(),
    epoch=1,
    shards=2,
    started=0.0,
    updated=0.0,
    tick=7,
    newest_tick=7,
    batch_seconds=0.1,
    batch_rows=1,
    rows_per_second=1.0,
    rows_behind=0,
    state_bytes=0,
    batches=1,
)

DAMAGED = [b"", b"{", b"\xff\x00\x01", b"[]", b"{}", b'{"version": "x"}', b'{"version": 1}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_status_was_called_no_run_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    for read in (read_status, running_elsewhere):
        with pytest.raises(CorruptionError, match=r"status\.json.*damaged") as raised:
            read(tmp_path)
        assert "run the pipeline" in raised.value.fix


def test_a_damaged_status_stopped_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss of power can leave it empty. A run that starts says so, and goes on."""
    (tmp_path / FILE).write_bytes(b"")
    echo_takeover(tmp_path)
    assert "writes it anew" in capsys.readouterr().out


def test_a_status_of_another_version_is_read_or_refused(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    stored: dict[str, Any] = json.loads((tmp_path / FILE).read_bytes())
    (tmp_path / FILE).write_text(json.dumps({**stored, "new_figure": 3}))
    assert read_status(tmp_path) == STATUS
    (tmp_path / FILE).write_text(json.dumps({**stored, "version": 99}))
    with pytest.raises(NewerFormat, match="format 99"):
        read_status(tmp_path)
