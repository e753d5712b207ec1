"""The log on Kafka keeps the contract, on a real broker."""

import pytest

from headrace.testing.kafka_broker import KafkaBroker
from tests.contract.log_contract import LogContract


@pytest.mark.kafka
class TestKafkaLog(LogContract):
    markers_take_offsets = True
    has_global_order = False
    keeps_deleted_values = False
    shortest_visibility = "1 second"
    visibility_seconds = 1.0
    can_renew = False
    receipts_work_anywhere = False
    delays_beyond_visibility = False
    counts_queue_lag = False

    @pytest.fixture
    def address(self, kafka_broker: KafkaBroker) -> str:
        return kafka_broker.address
