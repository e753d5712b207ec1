"""A call of every function that expressions may use, over the columns of `edge_case_rows`. They are
made from the signatures; those of functions with rules of their own, and of functions that edge
cases never satisfy, are written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.expressions.nested_values import NESTED_FUNCTIONS
from headrace.expressions.refusals import refusal
from headrace.expressions.signatures import Parameter, Signature, signatures

WITHOUT_A_COLUMN = frozenset({"st_asbinary", "st_srid"})
"""Functions of types that no row of these tests has."""
COLUMNS = {
    "STRING": "s",
    "BINARY": "bin",
    "BOOLEAN": "flag",
    "TINYINT": "t",
    "SMALLINT": "h",
    "INT": "a",
    "BIGINT": "b",
    "FLOAT": "f",
    "DOUBLE": "d",
    "DECIMAL": "m",
    "DECIMAL(16,6)": "d",
    "DECIMAL(18,6)": "d",
    "NUMBER": "d",
    "INTEGER": "b",
    "DATE": "dt",
    "TIMESTAMP": "ts",
    "TIMESTAMP_NTZ": "ntz",
    "TIME": "ts",
    "ANY": "a",
    "INTERVAL DAY TO SECOND": "iv",
    "INTERVAL YEAR TO MONTH": "INTERVAL 3 MONTH",
    "VARIANT": "try_parse_json(n)",
    "T": "a",
    "K": "s",
    "ARRAY<T>": "arr",
    "ARRAY<K>": "names",
    "ARRAY<V>": "arr",
    "ARRAY<STRING>": "names",
    "ARRAY<FLOAT>": "transform(arr, x -> CAST(x AS FLOAT))",
    "ARRAY<ARRAY<T>>": "array(arr, arr)",
    "ARRAY<STRUCT<key: K, value: V>>": "map_entries(mp)",
    "MAP<K, V>": "mp",
}
LITERALS = {
    "small": "3",
    "pattern": "'[a-c]'",
    "read_format": "'yyyy-MM-dd'",
    "write_format": "'yyyy-MM-dd HH'",
    "trunc_unit": "'hour'",
    "date_unit": "'month'",
    "weekday": "'monday'",
    "zone": "'Europe/Vienna'",
    "part": "1",
    "from_one": "2",
    "hash_bits": "256",
    "not_empty": "','",
    "url_part": "'HOST'",
    "printf": "'%s'",
    "charset": "'UTF-8'",
    "binary_format": "'hex'",
    "number_format": "'999.99'",
    "ecb": "'ECB'",
}
OF_TYPE = {
    "STRING": "'a'",
    "BOOLEAN": "true",
    "INT": "1",
    "INTEGER": "1",
    "NUMBER": "0.5",
    "INTERVAL DAY TO SECOND": "INTERVAL 1 HOUR",
    "TIMESTAMP": "TIMESTAMP '2026-01-31 12:00:00'",
    "TIMESTAMP_NTZ": "TIMESTAMP_NTZ '2026-01-31 12:00:00'",
}
OF_FUNCTION = {
    "get_json_object": "'$.a'",
    "schema_of_json": """'{"a": 1}'""",
    "schema_of_csv": "'1,a'",
    "schema_of_xml": "'<p><a>1</a></p>'",
}
WRITTEN = r"""
abs(a)
aes_decrypt(aes_encrypt(s, 'abcdefghijklmnop', 'ECB'), 'abcdefghijklmnop', 'ECB')
hex(aes_encrypt(s, 'abcdefghijklmnop', 'CBC', 'PKCS', X'00112233445566778899aabbccddeeff'))
try_aes_decrypt(bin, 'abcdefghijklmnop')
aggregate(arr, 0, (sum, x) -> sum + x)
aggregate(arr, 0, (sum, x) -> sum + coalesce(x, 0), sum -> sum * 2)
array(a, b)
array_insert(arr, 2, 7)
array_repeat(s, 3)
array_sort(arr, (l, r) -> CASE WHEN l < r THEN 1 WHEN l = r THEN 0 ELSE -1 END)
arrays_zip(arr, names)
arrays_zip(arr, array(1, 2))
bigint(n)
binary(s)
bit_get(a, 3)
boolean(n)
bround(d, 1)
ceil(d)
ceil(m, 1)
ceiling(d)
coalesce(a, b)
concat(s, n)
convert_timezone('UTC', 'Asia/Tokyo', ntz)
conv(n, 10, 16)
date(s)
date_add(DAY, 3, ts)
date_part('second', ts)
datepart('year', dt)
date_part('hour', iv)
dateadd(HOUR, a, ntz)
datediff(DAY, ts, ntz)
decimal(n)
decode(a, 1, 'one', 7, 'seven', 'other')
decode(a, 1, 'one', NULL, 'null')
decode(encode(s, 'UTF-16'), 'UTF-16')
div(a, b)
double(n)
element_at(arr, 1)
elt(t, s, n)
equal_null(a, b)
exists(arr, x -> x > 3)
extract(SECOND FROM ts)
extract(MINUTE FROM iv)
filter(arr, x -> x > 1)
filter(arr, (x, i) -> x > i)
float(n)
floor(d)
floor(m, 1)
floor(d, 2)
forall(arr, x -> x > 0)
format_string('%5d|%-8s|%.2f', a, s, d)
printf('%d %%', s)
from_csv(n, 'x INT, y STRING')
from_csv(n, 'x INT', map('sep', ';'))
from_json('{"a": [1, 2], "b": {"c": 1.5}}', 'a ARRAY<INT>, b STRUCT<c: DOUBLE>')
from_json(concat('[', n, ']'), 'ARRAY<INT>')
from_json(s, 'MAP<STRING, INT>')
from_json(n, 'x INT', map('mode', 'FAILFAST'))
from_unixtime(a)
from_xml('<p><a>1</a></p>', 'a INT')
from_xml(s, 'a INT')
get_json_object('{"a": 1}', '$.a')
greatest(a, b)
if(flag, a, b)
ifnull(a, b)
ilike(s, 'A%')
int(n)
isnotnull(a)
isnull(a)
json_object_keys('{"a": 1, "b": 2}')
least(a, b)
like(s, 'a%')
s LIKE ANY ('a%', '1%')
s NOT LIKE ALL ('a%', '1%')
s ILIKE ANY ('A%')
s LIKE '/%%' ESCAPE '/'
luhn_check('79927398713')
dt + make_ym_interval(h, 1)
ts + make_dt_interval(h, 1, 1, 1.5)
dt + make_ym_interval(a)
make_dt_interval(a, a, a, d)
make_timestamp(2026, t, t, 1, 2, 3.25)
make_timestamp(2026, 1, 31, 1, 2, d, 'Europe/Vienna')
make_timestamp_ntz(h, 1, 31, 1, 2, 3)
map('a', a, 'b', b)
map(s, a, n, b)
map_concat(mp, map('z', 1))
map_concat(mp, mp)
map_filter(mp, (k, v) -> v > 1)
map_from_arrays(names, arr)
map_from_arrays(array('a', 'b'), array(a, t))
map_from_entries(map_entries(mp))
map_zip_with(mp, map('a', 5), (k, x, y) -> coalesce(x, 0) + coalesce(y, 0))
mask(s, 'U', 'l', 'd', 'o')
mod(a, b)
named_struct('x', a, 'y', s)
nanvl(d, 1.5e0)
negative(a)
nullif(a, b)
nullifzero(a)
nvl(a, b)
nvl2(a, b, 0)
overlay(s, 'xy', a)
overlay(s, 'xy', 2, 1)
to_json(parse_json('{"a": [1, 2]}'))
map_from_entries(array(named_struct('k', s, 'v', a), named_struct('k', n, 'v', t + a)))
str_to_map(s, ',', '=')
make_date(b, t, t)
make_timestamp(2026, 1, 1, 1, 1, d) > make_timestamp(2026, 1, 2, 1, 1, d)
map(s, 1, 'a', 2)
parse_url(n, 'QUERY', 'q')
parse_url(n, 'HOST')
parse_url(s, 'PATH')
pmod(a, b)
positive(d)
reduce(arr, 0, (sum, x) -> sum + x)
regexp(s, '[a-c]')
regexp_extract(s, '([a-z])(.)', 2)
regexp_extract_all(s, '([a-z])(.)', 1)
regexp_replace(s, '[a-z]', 'x')
rlike(s, '^1')
repeat(s, t)
repeat(s, a)
round(d, 1)
sequence(t, h)
sequence(0, t, 3)
sequence(0, 10, t)
sequence(a, b)
sequence(DATE '2026-01-01', DATE '2026-04-01', INTERVAL 1 MONTH)
sequence(dt, DATE '2026-04-01')
sequence(TIMESTAMP '2026-01-01 00:00:00', ts, INTERVAL 30 MINUTE)
sequence(TIMESTAMP '2026-01-01 00:00:00', TIMESTAMP '2026-01-01 02:00:00', INTERVAL 30 MINUTE)
shiftleft(a, 3)
shiftright(b, t)
shiftrightunsigned(a, 1)
smallint(n)
str_to_map(s)
str_to_map('a:1,b:2')
str_to_map('a=1;a=2', ';', '=')
string(a)
struct(a, s)
timestamp(s)
time_bucket(INTERVAL 90 MINUTE, ts)
timestampadd(DAY, t, ts)
timestampadd(MONTH, a, dt)
timestampdiff(HOUR, ts, ntz)
timestampdiff(MONTH, dt, dt)
timestampdiff(MICROSECOND, ts, TIMESTAMP '2026-01-01 00:00:00')
tinyint(n)
to_binary(n, 'hex')
to_char(m, '999999.99')
to_char(ts, 'yyyy-MM')
to_csv(st)
to_csv(st, map('sep', ';'))
to_date(ts)
to_json(mp)
to_json(st, map('ignoreNullFields', 'false'))
to_number('12.5', '99.9')
to_number(n, '9.9')
to_timestamp(dt)
to_json(to_variant_object(st))
to_json(to_variant_object(arr))
to_xml(st)
transform(arr, x -> x + 1)
transform(arr, (x, i) -> 10 / (x - i))
transform(arr, x -> transform(arr, y -> x * y))
transform_keys(mp, (k, v) -> upper(k))
transform_keys(mp, (k, v) -> 'same')
transform_values(mp, (k, v) -> v + 1)
try_add(a, b)
try_divide(a, b)
try_mod(a, b)
try_multiply(a, b)
try_subtract(a, b)
try_to_number(n, '9.9')
try_variant_get(try_parse_json(n), '$', 'INT')
typeof(st)
unix_timestamp(ts)
unix_timestamp(n, 'yyyy')
variant_get(parse_json('{"a": {"b": 7}}'), '$.a.b', 'INT')
variant_get(try_parse_json(n), '$', 'DOUBLE')
to_json(variant_get(try_parse_json(n), '$'))
to_json(variant_insert(parse_json('{"a": 1}'), '$.b', a))
width_bucket(d, 0, 10, 5)
xpath('<a><b>1</b><b>2</b></a>', 'a/b/text()')
xpath_int('<a><b>1</b></a>', 'a/b')
zeroifnull(a)
zeroifnull(m)
zip_with(arr, arr, (x, y) -> x * y)
"""


def calls() -> list[str]:
    """All calls, without those that stand twice."""
    made = [text for lines in signatures().values() for line in lines for text in _calls(line)]
    return list(dict.fromkeys([*made, *filter(None, WRITTEN.splitlines())]))


def called() -> set[str]:
    """The names of all functions that the calls call."""
    return {name for text in calls() for name in re.findall(r"(\w+)\(", text)}


def _calls(signature: Signature) -> Iterator[str]:
    """A call with the fewest arguments and one with the most."""
    name = signature.name
    if name in WITHOUT_A_COLUMN or name in NESTED_FUNCTIONS or refusal(name, None) is not None:
        return
    least = sum(not each.optional for each in signature.parameters)
    for count in sorted({least, len(signature.parameters)}):
        arguments = [_argument(signature, each) for each in signature.parameters[:count]]
        text = f"{signature.name}({', '.join(arguments)})"
        if signature.result == "INTERVAL YEAR TO MONTH":
            yield f"dt + {text}"
        else:
            yield f"to_json({text})" if signature.result == "VARIANT" else text


def _argument(signature: Signature, parameter: Parameter) -> str:
    kind = parameter.takes[0]
    if parameter.check is None:
        return COLUMNS[kind]
    if signature.name.startswith("xpath"):
        return "'a/b'"
    if signature.name in OF_FUNCTION:
        return OF_FUNCTION[signature.name]
    return LITERALS.get(parameter.check) or OF_TYPE[kind]
