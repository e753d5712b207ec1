"""The log by itself: a topic, an idempotent producer, and two groups that read at their own pace.

Run it in an empty directory; it leaves a log in `data/`.
"""

import headrace as hr


def main() -> None:
    with hr.open_log("file:data") as log:
        log.create_topic("clicks", schema="user STRING, page STRING", key="user", partitions=3)
        with log.producer("clicks", id="web-1") as producer:
            for number in range(10):
                clicks = [{"user": f"user-{n % 7}", "page": f"/page/{number}"} for n in range(100)]
                producer.append(clicks, sequence=number)
                # A retry after a lost response: acknowledged, not stored again.
                producer.append(clicks, sequence=number)

        print("stored", log.read("clicks").to_table().num_rows)
        print("fast read", consume(log, "fast"))
        print("slow read", consume(log, "slow", max_rows=300))
        print("slow is behind by", sum(lag.rows for lag in log.lag("slow")))


def consume(log: hr.Log, group: str, max_rows: int | None = None) -> int:
    """Read and commit all rows, or the first `max_rows` of them. Returns how many it read."""
    count = 0
    with log.consumer("clicks", group=group) as consumer:
        while max_rows is None or count < max_rows:
            batches = consumer.poll(timeout="500 milliseconds", max_rows=100)
            if not batches:
                break
            count += sum(batch.num_rows for batch in batches)
            consumer.commit()
    return count


if __name__ == "__main__":
    main()
