"""The log on a Kafka cluster, through `confluent-kafka`: `kafka://host:port`. `log.py` is the way
in; `hr.open_log` imports it when it is needed.
"""
