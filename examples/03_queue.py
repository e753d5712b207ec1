"""A topic as a queue: messages are acknowledged one by one. A message that fails is delivered
again, and becomes a dead letter after five deliveries.

Run it in an empty directory; it leaves a log in `data/`.
"""

import headrace as hr
from headrace.log.dead_letters import read_dead_letters


def main() -> None:
    with hr.open_log("file:data") as log:
        log.create_topic("emails", schema="recipient STRING, body STRING")
        with log.producer("emails") as producer:
            producer.append(
                [
                    {"recipient": address, "body": "Hello"}
                    for address in ("ada@example.com", "nobody", "grace@example.com")
                ]
            )

        with log.queue("emails", group="mailers") as queue:
            while messages := queue.receive(10, visibility="30 seconds"):
                for message in messages:
                    if "@" in message.row["recipient"]:
                        message.ack()
                        print("sent to", message.row["recipient"])
                    else:
                        message.nack()

        for dead_letter in read_dead_letters(log, "emails"):
            print("dead:", dead_letter["row"])


if __name__ == "__main__":
    main()
