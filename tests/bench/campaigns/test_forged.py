"""The forged campaign notices where a token is let in that should not be."""

import pytest

from holdfast.wire.remote import token
from holdfast_bench.campaigns import forged
from holdfast_bench.campaigns.campaign import CampaignBudget


@pytest.fixture
def budget(tmp_path):
    return CampaignBudget(tries=600, seed=1, folder=tmp_path)


def test_every_kind_of_forgery_is_tried(budget):
    result = forged._tokens(budget)
    assert result.failures == []
    assert set(result.counts) == {
        "other claims", "another secret", "other nonces", "a stranger's",
        "kept too long", "of too long a life",
    }  # fmt: skip
    assert sum(result.counts.values()) == result.tried == 600


def test_the_campaign_detects_tokens_that_never_expire(budget, monkeypatch):
    def check(key, text, now):
        return token.Token(text, token._claims(text), token._secret(key, text))

    monkeypatch.setattr(token, "check", check)
    monkeypatch.setattr(forged, "RefusedError", (forged.RefusedError, ValueError))
    result = forged._tokens(budget)
    assert result.failed == result.counts["kept too long"] + result.counts["of too long a life"] > 0


@pytest.mark.parametrize(
    ("limit", "kind"), [("CLOCK_SKEW_S", "kept too long"), ("TOKEN_S_MAX", "of too long a life")]
)
def test_the_campaign_detects_a_token_limit_that_is_not_enforced(budget, monkeypatch, limit, kind):
    check = token.check

    def lax(key, text, now):
        with monkeypatch.context() as patch:
            patch.setattr(token, limit, 1e12)
            return check(key, text, now)

    monkeypatch.setattr(token, "check", lax)
    result = forged._tokens(budget)
    assert any(kind in words for words in result.failures)


def test_only_requested_keys_are_counted_as_tried(budget):
    budget = budget._replace(tries=6_000)
    with forged._attacked() as attacked:
        result = forged._across(attacked, budget)
    fetches = result.counts.pop("own contexts read")
    assert fetches > 2
    assert result.tried == sum(result.counts.values()) + fetches * (forged.ASKED_AT_ONCE + 2)
