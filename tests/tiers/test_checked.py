"""Wrong answers of tiers of other packages are misses to a store, and stop it from asking them."""

import contextlib
import itertools
import threading

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.clock import ManualClock
from holdfast.codec.pack import payload
from holdfast.errors import ConfigError, Outcome
from holdfast.policy.retention import Retention
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.misbehaving import WRONG_ANSWERS, MisbehavingTier, Stuck
from holdfast.testing.payloads import is_payload_of, key_of, payload_of
from holdfast.testing.store_control import leave_all
from holdfast.testing.store_view import StoreView
from holdfast.tiers.base import HeldAnswer, takes_writes
from holdfast.tiers.breaker import BreakerOptions
from holdfast.tiers.checked import REMOTE_S, checked

MIB = 1 << 20
PAYLOAD, TOKENS = 16 << 10, 16
BLOCKS = 5
KEYS = [key_of(number) for number in range(BLOCKS)]


class EveryLocalMethod(MemoryTier):
    """A local tier with every method that a local tier may have."""

    def wipe(self, survivor):
        pass

    def accepts_writes(self):
        return True

    def record_frees(self):
        return True

    def give_up_copy(self):
        pass


class EverySharedMethod(SharedMemoryTier):
    """A shared tier with every method that a shared tier may have."""

    def ask(self, namespace, keys, start, within_s):
        return HeldAnswer(super().held(namespace, keys, start, within_s), Outcome.OK)

    def reachable(self):
        return True

    def may_write(self):
        return True

    def limits(self):
        return ""

    def known(self, batch):
        return [False] * len(batch)

    def indexed(self, namespace, keys):
        return bytes(len(keys))

    def misplaced(self, namespace, keys):
        return set()

    def lost(self):
        return None

    def member_health(self):
        return []


LOCAL = ["read", "write", "reserve", "free", "survivors", "usage", "close"]
LOCAL += ["wipe", "accepts_writes", "record_frees"]
SHARED = ["read", "write", "ask", "usage", "close", "delete", "delete_corrupt", "describe"]
SHARED += ["reachable", "may_write", "limits", "known", "misplaced", "lost", "member_health"]
SHARED += ["indexed"]
METHODS = [(EveryLocalMethod, name) for name in LOCAL] + [
    *((EverySharedMethod, name) for name in SHARED),
    (SharedMemoryTier, "held"),
]
BY_METHOD = pytest.mark.parametrize(
    ("kind", "method"), METHODS, ids=[f"{kind.__name__}.{name}" for kind, name in METHODS]
)


def until(condition):
    """Wait for a condition; False if it does not come."""
    return any(condition() or threading.Event().wait(0.001) for _ in range(5_000))


class Node:
    """A store over one tier, which a test uses in every way that calls the tier."""

    def __init__(self, tier):
        options = StoreOptions(clock=ManualClock())
        self.tier = tier
        self.store = Store(MIB, [tier], {"default": b"s" * 32}, options)
        _, domain = self.store.domain("default")
        self.namespace = Namespace(b"f" * 16, domain, PAYLOAD, TOKENS)
        self.store.start()

    def save(self):
        reserved = self.store.reserve(self.namespace, KEYS, self.namespace.fingerprint, 0)
        for key, place in zip(KEYS, reserved.places, strict=True):
            if place >= 0:
                record = self.store.record(self.namespace, place)
                payload(record, PAYLOAD)[:] = payload_of(key, PAYLOAD)
        self.store.commit(reserved.ticket, Retention.DURABLE)

    def leave_memory(self):
        leave_all(self.store)

    def fetch(self, deadline_s=3.0):
        """Fetch, check every byte; return how many blocks landed."""
        fetched = self.store.fetch(self.namespace, KEYS, deadline_s)
        for key, place in zip(KEYS, fetched.places, strict=False):
            record = self.store.record(self.namespace, place)
            assert is_payload_of(key, payload(record, PAYLOAD))
        assert self.store.release(fetched.lease)
        return len(fetched.places)

    def written(self):
        """Let the writer write; False while it is stuck."""
        return until(lambda: self.store.mover.wake() or not StoreView(self.store).writing())

    def again(self):
        """Save anew and fetch from the tier, after its pause; return how many blocks landed."""
        until(lambda: StoreView(self.store).is_idle)
        self.store.clock.advance(60.0)
        self.save()
        self.written()
        self.leave_memory()
        self.store.look(self.namespace, KEYS)
        return self.fetch(1e6)  # reads during which the clock was advanced seem slow

    def use(self):
        """Call what an engine, a hint, an operator and the housekeeping call."""
        store, namespace = self.store, self.namespace
        self.save()
        self.written()
        self.leave_memory()
        store.look(namespace, KEYS, 0.05)
        assert len(store.held(namespace, KEYS)) == len(KEYS)
        self.fetch()
        self.leave_memory()
        store.pin(namespace, KEYS, 1.0, 0.05)
        store.prestage(namespace, KEYS, 0.0, 0.05)
        store.housekeep()
        store._housekeep_once()
        store.status()
        store.shared()
        store.drop("*")


