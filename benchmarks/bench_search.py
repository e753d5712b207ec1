"""Search on streams: stored queries against passing documents, compared with Lucene's Monitor over
the same; growth to a million queries; adding them; the whole way on Spark.

Queries of two to four words over a vocabulary of 50,000, one in ten a phrase, one in ten with NOT;
documents of 100 Zipf-distributed words, in batches of 100, on one core. The queries' words are
drawn as the documents' are (thousands of matches a document), or all alike (about one).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

import headrace as hr
from benchmarks import search_peer
from benchmarks.report import Result, judged, limited, note, seconds
from benchmarks.state_runs import append, directory, new_log, session
from headrace.operators.search.index import QueryIndex, StoredQuery
from headrace.operators.search.parser import Language
from headrace.operators.search.syntax import Fields
from headrace.runtime.runner import Runner

WORDS, WORDS_A_DOCUMENT, BATCH, DOCUMENTS = 50_000, 100, 100, 2_000
PASSES, SPARK_ROUNDS = 3, 8
QUERIES, MANY = 100_000, 1_000_000
LANGUAGE = Language(Fields(("body",)))
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
Rng = np.random.Generator


class Words:
    """Words by chance: Zipf-distributed, or all alike."""

    def __init__(self, rng: Rng, *, zipf: bool) -> None:
        self._rng, weights = rng, 1 / np.arange(1, WORDS + 1) if zipf else np.ones(WORDS)
        self._up_to = np.cumsum(weights / weights.sum())

    def draw(self, count: int) -> list[str]:
        return [f"w{at}" for at in np.searchsorted(self._up_to, self._rng.random(count)).tolist()]


def query_lines(count: int, *, zipf: bool) -> list[str]:
    """As the peer reads them: "p" and a phrase, or "a" and words, with "-" before one that must not
    be there.
    """
    rng = np.random.default_rng(1)
    words, lengths, kinds = (
        Words(rng, zipf=zipf),
        rng.integers(2, 5, count).tolist(),
        rng.random(count).tolist(),
    )
    lines = []
    for length, kind in zip(lengths, kinds, strict=True):
        drawn = words.draw(length)
        drawn[-1] = f"-{drawn[-1]}" if 0.1 <= kind < 0.2 else drawn[-1]
        lines.append(" ".join(["p" if kind < 0.1 else "a", *drawn]))
    return lines


def as_query(line: str) -> str:
    """The query in Lucene's query language."""
    kind, *words = line.split(" ")
    return (
        f'"{" ".join(words)}"'
        if kind == "p"
        else " ".join(word if word[0] == "-" else f"+{word}" for word in words)
    )


def documents() -> list[str]:
    words = Words(np.random.default_rng(2), zipf=True)
    return [" ".join(words.draw(WORDS_A_DOCUMENT)) for _ in range(DOCUMENTS)]


def indexed(lines: list[str]) -> tuple[QueryIndex, float]:
    """The index, and how long it took to read and add the queries."""
    started = time.perf_counter()
    index = QueryIndex.empty(LANGUAGE).with_changes(
        {
            b"%09d" % number: StoredQuery.of(LANGUAGE, as_query(line))
            for number, line in enumerate(lines)
        }
    )
    return index, time.perf_counter() - started


@dataclass(frozen=True)
class Measured:
    """Documents a second by the clock and by CPU, how many matches there were, and the digest of
    them, as the peer makes it.
    """

    rate: float
    rate_by_cpu: float
    matches: int
    digest: int


def measured(index: QueryIndex, rows: pa.Table) -> Measured:
    """The median of some passes, behind one that warms up."""
    rates, rates_by_cpu = [], []
    for _ in range(1 + PASSES):
        wall, cpu = time.perf_counter(), time.process_time()
        count, digest = matched(index, rows)
        rates_by_cpu.append(rows.num_rows / (time.process_time() - cpu))
        rates.append(rows.num_rows / (time.perf_counter() - wall))
    return Measured(
        statistics.median(rates[1:]), statistics.median(rates_by_cpu[1:]), count, digest
    )


def matched(index: QueryIndex, rows: pa.Table) -> tuple[int, int]:
    count = digest = 0
    for first in range(0, rows.num_rows, BATCH):
        found = index.match(rows.slice(first, BATCH))
        count += len(found.documents)
        pairs = (found.documents + first).astype(np.uint64) * np.uint64(
            1_000_003
        ) + found.queries.astype(np.uint64)
        digest += int((pairs * _MULTIPLIER).sum(dtype=np.uint64))
    return count, digest % 2**64


