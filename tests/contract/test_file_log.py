"""The embedded log keeps the contract."""

from pathlib import Path

import pytest

import headrace as hr
from tests.contract.log_contract import LogContract


class TestFileLog(LogContract):
    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}/log"

    def forget_old_rows(self, log: hr.Log, topic: str) -> None:
        log.alter_topic(topic, retention_bytes=1)
        log.maintain(topic)
