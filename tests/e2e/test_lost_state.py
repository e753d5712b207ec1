"""Whatever becomes of the local stores: they are filled again from files, and hold key by key what
they held before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.pipelines import PipelineTest
from headrace.testing.plain_spark import PlainSpark
from tests.e2e.everything import check, everything
from tests.e2e.local_stores import Contents, contents, feed_some

pytestmark = pytest.mark.usefixtures("no_syncs")


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
    with PipelineTest(everything(), tmp_path, spark, shards=2, width="wide") as test:
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
