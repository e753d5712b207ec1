"""Every error that a user can meet, by what the caller can do about it:

- `InputError`: fix what was passed in. Nothing was stored.
- `ConfigurationError`: fix an address, an option, a directory, a pipeline or an installation.
- `RetryError`: try again later. Nothing was stored, unless the message says so.
- `FencedError`: stop. A newer process has taken over.
- `CorruptionError`: restore damaged data from a backup, or read around it.
- `BugError`: report it. Headrace broke a promise of its own.

A message has one form: what happened, where, what was expected and what came; then `To fix:` with
what to do now. It never advises something that would lose data.
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class HeadraceError(Exception):
    """The base class of all errors that Headrace raises. Catch it to handle any of them.

    Attributes:
        message: What happened.
        fix: What to do now; empty if the message says it.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message}\n  To fix: {fix}" if fix else message)
        self.message = message
        self.fix = fix


def user_trace(error: BaseException, max_frames: int = 3) -> str:
    """The last lines of the user's own code that led to an error, as a traceback shows them."""
    package = f"{Path(__file__).parent}{os.sep}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(package)]
    return "".join(traceback.format_list(own[-max_frames:]))


class InputError(HeadraceError, ValueError):
    """What was passed in cannot be used. Fix the input; nothing was stored."""


class ConfigurationError(HeadraceError):
    """An address, an option, a directory or an installed package is not as it must be. Fix it, and
    start again.
    """


class RetryError(HeadraceError):
    """It may work later. Try again; nothing was stored, unless the message says so."""


class FencedError(HeadraceError):
    """A newer process has taken over. Stop; nothing was stored."""


class CorruptionError(HeadraceError):
    """Stored bytes are not what was written. Restore them from a backup, or read around them."""


