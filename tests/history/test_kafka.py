"""Histories of the log on a real broker, under the load and the faults of the embedded one, have no
anomaly that Kafka rules out.

    HEADRACE_HISTORY_SECONDS=600 python -m pytest -m slow tests/history/test_kafka.py
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.history.workload import FAULTS, LONG_S, ROUND_S, Load, run_rounds
from tests.servers.kafka_broker import KafkaBroker

pytestmark = pytest.mark.process


def load(broker: KafkaBroker, directory: Path, seconds: float) -> Load:
    return Load(
        address=broker.address,
        directory=directory,
        seed=random.getrandbits(32),
        seconds=seconds,
        # The broker's disk is not that of the clients.
        faults=tuple(fault for fault in FAULTS if fault != "fill_disk"),
    )


def test_a_short_history_is_sound(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    run_rounds(load(kafka_broker, tmp_path, 5.0), 0)


@pytest.mark.slow
def test_an_hours_history_is_sound(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    run_rounds(load(kafka_broker, tmp_path, ROUND_S), LONG_S)
