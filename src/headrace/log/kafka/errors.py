"""Kafka's error codes in families, and their translation into errors of `headrace.errors`, which
say what to do now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from headrace.errors import ConfigurationError, HeadraceError, InputError, RetryError

FENCED = {
    KafkaError._FENCED,  # noqa: SLF001  (confluent_kafka's names for librdkafka's own errors begin with an underscore)
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.TRANSACTION_COORDINATOR_FENCED,
}
LOST_MEMBERSHIP = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError._ASSIGNMENT_LOST,  # noqa: SLF001
}
UNREACHABLE = {
    KafkaError._TRANSPORT,  # noqa: SLF001
    KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    KafkaError._RESOLVE,  # noqa: SLF001
    KafkaError._TIMED_OUT,  # noqa: SLF001
    KafkaError._TIMED_OUT_QUEUE,  # noqa: SLF001
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001
    KafkaError.REQUEST_TIMED_OUT,
}
UNAUTHORIZED = {
    KafkaError._AUTHENTICATION,  # noqa: SLF001
    KafkaError._SSL,  # noqa: SLF001
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
NOT_READABLE = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}
PERMANENT = {KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, *UNAUTHORIZED}  # noqa: SLF001
BAD_CONFIG = {
    KafkaError._INVALID_ARG,  # noqa: SLF001
    KafkaError._CONFLICT,  # noqa: SLF001
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.INVALID_SESSION_TIMEOUT,
    KafkaError.POLICY_VIOLATION,
    KafkaError.UNSUPPORTED_VERSION,
}
LEADER_MOVES = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
}
TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
NO_TOPIC = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
}
NO_GROUP = {KafkaError.GROUP_ID_NOT_FOUND, KafkaError.COORDINATOR_NOT_AVAILABLE}


def cause(error: KafkaException) -> KafkaError:
    """The KafkaError inside an exception."""
    inner = error.args[0] if error.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(error))  # noqa: SLF001


def error_code(error: KafkaException) -> int:
    return cause(error).code()


def translate_error(error: KafkaException, what: str) -> HeadraceError:
    """The error of `headrace.errors` for an error of Kafka. `what` names the operation that failed,
    such as "create the topic 'orders'".
    """
    inner = cause(error)
    number, text = inner.code(), f"Kafka could not {what}: {inner.str()}"
    if number in UNREACHABLE:
        return RetryError(
            f"{text}.", fix="check that the brokers are up and can be reached, and try again."
        )
    if number in UNAUTHORIZED:
        return ConfigurationError(
            f"{text}.", fix="check the user, its rights (ACLs) and the security options."
        )
    if number in TOO_LARGE:
        return InputError(
            f"{text}.",
            fix=(
                "store less in one row or note, or raise message.max.bytes here and"
                " max.message.bytes of the topic."
            ),
        )
    if number in BAD_CONFIG:
        return ConfigurationError(f"{text}.", fix="change the setting that it names.")
    return RetryError(
        f"{text} ({inner.name()}).", fix="try again; if it persists, look into the brokers' logs."
    )


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise Kafka's exceptions as errors of `headrace.errors`."""
    try:
        yield
    except KafkaException as error:
        raise translate_error(error, what) from error
