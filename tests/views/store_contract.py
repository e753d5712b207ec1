"""What every view store promises, whatever keeps its rows. A store's test class gives an
`open_store` fixture and inherits the tests.
"""

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headrace.errors import (
    BadName,
    BadSchema,
    BugError,
    ChangesGone,
    FencedError,
    IncompatibleChange,
    InputError,
    UnknownColumn,
    UnknownView,
)
from headrace.operators.changelog import fold
from headrace.types.schema import parse_schema
from headrace.views.store import ViewStore

COUNTS = parse_schema("k BIGINT, n BIGINT")
OpenStore = Callable[..., ViewStore]
Change = tuple[int, str, tuple[Any, ...]]


def changes(*rows: Change, schema: pa.Schema = COUNTS) -> pa.Table:
    """Changes as the engine gives them: (tick, change, row)."""
    full = schema.append(pa.field("_tick", pa.int64())).append(
        pa.field("_change_type", pa.string())
    )
    listed = [
        dict(zip(full.names, (*values, tick, kind), strict=True)) for tick, kind, values in rows
    ]
    return pa.Table.from_pylist(listed, full)


def inserts(tick: int, *rows: tuple[Any, ...], schema: pa.Schema = COUNTS) -> pa.Table:
    return changes(*((tick, "insert", row) for row in rows), schema=schema)


def update(tick: int, before: tuple[Any, ...], after: tuple[Any, ...]) -> list[Change]:
    return [(tick, "update_preimage", before), (tick, "update_postimage", after)]


def rows(store: ViewStore, view: str = "counts") -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in store.reader.table(view).to_pylist()]


