"""Signatures, as their makers document them."""

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.signatures import BadSignature, Hook, SignatureCheck

NOW_S = 1_700_000_000
BODY = b'{"id": 1}'


def check_of(kind: str, monkeypatch: pytest.MonkeyPatch, *secrets: str) -> SignatureCheck:
    for number, text in enumerate(secrets):
        monkeypatch.setenv(f"S{number}", text)
    return SignatureCheck(
        Hook("t", kind, tuple(f"env:S{number}" for number in range(len(secrets))))
    )


def sha(key: bytes, signed: bytes) -> bytes:
    return hmac.new(key, signed, hashlib.sha256).digest()


def test_either_secret_is_right_while_one_replaces_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = check_of("github", monkeypatch, "old", "new")
    for key in (b"old", b"new"):
        check.check({"x-hub-signature-256": f"sha256={sha(key, BODY).hex()}"}, BODY)
    with pytest.raises(BadSignature, match="wrong"):
        check.check({"x-hub-signature-256": f"sha256={sha(b'other', BODY).hex()}"}, BODY)


def test_stripe_may_send_several_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sha(b"k", f"{NOW_S}.".encode() + BODY).hex()
    check = check_of("stripe", monkeypatch, "k")
    check.check({"stripe-signature": f"t={NOW_S},v1={'0' * 64},v1={right},v0=x"}, BODY, NOW_S)
    with pytest.raises(BadSignature, match="not of the last 300 seconds"):
        check.check({"stripe-signature": f"t={NOW_S},v1={right}"}, BODY, NOW_S + 301)
    with pytest.raises(BadSignature, match="wrong"):
        check.check({"stripe-signature": f"t={NOW_S + 1},v1={right}"}, BODY, NOW_S)


def test_the_convention_signs_id_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of("standard", monkeypatch, "whsec_" + base64.b64encode(b"k").decode())
    right = base64.b64encode(sha(b"k", f"m1.{NOW_S}.".encode() + BODY)).decode()
    headers = {
        "webhook-id": "m1",
        "webhook-timestamp": str(NOW_S),
        "webhook-signature": f"v1a,x v1,{right}",
    }
    check.check(headers, BODY, NOW_S)
    with pytest.raises(BadSignature, match="wrong"):
        check.check({**headers, "webhook-id": "m2"}, BODY, NOW_S)
    with pytest.raises(BadSignature, match="must all be there"):
        check.check({"webhook-signature": f"v1,{right}"}, BODY, NOW_S)


@given(
    kind=st.sampled_from(["github", "stripe", "standard"]),
    value=st.text(max_size=200),
    body=st.binary(max_size=50),
)
def test_requests_with_wrong_signatures_are_refused(kind: str, value: str, body: bytes) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check = check_of(kind, monkeypatch, "secret")
    names = (
        "x-hub-signature-256",
        "stripe-signature",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
    )
    with pytest.raises(BadSignature):
        check.check(dict.fromkeys(names, value), body)
