"""Postgres's protocol byte by byte: what comes in pieces, is garbage, is cancelled, or never
ends; clients that do not read, and subscriptions.
"""

import contextlib
import datetime as dt
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.serve.requests import Limits
from tests.serve.postgres.conftest import Open, Site
from tests.views.store_contract import inserts
from tests.waits import wait_until


def startup(**parameters: str) -> bytes:
    names = {"user": "analyst", "database": "shop", **parameters}
    body = b"".join(f"{name}\0{value}\0".encode() for name, value in names.items()) + b"\0"
    return struct.pack(">ii", len(body) + 8, 3 << 16) + body


def message(kind: bytes, content: bytes = b"") -> bytes:
    return kind + struct.pack(">I", len(content) + 4) + content


def query(text: str) -> bytes:
    return message(b"Q", text.encode() + b"\0")


class Raw:
    """A bare connection, and the messages that come."""

    def __init__(self, site: Site) -> None:
        self.socket = socket.create_connection(("127.0.0.1", site.port), timeout=20)

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def receive(self) -> tuple[bytes, bytes]:
        """The next message; an empty kind at the end."""
        head = self._take(5)
        if len(head) < 5:
            return b"", b""
        return head[:1], self._take(struct.unpack(">I", head[1:])[0] - 4)

    def until_ready(self) -> list[tuple[bytes, bytes]]:
        messages = []
        while True:
            kind, content = self.receive()
            messages.append((kind, content))
            if kind in {b"Z", b""}:
                return messages

    def kinds(self) -> str:
        return b"".join(kind for kind, _ in self.until_ready()).decode()

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                part = self.socket.recv(size - len(data))
            except ConnectionError:
                return data
            if not part:
                return data
            data += part
        return data

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def raw(site: Site) -> Iterator[Raw]:
    connection = Raw(site)
    connection.send(startup())
    connection.until_ready()
    yield connection
    connection.close()


def test_messages_may_come_in_any_pieces(site: Site) -> None:
    with contextlib.closing(Raw(site)) as connection:
        for byte in startup() + query("SELECT n FROM counts WHERE k = 3"):
            connection.send(bytes([byte]))
        connection.until_ready()
        assert connection.kinds() == "TDCZ"


def test_many_statements_in_one_query_answer_in_order_and_stop_at_an_error(raw: Raw) -> None:
    raw.send(query("SELECT 1; ; SHOW server_encoding; SELECT 'a;b' -- c;\n"))
    assert raw.kinds() == "TDCTDCTDCZ"
    raw.send(query("SELECT 1; SELECT nope FROM counts; SELECT 2"))
    assert raw.kinds() == "TDCEZ"
    raw.send(query(" ; "))
    assert raw.kinds() == "IZ"


def test_after_an_error_everything_up_to_sync_is_skipped(raw: Raw) -> None:
    parse = message(b"P", b"\0SELECT nope FROM counts\0\0\0")
    bind = message(b"B", b"\0\0\0\0\0\0\0\0")
    execute = message(b"E", b"\0\0\0\0\0")
    raw.send(parse, bind, execute, parse, bind, execute, message(b"S"))
    assert raw.kinds() == "12EZ"
    parse = message(b"P", b"\0SELECT k FROM counts ORDER BY k LIMIT 3\0\0\0")
    raw.send(parse, bind, message(b"D", b"P\0"), message(b"E", b"\0\0\0\0\2"), message(b"H"))
    raw.send(message(b"E", b"\0\0\0\0\2"), message(b"S"))
    assert raw.kinds() == "12TDDsDCZ"


def test_what_is_no_message_ends_the_connection_with_a_reason(site: Site) -> None:
    for garbage in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack(">ii", 8, 2 << 16),
        struct.pack(">ii", 1 << 30, 3 << 16),
        startup() + b"?\0\0\0\4",
        startup() + b"Q\xff\xff\xff\xff",
        startup() + message(b"Q", b"SELECT 1"),
        startup() + message(b"Q", b"\xff\xfe\0"),
        startup() + message(b"P", b"\0SELECT 1\0\0\5"),
        startup() + message(b"D", b"X\0"),
        startup(user=""),
    ):
        with contextlib.closing(Raw(site)) as connection:
            connection.send(garbage)
            kinds = ""
            while (received := connection.receive())[0]:
                kinds += received[0].decode()
            assert kinds.endswith("E"), garbage
    with site.connect() as honest:
        assert honest.execute("SELECT 1").fetchone() == (1,)


def fuzzed(chance: random.Random, valid: list[bytes]) -> bytes:
    """A few messages, some of them damaged."""
    parts = []
    for _ in range(chance.randrange(1, 6)):
        part = bytearray(chance.choice(valid))
        for _ in range(chance.choice((0, 0, 1, 3))):
            part[chance.randrange(len(part))] = chance.randrange(256)
        if chance.random() < 0.2:
            del part[chance.randrange(len(part)) :]
        if chance.random() < 0.1:
            part += chance.randbytes(chance.randrange(40))
        parts.append(bytes(part))
    return b"".join(parts)