def against_lucene(
    root: Path, texts: list[str], *, zipf: bool
) -> Iterator[tuple[Measured, Result]]:
    lines = query_lines(QUERIES, zipf=zipf)
    index, seconds_to_add = indexed(lines)
    ours = measured(index, pa.table({"body": texts}))
    (root / "queries").write_text("\n".join(lines) + "\n")
    (root / "documents").write_text("\n".join(texts) + "\n")
    peer = search_peer.run(root / "queries", root / "documents", BATCH)
    if (peer.matches, peer.digest) != (ours.matches, ours.digest):
        raise AssertionError(
            f"We found {ours.matches:,} matches and the Lucene Monitor {peer.matches:,}, or others."
        )
    about = {
        "queries": QUERIES,
        "matches_a_document": round(ours.matches / len(texts), 2),
        "batch": BATCH,
        "bytes_a_query": round(index.nbytes / len(index), 1),
    }
    about |= {
        "ours_by_cpu": round(ours.rate_by_cpu),
        "theirs_by_cpu": round(peer.rate_by_cpu),
        "ratio_by_cpu": round(ours.rate_by_cpu / peer.rate_by_cpu, 2),
    }
    what = f"queries of {'frequent' if zipf else 'any'} words"
    yield (
        ours,
        judged(
            "search",
            what,
            "documents/s",
            ours.rate,
            "Lucene Monitor",
            peer.rate,
            bar=5.0 if zipf else 1.2,
            better="higher",
            params=about,
        ),
    )
    yield (
        ours,
        limited(
            "search",
            f"adding 100,000 {what}",
            "s",
            seconds_to_add,
            limit=20.0,
            params={"lucene_seconds": round(peer.seconds_to_add, 1)},
        ),
    )


def on_spark(root: Path, lines: list[str], texts: list[str]) -> tuple[float, dict[str, float]]:
    """Documents a second from a topic through Spark to a topic, on two cores, when both workers
    have the queries; and its parameters for the report.
    """
    press = hr.Pipeline("press")
    articles = press.topic("articles", schema="id BIGINT, body STRING", key="id", partitions=2)
    queries = press.table(
        "queries", schema="query_id BIGINT, query STRING", key="query_id", partitions=2
    )
    press.write("alerts", articles.search(queries, query="query", text="body"), partitions=2)
    with session() as spark, new_log(root) as log:
        runner = Runner.start(press.plan(), log, spark, root / "state", shards=2)
        append(
            log,
            pa.table(
                {
                    "query_id": np.arange(len(lines)),
                    "query": [as_query(line) for line in lines],
                    "_change_type": ["insert"] * len(lines),
                }
            ),
            "queries",
        )
        seconds_to_add = seconds(lambda: stepped(runner))
        rates = []
        for number in range(SPARK_ROUNDS):
            append(
                log,
                pa.table({"id": np.arange(len(texts)) + number * len(texts), "body": texts}),
                "articles",
            )
            rates.append(len(texts) / seconds(lambda: stepped(runner)))
        about = {
            "documents_a_batch": len(texts),
            "seconds_to_add": round(seconds_to_add, 1),
            "state_bytes_a_query": round(runner.state_bytes() / len(lines), 1),
        }
        runner.close()
    return statistics.median(rates[SPARK_ROUNDS // 2 :]), about


def stepped(runner: Runner) -> None:
    """A tick of what there is, and all batches."""
    runner.cut(max_rows=MANY)
    while runner.step(1_000):
        continue


def results() -> Iterator[Result]:
    texts = documents()
    with directory() as root:
        rates = {}
        for zipf in (True, False):
            for ours, result in against_lucene(root, texts, zipf=zipf):
                rates[zipf] = ours.rate
                yield result
    note("search: a million queries")
    lines = query_lines(MANY, zipf=False)
    index, _ = indexed(lines)
    ours = measured(index, pa.table({"body": texts}))
    about = {
        "matches_a_document": round(ours.matches / len(texts), 2),
        "bytes_a_query": round(index.nbytes / len(index), 1),
    }
    yield judged(
        "search",
        "a million queries beside 100,000",
        "documents/s",
        ours.rate,
        "100,000 queries",
        rates[False],
        bar=0.2,
        better="higher",
        params=about,
    )
    del index
    with directory() as root:
        rate, params = on_spark(root, lines[:QUERIES], texts * 60)
        yield judged(
            "search",
            "from topic to topic on Spark, two cores",
            "documents/s",
            rate,
            "the kernel on two",
            2 * rates[False],
            bar=0.5,
            better="higher",
            params=params,
        )
