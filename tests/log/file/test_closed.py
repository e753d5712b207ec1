"""What was closed or cannot be opened says so; what is no row is refused like any other bad row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import BadRows, InputError, LogUnavailable


def test_a_closed_log_says_that_it_was_closed(tmp_path: Path) -> None:
    log = hr.open_log(f"file:{tmp_path / 'log'}")
    log.create_topic("t", schema="n BIGINT")
    producer = log.producer("t")
    log.close()
    log.close()
    for use in (
        lambda: log.read("t"),
        lambda: producer.append({"n": 1}),
        log.topics,
        log.verify,
        lambda: log.create_topic("u", schema="n BIGINT"),
    ):
        with pytest.raises(InputError, match="was closed"):
            use()
    with hr.open_log(log.address) as again:
        assert again.read("t").to_table().num_rows == 0


@pytest.mark.parametrize("rows", [5, None, "n", b"n"])
def test_a_value_that_is_no_row_is_refused(tmp_path: Path, rows: Any) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("t", schema="n BIGINT")
        with log.producer("t") as producer, pytest.raises(BadRows, match=type(rows).__name__):
            producer.append(rows)
        assert log.end_offsets("t") == {0: 0}


def test_rows_from_a_generator_are_checked_again_when_the_topic_has_got_columns(
    tmp_path: Path,
) -> None:
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        log.create_topic("t", schema="n BIGINT")
        with log.producer("t") as producer:
            log.alter_topic("t", add_columns="m BIGINT")
            producer.append({"n": n, "m": n} for n in range(3))
        assert [row["m"] for row in log.read("t").to_pylist()] == [0, 1, 2]


def test_a_format_that_is_no_number_is_damage(tmp_path: Path) -> None:
    hr.open_log(f"file:{tmp_path / 'log'}").close()
    (tmp_path / "log" / "headrace.json").write_text('{"format": "one"}')
    with pytest.raises(LogUnavailable, match="damaged"):
        hr.open_log(f"file:{tmp_path / 'log'}")


def test_the_address_of_a_log_holds_wherever_a_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's workers are not where the program is that opened the log by a relative path."""
    monkeypatch.chdir(tmp_path)
    with hr.open_log("file:here") as log:
        monkeypatch.chdir("/")
        with hr.open_log(log.address, create=False) as again:
            assert again.topics() == log.topics()
