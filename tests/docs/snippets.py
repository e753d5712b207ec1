"""The snippets of the README and of the guide, found and run: the blocks of a page one after the
other, in an empty directory, Python sharing its names.

- ```python: runs. A comment behind print() is what is printed; an ellipsis at its end stands for
  more.
- ```python title="shop.py": is saved under that name (any language).
- ```bash: runs, a command at a time. A command followed by `# exits with 3` must exit so. One
  followed by `# until Ctrl-C` is started, and interrupted at the end of the page, where it must end
  well.
- ```console: `$ command`, and below it exactly what it prints; … stands for anything.

Commands of ours run in this process, unless they need the shell: that is quick, and they share the
tests' Spark session.
"""

import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from headrace.cli import app

FENCE = re.compile(
    r'^```(\w*)(?: (?:title="|file=)([\w./-]+)"?)?\n(.*?)^```$|^## ([^\n]+)$',
    re.MULTILINE | re.DOTALL,
)
PROMISES = re.compile(r"print\(.*\) +# (.+)$", re.MULTILINE)
SHELL_SIGNS = re.compile(r"[|<>&;$`*]")
EXITS = re.compile(r"# exits with (\d+)")
UNTIL = "# until Ctrl-C"
FILE = "file="


@dataclass(frozen=True)
class Snippet:
    """A block: what it is (`python`, `bash`, `console`, or `file=NAME`), its first line in the
    page, and the section it stands in.
    """

    kind: str
    line: int
    text: str
    section: str = ""


def snippets(page: str) -> list[Snippet]:
    """What a page has to run or to save; blocks of other languages are for reading."""
    found, section = [], ""
    for match in FENCE.finditer(page):
        language, file, text, heading = match.groups()
        section = heading or section
        if file or language in {"python", "bash", "console"}:
            found.append(
                Snippet(
                    f"{FILE}{file}" if file else language,
                    page.count("\n", 0, match.start()) + 1,
                    text,
                    section,
                )
            )
    return found


def commands(script: str) -> Iterator[str]:
    """A script's commands, each whole: a loop or a line that goes on is one."""
    whole = ""
    for line in script.splitlines():
        whole += f"{line}\n"
        if not whole.strip() or whole.lstrip().startswith("#"):
            whole = ""
        elif not line.endswith("\\") and _is_whole(whole):
            yield whole.strip()
            whole = ""
    assert not whole.strip(), f"The script ends in the middle of {whole}"


def _is_whole(command: str) -> bool:
    looked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
    return looked.returncode == 0 and not looked.stderr


@dataclass
class Page:
    """A page on its run. `replacements` are what stands in the page and what it is here: an
    address, a port.
    """

    name: str
    replacements: Mapping[str, str] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    environment: dict[str, str] = field(default_factory=dict)
    started: list[tuple[str, subprocess.Popen[str]]] = field(default_factory=list)

    def run(self, blocks: list[Snippet]) -> dict[str, Any]:
        """All of it, in the current directory. What Python and commands say is printed; the names
        that Python left are returned.
        """
        with self._interrupted_at_the_end():
            for block in blocks:
                self._run(block, self._placed(block.text))
        return self.names

    def _placed(self, text: str) -> str:
        for there, here in self.replacements.items():
            text = text.replace(there, here)
        return text

    def _run(self, block: Snippet, text: str) -> None:
        if block.kind.startswith(FILE):
            Path(block.kind.removeprefix(FILE)).write_text(text)
        elif block.kind == "python":
            self._python(block, text)
        elif block.kind == "bash":
            for command in commands(text):
                self._said_by(command)
        else:
            self._console(text)

    def _python(self, block: Snippet, text: str) -> None:
        """Compiled with the page's own line numbers, so that a traceback points into it."""
        said = io.StringIO()
        with redirect_stdout(said):
            exec(compile("\n" * block.line + text, self.name, "exec"), self.names)
        printed = said.getvalue()
        print(printed, end="")
        for promised in PROMISES.findall(text):
            assert any(_is_kept(promised, line) for line in printed.splitlines()), (
                f"{self.name}:{block.line}: {promised!r} is not in what was printed: {printed}"
            )

    def _console(self, text: str) -> None:
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            fits = "".join(
                ".*" if each == "…" else re.escape(each)
                for each in re.split("(…)", _trimmed(expected))
            )
            printed = _trimmed(self._said_by(command))
            assert re.fullmatch(fits, printed, re.DOTALL), (
                f"{self.name}: {command}\nprinted:\n{printed}\nand not:\n{expected}"
            )

    def _said_by(self, command: str) -> str:
        if UNTIL in command:
            return self._start(command)
        code = int(found[1]) if (found := EXITS.search(command)) else 0
        if exported := re.fullmatch(r"export (\w+)=(\S+)", command):
            self.environment[exported[1]] = exported[2]
            return ""
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        in_process = words[0] == "headrace" and not SHELL_SIGNS.search(_unquoted(command))
        said, got, error = self._ours(words[1:]) if in_process else self._shell(command)
        print(said, end="")
        assert got == code, (
            f"{self.name}: {command}\nended with {got}, not {code}:\n{said}\n{error}"
        )
        return said

    def _ours(self, words: list[str]) -> tuple[str, int, str]:
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200", **self.environment})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.stdout, done.exit_code, done.stderr

    def _shell(self, command: str) -> tuple[str, int, str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            capture_output=True,
            text=True,
            timeout=300,
            env=self._whole_environment(),
            check=False,
        )
        return done.stdout, done.returncode, done.stderr

    def _start(self, command: str) -> str:
        """A command that runs until it is interrupted; it is waited for until it says something."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._whole_environment(),
        )
        self.started.append((command, process))
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, f"{self.name}: {command}\nsaid nothing and ended with {process.wait(30)}"
        if port := re.search(r"--port (\d+)", command):
            _wait_for(int(port[1]))
        return first

    def _whole_environment(self) -> dict[str, str]:
        """With this interpreter's `headrace` before others, and no log but the page's own."""
        inherited = {name: value for name, value in os.environ.items() if name != "HEADRACE_LOG"}
        return {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}",
            **self.environment,
        }

    @contextmanager
    def _interrupted_at_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            said = [(command, process, _interrupted(process)) for command, process in self.started]
        for command, process, text in said:
            assert process.returncode in {
                0,
                130,
            }, f"{self.name}: {command}\nended with {process.returncode}:\n{text}"


def _wait_for(port: int, patience_s: float = 30) -> None:
    """Until somebody listens there."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            assert time.monotonic() < until, f"Nobody listens at port {port}."
            time.sleep(0.05)
        else:
            return


def _interrupted(process: subprocess.Popen[str]) -> str:
    time.sleep(0.2)  # what has just said where it listens may not yet listen to Ctrl-C
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    return said


def _is_kept(promised: str, line: str) -> bool:
    """An ellipsis at the end of what a comment promises stands for more."""
    return (
        line.startswith(promised.removesuffix("…").rstrip())
        if promised.endswith("…")
        else line == promised
    )


def _trimmed(text: str) -> str:
    """Without blank lines around it, and without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def _unquoted(command: str) -> str:
    return re.sub(r"'[^']*'|\"[^\"$`]*\"|#.*", "", command)
