"""Keeps the house: sizes, names, docstrings, the direction of imports, what `import headrace` may
load, and what may not be in any file.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
BANNED_NAMES = {"util", "utils", "common", "core", "helper", "helpers", "misc"}

# Who may not import whom: a package of ours, and the packages it must not know.
ABOVE_THE_LOG = {
    "alerts",
    "events",
    "cdc",
    "gateways",
    "engine",
    "operators",
    "pipeline",
    "sinks",
    "serve",
    "cli",
}
MUST_NOT_IMPORT = {
    "log": ABOVE_THE_LOG,
    "operators": {
        "log",
        "engine",
        "pipeline",
        "sinks",
        "serve",
        "cli",
        "cdc",
        "events",
        "gateways",
    },
    "engine": {"pipeline", "serve", "cli"},
    "alerts": {"engine", "pipeline", "serve", "gateways", "cli"},
    "sinks": {"engine", "pipeline", "cli", "alerts"},
    "serve": {"engine", "pipeline", "cli"},
    **{
        package: {"cli"}
        for package in ("events", "cdc", "gateways", "pipeline", "testing", "errors")
    },
}
# The journal of ticks stands on the log alone, and says what a view contains.
BUT_FOR = {"serve": {"headrace.engine.ticks"}}
# Who may import a heavy or optional package: when the module loads, or at all.
ON_LOAD = {
    "pyspark": (
        "headrace/log/spark",
        "headrace/engine/",
        "headrace/pipeline/",
        "headrace/sinks/",
        "headrace/spark_session",
    )
}
AT_ALL = {
    "confluent_kafka": ("headrace/log/kafka/", "headrace/testing/"),
    "psycopg2": ("headrace/cdc/postgres_source/",),
    "psycopg": ("headrace/sinks/postgres_target",),
    "deltalake": ("headrace/sinks/delta_target",),
    "tantivy": ("headrace/sinks/search_target",),
    "redis": ("headrace/sinks/redis_target",),
    "cryptography": ("headrace/events/vault",),
    "eventsourcing": ("headrace/events/eventsourcing",),
    "pymysql": ("headrace/cdc/mysql_source/",),
    "pymysqlreplication": ("headrace/cdc/mysql_source/",),
    "zmq": ("headrace/gateways/zeromq_gateway",),
    "IPython": ("headrace/pipeline/notebook",),
    "pika": ("headrace/amqp_connection",),
    "typer": ("headrace/cli/",),
    "rich": ("headrace/cli/",),
    "starlette": ("headrace/serve/", "headrace/gateways/http_"),
    "uvicorn": ("headrace/serve/",),
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = python_files("src")
EVERYTHING = python_files("src", "tests", "benchmarks", "examples")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST, *, lazy: bool) -> Iterator[str]:
    """Modules imported when the file loads; with `lazy`, those imported inside functions too.
    Imports for types only do not count.
    """
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node) or (
            not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node, lazy=lazy)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(parse(path)), f"{relative(path)} has no docstring"


@pytest.mark.parametrize("path", EVERYTHING, ids=relative)
def test_files_and_functions_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines"
    functions = (
        node
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = {
        node.name: length
        for node in functions
        if (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long, f"{relative(path)} has functions that are too long: {long}"


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    banned = [
        relative(path)
        for path in EVERYTHING
        if BANNED_NAMES & {path.stem, *path.relative_to(ROOT).parts}
    ]
    assert not banned


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(SOURCE / "headrace").with_suffix("").parts
    forbidden = {f"headrace.{name}" for name in MUST_NOT_IMPORT.get(parts[0], set())}
    allowed = tuple(BUT_FOR.get(parts[0], ()))
    wrong = [
        name
        for name in imports(parse(path), lazy=True)
        if ".".join(name.split(".")[:2]) in forbidden and not (allowed and name.startswith(allowed))
    ]
    assert not wrong, f"{relative(path)} must not import {wrong}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_heavy_packages_are_imported_where_they_belong(path: Path) -> None:
    place = path.relative_to(SOURCE).as_posix()
    for rules, lazy in ((ON_LOAD, False), (AT_ALL, True)):
        packages = {name.split(".")[0] for name in imports(parse(path), lazy=lazy)}
        wrong = [
            package
            for package, homes in rules.items()
            if package in packages and not place.startswith(homes)
        ]
        assert not wrong, f"{place} must not import {wrong}{'' if lazy else ' when it loads'}"


def test_importing_headrace_loads_nothing_heavy() -> None:
    heavy = (
        "pyspark",
        "py4j",
        "confluent_kafka",
        "typer",
        "rich",
        "pandas",
        "pyarrow",
        "lmdb",
        "starlette",
        "uvicorn",
    )
    script = f"import sys, headrace; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    import headrace

    assert sorted(headrace.__all__) == list(headrace.__all__) == dir(headrace)
    assert [name for name in headrace.__all__ if getattr(headrace, name, None) is None] == []
    with pytest.raises(AttributeError, match="did you mean 'open_log'"):
        _ = headrace.opn_log


def git(*arguments: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_nothing_ignored_is_tracked() -> None:
    ignored = git("ls-files", "--cached", "--ignored", "--exclude-standard")
    assert not ignored, f"{len(ignored)} ignored files are tracked, such as {ignored[:3]}"


def package_hosts() -> set[str]:
    """The host that pip is told to use on this machine, if it is not the public one: it has no
    place in our files.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    hosts = {
        urlsplit(address).hostname or ""
        for address in re.findall(r"https?://[^'\"\s]+", done.stdout)
    }
    return hosts - {"", "pypi.org", "files.pythonhosted.org"}


def test_no_file_names_the_machine_it_was_written_on() -> None:
    slash = "/"
    words = [
        f"{slash}work{slash}",
        f"{slash}root{slash}",
        f"{slash}home{slash}",
        f"bash{'_'}jobs",
        f"index{'-'}url",
        *package_hosts(),
    ]
    pattern = re.compile("|".join(map(re.escape, words)))
    found = []
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        path = ROOT / name
        if name.startswith(".venv/") or path.is_symlink() or not path.is_file():
            continue
        lines = path.read_bytes().decode("utf-8", "replace").splitlines()
        found += [
            f"{name}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    assert not found
