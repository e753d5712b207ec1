"""The `eventsourcing` library on our log: its own abstract test cases, and one of its applications
from beginning to end.
"""

import tempfile
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest

pytest.importorskip("eventsourcing")

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    IntegrityError,
    ProcessRecorder,
    StoredEvent,
    Tracking,
    TrackingRecorder,
)
from eventsourcing.projection import Projection, ProjectionRunner
from eventsourcing.tests import persistence as theirs
from eventsourcing.utils import Environment

import headrace as hr
from headrace.events.eventsourcing import (
    HeadraceAggregateRecorder,
    HeadraceApplicationRecorder,
    HeadraceFactory,
    HeadraceProcessRecorder,
    HeadraceTrackingRecorder,
)

MODULE = "headrace.events.eventsourcing"


class WithFactory:
    """A log in a directory of its own for each test."""

    factory: HeadraceFactory

    def setUp(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.factory = HeadraceFactory(
            Environment(env={"HEADRACE_LOG": f"file:{self.directory.name}/log"})
        )

    def tearDown(self) -> None:
        self.factory.close()
        self.directory.cleanup()


class TestAggregateRecorder(WithFactory, theirs.AggregateRecorderTestCase):
    def create_recorder(self) -> AggregateRecorder:
        return self.factory.aggregate_recorder()


class TestApplicationRecorder(
    WithFactory, theirs.ApplicationRecorderTestCase[HeadraceApplicationRecorder]
):
    def create_recorder(self) -> HeadraceApplicationRecorder:
        recorder = self.factory.application_recorder()
        assert isinstance(recorder, HeadraceApplicationRecorder)
        return recorder

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestTrackingRecorder(WithFactory, theirs.TrackingRecorderTestCase):
    def create_recorder(self) -> TrackingRecorder:
        return self.factory.tracking_recorder()


class TestProcessRecorder(WithFactory, theirs.ProcessRecorderTestCase):
    def create_recorder(self) -> ProcessRecorder:
        return self.factory.process_recorder()


class TestNonInterleaving(WithFactory, theirs.NonInterleavingNotificationIDsBaseCase):
    def create_recorder(self) -> ApplicationRecorder:
        return self.factory.application_recorder()


class OwnTrackingRecorder(HeadraceTrackingRecorder):
    pass


class TestFactory(theirs.InfrastructureFactoryTestCase[HeadraceFactory]):
    def setUp(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.env = Environment(
            env={"PERSISTENCE_MODULE": MODULE, "HEADRACE_LOG": f"file:{self.directory.name}/log"}
        )
        super().setUp()

    def tearDown(self) -> None:
        super().tearDown()
        self.directory.cleanup()

    def expected_factory_class(self) -> type[HeadraceFactory]:
        return HeadraceFactory

    def expected_aggregate_recorder_class(self) -> type[AggregateRecorder]:
        return HeadraceAggregateRecorder

    def expected_application_recorder_class(self) -> type[ApplicationRecorder]:
        return HeadraceApplicationRecorder

    def expected_tracking_recorder_class(self) -> type[TrackingRecorder]:
        return HeadraceTrackingRecorder

    def tracking_recorder_subclass(self) -> type[TrackingRecorder]:
        return OwnTrackingRecorder

    def expected_process_recorder_class(self) -> type[ProcessRecorder]:
        return HeadraceProcessRecorder


class Dog(Aggregate):
    @event("Registered")
    def __init__(self, name: str) -> None:
        self.name = name
        self.tricks: list[str] = []

    @event("TrickAdded")
    def add_trick(self, trick: str) -> None:
        self.tricks.append(trick)


class Dogs(Application[UUID]):
    snapshotting_intervals: ClassVar[dict[type[Any], int]] = {Dog: 3}

    def register(self, name: str) -> UUID:
        dog = Dog(name)
        self.save(dog)
        return dog.id

    def teach(self, dog_id: UUID, trick: str) -> None:
        dog: Dog = self.repository.get(dog_id)
        dog.add_trick(trick)
        self.save(dog)


def environment(path: Path) -> dict[str, str]:
    return {"PERSISTENCE_MODULE": MODULE, "HEADRACE_LOG": f"file:{path}"}


def test_an_application_goes_on_where_it_was(tmp_path: Path) -> None:
    with Dogs(environment(tmp_path / "log")) as dogs:
        fido = dogs.register("Fido")
        for trick in ("roll", "sit", "play dead", "fetch"):
            dogs.teach(fido, trick)
    with Dogs(environment(tmp_path / "log")) as dogs:
        dog: Dog = dogs.repository.get(fido)
        assert (dog.version, dog.tricks) == (5, ["roll", "sit", "play dead", "fetch"])
        earlier: Dog = dogs.repository.get(fido, version=2)
        assert earlier.tricks == ["roll"]
        assert [
            notification.id for notification in dogs.notification_log.select(start=1, limit=10)
        ] == [1, 2, 3, 4, 5]
        assert dogs.snapshots is not None
        assert len(list(dogs.snapshots.get(fido))) == 1


class CountRecorder(HeadraceTrackingRecorder):
    counted = 0


class Count(Projection[CountRecorder]):
    name = "count"
    topics = ()

    def process_event(self, domain_event: Any, tracking: Tracking) -> None:
        CountRecorder.counted += 1
        self.view.insert_tracking(tracking)


def test_a_projection_of_the_library_follows(tmp_path: Path) -> None:
    with ProjectionRunner(
        application_class=Dogs,
        projection_class=Count,
        view_class=CountRecorder,
        env=environment(tmp_path / "log"),
    ) as runner:
        fido = runner.app.register("Fido")
        runner.app.teach(fido, "sit")
        runner.wait(2, timeout=10)
    assert CountRecorder.counted == 2


def test_versions_must_ascend_and_texts_can_be_ids(tmp_path: Path) -> None:
    with_text = environment(tmp_path / "log") | {"ORIGINATOR_ID_TYPE": "text"}
    factory = HeadraceFactory(Environment(env=with_text))
    recorder = factory.application_recorder()
    recorder.insert_events([StoredEvent("dog-1", 3, "T", b"\x00\xff")])
    assert [(each.originator_id, each.state) for each in recorder.select_events("dog-1")] == [
        ("dog-1", b"\x00\xff")
    ]
    with pytest.raises(IntegrityError, match="not new"):
        recorder.insert_events([StoredEvent("dog-1", 2, "T", b"")])
    factory.close()


@pytest.mark.parametrize(
    ("env", "message"),
    [({}, "HEADRACE_LOG"), ({"HEADRACE_LOG": "file:x", "ORIGINATOR_ID_TYPE": "int"}, "uuid")],
)
def test_a_wrong_environment_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(OSError, match=message):
        HeadraceFactory(Environment(env=env))


class Account(Aggregate):
    @event("Opened")
    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.balance = 0

    @event("Paid")
    def pay(self, amount: int) -> None:
        self.balance += amount


class Accounts(Application[UUID]):
    is_snapshotting_enabled = True


def subject_of(stored: StoredEvent) -> str | None:
    return "ada" if b"ada" in stored.state else None


def test_a_snapshot_of_an_older_version_was_refused(tmp_path: Path) -> None:
    env = {"PERSISTENCE_MODULE": MODULE, "HEADRACE_LOG": f"file:{tmp_path / 'log'}"}
    accounts = Accounts(env=env)
    account = Account("ada")
    for _ in range(9):
        account.pay(5)
    accounts.save(account)
    for version in (8, 3, 10, 5):
        accounts.take_snapshot(account.id, version=version)
        snapshots = accounts.snapshots
        assert snapshots is not None
        taken = [each.originator_version for each in snapshots.get(account.id)]
        assert taken == sorted(taken)
        assert version in taken
    for version in range(1, 11):
        at: Account = accounts.repository.get(account.id, version=version)
        assert (at.version, at.balance) == (version, 5 * (version - 1))
    accounts.close()
    again = Accounts(env=env)
    at = again.repository.get(account.id)
    assert at.balance == 45
    recorder = again.factory.aggregate_recorder(purpose="snapshots")
    with pytest.raises(IntegrityError, match="There is a snapshot"):
        recorder.insert_events(list(recorder.select_events(account.id, lte=3)))
    again.close()


@pytest.mark.parametrize("setting", ["originator", f"{__name__}:subject_of"])
def test_events_of_the_library_had_no_subject_and_could_not_be_excised(
    tmp_path: Path, setting: str
) -> None:
    env = {
        "PERSISTENCE_MODULE": MODULE,
        "HEADRACE_LOG": f"file:{tmp_path / 'log'}",
        "HEADRACE_SUBJECT": setting,
    }
    accounts = Accounts(env=env)
    hers, his = Account("ada lovelace"), Account("ben")
    his.pay(3)
    accounts.save(hers, his)
    accounts.take_snapshot(hers.id)
    accounts.close()
    with hr.open_log(f"file:{tmp_path / 'log'}") as log:
        subject = str(hers.id) if setting == "originator" else "ada"
        for name in ("accounts_snapshots", "accounts_events"):
            with hr.events.open_store(log, name) as store:
                excised = [event.subject for event in store.read()]
                assert subject in excised
                done = hr.events.excise(
                    store, subject, values=["ada lovelace"] if "events" in name else []
                )
                assert done.events >= 1
    again = Accounts(env=env)
    assert again.repository.get(his.id).balance == 3
    assert hers.id not in again.repository
    again.close()
