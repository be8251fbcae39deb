"""The forged campaign notices where a token is let in that should not be."""

import pytest

from holdfast.cli.soak import open_target
from holdfast.testing import forged
from holdfast.testing.campaign import Order
from holdfast.wire import token


@pytest.fixture
def order(tmp_path):
    return Order(tries=600, seed=1, folder=tmp_path, target=None)


def test_every_kind_of_forgery_is_tried(order):
    tally = forged._tokens(order)
    assert tally.failures == []
    assert set(tally.counts) == {
        "other claims", "another secret", "other nonces", "a stranger's",
        "kept too long", "of too long a life",
    }  # fmt: skip
    assert sum(tally.counts.values()) == tally.tried == 600


def test_tokens_that_never_expire_are_found_out(order, monkeypatch):
    def check(key, text, now):
        return token.Token(text, token._claims(text), token._secret(key, text))

    monkeypatch.setattr(token, "check", check)
    monkeypatch.setattr(forged, "RefusedError", (forged.RefusedError, ValueError))
    tally = forged._tokens(order)
    assert tally.failed == tally.counts["kept too long"] + tally.counts["of too long a life"] > 0


@pytest.mark.parametrize(
    ("limit", "kind"), [("CLOCK_SKEW_S", "kept too long"), ("TOKEN_S_MAX", "of too long a life")]
)
def test_a_limit_that_is_not_kept_is_found_out(order, monkeypatch, limit, kind):
    check = token.check

    def lax(key, text, now):
        with monkeypatch.context() as patch:
            patch.setattr(token, limit, 1e12)
            return check(key, text, now)

    monkeypatch.setattr(token, "check", lax)
    tally = forged._tokens(order)
    assert any(kind in words for words in tally.failures)


def test_only_names_that_were_asked_for_count(order):
    order = order._replace(tries=6_000, target=open_target)
    with forged._room(order) as room:
        tally = forged._across(room, order)
    fetches = tally.counts.pop("own contexts read")
    assert fetches > 2
    assert tally.tried == sum(tally.counts.values()) + fetches * (forged.ASKED_AT_ONCE + 2)
