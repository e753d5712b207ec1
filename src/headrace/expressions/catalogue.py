"""The functions that expressions may call, one line each: arguments, result and, if it can fail on
a row, the form that gives null instead.

    STRING, INT, …      an argument of that type
    NUMBER, INTEGER     any number, any whole number
    TIME                a date or a timestamp
    ANY                 any type that can be compared
    T, K, V             any type, the same wherever the letter occurs
    A|B                 one of several
    [A]                 may be left out
    A...                may be repeated
    A#check             a literal that passes a check of `literals`
    = form              the form that gives null; it may stand on the next line
    {0:within}          in that form: the timestamp is some years from the ends of Spark's range

Other functions are refused: those that are not deterministic, read more than one row, or can crash
a worker. A pipeline can call them on `Stream.df()`.
"""

from __future__ import annotations

FUNCTIONS = """
# numbers
sqrt(NUMBER) -> DOUBLE
cbrt(NUMBER) -> DOUBLE
exp(NUMBER) -> DOUBLE
expm1(NUMBER) -> DOUBLE
ln(NUMBER) -> DOUBLE
log(NUMBER, [NUMBER]) -> DOUBLE
log2(NUMBER) -> DOUBLE
log10(NUMBER) -> DOUBLE
log1p(NUMBER) -> DOUBLE
power(NUMBER, NUMBER) -> DOUBLE
pow(NUMBER, NUMBER) -> DOUBLE
sin(NUMBER) -> DOUBLE
cos(NUMBER) -> DOUBLE
tan(NUMBER) -> DOUBLE
asin(NUMBER) -> DOUBLE
acos(NUMBER) -> DOUBLE
atan(NUMBER) -> DOUBLE
atan2(NUMBER, NUMBER) -> DOUBLE
sinh(NUMBER) -> DOUBLE
cosh(NUMBER) -> DOUBLE
tanh(NUMBER) -> DOUBLE
degrees(NUMBER) -> DOUBLE
radians(NUMBER) -> DOUBLE
hypot(NUMBER, NUMBER) -> DOUBLE
rint(NUMBER) -> DOUBLE
sign(NUMBER) -> DOUBLE
signum(NUMBER) -> DOUBLE
pi() -> DOUBLE
e() -> DOUBLE
isnan(FLOAT|DOUBLE) -> BOOLEAN
nanvl(DOUBLE, DOUBLE) -> DOUBLE
factorial(INT) -> BIGINT
bit_count(INTEGER) -> INT
hex(INTEGER|STRING|BINARY) -> STRING
bin(INTEGER) -> STRING
format_number(NUMBER, INT#small) -> STRING

# texts
length(STRING|BINARY) -> INT
len(STRING|BINARY) -> INT
char_length(STRING|BINARY) -> INT
character_length(STRING|BINARY) -> INT
octet_length(STRING|BINARY) -> INT
bit_length(STRING|BINARY) -> INT
lower(STRING) -> STRING
lcase(STRING) -> STRING
upper(STRING) -> STRING
ucase(STRING) -> STRING
initcap(STRING) -> STRING
trim(STRING) -> STRING
ltrim(STRING, [STRING]) -> STRING
rtrim(STRING, [STRING]) -> STRING
btrim(STRING, [STRING]) -> STRING
concat_ws(STRING, STRING|ARRAY<STRING>...) -> STRING
substring(STRING, INT, [INT]) -> STRING
substr(STRING, INT, [INT]) -> STRING
left(STRING, INT) -> STRING
right(STRING, INT) -> STRING
lpad(STRING, INT#small, [STRING]) -> STRING
rpad(STRING, INT#small, [STRING]) -> STRING
replace(STRING, STRING, [STRING]) -> STRING
translate(STRING, STRING, STRING) -> STRING
instr(STRING, STRING) -> INT
locate(STRING, STRING, [INT]) -> INT
position(STRING, STRING) -> INT
startswith(STRING, STRING) -> BOOLEAN
endswith(STRING, STRING) -> BOOLEAN
contains(STRING, STRING) -> BOOLEAN
ascii(STRING) -> INT
chr(INTEGER) -> STRING
char(INTEGER) -> STRING
base64(STRING|BINARY) -> STRING
unhex(STRING) -> BINARY
md5(STRING|BINARY) -> STRING
sha(STRING|BINARY) -> STRING
sha1(STRING|BINARY) -> STRING
sha2(STRING|BINARY, INT#hash_bits) -> STRING
crc32(STRING|BINARY) -> BIGINT
hash(ANY...) -> INT
xxhash64(ANY...) -> BIGINT
levenshtein(STRING, STRING) -> INT
soundex(STRING) -> STRING
split(STRING, STRING#pattern, [INT]) -> ARRAY<STRING>
split_part(STRING, STRING#not_empty, INT#part) -> STRING
substring_index(STRING, STRING, INT) -> STRING
regexp_like(STRING, STRING#pattern) -> BOOLEAN
regexp_count(STRING, STRING#pattern) -> INT
regexp_substr(STRING, STRING#pattern) -> STRING
get_json_object(STRING, STRING#literal) -> STRING
json_array_length(STRING) -> INT
url_encode(STRING) -> STRING
url_decode(STRING) -> STRING = try_url_decode({0})
try_url_decode(STRING) -> STRING

# dates and times
year(TIME) -> INT
quarter(TIME) -> INT
month(TIME) -> INT
day(TIME) -> INT
dayofmonth(TIME) -> INT
dayofweek(TIME) -> INT
weekday(TIME) -> INT
dayofyear(TIME) -> INT
weekofyear(TIME) -> INT
hour(TIMESTAMP|TIMESTAMP_NTZ) -> INT
minute(TIMESTAMP|TIMESTAMP_NTZ) -> INT
second(TIMESTAMP|TIMESTAMP_NTZ) -> INT
last_day(DATE) -> DATE
next_day(DATE, STRING#weekday) -> DATE
trunc(DATE, STRING#date_unit) -> DATE
date_trunc(STRING#trunc_unit, TIMESTAMP) -> TIMESTAMP
    = (CASE WHEN {1:within} THEN date_trunc({0}, {1}) END)
date_add(DATE, TINYINT|SMALLINT|INT) -> DATE
date_sub(DATE, TINYINT|SMALLINT|INT) -> DATE
datediff(DATE, DATE) -> INT
date_diff(DATE, DATE) -> INT
add_months(DATE, INT) -> DATE = try_add({0}, make_ym_interval(0, {1}))
months_between(TIMESTAMP, TIMESTAMP) -> DOUBLE
    = (CASE WHEN {0:within} AND {1:within} THEN months_between({0}, {1}) END)
date_format(TIMESTAMP, STRING#write_format) -> STRING
to_date(STRING, [STRING#read_format]) -> DATE = try_to_date({*})
to_timestamp(STRING, [STRING#read_format]) -> TIMESTAMP = try_to_timestamp({*})
try_to_date(STRING, [STRING#read_format]) -> DATE
try_to_timestamp(STRING, [STRING#read_format]) -> TIMESTAMP
unix_date(DATE) -> INT
unix_seconds(TIMESTAMP) -> BIGINT
unix_millis(TIMESTAMP) -> BIGINT
unix_micros(TIMESTAMP) -> BIGINT
date_from_unix_date(TINYINT|SMALLINT|INT) -> DATE
timestamp_seconds(INTEGER) -> TIMESTAMP
    = timestamp_micros(try_multiply(CAST({0} AS BIGINT), 1000000))
timestamp_millis(INTEGER) -> TIMESTAMP = timestamp_micros(try_multiply(CAST({0} AS BIGINT), 1000))
timestamp_micros(INTEGER) -> TIMESTAMP
make_date(INTEGER, INTEGER, INTEGER) -> DATE
    = CAST(try_make_timestamp_ntz({0}, {1}, {2}, 0, 0, 0) AS DATE)
from_utc_timestamp(TIMESTAMP, STRING#zone) -> TIMESTAMP
    = (CASE WHEN {0:within} THEN from_utc_timestamp({0}, {1}) END)
to_utc_timestamp(TIMESTAMP, STRING#zone) -> TIMESTAMP
    = (CASE WHEN {0:within} THEN to_utc_timestamp({0}, {1}) END)

# arrays and maps
size(ARRAY<T>) -> INT
size(MAP<K, V>) -> INT
cardinality(ARRAY<T>) -> INT
cardinality(MAP<K, V>) -> INT
array_size(ARRAY<T>) -> INT
array_contains(ARRAY<T>, T) -> BOOLEAN
array_position(ARRAY<T>, T) -> BIGINT
array_remove(ARRAY<T>, T) -> ARRAY<T>
array_append(ARRAY<T>, T) -> ARRAY<T>
array_prepend(ARRAY<T>, T) -> ARRAY<T>
array_compact(ARRAY<T>) -> ARRAY<T>
array_distinct(ARRAY<T>) -> ARRAY<T>
array_union(ARRAY<T>, ARRAY<T>) -> ARRAY<T>
array_intersect(ARRAY<T>, ARRAY<T>) -> ARRAY<T>
array_except(ARRAY<T>, ARRAY<T>) -> ARRAY<T>
arrays_overlap(ARRAY<T>, ARRAY<T>) -> BOOLEAN
array_max(ARRAY<T>) -> T
array_min(ARRAY<T>) -> T
array_sort(ARRAY<T>) -> ARRAY<T>
sort_array(ARRAY<T>, [BOOLEAN#literal]) -> ARRAY<T>
array_join(ARRAY<STRING>, STRING, [STRING]) -> STRING
slice(ARRAY<T>, INT#part, INT#from_one) -> ARRAY<T>
reverse(STRING) -> STRING
reverse(ARRAY<T>) -> ARRAY<T>
flatten(ARRAY<ARRAY<T>>) -> ARRAY<T>
get(ARRAY<T>, INT) -> T
try_element_at(ARRAY<T>, INT) -> T
try_element_at(MAP<K, V>, K) -> V
map_keys(MAP<K, V>) -> ARRAY<K>
map_values(MAP<K, V>) -> ARRAY<V>
map_contains_key(MAP<K, V>, K) -> BOOLEAN
"""

