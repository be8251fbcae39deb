"""After kill -9 of a process that writes to a disk tier, every confirmed record is recovered."""

import random
import signal
import subprocess
import sys
import time

from holdfast.limits import KIB, MIB
from holdfast.testing.payloads import is_right, key_of, namespace_of, record_of
from holdfast.tiers.base import TierGet, TierPut
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

CYCLES = 12
PAYLOADS = [4 * KIB - 144, 60 * KIB, 200 * KIB]


def namespace_for(number):
    return namespace_of(PAYLOADS[number % len(PAYLOADS)])


def open_tier(folder):
    return DiskTier(DiskConfig(path=folder, capacity_bytes=16 * MIB, snapshot_s=0.02))


def write_forever(folder, number):
    """Write blocks in order; print the number of the last one after each confirmed write."""
    tier = open_tier(folder)
    for _ in tier.survivors():
        pass
    print("ready", flush=True)  # noqa: T201 - the parent reads it
    while True:
        numbers = range(number, number + 4)
        places = tier.reserve([namespace_for(n).slot_bytes for n in numbers]).places
        puts = [
            TierPut(place, record_of(namespace_for(n), key_of(n)))
            for n, place in zip(numbers, places, strict=True)
        ]
        assert tier.write(puts) == ["ok"] * 4
        print(number + 3, flush=True)  # noqa: T201 - as above
        number += 4


def kill_after(folder, number, lines):
    """Kill a child, which writes from `number` on; return the last block that it confirmed."""
    child = subprocess.Popen(
        [sys.executable, __file__, folder, str(number)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    for _ in range(lines):
        assert child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    # The kill may truncate the last line.
    whole = rest[: rest.rfind("\n") + 1].split()
    return int(whole[-1]) if whole else number + 4 * lines - 1


def test_kill_9_at_any_time_loses_no_confirmed_record(tmp_path):
    chosen = random.Random(1)
    folder, number, start = str(tmp_path), 0, time.monotonic()
    for _ in range(CYCLES):
        saved = kill_after(folder, number, chosen.randrange(1, 60))
        tier = open_tier(folder)
        numbers = {key_of(n): n for n in range(saved + 5)}
        found = set()
        for survivor in tier.survivors():
            at = numbers[survivor.header.key]
            (header, place), namespace = survivor, namespace_for(at)
            into = memoryview(bytearray(namespace.slot_bytes))
            assert tier.read([TierGet(place, header.key, into, namespace)]) == ["ok"]
            assert is_right(into, namespace, header.key)
            found.add(at)
        # The oldest regions are reclaimed; all confirmed records after them are there.
        assert set(range(min(found), saved + 1)) <= found
        assert saved > 60 or min(found) == 0
        number = saved + 5
        for gap in range(saved + 1, number):
            places = tier.reserve([namespace_for(gap).slot_bytes]).places
            assert tier.write([TierPut(places[0], record_of(namespace_for(gap), key_of(gap)))]) == [
                "ok"
            ]
        tier.close()
    assert number > 200, time.monotonic() - start


if __name__ == "__main__":
    write_forever(sys.argv[1], int(sys.argv[2]))
