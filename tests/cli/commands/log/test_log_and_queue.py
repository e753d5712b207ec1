"""`headrace log`, `headrace queue` and `headrace dead`."""

import shutil
from pathlib import Path

import pytest

import headrace as hr
from tests.cli.conftest import Run


@pytest.fixture
def emails(log: hr.Log) -> str:
    log.create_topic("emails", "to STRING, body BINARY")
    with log.producer("emails") as producer:
        producer.append(
            [{"to": f"user{n}@example.com", "body": b"hi"} for n in range(3)],
            headers=[None, [("trace", b"7")], None],
        )
    return "emails"


def flip_a_byte(directory: Path) -> Path:
    """Change a byte in the middle of the largest data file of the log."""
    file = max(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    return file


def test_verify_finds_nothing_in_a_sound_log(run: Run, emails: str) -> None:
    assert "No damage found" in run("log", "verify").out
    (finding,) = run("log", "verify", emails, "--json").lines
    assert (finding["kind"], finding["topic"], finding["message"]) == (
        "ok",
        emails,
        "No damage found.",
    )


def test_verify_exits_with_4_on_damage(run: Run, log: hr.Log, address: str, emails: str) -> None:
    with log.producer(emails) as producer:
        producer.append([{"to": "x" * 500, "body": b"y" * 500}] * 200)
    log.close()
    file = flip_a_byte(Path(address.removeprefix("file:")))
    found = run("log", "verify", "--json", code=4).lines
    assert any(Path(each["file"]).name == file.name for each in found)
    assert file.name in run("log", "verify", code=4).out


def test_a_backup_is_a_log_and_the_second_one_copies_what_is_new(
    run: Run, log: hr.Log, emails: str, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    assert "copied and verified" in run("log", "backup", str(backup)).out
    with log.producer(emails) as producer:
        producer.append({"to": "late@example.com", "body": b"x"})
    (line,) = run("log", "backup", str(backup), "--json").lines
    assert 0 < line["copied_bytes"] < line["total_bytes"]
    with hr.open_log(f"file:{backup}") as restored:
        assert len(restored.read(emails).to_pylist()) == 4


def test_a_copy_that_lacks_commits_is_refused_until_it_is_repaired(
    run: Run, log: hr.Log, address: str, emails: str, tmp_path: Path
) -> None:
    source, copy = Path(address.removeprefix("file:")), tmp_path / "copy"
    shutil.copytree(source, copy)
    with log.producer(emails) as producer:
        producer.append({"to": "late@example.com", "body": b"x"})
    shutil.copy(source / "journal" / "durable", copy / "journal" / "durable")
    refused = run("topic", "list", "--log", f"file:{copy}", code=1).err
    assert "was made while the log was being written" in refused
    assert "headrace log repair" in refused
    assert "can be opened now" in run("log", "repair", str(copy), code=4).out
    assert emails in run("topic", "list", "--log", f"file:{copy}").out


def test_stats_counts_rows(run: Run, emails: str) -> None:
    (line,) = run("log", "stats", emails, "--json").lines
    assert (line["name"], line["rows"], line["partitions"], line["end"]) == (emails, 3, 1, {"0": 3})
    assert line["bytes"] > 0
    assert emails in run("log", "stats").out


def test_compact_keeps_the_newest_row_of_each_key(run: Run, log: hr.Log) -> None:
    log.create_topic("newest", "id BIGINT, v BIGINT", key="id", compact=True, segment_bytes=1)
    with log.producer("newest") as producer:
        for v in range(20):
            producer.append({"id": v % 2, "v": v})
    run("log", "compact", "newest")
    left = [row["v"] for row in log.read("newest").to_pylist()]
    assert len(left) < 20
    assert left[-2:] == [18, 19]
    run("log", "compact", "newest", "--json")


def test_an_unknown_topic_is_named(run: Run, emails: str) -> None:
    for command in ("verify", "stats", "compact"):
        assert "did you mean 'emails'?" in run("log", command, "emils", code=1).err


def test_receive_ack_and_nack(run: Run, emails: str) -> None:
    queue = emails, "--group", "mailers"
    first, second = run("queue", "receive", *queue, "--max", 2, "--visibility", "1 minute").lines
    assert first["row"] == {"to": "user0@example.com", "body": "aGk="}
    assert (second["deliveries"], second["headers"]) == (1, [["trace", "Nw=="]])
    assert "1 message acknowledged." in run("queue", "ack", *queue, first["receipt"]).out
    assert run("queue", "nack", *queue, "--json", second["receipt"]).lines == [{"given_back": 1}]
    again = run("queue", "receive", *queue, "--max", 5).lines
    assert sorted((each["offset"], each["deliveries"]) for each in again) == [(1, 2), (2, 1)]


def test_what_receive_prints_can_be_piped_into_ack(run: Run, emails: str) -> None:
    queue = emails, "--group", "mailers"
    taken = run("queue", "receive", *queue, "--max", 3, "--json")
    assert run("queue", "ack", *queue, "--json", stdin=taken.out).lines == [{"acknowledged": 3}]
    assert run("queue", "receive", *queue).out == ""
    run("queue", "ack", *queue, stdin="", code=2)


def test_peek_stats_renew_and_purge(run: Run, emails: str) -> None:
    queue = emails, "--group", "mailers"
    assert [line["status"] for line in run("queue", "peek", *queue).lines] == ["ready"] * 3
    assert "no group" in run("queue", "stats", *queue, code=1).err.lower()
    first, second = run("queue", "receive", *queue, "--max", 2, "--visibility", "1 second").lines
    renewed = run("queue", "renew", *queue, "--visibility", "1 hour", first["receipt"])
    assert "1 message renewed." in renewed.out
    run("queue", "nack", *queue, "--delay", "1 hour", second["receipt"])
    peeked = run("queue", "peek", *queue, "--json").lines
    assert [(line["offset"], line["status"], line["deliveries"]) for line in peeked] == [
        (0, "leased", 1),
        (1, "delayed", 1),
        (2, "ready", 0),
    ]
    assert peeked[0]["row"] == first["row"]
    assert len(run("queue", "peek", *queue, "--max", 1).lines) == 1
    assert run("queue", "stats", *queue, "--json").lines == [
        {
            "topic": emails,
            "group": "mailers",
            "partition": 0,
            "ready": 1,
            "leased": 1,
            "delayed": 1,
            "oldest": 0,
        }
    ]
    assert "delayed" in run("queue", "stats", *queue).out
    assert "--yes" in run("queue", "purge", *queue, code=2).err
    assert run("queue", "purge", *queue, "--yes", "--json").lines == [{"purged": 3}]
    assert run("queue", "receive", *queue).lines == []


def test_a_receipt_that_is_none_is_refused(run: Run, emails: str) -> None:
    run("queue", "ack", emails, "--group", "mailers", "nonsense", code=1)


def test_no_dead_letters(run: Run, emails: str) -> None:
    assert "No dead letters." in run("dead", "list").out
    assert run("dead", "list", "--json").lines == []


def test_a_message_delivered_too_often_can_be_shown_and_replayed(
    run: Run, log: hr.Log, emails: str
) -> None:
    queue = emails, "--group", "mailers"
    for _ in range(5):
        for taken in run("queue", "receive", *queue, "--max", 3).lines:
            run("queue", "nack" if taken["offset"] == 1 else "ack", *queue, taken["receipt"])
    assert run("queue", "receive", *queue, "--max", 3).lines == []
    (listed,) = run("dead", "list", "--json").lines
    assert (listed["of"], listed["rows"]) == (emails, 1)
    (dead_letter,) = run("dead", "show", emails, "--json").lines
    assert "user1@example.com" in str(dead_letter)
    assert "user1" in run("dead", "show", emails).out
    assert run("dead", "replay", emails, "--json").lines == [{"replayed": 1, "failed": []}]
    assert [row["to"] for row in log.read(emails, start=3).to_pylist()] == ["user1@example.com"]


def test_a_topic_without_dead_letters_has_none(run: Run) -> None:
    run("topic", "create", "a", "--schema", "n BIGINT")
    assert run("dead", "show", "a").out.strip() == "No dead letters."
    assert run("dead", "replay", "a").out.strip() == "0 replayed, 0 failed again."
    assert "There is no topic 'b'" in run("dead", "show", "b", code=1).err


def test_stats_counted_offsets_instead_of_rows(run: Run, log: hr.Log) -> None:
    log.create_topic("t", "k BIGINT, n BIGINT", key="k", compact=True, segment_bytes=1)
    with log.producer("t") as producer:
        for n in range(6):
            producer.append([{"k": n % 2, "n": n}, {"k": 7, "n": n}])
    log.append_control("t", 0, b"x")
    rows = len(log.read("t").to_pylist())
    assert run("log", "stats", "t", "--json").lines[0]["rows"] == rows == 12
    log.maintain("t")
    log.append_control("t", 0, b"y")
    rows = len(log.read("t").to_pylist())
    assert run("log", "stats", "t", "--json").lines[0]["rows"] == rows < 12
    assert log.stats("t")[0].rows == rows
    log.trim_topic("t", 9)
    rows = len(log.read("t").to_pylist())
    assert run("log", "stats", "t", "--json").lines[0]["rows"] == log.stats("t")[0].rows == rows
