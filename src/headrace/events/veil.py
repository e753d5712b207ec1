"""Sealed values on their way out of a server: null once their subject's key is deleted, opened if the server was given the master key, and as they are stored otherwise.

It works on the bytes of an answer, whatever they are of: a view's row, its changes, a result of SQL, a topic. A sealed value is one JSON text of harmless characters, so it is found and replaced where it stands, also within JSON in a text.
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import BadMasterKey
from headrace.events.vault import PROOF, SEALED, cipher_of, decrypted

MARK = SEALED.encode()
_VALUE = re.compile(rb'(\\*)"' + MARK + rb'([A-Za-z0-9_=-]*):([A-Za-z0-9_=-]*)\1"')


def vaults_in(root: Path) -> list[Path]:
    """The keys of all event stores of an embedded log."""
    return sorted(root.glob("events/*/keys.sqlite"))


class Veil:
    """Of all vaults of a log, as they are at each moment: keys are asked for with every answer. Safe for threads."""

    def __init__(self, root: Path, master_key: bytes | None = None) -> None:
        self._root = root
        self._master = None if master_key is None else cipher_of(master_key)
        if self._master is not None:
            self._check_master(vaults_in(root))

    def _check_master(self, vaults: Iterable[Path]) -> None:
        proofs = [(path, row[0]) for path in vaults for row in _asked(path, "SELECT value FROM about WHERE name = 'proof'")]
        if proofs and all(decrypted(self._master, proof, PROOF) != PROOF for _, proof in proofs):
            raise BadMasterKey(f"The master key is not the one that the keys in {proofs[0][0]} were wrapped with.", fix="give the right one, or none: values then stay sealed.")

    def shown(self, body: bytes) -> bytes:
        """An answer as it may be seen."""
        if MARK not in body:
            return body
        subjects = {subject for found in _VALUE.finditer(body) if (subject := _decoded(found[2])) is not None}
        keys = {subject: self._wrapped(subject) for subject in subjects}
        return _VALUE.sub(lambda found: self._replaced(found, keys), body)

    def _wrapped(self, subject: bytes) -> list[bytes]:
        """A subject's key in each vault that has one; none if it was deleted."""
        return [row[0] for path in vaults_in(self._root) for row in _asked(path, "SELECT wrapped FROM keys WHERE subject = ?", subject.decode("utf-8", "replace"))]

    def _replaced(self, found: re.Match[bytes], keys: Mapping[bytes, list[bytes]]) -> bytes:
        slashes, about, sealed = found.groups()
        subject, content = _decoded(about), _decoded(sealed)
        if subject is None or content is None or not keys[subject]:
            return b"null"
        return found[0] if self._master is None else self._opened(subject, content, keys[subject], len(slashes))

    def _opened(self, subject: bytes, content: bytes, wrapped: Iterable[bytes], depth: int) -> bytes:
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
