"""Writes submissions to topics: leaves out repeats, decodes rows, stamps them with the time of
receipt, and appends them. What cannot be used becomes a dead letter.

Submissions with ids are appended in transactions, together with their ids (`idempotency`); those
without are appended by a producer. Both are of the gateway's name. So a second process with the
same name takes over and the first one is fenced, and an append that is tried again is stored once.

Rows that do not fit end nothing. Most are found when they are decoded (`decoder`). What the log
alone finds out, such as a record that is too large for Kafka, refuses the whole append; then the
submissions are written in smaller groups (`UnfitRows`), until the one that does not fit is alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.columnar.columns import CHANGE_TYPE, UPDATE_POSTIMAGE
from headrace.errors import BadRows, InputError, RetryError, UnknownTopic
from headrace.gateways.decoder import (
    DecodedSubmissions,
    decode_submissions,
    is_unfit,
    unfit_reason,
)
from headrace.gateways.idempotency import (
    DEFAULT_KEEP,
    DEFAULT_KEYS,
    OTHER_BODY,
    KeyRegister,
    KeyRetention,
    key_retention,
)
from headrace.gateways.inbox import Fate, Submission, SubmissionResult, UnfitRows
from headrace.log import dead_letters
from headrace.log.api import Log, Producer
from headrace.log.rows import check_changes
from headrace.log.values import AppendResult, TopicInfo

ID_HEADER = "message-id"
"""The header of a submission's first row that has its id."""
MAX_CONFLICTS = 100
"""How often an append is tried whose ids others added to in between."""

# Appending

RECEIVED = "received_at"
"""The column that gets the time at which a row was received, if the topic has it."""
PART_BYTES = (512 << 10, 64 << 10, 4 << 10)
"""Sizes into which the payload of a dead letter is cut that is larger than a record may be."""


class GatewayWriter:
    """Writes to all topics of one gateway."""

    def __init__(
        self,
        log: Log,
        gateway: str,
        *,
        received: str = RECEIVED,
        keys: KeyRetention | None = None,
        has_ids: bool = False,
    ) -> None:
        self._log = log
        self._gateway = gateway
        self._received = received
        self._keys = keys or key_retention(DEFAULT_KEYS, DEFAULT_KEEP)
        self._has_ids = has_ids
        self._topics: dict[str, GatewayTopicWriter] = {}

    def write(self, submissions: list[Submission]) -> list[SubmissionResult]:
        """Write submissions of one topic, all with ids or all without, and return what became of
        each.

        Raises:
            UnfitRows: Some of several submissions do not fit. Nothing was stored.
            RetryError: Write the same submissions again; they are stored once.
        """
        topic = submissions[0].topic
        try:
            return self._topic_writer(topic).write(submissions)
        except InputError:  # the topic was deleted, and perhaps created again
            self._topics.pop(topic, None)
        try:
            return self._topic_writer(topic).write(submissions)
        except UnknownTopic as error:
            reasons = {id(submission): error.message for submission in submissions}
            divert_refused(self._log, topic, self._gateway, submissions, reasons)
            result = SubmissionResult(Fate.refused, "unknown topic", error.message)
            return [result] * len(submissions)

    def _topic_writer(self, topic: str) -> GatewayTopicWriter:
        if topic not in self._topics:
            writer = GatewayTopicWriter.open(
                self._log, topic, self._gateway, self._received, self._keys
            )
            if self._has_ids:
                writer.open_register()
            self._topics[topic] = writer
        return self._topics[topic]


