"""Requests to a pipeline: how many people can have seen a URL? All followers of everyone who posted
it, each counted once. The table is always up to date; a request is answered from the table as of
the request's tick.

Run it from anywhere: python examples/18_reach.py. It runs in this process with the test kit, and
sends its requests over HTTP as any program would.
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
    """Send a request, as curl does with -d '{"url": "…"}' -H 'Content-Type: application/json'."""
    request = Request(
        f"{address}/ask/reach?wait=60s",
        json.dumps({"url": url}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request) as response:
        return str(response.read(), "utf-8")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as root,
        PipelineTest(network, Path(root)) as test,
        start(test.state, test.log) as server,
        ThreadPoolExecutor() as executor,
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
            response = executor.submit(ask, server.address, url)
            while not response.done():  # `headrace run` does this continuously
                test.settle()
            print(response.result())


if __name__ == "__main__":
    main()
