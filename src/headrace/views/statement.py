"""What a query over views may contain. Queries come from people and programs that are trusted with
nothing else, so this is an allow-list over the tree that DuckDB's own parser gives: a node, a
function or a table that is not listed here is refused, whatever later versions of DuckDB add.

    SELECT max(n) FROM counts        SELECT * FROM read_csv('/etc/passwd')
      SELECT_NODE   allowed            SELECT_NODE      allowed
      max           allowed            TABLE_FUNCTION   allowed
      counts        a view             read_csv         refused

`query_process.py` checks each query here, in the process that then runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace.errors import BadQuery, UnknownView, nearest

MAX_QUERY_BYTES = 256 << 10
_QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE"})
_TABLES = frozenset({"BASE_TABLE", "SUBQUERY", "JOIN", "EMPTY", "EXPRESSION_LIST", "PIVOT"})
_EXPRESSIONS = frozenset(
    {
        "BETWEEN",
        "CASE",
        "CAST",
        "COLLATE",
        "COLUMN_REF",
        "COMPARISON",
        "CONJUNCTION",
        "CONSTANT",
        "LAMBDA",
        "LAMBDA_REF",
        "OPERATOR",
        "PARAMETER",
        "POSITIONAL_REFERENCE",  # of a subquery's column, as in ARRAY(SELECT n FROM counts)
        "STAR",
        "SUBQUERY",
    }
)
_COLLATIONS = frozenset({"binary", "nocase", "noaccent"})
_TABLE_FUNCTIONS = frozenset({"generate_series", "range", "unnest", "json_each", "json_tree"})
_FUNCTION_NAMES = """
    + - * / // % ** ^ & | ~ << >> || @ !~~ ~~ !~~* ~~* ~~~ ~ -> ->> ^@ && @> <@
    add subtract multiply divide mod fmod fdiv abs ceil ceiling floor round round_even
    roundbankers trunc sign signbit sqrt cbrt pow power exp ln log log10 log2 pi degrees radians
    sin cos tan cot asin acos atan atan2 sinh cosh tanh asinh acosh atanh factorial gamma lgamma
    gcd greatest_common_divisor lcm least_common_multiple even nextafter isnan isinf isfinite
    bit_count xor greatest least coalesce nullif ifnull if error typeof
    ascii chr ord unicode concat concat_ws contains prefix suffix starts_with ends_with instr
    strpos position lower lcase upper ucase left right length len char_length character_length
    strlen octet_length bit_length lpad rpad ltrim rtrim trim repeat replace reverse split
    split_part str_split string_split string_to_array str_split_regex string_split_regex substr
    substring translate printf format strip_accents nfc_normalize like_escape not_like_escape
    ilike_escape not_ilike_escape regexp_escape regexp_extract regexp_extract_all
    regexp_full_match regexp_matches regexp_replace regexp_split_to_array levenshtein editdist3
    damerau_levenshtein hamming mismatches jaccard jaro_similarity jaro_winkler_similarity bar
    base64 to_base64 from_base64 hex to_hex unhex from_hex bin to_binary encode decode md5 sha1
    sha256 url_encode url_decode format_bytes formatreadablesize formatreadabledecimalsize
    age century current_date current_localtime current_localtimestamp date_add date_diff datediff
    date_part datepart date_sub datesub date_trunc datetrunc day dayname dayofmonth dayofweek
    dayofyear decade epoch epoch_ms epoch_ns epoch_us era get_current_time get_current_timestamp
    hour isodow isoyear julian last_day days_in_month make_date make_time make_timestamp
    make_timestamp_ms make_timestamptz microsecond millennium millisecond minute month monthname
    now nanosecond quarter second strftime strptime try_strptime time_bucket timezone today
    to_centuries to_days to_decades to_hours to_microseconds to_millennia to_milliseconds
    to_minutes to_months to_quarters to_seconds to_timestamp to_weeks to_years
    transaction_timestamp week weekday weekofyear year yearweek
    array_aggr array_aggregate array_append array_apply array_cat array_concat array_contains
    array_distinct array_extract array_filter array_has array_has_all array_has_any array_indexof
    array_intersect array_length array_position array_prepend array_reduce array_reverse
    array_reverse_sort array_select array_slice array_sort array_to_string array_transform
    array_unique array_where array_zip cardinality element_at filter flatten generate_series
    generate_subscripts list_aggr list_aggregate list_any_value list_append list_apply list_avg
    list_bool_and list_bool_or list_cat list_concat list_contains list_count list_distinct
    list_element list_extract list_filter list_first list_has list_has_all list_has_any
    list_histogram list_indexof list_intersect list_last list_max list_median list_min list_mode
    list_pack list_position list_prepend list_product list_reduce list_resize list_reverse
    list_reverse_sort list_select list_slice list_sort list_string_agg list_sum list_transform
    list_unique list_value list_where list_zip apply aggregate reduce range unnest
    map map_concat map_contains map_contains_entry map_contains_value map_entries map_extract
    map_extract_value map_from_entries map_keys map_values row struct_concat struct_contains
    struct_extract struct_extract_at struct_insert struct_keys struct_pack struct_values
    json json_array json_array_length json_contains json_exists json_extract json_extract_path
    json_extract_path_text json_extract_string json_group_array json_group_object json_keys
    json_merge_patch json_object json_pretty json_quote json_structure json_type json_valid
    json_value row_to_json array_to_json to_json json_each json_tree
    any_value approx_count_distinct approx_quantile arbitrary arg_max arg_max_null arg_min
    arg_min_null argmax argmin array_agg avg bit_and bit_or bit_xor bool_and bool_or corr count
    count_if count_star countif covar_pop covar_samp entropy favg first fsum geomean
    geometric_mean group_concat histogram kahan_sum kurtosis kurtosis_pop last list listagg mad max
    max_by mean median min min_by mode product quantile quantile_cont quantile_disc regr_avgx
    regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy sem skewness
    stddev stddev_pop stddev_samp string_agg sum sumkahan var_pop var_samp variance wavg
    weighted_avg
    cume_dist dense_rank fill first_value lag last_value lead nth_value ntile percent_rank rank
    rank_dense row_number
