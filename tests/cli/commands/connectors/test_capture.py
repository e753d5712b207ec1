"""`headrace capture`: from a URL and from a file, asked for a snapshot, removed, and refused."""

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headrace as hr
from headrace.cdc.capture import CaptureStatus
from headrace.cli import app
from headrace.cli.commands.connectors.capture import progress_bar, status_line


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
        db.execute("INSERT INTO items VALUES (1, 'a'), (2, 'b')")
    db.close()
    return path


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["--log", "file:data", "capture", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_a_url_is_captured_asked_again_and_removed(shop: Path) -> None:
    assert "2 rows" in run(
        "sqlite:shop.db", "--table", "items", "--prefix", "db.", "--until-caught-up"
    )
    assert "Requested that shop reads items again" in run(
        "sqlite:shop.db", "--prefix", "db.", "--snapshot", "items"
    )
    run("sqlite:shop.db", "--prefix", "db.", "--until-caught-up")
    with hr.open_log("file:data") as log:
        assert log.end_offsets("db.items") == {0: 4}
    assert "removed trigger _headrace_items_delete" in run("sqlite:shop.db", "--remove")
    assert "nothing to remove" in run("sqlite:shop.db", "--remove")


def test_a_file_declares_captures(shop: Path) -> None:
    Path("captures.py").write_text(
        "import headrace as hr\none = hr.cdc.sqlite('shop.db', name='one', prefix='one.')\ntwo ="
        " hr.cdc.sqlite('shop.db', name='two', prefix='two.')\n"
    )
    message = run("captures.py", "--until-caught-up", "--name", "two")
    assert "Capturing two (sqlite) into file:data" in message
    with hr.open_log("file:data") as log:
        assert log.topics() == ["two.items"]
        assert json.loads(log.note("cdc.two") or "")["tables"]["items"]["topic"] == "two.items"


def test_the_files_of_a_directory_are_captured_once(shop: Path) -> None:
    (shop.parent / "in").mkdir()
    (shop.parent / "in" / "a.csv").write_text("id,name\n1,a\n2,b\n")
    arguments = ("dir:in/*.csv", "--topic", "items", "--option", "every=20 ms", "--until-caught-up")
    assert "does not exist" in run(*arguments, code=1)
    schema = ("--schema", "id BIGINT, name STRING")
    assert "2 rows" in run(*arguments, *schema)
    (shop.parent / "in" / "b.csv").write_text("id,name\n3,c\nx,d\n")
    assert "1 record became dead letters" in run(*arguments)
    run(*arguments)
    with hr.open_log("file:data") as log:
        assert [row["id"] for row in log.read("items").to_pylist()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("oracle://x/y",), "oracle: is not a database that can be captured"),
        (("sqlite:none.db", "--until-caught-up"), "There is no SQLite database"),
        (("empty.py",), "declares no capture"),
        (("captures.py", "--name", "tow"), "did you mean 'two'"),
        (("captures.py", "--table", "items"), "can be given only with a URL"),
        (("dir:in",), "names no topic"),
        (("dir:in", "--topic", "a", "--option", "colour=red"), "no setting 'colour'"),
        (("sqlite:shop.db", "--option", "colour=red"), "no setting 'colour'"),
        (("sqlite:shop.db", "--schema", "id BIGINT"), "no setting 'schema'"),
    ],
)
def test_arguments_that_are_refused(shop: Path, arguments: tuple[str, ...], message: str) -> None:
    Path("empty.py").write_text("")
    Path("captures.py").write_text(
        "import headrace as hr\ntwo = hr.cdc.sqlite('shop.db', name='two')\n"
    )
    assert message in run(*arguments, code=1)


def test_choices_are_made_on_the_command_line(shop: Path) -> None:
    with sqlite3.connect(shop) as db:
        db.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, mail TEXT, pass TEXT, age INTEGER)")
        db.execute("INSERT INTO users VALUES (1, 'a@b.c', 'secret', 30), (2, 'x', 'secret', 3)")
    db.close()
    choices = (
        *("--table", "users", "--topic", "the_{table}", "--exclude", "*.pass"),
        *("--mask", "users.mail=-", "--where", "users=age > 18", "--snapshot-mode", "initial"),
    )
    run("sqlite:shop.db", *choices, "--until-caught-up")
    with hr.open_log("file:data") as log:
        (row,) = log.read("the_users").to_pylist()
        assert (row["id"], row["mail"], row["age"], "pass" in row) == (1, "-", 30, False)
    report = run("sqlite:shop.db", "--status")
    assert "lag seconds" in report
    assert "1" in report
    assert json.loads(run("sqlite:shop.db", "--status", "--json"))["rows"] == 1
    assert "pauses its snapshots" in run("sqlite:shop.db", "--pause-snapshots")
    assert "reads users again" in run(
        "sqlite:shop.db", "--snapshot", "users", "--condition", "age > 20"
    )
    run("sqlite:shop.db", "--resume-snapshots")
    assert "has no =" in run("sqlite:shop.db", "--mask", "users.mail", code=2)


def test_a_run_that_is_to_catch_up_fails_if_a_table_is_not_followed(shop: Path) -> None:
    run("sqlite:shop.db", "--until-caught-up")
    rule = ("--mask", "items.nam=-")
    assert "but for items" in run("sqlite:shop.db", *rule, "--until-caught-up", code=1)
    assert "items is not followed any more" in run("sqlite:shop.db", "--status")
    run("sqlite:shop.db", "--snapshot", "items")
    run("sqlite:shop.db", "--until-caught-up")
    with hr.open_log("file:data") as log:
        assert log.end_offsets("items") == {0: 4}


def test_a_host_that_is_not_there_ends_the_run_with_a_code(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg2")
    monkeypatch.setattr("headrace.cdc.capture.CATCH_UP_PATIENCE_S", 0.3)
    message = run("postgresql://x@127.0.0.1:1/y", "--until-caught-up", code=1)
    assert "cannot be reached" in message


def test_the_status_line_says_how_far_it_is() -> None:
    status = CaptureStatus(
        "shop",
        rows=500,
        changes=10,
        position="7",
        snapshots={"items": (500, 2000)},
        source={"wal_status": "reserved", "retained_bytes": 5_000_000},
    )
    message = status_line(status, 100.0)
    assert (
        message
        == "shop: items [#####...............] 500 of about 2,000 rows, 15.0 s left; 10 changes,"
        " 100 rows/s, at 7; wal status: reserved; retained bytes: 5.0 MB"
    )
    assert progress_bar(3, 0) == "[" + "#" * 20 + "]"
