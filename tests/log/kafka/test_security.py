"""TLS and SASL: a broker that requires them is reached with the right options, and an error
explains the wrong ones.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace import errors
from tests.servers.kafka_broker import KafkaBroker

PASSWORD = "tomato"
_SELF_SIGNED = [
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "rsa:2048",
    "-nodes",
    "-days",
    "2",
    "-subj",
    "/CN=127.0.0.1",
    "-addext",
    "subjectAltName=IP:127.0.0.1",
]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that vouches for itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        [*_SELF_SIGNED, "-keyout", directory / "key.pem", "-out", directory / "certificate.pem"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    (directory / "both.pem").write_text(
        (directory / "key.pem").read_text() + (directory / "certificate.pem").read_text()
    )
    return directory


@pytest.fixture(scope="module")
def guarded(kafka_broker: KafkaBroker, certificate: Path) -> Iterator[KafkaBroker]:
    """A second broker, which takes nobody without TLS and a password."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:SASL_SSL,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.plaintext.plain.sasl.jaas.config": (
            f'{login} username="admin" password="{PASSWORD}" user_admin="{PASSWORD}"'
            f' user_till="{PASSWORD}";'
        ),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(certificate / "both.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificate / "certificate.pem"),
    }
    with KafkaBroker(settings, heap_mb=256) as broker:
        yield broker


def options(certificate: Path, **changes: Any) -> dict[str, Any]:
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "till",
        "sasl.password": "env:TILL_PASSWORD",
        "ssl.ca.location": str(certificate / "certificate.pem"),
    } | changes


@pytest.mark.kafka
def test_a_guarded_broker_is_used_with_the_right_options(
    guarded: KafkaBroker, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILL_PASSWORD", PASSWORD)
    with hr.open_log(guarded.address, **options(certificate)) as log:
        log.create_topic("orders", "n BIGINT", partitions=2)
        with log.transaction("job") as transaction:
            transaction.append("orders", [{"n": n} for n in range(5)])
        with log.consumer("orders", group="g") as consumer:
            found = [
                n
                for _ in range(5)
                for batch in consumer.poll()
                for n in batch.column("n").to_pylist()
            ]
        assert sorted(found) == list(range(5))


@pytest.mark.kafka
def test_a_guarded_broker_is_refused_with_the_wrong_ones(
    guarded: KafkaBroker, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILL_PASSWORD", "potato")
    with pytest.raises(errors.LogUnavailable, match=r"(?i)authentication") as refused:
        hr.open_log(guarded.address, **options(certificate))
    assert "potato" not in str(refused.value)
    monkeypatch.setenv("TILL_PASSWORD", PASSWORD)
    with pytest.raises(errors.LogUnavailable, match=r"(?i)certificate"):
        hr.open_log(
            guarded.address,
            **{
                name: value
                for name, value in options(certificate).items()
                if name != "ssl.ca.location"
            },
        )


def test_without_the_package_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['confluent_kafka'] = None\nimport headrace as"
        " hr\nhr.open_log('kafka://127.0.0.1:1')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "pip install 'headrace[kafka]'" in done.stderr
    assert "MissingExtra" in done.stderr
