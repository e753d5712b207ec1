"""Types and schemas, and the codecs between Python values, JSON, text and Arrow columns. Nothing
here needs Spark.

- `ddl`: the parser of Spark's DDL column lists.
- `schema`: a topic's schema: DDL to Arrow and back, adding columns, keys, tables.
- `values`: Python values and Arrow columns into columns of a schema, without loss.
- `json_codec`: rows as JSON and back: the values of Kafka records, and key bytes of both backends.
- `text`: rows from JSON and CSV text, as `headrace produce` and the gateways read them.

Which rows a topic accepts is in `headrace.log.rows`; the reserved columns are in
`headrace.columnar.columns`.
"""
