"""Count what a careful reader of this tree would look at first, and print it.

    python scripts/house.py              figures of the tree
    python scripts/house.py --journeys   and how many files five journeys pass (runs them; ~10 s)

`tests/test_house.py` holds the figures to their limits.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "headrace"
MAX_MODULES_IN_A_FOLDER = 21
DIALECT = (
    "told",
    "telling",
    "tells",
    "hopeful",
    "inexact",
    "workshop",
    "pile",
    "piles",
    "put aside",
    "memos?",
    "greet",
    "how-manieth",
    "beside",
    "put right",
    "take back",
    "taken back",
)
"""Words of the dialect that the code spoke once (patterns), counted in names and in prose."""
MAX_DIALECT_WORDS = 40
"""Some of these words are English too."""
MAX_FILES_PASSED = {
    "append": 14,
    "tick to commit": 70,
    "window": 25,
    "look-up": 20,
    "captured change": 40,
}
"""How many files of the package each journey may pass."""
NOT_DIALECT = re.compile(
    r"dead[- _]+letters?|(capital|small|lower-case|upper-case) letters?"
    r"|letters?( of|, digits| that)"
    r"|format letters?|told apart|told to stop|tells \w+ (apart|from)",
    re.IGNORECASE,
)
VERBAL_MODULES = {
    "partitioning",
    "load_shedding",
    "rendering",
    "eventsourcing",  # the name of the library that it serves
    "staging",
    "versioned",
}
"""Modules ending in -ing or -ed that are nouns of the field."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, packages included."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def plain_modules() -> dict[str, Path]:
    """The modules that are files of their own."""
    return {name: path for name, path in modules().items() if path.name != "__init__.py"}


def folders() -> Counter[str]:
    """How many modules each folder holds."""
    return Counter(str(path.parent.relative_to(SOURCE)) for path in plain_modules().values())


def imports() -> dict[str, set[str]]:
    """Which modules of the package each one imports: lazy and type-checking imports included."""
    known = modules()
    edges: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    edges[name].add(full if full in known else str(node.module))
            elif isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names if alias.name in known}
    return edges


def cycles() -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    edges = imports()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            start = stack.index(module)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                components.append(sorted(component))

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return components


def verbal_names() -> list[str]:
    """Modules that are named with a verb's form instead of a noun."""
    pattern = re.compile(r"(ing|ed)$")
    return [
        name
        for name, path in plain_modules().items()
        if pattern.search(path.stem) and path.stem not in VERBAL_MODULES
    ]


def repeated_classes() -> dict[str, list[str]]:
    """Public class names that stand in more than one module."""
    places = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def dialect() -> Counter[str]:
    """How often each word of the old dialect stands in the package, in names and in prose."""
    words: Counter[str] = Counter()
    for path in modules().values():
        text = re.sub(r"[\s_]+", " ", path.read_text().replace("#", " "))
        text = NOT_DIALECT.sub("", text)
        for word in DIALECT:
            words[word] += len(re.findall(rf"\b{word}\b", text, re.IGNORECASE))
    return +words


def leaning_docstrings() -> list[str]:
    """Docstrings that begin "The same" and so lean on another one."""
    found = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                docstring = ast.get_docstring(node) or ""
                if docstring.startswith("The same"):
                    found.append(f"{module}: {docstring.splitlines()[0]}")
    return found


def private_functions_called_once() -> int:
    """Private functions whose name stands only twice in the package: defined and used once."""
    names: Counter[str] = Counter()
    private = set()
    for path in modules().values():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private.add(node.name)
            elif isinstance(node, ast.Name):
                names[node.id] += 1
            elif isinstance(node, ast.Attribute):
                names[node.attr] += 1
    return sum(names[name] == 1 for name in private)


# Journeys: which files of the package run when a user does a thing


