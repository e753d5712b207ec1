"""Other packages bring connectors by entry points: `headrace sync` and `headrace capture` know
their URLs, and what is wrong with a package is said.
"""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.connector import PluginGroup
from headrace.errors import ConfigurationError, InputError

Install = Callable[..., None]

LEDGER = """
from headrace.sinks import Sink

def declare(url, *, table=None, key=()):
    return Sink(kind="ledger", opener=print, table=table, key=key, options={"url": url})

def anything(url, **settings):
    return url
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package: its name, its entry points and a module."""

    def install(package: str, points: dict[str, str], source: str = LEDGER) -> None:
        site = tmp_path / package
        information = site / f"{package}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
        lines = [f"{scheme} = {where}" for scheme, where in points.items()]
        (information / "entry_points.txt").write_text(
            "\n".join(["[headrace.sinks]", *lines, "[headrace.sources]", *lines])
        )
        (site / f"{package}.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return install


def test_a_url_of_an_installed_package_is_a_sink(install: Install) -> None:
    install("hr_ledger", {"ledger": "hr_ledger:declare"})
    sink = hr.sinks.from_url("ledger://host/book", table="orders")
    assert (sink.kind, sink.table, sink.options) == (
        "ledger",
        "orders",
        {"url": "ledger://host/book"},
    )


def test_a_plugin_cannot_replace_a_built_in_sink(install: Install) -> None:
    install("hr_ledger", {"sqlite": "hr_ledger:declare"})
    assert hr.sinks.from_url("sqlite:a.db").options == {"path": "a.db"}


def test_an_unknown_scheme_names_the_nearest_of_all(install: Install) -> None:
    install("hr_ledger", {"ledger": "hr_ledger:declare"})
    with pytest.raises(InputError, match=r"ledgr: is not a sink: .*'ledger'[\s\S]*headrace.sinks"):
        hr.sinks.from_url("ledgr://host")


def test_a_setting_that_a_plugin_lacks_is_refused_by_name(install: Install) -> None:
    install("hr_ledger", {"ledger": "hr_ledger:declare"})
    with pytest.raises(InputError, match="hr_ledger has no setting 'mode'"):
        hr.sinks.from_url("ledger://host", mode="append")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("hr_ledger:missing", r"hr_ledger:missing of the package hr_ledger, cannot be imported"),
        ("hr_gone:declare", r"cannot be imported: No module named 'hr_gone'"),
        ("hr_ledger:anything", r"hr_ledger returned str, not Sink"),
    ],
)
def test_a_broken_plugin_says_whose_it_is(install: Install, where: str, message: str) -> None:
    install("hr_ledger", {"ledger": where})
    with pytest.raises(ConfigurationError, match=message):
        hr.sinks.from_url("ledger://host")


def test_two_packages_for_one_scheme_are_refused(install: Install) -> None:
    install("hr_ledger", {"ledger": "hr_ledger:declare"})
    install("hr_other", {"ledger": "hr_other:declare"})
    with pytest.raises(ConfigurationError, match="hr_ledger, hr_other"):
        hr.sinks.from_url("ledger://host")


def test_a_source_gets_only_the_settings_that_were_given(install: Install) -> None:
    source = """
import headrace as hr

def declare(url, *, topic):
    return hr.cdc.sqlite("other.db", name=topic)
"""
    install("hr_mail", {"mail": "hr_mail:declare"}, source)
    assert hr.cdc.from_url("mail://host", topic="letters").name == "letters"


def test_the_schemes_of_a_group_are_listed(install: Install) -> None:
    install("hr_ledger", {"ledger": "hr_ledger:declare", "book": "hr_ledger:declare"})
    assert {"book", "ledger"} <= set(PluginGroup("headrace.sinks", hr.sinks.Sink).schemes())


PLUGINS = sorted((Path(__file__).parents[1] / "examples" / "plugins").glob("*/pyproject.toml"))
DECLARED: dict[str, Callable[[str], Any]] = {
    "headrace.sources": lambda scheme: hr.sources.from_url(f"{scheme}://host/a", topic="rows"),
    "headrace.sinks": lambda scheme: hr.sinks.from_url(f"{scheme}:/a", table="rows"),
    "headrace.gateways": lambda scheme: hr.gateways.from_url(f"{scheme}://host:1", topics="rows"),
}


@pytest.mark.parametrize("project", PLUGINS, ids=lambda path: path.parent.name)
def test_an_example_is_found_by_its_url_once_it_is_installed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tomllib.loads(project.read_text())["project"]
    module = package["name"].replace("-", "_")
    if module == "headrace_redis":
        pytest.importorskip("redis")
    information = tmp_path / f"{module}-{package['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Name: {package['name']}\nVersion: {package['version']}\n"
    )
    lines = []
    for group, points in package["entry-points"].items():
        lines += [f"[{group}]", *(f"{scheme} = {where}" for scheme, where in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(project.parent)
    for group, points in package["entry-points"].items():
        for scheme in points:
            assert DECLARED[group](scheme).kind == scheme
    code = project.with_name(f"{module}.py").read_text()
    assert len(code.splitlines()) < 100