class GatewayTopicWriter:
    """Writes to one topic. Opening it fences an older process of the same gateway."""

    def __init__(
        self,
        log: Log,
        topic: str,
        gateway: str,
        received: str,
        keys: KeyRetention,
        producer: Producer,
    ) -> None:
        self._log = log
        self._topic = topic
        self._gateway = gateway
        self._received = received
        self._keys = keys
        self._producer = producer
        self._register: KeyRegister | None = None
        self._unsettled: tuple[int, list[Submission]] | None = None
        """The sequence number and the submissions of an append whose outcome is not known."""

    @classmethod
    def open(cls, log: Log, topic: str, gateway: str, received: str, keys: KeyRetention) -> Self:
        """Open the topic's producer, which fences an older process of the gateway, and read the
        topic's columns.
        """
        producer = log.producer(topic, f"gateway.{gateway}")
        writer = cls(log, topic, gateway, received, keys, producer)
        writer._read_schema()
        return writer

    def open_register(self) -> KeyRegister:
        """Open the register of ids, which fences an older process too."""
        if self._register is None:
            self._register = KeyRegister(self._log, self._info, self._gateway, self._keys)
        return self._register

    def _read_schema(self) -> None:
        self._info: TopicInfo = self._log.topic(self._topic)
        has_time = self._received in self._info.columns and pa.types.is_timestamp(
            self._info.arrow_schema.field(self._received).type
        )
        self._stamped = (self._received,) if has_time else ()
        schema = self._info.arrow_schema
        self._given = pa.schema([field for field in schema if field.name not in self._stamped])
        if self._info.is_table:  # a row without a change type is an upsert
            index = self._given.get_field_index(CHANGE_TYPE)
            self._given = self._given.set(index, self._given.field(index).with_nullable(True))

    def write(self, submissions: list[Submission]) -> list[SubmissionResult]:
        """Return what became of each submission. Raises UnfitRows if some of several do not fit and
        only the log found out.
        """
        results: dict[int, SubmissionResult] = {}
        if all(submission.id is None for submission in submissions):
            self._write_new(submissions, results)
            return [results[id(submission)] for submission in submissions]
        remaining = submissions
        conflicts = 0
        while remaining:
            # Of submissions with one id, one is written at a time: what becomes of the others
            # depends on whether it is stored.
            new, remaining = self._split_repeats(remaining, results)
            if new and not self._write_new(new, results):
                remaining = [each for each in submissions if id(each) not in results]
                conflicts += 1
                if conflicts > MAX_CONFLICTS:
                    raise RetryError(
                        f"Other gateways append to {self._topic!r} all the time.",
                        fix="try again in a moment.",
                    )
        return [results[id(submission)] for submission in submissions]

    def _split_repeats(
        self, submissions: list[Submission], results: dict[int, SubmissionResult]
    ) -> tuple[list[Submission], list[Submission]]:
        """Return the submissions that are new, and those that have the id of one of these; add the
        results of those that are repeats.
        """
        register = self.open_register()
        register.refresh()
        new: list[Submission] = []
        same: list[Submission] = []
        ids: set[str] = set()
        for submission in submissions:
            assert submission.id is not None
            digest = register.digest(submission.id)
            if digest is None:
                (same if submission.id in ids else new).append(submission)
                ids.add(submission.id)
            elif digest and submission.digest and digest != submission.digest:
                message = f"The id {submission.id!r} came before, with another body."
                results[id(submission)] = SubmissionResult(Fate.refused, OTHER_BODY, message)
                self._divert([submission], {id(submission): message})
            else:
                results[id(submission)] = SubmissionResult(Fate.repeated)
        return new, same

    def _write_new(
        self, submissions: list[Submission], results: dict[int, SubmissionResult]
    ) -> bool:
        """Write submissions that are no repeats, and add their results. Returns false if some may
        be repeats by now; those that do not fit have their results all the same.
        """
        rows = self._decode(submissions)
        self._divert(submissions, rows.refused)
        position: AppendResult | None = None
        if rows.fitting:
            try:
                position = self._append(rows)
            except Exception as error:
                if not is_unfit(error):
                    raise
                if self._schema_has_changed():
                    self._read_schema()
                    return self._write_new(submissions, results)
                if len(rows.fitting) > 1:
                    raise UnfitRows from error
                rows.refuse({id(rows.fitting[0]): unfit_reason(error)})
                self._divert(submissions, rows.refused)
        results |= _refusals(rows.refused)
        if position is not None:
            stored = SubmissionResult(Fate.stored, position=str(position))
            results |= {id(submission): stored for submission in rows.fitting}
        return position is not None or not rows.fitting

    def _decode(self, submissions: list[Submission]) -> DecodedSubmissions:
        """Decode rows for the known columns of the topic. If some do not fit, it is checked whether
        the topic has other columns by now.
        """
        rows = self._decode_known(submissions)
        if rows.refused and self._schema_has_changed():
            self._read_schema()
            rows = self._decode_known(submissions)
        return rows

    def _decode_known(self, submissions: list[Submission]) -> DecodedSubmissions:
        rows = decode_submissions(
            submissions,
            self._given,
            ignored=self._stamped,
            topic=self._topic,
            # A dropped column is an unknown one here: what is sent in it must not be lost silently.
            history=replace(self._info.schema_history, dropped=()),
        )
        if rows.fitting:
            rows.batches = [self._to_batch(rows)]
        if rows.fitting and self._info.is_table:
            self._refuse_bad_changes(rows)
        return rows

    def _refuse_bad_changes(self, rows: DecodedSubmissions) -> None:
        """Refuse submissions with an unknown change type, or with a null in a NOT NULL column of a
        row that is not deleted.
        """
        (batch,) = rows.batches
        try:
            check_changes(batch, topic=self._topic)
        except BadRows:
            reasons = {}
            is_fitting = np.ones(batch.num_rows, np.bool_)
            first = 0
            for submission, count in zip(rows.fitting, rows.counts, strict=True):
                try:
                    check_changes(batch.slice(first, count), topic=self._topic)
                except BadRows as error:
                    reasons[id(submission)] = error.message
                    is_fitting[first : first + count] = False
                first += count
            rows.refuse(reasons)
            rows.batches = [batch.filter(pa.array(is_fitting))]

    def _schema_has_changed(self) -> bool:
        return self._log.topic(self._topic).schema != self._info.schema

    def _append(self, rows: DecodedSubmissions) -> AppendResult | None:
        """Append rows, with their ids if they have any. Returns None if some of the ids may be in
        the topic by now.

        Without ids, an append that is tried again keeps its sequence number, so that the log
        recognises it. Other rows get another number, or they would pass for those of an append
        that failed although it was stored.
        """
        (batch,) = rows.batches
        ids = [
            (submission.id, submission.digest or b"")
            for submission in rows.fitting
            if submission.id is not None
        ]
        if ids:
            now_us = time.time_ns() // 1_000
            return self.open_register().append(batch, _headers(rows), ids, now_us)
        sequence = self._producer.last_sequence + 1
        if self._unsettled is not None:
            number, submissions = self._unsettled
            is_repeat = list(map(id, submissions)) == list(map(id, rows.fitting))
            sequence = max(sequence, number if is_repeat else number + 1)
        self._unsettled = sequence, rows.fitting
        position = self._producer.append(batch, sequence=sequence)
        self._unsettled = None
        return position

    def _to_batch(self, rows: DecodedSubmissions) -> pa.RecordBatch:
        """Return the topic's columns, in their order, with the time of receipt and, for tables, the
        change type.
        """
        table = pa.Table.from_batches(rows.batches).combine_chunks()
        columns = {name: _single_array(table.column(name)) for name in table.column_names}
        for name in self._stamped:
            received_us = [submission.received_us for submission in rows.fitting]
            times = pa.array(np.repeat(np.array(received_us, np.int64), rows.counts))
            columns[name] = times.cast(self._info.arrow_schema.field(name).type)
        if self._info.is_table:
            columns[CHANGE_TYPE] = pc.fill_null(columns[CHANGE_TYPE], UPDATE_POSTIMAGE)
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._info.columns], schema=self._info.arrow_schema
        )

    def _divert(self, submissions: Sequence[Submission], reasons: dict[int, str]) -> None:
        divert_refused(self._log, self._topic, self._gateway, submissions, reasons)


