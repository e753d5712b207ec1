"""The vault: a key for each person, so that what is known of one can be made unreadable everywhere
at once, by deleting a key.

Personal fields are sealed with AES-GCM under the subject's key and stay sealed wherever they go: in
events, states, snapshots, views, backups. Keys are kept beside the events, each wrapped by a master
key that comes from the environment or a file and is never stored. Deleting a key overwrites it
(SQLite's secure_delete), and every process notices at its next look.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import (
    BadMasterKey,
    CorruptionError,
    InputError,
    MissingExtra,
    NewerFormat,
    UnknownSubject,
)
from headrace.events.index import EXCISED_VERSION, erasure_topic, hashed_name, kept_versions
from headrace.log.api import Closeable

if TYPE_CHECKING:
    from headrace.events.store import EventStore


# What was forgotten, and when: a topic beside the events' says so, without saying who. Written by
# the vault and by excision, read to resume what was interrupted.
#
# It also keeps the version that an entity had reached when its newest events were excised, under a
# hash of its name, so that versions are never given out twice.


SCHEMA = "what STRING, subject_sha256 STRING, step STRING, details STRING"


def directory(store: EventStore) -> Path:
    """Where a store keeps what is not in its topic."""
    return store.log.store.root / "events" / store.log.topic_state(store.topic).directory


def subject_hash(store: EventStore, subject: str) -> str:
    return hashed_name(store.log.topic_state(store.topic).directory, subject)


def topic(store: EventStore) -> str:
    return erasure_topic(store.topic)


def note(store: EventStore, what: str, subject: str, step: str, **details: Any) -> None:
    """Write down a step, durably."""
    _write(store, [(what, subject_hash(store, subject), step, details)])


def _write(store: EventStore, rows: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    name = topic(store)
    if name not in store.log.topics():
        store.log.create_topic(name, SCHEMA, exist_ok=True)
    with store.log.producer(name) as producer:
        producer.append(
            [
                {
                    "what": what,
                    "subject_sha256": who,
                    "step": step,
                    "details": json.dumps(details, sort_keys=True),
                }
                for what, who, step, details in rows
            ]
        )


def steps(store: EventStore, what: str, subject: str) -> list[dict[str, Any]]:
    """What was done for a subject, in order."""
    if topic(store) not in store.log.topics():
        return []
    wanted = subject_hash(store, subject)
    return [
        row
        for row in store.log.read(topic(store)).to_pylist()
        if (row["what"], row["subject_sha256"]) == (what, wanted)
    ]


def unfinished(store: EventStore, what: str, subject: str) -> list[dict[str, Any]]:
    """The steps since it was last done; none if it was done, or never begun."""
    found = steps(store, what, subject)
    last = max((at for at, row in enumerate(found) if row["step"] == "done"), default=-1)
    return found[last + 1 :]


def is_unfinished(store: EventStore, what: str, subject: str) -> bool:
    return bool(unfinished(store, what, subject))


# Versions that are not given out again


def keep_versions(store: EventStore, versions: Mapping[str, int]) -> None:
    """Entities whose events go, each with the newest version among those."""
    known, where = (
        kept_versions(store.log, store.topic),
        store.log.topic_state(store.topic).directory,
    )
    new = {
        who: version
        for entity, version in versions.items()
        if known.get(who := hashed_name(where, entity), 0) < version
    }
    if new:
        _write(
            store,
            [(EXCISED_VERSION, who, "kept", {"version": version}) for who, version in new.items()],
        )


FORMAT = 1
ENVIRONMENT, ENVIRONMENT_FILE = "HEADRACE_MASTER_KEY", "HEADRACE_MASTER_KEY_FILE"
_KEY_BYTES, _NONCE_BYTES = 32, 12
SEALED = "sealed:1:"
_MAX_KEYS = 10_000
PROOF = b"headrace vault"
_MAKE = "make one with `openssl rand -base64 32`, and keep it where this log's backups are not."


def open_vault(store: EventStore, *, master_key: bytes | None = None, create: bool = True) -> Vault:
    """The keys of a store's subjects. The master key is 32 bytes; without one, it is read from
    HEADRACE_MASTER_KEY (base64) or the file HEADRACE_MASTER_KEY_FILE.

    The first key with which a vault is opened is its master key from then on; without `create`, one
    that is not there is not made.
    """
    key = master_key_given(master_key)
    if not create and not _place(store).exists():
        raise BadMasterKey(
            f"The event store {store.name!r} has no vault: nothing in it was ever sealed.",
            fix="check the store's name; nothing was changed.",
        )
    return Vault(store, key)


def _place(store: EventStore) -> Path:
    return directory(store) / "keys.sqlite"


def master_key_given(key: bytes | None = None) -> bytes:
    if key is None:
        text = os.environ.get(ENVIRONMENT)
        name = os.environ.get(ENVIRONMENT_FILE)
        if text is None and name is not None:
            try:
                text = Path(name).read_text()
            except OSError as error:
                raise BadMasterKey(
                    f"The master key's file cannot be read: {error}",
                    fix=f"check {ENVIRONMENT_FILE}.",
                ) from error
        if text is None:
            raise BadMasterKey(
                "There is no master key.", fix=f"set {ENVIRONMENT} or {ENVIRONMENT_FILE}; {_MAKE}"
            )
        try:
            key = base64.b64decode(text.strip(), validate=True)
        except ValueError:
            raise BadMasterKey("The master key is not base64.", fix=_MAKE) from None
    if len(key) != _KEY_BYTES:
        raise BadMasterKey(
            f"The master key has {len(key)} bytes, and must have {_KEY_BYTES}.", fix=_MAKE
        )
    return key


def cipher_of(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtra("cryptography", "events") from error
    return AESGCM(key)


def _encrypted(cipher: Any, content: bytes, about: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + bytes(cipher.encrypt(nonce, content, about))


def decrypted(cipher: Any, content: bytes, about: bytes) -> bytes | None:
    """None if it was encrypted with another key, or was changed."""
    from cryptography.exceptions import InvalidTag

    try:
        return bytes(cipher.decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], about))
    except InvalidTag:
        return None


def remove_key(store: EventStore, subject: str) -> None:
    """Delete a subject's key, if there is a vault and it has one, without opening it: no master key
    is needed for that.
    """
    if (path := _place(store)).exists():
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA synchronous = EXTRA")
            if db.execute("SELECT name FROM sqlite_master WHERE name = 'keys'").fetchone():
                db.execute("DELETE FROM keys WHERE subject = ?", (subject,))
                db.execute("VACUUM")


class Vault(Closeable):
    """Safe for threads and processes."""

    def __init__(self, store: EventStore, master_key: bytes) -> None:
        self._store, self._master = store, cipher_of(master_key)
        self.path = _place(store)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._keys: OrderedDict[str, Any] = OrderedDict()
        self._seen = -1
        self._db = sqlite3.connect(
            self.path, timeout=30, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA secure_delete = ON")
        self._db.execute("PRAGMA synchronous = EXTRA")
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS keys (subject TEXT PRIMARY KEY, wrapped BLOB NOT NULL)"
                " WITHOUT ROWID"
            )
            known = dict(self._db.execute("SELECT name, value FROM about"))
            if not known:
                rows = [("format", FORMAT), ("proof", _encrypted(self._master, PROOF, PROOF))]
                self._db.executemany("INSERT INTO about VALUES (?, ?)", rows)
                return
        if known["format"] > FORMAT:
            raise NewerFormat(
                f"{self.path} has format {known['format']}; this Headrace knows {FORMAT}.",
                fix="upgrade Headrace.",
            )
        if decrypted(self._master, known["proof"], PROOF) != PROOF:
            raise BadMasterKey(
                f"The master key is not the one that the keys in {self.path} were wrapped with.",
                fix="give the right one; nothing was changed.",
            )

    def _key(self, subject: str, *, make: bool) -> Any:
        """A subject's cipher; None if its key was deleted, or never made."""
        with self._lock:
            (now,) = self._db.execute("PRAGMA data_version").fetchone()
            if now != self._seen:  # another process changed something: perhaps it deleted a key
                self._keys.clear()
                self._seen = now
            known = self._keys.get(subject)
            if known is None:
                known = self._stored(subject) or (self._made(subject) if make else None)
                if known is not None:
                    self._keys[subject] = known
                    if len(self._keys) > _MAX_KEYS:
                        self._keys.popitem(last=False)
            return known

    def _stored(self, subject: str) -> Any:
        row = self._db.execute("SELECT wrapped FROM keys WHERE subject = ?", (subject,)).fetchone()
        if row is None:
            return None
        key = decrypted(self._master, row[0], subject.encode())
        if key is None:
            raise CorruptionError(
                f"The key of the subject {subject!r} in {self.path} is damaged.",
                fix="restore the file from a backup.",
            )
        return cipher_of(key)

    def _made(self, subject: str) -> Any:
        key = os.urandom(_KEY_BYTES)
        self._db.execute(
            "INSERT OR IGNORE INTO keys VALUES (?, ?)",
            (subject, _encrypted(self._master, key, subject.encode())),
        )
        return self._stored(subject)  # another process may have been quicker

    def seal(self, subject: str, value: Any) -> str:
        """A value as text that only the subject's key opens."""
        content = json.dumps(value, separators=(",", ":")).encode()
        sealed = _encrypted(self._key(subject, make=True), content, subject.encode())
        return f"{SEALED}{_text(subject.encode())}:{_text(sealed)}"

    def unseal(self, value: Any) -> Any:
        """What was sealed; None if the key is gone. Anything else stays as it is."""
        if not isinstance(value, str) or not value.startswith(SEALED):
            return value
        try:
            about, sealed = (
                base64.urlsafe_b64decode(part) for part in value.removeprefix(SEALED).split(":")
            )
        except ValueError:
            return None
        cipher = self._key(about.decode(), make=False)
        content = None if cipher is None else decrypted(cipher, sealed, about)
        return None if content is None else json.loads(content)

    def reveal(self, thing: Any) -> Any:
        """A copy of a row, an event or a state with everything in it unsealed: for whoever may see
        it, at the last moment.
        """
        if isinstance(thing, str):
            return self.unseal(thing)
        if isinstance(thing, Mapping):
            return {key: self.reveal(value) for key, value in thing.items()}
        if is_dataclass(thing) and not isinstance(thing, type):
            return replace(
                thing,
                **{
                    field.name: self.reveal(getattr(thing, field.name))
                    for field in fields(thing)
                    if field.init
                },
            )
        if isinstance(thing, tuple) and hasattr(thing, "_fields"):
            return type(thing)(*map(self.reveal, thing))
        return type(thing)(map(self.reveal, thing)) if isinstance(thing, list | tuple) else thing

    def subjects(self) -> list[str]:
        """Whoever has a key."""
        with self._lock:
            return [
                subject
                for (subject,) in self._db.execute("SELECT subject FROM keys ORDER BY subject")
            ]

    def forget(self, subject: str) -> None:
        """Delete a subject's key: what it sealed can be read by nobody any more. Can be repeated if
        it was interrupted; both ends are logged.
        """
        if not subject:
            raise InputError(f"{subject!r} is no subject.", fix="name one.")
        with self._lock:
            known = self._stored(subject) is not None
            if not known and not is_unfinished(self._store, "shred", subject):
                raise UnknownSubject(subject, f"the vault of {self._store.name!r}")
            if known:
                note(self._store, "shred", subject, "begun")
            self._db.execute("DELETE FROM keys WHERE subject = ?", (subject,))
            self._db.execute("VACUUM")
            self._keys.pop(subject, None)
            note(self._store, "shred", subject, "done")

    def close(self) -> None:
        self._db.close()


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode()


