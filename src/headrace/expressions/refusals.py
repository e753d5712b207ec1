"""Why a function is refused, and what to use instead; and what was probably meant by the name of a
function that does not exist.

A suggestion goes by meaning: first the names that other systems have for it, then a name that
differs in a letter or an underscore. Where neither fits, nothing is suggested.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from headrace.expressions.typed_expression import ExpressionRefused

_CLOCK = "put the time into the rows when they are appended, or use the event time."
_RANDOM = "put the number into the rows when they are appended; hash(…) spreads rows evenly."
_SESSION = "write the value out."
_JAVA = "write it in Python: @hr.udf."
_TIME_TYPE = "store a time of day as INT seconds, or as a TIMESTAMP_NTZ."
_NANOS = "use unix_micros and timestamp_micros."

NOT_DETERMINISTIC = {
    **dict.fromkeys(
        (
            "now",
            "curdate",
            "current_date",
            "current_timestamp",
            "current_time",
            "localtimestamp",
            "localtime",
        ),
        _CLOCK,
    ),
    **dict.fromkeys(("rand", "randn", "random", "randstr", "uniform", "uuid", "shuffle"), _RANDOM),
    **dict.fromkeys(
        (
            "current_timezone",
            "current_user",
            "current_database",
            "current_catalog",
            "current_schema",
            "current_path",
            "session_user",
            "user",
            "version",
        ),
        _SESSION,
    ),
    **dict.fromkeys(
        ("monotonically_increasing_id", "spark_partition_id"),
        "declare the topic with metadata={'number': '_offset'}: a row's offset never changes.",
    ),
    **dict.fromkeys(
        ("input_file_name", "input_file_block_start", "input_file_block_length"),
        "rows come from a topic, not from files.",
    ),
}
"""Functions whose result depends on when, where or by whom they are called; and what to do."""

REFUSED = {
    **dict.fromkeys(("reflect", "java_method", "try_reflect"), ("calls any Java method", _JAVA)),
    **dict.fromkeys(
        ("raise_error", "assert_true"),
        (
            "is there to end a query, and a pipeline must not end at a row",
            "use where(…), or errors='divert' on a step whose rows may be wrong.",
        ),
    ),
    **dict.fromkeys(
        ("from_avro", "to_avro", "schema_of_avro", "from_protobuf", "to_protobuf"),
        (
            "needs a package that Spark does not bring",
            "decode it where rows come in (schema registry, gateway), or in Python: @hr.udf.",
        ),
    ),
    **dict.fromkeys(
        ("make_interval", "try_make_interval"),
        (
            "gives an interval of months and days at once, which no column can store",
            "use make_dt_interval for days to seconds, make_ym_interval for months.",
        ),
    ),
    **dict.fromkeys(
        (
            "time",
            "make_time",
            "to_time",
            "try_to_time",
            "time_diff",
            "time_trunc",
            "time_from_micros",
            "time_from_millis",
            "time_from_seconds",
            "time_to_micros",
            "time_to_millis",
            "time_to_seconds",
        ),
        ("works on the type TIME, which Spark has switched off", _TIME_TYPE),
    ),
    **dict.fromkeys(
        ("timestamp_nanos", "unix_nanos"),
        ("works on timestamps of nanoseconds, which Spark has switched off", _NANOS),
    ),
    **dict.fromkeys(
        ("collate", "collation"),
        ("gives a text with a collation, which no column keeps", "compare lower(…) of both sides."),
    ),
    **dict.fromkeys(
        ("collations", "sql_keywords", "python_worker_logs"),
        ("lists what a session has, and reads no row", "ask Spark for it: hr.spark().sql(…)."),
    ),
    "approx_top_k_estimate": (
        "reads what an aggregate of Spark's leaves, which hr.agg does not have",
        "use hr.agg.heavy_hitters(…).",
    ),
    "range": ("makes rows of nothing", "use sequence(…) for an array of numbers."),
    "measure": ("belongs to metric views, which Headrace has none of", "use group_by."),
    **dict.fromkeys(
        ("st_geogfromwkb", "st_geomfromwkb", "st_setsrid"),
        (
            "gives a type whose reference system depends on a value",
            "store the bytes, and convert them where they are read.",
        ),
    ),
    "schema_of_variant_agg": (
        "looks at more than one row",
        "use schema_of_variant on each row.",
    ),
    **dict.fromkeys(
        ("and", "or", "not", "between", "in", "case", "when"),
        ("is an operator", "write it as one: a AND b, x BETWEEN 1 AND 2, CASE WHEN … END."),
    ),
}
"""Other functions that an expression cannot call: why, and what to use instead."""

_AGGREGATE = (
    "looks at more than one row",
    "use group_by(…).aggregate(…) with hr.agg, as in hr.agg.{}(…).",
)
_KINDS = {
    "aggregate": _AGGREGATE,
    "window": (
        "looks at more than one row",
        "use window(…) on the stream, or over(…) with hr.over for rows before this one.",
    ),
    "generator": (
        "makes several rows of one, and an expression gives one value",
        "use the operation of a stream: explode('tags', 'tag'), posexplode, inline, or flat_map.",
    ),
    "table": ("makes rows of nothing", "use sequence(…) for an array of numbers."),
    "not deterministic": ("is not deterministic, and a replay must give the same rows", _RANDOM),
}
_OF_HR_AGG = frozenset(["count", "sum", "avg", "min", "max", "first", "last", "stddev", "median"])
_WINDOWS = frozenset({"window", "session_window", "window_time"})
_GENERATORS = frozenset({"json_tuple", "variant_explode", "variant_explode_outer", "stack"})

SYNONYMS = {
    **dict.fromkeys(("strpos", "charindex", "indexof", "index"), "instr(text, part)"),
    **dict.fromkeys(("iff", "iif"), "if(condition, a, b)"),
    **dict.fromkeys(("datalength", "lengthb", "byte_length"), "octet_length"),
    **dict.fromkeys(("strlen", "string_length", "text_length"), "length"),
    **dict.fromkeys(
        ("getdate", "sysdate", "systimestamp", "getutcdate", "clock_timestamp", "today"), "now"
    ),
    **dict.fromkeys(("newid", "gen_random_uuid", "generateuuid", "uuid_string"), "uuid"),
    **dict.fromkeys(("datetrunc", "timestamp_trunc", "datetime_trunc"), "date_trunc"),
    **dict.fromkeys(("date_bin", "time_slice", "tumble"), "time_bucket"),
    **dict.fromkeys(("str_to_date", "parse_date"), "to_date"),
    **dict.fromkeys(("strptime", "parse_timestamp", "parse_datetime"), "to_timestamp"),
    **dict.fromkeys(("strftime", "format_date", "format_timestamp", "to_iso8601"), "date_format"),
    **dict.fromkeys(("epoch", "to_unixtime", "unixepoch", "to_epoch"), "unix_seconds"),
    **dict.fromkeys(("epoch_ms", "to_epoch_ms"), "unix_millis"),
    **dict.fromkeys(("epoch_us", "epoch_ns"), "unix_micros"),
    **dict.fromkeys(
        ("age", "datetime_diff", "timestamp_diff", "months_diff", "days_between"),
        "timestampdiff(DAY, a, b)",
    ),
    **dict.fromkeys(
        ("timestamp_add", "datetime_add", "adddate", "date_plus"), "timestampadd(DAY, 1, at)"
    ),
    **dict.fromkeys(("subdate",), "date_sub"),
    **dict.fromkeys(("dow", "day_of_week"), "dayofweek"),
    **dict.fromkeys(("doy", "day_of_year"), "dayofyear"),
    **dict.fromkeys(("week", "week_of_year", "isoweek"), "weekofyear"),
    **dict.fromkeys(("list_contains", "array_has", "has", "array_includes"), "array_contains"),
    **dict.fromkeys(("list_transform", "array_map", "apply"), "transform(items, x -> x + 1)"),
    **dict.fromkeys(("list_filter", "array_filter"), "filter(items, x -> x > 0)"),
    **dict.fromkeys(
        ("list_reduce", "fold", "array_fold", "array_reduce", "list_sum", "array_sum", "array_avg"),
        "aggregate(items, 0, (sum, x) -> sum + x)",
    ),
    **dict.fromkeys(("array_length", "list_length", "array_count", "arraylength"), "size"),
    **dict.fromkeys(
        ("string_split", "split_to_array", "str_split", "string_to_array", "strsplit"), "split"
    ),
    **dict.fromkeys(("array_to_string", "list_to_string"), "array_join"),
    **dict.fromkeys(("regexp_matches", "regex_match", "regexp_match", "match"), "regexp_like"),
    **dict.fromkeys(("regex_replace",), "regexp_replace"),
    **dict.fromkeys(("regex_extract",), "regexp_extract"),
    **dict.fromkeys(("mid",), "substring"),
    **dict.fromkeys(("sha256",), "sha2(text, 256)"),
    **dict.fromkeys(("sha512",), "sha2(text, 512)"),
    **dict.fromkeys(("sha224",), "sha2(text, 224)"),
    **dict.fromkeys(("sha384",), "sha2(text, 384)"),
    **dict.fromkeys(("murmur3", "murmurhash", "murmur_hash"), "hash"),
    **dict.fromkeys(("xxhash", "xxh64", "farm_fingerprint"), "xxhash64"),
    **dict.fromkeys(("truncate", "truncation"), "floor"),
    **dict.fromkeys(
        (
            "json_extract",
            "json_value",
            "json_query",
            "json_extract_scalar",
            "json_extract_string",
            "json_extract_path_text",
            "jsonextract",
        ),
        "get_json_object(text, '$.member')",
    ),
    **dict.fromkeys(("json_parse", "to_variant"), "parse_json"),
    **dict.fromkeys(("json_keys", "object_keys"), "json_object_keys"),
    **dict.fromkeys(("object_construct", "struct_pack", "row", "json_object"), "named_struct"),
    **dict.fromkeys(
        ("safe_cast", "try_to_decimal", "try_to_double", "try_convert", "toint", "to_int"),
        "TRY_CAST(… AS …)",
    ),
    **dict.fromkeys(
        ("convert", "to_double", "to_decimal", "to_integer", "to_string", "tostring"),
        "CAST(… AS …)",
    ),
    **dict.fromkeys(("datetime", "to_datetime"), "timestamp"),
    **dict.fromkeys(("bitand", "bitwise_and"), "a & b"),
    **dict.fromkeys(("bitor", "bitwise_or"), "a | b"),
    **dict.fromkeys(("bitxor", "bitwise_xor"), "a ^ b"),
    **dict.fromkeys(("bitnot", "bitwise_not"), "~a"),
    **dict.fromkeys(("bitshiftleft", "lshift", "bitwise_left_shift"), "shiftleft"),
    **dict.fromkeys(("bitshiftright", "rshift", "bitwise_right_shift"), "shiftright"),
    **dict.fromkeys(("safe_divide", "div0", "divide", "div0null"), "try_divide"),
    **dict.fromkeys(("to_hex", "hex_encode"), "hex"),
    **dict.fromkeys(("from_hex", "hex_decode", "hex_decode_string"), "unhex"),
    **dict.fromkeys(("to_base64", "base64_encode", "base64encode"), "base64"),
    **dict.fromkeys(("from_base64", "base64_decode", "base64decode"), "unbase64"),
    **dict.fromkeys(("urlencode", "encode_url", "encodeurlcomponent"), "url_encode"),
    **dict.fromkeys(("urldecode", "decode_url", "decodeurlcomponent"), "url_decode"),
    **dict.fromkeys(
        ("url_extract_host", "url_host", "domain", "net_host"), "parse_url(url, 'HOST')"
    ),
    **dict.fromkeys(
        ("levenshtein_distance", "edit_distance", "editdistance", "editdist"), "levenshtein"
    ),
    **dict.fromkeys(("jaro_winkler", "jaro_similarity"), "jaro_winkler_similarity"),
    **dict.fromkeys(("title", "proper", "capitalize"), "initcap"),
    **dict.fromkeys(("lowercase", "tolower", "lowerutf8"), "lower"),
    **dict.fromkeys(("uppercase", "toupper", "upperutf8"), "upper"),
    **dict.fromkeys(("strip",), "trim"),
    **dict.fromkeys(("replicate",), "repeat"),
    **dict.fromkeys(("stuff",), "overlay"),
    **dict.fromkeys(("format", "sprintf"), "format_string"),
    **dict.fromkeys(("unicode", "ord", "codepoint"), "ascii"),
    **dict.fromkeys(("nchar",), "char"),
    **dict.fromkeys(("array_concat", "list_concat", "array_cat", "concatenate"), "concat"),
    **dict.fromkeys(("array_slice", "list_slice"), "slice"),
    **dict.fromkeys(("array_reverse", "list_reverse"), "reverse"),
    **dict.fromkeys(("array_unique", "list_distinct", "arraydistinct"), "array_distinct"),
    **dict.fromkeys(("list_sort", "array_sort_desc"), "sort_array"),
    **dict.fromkeys(("generate_series", "generate_array"), "sequence"),
    **dict.fromkeys(("unnest", "flatten_array"), "explode"),
    **dict.fromkeys(("choose",), "elt"),
    **dict.fromkeys(("switch",), "CASE … WHEN … END"),
    **dict.fromkeys(("is_null",), "isnull"),
    **dict.fromkeys(("is_not_null",), "isnotnull"),
    **dict.fromkeys(("average",), "avg"),
    **dict.fromkeys(("string_concat", "group_concat"), "listagg"),
    **dict.fromkeys(("square",), "power(x, 2)"),
}
"""What other systems call a function, or what it is often called; and how Spark SQL says it."""


def suggestion(name: str, known: Collection[str]) -> str | None:
    """The function that somebody means who writes an unknown name; None if none fits.

    Example:
        >>> suggestion("strpos", ["instr"])
        "instr(text, part)"
        >>> suggestion("starts_with", ["startswith", "abs"])
        "startswith"
    """
    lower = name.lower()
    if lower in SYNONYMS:
        return SYNONYMS[lower]
    plain = lower.replace("_", "")
    for each in sorted(known):
        if each.replace("_", "") == plain:
            return each
    if len(plain) < 4:
        return None
    close = difflib.get_close_matches(lower, sorted(known), n=1, cutoff=0.8)
    return close[0] if close else None


def refusal(name: str, kind: str | None) -> ExpressionRefused | None:
    """Why a function of Spark's is not for expressions; None if nothing speaks against it.

    Args:
        name: The function, in lower case.
        kind: What the table says it is, such as "aggregate".
    """
    if name in NOT_DETERMINISTIC:
        return ExpressionRefused(
            f"{name} is not deterministic, and a replay must give the same rows.",
            NOT_DETERMINISTIC[name],
        )
    if name in REFUSED:
        why, instead = REFUSED[name]
        return ExpressionRefused(f"{name} {why}: it is not allowed in an expression.", instead)
    if name in _WINDOWS:
        kind = "window"
    elif name in _GENERATORS:
        kind = "generator"
    if kind not in _KINDS:
        return None
    why, instead = _KINDS[kind]
    example = name if name in _OF_HR_AGG else "sum"
    return ExpressionRefused(f"{name} {why}.", instead.format(example))


def unknown_function(name: str, known: Collection[str]) -> ExpressionRefused:
    """The error for a function that Spark does not have: what may have been meant."""
    close = suggestion(name, known)
    if close is None:
        meant = "."
    else:
        meant = f": did you mean {close}?" if "(" in close else f": did you mean {close!r}?"
    return ExpressionRefused(
        f"There is no function {name!r} for expressions{meant}",
        "use another, or write it in Python: @hr.udf.",
    )