class Trace:
    """Collects the files of the package whose functions run, in every thread, while it is active.

    Threads that start before the journey's step, such as a server's, are traced from their start.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_active = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """What `sys.setprofile` calls."""
        code = frame.f_code
        if self.is_active and event == "call" and code.co_name != "<module>":
            if code.co_filename.startswith(str(PACKAGE)):
                self.files.add(str(Path(code.co_filename).relative_to(PACKAGE)))


def append_journey(directory: Path) -> Iterator[Callable[[], object]]:
    """One row appended to a topic of the embedded log."""
    import headrace as hr

    with hr.open_log(f"file:{directory}/log") as log:
        log.create_topic("orders", schema="id BIGINT, amount DOUBLE", key="id")
        with log.producer("orders") as producer:
            producer.append({"id": 1, "amount": 2.0})
            yield lambda: producer.append({"id": 2, "amount": 3.0})


def batch_journey(directory: Path) -> Iterator[Callable[[], object]]:
    """A batch with a running aggregate, from cutting its tick to its commit."""
    import headrace as hr
    from headrace.testing.pipelines import PipelineTest

    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema="id BIGINT, amount DOUBLE", key="id")
    shop.view("totals", orders.group_by("id").aggregate(total=hr.agg.sum("amount")))
    with PipelineTest(shop, directory) as test:
        test.feed("orders", [{"id": 1, "amount": 2.0}])
        test.settle()
        test.feed("orders", [{"id": 1, "amount": 3.0}])
        yield test.settle


def window_journey(directory: Path) -> Iterator[Callable[[], object]]:
    """A row's way through a tumbling window, until the window is emitted."""
    import headrace as hr
    from headrace.testing.kernels import KernelTest

    shop = hr.Pipeline("shop")
    orders = shop.topic(
        "orders",
        schema="id BIGINT, at TIMESTAMP",
        key="id",
        event_time=hr.EventTime("at"),
    )
    windows = orders.window(hr.tumbling("1 minute")).group_by("id")
    test = KernelTest(windows.aggregate(n=hr.agg.count()))
    first = {"id": 1, "at": "2026-01-01T00:00:10Z"}
    del directory

    def emit() -> object:
        from datetime import datetime

        row = {**first, "at": datetime.fromisoformat("2026-01-01T00:00:10+00:00")}
        emitted = test.tick([row], watermark="2026-01-01T00:01:10Z")
        assert emitted
        return emitted

    yield emit


def lookup_journey(directory: Path) -> Iterator[Callable[[], object]]:
    """One row of a view by its key, over HTTP."""
    import urllib.request

    import headrace as hr
    from headrace.serve import server
    from headrace.testing.pipelines import PipelineTest

    shop = hr.Pipeline("shop")
    orders = shop.topic("orders", schema="id BIGINT, amount DOUBLE", key="id")
    shop.view("totals", orders.group_by("id").aggregate(total=hr.agg.sum("amount")))
    with PipelineTest(shop, directory) as test:
        test.feed("orders", [{"id": 1, "amount": 2.0}])
        test.settle()
        with server.start(test.state, test.log, port=0) as running:
            url = f"{running.address}/views/totals?key=1"

            def look_up() -> object:
                with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
                    return answer.read()

            yield look_up


def capture_journey(directory: Path) -> Iterator[Callable[[], object]]:
    """A change of a captured SQLite table, until it is in its topic."""
    import sqlite3
    from contextlib import closing

    import headrace as hr

    database = directory / "shop.db"
    log = f"file:{directory}/log"
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)")
        capture = hr.cdc.sqlite(database, tables=["customers"])
        capture.run(log=log, until_caught_up=True)
        connection.execute("INSERT INTO customers VALUES (1, 'Ada')")
        yield lambda: capture.run(log=log, until_caught_up=True)


JOURNEYS = {
    "append": append_journey,
    "tick to commit": batch_journey,
    "window": window_journey,
    "look-up": lookup_journey,
    "captured change": capture_journey,
}


def files_passed(name: str) -> set[str]:
    """The files of the package whose functions run during a journey."""
    trace = Trace()
    threading.setprofile(trace.profile)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for step in JOURNEYS[name](Path(scratch)):
                sys.setprofile(trace.profile)
                trace.is_active = True
                step()
                trace.is_active = False
                sys.setprofile(None)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return trace.files


def main(arguments: list[str]) -> None:
    """Print the figures."""
    lines = [len(path.read_text().splitlines()) for path in plain_modules().values()]
    print(f"modules {len(lines)}, lines {sum(lines)}, median {sorted(lines)[len(lines) // 2]}")
    crowded = {name: n for name, n in folders().items() if n > MAX_MODULES_IN_A_FOLDER}
    print(f"folders {len(folders())}, largest {folders().most_common(3)}, too large {crowded}")
    print(f"import cycles {cycles()}")
    print(f"modules that are no nouns {verbal_names()}")
    print(f"class names used twice {repeated_classes()}")
    print(f"private functions called once {private_functions_called_once()}")
    print(f"docstrings that lean on another {len(leaning_docstrings())}")
    print(f"words of the old dialect {dict(dialect().most_common())}")
    if "--journeys" in arguments:
        for name in JOURNEYS:
            files = files_passed(name)
            print(f"journey {name}: {len(files)} files: {', '.join(sorted(files))}")


if __name__ == "__main__":
    main(sys.argv[1:])
