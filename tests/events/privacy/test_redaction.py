"""Views with personal fields: sealed on disk and for who has no key, opened by a server that has
the master key, and null everywhere once a person's key is deleted.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import BadMasterKey
from headrace.events import Handler, Vault, open_store, open_vault, stream
from headrace.serve.server import start
from headrace.testing.pipelines import PipelineTest
from tests.events.customers import CUSTOMERS, KEY, Registered
from tests.serve.conftest import QUICK, Client

ADDRESS = 'ada "x" ü@example.com'


def latest() -> hr.Pipeline:
    pipeline = hr.Pipeline("latest")
    pipeline.view(
        "newest",
        stream(pipeline, "bank")
        .group_by("entity")
        .aggregate(data=hr.agg.max("data"), n=hr.agg.count()),
    )
    return pipeline


@pytest.fixture
def settled(tmp_path: Path) -> Iterator[tuple[PipelineTest, Vault]]:
    with (
        PipelineTest(latest(), tmp_path) as test,
        open_store(test.log, "bank") as store,
        open_vault(store, master_key=KEY) as vault,
    ):
        Handler(store, CUSTOMERS, vault=vault).handle("c-7", Registered(7, ADDRESS))
        test.settle()
        yield test, vault


def emails(client: Client) -> list[Any]:
    """The personal field in a row by key, in a page, in an answer to SQL, in a stream of changes,
    and in one of the topic.
    """
    row = client.get("/views/newest", key="c-7")
    assert int(row.headers["content-length"]) == len(row.body)
    (page,) = client.get("/views/newest").json["rows"]
    (asked,) = client.sql("SELECT data FROM newest").json["rows"]
    with client.follow("/views/newest/changes") as subscriber:
        followed = subscriber.next()
    with client.follow("/topics/bank/tail?last=10") as subscriber:
        printed = subscriber.next()
    assert followed is not None
    assert printed is not None
    texts = [
        row.json["row"]["data"],
        page["data"],
        asked["data"],
        *(_found(each.data, "data") for each in (followed, printed)),
    ]
    return [json.loads(text)["email"] for text in texts]


def _found(thing: Any, name: str) -> Any:
    """The first text of that name, however deep."""
    if isinstance(thing, dict) and isinstance(thing.get(name), str):
        return thing[name]
    return next(
        (
            found
            for each in (
                thing.values()
                if isinstance(thing, dict)
                else thing
                if isinstance(thing, list)
                else ()
            )
            if (found := _found(each, name)) is not None
        ),
        None,
    )


def redact(test: PipelineTest) -> list[Any]:
    with start(test.state, test.log, limits=QUICK) as server:
        return emails(Client(server.port))


def test_without_the_master_key_values_stay_sealed_and_become_null(
    settled: tuple[PipelineTest, Vault],
) -> None:
    test, vault = settled
    with start(test.state, test.log, limits=QUICK) as server:
        before = emails(Client(server.port))
        assert len(before) == 5
        assert {vault.unseal(each) for each in before} == {ADDRESS}
        vault.forget("7")
        assert emails(Client(server.port)) == [None] * 5


def test_a_server_that_has_the_master_key_opens_them(
    settled: tuple[PipelineTest, Vault], monkeypatch: pytest.MonkeyPatch
) -> None:
    test, vault = settled
    monkeypatch.setenv("HEADRACE_MASTER_KEY", base64.b64encode(KEY).decode())
    assert redact(test) == [ADDRESS] * 5
    vault.forget("7")
    assert redact(test) == [None] * 5
    monkeypatch.setenv("HEADRACE_MASTER_KEY", base64.b64encode(bytes(32)).decode())
    with pytest.raises(BadMasterKey, match="not the one"):
        start(test.state, test.log, limits=QUICK)
