"""Every error a user can meet. Each says what happened, where, and what to do now.

The families are split by what the caller can do about it: fix the input, fix the configuration,
retry, give way to a newer owner, or look after damaged data. A message has one form: what happened,
then `To fix:` and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadraceError(Exception):
    """The root of all errors raised on purpose. `fix` says what to do now."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message}\n  To fix: {fix}" if fix else message)
        self.message = message
        self.fix = fix


class InputError(HeadraceError, ValueError):
    """What was passed in cannot be used; nothing was stored."""


class ConfigurationError(HeadraceError):
    """An address, an option, a directory or an installed package is not as it must be."""


class RetryError(HeadraceError):
    """It may work later; nothing was stored unless the message says so."""


class FencedError(HeadraceError):
    """A newer owner has taken over; this one must stop."""


class CorruptionError(HeadraceError):
    """Stored bytes are not what was written."""


class BugError(HeadraceError, AssertionError):
    """A broken promise of our own."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that helps with a misspelt name: the nearest known one, or what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if not known:
        return "there is none yet."
    return "there is " + ", ".join(map(repr, known[:10])) + (", …" if len(known) > 10 else ".")


class UnknownTopic(InputError, KeyError):
    """No topic of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"There is no topic {name!r}: {nearest(name, known)}",
            fix="create it with create_topic or `headrace topic create`.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownColumn(InputError, KeyError):
    """No column of that name."""

    def __init__(self, name: str, known: Iterable[str], *, where: str) -> None:
        super().__init__(f"{where} has no column {name!r}: {nearest(name, known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownGroup(InputError, KeyError):
    """No group of that name has ever read or committed."""

    def __init__(self, name: str, known: Iterable[str], *, fix: str = "") -> None:
        super().__init__(f"There is no group {name!r}: {nearest(name, known)}", fix=fix)

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownView(InputError, KeyError):
    """No view of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"There is no view {name!r}: {nearest(name, known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownVersion(InputError, KeyError):
    """No version of that name beside a pipeline."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"There is no version {name!r}: {nearest(name, known)}",
            fix=f"build it with `headrace replay FILE --as {name}`.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class BadQuery(InputError):
    """A query over views that cannot be run, may not be run, or took too long."""


class BadSearch(InputError):
    """A search query that cannot be read. `position` is the character at which it goes wrong,
    counted from 0; None if it is the query as a whole.
    """

    def __init__(self, message: str, *, fix: str = "", position: int | None = None) -> None:
        super().__init__(message, fix=fix)
        self.position = position


class ChangesGone(InputError):
    """A reader asks for changes of a view that are no longer kept. `kept_after` is the tick from
    which they are, `tick` the one the view shows.
    """

    def __init__(self, view: str, asked: int, kept_after: int, tick: int) -> None:
        super().__init__(
            f"The changes of the view {view!r} since tick {asked} are not there: it keeps those"
            f" after tick {kept_after}, and shows tick {tick}.",
            fix=f"read the whole view, which shows tick {tick}, and follow it from there.",
        )
        self.view, self.asked, self.kept_after, self.tick = view, asked, kept_after, tick


class TopicExists(InputError):
    """A topic of that name is there already."""


class BadName(InputError):
    """A name that cannot be used for a topic, group, producer or transaction."""


class BadSchema(InputError):
    """A schema that cannot be parsed or stored."""


class BadDuration(InputError):
    """A duration or time that cannot be read."""


class BadRows(InputError):
    """Rows that do not fit the topic's schema. Names the row and the column; nothing was stored."""


class BadPartition(InputError):
    """A partition that the topic does not have."""


class IncompatibleChange(InputError):
    """A change that would break readers of what is already stored."""


class PlanError(InputError):
    """A pipeline that cannot be declared so. Names the step."""


class BadExpression(PlanError):
    """An expression that cannot be read, or that uses what a row-local expression must not use."""


class BadPattern(PlanError):
    """A pattern that cannot be read, or that cannot mean anything."""


class UnfitColumn(PlanError):
    """A column whose type an operation cannot take. Names the step, the column, its type and what
    fits.
    """


class DuplicateStep(PlanError):
    """Two steps, or two outputs, with one name."""


class CyclicPlan(PlanError):
    """A plan in which a step would need its own result."""


class StreamOnly(PlanError):
    """A table given to an operation that only streams have, or the other way round. Says why."""


class UnknownOperation(PlanError, AttributeError):
    """A stream or table has no operation of that name. Says what to write instead."""


class OffsetOutOfRange(InputError):
    """An offset that is no longer, or not yet, in the log. `earliest` and `end` bound what there
    is.
    """

    def __init__(self, topic: str, partition: int, offset: int, earliest: int, end: int) -> None:
        gone = offset < earliest
        why = (
            f"was removed by retention; the earliest kept is {earliest}"
            if gone
            else f"does not exist yet; the end is {end}"
        )
        fix = (
            "go on from what is kept with consumer.seek(...) or `headrace group reset --to"
            " earliest`, or open the consumer with on_lost='earliest'."
            if gone
            else "read up to the end, or reset the group."
        )
        super().__init__(f"Offset {offset} of {topic}[{partition}] {why}.", fix=fix)
        self.topic, self.partition, self.offset, self.earliest, self.end = (
            topic,
            partition,
            offset,
            earliest,
            end,
        )


class BadPipelineFile(ConfigurationError):
    """A file that was to define a pipeline and does not, or that fails when it is run."""


class LogUnavailable(ConfigurationError):
    """The address of a log that cannot be opened: missing, read-only, a file, or not reachable."""


class NotSupported(ConfigurationError):
    """Something this backend cannot promise; says what and why."""


class MissingExtra(ConfigurationError):
    """An optional package is needed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"The package {package!r} is not installed.", fix=f"pip install 'headrace[{extra}]'"
        )


class NewerFormat(ConfigurationError):
    """A file written by a newer Headrace."""


class DiskFull(RetryError):
    """There was no room; earlier data is intact."""


class ReadOnlyLog(ConfigurationError):
    """The log can be read but not written here."""


class TransactionTimedOut(RetryError):
    """A transaction was open for longer than its timeout and was given up."""


class ProducerFenced(FencedError):
    """Another producer with the same id was opened later."""


class TransactionFenced(FencedError):
    """Another owner of the same transaction id was opened later."""


class MemberFenced(FencedError):
    """This consumer no longer owns the partition it wants to commit for."""


class LeaseLost(FencedError):
    """A message's visibility ran out, and it may have been given to someone else."""


class NoteConflict(FencedError):
    """A note did not have the value it was expected to have. `current` is what it has."""

    def __init__(self, name: str, expected: str | None, current: str | None) -> None:
        super().__init__(
            f"The note {name!r} is {current!r}, not {expected!r} as expected.",
            fix="read it again and decide anew.",
        )
        self.current = current


class BatchConflict(FencedError):
    """A streaming writer's batch number is not new and not a replay of the last one."""


class CorruptBatch(CorruptionError):
    """A batch whose bytes changed after they were written. Its neighbours are readable."""

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
        self.topic, self.partition, self.first, self.stop, self.file, self.position = (
            topic,
            partition,
            first,
            stop,
            file,
            position,
        )


class CorruptJournal(CorruptionError):
    """The commit journal is damaged where it cannot be a torn tail."""


class TooManyProducers(ConfigurationError):
    """An input has more live producers than can be told apart."""


class InputReplaced(ConfigurationError):
    """An input's topic is not the one whose rows the pipeline has taken in: it was deleted and made
    again.
    """


class StateElsewhere(ConfigurationError):
    """A state directory that is not the one that the pipeline's ledger speaks of."""


class PlanChanged(ConfigurationError):
    """A pipeline was edited so that the state it has no longer fits a step."""


class SinkFenced(FencedError):
    """A newer process writes to the same target; this one must stop."""


class TargetUnavailable(RetryError):
    """A sink's target cannot be reached, is busy, or has no room; what it has is intact, and it is
    tried again, not before `wait_s` if the target asks for that.
    """

    def __init__(self, message: str, *, fix: str = "", wait_s: float = 0.0) -> None:
        super().__init__(message, fix=fix)
        self.wait_s = wait_s


class TargetMismatch(ConfigurationError):
    """A sink's target is not as it must be: the table is missing, has other columns, or is filled
    from another topic.
    """


class TargetRefuses(ConfigurationError):
    """A sink's target refuses so many rows that they are not put aside one by one: something is
    wrong with all of them.
    """


class VersionConflict(RetryError):
    """An entity has another version than an append expected: somebody was quicker. `current` is the
    version it has; nothing was stored.
    """

    def __init__(self, entity: str, expected: int, current: int) -> None:
        wanted = "to be new" if expected == 0 else f"at version {expected}"
        super().__init__(
            f"The entity {entity!r} is at version {current}, and was expected {wanted}; nothing was"
            " stored.",
            fix="load it again and decide anew; `handle` does that by itself.",
        )
        self.entity, self.expected, self.current = entity, expected, current


class EventIdConflict(InputError):
    """An event id that was used before, for something else. Nothing was stored."""


class BadEvent(InputError):
    """An event, entity or command that cannot be stored so. Nothing was stored."""


class UnknownEvent(ConfigurationError):
    """A stored event that the code does not know: its type, or a version that no upcaster leads
    from, or that is newer than the code.
    """


class UnknownEntity(InputError, KeyError):
    """No entity of that name has any events."""

    def __init__(self, entity: str, store: str) -> None:
        super().__init__(
            f"The entity {entity!r} has no events in {store!r}.",
            fix="check its name; `headrace events list` shows what there is.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class CommandRefused(InputError):
    """A decider refused a command, for a reason of the business. `reason` is what it said; no event
    was stored.
    """

    def __init__(self, reason: str, *, fix: str = "") -> None:
        super().__init__(reason, fix=fix)
        self.reason = reason


class DeciderFailed(ConfigurationError):
    """A decider raised something that is no refusal: a mistake in its code. No event was stored."""


class BadMasterKey(ConfigurationError):
    """The master key is missing, malformed, or not the one that the subjects' keys were wrapped
    with.
    """


class UnknownSubject(InputError, KeyError):
    """Nothing is stored about that subject."""

    def __init__(self, subject: str, what: str, *, fix: str = "") -> None:
        super().__init__(
            f"There is nothing of the subject {subject!r} in {what}.",
            fix=fix or "check its name; nothing was changed.",
        )

    def __str__(self) -> str:
        return str(self.args[0])


class NotForgotten(ConfigurationError):
    """Values that were to be forgotten are still somewhere. Names each place and what to do about
    it.
    """


class ExcisionRefused(ConfigurationError):
    """Something stands in the way of forgetting a subject. Names each thing; nothing was
    changed.
    """

    def __init__(self, subject: str, obstacles: Iterable[str]) -> None:
        self.obstacles = list(obstacles)
        listed = "\n".join(f"    {each}" for each in self.obstacles)
        super().__init__(
            f"The subject {subject!r} cannot be excised everywhere, and nothing was"
            f" changed:\n{listed}",
            fix=(
                "see to each of these, and run this again; a pipeline that is not needed any more"
                " goes with `headrace topic delete __ticks.NAME`, and its state directory."
            ),
        )
