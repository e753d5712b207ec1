"""What is known of Spark's functions beyond their types, which `signatures` reads in a table that
Spark itself has filled: literals that would fail on every row, forms that give null on failure, and
which functions cannot fail. They override the table.

    STRING, INT, …      an argument of that type
    NUMBER, INTEGER     any number, any whole number
    TIME                a date or a timestamp
    ANY                 any type that can be compared
    T, K, V             any type, the same wherever the letter occurs
    A|B                 one of several
    [A]                 may be left out
    A...                may be repeated
    A#check             a literal that passes a check of `literals`
    if condition        the function is called only where it is true: a bound on its memory
    = form              the form that gives null; it may stand on the next line
    = null              there is no such form: errors are caught
    {0:within}          in a form: the timestamp is some years from the ends of Spark's range

Functions of the table that stand nowhere here are guarded: errors are caught, which costs a second
evaluation. Why others are refused is in `refusals`.
"""

from __future__ import annotations

FUNCTIONS = """
# numbers
format_number(NUMBER, INT#small) -> STRING
bit_get(INTEGER, INT) -> TINYINT = null
getbit(INTEGER, INT) -> TINYINT = null

# texts and bytes
lpad(STRING, INT#small, [STRING]) -> STRING
rpad(STRING, INT#small, [STRING]) -> STRING
repeat(STRING, INT) -> STRING
    if {1} <= 0 OR CAST(octet_length({0}) AS BIGINT) * {1} <= 1048576
space(INT) -> STRING if {0} <= 1048576
format_string(STRING#printf, [ANY]...) -> STRING = null
printf(STRING#printf, [ANY]...) -> STRING = null
mask(STRING, [STRING#literal], [STRING#literal], [STRING#literal], [STRING#literal]) -> STRING
encode(STRING, STRING#charset) -> BINARY = null
to_binary(STRING, [STRING#binary_format]) -> BINARY = try_to_binary({*})
try_to_binary(STRING, [STRING#binary_format]) -> BINARY
to_char(INTEGER|DECIMAL, STRING#number_format) -> STRING = null
to_char(TIME, STRING#write_format) -> STRING = null
to_char(BINARY, STRING#binary_format) -> STRING = null
to_varchar(INTEGER|DECIMAL, STRING#number_format) -> STRING = null
to_varchar(TIME, STRING#write_format) -> STRING = null
to_varchar(BINARY, STRING#binary_format) -> STRING = null
validate_utf8(STRING) -> STRING = try_validate_utf8({0})
sha2(STRING|BINARY, INT#hash_bits) -> STRING
aes_encrypt(BINARY, BINARY, STRING#ecb) -> BINARY = null
aes_encrypt(BINARY, BINARY, STRING#literal, STRING#literal, BINARY, [BINARY]) -> BINARY
    if octet_length({4}) > 0 = null
split(STRING, STRING#pattern, [INT]) -> ARRAY<STRING>
split_part(STRING, STRING#not_empty, INT#part) -> STRING
regexp_like(STRING, STRING#pattern) -> BOOLEAN
regexp_count(STRING, STRING#pattern) -> INT
regexp_instr(STRING, STRING#pattern, [INT#literal]) -> INT
regexp_substr(STRING, STRING#pattern) -> STRING
instr(STRING, STRING) -> INT
instr(STRING, STRING, INT, [INT]) -> INT = null
get_json_object(STRING, STRING#literal) -> STRING
parse_json(STRING) -> VARIANT = try_parse_json({0})
try_parse_json(STRING) -> VARIANT
parse_url(STRING, STRING#url_part, [STRING]) -> STRING = null
try_parse_url(STRING, STRING#url_part, [STRING]) -> STRING
url_decode(STRING) -> STRING = try_url_decode({0})

# dates and times
hour(TIMESTAMP|TIMESTAMP_NTZ) -> INT
minute(TIMESTAMP|TIMESTAMP_NTZ) -> INT
second(TIMESTAMP|TIMESTAMP_NTZ) -> INT
next_day(DATE, STRING#weekday) -> DATE
trunc(DATE, STRING#date_unit) -> DATE
date_trunc(STRING#trunc_unit, TIMESTAMP) -> TIMESTAMP
    = (CASE WHEN {1:within} THEN date_trunc({0}, {1}) END)
add_months(DATE, INT) -> DATE = try_add({0}, make_ym_interval(0, {1}))
months_between(TIMESTAMP, TIMESTAMP, [BOOLEAN]) -> DOUBLE
    = (CASE WHEN {0:within} AND {1:within} THEN months_between({*}) END)
date_format(TIMESTAMP, STRING#write_format) -> STRING
to_date(STRING, [STRING#read_format]) -> DATE = try_to_date({*})
to_date(DATE|TIMESTAMP|TIMESTAMP_NTZ) -> DATE
to_timestamp(STRING, [STRING#read_format]) -> TIMESTAMP = try_to_timestamp({*})
to_timestamp(DATE|TIMESTAMP|TIMESTAMP_NTZ) -> TIMESTAMP = try_cast({0} AS TIMESTAMP)
to_timestamp_ltz(STRING, [STRING#read_format]) -> TIMESTAMP = null
to_timestamp_ltz(DATE|TIMESTAMP|TIMESTAMP_NTZ) -> TIMESTAMP = try_cast({0} AS TIMESTAMP)
to_timestamp_ntz(STRING, [STRING#read_format]) -> TIMESTAMP_NTZ = null
to_timestamp_ntz(DATE|TIMESTAMP|TIMESTAMP_NTZ) -> TIMESTAMP_NTZ = try_cast({0} AS TIMESTAMP_NTZ)
try_to_date(STRING, [STRING#read_format]) -> DATE
try_to_timestamp(STRING, [STRING#read_format]) -> TIMESTAMP
unix_timestamp(STRING, [STRING#read_format]) -> BIGINT = null
unix_timestamp(DATE|TIMESTAMP|TIMESTAMP_NTZ) -> BIGINT = null
to_unix_timestamp(STRING, [STRING#read_format]) -> BIGINT = null
to_unix_timestamp(DATE|TIMESTAMP|TIMESTAMP_NTZ) -> BIGINT = null
from_unixtime(BIGINT, [STRING#write_format]) -> STRING = null
timestamp_seconds(INTEGER) -> TIMESTAMP
    = timestamp_micros(try_multiply(CAST({0} AS BIGINT), 1000000))
timestamp_seconds(NUMBER) -> TIMESTAMP = null
timestamp_millis(INTEGER) -> TIMESTAMP = timestamp_micros(try_multiply(CAST({0} AS BIGINT), 1000))
make_date(INT, INT, INT) -> DATE
    = CAST(try_make_timestamp_ntz({0}, {1}, {2}, 0, 0, 0) AS DATE)
from_utc_timestamp(TIMESTAMP, STRING#zone) -> TIMESTAMP
    = (CASE WHEN {0:within} THEN from_utc_timestamp({0}, {1}) END)
to_utc_timestamp(TIMESTAMP, STRING#zone) -> TIMESTAMP
    = (CASE WHEN {0:within} THEN to_utc_timestamp({0}, {1}) END)
convert_timezone(STRING#zone, STRING#zone, TIMESTAMP_NTZ) -> TIMESTAMP_NTZ = null

make_timestamp(INT, INT, INT, INT, INT, DECIMAL(16,6), [STRING]) -> TIMESTAMP = null
make_timestamp_ltz(INT, INT, INT, INT, INT, DECIMAL(16,6), [STRING]) -> TIMESTAMP = null
make_timestamp_ntz(INT, INT, INT, INT, INT, DECIMAL(16,6)) -> TIMESTAMP_NTZ = null
try_make_timestamp(INT, INT, INT, INT, INT, DECIMAL(16,6), [STRING]) -> TIMESTAMP = null
try_make_timestamp_ltz(INT, INT, INT, INT, INT, DECIMAL(16,6), [STRING]) -> TIMESTAMP = null
try_make_timestamp_ntz(INT, INT, INT, INT, INT, DECIMAL(16,6)) -> TIMESTAMP_NTZ = null
make_dt_interval([INT], [INT], [INT], [DECIMAL(18,6)]) -> INTERVAL DAY TO SECOND = null

# arrays
try_element_at(ARRAY<T>, INT) -> T = null
try_element_at(MAP<K, V>, K) -> V
sort_array(ARRAY<T>, [BOOLEAN#literal]) -> ARRAY<T>
slice(ARRAY<T>, INT#part, INT#from_one) -> ARRAY<T>
array_repeat(T, INT) -> ARRAY<T> if {1} <= 100000
array_insert(ARRAY<T>, INT, T) -> ARRAY<T> if abs(CAST({1} AS BIGINT)) <= 100000 = null
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CANNOT_FAIL = _names(
    """
