"""Gateways in processes of their own, as a user starts them, and how they are killed."""

import signal
import subprocess
import sys
from typing import IO

import headrace as hr


def started(*arguments: object, log: hr.Log) -> subprocess.Popen[str]:
    """The command itself, as a user starts it; returns when it takes rows."""
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "gateway",
        *map(str, arguments),
        "--log",
        log.address,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "Accepting rows" in out(process).readline()
    return process


def out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    out(process).close()
