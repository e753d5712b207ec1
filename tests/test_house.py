"""Holds the house to its order: the direction of imports, names, folders, prose, what `import
headrace` may load, and what may not stand in any file. `scripts/house.py` counts.
"""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


def _load_house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    spec.loader.exec_module(module)
    return module


house: Any = _load_house()

BASE = {
    "_version",
    "amqp",
    "atomic_file",
    "connector",
    "durations",
    "error_policy",
    "errors",
    "mysql",
    "names",
    "public_addresses",
    "retry",
    "run_status",
    "secrets",
}
"""Modules at the top of the package that every layer may use."""
MAY_IMPORT = {
    "columnar": set(),
    "types": {"columnar"},
    "log": {"columnar", "types"},
    "expressions": {"columnar", "types"},
    "operators": {"columnar", "types", "expressions"},
    "views": {"columnar", "types", "log", "operators"},
    "engine": {"columnar", "types", "expressions", "log", "operators", "views"},
    "plan": {"columnar", "types", "expressions", "log", "operators"},
    "cdc": {"columnar", "types", "expressions", "log", "operators"},
    "sources": {"columnar", "types", "log", "cdc"},
    "sinks": {"columnar", "types", "log", "operators", "views"},
    "http": set(),
    "serve": {"columnar", "types", "log", "views", "engine", "events", "http"},
    "gateways": {"columnar", "types", "log", "http"},
    "events": {"columnar", "types", "log"},
    "alerts": {"columnar", "types", "log", "sinks"},
    "calls": {"columnar", "types", "log", "operators", "engine"},
    "runtime": {
        "columnar",
        "types",
        "expressions",
        "log",
        "operators",
        "views",
        "engine",
        "plan",
        "cdc",
        "sources",
        "sinks",
        "gateways",
        "alerts",
        "calls",
        "http",
        "serve",
    },
}
"""The picture of ARCHITECTURE.md. `pipeline`, `sql`, `testing` and `cli` stand above these."""
APPLICATIONS = {
    "headrace.alerts.watch": {"gateways"},
    "headrace.events.privacy.excision": {"runtime", "sinks"},
    "headrace.events.projection": {"pipeline"},
}
"""Modules that stand above their package, because they use what is built on it; nothing below
imports them."""
ON_LOAD = {
    "pyspark": (
        "headrace/log/spark",
        "headrace/engine/",
        "headrace/runtime/",
        "headrace/pipeline/",
    )
}
AT_ALL = {
    "confluent_kafka": ("headrace/log/kafka/",),
    "psycopg2": ("headrace/cdc/postgres_source/",),
    "psycopg": ("headrace/sinks/postgres_target",),
    "deltalake": ("headrace/sinks/delta_target",),
    "pyiceberg": ("headrace/sinks/iceberg_target",),
    "obstore": ("headrace/sinks/files/object_store",),
    "tantivy": ("headrace/sinks/search_target",),
    "redis": ("headrace/sinks/redis_target",),
    "cryptography": ("headrace/events/privacy/vault",),
    "eventsourcing": ("headrace/events/eventsourcing",),
    "pymysql": ("headrace/cdc/mysql_source/", "headrace/sinks/mysql_target"),
    "pymysqlreplication": ("headrace/cdc/mysql_source/",),
    "zmq": ("headrace/gateways/zeromq_gateway",),
    "IPython": ("headrace/pipeline/view",),
    "pika": ("headrace/amqp",),
    "typer": ("headrace/cli/",),
    "rich": ("headrace/cli/",),
    "starlette": ("headrace/http/", "headrace/serve/", "headrace/gateways/http_"),
    "uvicorn": ("headrace/http/",),
    "datasketches": ("headrace/operators/aggregates/sketches",),
}
"""Where a heavy or optional package may be imported: when the module loads, or at all."""


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_no_module_imports_itself_in_a_circle() -> None:
    assert house.cycles() == []


def test_imports_point_one_way() -> None:
    wrong = []
    for module, imported in house.imports().items():
        package = package_of(module)
        allowed = BASE | MAY_IMPORT.get(package, set()) | APPLICATIONS.get(module, set())
        if package not in MAY_IMPORT:
            continue
        wrong += [
            f"{module} imports {other}"
            for other in sorted(imported)
            if package_of(other) not in allowed | {package}
        ]
    assert not wrong


