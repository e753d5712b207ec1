"""Whatever becomes of the local stores: they are filled again from files, and hold key by key what
they held before.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lmdb
import pytest

from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.e2e.everything import check, everything

pytestmark = pytest.mark.usefixtures("no_syncs")
Contents = dict[str, dict[bytes, bytes]]


def feed_some(test: PipelineTest, seed: int, *, ticks: int = 2) -> None:
    rng = random.Random(seed)
    for _ in range(ticks):
        test.feed(
            "orders",
            [
                {"k": rng.randrange(40), "v": rng.randrange(9), "note": rng.choice("abc")}
                for _ in range(60)
            ],
        )
        test.feed(
            "people",
            [
                {
                    "id": rng.randrange(30),
                    "city": rng.choice(["Oslo", "Rome"]),
                    "age": rng.randrange(90),
                }
                for _ in range(20)
            ],
        )
        test.cut(forced=True)


def contents(test: PipelineTest) -> Contents:
    """Every local store's keys and values, without what it says of itself; from copies, since a
    process may have a store open only once.
    """
    found = {}
    for data in sorted((test.root / "state" / "local").rglob("data.mdb")):
        with TemporaryDirectory() as copy:
            shutil.copy(data, copy)
            with lmdb.open(copy, readonly=True, lock=False) as store, store.begin() as txn:
                found[str(data.parent.relative_to(test.root))] = {
                    key: value for key, value in txn.cursor() if not key.startswith(b"\x00")
                }
    return found


def stores(local: Path) -> list[Path]:
    return [data.parent for data in sorted(local.rglob("data.mdb"))]


def each(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    def on_all(local: Path) -> None:
        for store in stores(local):
            damage(store)

    return on_all


def cut_short(store: Path) -> None:
    data = (store / "data.mdb").read_bytes()
    (store / "data.mdb").write_bytes(data[: len(data) // 3])


def without_about(store: Path) -> None:
    cut_short(store)
    (store / "about.json").unlink()


def garbage(store: Path) -> None:
    (store / "data.mdb").write_bytes(b"garbage " * 10_000)


def swapped(local: Path) -> None:
    """Each store in the place of the next: sound, and not its own."""
    found = stores(local)
    for number, store in enumerate(found):
        store.rename(local / f"moving{number}")
    for number in range(len(found)):
        (local / f"moving{number}").rename(found[number - 1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": each(shutil.rmtree),
    "no data": each(lambda store: (store / "data.mdb").unlink()),
    "cut short": each(cut_short),
    "cut short, nothing said": each(without_about),
    "garbage": each(garbage),
    "foreign": swapped,
    "the whole directory": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_lost_store_is_filled_again_key_by_key(tmp_path: Path, damage: str) -> None:
    spark: Any = PlainSpark()
    with PipelineTest(everything(), tmp_path, spark) as test:
        feed_some(test, 1)
        while test.step(1):
            continue
        before = contents(test)
        assert sum(map(len, before.values())) > 100
        DAMAGES[damage](tmp_path / "state" / "local")
        test.cut(forced=True)
        assert test.step()
        assert test.runner.last_result is not None
        assert set(test.runner.last_result.how) == {"rebuilt"}
        assert contents(test) == before
        feed_some(test, 2)
        test.settle(2)
        check(test)


def test_a_store_that_is_lost_in_the_middle_of_a_batch_is_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard has done its part of a batch when all stores go, and then the batch fails."""
    spark: Any = PlainSpark()
    with PipelineTest(everything(), tmp_path, spark) as test:
        feed_some(test, 1)
        test.settle(1)

        def loses_all(*args: Any) -> None:
            shutil.rmtree(tmp_path / "state" / "local")
            raise OSError("and then it failed")

        feed_some(test, 2)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="and then it failed"):
            patch.setattr("headrace.runtime.query.commit_batch", loses_all)
            test.step()
        test.settle()
        check(test)


def test_other_shards_hold_the_same_state(tmp_path: Path) -> None:
    """More, fewer and again as many: together the stores hold what they held."""
    spark: Any = PlainSpark()
    with PipelineTest(everything(), tmp_path, spark, shards=2) as test:
        feed_some(test, 3)
        test.settle(1)
        before = merged(contents(test), 2)
        for shards in (3, 1, 4, 2):
            test.restart(shards=shards)
            test.cut(forced=True)
            test.step()
            assert merged(contents(test), shards) == before
        check(test)


def merged(found: Contents, shards: int) -> dict[tuple[str, bytes], bytes]:
    """By stage and key, of the stores of so many shards."""
    parts = [
        (Path(name).parent.name, content)
        for name, content in found.items()
        if name.endswith(f"-of-{shards}")
    ]
    keys = [(stage, key) for stage, content in parts for key in content]
    assert len(keys) == len(set(keys)), "a key is in two shards"
    return {(stage, key): value for stage, content in parts for key, value in content.items()}
