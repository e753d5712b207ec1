"""A database server for tests: started from Debian's packages on a free loopback port, with data of
its own in a temporary directory, gone when stopped.

`postgres_server` and `mariadb_server` say what each is started with. Nothing of it is fit for
production.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_SECONDS = 60
STOP_SECONDS = 30


class ServerUnavailable(Exception):
    """No server can be had here. The text says what is missing."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DatabaseServer:
    """One server process. `start` returns when it answers; `stop_process` and `start_process` are a
    restart; `stop` removes its data too.
    """

    kind = "database"
    user = "nobody"
    """Who runs it where the tests run as root, since these servers refuse root."""
    last_signal = "TERM"

    def __init__(self) -> None:
        self.port = 0
        self.directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    # What each kind of server says

    def prepare(self, data: Path) -> None:
        raise NotImplementedError

    def command(self, data: Path) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    # The same for all

    @property
    def data(self) -> Path:
        assert self.directory is not None
        return self.directory / "data"

    def start(self) -> Self:
        self.directory, self.port = (
            Path(tempfile.mkdtemp(prefix=f"headrace-{self.kind}-")),
            free_port(),
        )
        try:
            if self.owner is not None:
                shutil.chown(self.directory, self.owner)
            self.prepare(self.data)
            self.start_process()
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def owner(self) -> str | None:
        """The user to run as, if this process may choose."""
        if os.geteuid() != 0:
            return None
        try:
            return pwd.getpwnam(self.user).pw_name
        except KeyError:
            return "nobody"

    def run(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
            user=self.owner,
            cwd="/",
            env=self._environment,
        )
        if done.returncode:
            raise ServerUnavailable(
                f"{command[0]} failed: {(done.stdout + done.stderr).strip()[-2000:]}"
            )

    @property
    def _environment(self) -> dict[str, str]:
        """Temporary files of its own: MariaDB removes those of others when it starts."""
        return {**os.environ, "TMPDIR": str(self.directory)}

    def start_process(self) -> None:
        assert self.directory is not None
        with (self.directory / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(
                [*self._dying_with_us(), *self.command(self.data)],
                stdout=output,
                stderr=subprocess.STDOUT,
                user=self.owner,
                cwd="/",
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerUnavailable(f"The {self.kind} server did not start: {self.output()}")
            time.sleep(0.05)

    def _dying_with_us(self) -> list[str]:
        """A server whose test was killed ends too."""
        setpriv = shutil.which("setpriv")
        return [setpriv, "--pdeathsig", self.last_signal] if setpriv else []

    def stop_process(self, how: signal.Signals = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        self.stop_process()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    def output(self) -> str:
        file = self.directory / "output.txt" if self.directory else None
        return file.read_text(errors="replace")[-3000:] if file and file.exists() else ""

    def is_open(self) -> bool:
        """Whether the port takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
