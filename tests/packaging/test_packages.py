"""The wheel and the source archive, built as for a release, and installed where nothing else is.

In the short form the dependencies are borrowed from the environment of the tests; the long one
fetches them, for each extra in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from headrace import __version__

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "": "headrace.log",
    "kafka": "confluent_kafka",
    "registry": "confluent_kafka.schema_registry.avro, fastavro",
    "postgres": "psycopg, psycopg2",
    "mysql": "pymysqlreplication",
    "redis": "redis",
    "zeromq": "zmq",
    "amqp": "pika",
    "mqtt": "paho.mqtt.client",
    "search": "tantivy, snowballstemmer",
    "events": "eventsourcing, cryptography",
    "delta": "deltalake",
    "iceberg": "pyiceberg.catalog.sql",
    "objectstore": "obstore",
    "connect": "pyspark.sql.connect.session",
}
"""What can be imported once an extra is installed."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, and the wheel made from it: so the archive is whole."""
    into = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", into, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return into


def wheel_in(directory: Path) -> Path:
    return next(directory.glob("*.whl"))


def test_the_wheel_has_the_whole_package_and_nothing_else(built: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "src", "examples/shop.py", "examples/shop_demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    with ZipFile(wheel_in(built)) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        name.removeprefix("src/") if name.startswith("src/") else f"headrace/{name}"
        for name in tracked
    }
    assert packed == expected, "the package, and the example that the demo runs"
    assert {
        "headrace/py.typed",
        "headrace/serve/page/index.html",
        "headrace/serve/page/board.js",
    } <= packed


def test_the_source_archive_has_what_it_takes_to_test_it(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "tests/conftest.py",
        "src/headrace/__init__.py",
    } <= names


def test_every_extra_is_tried() -> None:
    assert set(EXTRAS) - {""} == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}


def installed(environment: Path, *options: str, what: str) -> Path:
    """A new environment with our wheel in it; returns its programs' directory."""
    venv.create(environment, symlinks=True)
    programs = environment / "bin"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(programs / "python"),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *options,
        what,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return programs


def said_by(*command: str | Path, where: Path) -> str:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "HEADRACE_LOG"}
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=where, env=clean
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_usable(programs: Path, where: Path) -> None:
    headrace = programs / "headrace"
    assert said_by(headrace, "--version", where=where).strip() == f"headrace {__version__}"
    origin = said_by(
        programs / "python", "-c", "import headrace; print(headrace.__file__)", where=where
    )
    assert Path(origin.strip()).is_relative_to(programs.parent), "this is not the wheel's"
    (where / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    said_by(
        headrace,
        "--log",
        "file:log",
        "topic",
        "create",
        "numbers",
        "--schema",
        "n BIGINT",
        where=where,
    )
    said_by(headrace, "--log", "file:log", "produce", "numbers", "rows.jsonl", where=where)
    lines = said_by(
        headrace, "--log", "file:log", "consume", "numbers", "--json", where=where
    ).splitlines()
    assert [json.loads(line)["n"] for line in lines] == [1, 2]


def test_the_wheel_works_where_only_its_dependencies_are(built: Path, tmp_path: Path) -> None:
    programs = installed(tmp_path / "env", "--no-deps", what=str(wheel_in(built)))
    own = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    assert_usable(programs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_installs_into_an_empty_environment(
    extra: str, built: Path, tmp_path: Path
) -> None:
    chosen = f"headrace[{extra}]" if extra else "headrace"
    programs = installed(tmp_path / "env", what=f"{chosen} @ {wheel_in(built).as_uri()}")
    assert_usable(programs, tmp_path)
    said_by(programs / "python", "-c", f"import {EXTRAS[extra]}", where=tmp_path)
