"""Kafka's errors are translated into those that can be retried and those that cannot."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace.errors import ConfigurationError, HeadraceError, InputError, RetryError
from headrace.log.kafka.errors import translate_error


@pytest.mark.parametrize(
    ("number", "family", "says"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, InputError, "max.message.bytes"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, ConfigurationError, "rights"),
        (KafkaError.REQUEST_TIMED_OUT, RetryError, "try again"),
    ],
)
def test_an_error_is_in_the_family_of_what_can_be_done_about_it(
    number: int, family: type[HeadraceError], says: str
) -> None:
    error = translate_error(KafkaException(KafkaError(number)), "store a note")
    assert isinstance(error, family)
    assert "store a note" in error.message
    assert says in error.fix
