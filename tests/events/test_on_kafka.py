"""Kafka cannot keep an event store, and says so, through every door; it can have a copy of one,
each event once and in order, which pipelines there read.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import NotSupported
from headrace.events import Event, EventStore, open_store
from headrace.events.event import COLUMNS, FIRST_SCHEMA, SCHEMA, fit_copy
from headrace.log.api import Log
from tests.servers.kafka_broker import KafkaBroker

PROMISES = "expected versions"


@pytest.mark.kafka
def test_a_broker_is_refused_with_what_it_cannot_promise(kafka_broker: KafkaBroker) -> None:
    with hr.open_log(kafka_broker.address) as log:
        before = log.topics()
        with pytest.raises(NotSupported, match=PROMISES):
            open_store(log, "bank")
        assert log.topics() == before
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace.cli",
            "events",
            "history",
            "account-1",
            "--store",
            "bank",
            "--log",
            kafka_broker.address,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert PROMISES in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.kafka
def test_the_eventsourcing_library_is_refused_too(kafka_broker: KafkaBroker) -> None:
    pytest.importorskip("eventsourcing")
    from eventsourcing.application import Application

    with pytest.raises(NotSupported, match=PROMISES):
        Application(
            env={
                "PERSISTENCE_MODULE": "headrace.events.eventsourcing",
                "HEADRACE_LOG": kafka_broker.address,
            }
        )


def copy(store: EventStore, target: Log, *, max_events: int | None = None) -> None:
    """What the documentation says: numbered by offset, so that it can be stopped anywhere and begun
    again.
    """
    target.create_topic("bank", SCHEMA, key="entity", partitions=1, exist_ok=True)
    with target.producer("bank", id="copy-of-bank") as producer:
        for number, event in enumerate(store.follow(producer.last_sequence + 1, idle="100 ms")):
            if number == max_events:
                return
            row = {
                "entity": event.entity,
                "version": event.version,
                "type": event.type,
                "type_version": event.type_version,
                "id": event.id,
                "subject": event.subject,
                "correlation_id": event.correlation_id,
                "causation_id": event.causation_id,
                "metadata": None if event.metadata is None else json.dumps(event.metadata),
            }
            producer.append(
                [row | {"data": json.dumps(event.data), "state": None}], sequence=event.offset
            )


@pytest.mark.kafka
def test_a_copy_has_each_event_once_and_in_order(tmp_path: Path, kafka_broker: KafkaBroker) -> None:
    with (
        hr.open_log(f"file:{tmp_path / 'log'}") as log,
        open_store(log, "bank") as store,
        hr.open_log(kafka_broker.address) as target,
    ):
        for n in range(12):
            store.append(f"account-{n % 3}", Event("Deposited", {"amount": n}))
        copy(store, target, max_events=5)
        copy(store, target)
        copied = [
            (row["entity"], row["version"], row["type"]) for row in target.read("bank").to_pylist()
        ]
        assert copied == [(event.entity, event.version, event.type) for event in store.read()]


@pytest.mark.parametrize("old", [FIRST_SCHEMA, SCHEMA])
@pytest.mark.parametrize("new", [FIRST_SCHEMA, SCHEMA])
@pytest.mark.kafka
def test_a_copy_fits_topics_with_and_without_metadata(
    tmp_path: Path, kafka_broker: KafkaBroker, old: str, new: str
) -> None:
    with (
        hr.open_log(f"file:{tmp_path / 'log'}") as log,
        hr.open_log(kafka_broker.address) as target,
    ):
        topic = tmp_path.name  # the broker is shared
        log.create_topic("bank", old, key="entity", partitions=1)
        target.create_topic(topic, new, key="entity", partitions=1)
        with open_store(log, "bank") as store, target.producer(topic, id=topic) as producer:
            for start, correlation_id in enumerate((None, "c")):
                store.append("a", Event("Went", correlation_id=correlation_id))
                rows = log.read("bank", 0, start).to_table()
                producer.append(fit_copy(rows, target, topic), sequence=start)
        rows = target.read(topic).to_table()
        assert rows.select(COLUMNS)["correlation_id"].to_pylist() == [None, "c"]
