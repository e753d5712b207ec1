"""Options of `format("headrace")`, offsets, and the limits of batches, without Spark."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigurationError, HeadraceError
from headrace.log.spark.options import Address, read_options, write_options
from headrace.log.spark.reader import (
    batch_start,
    limit_ends,
    offsets_from_json,
    offsets_to_json,
    split_ranges,
)

GOOD = {"log": "file:data", "topic": "orders"}


def test_options_have_defaults() -> None:
    options = read_options(GOOD, home="here")
    assert options.address == Address("file:here/data")
    assert (options.starting, options.ending, options.on_lost, options.on_corrupt) == (
        "earliest",
        "latest",
        "fail",
        "raise",
    )
    assert (options.columns, options.max_rows, options.headers, options.split_rows) == (
        None,
        None,
        False,
        None,
    )


def test_names_come_in_lower_case_and_options_for_the_client_are_passed_on() -> None:
    given_options = {
        "log": "kafka://b:9092",
        "topic": "t",
        "maxrowsperbatch": "5",
        "checkpointlocation": "c",
        "kafka.security.protocol": "SSL",
    }
    options = read_options(given_options, home="")
    assert options.max_rows == 5
    assert options.address == Address("kafka://b:9092", (("security.protocol", "SSL"),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxRowsPerBatch": "many"}, "a whole number"),
        ({"splitRows": "0"}, "a whole number"),
        ({"topik": "orders"}, "no option 'topik' here: did you mean 'topic'"),
        ({"onLost": "ignore"}, "'onLost' is 'ignore'"),
        ({"onCorrupt": "hide"}, "'onCorrupt' is 'hide'"),
        ({"includeHeaders": "yes"}, "true or false"),
        ({"columns": "a,,b"}, "separated by commas"),
        ({"columns": "a,a"}, "each once"),
        ({"topic": " "}, "'topic' is missing"),
        ({"log": ""}, "'log' is missing"),
        ({"kafka.client.id": "x"}, "options that begin with 'kafka.' are for a log on Kafka"),
        ({"writer": "w"}, "no option 'writer' here"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_options(GOOD | options, home="")
    assert message in str(refused.value)


def test_a_writer_has_a_name_that_a_transaction_can_have() -> None:
    assert write_options(GOOD | {"writer": "large-orders"}, home="").writer == "large-orders"
    with pytest.raises(HeadraceError, match="cannot be a writer"):
        write_options(GOOD | {"writer": "large orders"}, home="")


partitions = st.dictionaries(
    st.integers(0, 9), st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1
)


@given(partitions, st.integers(1, 120))
def test_a_cut_takes_as_much_as_it_may_and_shares_it_evenly(
    waiting: dict[int, tuple[int, int]], max_rows: int
) -> None:
    begin = {partition: first for partition, (first, _) in waiting.items()}
    ends = {partition: first + count for partition, (first, count) in waiting.items()}
    taken = {
        partition: end - begin[partition]
        for partition, end in limit_ends(begin, ends, max_rows).items()
    }
    assert sum(taken.values()) == min(max_rows, sum(count for _, count in waiting.values()))
    assert all(0 <= taken[partition] <= count for partition, (_, count) in waiting.items())
    cut_short = [
        taken[partition] for partition, (_, count) in waiting.items() if taken[partition] < count
    ]
    assert all(other <= least + 1 for least in cut_short for other in taken.values()), (
        "nobody gets more than one who wanted more"
    )


@given(partitions, st.none() | st.integers(1, 20))
def test_tasks_cover_every_offset_once(
    waiting: dict[int, tuple[int, int]], split_rows: int | None
) -> None:
    begin = {partition: first for partition, (first, _) in waiting.items()}
    ends = {partition: first + count for partition, (first, count) in waiting.items()}
    tasks = list(split_ranges(begin, ends, split_rows))
    covered = [
        (partition, offset) for partition, start, stop in tasks for offset in range(start, stop)
    ]
    assert covered == [
        (partition, offset)
        for partition in sorted(begin)
        for offset in range(begin[partition], ends[partition])
    ]
    assert all(0 < stop - start <= (split_rows or 50) for _, start, stop in tasks)


def test_offsets_survive_the_checkpoint() -> None:
    assert offsets_from_json(offsets_to_json({1: 5, 0: 3})) == {0: 3, 1: 5}
    first = offsets_to_json({0: 9}, began_at={0: 4})
    assert offsets_from_json(first) == {0: 9}
    assert batch_start({"0": 7}, first) == {0: 4}, "the first batch remembers where it began"
    assert batch_start({"0": 7}, {"0": 9}) == {0: 7}