class BugError(HeadraceError, AssertionError):
    """Headrace broke a promise of its own. Report it, with the message and the log."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that helps with a misspelt name: the nearest known name, or the known ones.

    Example:
        >>> nearest("orderz", ["orders", "clicks"])
        "did you mean 'orders'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if not known:
        return "there is none yet."
    return "there is " + ", ".join(map(repr, known[:10])) + (", …" if len(known) > 10 else ".")


class UnknownTopic(InputError, KeyError):
    """There is no topic of that name. Create it, or correct the name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"There is no topic {name!r}: {nearest(name, known)}",
            fix="create it with create_topic or `headrace topic create`.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownColumn(InputError, KeyError):
    """There is no column of that name. Correct the name."""

    def __init__(self, name: str, known: Iterable[str], *, where: str) -> None:
        super().__init__(f"{where} has no column {name!r}: {nearest(name, known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownGroup(InputError, KeyError):
    """No consumer group of that name has ever read or committed. Correct the name."""

    def __init__(self, name: str, known: Iterable[str], *, fix: str = "") -> None:
        super().__init__(f"There is no group {name!r}: {nearest(name, known)}", fix=fix)

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownView(InputError, KeyError):
    """There is no view of that name. Correct the name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"There is no view {name!r}: {nearest(name, known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownVersion(InputError, KeyError):
    """A pipeline has no version of that name. Build it with `headrace replay`, or correct the
    name.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"There is no version {name!r}: {nearest(name, known)}",
            fix=f"build it with `headrace replay FILE --as {name}`.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class BadQuery(InputError):
    """A query over views cannot be run, is not allowed, or took too long. Change the query."""


@dataclass(frozen=True)
class SqlProblem:
    """What is wrong at one place of a text of SQL.

    Attributes:
        line: The line, counted from 1.
        position: The position in that line, counted from 1.
        message: What happened.
        fix: What to do now; empty if the message says it.
    """

    line: int
    position: int
    message: str
    fix: str = ""


class BadSql(BadQuery):
    """A text of SQL has several errors; nothing of it was run. Correct them.

    Attributes:
        problems: What is wrong, in the order of the text: `line`, `position`, `message`, `fix`.
    """

    def __init__(self, message: str, problems: tuple[SqlProblem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class BadSearch(InputError):
    """A search query cannot be read. Change the query.

    Attributes:
        position: The character at which it goes wrong, counted from 0; None if it is the query as a
            whole.
    """

    def __init__(self, message: str, *, fix: str = "", position: int | None = None) -> None:
        super().__init__(message, fix=fix)
        self.position = position


class ChangesGone(InputError):
    """Changes of a view that were asked for are no longer retained. Read the whole view, and follow
    it from there.

    Attributes:
        view: The view.
        asked: The tick since which changes were asked for.
        kept_after: Changes after this tick are retained.
        tick: The tick that the view shows.
    """

    def __init__(self, view: str, asked: int, kept_after: int, tick: int) -> None:
        super().__init__(
            f"The changes of the view {view!r} since tick {asked} are not there: it keeps those"
            f" after tick {kept_after}, and shows tick {tick}.",
            fix=f"read the whole view, which shows tick {tick}, and follow it from there.",
        )
        self.view, self.asked, self.kept_after, self.tick = view, asked, kept_after, tick


class TopicExists(InputError):
    """A topic of that name exists. Use another name, or pass `exist_ok=True` if it fits."""


class BadName(InputError):
    """A name cannot be used for a topic, group, producer or transaction. Choose another."""


class BadSchema(InputError):
    """A schema cannot be parsed or stored. Correct it."""


class BadDuration(InputError):
    """A duration or a time cannot be read. Write it as the message says."""


class BadRows(InputError):
    """Rows do not fit the topic's schema. Correct the row and the column that the message names;
    nothing was stored.
    """


class BadPartition(InputError):
    """A topic does not have a partition. Correct its number."""


class IncompatibleChange(InputError):
    """A change would break readers of what is stored. Make a compatible change, or use a new
    topic.
    """


class PlanError(InputError):
    """A pipeline cannot be declared so. Correct the step that the message names."""


class BadExpression(PlanError):
    """An expression cannot be read, or uses what an expression over one row must not use. Correct
    it.
    """


class ExpressionFailed(InputError):
    """An expression of a step with `errors="stop"` failed on a row. Correct the row or the
    expression, or choose `errors="null"` or `errors="divert"`.
    """

    def __init__(self, *, step: str, expressions: str, row: dict[str, Any]) -> None:
        super().__init__(
            f"An expression of the step {step!r} failed on the row {row!r}: {expressions}",
            fix=(
                "correct the row or the expression and run again; or make the value null with"
                ' errors="null", or send such rows to dead letters with errors="divert".'
            ),
        )
        self.step = step
        self.row = row


class FunctionFailed(InputError):
    """A user's function raised, or returned something that does not fit. Correct the function or
    the row, or choose `errors="divert"`.
    """

    def __init__(
        self,
        *,
        step: str,
        function: str,
        row: dict[str, Any],
        position: tuple[int, int] | None,
        cause: str,
        trace: str,
    ) -> None:
        self.step, self.function, self.row = step, function, row
        self.position = position
        """The partition and offset of the row; None if a step has made it."""
        self.cause, self.trace = cause, trace
        where = "" if position is None else " (partition {}, offset {})".format(*position)
        super().__init__(
            f"{function} of the step {step!r} failed on the row {row!r}{where}:"
            f" {cause}\n{trace}".rstrip(),
            fix=(
                "correct the function or the row and run again, or send such rows to dead letters"
                ' with errors="divert".'
            ),
        )

    def at(self, position: tuple[int, int] | None) -> FunctionFailed:
        """The error for the row at another position."""
        return FunctionFailed(
            step=self.step,
            function=self.function,
            row=self.row,
            position=position,
            cause=self.cause,
            trace=self.trace,
        )


class ProcessorFailed(InputError):
    """A processor raised, or emitted or set something that does not fit. Correct the processor or
    the row, or send such rows to dead letters with `errors="divert"`.
    """

    def __init__(
        self, *, step: str, method: str, row: dict[str, Any] | None, cause: str, trace: str
    ) -> None:
        where = "" if row is None else f" on {row!r}"
        super().__init__(
            f"{method} of the step {step!r} failed{where}: {cause}\n{trace}".rstrip(),
            fix=(
                "correct the processor or the row and run again, or send such rows to dead letters"
                ' with errors="divert".'
            ),
        )
        self.step = step
        self.row = row


class CallFailed(InputError):
    """A recorded call has no answer for a row, with `errors="stop"`, or its function does not give
    the event loop back. Correct the function, the service or the row.
    """

    def __init__(self, *, step: str, row: dict[str, Any], cause: str, fix: str) -> None:
        super().__init__(f"The step {step!r} has no answer for the row {row!r}: {cause}.", fix=fix)
        self.step = step
        self.row = row


class CallRefused(InputError):
    """Raised by the function of a recorded call: the row will never have an answer. It becomes a
    dead letter, or what else `errors=` says, without another try.
    """


class BadPattern(PlanError):
    """A pattern cannot be read, or can never match. Correct it."""


class UnfitColumn(PlanError):
    """An operation does not accept a column's type. Convert the column; the message names the step,
    the column, its type and what fits.
    """


class DuplicateStep(PlanError):
    """Two steps, or two outputs, have one name. Rename one."""


class CyclicPlan(PlanError):
    """A step would need its own result. Break the cycle."""


class NoFingerprint(PlanError):
    """Edits of Python code of a plan could not be noticed. Give the code a version."""


class NotSerializable(PlanError):
    """Python code of a plan cannot be sent to Spark's workers. Make there what it needs."""


class StreamOnly(PlanError):
    """An operation is for streams only, or for tables only. The message says what to write
    instead.
    """


class UnknownOperation(PlanError, AttributeError):
    """A stream or table has no operation of that name. Says what to write instead."""


class OutOfOrder(InputError):
    """A producer was given a sequence number below its newest one that was never stored."""


class OffsetOutOfRange(InputError):
    """An offset is no longer, or not yet, in the log. Read between `earliest` and `end`.

    Attributes:
        topic: The topic.
        partition: The partition.
        offset: The offset that was asked for.
        earliest: The first offset that is retained.
        end: The offset after the last.
    """

    def __init__(self, topic: str, partition: int, offset: int, earliest: int, end: int) -> None:
        gone = offset < earliest
        why = (
            f"was removed by retention; the earliest kept is {earliest}"
            if gone
            else f"does not exist yet; the end is {end}"
        )
        fix = (
            "continue with what is retained: consumer.seek(...), `headrace group reset --to"
            " earliest`, or open the consumer with on_lost='earliest'."
            if gone
            else "read up to the end, or reset the group."
        )
        super().__init__(f"Offset {offset} of {topic}[{partition}] {why}.", fix=fix)
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.earliest = earliest
        self.end = end


class BadPipelineFile(ConfigurationError):
    """A file does not define a pipeline, or fails when it is run. Correct the file."""


class LogUnavailable(ConfigurationError):
    """A log cannot be opened: it is missing, not a directory, or not reachable. Check the
    address.
    """


class NotSupported(ConfigurationError):
    """A backend does not support an operation. The message says why, and what to use instead."""


class MissingExtra(ConfigurationError):
    """An optional package is not installed. Install the extra that the message names."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"The package {package!r} is not installed.", fix=f"pip install 'headrace[{extra}]'"
        )


class NewerFormat(ConfigurationError):
    """A file was written by a newer Headrace. Upgrade."""


class DiskFull(RetryError):
    """The disk is full. Make room and try again; earlier data is intact."""


class LockTimeout(RetryError):
    """Another process holds a log's lock and does not give it back. Nothing was stored."""


class ReadOnlyLog(ConfigurationError):
    """The log is opened for reading only. Write where it is writable."""


class TransactionTimedOut(RetryError):
    """A transaction was open for longer than its timeout, and was aborted. Begin it again."""


class ProducerFenced(FencedError):
    """Another producer with the same id was opened later. Stop this one."""


class TransactionFenced(FencedError):
    """Another transaction with the same id was opened later. Stop this process."""


class MemberFenced(FencedError):
    """A consumer no longer owns a partition that it commits for. Poll again; another member reads
    the partition from the last committed offset.
    """


class LeaseLost(FencedError):
    """A message's visibility timeout has passed, and another consumer may have received it. Do not
    acknowledge it.
    """


class NoteConflict(FencedError):
    """A note does not have the expected value. Read it again and decide anew.

    Attributes:
        current: The value that it has.
    """

    def __init__(self, name: str, expected: str | None, current: str | None) -> None:
        super().__init__(
            f"The note {name!r} is {current!r}, not {expected!r} as expected.",
            fix="read it again and decide anew.",
        )
        self.current = current


class BatchConflict(FencedError):
    """A batch of a streaming writer is neither new nor a repeat of the last one: another query
    writes under the same name. Stop one of them.
    """


class CorruptBatch(CorruptionError):
    """The bytes of a batch changed after they were written. Restore the file from a backup, or read
    around the batch; its neighbours can be read.
    """

    def __init__(
        self,
        *,
        topic: str,
        partition: int,
        first: int,
        stop: int,
        file: str,
        position: int,
        why: str,
    ) -> None:
        super().__init__(
            f"Offsets {first} to {stop - 1} of {topic}[{partition}] are corrupt: {why} (file"
            f" {file}, byte {position}). A copy was put into quarantine; nothing was deleted.",
            fix=(
                f"restore the file from a backup, or go on behind it: read from {stop}, or with"
                " on_corrupt='skip'."
            ),
        )
        self.topic = topic
        self.partition = partition
        self.first = first
        self.stop = stop
        self.file = file
        self.position = position


class TornCopy(CorruptionError):
    """A log's directory was copied while it was being written: parts of it are of different
    moments.
    """


class CorruptJournal(CorruptionError):
    """The commit journal is damaged in a way that an interrupted write does not explain. Restore
    the log from a backup.
    """


class TooManyProducers(ConfigurationError):
    """An input has more active producers than a pipeline can track. Use fewer producers."""


class InputReplaced(ConfigurationError):
    """An input's topic was deleted and created again since the pipeline last read it. The message
    says how to go on.
    """


class StateElsewhere(ConfigurationError):
    """A state directory is not the one that the pipeline's ledger names. Use the right
    directory.
    """


class PlanChanged(ConfigurationError):
    """A pipeline was edited so that its state does not fit a step any more. Replay it as a new
    version, or undo the edit.
    """


class SinkFenced(FencedError):
    """A newer process writes to the same target. Stop this one."""


class TargetUnavailable(RetryError):
    """A sink's target cannot be reached, is busy, or has no room. The sink tries again by itself;
    what the target has is intact.

    Attributes:
        wait_s: How long the target asks to wait.
    """

    def __init__(self, message: str, *, fix: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message, fix=fix)
        self.wait_s = wait_s


class TargetMismatch(ConfigurationError):
    """A sink's target does not fit the topic: the table is missing, has other columns, or is filled
    from another topic. Correct it, or choose another target.
    """


class TargetRefuses(ConfigurationError):
    """A sink's target refuses so many rows that something must be wrong with all of them. Correct
    the target; the rows do not become dead letters.
    """


class VersionConflict(RetryError):
    """An entity has another version than an append expected: another process was faster. Load it
    again and decide anew; nothing was stored.

    Attributes:
        entity: The entity.
        expected: The version that was expected.
        current: The version that it has.
    """

    def __init__(self, entity: str, expected: int, current: int) -> None:
        wanted = {0: "to be new", -2: "to have events"}.get(expected, f"at version {expected}")
        super().__init__(
            f"The entity {entity!r} is at version {current}, but was expected {wanted}; nothing was"
            " stored.",
            fix="load it again and decide anew; `handle` does that by itself.",
        )
        self.entity, self.expected, self.current = entity, expected, current


class SubscriptionFenced(FencedError):
    """Another process has moved the position of a subscription. Stop, or open it again to go on
    where the other one is; nothing was stored.
    """


class ProcessFailed(ConfigurationError):
    """A process manager's function raised an error, or gave what cannot be stored. Correct it and
    start again; the event is read again, and nothing of it was stored.
    """


class EventIdConflict(InputError):
    """An event id was used before, for another event. Use a new id; nothing was stored."""


class BadEvent(InputError):
    """An event, entity or command cannot be stored so. Correct it; nothing was stored."""


class UnknownEvent(ConfigurationError):
    """The code does not know the type or the version of a stored event. Add the class or an
    upcaster, or run the newer code.
    """


class UnknownEntity(InputError, KeyError):
    """An entity has no events. Correct its name."""

    def __init__(self, entity: str, store: str) -> None:
        super().__init__(
            f"The entity {entity!r} has no events in {store!r}.",
            fix="check its name; `headrace events list` shows what there is.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class CommandRefused(InputError):
    """A decider refused a command by the rules of the business. Show the reason; no event was
    stored.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: str, *, fix: str = "") -> None:
        super().__init__(reason, fix=fix)
        self.reason = reason


class DeciderFailed(ConfigurationError):
    """A decider raised an error that is not a refusal. Correct its code; no event was stored."""


class BadMasterKey(ConfigurationError):
    """The master key is missing, malformed, or not the one that the subjects' keys are encrypted
    with. Provide the right one.
    """


class UnknownSubject(InputError, KeyError):
    """Nothing is stored about a subject. Correct its name."""

    def __init__(self, subject: str, what: str, *, fix: str = "") -> None:
        super().__init__(
            f"There is nothing of the subject {subject!r} in {what}.",
            fix=fix or "check its name; nothing was changed.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class NotForgotten(ConfigurationError):
    """Values that should be erased are still in some files. The message names each file, and what
    to do about it.
    """


class ExcisionRefused(ConfigurationError):
    """A subject cannot be erased everywhere. Remove each obstacle that the message names, and run
    it again; nothing was changed.
    """

    def __init__(self, subject: str, obstacles: Iterable[str]) -> None:
        self.obstacles = list(obstacles)
        listed = "\n".join(f"    {obstacle}" for obstacle in self.obstacles)
        super().__init__(
            f"The subject {subject!r} cannot be excised everywhere, and nothing was"
            f" changed:\n{listed}",
            fix=(
                "resolve each of these, and run this again. A pipeline that is not needed any more"
                " can be given up with retire=['NAME'] (--retire NAME): its state and views go,"
                " and cannot be computed again."
            ),
        )
