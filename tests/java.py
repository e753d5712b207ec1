"""Skips a test that starts Spark in a process of its own where there is no Java; with CI=true that
is a failure.
"""

import os
import shutil
from pathlib import Path

import pytest


def require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") or (home and (Path(home) / "bin" / "java").exists()):
        return
    if os.environ.get("CI") == "true":
        pytest.fail("CI needs Java 17 for Spark.")
    pytest.skip("no Java, which Spark needs: apt-get install default-jre-headless")