"""
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
"""The functions that a query may call: of values, times, text, lists and JSON, and aggregates. None
reads a file, a setting or the catalogue, sleeps, or is random.
"""


def check_statement(
    parsed: Mapping[str, Any],
    views: Collection[str],
    *,
    tables: Collection[str] = (),
    functions: Collection[str] = (),
) -> None:
    """Refuse a parsed query that is not exactly one SELECT over views.

    Args:
        parsed: What DuckDB's `json_serialize_sql` gives for the query.
        views: The names of the views that it may read.
        tables: The names of other tables that it may read, each with its schema.
        functions: The names of other functions that it may call.

    Raises:
        BadQuery: The query does not parse, or has something that is not allowed.
        UnknownView: It reads a view that does not exist.

    """
    if parsed["error"]:
        if parsed.get("error_type") == "not implemented":
            raise BadQuery(
                "The query may not run: only SELECT is allowed.",
                fix="write one SELECT over the views.",
            )
        raise BadQuery(
            f"The query cannot run: {str(parsed['error_message']).rstrip('.')}.",
            fix="write one SELECT over the views, in DuckDB's SQL.",
        )
    statements = parsed["statements"]
    if not statements:
        raise BadQuery("There is no query.", fix="write a SELECT over the views.")
    if len(statements) > 1:
        raise BadQuery(f"There are {len(statements)} statements.", fix="send one SELECT at a time.")
    checker = _Checker(views, frozenset(tables), FUNCTIONS | frozenset(functions))
    checker.query(statements[0]["node"], frozenset())


class _Checker:
    """Walks the tree of one query. `ctes` are the names of `WITH` that are visible at a node."""

    def __init__(
        self, views: Collection[str], tables: frozenset[str], functions: frozenset[str]
    ) -> None:
        self._views = views
        self._tables = tables
        self._functions = functions
        self._view_names = {name.lower() for name in views}

    def query(self, node: Any, ctes: frozenset[str]) -> None:
        kind = node["type"]
        if kind not in _QUERY_NODES:
            raise _not_allowed(kind)
        for entry in node["cte_map"]["map"]:
            name, definition = entry["key"].lower(), entry["value"]
            is_recursive = definition["query"]["node"]["type"] == "RECURSIVE_CTE_NODE"
            self.query(definition["query"]["node"], ctes | {name} if is_recursive else ctes)
            self._values({**definition, "query": None}, ctes)
            ctes |= {name}
        if kind == "SELECT_NODE":
            self.table(node["from_table"], ctes)
        else:
            self.query(node["left"], ctes)
            self.query(node["right"], ctes)
        rest = {
            name: value
            for name, value in node.items()
            if name not in {"cte_map", "from_table", "left", "right"}
        }
        self._values(rest, ctes)

    def table(self, node: Any, ctes: frozenset[str]) -> None:
        kind = node["type"]
        children = dict(node)
        if kind == "TABLE_FUNCTION":
            function = node["function"]
            if function["function_name"].lower() not in _TABLE_FUNCTIONS:
                raise _no_function(function["function_name"])
        elif kind not in _TABLES:
            raise _not_allowed(kind)
        if kind == "BASE_TABLE":
            self._named_table(node, ctes)
        elif kind == "SUBQUERY":
            self.query(children.pop("subquery")["node"], ctes)
        elif kind == "JOIN":
            self.table(children.pop("left"), ctes)
            self.table(children.pop("right"), ctes)
        elif kind == "PIVOT":
            self.table(children.pop("source"), ctes)
        self._values(children, ctes)

    def _named_table(self, node: Any, ctes: frozenset[str]) -> None:
        name = node["table_name"]
        if node["schema_name"] or node["catalog_name"]:
            path = ".".join(
                part for part in (node["catalog_name"], node["schema_name"], name) if part
            )
            if path in self._tables:
                return
            if path.lower() in self._view_names:
                raise BadQuery(
                    f"The view {path} has a dot in its name.",
                    fix=f'write it in double quotes: "{path}".',
                )
            raise UnknownView(path, list(self._views))
        if name.lower() not in ctes and name.lower() not in self._view_names:
            raise UnknownView(name, list(self._views))
        if node["at_clause"] is not None:
            raise _not_allowed("AT")

    def _values(self, value: Any, ctes: frozenset[str]) -> None:
        """Check whatever hangs below a node: expressions, and queries inside them."""
        if isinstance(value, list):
            for item in value:
                self._values(item, ctes)
            return
        if not isinstance(value, dict):
            return
        kind = value.get("class")
        if kind is not None:
            self._expression(kind, value)
            if kind == "CONSTANT":
                return
            if kind == "SUBQUERY":
                self.query(value["subquery"]["node"], ctes)
                self._values(value["child"], ctes)
                return
        elif isinstance(value.get("node"), dict):
            self.query(value["node"], ctes)
            return
        for name, item in value.items():
            if name not in {"cast_type", "expected_types"}:
                self._values(item, ctes)

    def _expression(self, kind: str, node: Any) -> None:
        if kind in {"FUNCTION", "WINDOW"}:
            if node["schema"] not in {"", "main"} or node["catalog"]:  # [1] is main.list_value(1)
                raise _no_function(f"{node['schema']}.{node['function_name']}")
            if node["function_name"].lower() not in self._functions:
                raise _no_function(node["function_name"])
        elif kind not in _EXPRESSIONS:
            raise _not_allowed(kind)
        elif kind == "COLLATE" and node["collation"].lower() not in _COLLATIONS:
            raise BadQuery(
                f"The collation {node['collation']!r} is not allowed: "
                f"{nearest(node['collation'], _COLLATIONS)}"
            )


def _no_function(name: str) -> BadQuery:
    return BadQuery(
        f"The query may not use the function {name}: {nearest(name, FUNCTIONS)}",
        fix="the guide's page on serving views lists the functions of queries.",
    )


def _not_allowed(kind: str) -> BadQuery:
    return BadQuery(
        f"The query may not run: it contains {kind.replace('_', ' ').lower()}.",
        fix="write one SELECT over the views.",
    )


def took_too_long(timeout_s: float) -> BadQuery:
    return BadQuery(
        f"The query took longer than {timeout_s:g} seconds.",
        fix="narrow it, or give it a longer timeout.",
    )
