"""The log on a Kafka cluster, `kafka://host:port`, through `confluent-kafka`. `hr.open_log` imports
`log`, which implements the interface of `headrace.log.api`, when such an address is opened.

In the order in which data flows:

- `config`: from the address and options to the settings of each kind of client.
- `connection`: what one `KafkaLog` shares: admin client, producer, topics and notes.
- `cluster`: the admin client: topics, settings, offsets and groups.
- `compacted_topic`: the newest value of every key of an internal topic.
- `topics`: schemas and settings of topics, stored in the compacted topic `__headrace.topics`.
- `notes`: notes, the progress of producers and transaction outcomes, in `__headrace.notes`.
- `producer`: appends, idempotent and fenced by epoch if the producer has an id.
- `transaction`: Kafka transactions: rows, group offsets and notes, all or nothing.
- `staging`: rows that Spark tasks stage in files until the driver's transaction adopts them.
- `records`: rows as Kafka records and back.
- `sender`: sending records, delivery reports, opening, committing and aborting transactions.
- `fetcher`: reading a partition from one offset to another.
- `reader`: reads without a group; records that do not fit the schema become dead letters.
- `consumer`: members of consumer groups.
- `queue`: queues, on share groups.
- `groups`: listing, resetting and lag of groups.
- `errors`: Kafka's error codes as errors of `headrace.errors`.

The log in a directory is in `headrace.log.file`; what both share is in `headrace.log`.
"""

from headrace.errors import MissingExtra

try:
    import confluent_kafka  # noqa: F401
except ImportError as error:
    raise MissingExtra("confluent-kafka", "kafka") from error
