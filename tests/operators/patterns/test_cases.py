"""Cases as data: `cases.txt` has what the field's manuals show, one block a case."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headrace.operators.kernel import UNSTARTED, Watermarks
from headrace.operators.patterns.compiled_pattern import PatternSpec, compile_pattern
from headrace.operators.patterns.condition_parser import PatternNames, compile_measure
from headrace.operators.patterns.kernel import PatternKernel
from headrace.operators.patterns.parser import ALL_ROWS
from headrace.operators.patterns.settings import MatchSettings
from headrace.testing.kernels import MemoryState

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [("k", pa.int64()), ("name", pa.string()), ("price", pa.float64()), ("at", TIME)]
)
SECOND = 1_000_000
Case = dict[str, str]


def cases() -> list[Case]:
    text = (Path(__file__).parent / "cases.txt").read_text()
    blocks = [
        "\n".join(line for line in block.splitlines() if not line.startswith("#"))
        for block in text.split("\n\n")
    ]
    return [
        {
            name.strip(): text.strip()
            for name, _, text in (line.partition(":") for line in block.splitlines())
        }
        for block in blocks
        if block.strip()
    ]


def rows_of(case: Case) -> list[dict[str, object]]:
    """Rows a second apart; a dash is a second without one."""
    found = []
    for second, text in enumerate(case["rows"].split(), 1):
        if text != "-":
            plain = text.replace(".", "").isdigit()
            found.append(
                {
                    "k": 1,
                    "name": str(second) if plain else text,
                    "price": float(text) if plain else 0.0,
                    "at": second * SECOND,
                }
            )
    return found


def spec_of(case: Case) -> PatternSpec:
    define = tuple(
        (name.strip(), text.strip())
        for name, text in (part.split("=", 1) for part in case.get("define", "").split(";") if part)
    )
    text = case.get("within", "1000")
    within = None if text == "never" else int(text) * SECOND
    return PatternSpec(case["pattern"], define, (), within, case.get("after", "skip past last row"))


def settings_of(case: Case, rows: list[dict[str, object]]) -> tuple[MatchSettings, pa.Table]:
    """Conditions that rows alone decide come as columns, as a pipeline makes them; without any,
    letters decide.
    """
    pattern = compile_pattern(spec_of(case), SCHEMA, where=case["name"])
    table = pa.Table.from_pylist(rows, SCHEMA)
    fits: list[tuple[str, int]] = []
    columns: list[pa.Array] = []
    for symbol in pattern.automaton.pattern.symbols:
        by_row = pattern.by_symbol[symbol].by_row if symbol in pattern.by_symbol else ()
        if "define" not in case and symbol != "any":
            columns.append(pa.array([str(row["name"])[0] == symbol for row in rows], pa.bool_()))
        elif by_row:
            condition = compile_measure(
                " AND ".join(f"({each})" for each in by_row), PatternNames(SCHEMA, ()), where="test"
            )
            columns.append(
                condition.evaluate(
                    [table[term.column].combine_chunks() for term in condition.terms], len(rows)
                )[0]
            )
        else:
            continue
        fits.append((symbol, len(columns) - 1))
    bits = tuple(f"_fits{at}" for at in range(len(columns)))
    for name, column in zip(bits, columns, strict=True):
        table = table.append_column(name, column)
    return (
        MatchSettings(
            "case", SCHEMA, ("k",), "at", (("p", pattern),), bits, (tuple(fits),), rows=ALL_ROWS
        ),
        table,
    )


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["name"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_case(case: Case, one_by_one: bool) -> None:
    settings, table = settings_of(case, rows_of(case))
    state, emitted, closed = MemoryState(), [], UNSTARTED
    cuts = [(at, at + 1) for at in range(table.num_rows)] if one_by_one else [(0, table.num_rows)]
    for tick, (first, stop) in enumerate([*cuts, (table.num_rows, table.num_rows)]):
        now = (
            10_000 * SECOND
            if first == table.num_rows
            else int(table["at"].cast(pa.int64())[stop - 1].as_py()) + 1
        )
        times = np.array([now])
        rows = table.slice(first, stop - first).append_column(
            "_tick", pa.array(np.full(stop - first, tick))
        )
        emitted += (
            PatternKernel(settings)
            .step_timed(
                state, [rows], [Watermarks(np.array([tick]), times, times, times, closed, closed)]
            )
            .to_pylist()
        )
        closed = now
    by_match: dict[int, list[dict[str, object]]] = {}
    for row in emitted:
        by_match.setdefault(row["match_number"], []).append(row)
    found = sorted([str(row["name"]) for row in match] for match in by_match.values())
    expected = [match.split() for match in case["matches"].split("|") if match.strip()]
    assert found == sorted(expected)
    if "as" in case:
        assert [row["classifier"] or "-" for row in emitted] == case["as"].split()