VALID = [
    query("SELECT n FROM counts WHERE k = 3"),
    query("SET timezone = 'UTC'"),
    query("BEGIN; DECLARE c CURSOR FOR SELECT k FROM counts; FETCH 3 FROM c; COMMIT"),
    query("COPY (SHOW all) TO STDOUT"),
    message(b"P", b"s\0SELECT n FROM counts WHERE k = $1\0\0\1\0\0\0\x14"),
    message(b"B", b"p\0s\0\0\1\0\1\0\1\0\0\0\x08\0\0\0\0\0\0\0\x05\0\1\0\1"),
    message(b"D", b"Sp\0"),
    message(b"E", b"p\0\0\0\0\0"),
    message(b"C", b"Ss\0"),
    message(b"S"),
    message(b"H"),
    message(b"X"),
]


def send_fuzz(site: Site, caplog: pytest.LogCaptureFixture, count: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        with contextlib.closing(Raw(site)) as connection:
            connection.send(fuzzed(chance, [startup(), *VALID]) if chance.random() < 0.2 else b"")
            with contextlib.suppress(OSError):
                connection.send(startup(), *(fuzzed(chance, VALID) for _ in range(5)))
                connection.socket.shutdown(socket.SHUT_WR)
                while connection.receive()[0]:
                    pass
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    with site.connect() as honest:
        assert honest.execute("SELECT n FROM counts WHERE k = 3").fetchone() == (30,)


def test_damaged_messages_never_meet_a_foreign_exception(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    send_fuzz(site, caplog, 100, 1)


@pytest.mark.slow
def test_many_damaged_messages_never_meet_a_foreign_exception(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    send_fuzz(site, caplog, 40_000, 2)


def test_a_running_query_is_cancelled(site: Site) -> None:
    with site.connect() as connection:
        timer = threading.Timer(0.5, connection.cancel_safe)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled, match="user request"):
            connection.execute("SELECT count(*) FROM range(1000000000) a, range(1000000) b")
        timer.join()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_wrong_secret_cancels_nothing(site: Site) -> None:
    with site.connect() as connection:
        number = connection.info.backend_pid
        with contextlib.closing(Raw(site)) as other:
            other.send(struct.pack(">iiii", 16, 80_877_102, number, 12345))
            assert other.receive() == (b"", b"")
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_query_ends_at_its_timeout(site: Site) -> None:
    with site.connect() as connection:
        connection.execute("SET statement_timeout = '300ms'")
        begun = time.monotonic()
        with pytest.raises(psycopg.errors.QueryCanceled, match="longer than"):
            connection.execute("SELECT count(*) FROM range(1000000000) a, range(1000000) b")
        assert time.monotonic() - begun < 15


def test_a_result_beyond_its_limit_is_refused(open_site: Open) -> None:
    site = open_site(limits=Limits(max_rows=50))
    with site.connect() as connection:
        with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="50 rows"):
            connection.execute("SELECT * FROM counts")
        assert connection.execute("SELECT count(*) FROM counts").fetchone() == (100,)


@contextlib.contextmanager
def subscribed(site: Site, statement: str, *, binary: bool = False) -> Iterator[Iterator[Any]]:
    """The rows of a subscription, which is cancelled at the end."""
    with site.connect() as connection:
        rows = connection.cursor(binary=binary).stream(statement)
        try:
            yield rows
        finally:
            connection.cancel_safe()
            with contextlib.suppress(psycopg.errors.QueryCanceled):
                for _ in rows:
                    pass


def test_a_subscription_gives_the_rows_and_then_each_change(open_site: Open) -> None:
    site = open_site()
    with subscribed(site, "SUBSCRIBE TO counts WHERE k = 7 AND n > 0") as rows:
        assert next(rows) == (3, "insert", 7, 70)
        tick = site.count_up(7, 71, before=70)
        assert [next(rows), next(rows)] == [
            (tick, "update_preimage", 7, 70),
            (tick, "update_postimage", 7, 71),
        ]
        site.count_up(8, 81, before=80)
        last = site.count_up(7, -1, before=71)
        assert next(rows) == (last, "delete", 7, 71)
    again = f"SUBSCRIBE TO counts WHERE k = 7 AS OF TICK {tick}"
    with subscribed(site, again, binary=True) as rows:  # it goes on where it stopped
        assert next(rows)[:2] == (last, "update_preimage")


def test_a_subscription_is_copied_and_cancelled(open_site: Open) -> None:
    site = open_site()
    with site.connect() as connection:
        with (
            pytest.raises(psycopg.errors.QueryCanceled),
            connection.cursor().copy("COPY (SUBSCRIBE TO counts WHERE k < 2) TO STDOUT") as copy,
        ):
            assert [copy.read_row() for _ in range(2)] == [
                ("3", "insert", "0", "0"),
                ("3", "insert", "1", "10"),
            ]
            connection.cancel_safe()
            copy.read_row()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_cursor_over_a_subscription_fetches_what_has_come(open_site: Open) -> None:
    site = open_site()
    with psycopg.connect(site.dsn()) as connection:
        connection.execute("DECLARE c CURSOR FOR SUBSCRIBE TO counts WHERE k = 5")
        assert connection.execute("FETCH ALL c").fetchall() == [(3, "insert", 5, 50)]
        nothing = connection.execute("FETCH 10 c WITH (timeout = '50ms')").fetchall()
        assert nothing == []
        tick = site.count_up(5, 51, before=50)
        fetched: list[Any] = []

        def fetch() -> bool:
            fetched.extend(connection.execute("FETCH 10 c WITH (timeout = '1s')").fetchall())
            return len(fetched) == 2

        wait_until(fetch)
        assert fetched[1] == (tick, "update_postimage", 5, 51)
        connection.execute("CLOSE c")


def test_changes_that_are_no_longer_kept_or_have_not_come_are_refused(open_site: Open) -> None:
    site = open_site(max_changes=2)
    for _ in range(3):
        site.commit("counts", lambda tick: inserts(tick, (1_000 + tick, 1), (2_000 + tick, 1)))
    for tick in (3, 99_999):
        with site.connect() as connection:
            statement = f"SUBSCRIBE TO counts AS OF TICK {tick}"
            with pytest.raises(psycopg.errors.lookup("72000")):
                connection.execute(statement)


def test_views_are_read_as_of_an_earlier_tick(open_site: Open) -> None:
    site = open_site()
    before = site.tick
    site.count_up(1, 99, before=10)
    with site.connect() as connection:
        assert connection.execute("SELECT n FROM counts WHERE k = 1").fetchone() == (99,)
        connection.execute(f"SET headrace.at_tick = {before}")
        assert connection.execute("SELECT n FROM counts WHERE k = 1").fetchone() == (10,)
        connection.execute("SET headrace.at_tick = 99999")
        with pytest.raises(psycopg.errors.lookup("72000"), match="can be read at the ticks"):
            connection.execute("SELECT n FROM counts WHERE k = 1")


def test_a_client_that_does_not_read_is_ended_and_nobody_else_waits(open_site: Open) -> None:
    site = open_site(limits=Limits(slow_s=0.5))
    site.commit("counts", lambda tick: inserts(tick, *((k, k) for k in range(1_000, 60_000))))
    with contextlib.closing(Raw(site)) as stuck:
        stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        stuck.send(startup(), *[query("SELECT a.*, repeat('x', 500) FROM counts a")] * 3)
        with site.connect() as honest:
            assert honest.execute("SELECT n FROM counts WHERE k = 3").fetchone() == (30,)
            listener = site.server.service.postgres
            assert listener is not None
            wait_until(lambda: listener.open_connections == 1, timeout_s=60)


def test_a_thousand_idle_connections_keep_nobody_waiting(open_site: Open) -> None:
    site = open_site(connections=1_001)
    with contextlib.ExitStack() as stack:
        for _ in range(1_000):
            connection = stack.enter_context(contextlib.closing(Raw(site)))
            connection.send(startup())
            assert connection.until_ready()[-1][0] == b"Z"
        with site.connect() as honest:
            begun = time.monotonic()
            assert honest.execute("SELECT n FROM counts WHERE k = 3").fetchone() == (30,)
            assert time.monotonic() - begun < 5
            with pytest.raises(psycopg.OperationalError, match="too many clients"):
                site.connect()


def test_a_client_that_never_logs_in_is_ended(
    open_site: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.serve.postgres.connection.START_S", 0.2)
    site = open_site()
    with contextlib.closing(Raw(site)) as connection:
        assert connection.receive()[0] == b"E"
        assert connection.receive() == (b"", b"")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    key, file = directory / "key.pem", directory / "cert.pem"
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return file, key


def test_tls_protects_the_connection_and_can_be_required(
    open_site: Open, certificate: tuple[Path, Path]
) -> None:
    file, key = certificate
    site = open_site(
        token="a-token-that-is-long-enough",
        tls_certificate=file,
        tls_key=key,
        requires_tls=True,
    )
    with site.connect(
        sslmode="verify-ca", sslrootcert=str(file), password="a-token-that-is-long-enough"
    ) as connection:
        assert connection.info.pgconn.ssl_in_use
        assert len(connection.execute("SELECT * FROM counts").fetchall()) == 100
    with pytest.raises(psycopg.OperationalError, match="requires TLS"):
        site.connect(sslmode="disable", password="a-token-that-is-long-enough")


def test_bytes_before_tls_are_not_taken_for_bytes_after_it(
    open_site: Open, certificate: tuple[Path, Path]
) -> None:
    file, key = certificate
    site = open_site(tls_certificate=file, tls_key=key)
    with contextlib.closing(Raw(site)) as connection:
        connection.send(struct.pack(">ii", 8, 80_877_103), startup())
        with pytest.raises((ssl.SSLError, OSError)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.wrap_socket(connection.socket)


def test_the_server_says_good_bye_when_it_stops(open_site: Open) -> None:
    site = open_site()
    with contextlib.closing(Raw(site)) as connection:
        connection.send(startup())
        connection.until_ready()
        site.server.stop()
        kind, content = connection.receive()
        assert (kind, b"57P01" in content) == (b"E", True)
