"""Excision of what lies outside of events: messages and states of alerts, escaped any number of
times, headers, producers' ids, names. What is left is searched by a decoder of the tests' own.
"""

import base64
import json
import re
import urllib.parse
from pathlib import Path

import pytest

from headrace.alerts.alert import Alert
from headrace.alerts.decision import AlertDecider, AlertState
from headrace.errors import ExcisionRefused, NotForgotten
from headrace.events import Event, EventStore, excise, prove
from headrace.events.privacy.scan import scan
from headrace.events.privacy.spellings import Spellings
from headrace.log.file.maintenance import create_checkpoint

NAME = 'Zoë "the\\countess" O\'Neill/Łuk'


def unescaped(text: str) -> str:
    """Without JSON's escapes, however many times they were applied."""
    while True:
        shorter = re.sub(
            r"\\u([0-9a-fA-F]{4})|\\(.)",
            lambda match: chr(int(match[1], 16)) if match[1] else match[2],
            text,
        )
        if shorter == text:
            return text
        text = shorter


def plain_texts(root: Path) -> str:
    """Everything in the files of a log as text, decoded as far as it goes."""
    return unescaped(
        "\n".join(
            path.read_bytes().decode("utf-8", "replace")
            for path in sorted(root.rglob("*"))
            if path.is_file()
        )
    )


def root(store: EventStore) -> Path:
    return store.log.store.root


def fill(store: EventStore, *, topic: str = "spikes") -> AlertDecider:
    """Events, a table of rows made of them, and an alert on it that fires for two people."""
    log = store.log
    for subject, name in (("1", "somebody else"), ("2", NAME)):
        store.append(f"customer-{subject}", Event("Moved", {"name": name}, subject=subject))
    log.create_table(topic, "id BIGINT, entity STRING, data STRING", key="id")
    decider = AlertDecider.open(log, "shop", Alert("spike", topic, (), 0, by=("data",)))
    with log.producer(topic) as producer:
        for number, event in enumerate(store.read()):
            data = json.dumps({"raw": json.dumps(event.data)})
            row = {"id": number, "entity": event.entity, "data": data, "_change_type": "insert"}
            producer.append([row])
    decider.step(1_000_000)
    return decider


def test_a_name_escaped_twice_was_left_in_alerts(store: EventStore) -> None:
    fill(store)
    assert unescaped(NAME) in plain_texts(root(store))
    done = excise(store, "2", values=[NAME])
    assert done.derived == {"alerts": 1, "spikes": 1}
    contents = [unescaped(row["content"]) for row in store.log.read("alerts").to_pylist()]
    assert len(contents) == 1
    assert "somebody else" in contents[0]
    assert unescaped(NAME) not in plain_texts(root(store))
    assert scan([root(store)], [NAME]) == []


def test_rows_in_the_state_of_an_alert_made_excision_fail_for_ever(store: EventStore) -> None:
    decider = fill(store)
    assert len(decider._state.active) == 2
    excise(store, "2", values=[NAME])
    note = store.log.note("alerting.shop.spike")
    state = AlertState.from_json(note)
    assert ["somebody else" in text for text in state.active.values()] == [True]
    assert [name for name in state.groups if "somebody else" not in name] == []
    assert sum(state.positions.values()) == 2  # no row is read again
    decider.reload()
    assert not decider.step(2_000_000)
    with store.log.producer("spikes") as producer:
        producer.delete([1])  # her row goes: nothing that was erased is said again
    decider.step(3_000_000)
    assert unescaped(NAME) not in plain_texts(root(store))


@pytest.mark.parametrize("depth", range(6))
@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_value_is_found_however_often_it_was_escaped(depth: int, is_ascii: bool) -> None:
    spellings = Spellings([NAME])
    text = NAME
    for _ in range(depth):
        text = json.dumps({"x": text}, ensure_ascii=is_ascii)
    assert spellings.are_in_text(text)
    other = text.replace("Neill", "Meill")
    assert not spellings.are_in_text(other)


