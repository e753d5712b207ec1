"""Kills processes at chosen points, once each. Python imports this by itself in every process that
has this directory on its PYTHONPATH, Spark's workers included.

A point is armed by a file of its name in the directory HEADRACE_ARMED; whoever takes the file away
is the one that strikes. What the file says is whom: "self"; "driver", the process whose number is
in HEADRACE_DRIVER; "jvm", the JVM that this process has started; or "executor", the JVM of a
cluster for which this process computes.
"""

import os
import signal
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def strike(point: str) -> None:
    """The file is moved, not read and removed: of several processes one succeeds, and what it did
    can be seen afterwards.
    """
    armed = arming.armed(point)
    mine = armed.with_suffix(f".{os.getpid()}")
    try:
        armed.rename(mine)
    except FileNotFoundError:
        return
    victim = VICTIMS[mine.read_text()]()
    mine.rename(armed.with_suffix(".struck"))
    os.kill(victim, signal.SIGKILL)


def driver() -> int:
    return int(os.environ["HEADRACE_DRIVER"])


def jvm() -> int:
    """The JVM of the driver. Its workers end with it."""
    for children in Path(f"/proc/{driver()}/task").glob("*/children"):
        for child in children.read_text().split():
            if b"deploy.SparkSubmit" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise LookupError("the driver has no JVM")


def executor() -> int:
    """The JVM that has started the daemon of this worker."""
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(daemon.rsplit(")", 1)[1].split()[1])


VICTIMS = {"self": os.getpid, "driver": driver, "jvm": jvm, "executor": executor}


class AtImport(MetaPathFinder):
    """Puts the points of a module in place as soon as it has been imported."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        self.modules.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = PuttingInPlace(spec.loader, fullname)
        return spec


class PuttingInPlace(Loader):
    def __init__(self, real: Loader, module: str) -> None:
        self.real, self.module = real, module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        points.inject_faults(
            [name for name, point in points.ALL.items() if point.module == self.module], strike
        )


if "HEADRACE_ARMED" in os.environ:
    from headrace.testing import fault_points as points
    from tests.crash.inject import arming

    sys.meta_path.insert(0, AtImport({point.module for point in points.ALL.values()}))
