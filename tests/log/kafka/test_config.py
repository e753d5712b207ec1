"""Addresses and options of a Kafka log, without a broker."""

from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import ConfigurationError, LogUnavailable
from headrace.log.kafka.config import parse_address


def test_an_address_names_brokers_and_options() -> None:
    cluster = parse_address(
        "kafka://one:9092,two:9093?security.protocol=SSL&ssl.ca.location=%2Fca.pem", {}
    )
    assert cluster.bootstrap == "one:9092,two:9093"
    assert cluster.options == {"security.protocol": "SSL", "ssl.ca.location": "/ca.pem"}
    assert cluster.client()["bootstrap.servers"] == "one:9092,two:9093"


def test_options_by_name_in_a_dict_and_in_the_address_mean_the_same() -> None:
    by_keyword = parse_address(
        "kafka://h:1", {"sasl.mechanism": "PLAIN", "enable_ssl_certificate_verification": False}
    )
    by_dict = parse_address(
        "kafka://h:1",
        {"options": {"sasl.mechanism": "PLAIN", "enable.ssl.certificate.verification": False}},
    )
    in_address = parse_address(
        "kafka://h:1?sasl.mechanism=PLAIN&enable.ssl.certificate.verification=false", {}
    )
    assert by_keyword == by_dict == in_address
    assert by_keyword.options["enable.ssl.certificate.verification"] == "false"
    assert parse_address(
        "kafka://h:1?sasl.mechanism=PLAIN", {"sasl.mechanism": "SCRAM-SHA-256"}
    ).options == {"sasl.mechanism": "SCRAM-SHA-256"}


def test_secrets_come_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "from the environment")
    (tmp_path / "secret").write_text("from a file\n")
    options = {
        "sasl.password": "env:KAFKA_PASSWORD",
        "ssl.key.password": f"file:{tmp_path / 'secret'}",
    }
    cluster = parse_address("kafka://h:1", options)
    assert cluster.options == {
        "sasl.password": "from the environment",
        "ssl.key.password": "from a file",
    }
    assert "from the environment" not in repr(cluster)


@pytest.mark.parametrize(
    ("address", "options", "words"),
    [
        ("kafka://", {}, "kafka://host:port"),
        ("kafka://user:secret@h:1", {}, "sasl.username"),
        ("kafka://h:1/path", {}, "path"),
        ("kafka://h:1", {"group.id": "g"}, "where a consumer"),
        ("kafka://h:1?isolation.level=read_uncommitted", {}, "committed rows only"),
        ("kafka://h:1", {"sasl.password": "env:NO_SUCH_VARIABLE"}, "export NO_SUCH_VARIABLE"),
        ("kafka://h:1", {"sasl.password": "file:/no/such/file"}, "cannot be read"),
    ],
)
def test_invalid_options_are_refused_without_showing_secrets(
    address: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_address(address, options)
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no\.such\.option"):
        hr.open_log("kafka://127.0.0.1:1", **{"no.such.option": "x"})


def test_a_broker_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(LogUnavailable, match=r"127\.0\.0\.1:1.*\n.*check the address"):
        hr.open_log("kafka://127.0.0.1:1")


def test_clients_keep_the_logs_promises() -> None:
    cluster = parse_address("kafka://h:1", {"queued.max.messages.kbytes": 1024})
    assert cluster.producer()["acks"] == "all"
    assert cluster.producer()["enable.idempotence"] is True
    assert cluster.reader()["isolation.level"] == "read_committed"
    assert cluster.reader()["queued.max.messages.kbytes"] == "1024"
    assert cluster.group_member("g", 10_000, 300_000)["enable.auto.commit"] is False
    assert cluster.transactional("t", 5_000)["message.timeout.ms"] <= 5_000
