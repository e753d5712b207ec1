"""Device time: corrected, smoothed and flagged, however ticks are grouped into calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InputError, UnknownColumn
from headrace.operators.device_time import DeviceColumns, DeviceTimeKernel
from headrace.testing.kernels import MemoryState
from tests.operators.device_time_oracle import EPOCH, TOLERANCE, Row, corrected_times, row
from tests.short_forms import examples

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [("device", pa.string()), ("happened", TIME), ("sent", TIME), ("received", TIME)]
)
COLUMNS = DeviceColumns("happened", "sent", "received", "device")


def run(ticks: Sequence[list[Row]], cuts: Sequence[int] = ()) -> list[Row]:
    kernel, state, found = (
        DeviceTimeKernel("d", SCHEMA, COLUMNS, TOLERANCE * 1_000_000),
        MemoryState(),
        [],
    )
    for first, stop in pairwise(
        [0, *sorted({cut for cut in cuts if cut < len(ticks)}), len(ticks)]
    ):
        rows = [
            {**each, "_tick": number} for number in range(first, stop) for each in ticks[number]
        ]
        found += kernel.step(
            state, pa.Table.from_pylist(rows, pa.schema([*SCHEMA, ("_tick", pa.int64())]))
        ).to_pylist()
    return found


def times(found: list[Row]) -> list[float | None]:
    return [
        None if each["event_time"] is None else (each["event_time"] - EPOCH).total_seconds()
        for each in found
    ]


def test_a_clock_that_is_years_off_is_corrected() -> None:
    years = -10 * 365 * 86_400.0
    found = run([[row(years, years + 2, 3)], [row(years + 100, years + 105, 106)]])
    assert times(found) == [1, 101]
    assert [each["time_flag"] for each in found] == [None, None]


def test_offsets_are_smoothed_tick_by_tick_from_the_median_of_a_tick() -> None:
    ticks = [
        [row(0, 1, 11)],
        [row(10, 11, 29), row(10, 11, 29), row(10, 11, 22)],
        [row(20, 21, 32)],
    ]
    assert times(run(ticks)) == [10, 21, 21, 21, 20 + 11 - (11 - 11) / 8]


def test_no_event_is_later_than_its_receipt() -> None:
    assert times(run([[row(0, 1, 41)], [row(10, 10, 12)]])) == [40, 12]


def test_each_device_has_its_own_offset() -> None:
    found = run(
        [[row(0, 1, 2, "a"), row(0, 1, 31, "b"), row(0, 1, 51, None)], [row(5, 6, 90, "b")]]
    )
    assert times(found)[:3] == [1, 30, 50]
    assert [each["device"] for each in found] == ["a", "b", None, "b"]


def test_a_clock_that_is_set_is_flagged_until_it_has_stayed() -> None:
    ticks = [[row(0, 0, 1)], *[[row(second, second, second + 1001)] for second in (10, 20, 30, 40)]]
    found = run(ticks)
    assert times(found) == [1, 1011, 1021, 1031, 1041]
    assert [each["time_flag"] is None for each in found] == [True, False, False, True, True]
    assert "off by more than 1 minute" in found[1]["time_flag"]


def test_one_absurd_row_does_not_move_the_offset() -> None:
    ticks = [
        [row(0, 0, 1)],
        [row(0, 0, 5000)],
        [row(10, 10, 11)],
        [row(0, 0, 5000)],
        [row(0, 0, 5000)],
        [row(20, 20, 21)],
    ]
    assert times(run(ticks)) == [1, 5000, 11, 5000, 5000, 21]


@pytest.mark.parametrize(
    ("given", "time", "flag"),
    [
        (row(None, 1, 2), None, "no event time"),
        (row(5, None, 7), 5, "no times of sending and receipt"),
        (row(5, 6, None), 5, "no times of sending and receipt"),
        (row(9, None, 7), 7, "no times of sending and receipt"),
        (row(6, 5, 7), 7, "the event is after it was sent"),
    ],
)
def test_times_that_cannot_be_are_flagged(given: Row, time: float | None, flag: str) -> None:
    (found,) = run([[given]])
    assert (times([found]), found["time_flag"]) == ([time], flag)


def test_a_device_that_is_known_needs_no_time_of_sending() -> None:
    assert times(run([[row(0, 0, 100)], [row(5, None, None)]])) == [100, 105]


SECONDS = st.none() | st.sampled_from([0, 3, 10, 50, 200, 1000])


@given(
    ticks=st.lists(
        st.lists(
            st.tuples(SECONDS, SECONDS, SECONDS, st.sampled_from(["a", "b", None])).map(
                lambda each: row(*each)
            ),
            max_size=5,
        ),
        min_size=1,
        max_size=7,
    ),
    cuts=st.lists(st.integers(1, 6), max_size=4),
)
@settings(max_examples=examples(60))
def test_offsets_equal_a_plain_filter_whatever_the_batches(
    ticks: list[list[Row]], cuts: list[int]
) -> None:
    found = run(ticks, cuts)
    assert [each["event_time"] for each in found] == list(corrected_times(ticks))


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UnknownColumn, match="did you mean 'sent'"):
        DeviceTimeKernel("d", SCHEMA, DeviceColumns("happened", "sendt", "received", "device"))
    with pytest.raises(InputError, match="must be a TIMESTAMP"):
        DeviceTimeKernel("d", SCHEMA, DeviceColumns("happened", "sent", "device", "device"))
    with pytest.raises(InputError, match="a column 'device' already"):
        DeviceTimeKernel(
            "d", SCHEMA, DeviceColumns("happened", "sent", "received", "device", time="device")
        )


def test_the_account_says_how_many_were_flagged() -> None:
    kernel = DeviceTimeKernel("d", SCHEMA, COLUMNS)
    table = pa.Table.from_pylist(
        [{**row(None, 1, 2), "_tick": 0}, {**row(0, 1, 2), "_tick": 0}],
        pa.schema([*SCHEMA, ("_tick", pa.int64())]),
    )
    assert kernel.step(MemoryState(), table).schema.names == [
        *SCHEMA.names,
        "event_time",
        "time_flag",
        "_tick",
    ]
    assert kernel.counts == {"flagged": 1}
    assert kernel.step(MemoryState(), table.slice(0, 0)).num_rows == 0
