"""The embedded log keeps the contract."""

from pathlib import Path

import pytest

from tests.contract.log_contract import LogContract


class TestFileLog(LogContract):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}/log"
