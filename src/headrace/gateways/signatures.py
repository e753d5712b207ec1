"""Signatures of webhooks: GitHub's, Stripe's, and those of the Standard Webhooks convention, which
the webhook sink (`headrace.sinks.webhook_target`) uses too.

All are HMAC-SHA256 with a shared secret, compared in constant time. Stripe's and the convention's
contain the time at which they were made: a request outside the time window is a replay, and is
refused; within it, a repeat is recognised by what was signed, the convention's id or Stripe's event
id. GitHub's contain no time; a repeat is recognised by its delivery id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.connector import as_tuple
from headrace.durations import to_us
from headrace.errors import ConfigurationError, InputError, nearest
from headrace.log.values import Duration
from headrace.names import check_name
from headrace.secrets import is_named, secret

RAW_SCHEMA = (
    "body BINARY, content_type STRING, headers MAP<STRING, STRING>, query STRING, received_at"
    " TIMESTAMP"
)
"""The columns of a hook's topic, if it does not exist yet."""
Headers = Mapping[str, str]
"""By name, in lower case."""
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,200}")


class BadSignature(Exception):
    """A request is not signed with the secret, or not recently. The text is for the sender."""


@dataclass(frozen=True)
class Hook:
    """A topic for webhooks. `secrets` say where the secrets are: `env:NAME` or `file:PATH`. There
    are several while one replaces another.
    """

    topic: str
    signature: str | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    window_s: float = 300.0
    raw: bool = True
    """Whether the body is stored as it came. If not, it is JSON with the topic's columns."""

    def __post_init__(self) -> None:
        check_name(self.topic, what="topic name")
        if self.signature is None:
            if self.secrets:
                raise InputError(
                    f"The hook {self.topic!r} has a secret, but no signature.",
                    fix=f"give signature=: {', '.join(CHECKS)}.",
                )
            return
        if self.signature not in CHECKS:
            raise InputError(
                f"There is no signature {self.signature!r}: {nearest(self.signature, CHECKS)}",
                fix=f"choose one of {', '.join(CHECKS)}.",
            )
        if not self.secrets:
            raise InputError(
                f"The hook {self.topic!r} has a signature, but no secret.",
                fix="give secret='env:NAME' or secret='file:PATH'.",
            )
        if not all(is_named(each) for each in self.secrets):
            raise InputError(
                "A webhook's secret must not be written into a program.",
                fix="say where it is: secret='env:NAME', or secret='file:PATH'.",
            )


def hook(
    topic: str,
    *,
    signature: str | None = None,
    secret: str | Sequence[str] = (),
    window: Duration = "5 minutes",
    raw: bool = True,
) -> Hook:
    """Declare a topic for webhooks, for `hr.gateways.http(hooks=[…])`.

    Args:
        topic: The topic, which is created if it is missing and `raw`.
        signature: How requests are signed: "github", "stripe" or "standard". Without it, requests
            need the gateway's token.
        secret: Where the secret is: `env:NAME` or `file:PATH`. Give several while one replaces
            another.
        window: How old a signature may be.
        raw: Whether the body is stored as it came, with its headers. If not, it is JSON with the
            topic's columns.

    Returns:
        The hook.

    Raises:
        InputError: The signature is unknown, or the secret is missing.

    Example:
        >>> hr.gateways.hook("pushes", signature="github", secret="env:GITHUB_SECRET")
    """
    return Hook(
        topic=topic,
        signature=signature,
        secrets=as_tuple(secret),
        window_s=to_us(window, what="window") / 1e6,
        raw=raw,
    )