def test_nothing_imports_the_command_line() -> None:
    users = {
        module
        for module, imported in house.imports().items()
        if any(package_of(other) == "cli" for other in imported) and package_of(module) != "cli"
    }
    assert users == set()


def test_top_level_applications_are_not_imported_from_below() -> None:
    below = set(MAY_IMPORT) - {"runtime"}
    users = {
        module
        for module, imported in house.imports().items()
        if imported & set(APPLICATIONS)
        and package_of(module) in below
        and module not in {f"headrace.{package}" for package in below}
    }
    assert users == set()


def test_modules_are_nouns() -> None:
    assert house.verbal_names() == []


def test_class_names_are_unique() -> None:
    assert house.repeated_classes() == {}


def test_no_folder_is_crowded() -> None:
    crowded = {
        folder: modules
        for folder, modules in house.folders().items()
        if modules > house.MAX_MODULES_IN_A_FOLDER
    }
    assert crowded == {}


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"util", "utils", "common", "core", "helper", "helpers", "misc"}
    files = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in files if drawers & {path.stem, *path.relative_to(ROOT).parts}]


def test_every_module_says_what_it_is() -> None:
    silent = [
        name
        for name, path in house.modules().items()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_no_docstring_leans_on_another() -> None:
    assert house.leaning_docstrings() == []


def test_the_old_dialect_is_gone() -> None:
    left = house.dialect()
    assert sum(left.values()) <= house.MAX_DIALECT_WORDS, left


@pytest.mark.parametrize("journey", house.JOURNEYS)
def test_a_journey_passes_few_files(journey: str) -> None:
    # What runs in the background meanwhile does not belong to the journey: the shorter of two.
    files = min((house.files_passed(journey) for _ in range(2)), key=len)
    assert 0 < len(files) <= house.MAX_FILES_PASSED[journey], sorted(files)


def imports(tree: ast.AST, *, lazy: bool) -> Iterator[str]:
    """Modules imported when the file loads; with `lazy`, also those imported inside functions."""
    for node in ast.iter_child_nodes(tree):
        is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith(
            "TYPE_CHECKING"
        )
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_type_checking or (not lazy and is_function):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        yield from imports(node, lazy=lazy)


def test_heavy_packages_are_imported_where_they_belong() -> None:
    wrong = []
    for path in house.modules().values():
        location = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text())
        for rules, lazy in ((ON_LOAD, False), (AT_ALL, True)):
            packages = {name.split(".")[0] for name in imports(tree, lazy=lazy)}
            wrong += [
                f"{location} imports {package}"
                for package, homes in rules.items()
                if package in packages and not location.startswith(homes)
            ]
    assert wrong == []


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
        "datasketches",
    )
    script = f"import sys, headrace; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# Public names


def public_objects() -> Iterator[tuple[str, Any]]:
    import headrace

    for name in headrace.__all__:
        value = getattr(headrace, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value
        elif inspect.ismodule(value):
            for member in getattr(value, "__all__", ()):
                yield f"{name}.{member}", getattr(value, member)


def test_every_public_name_can_be_imported() -> None:
    import headrace

    assert sorted(headrace.__all__) == list(headrace.__all__) == dir(headrace)
    assert [name for name in headrace.__all__ if getattr(headrace, name, None) is None] == []
    with pytest.raises(AttributeError, match="did you mean 'open_log'"):
        _ = headrace.opn_log


def test_every_public_name_is_documented() -> None:
    silent = []
    for name, value in public_objects():
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not inspect.getdoc(value):
            silent.append(name)
        if inspect.isclass(value) and value.__module__.startswith("headrace"):
            for member, function in vars(value).items():
                if member.startswith("_") or not inspect.isfunction(function):
                    continue
                if not inspect.getdoc(getattr(value, member)):
                    silent.append(f"{name}.{member}")
    assert silent == []


def test_the_reference_names_every_public_name() -> None:
    import headrace

    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    missing = [
        name
        for name in headrace.__all__
        if name != "__version__" and not re.search(rf"\b{name}\b", pages)
    ]
    assert missing == []


# Pages


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_a_page_that_everybody_reads_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= 250


def test_the_architecture_fits_into_100_columns() -> None:
    wide = [line for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines() if len(line) > 100]
    assert wide == []


# Files


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
    """The host that pip uses on this machine, if it is not the public one: our files do not name
    it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    addresses = re.findall(r"https?://[^'\"\s]+", done.stdout)
    hosts = {urlsplit(address).hostname or "" for address in addresses}
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
