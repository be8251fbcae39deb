"""An engine without a model, for the scenarios of the demos."""

import hashlib

import pytest

from holdfast.blocks.envelope import HEADER_BYTES
from holdfast.limits import BLOCK_TOKENS
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client
from holdfast_bench.harness.completion import CompletionAnswer, MeasuredCompletion, TokenSources
from holdfast_bench.harness.process import ChildProcess

FINGERPRINT = b"fingerprint-16-b"
PAYLOAD_BYTES = 20_000
opened = []


def payload_of(key):
    return hashlib.shake_128(key).digest(PAYLOAD_BYTES)


class FakeEngine:
    """Saves what it computes, fetches what its node covers, checks every byte; no model."""

    def __init__(self, name, options, log):
        address = options.kv_transfer["kv_connector_extra_config"]["holdfast"]
        hello = m.Hello(m.PROTOCOL, name, FINGERPRINT, PAYLOAD_BYTES, BLOCK_TOKENS, "default")
        self.client = Client(address, hello, 60)
        assert self.client.arena is not None
        self.arena = self.client.arena.view
        self.process = ChildProcess(name, ["sleep", "600"], log, {})
        opened.append(self.client)
        self.own = set()

    def reset_prefix_cache(self):
        self.own.clear()

    def ask(self, prompt):
        blocks = len(prompt) // BLOCK_TOKENS
        keys = [
            hashlib.blake2b(
                repr(prompt[: (i + 1) * BLOCK_TOKENS]).encode(), digest_size=16
            ).digest()
            for i in range(blocks)
        ]
        fetched = {}
        local = sum(key in self.own for key in keys) * BLOCK_TOKENS
        if not local and self.client.call(m.Cover(b"".join(keys)), m.Covered, 60).blocks:
            fetched = self.fetch(keys)
        landed = sum(fetched.values())
        self.save(keys[landed // BLOCK_TOKENS :], FINGERPRINT if not landed else keys[0])
        self.own.update(keys)
        computed = len(prompt) - local - landed
        text = hashlib.blake2b(repr(prompt).encode(), digest_size=8).digest()
        return MeasuredCompletion(
            CompletionAnswer(tuple(text), (), 0.1), TokenSources(computed, local, fetched)
        )

    def fetch(self, keys):
        fetched = self.client.call(m.Fetch(b"".join(keys), 60.0), m.Fetched, 60)
        for key, place in zip(keys, fetched.places, strict=False):
            start = place + HEADER_BYTES
            assert self.arena[start : start + PAYLOAD_BYTES] == payload_of(key)
        if fetched.lease:
            self.client.call(m.Release(fetched.lease), m.Released, 60)
        return {tier: BLOCK_TOKENS * blocks for tier, blocks in fetched.sources.items()}

    def save(self, keys, parent):
        if not keys:
            return
        reserved = self.client.call(m.Reserve(b"".join(keys), parent, 0), m.Reserved, 60)
        for key, place in zip(keys, reserved.places, strict=True):
            if place >= 0:
                start = place + HEADER_BYTES
                self.arena[start : start + PAYLOAD_BYTES] = payload_of(key)
        self.client.call(m.Commit(reserved.ticket), m.Committed, 60)


@pytest.fixture
def fake_engine():
    """The class of engines without a model; their connections end with the test."""
    yield FakeEngine
    while opened:
        opened.pop().close()