class SignatureCheck:
    """Checks the bodies of one hook."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._keys = [_key(secret("secret", each), hook) for each in hook.secrets]

    def check_head(self, headers: Headers, now_s: float | None = None) -> None:
        """Check what can be checked before the body has come: whether there is a signature, and
        whether it says that it is of the time window.

        Raises:
            BadSignature: No body could make the request acceptable.
        """
        if self._hook.signature is not None:
            parts = PARTS[self._hook.signature](headers)
            if parts.at is not None:
                _check_time(parts.at, self._hook.window_s, time.time() if now_s is None else now_s)

    def check(self, headers: Headers, body: bytes, now_s: float | None = None) -> str | None:
        """Check a request, and return the id that is part of what was signed; None if there is
        none. Who repeats a request cannot change it.

        Raises:
            BadSignature: The signature is wrong, missing, or too old.
        """
        if self._hook.signature is None:
            return None
        return CHECKS[self._hook.signature](
            headers, body, self._keys, self._hook.window_s, time.time() if now_s is None else now_s
        )


def _key(text: str, hook: Hook) -> bytes:
    if not text:
        raise ConfigurationError(
            f"The secret of the hook {hook.topic!r} is empty.",
            fix="put the secret there.",
        )
    if hook.signature != "standard" or not text.startswith("whsec_"):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise ConfigurationError(
            f"The secret of the hook {hook.topic!r} begins with whsec_, but what follows is not"
            " base64.",
            fix="copy it again.",
        ) from None


@dataclass(frozen=True)
class SignatureParts:
    """What the headers of a request say of its signature."""

    given: tuple[str, ...]
    """Signatures, of which one must be right."""
    at: str | None = None
    """When it was made, if that is signed."""
    identity: str = ""
    """What identifies the request, if that is signed."""


def _github_parts(headers: Headers) -> SignatureParts:
    given = headers.get("x-hub-signature-256", "")
    if not given.startswith("sha256="):
        raise BadSignature("There is no X-Hub-Signature-256: sha256=….")
    return SignatureParts((given.removeprefix("sha256="),))


def _stripe_parts(headers: Headers) -> SignatureParts:
    parts = [part.partition("=") for part in headers.get("stripe-signature", "").split(",")]
    given = tuple(value.strip() for name, _, value in parts if name.strip() == "v1")
    at = next((value.strip() for name, _, value in parts if name.strip() == "t"), "")
    if not given or not at:
        raise BadSignature("There is no Stripe-Signature: t=…,v1=….")
    return SignatureParts(given, at)


def _standard_parts(headers: Headers) -> SignatureParts:
    identity, at = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    given = tuple(
        part.removeprefix("v1,")
        for part in headers.get("webhook-signature", "").split()
        if part.startswith("v1,")
    )
    if not identity or not at or not given:
        raise BadSignature(
            "webhook-id, webhook-timestamp and webhook-signature: v1,… must all be there."
        )
    return SignatureParts(given, at, identity)


PARTS: dict[str, Callable[[Headers], SignatureParts]] = {
    "github": _github_parts,
    "stripe": _stripe_parts,
    "standard": _standard_parts,
}


def _github(
    headers: Headers, body: bytes, keys: Sequence[bytes], _window_s: float, _now_s: float
) -> str | None:
    parts = _github_parts(headers)
    _compare(parts.given, [hmac.digest(key, body, "sha256").hex() for key in keys])
    return None


def _stripe(
    headers: Headers, body: bytes, keys: Sequence[bytes], window_s: float, now_s: float
) -> str | None:
    parts = _stripe_parts(headers)
    at = parts.at or ""
    signed = at.encode() + b"." + body
    _compare(parts.given, [hmac.digest(key, signed, "sha256").hex() for key in keys])
    _check_time(at, window_s, now_s)
    return f"stripe-{_event_id(body) or hashlib.sha256(body).hexdigest()}"


def _event_id(body: bytes) -> str | None:
    """Return the id of Stripe's event. Each attempt to deliver an event is signed anew, so the
    signature does not identify it.
    """
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        return None
    identity = event.get("id") if isinstance(event, dict) else None
    return identity if isinstance(identity, str) and _PLAIN_ID.fullmatch(identity) else None


def _standard(
    headers: Headers, body: bytes, keys: Sequence[bytes], window_s: float, now_s: float
) -> str | None:
    parts = _standard_parts(headers)
    at = parts.at or ""
    signed = f"{parts.identity}.{at}.".encode() + body
    right = [base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys]
    _compare(parts.given, right)
    _check_time(at, window_s, now_s)
    return parts.identity


def _compare(given: Sequence[str], right: Sequence[str]) -> None:
    """Raise BadSignature unless one of the given signatures is right. All pairs are compared, each
    in constant time, so that the duration reveals nothing.
    """
    matches = [
        hmac.compare_digest(signature.encode(), expected.encode())
        for signature in given[:16]
        for expected in right
    ]
    if not any(matches):
        raise BadSignature("The signature is wrong.")


def _check_time(at: str, window_s: float, now_s: float) -> None:
    """Raise BadSignature if a signature is outside the time window. That it is inside says
    something only when the signature is right: before that, the time may be forged.
    """
    if not (at.isascii() and at.isdigit() and len(at) < 16):
        raise BadSignature("The time of the signature is not a number of seconds.")
    if abs(now_s - int(at)) > window_s:
        raise BadSignature(f"The signature is not of the last {window_s:g} seconds.")


Check = Callable[[Headers, bytes, Sequence[bytes], float, float], str | None]
CHECKS: dict[str, Check] = {"github": _github, "stripe": _stripe, "standard": _standard}
