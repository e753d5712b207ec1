"""The parts of an open embedded log that its clients share: the store, open segments, the committer
and staged rows.

`FileLog` is a `LogHandle` with the public interface on top. Producers, consumers, queues,
transactions and maintenance are given the handle, so none of them imports `FileLog`.
"""

from __future__ import annotations

from headrace.log.file import staging
from headrace.log.file.commit_draft import CommitDraft, PreparedRows
from headrace.log.file.committer import Committer
from headrace.log.file.liveness import MemberObserver
from headrace.log.file.reader import PartitionReader, SegmentCache
from headrace.log.file.segment import Frame
from headrace.log.file.state import TopicState
from headrace.log.file.store import Store
from headrace.log.sequences import SequenceIndex
from headrace.log.values import Staged

STAGING_LIFETIME_US = 24 * 3600 * 1_000_000
"""How long staged rows wait to be adopted before maintenance removes them."""


class LogHandle:
    """An open log without its public interface."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.cache = SegmentCache(store)
        self.committer = Committer(store)
        self.members = MemberObserver(store.root)

    def topic_state(self, name: str) -> TopicState:
        """A topic as readers see it now. Raises UnknownTopic."""
        return self.store.view().topic(name)

    def partition_reader(self, topic: TopicState, number: int) -> PartitionReader:
        """A reader of one partition as of the given state. Raises BadPartition."""
        return PartitionReader(self.cache, topic, number)

    # Staged rows

    def stage_prepared(self, rows: PreparedRows) -> Staged:
        """Stage a large append, so that it does not hold the log's lock while it is written."""
        writer = staging.StagingWriter(
            self.store,
            self.topic_state(rows.topic),
            staging.staging_name(self.store.clock.now_us() + STAGING_LIFETIME_US),
        )
        writer.write(rows)
        return writer.finish()

    def load_staged(self, draft: CommitDraft, staged: Staged) -> dict[int, list[Frame] | None]:
        """Read staged files under the lock, before the draft has any operation.

        Returns:
            Partition -> the frames of a small file, which are copied into the partition's segment,
            or None for a large file, which becomes a segment as it is.
        """
        topic = draft.state.topic(staged.topic)
        return {
            number: staging.load_small_file(self.store, file, topic)
            for number, (file, _) in staged.partitions.items()
        }

    def adopt_loaded(
        self, draft: CommitDraft, staged: Staged, loaded: dict[int, list[Frame] | None]
    ) -> None:
        """Add staged rows to a draft, given what `load_staged` returned."""
        topic = draft.state.topic(staged.topic)
        for number, (file, rows) in staged.partitions.items():
            frames = loaded[number]
            if frames is None:
                draft.adopt(topic, number, file, rows)
            else:
                draft.append(PreparedRows.of(topic, {number: frames}))

    def adopt_into(self, draft: CommitDraft, staged: Staged) -> None:
        """Load staged rows and add them to a draft."""
        self.adopt_loaded(draft, staged, self.load_staged(draft, staged))

    def discard_staged(self, staged: Staged) -> None:
        staging.discard(self.store, [file for file, _ in staged.partitions.values()])

    # Duplicates

    def index_sequences(self, topic: str, producer: int, first: int) -> SequenceIndex:
        """The offsets of a producer's sequence numbers from `first` on, found in the frames. Larger
        numbers are left out if there are too many.
        """
        state = self.topic_state(topic)
        index = SequenceIndex(first)
        for number, partition in enumerate(state.partitions):
            reader = self.partition_reader(state, number)
            for frame in reader.frames(partition.start, partition.end, on_corrupt="skip"):
                if frame.header.producer == producer and frame.header.sequence >= first:
                    index.add(frame.header.sequence, number, frame.first, frame.stop)
        index.sort()
        return index
