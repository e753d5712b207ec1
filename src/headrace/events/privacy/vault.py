"""The vault: one key a person, so that deleting the key makes what is stored about them unreadable
everywhere at once.

Personal fields are sealed (encrypted with AES-GCM) under the subject's key, and stay sealed
wherever they go: in events, states, snapshots, views, backups. Keys are stored next to the events,
each wrapped (encrypted) by a master key that comes from the environment or a file and is never
stored. Deleting a key overwrites it (SQLite's secure_delete); every process notices that at its
next access.

- `Vault` seals and unseals values, and deletes keys.
- `Redaction` removes or unseals values in the responses of a server.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
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
from headrace.events.privacy.erasure_records import add_record, is_unfinished, store_directory
from headrace.log.api import Closeable

if TYPE_CHECKING:
    from headrace.events.store import EventStore


# Keys

FORMAT, ROTATING = 1, 2
"""The format while keys are wrapped by two master keys is another one: a Headrace that does not
know it must not add keys.
"""
ENVIRONMENT, ENVIRONMENT_FILE = "HEADRACE_MASTER_KEY", "HEADRACE_MASTER_KEY_FILE"
_KEY_BYTES, _NONCE_BYTES = 32, 12
SEALED = "sealed:1:"
_MAX_KEYS = 10_000
_REWRAPPED_AT_ONCE = 500
_SUBJECTS = {
    1: "SELECT subject FROM keys ORDER BY subject",
    2: "SELECT subject FROM keys UNION SELECT subject FROM next_keys ORDER BY subject",
}
"""By the number of tables with keys."""
_PREVIOUS = b"headrace previous master key"
PROOF = b"headrace vault"
_MAKE = "make one with `openssl rand -base64 32`, and keep it where this log's backups are not."


def open_vault(store: EventStore, *, master_key: bytes | None = None, create: bool = True) -> Vault:
    """Open the vault of an event store.

    Args:
        store: The event store.
        master_key: 32 bytes. By default it is read from HEADRACE_MASTER_KEY (base64) or the file
            HEADRACE_MASTER_KEY_FILE. The first key with which a vault is opened is its master key
            from then on.
        create: Whether a vault that does not exist is created.

    Returns:
        The vault.

    Raises:
        BadMasterKey: There is no master key, or not the right one, or no vault.

    Example:
        >>> vault = hr.events.open_vault(store)

    """
    key = read_master_key(master_key)
    if not create and not _keys_path(store).exists():
        raise BadMasterKey(
            f"The event store {store.name!r} has no vault: nothing in it was ever sealed.",
            fix="check the store's name; nothing was changed.",
        )
    path = _keys_path(store)
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        vault = Vault(store, key, db)
        vault.prepare()
    except BaseException:
        db.close()
        raise
    return vault


def _keys_path(store: EventStore) -> Path:
    return store_directory(store) / "keys.sqlite"


def read_master_key(key: bytes | None = None) -> bytes:
    """Return the master key: the given one, or the one of the environment."""
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
        return decode_master_key(text)
    if len(key) != _KEY_BYTES:
        raise BadMasterKey(
            f"The master key has {len(key)} bytes, and must have {_KEY_BYTES}.", fix=_MAKE
        )
    return key


def decode_master_key(text: str) -> bytes:
    """A master key from its text."""
    try:
        return read_master_key(base64.b64decode(text.strip(), validate=True))
    except ValueError:
        raise BadMasterKey("The master key is not base64.", fix=_MAKE) from None


def make_cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtra("cryptography", "events") from error
    return AESGCM(key)


def encrypt(cipher: Any, content: bytes, about: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + bytes(cipher.encrypt(nonce, content, about))


def decrypt(cipher: Any, content: bytes, about: bytes) -> bytes | None:
    """Decrypt a value; None if it was encrypted with another key, or changed."""
    from cryptography.exceptions import InvalidTag

    try:
        return bytes(cipher.decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], about))
    except InvalidTag:
        return None


def remove_key(store: EventStore, subject: str) -> None:
    """Delete a subject's key, if there is one. No master key is needed for that."""
    if (path := _keys_path(store)).exists():
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA synchronous = EXTRA")
            if db.execute("SELECT name FROM sqlite_master WHERE name = 'keys'").fetchone():
                for table in _key_tables(db):
                    db.execute(f"DELETE FROM {table} WHERE subject = ?", (subject,))  # noqa: S608
                db.execute("VACUUM")


