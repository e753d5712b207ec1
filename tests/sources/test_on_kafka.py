"""A directory that is read into Kafka: rows and how far each file is read are one transaction there
too.
"""

import uuid
from pathlib import Path

import pytest

import headrace as hr
from headrace.cdc.writer import CaptureWriter
from headrace.log.dead_letters import read_dead_letters
from headrace.testing.source_contract import ROWS
from headrace.testing.strikes import StrikePoint, Struck, strike
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka


def test_rows_of_files_are_stored_once(
    kafka_broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"files-{uuid.uuid4().hex[:8]}"
    source = hr.sources.directory(tmp_path, topic=name, name=name, schema=ROWS, every="20 ms")
    path = tmp_path / "a.jsonl"
    stop = 0
    for when in ("before", "after"):
        with path.open("a") as file:
            file.writelines(
                f'{{"id": {number}, "name": "a"}}\n' for number in range(stop, stop + 5)
            )
        stop += 5
        with monkeypatch.context() as patch:
            strike(patch, StrikePoint(CaptureWriter, "commit", when, 1))
            with pytest.raises(Struck):
                source.run(log=kafka_broker.address, until_caught_up=True)
        source.run(log=kafka_broker.address, until_caught_up=True)
    (tmp_path / "b.csv").write_text("id,name\nx,b\n10,b\n")
    source.run(log=kafka_broker.address, until_caught_up=True)
    with hr.open_log(kafka_broker.address) as log:
        assert sorted(row["id"] for row in log.read(name).to_pylist()) == list(range(11))
        assert len(read_dead_letters(log, name)) == 1
