"""A node's client and vLLM's objects, played in memory."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.errors import NodeGoneError
from holdfast.wire.messages import Welcome

DOMAIN_KEY = bytes(range(32))


def pytest_configure():
    """Import vLLM once, here: it warns while it does, and warnings are errors in tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import vllm.distributed.kv_transfer.kv_connector.v1.base  # noqa: F401
        except ImportError:
            return


class FakeArena:
    def __init__(self, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.view = memoryview(self.bytes)


class FakeClient:
    """Keeps what was sent; `answer` makes the reply, None for one that has not come yet."""

    def __init__(self, answer: Callable | None = None, arena_bytes: int = 0):
        self.welcome = Welcome(1, "fake", DOMAIN_KEY, arena_bytes)
        self.arena = FakeArena(arena_bytes) if arena_bytes else None
        self.answer = answer or (lambda _message: None)
        self.sent = []
        self.forgotten = []
        self.gone = False
        self._pending = {}

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def send(self, message):
        self._check()
        self.sent.append(message)
        self._pending[len(self.sent)] = message
        return len(self.sent)

    def poll(self, request_id):
        self._check()
        reply = self.answer(self._pending[request_id])
        if isinstance(reply, Exception):
            raise reply
        if reply is not None:
            del self._pending[request_id]
        return reply

    def call(self, message, timeout_s):
        reply = self.poll(self.send(message))
        if reply is None:
            self.gone = True
            raise NodeGoneError(f"no answer within {timeout_s} s")
        return reply

    def forget(self, request_id):
        self.forgotten.append(self._pending.pop(request_id, None))

    def _check(self):
        if self.gone:
            raise NodeGoneError("gone")


class FakeLink:
    def __init__(self, client):
        self.lent = client
        self.closed = False

    def client(self):
        return self.lent

    def close(self):
        self.closed = True


class FakeRequest(SimpleNamespace):
    def __init__(self, request_id="r", tokens=(), **other):
        fields = {
            "request_id": request_id,
            "all_token_ids": list(tokens),
            "prompt_token_ids": list(tokens),
            "prompt_embeds": None,
            "mm_features": [],
            "lora_request": None,
            "resumable": False,
            "cache_salt": None,
            "skip_reading_prefix_cache": False,
            "num_preemptions": 0,
            "num_computed_tokens": 0,
        }
        super().__init__(**(fields | other))

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


def step(pages_of, **scheduled):
    """Return what vLLM's scheduler hands over: tokens scheduled, and pages, by request."""
    state = SimpleNamespace(get_block_ids=lambda name: (pages_of[name],))
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        kv_connector_block_state=state,
    )


def outcome(ended=(), invalid=()):
    """Return what vLLM's workers report at the end of a step."""
    return SimpleNamespace(finished_recving=set(ended), invalid_block_ids=set(invalid))


@pytest.fixture(scope="session")
def fakes():
    return SimpleNamespace(
        Client=FakeClient,
        Link=FakeLink,
        Request=FakeRequest,
        step=step,
        outcome=outcome,
        domain_key=DOMAIN_KEY,
    )
