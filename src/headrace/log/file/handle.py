"""What the parts of an open embedded log share: its store, its open segments, its committer, and
what they do with staged rows.

`FileLog` is a handle with the public interface on top; producers, consumers, queues, transactions
and maintenance take the handle.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.log.file import staging
from headrace.log.file.commit_draft import Draft, PreparedRows
from headrace.log.file.committer import Committer
from headrace.log.file.reader import PartitionReader, SegmentCache
from headrace.log.file.segment import Frame
from headrace.log.file.state import TopicState
from headrace.log.file.store import Store, now_us
from headrace.log.values import AppendResult, OffsetRange, Staged

_STAGED_FOR_US = 24 * 3600 * 1_000_000


class LogHandle:
    """`after_commit` is called behind each commit of this process."""

    def __init__(self, store: Store, *, after_commit: Callable[[], None]) -> None:
        self.store = store
        self.cache = SegmentCache(store)
        self.committer = Committer(store, after=after_commit)

    def topic_state(self, name: str) -> TopicState:
        return self.store.view().topic(name)

    def partition_reader(self, topic: TopicState, number: int) -> PartitionReader:
        return PartitionReader(self.cache, topic, number)

    def stage_prepared(self, rows: PreparedRows) -> Staged:
        """Put a large append aside before it takes the lock."""
        writer = staging.StagingWriter(
            self.store,
            self.topic_state(rows.topic),
            staging.staging_name(now_us() + _STAGED_FOR_US),
        )
        writer.write(rows)
        return writer.finish()

    def load_staged(self, draft: Draft, staged: Staged) -> dict[int, list[Frame] | None]:
        """Look at staged files under the lock, before anything is done: what is small will be
        copied, the rest moved.
        """
        topic = draft.state.topic(staged.topic)
        return {
            number: staging.load_if_small(self.store, file, topic)
            for number, (file, _) in staged.partitions.items()
        }

    def adopt_loaded(
        self, draft: Draft, staged: Staged, loaded: dict[int, list[Frame] | None]
    ) -> None:
        topic = draft.state.topic(staged.topic)
        for number, (file, rows) in staged.partitions.items():
            frames = loaded[number]
            if frames is None:
                draft.adopt(topic, number, file, rows)
            else:
                draft.append(
                    PreparedRows(
                        topic.name,
                        topic.directory,
                        topic.settings["ddl"],
                        len(topic.partitions),
                        {number: frames},
                    )
                )

    def adopt_into(self, draft: Draft, staged: Staged) -> None:
        self.adopt_loaded(draft, staged, self.load_staged(draft, staged))

    def discard_staged(self, staged: Staged) -> None:
        staging.discard(self.store, [file for file, _ in staged.partitions.values()])

    def find_repeated(self, topic: str, producer: int, sequence: int) -> AppendResult:
        """Where a number that was stored long ago went: its frames say so."""
        known = self.topic_state(topic)
        found: dict[int, OffsetRange] = {}
        for number, partition in enumerate(known.partitions):
            for piece in self.partition_reader(known, number).pieces(
                partition.start, partition.end, on_corrupt="skip"
            ):
                if (piece.header.producer, piece.header.sequence) == (producer, sequence):
                    first = found[number].start if number in found else piece.first
                    found[number] = OffsetRange(first, piece.stop)
        return AppendResult({topic: found}, None, duplicate=True)
