"""Every example runs in an empty directory and prints what it should. All run in this process, and
those that need Spark share the tests' session, as cells of one notebook would.
"""

import runpy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "01_produce_and_consume": "stored 1000\nfast read 1000\nslow read 300\nslow is behind by 700\n",
    "02_exactly_once": "crashed with 300 receipts\nin the end 1000 receipts for 1000 payments\n",
    "03_queue": (
        "sent to ada@example.com\nsent to grace@example.com\ndead:"
        ' {"recipient":"nobody","body":"Hello"}\n'
    ),
    "11_capture": (
        "the snapshot: [100, 100, 100, 100, 100], total 500\nafter two transfers: [70, 120, 110,"
        " 100, 100], total 500\nread and lost: 4 rows, before and after two updates\nafter a"
        " crash and one more transfer: [70, 120, 105, 104, 101], total 500\nevery change once,"
        " in order: [(0, 70), (1, 130), (1, 120), (2, 110), (2, 105), (3, 105), (3, 104), (4,"
        " 101)]\n"
    ),
    "12_dual_writes": (
        "by hand, the database has ['lamp for 20', 'rope for 5'] and the index ['lamp for"
        " 10']\nfollowed, round 1: the database has ['lamp for 40', 'rope for 5'] and the index"
        " ['lamp for 40', 'rope for 5']\nfollowed, round 2: the database has ['lamp for 80', 'rope"
        " for 5'] and the index ['lamp for 80', 'rope for 5']\n"
    ),
    "13_patterns": (
        "fraud: [('a', 1904.5, 3)]\nnot shipped: []\na new rule: [('d', 'much', 501.0)]\na rule"
        ' that cannot be parsed: ["pattern: The step suspicions.match has a pattern that cannot'
        " be read at position 5: this '(' is not closed.\"]\nthree days later, not shipped:"
        " [2]\ntried out, with no big payment: [('c', 3.0, 1), ('d', 1.0, 1)]\n"
    ),
    "14_bank_account": (
        "refused: The account has 100, which is less than 500.\nada has 70 and ben 30\nada's"
        " balances: [0, 100, 70]\nin order: [('ada', 'Opened'), ('ben', 'Opened'), ('ada',"
        " 'Deposited'), ('ada', 'Withdrawn'), ('ben', 'Deposited')]\n"
    ),
    "15_shopping_cart": (
        "bought: {'boots': 2}\nthe old cart: {'rope': 1}\ncart 1: [(1, 'ItemPut', 'lamp'), (2,"
        " 'ItemPut', 'boots'), (3, 'ItemTakenOut', 'lamp'), (4, 'Bought', None)]\nhesitated over:"
        " [('lamp', 2), ('rope', 2)]\n"
    ),
    "16_seat_reservation": (
        "20 people asked for one seat, 1 got it\nafter ten minutes: 0 held, sold {'B2':"
        " 'ada'}\nrefused: Seat B2 is sold.\nwhat happened: ['Held', 'Held', 'Confirmed',"
        " 'Expired', 'Held']\n"
    ),
    "17_alerts": (
        "first:\n  (1, 'ada', 'storm, \"high tide\"~2')\n  (2, 'cho', 'language:en,"
        " words:>500')\ndead letter: query: A parenthesis is never closed (at character"
        " 6):\nthen: (3, 'ben', 'cafe')\nmatches among past articles: [1]\n"
    ),
    "19_metrics_server": (
        "api: 100 calls in a minute, 1.7 a second\np50: 204 ms, yesterday 102, last week 51\np95:"
        " 384 ms, yesterday 192, last week 96\np99: 400 ms, yesterday 200, last week 100\n"
    ),
    "18_reach": (
        '{"url":"/tide","reach":2,"found":true}\n{"url":"/wind","reach":2,"found":true}\n'
        '{"url":"/rain","reach":null,"found":null}\n'
    ),
}
EXPECTED_ON_SPARK = {
    "04_spark": "after run 1: 40 hot readings\nafter run 2: 40 hot readings\n",
    "05_pipeline": (
        "revenue as of tick 1\n{'region': 'north', 'orders': 172, 'revenue': 600.0}\n{'region':"
        " 'south', 'orders': 85, 'revenue': 297.0}\nall numbers are correct\n"
    ),
    "06_windows": (
        "1. Two tills, rows out of order. Till b is behind:\n   orders waits for the producer b:"
        " its newest row is of 2026-03-01 12:00:05.000+00:00\n2. Till b moves on, and the first"
        " minute is emitted, with the hour that contains it:\n   minutes: 12:00 north 8.00\n  "
        " hours: 12:00 north 8.00\n3. A row of the first minute arrives late and corrects both:\n  "
        " minutes: update_preimage 12:00 north 8.00\n   minutes: update_postimage 12:00 north"
        " 108.00\n   hours: update_preimage 12:00 north 8.00\n   hours: update_postimage 12:00"
        " north 108.00\n"
    ),
    "07_timeline": (
        "at first: ann reads ['Good morning']; readers of each post: {1: 1, 2: 1000}\nann follows"
        " the star, who posts again: ann reads ['Good morning', 'New record!', 'Thank you all'];"
        " readers of each post: {1: 1, 2: 1001, 3: 1001}\nann unfollows bob, and the star deletes a"
        " post: ann reads ['Thank you all']; readers of each post: {3: 1001}\n"
    ),
    "08_search_and_click": (
        "boots: 3 of 10 searches led to a click, 30%\nlamp: 1 of 1 searches led to a click,"
        " 100%\nrope: 1 of 10 searches led to a click, 10%\n"
    ),
    "09_tax_at_sale": (
        "order 1 of 30 June in eu: tax 20.0\norder 2 of 01 July in eu: tax 25.0\norder 3 of 01"
        " August in us: tax 5.0\norder 4 of 01 March in eu: tax 20.0\norder 5 of 01 August in mars:"
        " tax None\neu 0.2 from 01 January to 01 July\neu 0.25 from 01 July to None\nus 0.05 from"
        " 01 January to None\n"
    ),
    "10_leaderboard": (
        "after the first rounds: eve 90, ada 35, cho 25; best of each country: {'kr': 'cho', 'uk':"
        " 'eve'}\neve is disqualified, ben moves and scores: ben 60, ada 35, cho 25; best of each"
        " country: {'kr': 'ben', 'uk': 'ada'}\n"
    ),
}


def run_example(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.delenv("HEADRACE_LOG", raising=False)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_tested() -> None:
    assert sorted([*EXPECTED, *EXPECTED_ON_SPARK]) == sorted(
        path.stem for path in EXAMPLES.glob("[0-9]*.py")
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_it_should(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_example(name, tmp_path, monkeypatch)
    assert capfd.readouterr().out == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED_ON_SPARK)
def test_an_example_on_spark_prints_what_it_should(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spark: "SparkSession",
) -> None:
    monkeypatch.setenv("FOLLOWERS", "1000")
    monkeypatch.setattr(type(spark), "stop", lambda _session: None)  # the session is shared
    # Spark resolves it where its JVM was started: one of an earlier run would be resumed from.
    shutil.rmtree("checkpoint", ignore_errors=True)
    run_example(name, tmp_path, monkeypatch)
    assert capsys.readouterr().out == EXPECTED_ON_SPARK[name]