@pytest.mark.parametrize(
    "stored",
    [
        NAME.encode("utf-16-le"),
        NAME.encode("utf-16-be"),
        urllib.parse.quote(NAME).encode(),
        urllib.parse.quote_plus(NAME).encode(),
        *(base64.b64encode(b"x" * n + NAME.encode() + b"yz") for n in range(4)),
        base64.urlsafe_b64encode(b"??>" + NAME.encode()),
        "".join(f"\\u{ord(char):04X}" for char in NAME).encode(),
        NAME.replace("ë", "e\u0308").encode(),
        json.dumps(NAME).replace("/", "\\/").encode(),
    ],
)
def test_other_spellings_are_found(stored: bytes) -> None:
    spellings = Spellings([NAME])
    assert spellings.are_in(b"before " + stored + b" after")
    assert not spellings.are_in(b"before " + stored[:-8] + b" after")


def test_headers_and_numbers_and_dead_letters_go(store: EventStore) -> None:
    log = store.log
    store.append("customer-2", Event("Moved", {}, subject="2"))
    log.create_topic("calls", "n BIGINT, phone BIGINT")
    with log.producer("calls") as producer:
        producer.append([{"n": 1, "phone": 5}], headers=[{"from": NAME.encode()}])
        producer.append([{"n": 2, "phone": 491701234567}])
        producer.append([{"n": 3, "phone": 6}])
    done = excise(store, "2", values=[NAME, "491701234567"])
    assert done.derived == {"calls": 2}
    assert [row["n"] for row in log.read("calls").to_pylist()] == [3]
    assert scan([root(store)], [NAME]) == []


def test_a_producers_id_is_renamed_and_its_numbers_stay(store: EventStore) -> None:
    log = store.log
    store.append("customer-2", Event("Moved", {}, subject="2"))
    log.create_topic("calls", "n BIGINT")
    with log.producer("calls", id="ada.lovelace-1815") as producer:
        producer.append([{"n": 1}], sequence=7)
    create_checkpoint(log)
    excise(store, "2", values=["ada.lovelace-1815"])
    assert b"ada.lovelace-1815" not in b"".join(
        path.read_bytes() for path in root(store).rglob("*") if path.is_file()
    )
    with log.producer("calls", id="ada.lovelace-1815") as producer:
        assert producer.append([{"n": 1}], sequence=7).duplicate
    assert log.read("calls").to_table().num_rows == 1


def test_names_that_cannot_be_cleaned_are_refused_before_anything_is_changed(
    store: EventStore,
) -> None:
    log = store.log
    store.append("customer-2", Event("Moved", {}, subject="2"))
    log.create_topic("mail.ada", "n BIGINT")
    with log.producer("mail.ada") as producer:
        producer.append([{"n": 1}])
    with log.consumer("mail.ada", group="readers-of-ada-l") as consumer:
        consumer.poll(timeout="1 second")
        consumer.commit()
    with log.transaction("note") as tx:
        tx.set_note("my.program", json.dumps({"last": NAME}))
    with pytest.raises(ExcisionRefused) as refused:
        excise(store, "2", values=["mail.ada", "readers-of-ada-l", NAME])
    assert [re.sub(" has .*| that .*", "", each) for each in refused.value.obstacles] == [
        "the topic 'mail.ada'",
        "the consumer group 'readers-of-ada-l', or a member of it,",
        "the note 'my.program'",
    ]
    assert store.version("customer-2") == 1
    assert len(store.load("customer-2")) == 1


def test_an_error_said_to_remove_checkpoints_which_destroys_the_log(store: EventStore) -> None:
    log = store.log
    store.append("customer-2", Event("Moved", {}, subject="2"))
    with log.transaction("note") as tx:
        tx.set_note("my.program", NAME)
    create_checkpoint(log)
    outside = root(store).parent / "backup"
    outside.mkdir()
    (outside / "old.txt").write_text(NAME)
    with pytest.raises(
        NotForgotten, match=r"\.checkpoint: has a value \(the note 'my.program'"
    ) as left:
        prove(store, [NAME], also=[outside])
    text = str(left.value)
    assert "no file of the log" in text
    assert not re.search(r"(delete|remove|erase the values from) (it|this|these|each)", text)


def test_copies_of_damaged_bytes_go_too(store: EventStore) -> None:
    store.append("customer-2", Event("Moved", {"name": NAME}, subject="2"))
    directory = root(store) / "quarantine"
    directory.mkdir()
    (directory / "a.bytes").write_bytes(b"\0" + json.dumps(NAME).encode())
    (directory / "b.bytes").write_bytes(b"somebody else")
    with pytest.raises(NotForgotten, match="a copy of damaged bytes"):
        prove(store, [NAME])
    excise(store, "2", values=[NAME])
    assert [path.name for path in directory.iterdir()] == ["b.bytes"]