NON_DETERMINISTIC = frozenset(
    [
        "rand",
        "randn",
        "random",
        "randstr",
        "uniform",
        "uuid",
        "shuffle",
        "now",
        "curdate",
        "current_date",
        "current_timestamp",
        "current_time",
        "current_timezone",
        "current_user",
        "current_database",
        "current_catalog",
        "current_schema",
        "localtimestamp",
        "localtime",
        "unix_timestamp",
        "monotonically_increasing_id",
        "spark_partition_id",
        "input_file_name",
        "input_file_block_start",
        "input_file_block_length",
        "session_user",
        "user",
        "version",
    ]
)
AGGREGATES = frozenset(
    [
        "count",
        "sum",
        "avg",
        "mean",
        "min",
        "max",
        "min_by",
        "max_by",
        "first",
        "last",
        "first_value",
        "last_value",
        "any_value",
        "collect_list",
        "collect_set",
        "array_agg",
        "listagg",
        "string_agg",
        "stddev",
        "std",
        "stddev_samp",
        "stddev_pop",
        "variance",
        "var_samp",
        "var_pop",
        "median",
        "mode",
        "percentile",
        "percentile_approx",
        "approx_percentile",
        "approx_count_distinct",
        "count_if",
        "bool_and",
        "bool_or",
        "every",
        "some",
        "any",
        "corr",
        "covar_pop",
        "covar_samp",
        "kurtosis",
        "skewness",
        "bit_and",
        "bit_or",
        "bit_xor",
        "try_sum",
        "try_avg",
        "grouping",
        "grouping_id",
    ]
)
WINDOW_FUNCTIONS = frozenset(
    [
        "row_number",
        "rank",
        "dense_rank",
        "percent_rank",
        "cume_dist",
        "ntile",
        "lag",
        "lead",
        "nth_value",
        "window",
        "session_window",
        "window_time",
    ]
)
GENERATORS = frozenset(
    [
        "explode",
        "explode_outer",
        "posexplode",
        "posexplode_outer",
        "inline",
        "inline_outer",
        "stack",
        "json_tuple",
        "variant_explode",
    ]
)
