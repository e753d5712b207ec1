"""Array primitives over Arrow and numpy, which know nothing of streams, logs or state. The
operators are built from them.

- `columns`: the reserved column names and their Arrow fields.
- `buffers`: Arrow buffers as numpy arrays without a copy; splitting tables into bounded batches.
- `keys`: a row's key as bytes that keep the order of its values, and back; key groups.
- `sort`: keys as integer codes, and sorting by them.
- `segments`: rows sorted by key and tick, cut into one segment per key and tick.
- `lookup`: ranking keys across columns, binary search within sorted segments, merging.
- `row_codec`: values of any Arrow type as bytes, for state.
- `packed_array`: integer columns in as few bytes as they need, for state.
- `wide_integer`: sums of two or three 64-bit words that cannot overflow.
- `murmur2`: Kafka's key hash over whole columns.
- `json_fields`: fields of JSON texts, as `headrace.expressions.evaluator` reads them.

Types, schemas and the JSON codec are in `headrace.types`.
"""
