"""Excision reaches what pipelines made of the events: state, clocks, what is at hand, views,
derived topics, versions and pipelines further down. Stopped at every step, and begun again.
"""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import headrace as hr
from headrace.errors import ExcisionRefused, NotForgotten
from headrace.events import Change, Event, EventStore, ExcisionResult, excise, open_store, stream
from headrace.events.privacy.scan import scan
from headrace.sinks.sync import describe_followers
from headrace.testing.pipelines import PipelineTest

EMAIL = 'ada "the countess" lovelace@example.com'
OTHERS = [0, 1, 3, 4]
EXCISERS = Path(__file__).with_name("excisers.py")


class Killed(Exception):
    """The process was killed here."""


def fill(store: EventStore, first: int = 0, count: int = 20) -> None:
    for n in range(first, first + count):
        mail = EMAIL if n % 5 == 2 else f"someone-{n % 5}@example.com"
        store.commit(
            [
                Change(
                    f"customer-{n % 5}",
                    [Event("Visited", {"n": n, "email": mail}, subject=str(n % 5))],
                )
            ]
        )


def visits() -> hr.Pipeline:
    pipeline = hr.Pipeline("visits")
    events = stream(pipeline, "bank")
    pipeline.view(
        "mails", events.group_by("data").aggregate(n=hr.agg.count(), newest=hr.agg.max("version"))
    )
    pipeline.view("counts", events.group_by("entity").aggregate(n=hr.agg.count()))
    pipeline.write("seen", events.select("entity", "version", "data"))
    pipeline.write(
        "totals", events.group_by("entity").aggregate(n=hr.agg.count(), last=hr.agg.max("data"))
    )
    return pipeline


def further() -> hr.Pipeline:
    pipeline = hr.Pipeline("further")
    seen = pipeline.topic("seen", schema="entity STRING, version BIGINT, data STRING", key="entity")
    pipeline.view(
        "longest", seen.group_by("entity").aggregate(n=hr.agg.count(), last=hr.agg.max("data"))
    )
    return pipeline


def view(test: PipelineTest, name: str) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for row in test.view(name))