@BY_METHOD
def test_wrong_answers_fail_no_call_and_yield_no_wrong_byte(kind, method):
    for name, spoil in WRONG_ANSWERS.items():
        inner = kind(64 * MIB) if kind is EveryLocalMethod else kind({})
        node = Node(MisbehavingTier(inner, method, spoil))
        with contextlib.closing(node.store):
            node.use()
            node.tier.spoils = False
            node.use()
            assert until(lambda node=node: node.again() == BLOCKS), f"after {name}"


STUCK = [each for each in METHODS if each[1] not in ("close", "survivors", "wipe", "record_frees")]


@pytest.mark.parametrize(
    ("kind", "method"), STUCK, ids=[f"{kind.__name__}.{name}" for kind, name in STUCK]
)
def test_a_tier_method_that_does_not_return_delays_no_call_beyond_its_deadline(kind, method):
    stuck = Stuck()
    inner = kind(64 * MIB) if kind is EveryLocalMethod else kind({})
    tier = MisbehavingTier(inner, method, stuck)
    tier.spoils = False
    node = Node(tier)
    try:
        node.save()
        assert node.written()
        node.leave_memory()
        tier.spoils = True
        ended: list[str] = []

        def use():
            store, namespace = node.store, node.namespace
            for name, call in {
                "fetch": lambda: node.fetch(0.2),
                "pin": lambda: store.pin(namespace, KEYS, 1.0, 0.2),
                "prestage": lambda: store.prestage(namespace, KEYS, 0.0, 0.2),
                "look": lambda: store.look(namespace, [*KEYS, key_of(99)], 0.2),
                "save": node.save,
                "status": store.status,
                "drop": lambda: store.drop("*"),
            }.items():
                call()
                ended.append(name)

        using = threading.Thread(target=use)
        using.start()
        using.join(45)
        assert len(ended) == 7
    finally:
        stuck.let_go()
        node.store.close()


@pytest.mark.parametrize(
    ("kind", "method"),
    [(EveryLocalMethod, "read"), (EveryLocalMethod, "write"), (EverySharedMethod, "ask")],
)
def test_faults_of_a_tier_open_its_breaker_and_are_logged_once(kind, method, caplog):
    clock = ManualClock()
    inner = kind(64 * MIB) if kind is EveryLocalMethod else kind({})
    tier = checked(MisbehavingTier(inner, method, lambda _: "ok"), clock)
    namespace = Namespace(b"f" * 16, b"d" * 16, PAYLOAD, TOKENS)
    arguments = (namespace, KEYS, 0, 1.0) if method == "ask" else ([object()] * 3,)
    tier._tier._right = lambda *_: None
    gone = HeldAnswer(0, Outcome.GONE) if method == "ask" else [Outcome.GONE] * 3
    late = HeldAnswer(0, Outcome.GONE) if method == "ask" else [Outcome.LATE] * 3
    tier._free_unwritten = lambda _: None
    assert takes_writes(tier)
    for _ in range(BreakerOptions().failures):
        assert getattr(tier, method)(*arguments) == gone
    assert not takes_writes(tier)
    assert getattr(tier, method)(*arguments) == late
    assert tier._tier.calls == BreakerOptions().failures
    clock.advance(1.0)
    stopped = tier.usage().writes_stopped
    assert stopped.startswith(f"1 s ago: {'held' if method == 'ask' else method}() returned str")
    lines = [line for line in caplog.messages if "update the package" in line]
    assert len(lines) == 1
    tier.close()


class PatientTier(EverySharedMethod):
    """A tier that deletes by age, and asks its medium for as long as the caller permits."""

    def aged(self, namespace, keys):
        return bytes(len(keys))

    def refresh(self, namespace, keys, within_s):
        threading.Event().wait(min(within_s, REMOTE_S + 1.0))
        return False


def test_a_tier_that_uses_its_time_to_refresh_is_not_blamed():
    namespace = Namespace(b"f" * 16, b"d" * 16, PAYLOAD, TOKENS)
    tier = checked(PatientTier({}), ManualClock())
    assert not tier.refresh(namespace, KEYS, 60.0)
    assert not tier.usage().writes_stopped
    assert not tier.usage().failures
    tier.close()


def test_a_tier_of_this_package_is_not_wrapped_and_an_incomplete_one_is_refused(tmp_path):
    from holdfast.testing.extents import MemoryExtents, tier_on

    disk = tier_on(MemoryExtents.formatted(1 << 20, 2))
    assert checked(disk, ManualClock()) is disk
    disk.close()

    class Half:
        name = "half"

        def read(self, batch):
            return []

    with pytest.raises(ConfigError, match="Half: it lacks close, free, reserve, survivors, usage"):
        checked(Half(), ManualClock())


def test_dropped_blocks_and_places_are_checked_one_by_one():
    wrong = [
        ([4096.0], []),
        ([True], []),
        ([-2], []),
        ([1 << 63], []),
        ([0, 0], []),
        ([0], None),
        ([0], [("key", 0, None)]),
        ([0], [0]),
    ]
    for answer, size in itertools.product(wrong, ([4096], [4096, 4096])):
        inner = MisbehavingTier(MemoryTier(MIB), "reserve", lambda _, answer=answer: answer)
        tier = checked(inner, ManualClock())
        assert set(tier.reserve(size).places) == {-1}
        tier.close()
