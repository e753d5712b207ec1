"""Whether a webhook's body is from whom it says: signatures as GitHub makes them, as Stripe does,
and by the Standard Webhooks convention, which our own webhook sink follows.

All are HMAC-SHA256 with a shared secret, compared in constant time. Stripe's and the convention's
say when they were made: a request outside the time window is a replay, and is refused; within it,
it is known by what was signed: the convention's id, Stripe's event. GitHub's do not; there a repeat
is known by its delivery id.
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

from headrace.durations import to_us
from headrace.errors import ConfigurationError, InputError, nearest
from headrace.log.topic_config import check_name
from headrace.log.values import Duration
from headrace.secrets import is_named, secret

RAW_SCHEMA = (
    "body BINARY, content_type STRING, headers MAP<STRING, STRING>, query STRING, received_at"
    " TIMESTAMP"
)
"""The topic of a hook, if it is not there yet."""
Headers = Mapping[str, str]
"""By their names in lower case."""
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,200}")


class BadSignature(Exception):
    """Not signed by who knows the secret, or not now. The text is for the sender."""


@dataclass(frozen=True)
class Hook:
    """A topic that gets bodies as they come, from a sender that signs them. `secrets` are named:
    `env:NAME` or `file:PATH`; several, while one replaces another.
    """

    topic: str
    signature: str | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    window_s: float = 300.0
    raw: bool = True
    """Whether the body is stored as it came; else it is read as JSON, by the topic's columns."""

    def __post_init__(self) -> None:
        check_name(self.topic, what="topic name")
        if self.signature is None:
            if self.secrets:
                raise InputError(
                    f"The hook {self.topic!r} has a secret, and does not say how it is signed.",
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
                f"The hook {self.topic!r} is signed, and has no secret.",
                fix="give secret='env:NAME' or secret='file:PATH'.",
            )
        if not all(is_named(each) for each in self.secrets):
            raise InputError(
                "A webhook's secret does not belong into a program's text.",
                fix="name the place: secret='env:NAME', or secret='file:PATH'.",
            )


def hook(
    topic: str,
    *,
    signature: str | None = None,
    secret: str | Sequence[str] = (),
    window: Duration = "5 minutes",
    raw: bool = True,
) -> Hook:
    """A topic for webhooks, for `hr.gateways.http(hooks=[…])`. `signature` is "github", "stripe" or
    "standard".
    """
    return Hook(
        topic,
        signature,
        (secret,) if isinstance(secret, str) else tuple(secret),
        to_us(window, what="window") / 1e6,
        raw,
    )


class SignatureCheck:
    """Checks the bodies of one hook."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._keys = [_key(secret("secret", each), hook) for each in hook.secrets]

    def check(self, headers: Headers, body: bytes, now_s: float | None = None) -> str | None:
        """The id that the signature vouches for, if it does: one who sends a request again cannot
        give it another.
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
            fix="fill in the place it is named by.",
        )
    if hook.signature != "standard" or not text.startswith("whsec_"):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise ConfigurationError(
            f"The secret of the hook {hook.topic!r} begins with whsec_, and what follows is no"
            " base64.",
            fix="copy it anew.",
        ) from None


def _github(
    headers: Headers, body: bytes, keys: Sequence[bytes], _window_s: float, _now_s: float
) -> str | None:
    given = headers.get("x-hub-signature-256", "")
    if not given.startswith("sha256="):
        raise BadSignature("There is no X-Hub-Signature-256: sha256=….")
    _compare(
        [given.removeprefix("sha256=")], [hmac.digest(key, body, "sha256").hex() for key in keys]
    )
    return None


def _stripe(
    headers: Headers, body: bytes, keys: Sequence[bytes], window_s: float, now_s: float
) -> str | None:
    parts = [part.partition("=") for part in headers.get("stripe-signature", "").split(",")]
    given = [value.strip() for name, _, value in parts if name.strip() == "v1"]
    at = next((value.strip() for name, _, value in parts if name.strip() == "t"), "")
    if not given or not at:
        raise BadSignature("There is no Stripe-Signature: t=…,v1=….")
    signed = at.encode() + b"." + body
    _compare(given, [hmac.digest(key, signed, "sha256").hex() for key in keys])
    _check_time(at, window_s, now_s)
    return f"stripe-{_event_id(body) or hashlib.sha256(body).hexdigest()}"


def _event_id(body: bytes) -> str | None:
    """What the sender calls the event. It signs each attempt anew, with another time, so the time
    says nothing about which event it is.
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
    identity, at = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    given = [
        part.removeprefix("v1,")
        for part in headers.get("webhook-signature", "").split()
        if part.startswith("v1,")
    ]
    if not identity or not at or not given:
        raise BadSignature(
            "webhook-id, webhook-timestamp and webhook-signature: v1,… must all be there."
        )
    signed = f"{identity}.{at}.".encode() + body
    _compare(given, [base64.b64encode(hmac.digest(key, signed, "sha256")).decode() for key in keys])
    _check_time(at, window_s, now_s)
    return identity


def _compare(given: Sequence[str], right: Sequence[str]) -> None:
    """Every pair is compared, each in constant time, so that the time says nothing about any."""
    matches = [
        hmac.compare_digest(each.encode(), one.encode()) for each in given[:16] for one in right
    ]
    if not any(matches):
        raise BadSignature("The signature is wrong.")


def _check_time(at: str, window_s: float, now_s: float) -> None:
    """Looked at only when the signature is right: until then it is anybody's claim."""
    if not (at.isascii() and at.isdigit() and len(at) < 16):
        raise BadSignature("The time of the signature is no number of seconds.")
    if abs(now_s - int(at)) > window_s:
        raise BadSignature(f"The signature is not of the last {window_s:g} seconds.")


Check = Callable[[Headers, bytes, Sequence[bytes], float, float], str | None]
CHECKS: dict[str, Check] = {"github": _github, "stripe": _stripe, "standard": _standard}