def _key_tables(db: sqlite3.Connection) -> list[str]:
    """The tables with wrapped keys: two of them while the master key is rotated."""
    names = "SELECT name FROM sqlite_master WHERE name IN ('keys', 'next_keys') ORDER BY name"
    return [name for (name,) in db.execute(names)]


class Vault(Closeable):
    """Seals and unseals values with the keys of subjects. It is safe for threads and processes."""

    def __init__(self, store: EventStore, master_key: bytes, db: sqlite3.Connection) -> None:
        self._store = store
        self._master_key = master_key
        self._master = make_cipher(master_key)
        self._db = db
        self.path = _keys_path(store)
        self._lock = threading.RLock()
        self._keys: OrderedDict[str, Any] = OrderedDict()
        self._seen = -1

    def prepare(self) -> None:
        """Internal: create the tables if they are missing, and check the master key."""
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
                rows = [("format", FORMAT), ("proof", encrypt(self._master, PROOF, PROOF))]
                self._db.executemany("INSERT INTO about VALUES (?, ?)", rows)
                return
        if known["format"] > ROTATING:
            raise NewerFormat(
                f"{self.path} has format {known['format']}; this Headrace knows {ROTATING}.",
                fix="upgrade Headrace.",
            )
        if not self._fits(known):
            raise BadMasterKey(
                f"The master key is not the one that the keys in {self.path} were wrapped with.",
                fix="give the right one; nothing was changed.",
            )

    def _about(self) -> dict[str, Any]:
        return dict(self._db.execute("SELECT name, value FROM about"))

    def _fits(self, about: Mapping[str, Any]) -> bool:
        """Whether the master key is that of the keys, or the one that they are rotated to."""
        return any(
            decrypt(self._master, about[name], PROOF) == PROOF
            for name in ("proof", "next_proof")
            if name in about
        )

    def _masters(self) -> dict[str, Any]:
        """The ciphers of the master keys that are known, by the table of the keys they wrap. Who
        has the next one has both while keys are rotated.
        """
        about = self._about()
        if decrypt(self._master, about["proof"], PROOF) == PROOF:
            return {"keys": self._master}
        if "next_proof" in about and decrypt(self._master, about["next_proof"], PROOF) == PROOF:
            previous = decrypt(self._master, about["previous"], _PREVIOUS)
            if previous is not None:
                return {"next_keys": self._master, "keys": make_cipher(previous)}
        raise BadMasterKey(
            f"The master key of {self.path} was rotated, and this process has the one before.",
            fix="start it again with the present master key.",
        )

    def _key(self, subject: str, *, make: bool) -> Any:
        """Return a subject's cipher; None if its key was deleted, or never created."""
        with self._lock:
            (now,) = self._db.execute("PRAGMA data_version").fetchone()
            if now != self._seen:  # another process changed something: perhaps it deleted a key
                self._keys.clear()
                self._seen = now
            known = self._keys.get(subject)
            if known is None:
                known = self._load_key(subject) or (self._create_key(subject) if make else None)
                if known is not None:
                    self._keys[subject] = known
                    if len(self._keys) > _MAX_KEYS:
                        self._keys.popitem(last=False)
            return known

    def _load_key(self, subject: str) -> Any:
        key = self._unwrap(subject)
        return None if key is None else make_cipher(key)

    def _unwrap(self, subject: str) -> bytes | None:
        """A subject's key; None if it was deleted, or never created."""
        for table, master in self._masters().items():
            row = self._db.execute(
                f"SELECT wrapped FROM {table} WHERE subject = ?",  # noqa: S608 - ours
                (subject,),
            ).fetchone()
            if row is None:
                continue
            key = decrypt(master, row[0], subject.encode())
            if key is None:
                raise CorruptionError(
                    f"The key of the subject {subject!r} in {self.path} is damaged.",
                    fix="restore the file from a backup.",
                )
            return key
        return None

    def _create_key(self, subject: str) -> Any:
        key = os.urandom(_KEY_BYTES)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            if self._unwrap(subject) is None:  # another process may have been faster
                for table, master in self._masters().items():
                    self._db.execute(
                        f"INSERT INTO {table} VALUES (?, ?)",  # noqa: S608 - ours
                        (subject, encrypt(master, key, subject.encode())),
                    )
        return self._load_key(subject)

    def rotate(self, new_key: bytes, *, step: Callable[[int], None] = lambda _count: None) -> int:
        """Wrap all keys by a new master key too. Processes with either key go on meanwhile: start
        them again with the new one, and then call `finish_rotation`. It can be repeated if it was
        interrupted, with the same keys.

        Args:
            new_key: The new master key, 32 bytes.
            step: Called with the number of keys that are wrapped so far, for progress.

        Returns:
            How many keys are wrapped by the new master key.

        Raises:
            BadMasterKey: The new key is malformed, or another rotation is not finished.
        """
        new_master = make_cipher(read_master_key(new_key))
        with self._lock:
            self._begin_rotation(new_master)
            done = 0
            while batch := self._rewrap(new_master):
                done += batch
                step(done)
            (count,) = self._db.execute("SELECT count(*) FROM next_keys").fetchone()
            return int(count)

    def _begin_rotation(self, new_master: Any) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            about = self._about()
            if decrypt(self._master, about["proof"], PROOF) != PROOF:
                raise BadMasterKey(
                    "Keys are rotated from the master key that wraps them, and this is another.",
                    fix="open the vault with the present master key, and give the new one.",
                )
            if decrypt(new_master, about["proof"], PROOF) == PROOF:
                raise BadMasterKey("The new master key is the present one.", fix=_MAKE)
            if "next_proof" in about:
                if decrypt(new_master, about["next_proof"], PROOF) != PROOF:
                    raise BadMasterKey(
                        "A rotation to another master key is not finished.",
                        fix="repeat it with that key, and finish it; then begin the next one.",
                    )
                return
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS next_keys (subject TEXT PRIMARY KEY, wrapped BLOB NOT"
                " NULL) WITHOUT ROWID"
            )
            previous = encrypt(new_master, self._master_key, _PREVIOUS)
            rows = [
                ("format", ROTATING),
                ("next_proof", encrypt(new_master, PROOF, PROOF)),
                ("previous", previous),
            ]
            self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    def _rewrap(self, new_master: Any) -> int:
        """Wrap some keys by the new master key that are not yet. Returns how many."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            rows = self._db.execute(
                "SELECT subject, wrapped FROM keys WHERE subject NOT IN (SELECT subject FROM"
                " next_keys) LIMIT ?",
                (_REWRAPPED_AT_ONCE,),
            ).fetchall()
            for subject, wrapped in rows:
                key = decrypt(self._present, wrapped, subject.encode())
                if key is None:
                    raise CorruptionError(
                        f"The key of the subject {subject!r} in {self.path} is damaged.",
                        fix="restore the file from a backup, and repeat the rotation.",
                    )
                self._db.execute(
                    "INSERT INTO next_keys VALUES (?, ?)",
                    (subject, encrypt(new_master, key, subject.encode())),
                )
            return len(rows)

    @property
    def _present(self) -> Any:
        """The cipher of the master key that wraps `keys`."""
        return self._masters()["keys"]

    def finish_rotation(self) -> int:
        """End a rotation: only the new master key opens the vault from here on. The vault must have
        been opened with it. Repeat it if it was interrupted.

        Returns:
            How many keys there are.

        Raises:
            BadMasterKey: No rotation to this master key was begun.
        """
        with self._lock:
            about = self._about()
            is_next = "next_proof" in about and (
                decrypt(self._master, about["next_proof"], PROOF) == PROOF
            )
            if not is_next:
                raise BadMasterKey(
                    "No rotation to this master key was begun, or it is finished.",
                    fix="open the vault with the new master key; begin with `rotate`.",
                )
            while not self._replace_keys(about["next_proof"]):
                self._rewrap(self._master)  # keys that processes with the old master have added
            self._db.execute("VACUUM")
            self._keys.clear()
            (count,) = self._db.execute("SELECT count(*) FROM keys").fetchone()
            return int(count)

    def _replace_keys(self, proof: bytes) -> bool:
        """Keep the keys as the new master key wraps them; not if some are not wrapped by it yet."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            left = "SELECT 1 FROM keys WHERE subject NOT IN (SELECT subject FROM next_keys) LIMIT 1"
            if self._db.execute(left).fetchone() is not None:
                return False
            self._db.execute("DELETE FROM keys")
            self._db.execute("INSERT INTO keys SELECT subject, wrapped FROM next_keys")
            self._db.execute("DROP TABLE next_keys")
            rows = [("format", FORMAT), ("proof", proof)]
            self._db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)
            self._db.execute("DELETE FROM about WHERE name IN ('next_proof', 'previous')")
        return True

    def seal(self, subject: str, value: Any) -> str:
        """Return a value as text that only the subject's key unseals."""
        content = json.dumps(value, separators=(",", ":")).encode()
        sealed = encrypt(self._key(subject, make=True), content, subject.encode())
        return f"{SEALED}{_text(subject.encode())}:{_text(sealed)}"

    def unseal(self, value: Any) -> Any:
        """Return what was sealed; None if the key was deleted. Any other value is returned as it
        is.
        """
        if not isinstance(value, str) or not value.startswith(SEALED):
            return value
        try:
            about, sealed = (
                base64.urlsafe_b64decode(part) for part in value.removeprefix(SEALED).split(":")
            )
        except ValueError:
            return None
        cipher = self._key(about.decode(), make=False)
        content = None if cipher is None else decrypt(cipher, sealed, about)
        return None if content is None else json.loads(content)

    def reveal(self, thing: Any) -> Any:
        """Return a copy of a row, an event or a state with all values unsealed, to be shown to
        someone who may see them.
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
        """Return the subjects that have a key."""
        with self._lock:
            return [
                subject for (subject,) in self._db.execute(_SUBJECTS[len(_key_tables(self._db))])
            ]

    def forget(self, subject: str) -> None:
        """Delete a subject's key, so that nobody can read what it sealed any more. Repeat it if it
        was interrupted; its beginning and its end are recorded.

        Raises:
            UnknownSubject: The vault has no key of that subject.

        """
        if not subject:
            raise InputError(f"{subject!r} is not a subject.", fix="name one.")
        with self._lock:
            known = self._load_key(subject) is not None
            if not known and not is_unfinished(self._store, "shred", subject):
                raise UnknownSubject(subject, f"the vault of {self._store.name!r}")
            if known:
                add_record(self._store, "shred", subject, "begun")
            for table in _key_tables(self._db):
                self._db.execute(f"DELETE FROM {table} WHERE subject = ?", (subject,))  # noqa: S608
            self._db.execute("VACUUM")
            self._keys.pop(subject, None)
            add_record(self._store, "shred", subject, "done")

    def close(self) -> None:
        self._db.close()


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode()


# Responses of a server

MARK = SEALED.encode()
_VALUE = re.compile(rb'(\\*)"' + MARK + rb'([A-Za-z0-9_=-]*):([A-Za-z0-9_=-]*)\1"')


def find_vaults(root: Path) -> list[Path]:
    """Return the vaults of all event stores of an embedded log."""
    return sorted(root.glob("events/*/keys.sqlite"))


class Redaction:
    """Replaces sealed values in the responses of a server: by null if their subject's key was
    deleted, by the value if the server has the master key; otherwise they stay sealed.

    It works on the bytes of any response: rows of a view, its changes, results of SQL, a topic. A
    sealed value is one JSON text without escapes, so it is found and replaced in place, also in
    JSON within a text. Keys are looked up in all vaults of the log for every response. It is safe
    for threads.
    """

    def __init__(self, root: Path, master_key: bytes | None = None) -> None:
        self._root = root
        self._master = None if master_key is None else make_cipher(master_key)
        if self._master is not None:
            vaults = find_vaults(root)
            proofs = [
                (path, row[0])
                for path in vaults
                for row in _query(
                    path, "SELECT value FROM about WHERE name IN ('proof', 'next_proof')"
                )
            ]
            if proofs and all(decrypt(self._master, proof, PROOF) != PROOF for _, proof in proofs):
                raise BadMasterKey(
                    f"The master key is not the one that the keys in {proofs[0][0]} were wrapped"
                    " with.",
                    fix="give the right one, or none: values then stay sealed.",
                )

    def redact(self, body: bytes) -> bytes:
        """Return a response with its sealed values replaced."""
        if MARK not in body:
            return body
        subjects = {
            subject
            for match in _VALUE.finditer(body)
            if (subject := _decode_base64(match[2])) is not None
        }
        keys = {subject: self._wrapped(subject) for subject in subjects}
        return _VALUE.sub(lambda match: self._replacement(match, keys), body)

    def _wrapped(self, subject: bytes) -> list[bytes]:
        """Return a subject's wrapped key in each vault that has one."""
        return [
            row[0]
            for path in find_vaults(self._root)
            for table in ("keys", "next_keys")
            for row in _query(
                path,
                f"SELECT wrapped FROM {table} WHERE subject = ?",  # noqa: S608 - ours
                subject.decode("utf-8", "replace"),
            )
        ]

    def _replacement(self, match: re.Match[bytes], keys: Mapping[bytes, list[bytes]]) -> bytes:
        slashes, about, sealed = match.groups()
        subject, content = _decode_base64(about), _decode_base64(sealed)
        if subject is None or content is None or not keys[subject]:
            return b"null"
        return (
            match[0]
            if self._master is None
            else self._decrypt_value(subject, content, keys[subject], len(slashes))
        )

    def _decrypt_value(
        self, subject: bytes, content: bytes, wrapped: Iterable[bytes], depth: int
    ) -> bytes:
        for each in wrapped:
            key = decrypt(self._master, each, subject) or self._decrypt_with_previous(each, subject)
            plain = None if key is None else decrypt(make_cipher(key), content, subject)
            if plain is not None:
                # Escape JSON for a text within JSON, nested as deep as the given number of
                # backslashes.
                text = plain.decode()
                slashes = depth
                while slashes:
                    text, slashes = json.dumps(text)[1:-1], slashes // 2
                return text.encode()
        return b"null"

    def _decrypt_with_previous(self, wrapped: bytes, subject: bytes) -> bytes | None:
        """A key that a process with the previous master key has added while keys are rotated."""
        for path in find_vaults(self._root):
            for (previous,) in _query(path, "SELECT value FROM about WHERE name = 'previous'"):
                master = decrypt(self._master, previous, _PREVIOUS)
                key = None if master is None else decrypt(make_cipher(master), wrapped, subject)
                if key is not None:
                    return key
        return None


def _decode_base64(text: bytes) -> bytes | None:
    try:
        return base64.urlsafe_b64decode(text)
    except ValueError:
        return None


def _query(path: Path, question: str, *values: Any) -> list[tuple[Any, ...]]:
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
