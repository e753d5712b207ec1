"""Questions to the stream: how many people can have seen an address? All followers of all who
posted it, each once. The table is kept up to date; a question meets it as of its tick.

Run it from anywhere: python examples/18_reach.py. It runs in this process, with the kit for tests,
and asks over HTTP as any program would.
"""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import headrace as hr
from headrace.serve.server import start
from headrace.testing.pipelines import PipelineTest

network = hr.Pipeline("network")
posts = network.table("posts", schema="url STRING, poster STRING", key=["url", "poster"])
follows = network.table(
    "follows", schema="poster STRING, follower STRING", key=["poster", "follower"]
)
reach = (
    posts.join(follows, on="poster")
    .group_by("url")
    .aggregate(reach=hr.agg.count_distinct("follower"))
)
network.ask("reach", using=reach)


def ask(address: str, url: str) -> str:
    """As with curl: -d '{"url": "…"}' -H 'Content-Type: application/json'."""
    request = Request(
        f"{address}/ask/reach?wait=60s",
        json.dumps({"url": url}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request) as answer:
        return str(answer.read(), "utf-8")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as root,
        PipelineTest(network, Path(root)) as test,
        start(test.state, test.log) as server,
        ThreadPoolExecutor() as asker,
    ):
        test.feed(
            "posts",
            [
                {"url": "/tide", "poster": "ada"},
                {"url": "/tide", "poster": "ben"},
                {"url": "/wind", "poster": "ben"},
            ],
        )
        test.feed(
            "follows",
            [
                {"poster": "ada", "follower": "cho"},
                {"poster": "ben", "follower": "cho"},
                {"poster": "ben", "follower": "dee"},
            ],
        )
        test.settle()
        for url in ("/tide", "/wind", "/rain"):
            answer = asker.submit(ask, server.address, url)
            while not answer.done():  # what `headrace run` does all the time
                test.settle()
            print(answer.result())


if __name__ == "__main__":
    main()
