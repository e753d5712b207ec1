"""A kernel finds the cache that it wrote, or none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.engine.state.step_state import read_kernel_cache, write_kernel_cache


def test_what_was_written_last_is_read(tmp_path: Path) -> None:
    assert read_kernel_cache(tmp_path / "1.memo") is None
    for content in (b"one", b"", b"another, longer"):
        write_kernel_cache(tmp_path / "1.memo", content)
        assert read_kernel_cache(tmp_path / "1.memo") == content
    assert [path.name for path in tmp_path.iterdir()] == ["1.memo"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda it: it[:-1],
        lambda it: it[:3],
        lambda it: b"HRm\x02" + it[4:],
        lambda it: it[:30] + b"?" + it[31:],
        lambda _: b"",
    ],
)
def test_what_is_damaged_or_of_another_version_is_not_believed(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "1.memo"
    write_kernel_cache(path, b"something that is long enough")
    path.write_bytes(damage(path.read_bytes()))
    assert read_kernel_cache(path) is None


def test_a_directory_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    write_kernel_cache(tmp_path / "gone" / "1.memo", b"something")
    assert read_kernel_cache(tmp_path / "gone" / "1.memo") is None
