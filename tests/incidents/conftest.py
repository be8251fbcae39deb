"""Stores on media that a test can reach, and contexts whose every byte is checked."""

import contextlib

import pytest

from holdfast.limits import MIB
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier
from holdfast_bench.campaigns.contexts import Contexts

SECRETS = {"default": b"d" * 32, "acme": b"a" * 32, "birch": b"b" * 32}
PAYLOAD_BYTES = 9_000


@pytest.fixture
def open_store():
    """Call with the tiers below the host to get a store; all are closed with the test."""
    with contextlib.ExitStack() as undo:

        def start(*lower, host_bytes=4 * MIB):
            store = undo.enter_context(Store(host_bytes, lower, SECRETS))
            store.start()
            return store

        yield start


@pytest.fixture
def contexts(open_store):
    """Contexts of a store with memory alone."""
    return Contexts(open_store(), PAYLOAD_BYTES)


@pytest.fixture
def below():
    """A tier and the records in it, by place."""
    records = {}
    return MemoryTier(64 * MIB, records), records