class ViewContract:
    """`open_store()` opens the same store each time, as a process that starts again would;
    `open_store(max_changes=…)` bounds what it keeps for followers.
    """

    @pytest.fixture
    def store(self, open_store: OpenStore) -> ViewStore:
        store = open_store()
        store.declare("counts", COUNTS, ("k",))
        return store

    # Folding

    def test_a_new_view_is_empty_and_at_tick_0(self, store: ViewStore) -> None:
        assert rows(store) == []
        assert store.reader.tick("counts") == 0
        assert store.reader.table("counts").schema.equals(COUNTS, check_metadata=True)
        assert list(store.reader.changes_since("counts", 0)) == []

    def test_changes_fold_into_rows(self, store: ViewStore) -> None:
        store.commit(1, 1, {"counts": inserts(1, (1, 10), (2, 20), (3, 30))})
        store.commit(
            2, 1, {"counts": changes(*update(2, (1, 10), (1, 11)), (2, "delete", (2, 20)))}
        )
        assert rows(store) == [(1, 11), (3, 30)]
        assert store.reader.tick("counts") == 2

    def test_the_last_change_of_a_key_in_a_commit_counts(self, store: ViewStore) -> None:
        steps = changes(
            (1, "insert", (1, 1)),
            (1, "insert", (2, 2)),
            *update(2, (1, 1), (1, 5)),
            (2, "delete", (2, 2)),
            (3, "delete", (1, 5)),
            (3, "insert", (2, 7)),
        )
        store.commit(3, 1, {"counts": steps})
        assert rows(store) == [(2, 7)]

    def test_deleted_and_inserted_in_one_tick(self, store: ViewStore) -> None:
        store.commit(1, 1, {"counts": inserts(1, (1, 1))})
        store.commit(2, 1, {"counts": changes((2, "delete", (1, 1)), (2, "insert", (1, 2)))})
        assert rows(store) == [(1, 2)]

    @pytest.mark.parametrize("odd", [math.nan, None, 0.0])
    def test_the_last_change_of_an_odd_key_counts_too(
        self, store: ViewStore, odd: float | None
    ) -> None:
        schema = parse_schema("k DOUBLE, n BIGINT")
        store.declare("odd", schema, ("k",))
        same_key = -0.0 if odd == 0 else odd
        store.commit(
            2,
            1,
            {"odd": changes((1, "insert", (odd, 1)), (2, "delete", (same_key, 1)), schema=schema)},
        )
        assert rows(store, "odd") == []
        store.commit(
            4,
            1,
            {
                "odd": changes(
                    (3, "insert", (odd, 1)),
                    (4, "delete", (odd, 1)),
                    (4, "insert", (same_key, 2)),
                    schema=schema,
                )
            },
        )
        assert [n for _, n in rows(store, "odd")] == [2]

    def test_many_rows_in_one_commit(self, store: ViewStore) -> None:
        count = 150_001
        table = pa.table(
            {
                "k": range(count),
                "n": range(count),
                "_tick": [1] * count,
                "_change_type": ["insert"] * count,
            }
        )
        store.commit(1, 1, {"counts": table})
        assert store.reader.table("counts").equals(table.select(["k", "n"]).cast(COUNTS))

    # Ticks, epochs

    def test_ticks_that_a_view_has_are_dropped(self, store: ViewStore) -> None:
        first = changes((1, "insert", (1, 1)), *update(2, (1, 1), (1, 2)))
        store.commit(2, 1, {"counts": first})
        store.commit(2, 1, {"counts": first})
        store.commit(1, 1, {"counts": inserts(1, (1, 1))})
        assert (rows(store), store.reader.tick("counts")) == ([(1, 2)], 2)
        longer = changes(
            (1, "insert", (1, 1)),
            *update(2, (1, 1), (1, 2)),
            *update(3, (1, 2), (1, 3)),
            (3, "insert", (9, 9)),
        )
        store.commit(3, 1, {"counts": longer})
        assert (rows(store), store.reader.tick("counts")) == ([(1, 3), (9, 9)], 3)
        assert [tick for tick, _ in store.reader.changes_since("counts", 0)] == [1, 2, 3]

    def test_all_declared_views_move_together(self, store: ViewStore) -> None:
        store.declare("quiet", COUNTS, ("k",))
        store.commit(7, 1, {"counts": inserts(7, (1, 1))})
        assert store.reader.tick("quiet") == 7
        store.commit(8, 1, {})
        assert [store.reader.tick(name) for name in ("counts", "quiet")] == [8, 8]

    def test_a_commit_can_move_some_views_only(self, store: ViewStore) -> None:
        store.declare("behind", COUNTS, ("k",))
        store.commit(5, 1, {"counts": inserts(5, (1, 1))}, views=["counts"])
        assert [store.reader.tick(name) for name in ("counts", "behind")] == [5, 0]
        store.commit(2, 1, {"behind": inserts(2, (1, 1))}, views=["behind"])
        assert [store.reader.tick(name) for name in ("counts", "behind")] == [5, 2]
        with pytest.raises(BugError, match="'behind'"):
            store.commit(6, 1, {"behind": inserts(6, (2, 1))}, views=["counts"])

    def test_a_view_that_nobody_declared_this_time_stays_where_it_is(
        self, store: ViewStore, open_store: OpenStore
    ) -> None:
        store.commit(1, 1, {"counts": inserts(1, (1, 1))})
        other = open_store()
        other.declare("new", COUNTS, ("k",))
        other.commit(2, 1, {})
        assert [other.reader.tick(name) for name in ("counts", "new")] == [1, 2]

    def test_an_older_epoch_is_refused_and_changes_nothing(
        self, store: ViewStore, open_store: OpenStore
    ) -> None:
        store.commit(1, 5, {"counts": inserts(1, (1, 1))})
        with pytest.raises(FencedError, match="epoch 5.*epoch 4") as caught:
            store.commit(2, 4, {"counts": inserts(2, (2, 2))})
        assert "stop this run" in caught.value.fix
        assert (rows(store), store.reader.tick("counts")) == ([(1, 1)], 1)
        newer = open_store()
        newer.fence(6)
        with pytest.raises(FencedError):
            store.commit(2, 5, {})
        newer.declare("counts", COUNTS, ("k",))
        newer.commit(2, 6, {})
        assert store.reader.tick("counts") == 2

    def test_committed_rows_survive_a_restart(
        self, store: ViewStore, open_store: OpenStore
    ) -> None:
        store.commit(3, 2, {"counts": inserts(3, (1, 1))})
        store.close()
        again = open_store()
        again.declare("counts", COUNTS, ("k",))
        assert (rows(again), again.reader.tick("counts")) == ([(1, 1)], 3)
        with pytest.raises(FencedError):
            again.commit(4, 1, {})

    @pytest.mark.parametrize(
        ("bad", "why"),
        [
            (pa.table({"k": [1], "_tick": [2], "_change_type": ["insert"]}), "lack the column 'n'"),
            (pa.table({"k": [1], "n": [1], "_tick": [2]}), "lack the column '_change_type'"),
            (pa.table({"k": [1], "n": [1], "_change_type": ["insert"]}), "lack the column '_tick'"),
            (
                pa.table({"k": [1], "n": [1.5], "_tick": [2], "_change_type": ["insert"]}),
                "n: double",
            ),
            (changes((2, "upsert", (1, 1))), "the change 'upsert'"),
            (changes((3, "insert", (1, 1))), "beyond tick 2"),
            (changes((2, "insert", (1, 1)), (1, "insert", (2, 1))), "order"),
        ],
    )
    def test_changes_that_are_not_as_promised_store_nothing(
        self, store: ViewStore, bad: pa.Table, why: str
    ) -> None:
        store.declare("other", COUNTS, ("k",))
        with pytest.raises(BugError, match=why):
            store.commit(2, 1, {"other": inserts(2, (1, 1)), "counts": bad})
        assert [store.reader.tick(name) for name in ("counts", "other")] == [0, 0]
        assert rows(store, "other") == []

    def test_changes_of_an_undeclared_view_are_refused(self, store: ViewStore) -> None:
        with pytest.raises(UnknownView, match="did you mean 'counts'"):
            store.commit(1, 1, {"count": inserts(1, (1, 1))})

    # Declaring

    def test_declaring_again_keeps_rows_and_takes_new_comments(self, store: ViewStore) -> None:
        store.commit(1, 1, {"counts": inserts(1, (1, 1))})
        commented = parse_schema("k BIGINT NOT NULL COMMENT 'whose', n BIGINT")
        store.declare("counts", commented, ("k",))
        assert rows(store) == [(1, 1)]
        stored = store.reader.table("counts").schema
        assert stored.field("k").metadata == commented.field("k").metadata
        assert stored.field("k").nullable

    @pytest.mark.parametrize(
        ("ddl", "key", "why"),
        [
            ("k BIGINT", ("k",), "'n' is gone"),
            ("k BIGINT, n BIGINT, m BIGINT", ("k",), "'m' is new"),
            ("k BIGINT, n DOUBLE", ("k",), "'n BIGINT' is now 'n DOUBLE'"),
            ("k BIGINT, n BIGINT", ("n",), r"the key was \(k\) and is now \(n\)"),
            ("k BIGINT, n BIGINT", (), r"the key was \(k\) and is now \(\)"),
            ("n BIGINT, k BIGINT", ("k",), "the order of the columns was k, n"),
        ],
    )
    def test_a_view_with_other_columns_or_key_is_refused(
        self, store: ViewStore, ddl: str, key: tuple[str, ...], why: str
    ) -> None:
        store.commit(1, 1, {"counts": inserts(1, (1, 1))})
        with pytest.raises(IncompatibleChange, match=why) as caught:
            store.declare("counts", parse_schema(ddl), key)
        assert "'counts'" in caught.value.message
        assert "headrace replay" in caught.value.fix
        assert rows(store) == [(1, 1)]

    @pytest.mark.parametrize("name", ["", "_rows_1", "sqlite_x", "a b", "x" * 201, "COUNTS"])
    def test_a_name_that_cannot_be_is_refused(self, store: ViewStore, name: str) -> None:
        with pytest.raises(BadName):
            store.declare(name, COUNTS, ("k",))

    def test_columns_that_cannot_be_are_refused(self, store: ViewStore) -> None:
        with pytest.raises(UnknownColumn, match="did you mean 'k'"):
            store.declare("x", COUNTS, ("kk",))
        with pytest.raises(BadSchema, match="cannot be a key"):
            store.declare("x", parse_schema("k ARRAY<INT>, n INT"), ("k",))
        with pytest.raises(BadSchema, match="reserved"):
            store.declare("x", pa.schema([("k", pa.int64()), ("_tick", pa.int64())]), ("k",))
        with pytest.raises(BadSchema, match="twice"):
            store.declare("x", pa.schema([("k", pa.int64()), ("K", pa.int64())]), ("k",))
        with pytest.raises(BadSchema, match="uint8"):
            store.declare("x", pa.schema([("k", pa.uint8())]), ("k",))

    # Keys

    @pytest.mark.parametrize(
        ("ddl", "keys"),
        [
            ("BIGINT", [-5, 0, 7, None]),
            ("STRING", ["", "a", "é", None]),
            ("BINARY", [None, b"", b"\0", b"\xff"]),
            ("DOUBLE", [-1.5, 0.0, 3.0, math.inf, math.nan, None]),
            ("DECIMAL(10, 2)", [Decimal("1.50"), Decimal("2.00"), None]),
            ("BOOLEAN", [False, True, None]),
            (
                "TIMESTAMP",
                [
                    datetime(2026, 1, 1, tzinfo=UTC),
                    datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
                    None,
                ],
            ),
        ],
    )
    def test_a_key_of_any_type_finds_changes_and_deletes_its_row(
        self, store: ViewStore, ddl: str, keys: list[Any]
    ) -> None:
        schema = parse_schema(f"k {ddl}, n BIGINT")
        store.declare("typed", schema, ("k",))
        store.commit(1, 1, {"typed": inserts(1, *((key, 1) for key in keys), schema=schema)})
        store.commit(
            2,
            1,
            {"typed": changes(*((2, "update_postimage", (key, 2)) for key in keys), schema=schema)},
        )
        in_order = pa.array(keys, schema.field("k").type, from_pandas=False).to_pylist()
        assert repr(rows(store, "typed")) == repr([(key, 2) for key in in_order])
        for number, key in enumerate(in_order):
            assert repr(store.reader.get("typed", (key,))) == repr({"k": key, "n": 2})
            store.commit(
                3 + number, 1, {"typed": changes((3 + number, "delete", (key, 2)), schema=schema)}
            )
            assert store.reader.get("typed", (key,)) is None
        assert rows(store, "typed") == []

    def test_keys_differ_by_all_their_columns(self, store: ViewStore) -> None:
        schema = parse_schema("region STRING, k BIGINT, n DOUBLE")
        store.declare("two", schema, ("region", "k"))
        given = [
            ("eu", 1, 0.5),
            ("eu", None, 1.5),
            ("us", 1, math.nan),
            (None, 1, None),
            (None, None, 2.5),
        ]
        store.commit(1, 1, {"two": inserts(1, *given, schema=schema)})
        assert repr(rows(store, "two")) == repr(given)
        assert (
            store.reader.get("two", ("eu", 1))
            == store.reader.get("two", {"k": 1, "region": "eu"})
            == {"region": "eu", "k": 1, "n": 0.5}
        )
        assert store.reader.get("two", ("us", 2)) is None
        store.commit(
            2,
            1,
            {
                "two": changes(
                    (2, "delete", (None, None, 2.5)), (2, "delete", ("eu", 1, 0.5)), schema=schema
                )
            },
        )
        assert [row[:2] for row in rows(store, "two")] == [("eu", None), ("us", 1), (None, 1)]

    def test_scanning_by_key(self, store: ViewStore) -> None:
        schema = parse_schema("region STRING, k BIGINT, n BIGINT")
        store.declare("two", schema, ("region", "k"))
        store.commit(
            1,
            1,
            {
                "two": inserts(
                    1,
                    *((region, k, 0) for region in ("ap", "eu", "us") for k in range(4)),
                    schema=schema,
                )
            },
        )

        def found(**bounds: Any) -> list[str]:
            return [
                f"{row['region']}{row['k']}"
                for row in store.reader.scan("two", **bounds).to_pylist()
            ]

        assert (
            found(start="eu", stop="us")
            == found(start=("eu",), stop=("us", 0))
            == ["eu0", "eu1", "eu2", "eu3"]
        )
        assert found(start=("eu", 2), limit=3) == ["eu2", "eu3", "us0"]
        assert found(stop=("ap", 1)) == ["ap0"]
        assert found(start="us", reverse=True) == ["us3", "us2", "us1", "us0"]
        assert found(limit=0) == found(start="x") == []
        assert len(found()) == 12

    @pytest.mark.parametrize("key", [(), (1, 2), {"x": 1}, "a", 1.5, 2**63])
    def test_a_value_that_is_no_key_is_refused(self, store: ViewStore, key: Any) -> None:
        with pytest.raises(InputError, match="key"):
            store.reader.get("counts", key)

    def test_an_unknown_view_names_the_nearest(self, store: ViewStore) -> None:
        for read in (
            store.reader.tick,
            store.reader.table,
            lambda name: store.reader.get(name, 1),
            lambda name: store.reader.changes_since(name, 0),
        ):
            with pytest.raises(UnknownView, match="did you mean 'counts'"):
                read("count")

    # Following

    def test_changes_can_be_followed_from_any_tick(self, store: ViewStore) -> None:
        steps = [
            changes((1, "insert", (1, 1)), (1, "insert", (2, 2))),
            changes(*update(3, (1, 1), (1, 5)), (4, "delete", (2, 2))),
        ]
        store.commit(2, 1, {"counts": steps[0]})
        store.commit(5, 1, {"counts": steps[1]})
        followed = list(store.reader.changes_since("counts", 0))
        assert [tick for tick, _ in followed] == [1, 3, 4]
        assert [row for _, table in followed for row in table.to_pylist()] == pa.concat_tables(
            steps
        ).drop_columns(["_tick"]).to_pylist()
        assert followed[0][1].schema.names == ["k", "n", "_change_type"]
        assert [tick for tick, _ in store.reader.changes_since("counts", 3)] == [4]
        assert list(store.reader.changes_since("counts", 5)) == []

    def test_types_survive_in_changes(self, store: ViewStore) -> None:
        schema = parse_schema(
            "k VARCHAR(3), d DECIMAL(10, 2), m MAP<STRING, ARRAY<TIMESTAMP>>, x DOUBLE"
        )
        store.declare("typed", schema, ("k",))
        row = ("a", Decimal("1.50"), [("t", [datetime(2026, 1, 1, tzinfo=UTC), None])], -math.inf)
        store.commit(1, 1, {"typed": inserts(1, row, schema=schema)})
        ((_, followed),) = store.reader.changes_since("typed", 0)
        for table in (store.reader.table("typed"), followed.drop_columns(["_change_type"])):
            assert table.schema.equals(schema, check_metadata=True)
            assert table.to_pylist() == [dict(zip(schema.names, row, strict=True))]

    def test_a_subscriber_that_fell_behind_must_read_a_new_snapshot(
        self, open_store: OpenStore
    ) -> None:
        store = open_store(max_changes=10)
        store.declare("counts", COUNTS, ("k",))
        for tick in range(1, 31):
            store.commit(tick, 1, {"counts": inserts(tick, (tick, tick))})
        kept = [tick for tick, _ in store.reader.changes_since("counts", 20)]
        assert kept == list(range(21, 31))
        with pytest.raises(
            ChangesGone, match="since tick 19.*after tick 20.*shows tick 30"
        ) as caught:
            store.reader.changes_since("counts", 19)
        assert "read the whole view" in caught.value.fix
        assert (caught.value.kept_after, caught.value.tick) == (20, 30)
        with pytest.raises(ChangesGone):
            store.reader.changes_since("counts", 31)

    def test_a_view_may_keep_more_or_less_than_the_others(self, open_store: OpenStore) -> None:
        store = open_store(max_changes=10)
        for view, kept in (("counts", 4), ("more", 30), ("usual", None)):
            store.declare(view, COUNTS, ("k",), max_changes=kept)
        for tick in range(1, 31):
            store.commit(
                tick, 1, {view: inserts(tick, (tick, tick)) for view in ("counts", "more", "usual")}
            )
        assert [store.reader.views()[at].kept_after for at in range(3)] == [26, 0, 20]

    def test_of_a_commit_beyond_the_bound_the_newest_whole_ticks_are_kept(
        self, open_store: OpenStore
    ) -> None:
        store = open_store(max_changes=10)
        store.declare("counts", COUNTS, ("k",))
        store.commit(1, 1, {"counts": inserts(1, (1, 1))})
        big = changes(
            *((2, "insert", (k, 0)) for k in range(100, 111)),
            (3, "insert", (3, 3)),
            (4, "insert", (4, 4)),
        )
        store.commit(4, 1, {"counts": big})
        assert [tick for tick, _ in store.reader.changes_since("counts", 2)] == [3, 4]
        for before in (0, 1):
            with pytest.raises(ChangesGone):
                store.reader.changes_since("counts", before)
        store.commit(5, 1, {"counts": inserts(5, *((k, 0) for k in range(200, 211)))})
        assert list(store.reader.changes_since("counts", 5)) == []
        with pytest.raises(ChangesGone):
            store.reader.changes_since("counts", 4)

    # Streams

    def test_a_stream_keeps_its_newest_rows_with_their_ticks(self, open_store: OpenStore) -> None:
        store = open_store()
        store.declare("events", COUNTS, max_rows=3)
        store.commit(2, 1, {"events": inserts(1, (1, 1), (1, 1)).drop_columns(["_change_type"])})
        store.commit(2, 1, {"events": inserts(2, (7, 7))})
        assert rows(store, "events") == [(1, 1, 1), (1, 1, 1)]
        store.commit(4, 1, {"events": changes((3, "insert", (2, 2)), (4, "insert", (3, 3)))})
        assert rows(store, "events") == [(1, 1, 1), (2, 2, 3), (3, 3, 4)]
        store.commit(5, 1, {"events": inserts(5, *((n, n) for n in range(10)))})
        assert rows(store, "events") == [(7, 7, 5), (8, 8, 5), (9, 9, 5)]
        assert [tick for tick, _ in store.reader.changes_since("events", 0)] == [1, 3, 4, 5]
        store.commit(6, 1, {"events": inserts(6, (0, 0))})
        assert rows(store, "events") == [(8, 8, 5), (9, 9, 5), (0, 0, 6)]
        assert [
            row["n"] for row in store.reader.scan("events", start=5, stop=6, limit=1).to_pylist()
        ] == [8]
        assert [
            row["n"] for row in store.reader.scan("events", limit=2, reverse=True).to_pylist()
        ] == [0, 9]

    def test_a_streams_bound_can_be_changed(self, open_store: OpenStore) -> None:
        store = open_store()
        store.declare("events", COUNTS, max_rows=2)
        store.commit(1, 1, {"events": inserts(1, *((n, n) for n in range(5)))})
        store.declare("events", COUNTS, max_rows=4)
        store.commit(2, 1, {"events": inserts(2, *((n, n) for n in range(3)))})
        assert [n for _, n, _ in rows(store, "events")] == [4, 0, 1, 2]

    def test_deletes_and_lookups_are_refused_for_a_stream(self, open_store: OpenStore) -> None:
        store = open_store()
        store.declare("events", COUNTS)
        with pytest.raises(BugError, match="'delete'"):
            store.commit(1, 1, {"events": changes((1, "delete", (1, 1)))})
        with pytest.raises(InputError, match="a stream"):
            store.reader.get("events", 1)

    # Snapshots

    def test_a_snapshot_shows_one_moment_of_all_views(self, store: ViewStore) -> None:
        store.declare("other", COUNTS, ("k",))
        store.commit(1, 1, {"counts": inserts(1, (1, 1)), "other": inserts(1, (1, 1))})
        with store.reader.snapshot() as snap:
            assert snap.tick("counts") == 1
            store.commit(2, 1, {"counts": inserts(2, (2, 2)), "other": inserts(2, (2, 2))})
            assert [snap.tick(name) for name in ("counts", "other")] == [1, 1]
            assert snap.table("other").num_rows == snap.count("counts") == 1
            assert [view.tick for view in snap.views()] == [1, 1]
            assert list(snap.changes_since("counts", 1)) == []
            assert sum(batch.num_rows for batch in snap.batches("counts")) == 1
            assert store.reader.tick("counts") == 2
        assert store.reader.table("other").num_rows == 2


def followed(
    store: ViewStore, view: str, tick: int, into: dict[tuple[Any, ...], Any]
) -> Iterator[tuple[int, dict[tuple[Any, ...], Any]]]:
    """The table after each tick that changed it, from what a follower had."""
    key = store.reader.views()[0].key
    for number, table in store.reader.changes_since(view, tick):
        into = fold(table, key, into)
        yield number, into
