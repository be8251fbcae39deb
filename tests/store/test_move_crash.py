"""A process that is killed between the read and the write of a move loses nothing of its source."""

import signal
import subprocess
import sys
from contextlib import closing

from holdfast import failpoints
from holdfast.blocks.envelope import SEAL_NONE
from holdfast.blocks.namespace import Namespace, domain_id
from holdfast.codec.pack import payload, verify
from holdfast.limits import MIB
from holdfast.policy.movement import Intake
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.testing.payloads import key_of, payload_of
from holdfast.tiers.base import TierGet
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

SECRET = b"s" * 32
PAYLOAD = 125_000
CAPACITY = 4 * MIB
NAMESPACE = Namespace(b"f" * 16, domain_id(SECRET), PAYLOAD, 16)
NEAR, FAR = 1, 2


def open_disk(folder, name):
    return DiskTier(DiskConfig(path=f"{folder}/{name}", capacity_bytes=CAPACITY))


def save_until_a_move_ends_the_process(folder):
    rules = {FAR: TierRules(intake=Intake(saves=False, evicted="always"))}
    tiers = [open_disk(folder, "near"), open_disk(folder, "far")]
    store = Store(16 * MIB, tiers, {"default": SECRET}, StoreOptions(rules=rules))
    store.start()
    failpoints.arm("move_read")
    for number in range(1_000):
        key = key_of(number)
        reserved = store.reserve(NAMESPACE, [key], b"f" * 16, 0)
        arena = store.arena(NAMESPACE.domain).view
        payload(arena[reserved.places[0] :], PAYLOAD)[:] = payload_of(key, PAYLOAD)
        store.commit(reserved.ticket)
        while store.table.unwritten():
            store.mover.wake()
        with store.table.lock:
            store.table.remove_copy(store.table.index.find(NAMESPACE, key), 0)
        print(number, flush=True)  # noqa: T201 - the parent reads it


def test_a_kill_between_the_read_and_the_write_of_a_move_loses_no_block(tmp_path):
    child = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert child.returncode == -signal.SIGKILL
    saved = [int(number) for number in child.stdout.split()]
    assert saved, "the move begins after the tier was nearly full"
    with closing(open_disk(tmp_path, "near")) as near, closing(open_disk(tmp_path, "far")) as far:
        assert not list(far.survivors())
        survivors = {each.header.key: each for each in near.survivors()}
        assert survivors.keys() >= {key_of(number) for number in saved}
        for survivor in survivors.values():
            assert survivor.header.seal == SEAL_NONE
            into = memoryview(bytearray(NAMESPACE.slot_bytes))
            key = survivor.header.key
            assert near.read([TierGet(survivor.place, key, into, NAMESPACE)]) == ["ok"]
            assert verify(into, key, NAMESPACE.fingerprint, PAYLOAD) == "ok"


if __name__ == "__main__":
    save_until_a_move_ends_the_process(sys.argv[1])
