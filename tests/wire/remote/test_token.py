"""Tokens: the bearer of the line gets in for ten minutes at most, nobody else gets in at all."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError, RefusedError
from holdfast.limits import TOKEN_S_MAX
from holdfast.wire.remote import token

KEY = b"k" * 32
NOW = 1_800_000_000.0
NONCES = b"t" * 32 + b"p" * 32


def issued(lifetime_s=600, may=("read",), key=KEY, now=NOW):
    return token.read(token.issue(key, "host-a", may, lifetime_s, now))


def test_bearer_and_target_of_a_token_authenticate_each_other():
    held = issued(may=("read", "write"))
    known = token.check(KEY, held.text, NOW + 599)
    assert known.claims == token.TokenClaims("host-a", ("read", "write"), int(NOW) + 600)
    assert token.proves(known, "peer", NONCES, token.prove(held, "peer", NONCES))
    assert token.proves(held, "target", NONCES, token.prove(known, "target", NONCES))


def test_a_proof_is_valid_for_one_side_and_one_connection():
    held = issued()
    known = token.check(KEY, held.text, NOW)
    proof = token.prove(held, "peer", NONCES)
    assert not token.proves(known, "target", NONCES, proof)
    assert not token.proves(known, "peer", NONCES[::-1], proof)


@given(st.binary(min_size=1, max_size=64).filter(lambda key: key != KEY))
def test_a_proof_made_with_another_key_is_invalid(key):
    forged = issued(key=key)
    known = token.check(KEY, forged.text, NOW)
    assert not token.proves(known, "peer", NONCES, token.prove(forged, "peer", NONCES))


def test_changed_claims_invalidate_the_proof():
    held = issued()
    claims = json.loads(base64.urlsafe_b64decode(held.text + "=="))
    claims["may"] = ["read", "write", "delete"]
    changed = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    known = token.check(KEY, changed, NOW)
    assert not token.proves(known, "peer", NONCES, token.prove(held, "peer", NONCES))


def test_an_expired_token_is_refused():
    with pytest.raises(
        RefusedError, match=r"expired 61 s ago .* differ by 60 s; .*`holdfast token`"
    ):
        token.check(KEY, issued(60).text, NOW + 121)


@pytest.mark.parametrize("behind_s", [0, 40, 60])
@pytest.mark.parametrize("age_s", [0, 599])
def test_a_token_of_the_default_lifetime_works_on_a_target_whose_clock_is_behind(behind_s, age_s):
    assert token.check(KEY, issued(TOKEN_S_MAX).text, NOW + age_s - behind_s)


@pytest.mark.parametrize("ahead_s", [0, 40, 60])
@pytest.mark.parametrize("age_s", [0, 599])
def test_a_token_of_the_default_lifetime_works_on_a_target_whose_clock_is_ahead(ahead_s, age_s):
    assert token.check(KEY, issued(TOKEN_S_MAX).text, NOW + age_s + ahead_s)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (
            NOW - 61,
            "valid for 661 s more .* limit is 600 s, and clocks may differ by 60 s; .*clocks",
        ),
        (NOW + 661, "expired 61 s ago .* clocks may differ by 60 s; .*compare the clocks"),
    ],
)
def test_a_refusal_for_clocks_too_far_apart_names_the_skew_and_the_remedy(now, words):
    with pytest.raises(RefusedError, match=words):
        token.check(KEY, issued(TOKEN_S_MAX).text, now)


def test_a_token_valid_for_more_than_ten_minutes_is_refused():
    text = issued(600, now=NOW + 1000).text
    with pytest.raises(RefusedError, match=r"valid for 1600 s more .* limit is 600 s, .*clocks"):
        token.check(KEY, text, NOW)


@pytest.mark.parametrize("lifetime_s", [0, -1, 601, float("nan")])
def test_a_token_with_an_invalid_lifetime_is_not_issued(lifetime_s):
    with pytest.raises(ConfigError, match="lifetime of"):
        token.issue(KEY, "host-a", ("read",), lifetime_s, NOW)


@pytest.mark.parametrize("peer", ["", "a\nb", "x" * 257])
def test_a_peer_name_has_a_length_limit(peer):
    with pytest.raises(ConfigError, match=f"name of {len(peer)} characters is not 1 to 256"):
        token.issue(KEY, peer, ("read",), 600, NOW)


@given(st.text(max_size=80))
def test_garbage_is_no_token(line):
    with pytest.raises(ConfigError, match="is no token; make one"):
        token.read(line)


@pytest.mark.parametrize(
    "fields",
    [{}, {"peer": "a", "may": ["sing"], "expires": 1}, {"peer": "a", "may": [], "expires": "x"}],
)
def test_claims_of_another_shape_are_refused(fields):
    text = base64.urlsafe_b64encode(json.dumps(fields).encode()).rstrip(b"=").decode()
    with pytest.raises(RefusedError, match="cannot be read"):
        token.check(KEY, text, NOW)


@given(st.text(max_size=60))
def test_arbitrary_text_as_claims_raises_only_a_refusal(text):
    with pytest.raises(RefusedError):
        token.check(KEY, text, NOW)


def test_a_token_line_may_end_in_a_newline_and_has_a_length_limit():
    line = token.issue(KEY, "host-a", ("read",), 600, NOW)
    assert token.read(line + "\n") == token.read(line)
    with pytest.raises(ConfigError):
        token.read(line + "A" * 5000)


@pytest.mark.parametrize("expires", [10**400, -(10**400), 2**63, -1])
def test_claims_with_an_invalid_expiry_are_refused(expires):
    fields = {"peer": "a", "may": ["read"], "expires": expires}
    text = base64.urlsafe_b64encode(json.dumps(fields).encode()).rstrip(b"=").decode()
    with pytest.raises(RefusedError, match="cannot be read"):
        token.check(KEY, text, NOW)