acos acosh array_append array_compact array_contains array_distinct array_except array_intersect
array_join array_max array_min array_position array_prepend array_remove array_size array_sort
array_union arrays_overlap ascii asin asinh atan atan2 atanh base64 bin bit_count bit_length
bitmap_bit_position bitmap_bucket_number bitmap_count btrim cardinality cbrt char char_length
character_length chr concat_ws contains cos cosh cot crc32 csc date_add date_diff
date_from_unix_date date_sub datediff day dayname dayofmonth dayofweek dayofyear degrees e
endswith exp expm1 factorial find_in_set flatten get hash hex hypot initcap is_valid_utf8
is_valid_variant is_variant_null isnan jaro_winkler_similarity json_array_length
json_object_keys last_day lcase left len length levenshtein ln locate log log10 log1p log2 lower
ltrim luhn_check make_valid_utf8 map_contains_key map_entries map_keys map_values mask md5 month
monthname nanvl octet_length pi position positive pow power quarter quote radians replace
reverse right rint rtrim sec sentences sha sha1 sign signum sin sinh size soundex sqrt
st_asbinary st_srid startswith substr substring substring_index tan tanh timestamp_micros
to_base32 translate trim try_aes_decrypt try_parse_url try_url_decode
try_validate_utf8 ucase unhex unix_date unix_micros unix_millis unix_seconds upper url_encode
weekday weekofyear width_bucket xxhash64 year
"""
)
"""Functions of the table that give a value or null for any arguments. They need no guard."""

COMPARING = _names(
    """
array_contains array_distinct array_except array_intersect array_max array_min array_position
array_remove array_sort array_union arrays_overlap sort_array
"""
)
"""Functions that compare elements: Spark refuses them for maps."""
