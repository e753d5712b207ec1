"""A social timeline: everyone sees the posts of the authors they follow, as people post, delete,
follow and unfollow. One author has 100,000 followers.

A timeline is the join of two tables, posts and follows, and is updated by the changes of both: one
tick brings a post to everyone who follows its author.

Run it from anywhere: python examples/07_timeline.py. It creates a directory `timeline-example` and
can be run again. To watch a timeline change:

    headrace run examples/07_timeline.py
    curl -N "http://127.0.0.1:8765/views/timeline/changes?key=ann"
"""

import os
from pathlib import Path

import headrace as hr
from headrace.views.reader import ViewReader

HERE = Path("timeline-example")
FOLLOWERS = int(os.environ.get("FOLLOWERS", "100000"))

social = hr.Pipeline("social", log=f"file:{HERE}/log")
posts = social.table("posts", schema="post BIGINT, author STRING, text STRING", key="post")
follows = social.table(
    "follows", schema="follower STRING, author STRING", key=["follower", "author"]
)

timeline = posts.join(follows, on="author").key_by("follower", "post", "author")
social.view("timeline", timeline)
social.view("reach", timeline.group_by("post").aggregate(readers=hr.agg.count()))


def show(what: str) -> None:
    social.run(state=HERE / "state", until_caught_up=True)
    with ViewReader(HERE / "state" / "views.db") as views:
        read = [row["text"] for row in views.scan("timeline", start="ann", stop="ann!").to_pylist()]
        reach = {row["post"]: row["readers"] for row in views.table("reach").to_pylist()}
    print(f"{what}: ann reads {read}; readers of each post: {reach}")


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with hr.open_log(f"file:{HERE}/log") as log:
        log.create_table(
            "posts", "post BIGINT, author STRING, text STRING", key="post", exist_ok=True
        )
        log.create_table(
            "follows",
            "follower STRING, author STRING",
            key=["follower", "author"],
            exist_ok=True,
        )
        with log.producer("posts") as writing, log.producer("follows") as following:
            following.upsert([{"follower": f"fan {n}", "author": "star"} for n in range(FOLLOWERS)])
            following.upsert({"follower": "ann", "author": "bob"})
            writing.upsert(
                [
                    {"post": 1, "author": "bob", "text": "Good morning"},
                    {"post": 2, "author": "star", "text": "New record!"},
                ]
            )
            show("at first")

            # Ann also sees what the star posted before.
            following.upsert({"follower": "ann", "author": "star"})
            writing.upsert({"post": 3, "author": "star", "text": "Thank you all"})
            show("ann follows the star, who posts again")

            following.delete({"follower": "ann", "author": "bob"})
            writing.delete({"post": 2})
            show("ann unfollows bob, and the star deletes a post")


if __name__ == "__main__":
    main()
