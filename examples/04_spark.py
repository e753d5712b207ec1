"""Spark reads a topic as a stream and writes to another topic, exactly once. The stream runs twice:
the second run resumes from the checkpoint and finds nothing new.

Run it in an empty directory; it leaves a log in `data/` and Spark's checkpoint in `checkpoint/`. It
needs Java 17.
"""

import headrace as hr

LOG = "file:data"
SCHEMA = "sensor STRING, celsius DOUBLE"


def main() -> None:
    with hr.open_log(LOG) as log:
        for topic in ("readings", "hot"):
            log.create_topic(topic, schema=SCHEMA, key="sensor", partitions=2)
        with log.producer("readings") as producer:
            producer.append([{"sensor": f"s{n % 4}", "celsius": float(n)} for n in range(100)])

        spark = hr.spark()
        try:
            for run in (1, 2):
                readings = (
                    spark.readStream.format("headrace")
                    .option("log", LOG)
                    .option("topic", "readings")
                    .load()
                )
                hot = readings.where("celsius >= 60").select("sensor", "celsius")
                sink = (
                    hot.writeStream.format("headrace")
                    .option("log", LOG)
                    .option("topic", "hot")
                    .option("writer", "hot-readings")
                )
                sink.option("checkpointLocation", "checkpoint").trigger(
                    availableNow=True
                ).start().awaitTermination()
                print(f"after run {run}:", log.read("hot").to_table().num_rows, "hot readings")
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