def divert_refused(
    log: Log,
    topic: str,
    gateway: str,
    submissions: Sequence[Submission],
    reasons: dict[int, str],
) -> None:
    """Write refused submissions whose senders get no answer to the dead letters of their topic,
    once: their payloads are gone then.

    Args:
        log: The log.
        topic: The topic.
        gateway: The gateway's name.
        submissions: Submissions, refused ones and others.
        reasons: Why some were refused, by `id()`.
    """
    refused = [
        submission
        for submission in submissions
        if id(submission) in reasons and submission.payload is not None
    ]
    if refused:
        letters = [
            dead_letters.DeadLetter(
                f"gateway {gateway}", reasons[id(submission)], payload=submission.payload
            )
            for submission in refused
        ]
        try:
            dead_letters.divert(log, topic, letters)
        except Exception as error:
            if not is_unfit(error):
                raise
            for letter in letters:
                _divert_in_parts(log, topic, letter)
        for submission in refused:
            submission.payload = None


def _divert_in_parts(log: Log, topic: str, letter: dead_letters.DeadLetter) -> None:
    """Write a dead letter; if it is larger than a record of Kafka may be, as several."""
    payload = letter.payload or b""
    for size in (max(1, len(payload)), *PART_BYTES):
        parts = [payload[start : start + size] for start in range(0, len(payload), size)]
        letters = [letter]
        if len(parts) > 1:
            letters = [
                replace(letter, payload=part, reason=f"Part {i} of {len(parts)}. {letter.reason}")
                for i, part in enumerate(parts, 1)
            ]
        try:
            dead_letters.divert(log, topic, letters)
        except Exception as error:
            if not is_unfit(error) or size == PART_BYTES[-1]:
                raise
        else:
            return


def _refusals(reasons: dict[int, str]) -> dict[int, SubmissionResult]:
    return {
        identity: SubmissionResult(Fate.refused, "does not fit", reason)
        for identity, reason in reasons.items()
    }


def _single_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _headers(rows: DecodedSubmissions) -> list[dict[str, bytes | None] | None]:
    """Return the headers of rows: the id of a submission is in the header of its first row."""
    headers: list[dict[str, bytes | None] | None] = []
    for submission, count in zip(rows.fitting, rows.counts, strict=True):
        if count:
            has_id = submission.id is not None
            headers.append({ID_HEADER: str(submission.id).encode()} if has_id else None)
            headers += [None] * (count - 1)
    return headers