# Sealed values on their way out of a server: null once their subject's key is deleted, opened if
# the server was given the master key, and as they are stored otherwise.
#
# It works on the bytes of an answer, whatever they are of: a view's row, its changes, a result of
# SQL, a topic. A sealed value is one JSON text of harmless characters, so it is found and replaced
# where it stands, also within JSON in a text.


MARK = SEALED.encode()
_VALUE = re.compile(rb'(\\*)"' + MARK + rb'([A-Za-z0-9_=-]*):([A-Za-z0-9_=-]*)\1"')


def vaults_in(root: Path) -> list[Path]:
    """The keys of all event stores of an embedded log."""
    return sorted(root.glob("events/*/keys.sqlite"))


class Veil:
    """Of all vaults of a log, as they are at each moment: keys are asked for with every answer.
    Safe for threads.
    """

    def __init__(self, root: Path, master_key: bytes | None = None) -> None:
        self._root = root
        self._master = None if master_key is None else cipher_of(master_key)
        if self._master is not None:
            self._check_master(vaults_in(root))

    def _check_master(self, vaults: Iterable[Path]) -> None:
        proofs = [
            (path, row[0])
            for path in vaults
            for row in _asked(path, "SELECT value FROM about WHERE name = 'proof'")
        ]
        if proofs and all(decrypted(self._master, proof, PROOF) != PROOF for _, proof in proofs):
            raise BadMasterKey(
                f"The master key is not the one that the keys in {proofs[0][0]} were wrapped with.",
                fix="give the right one, or none: values then stay sealed.",
            )

    def shown(self, body: bytes) -> bytes:
        """An answer as it may be seen."""
        if MARK not in body:
            return body
        subjects = {
            subject
            for found in _VALUE.finditer(body)
            if (subject := _decoded(found[2])) is not None
        }
        keys = {subject: self._wrapped(subject) for subject in subjects}
        return _VALUE.sub(lambda found: self._replaced(found, keys), body)

    def _wrapped(self, subject: bytes) -> list[bytes]:
        """A subject's key in each vault that has one; none if it was deleted."""
        return [
            row[0]
            for path in vaults_in(self._root)
            for row in _asked(
                path,
                "SELECT wrapped FROM keys WHERE subject = ?",
                subject.decode("utf-8", "replace"),
            )
        ]

    def _replaced(self, found: re.Match[bytes], keys: Mapping[bytes, list[bytes]]) -> bytes:
        slashes, about, sealed = found.groups()
        subject, content = _decoded(about), _decoded(sealed)
        if subject is None or content is None or not keys[subject]:
            return b"null"
        return (
            found[0]
            if self._master is None
            else self._opened(subject, content, keys[subject], len(slashes))
        )

    def _opened(
        self, subject: bytes, content: bytes, wrapped: Iterable[bytes], depth: int
    ) -> bytes:
        for each in wrapped:
            key = decrypted(self._master, each, subject)
            plain = None if key is None else decrypted(cipher_of(key), content, subject)
            if plain is not None:
                return _within(plain.decode(), depth).encode()
        return b"null"


def _decoded(text: bytes) -> bytes | None:
    try:
        return base64.urlsafe_b64decode(text)
    except ValueError:
        return None


def _within(text: str, slashes: int) -> str:
    """JSON as it is written within a text of JSON, as deep as its quotes were."""
    while slashes:
        text, slashes = json.dumps(text)[1:-1], slashes // 2
    return text


def _asked(path: Path, question: str, *values: Any) -> list[tuple[Any, ...]]:
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
    except sqlite3.Error:
        return []
    try:
        return database.execute(question, values).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []
        raise
    finally:
        database.close()
