"""Who may connect with Postgres's protocol, and which views they see.

A file of roles, in TOML, names each with its password and its views:

    [roles.analyst]
    password = "correct horse battery staple"     # or verifier = "SCRAM-SHA-256$4096:…"
    views = ["revenue", "orders_*"]               # all views if left out

Without such a file every name is one role with all views. Its password is the server's token; a
server without a token listens on this machine alone and asks for none.

Passwords are checked by SCRAM-SHA-256 (RFC 7677): neither they nor anything that could be replayed
crosses the network. A name that does not exist is answered like a wrong password.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headrace.errors import ConfigurationError, nearest

MECHANISM = "SCRAM-SHA-256"
_ITERATIONS = 4_096
_MAX_ITERATIONS = 1_000_000
_VERIFIER = re.compile(
    r"SCRAM-SHA-256\$(\d{1,7}):([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+):([A-Za-z0-9+/=]+)"
)
_FIELDS = {"password", "verifier", "views"}


class AuthenticationFailed(Exception):
    """The password is wrong, or a message of SCRAM is not what it must be."""


# Roles


@dataclass(frozen=True)
class ScramVerifier:
    """What the server knows of a password: enough to check it, too little to log in with it."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def of_password(cls, password: str) -> ScramVerifier:
        salt = os.urandom(16)
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, _ITERATIONS)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        return cls(
            _ITERATIONS,
            salt,
            hashlib.sha256(client_key).digest(),
            hmac.digest(salted, b"Server Key", "sha256"),
        )

    @classmethod
    def parse(cls, text: str) -> ScramVerifier | None:
        """A verifier as Postgres stores them in `pg_authid`; None if it is none."""
        match = _VERIFIER.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= _MAX_ITERATIONS:
            return None
        try:
            salt, stored, server = (base64.b64decode(match[n], validate=True) for n in (2, 3, 4))
        except ValueError:
            return None
        return (
            cls(int(match[1]), salt, stored, server) if len(stored) == len(server) == 32 else None
        )


@dataclass(frozen=True)
class Role:
    """A name that may connect, and the patterns of the views that it sees."""

    name: str
    verifier: ScramVerifier | None = None
    patterns: tuple[str, ...] = ("*",)

    def may_read(self, view: str) -> bool:
        return any(fnmatchcase(view, pattern) for pattern in self.patterns)


class Roles:
    """All roles of a server.

    Args:
        roles: The roles by name; None if every name may connect, with all views.
        token: The password of every name, if there are no roles.
    """

    def __init__(self, roles: Mapping[str, Role] | None = None, token: str | None = None) -> None:
        self._roles = roles
        self._shared = None if token is None else ScramVerifier.of_password(token)
        self._secret = secrets.token_bytes(32)

    @property
    def need_password(self) -> bool:
        return self._roles is not None or self._shared is not None

    def role(self, name: str) -> Role:
        """The role of a name. For one that does not exist, a role whose password nobody knows,
        always the same.
        """
        if self._roles is None:
            return Role(name, self._shared)
        known = self._roles.get(name)
        if known is not None:
            return known
        salt = hmac.digest(self._secret, name.encode(), "sha256")
        return Role(name, ScramVerifier(_ITERATIONS, salt[:16], salt, salt), ())


def read_roles(path: Path) -> dict[str, Role]:
    """The roles in a file.

    Raises:
        ConfigurationError: The file cannot be read, or says what is not known.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(
            f"The file of roles {path} cannot be read: {error}.",
            fix='write it as TOML: [roles.NAME], password = "…".',
        ) from None
    roles = content.get("roles")
    if set(content) != {"roles"} or not isinstance(roles, dict) or not roles:
        raise ConfigurationError(
            f"The file of roles {path} must have the table [roles] alone.",
            fix='write each role as [roles.NAME], with password = "…" below.',
        )
    return {name: _role(path, name, fields) for name, fields in roles.items()}


def _role(path: Path, name: str, fields: Any) -> Role:
    where = f"The role {name!r} in {path}"
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{where} is no table.", fix=f"write it as [roles.{name}].")
    for field in fields:
        if field not in _FIELDS:
            raise ConfigurationError(f"{where} has no field {field!r}: {nearest(field, _FIELDS)}")
    if ("password" in fields) == ("verifier" in fields):
        raise ConfigurationError(
            f"{where} needs a password or a verifier.", fix="give one of them."
        )
    views = fields.get("views", ["*"])
    if not isinstance(views, list) or not all(isinstance(view, str) for view in views):
        raise ConfigurationError(f"{where}: views is no list of names.", fix='views = ["revenue"]')
    if "verifier" in fields:
        verifier = ScramVerifier.parse(str(fields["verifier"]))
        if verifier is None:
            raise ConfigurationError(
                f"{where}: its verifier is not one of SCRAM-SHA-256.",
                fix="copy it from rolpassword in Postgres's pg_authid, or give a password.",
            )
    else:
        password = fields["password"]
        if not isinstance(password, str) or not password:
            raise ConfigurationError(f"{where} has an empty password.", fix="give it a long one.")
        verifier = ScramVerifier.of_password(password)
    return Role(name, verifier, tuple(views))


# SCRAM


class ScramExchange:
    """The server's side of one log-in: the client's first message, then its proof."""

    def __init__(self, verifier: ScramVerifier) -> None:
        self._verifier = verifier
        self._first = ""
        self._gs2 = ""
        self._nonce = ""

    def first(self, message: str) -> str:
        """The answer to the client's first message."""
        match = re.fullmatch(
            r"([ny],(?:a=[^,]*)?,)(n=([^,]*),r=([\x21-\x2b\x2d-\x7e]+).*)", message
        )
        if match is None:
            raise AuthenticationFailed
        self._gs2 = match[1]
        self._nonce = match[4] + secrets.token_urlsafe(18)
        salt = base64.b64encode(self._verifier.salt).decode()
        answer = f"r={self._nonce},s={salt},i={self._verifier.iterations}"
        self._first = f"{match[2]},{answer}"
        return answer

    def final(self, message: str) -> str:
        """The server's own proof, if the client's is right."""
        match = re.fullmatch(
            r"(c=([A-Za-z0-9+/=]+),r=([^,]+)(?:,.*)?),p=([A-Za-z0-9+/=]+)", message
        )
        if match is None or not hmac.compare_digest(match[3].encode(), self._nonce.encode()):
            raise AuthenticationFailed
        try:
            binding, proof = (base64.b64decode(match[n], validate=True) for n in (2, 4))
        except ValueError:
            raise AuthenticationFailed from None
        signed = f"{self._first},{match[1]}".encode()
        signature = hmac.digest(self._verifier.stored_key, signed, "sha256")
        if binding != self._gs2.encode() or len(proof) != len(signature):
            raise AuthenticationFailed
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        if not hmac.compare_digest(hashlib.sha256(client_key).digest(), self._verifier.stored_key):
            raise AuthenticationFailed
        server_signature = hmac.digest(self._verifier.server_key, signed, "sha256")
        return f"v={base64.b64encode(server_signature).decode()}"
