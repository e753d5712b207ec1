"""Read, compute and write, exactly once: results and offsets are committed in one transaction. The
worker crashes halfway and starts again; nothing is lost or duplicated.

Run it in an empty directory; it leaves a log in `data/`.
"""

import headrace as hr


class Crash(Exception):
    """Simulates a power cut."""


def main() -> None:
    with hr.open_log("file:data") as log:
        log.create_topic("payments", schema="id BIGINT, cents BIGINT")
        log.create_topic("receipts", schema="payment_id BIGINT, text STRING")
        with log.producer("payments") as producer:
            producer.append([{"id": n, "cents": n * 10} for n in range(1000)])

        try:
            work(log, crash_after=4)
        except Crash:
            print("crashed with", log.read("receipts").to_table().num_rows, "receipts")
        work(log)

        ids = log.read("receipts").to_table()["payment_id"].to_pylist()
        print("in the end", len(ids), "receipts for", len(set(ids)), "payments")


def work(log: hr.Log, crash_after: int | None = None) -> None:
    """Write a receipt for each payment."""
    with log.consumer("payments", group="receipts") as consumer:
        rounds = 0
        while batches := consumer.poll(timeout="500 milliseconds", max_rows=100):
            with log.transaction("receipt-writer") as tx:
                for batch in batches:
                    tx.append(
                        "receipts",
                        [
                            {"payment_id": row["id"], "text": f"{row['cents'] / 100:.2f}"}
                            for row in batch.to_pylist()
                        ],
                    )
                rounds += 1
                if rounds == crash_after:
                    raise Crash
                tx.commit_offsets("receipts", consumer.positions())


if __name__ == "__main__":
    main()