class World:
    """A store with two pipelines, one behind the other, and a version of the first."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.log = stack.enter_context(hr.open_log(f"file:{root / 'log'}", durability="os"))
        self.store = stack.enter_context(open_store(self.log, "bank"))
        self.visits = stack.enter_context(PipelineTest(visits(), root / "visits", log=self.log))
        self.further = stack.enter_context(PipelineTest(further(), root / "further", log=self.log))

    def settle(self) -> None:
        self.visits.settle()
        self.further.settle()

    def restart(self) -> None:
        self.visits.restart()
        self.further.restart()
        self.settle()

    @property
    def roots(self) -> list[Path]:
        return [self.root / name for name in ("log", "visits", "further")]


def check(world: World, *, visits_of_others: int) -> None:
    """As if she had never been there, in everything that is derived; others' rows of topics are
    where they were, each once.
    """
    assert scan(world.roots, [EMAIL]) == []
    world.restart()
    each = visits_of_others // 4
    assert view(world.visits, "counts") == [(f"customer-{n}", each) for n in OTHERS]
    assert [row[1] for row in view(world.visits, "mails")] == [1] * visits_of_others
    seen = [
        row
        for row in world.log.read("seen").to_pylist()
        if row["entity"] in {f"customer-{n}" for n in OTHERS}
    ]
    assert len(seen) == visits_of_others == len({(row["entity"], row["version"]) for row in seen})
    assert "customer-2" not in {
        row["entity"] for topic in ("seen", "totals") for row in world.log.read(topic).to_pylist()
    }
    assert [row[:2] for row in view(world.further, "longest")] == [
        (f"customer-{n}", each) for n in OTHERS
    ]
    assert world.log.verify() == []
    assert scan(world.roots, [EMAIL]) == []


def test_everything_that_was_derived_forgets(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        fill(world.store)
        world.settle()
        with world.visits.replay("v2") as version:
            version.settle()
        offsets = [
            row["_offset"]
            for row in world.log.read("seen").to_pylist()
            if row["entity"] != "customer-2"
        ]
        roots = {found.file.relative_to(tmp_path).parts[:2] for found in scan(world.roots, [EMAIL])}
        assert {
            ("log", "journal"),
            ("log", "topics"),
            ("visits", "state"),
            ("further", "state"),
        } <= roots
        done = excise(world.store, "2", values=[EMAIL])
        assert (done.events, sorted(done.pipelines)) == (4, ["further", "visits", "visits.v2"])
        assert (done.derived["seen"], done.derived["seen.v2"], done.unreached) == (4, 4, ())
        assert done.derived["totals"] >= 1
        assert view(world.visits, "counts") == []  # until the next run
        check(world, visits_of_others=16)
        assert [row["_offset"] for row in world.log.read("seen").to_pylist()] == offsets
        with world.visits.replay("v2") as version:
            version.settle()
            assert view(version, "counts.v2") == view(world.visits, "counts")


def test_pipelines_go_on_after_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        fill(world.store, count=10)
        world.settle()
        fill(world.store, 10, 5)  # in no tick yet
        excise(world.store, "2", values=[EMAIL])
        world.restart()
        assert [row["n"] for row in world.visits.view("counts")] == [3, 3, 3, 3]
        assert len(world.log.read("seen").to_pylist()) == 12
        for n in OTHERS:
            world.store.append(f"customer-{n}", Event("Visited", {"n": 100 + n}, subject=str(n)))
        world.settle()
        world.visits.restart(shards=3, lose_local_store=True)
        world.settle()
        check(world, visits_of_others=16)
        totals = {row["entity"]: row["n"] for row in world.log.read("totals").to_pylist()}
        assert totals == {f"customer-{n}": 4 for n in OTHERS}


def test_without_values_her_rows_go_by_name(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        fill(world.store)
        world.settle()
        excise(world.store, "2")
        check(world, visits_of_others=16)


def steps(root: Path) -> list[str]:
    seen: list[str] = []
    with ExitStack() as stack:
        world = World(root, stack)
        fill(world.store, count=10)
        world.settle()
        excise(world.store, "2", values=[EMAIL], step=seen.append)
    return seen


def excised_but_killed(world: World, at: int) -> None:
    left = [at]

    def die(_name: str) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1

    with pytest.raises(Killed):
        excise(world.store, "2", values=[EMAIL], step=die)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_it_goes_on(tmp_path: Path, every: int) -> None:
    names = steps(tmp_path / "first")
    assert len(names) >= 20
    for at in range(0, len(names) - 1, every):
        with ExitStack() as stack:
            world = World(tmp_path / str(at), stack)
            fill(world.store, count=10)
            world.settle()
            excised_but_killed(world, at)
            if at % 3 == 0:  # somebody starts the pipelines before it has gone on
                world.restart()
            if at % 3 == 1:
                fill(world.store, 10, 5)
        with ExitStack() as stack:
            world = World(tmp_path / str(at), stack)
            done = excise(world.store, "2", values=[EMAIL])
            assert isinstance(done, ExcisionResult)
            check(world, visits_of_others=12 if at % 3 == 1 else 8)


def test_an_excision_that_is_blocked_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        fill(world.store)
        world.settle()
        state = world.further.state
        world.further.runner.write_status()
        status = json.loads((state / "status.json").read_text())
        (state / "status.json").write_text(
            json.dumps(
                {
                    **status,
                    "process": 1,
                    "process_began": (
                        Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
                    ),
                }
            )
        )
        with pytest.raises(ExcisionRefused, match="'further' is running, in process 1"):
            excise(world.store, "2", values=[EMAIL])
        (state / "status.json").unlink()
        state.rename(tmp_path / "elsewhere")
        with pytest.raises(ExcisionRefused, match="state of the pipeline 'further' is not in"):
            excise(world.store, "2", values=[EMAIL])
        assert len(world.store.load("customer-2")) == 4
        assert "bank.forgotten" not in world.log.topics()
        excise(world.store, "2", values=[EMAIL], also=[tmp_path / "elsewhere"])
        assert scan([tmp_path], [EMAIL]) == []


def test_a_pipeline_whose_inputs_are_gone_is_refused(tmp_path: Path) -> None:
    pipeline = hr.Pipeline("both")
    events = stream(pipeline, "bank").select("entity")
    shorts = pipeline.topic("shorts", schema="entity STRING", key="entity")
    pipeline.view("n", events.union(shorts).group_by("entity").aggregate(n=hr.agg.count()))
    with (
        hr.open_log(f"file:{tmp_path / 'log'}", durability="os") as log,
        open_store(log, "bank") as store,
    ):
        log.create_topic(
            "shorts", "entity STRING", key="entity", retention_bytes=1, segment_bytes=4096
        )
        fill(store)
        with PipelineTest(pipeline, tmp_path / "both", log=log) as test:
            for n in range(50):
                test.feed("shorts", [{"entity": f"{n}" * 100}])
            test.settle()
            log.maintain()
            assert log.start_offsets("shorts")[0] > 0
            with pytest.raises(
                ExcisionRefused, match="'both' cannot be built again: retention or compaction"
            ):
                excise(store, "2")
            assert len(store.load("customer-2")) == 4


def test_the_state_of_a_pipeline_that_was_given_up_is_not_passed_over(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        fill(world.store)
        world.settle()
        world.log.delete_topic("__ticks.further")  # nobody knows any more what it has read
        with pytest.raises(NotForgotten, match="views.db"):
            excise(world.store, "2", values=[EMAIL])
        shutil.rmtree(world.further.state)
        assert excise(world.store, "2", values=[EMAIL]).pipelines == ("visits",)
        assert scan(world.roots, [EMAIL]) == []


def test_an_output_that_was_being_built_is_built_from_what_is_left(tmp_path: Path) -> None:
    with (
        hr.open_log(f"file:{tmp_path / 'log'}", durability="os") as log,
        open_store(log, "bank") as store,
    ):
        few = hr.Pipeline("visits")
        events = stream(few, "bank")
        few.view("counts", events.group_by("entity").aggregate(n=hr.agg.count()))
        few.write("seen", events.select("entity", "version", "data"))
        with PipelineTest(few, tmp_path / "visits", log=log) as test:
            for n in range(4):
                fill(store, 5 * n, 5)
                test.settle()
        with PipelineTest(visits(), tmp_path / "visits", log=log) as test:
            test.step(max_ticks=2)  # the new outputs are half way
            assert len(test.runner.queries) == 2
            excise(store, "2", values=[EMAIL])
            assert scan([tmp_path], [EMAIL]) == []
            test.restart()
            test.settle()
            assert len(test.runner.queries) == 1
            assert view(test, "counts") == [(f"customer-{n}", 4) for n in OTHERS]
            assert len(test.view("mails")) == 16
            assert sorted(
                (row["entity"], row["version"]) for row in log.read("seen").to_pylist()
            ) == sorted((f"customer-{n}", v) for n in OTHERS for v in range(1, 5))
            assert {
                entity: row["n"] for entity, row in test.folded("totals", "entity").items()
            } == {f"customer-{n}": 4 for n in OTHERS}


def test_sinks_are_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        fill(world.store)
        world.settle()
        hr.sinks.sqlite(tmp_path / "outside.db").run(
            "seen", log=world.log.address, until_caught_up=True
        )
        assert describe_followers(world.store.log, "seen") == [
            "the sink 'seen.sqlite' (sqlite seen), which follows the topic 'seen'"
        ]
        done = excise(world.store, "2", values=[EMAIL])
        assert done.unreached == (
            "the sink 'seen.sqlite' (sqlite seen), which follows the topic 'seen'",
        )
        assert "seen.sqlite" in world.log.read("bank.forgotten").to_pylist()[-1]["details"]


def command(*arguments: str, root: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace.cli",
            "events",
            "excise",
            "--log",
            f"file:{root / 'log'}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_is_followed_by_another(tmp_path: Path, every: int) -> None:
    """By kill -9; then comes the command that a person would type."""
    names = steps(tmp_path / "first")
    for at in range(every // 2, len(names) - 1, every):
        root = tmp_path / str(at)
        with ExitStack() as stack:
            world = World(root, stack)
            fill(world.store, count=10)
            world.settle()
        killed = subprocess.run(
            [sys.executable, str(EXCISERS), str(root / "log"), "2", EMAIL, str(at)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (killed.returncode, killed.stdout.split("\n")[at]) == (
            -signal.SIGKILL,
            names[at],
        ), killed.stderr
        done = command("--subject", "2", "--value", EMAIL, root=root)
        assert done.returncode == 0, done.stderr
        assert "No file contains the values" in done.stdout
        with ExitStack() as stack:
            check(World(root, stack), visits_of_others=8)
        again = command("--subject", "2", "--value", EMAIL, root=root)
        assert again.returncode != 0
        assert "There is nothing of the subject '2'" in again.stderr
