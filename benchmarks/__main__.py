"""`python -m benchmarks [NAME]`: run the benchmarks whose name starts with NAME, one JSON line a
result on standard output.

Everything else, also what a JVM or a broker prints, goes to standard error. Exits with 1 when a
result misses its bar or a benchmark fails, with 2 when no benchmark has that name.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import TextIO

from benchmarks.report import Result, Unavailable, note

HERE = Path(__file__).parent


def names(only: str = "") -> list[str]:
    """The benchmarks whose name starts with `only`."""
    found = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    return [name for name in found if name.startswith(only)]


def take_stdout() -> TextIO:
    """Keep standard output for results: from here on, whatever else is printed, by child processes
    too, lands on standard error.
    """
    sys.stdout.flush()
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return results


def run(name: str, out: TextIO) -> bool:
    """Run one benchmark. False if it failed or missed a bar."""
    ok = True
    try:
        for result in import_module(f"benchmarks.bench_{name}").results():
            assert isinstance(result, Result)
            print(result.to_json(), file=out, flush=True)
            note(
                f"{result.bench}: {result.what}: {result.ours:g} {result.unit}, {result.peer}"
                f" {result.theirs:g}, {verdict(result)}"
            )
            ok = ok and result.ok
    except Unavailable as why:
        note(f"{name}: skipped: {why}")
        ok = ok and os.environ.get("CI") != "true"
    except Exception:
        note(f"{name}: failed")
        traceback.print_exc()
        ok = False
    return ok


def verdict(result: Result) -> str:
    return f"ratio {result.ratio:g}, bar {result.bar:g}: {'ok' if result.ok else 'MISSED'}"


def main(arguments: list[str]) -> int:
    only = arguments[0] if arguments else ""
    chosen = names(only)
    if not chosen:
        note(f"there is no benchmark {only!r}; there is {', '.join(names()) or 'none yet'}")
        return 2
    out = take_stdout()
    verdicts = [run(name, out) for name in chosen]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
