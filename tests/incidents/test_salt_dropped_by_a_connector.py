"""A tenant's salt reaches the engine's own cache and is dropped on the way to the store.

At least four integrations named what they stored by tokens alone, so that one tenant's context was
a hit for another: 1.2 s instead of 3.4 s told who had asked what.
Threads: https://github.com/LMCache/LMCache/issues/2878
https://github.com/LMCache/LMCache/issues/4825
https://github.com/sgl-project/sglang/issues/37160
https://github.com/vllm-project/vllm/pull/51640 https://github.com/vllm-project/vllm/issues/53495
"""

from types import SimpleNamespace

import pytest

from holdfast.blocks.key import Chain
from holdfast_bench.campaigns.contexts import FINGERPRINT, Contexts

TOKENS = list(range(4 * 128))


def chain(secret, *salts):
    named = Chain(secret, FINGERPRINT, 128, dict.fromkeys(range(4), salts))
    named.extend(TOKENS)
    return named.keys


def test_different_salts_give_different_keys_for_every_block(contexts):
    secret, _ = contexts.store.domain("default")
    contexts.save(chain(secret, b"salt:one"))
    assert contexts.read(chain(secret, b"salt:one")) == 4
    for salts in ([], [b"salt:two"], [b"salt:on", b"e"], [b"salt:one", b""]):
        assert set(chain(secret, *salts)).isdisjoint(chain(secret, b"salt:one"))
        assert contexts.read(chain(secret, *salts)) == 0


@pytest.mark.vllm
def test_the_connector_passes_the_cache_salt_on():
    identity = pytest.importorskip("holdfast.engines.vllm.request_identity")
    asked = SimpleNamespace(cache_salt="one", lora_request=None, mm_features=[])
    adapters = identity.AdapterDigests()
    media = identity.MediaDigests()
    plain, reset = (identity.identity_of(asked, epoch, adapters, media) for epoch in (b"", b"e"))
    assert identity.extras_of(plain, 16) == {0: [b"salt:one"]}
    assert identity.extras_of(reset, 16) == {0: [b"salt:one", b"epoch:e"]}
    assert identity.extras_of(reset, 16, salted=False) == {0: [b"epoch:e"]}


def test_domains_are_separated_without_a_salt(open_store):
    store = open_store()
    acme, birch = (Contexts(store, 9_000, name) for name in ("acme", "birch"))
    names = {each: chain(store.domain(each)[0]) for each in ("acme", "birch")}
    acme.save(names["acme"])
    assert acme.read(names["acme"]) == 4
    assert birch.read(names["birch"]) == 0
    assert birch.read(names["acme"]) == 0  # not even by the other's names
