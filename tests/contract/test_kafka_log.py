"""The log on Kafka keeps the contract, on a real broker."""

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

import headrace as hr
from tests.contract.log_contract import LogContract
from tests.servers.kafka_broker import KafkaBroker


@pytest.mark.kafka
class TestKafkaLog(LogContract):
    markers_take_offsets = True
    has_global_order = False
    keeps_deleted_values = False
    smallest_segment_bytes = 1 << 20
    shortest_visibility = "1 second"
    visibility_seconds = 1.0
    can_renew = False
    receipts_work_anywhere = False
    delays_beyond_visibility = False
    counts_queue_lag = False
    shows_queues = False

    @pytest.fixture
    def address(self, kafka_broker: KafkaBroker) -> str:
        return kafka_broker.address

    def forget_old_rows(self, log: hr.Log, topic: str) -> None:
        """What a broker's retention does, without waiting for it."""
        admin = AdminClient({"bootstrap.servers": log.address.removeprefix("kafka://")})
        for future in admin.delete_records(
            [TopicPartition(topic, 0, log.end_offsets(topic)[0] - 4)]
        ).values():
            future.result(timeout=20)
