"""kill -9 of a process that writes to a disk tier: what it was told is saved comes back whole."""

import random
import signal
import subprocess
import sys
import time

from holdfast.limits import KIB, MIB
from holdfast.testing.payloads import is_right, key_of, record_of, world_of
from holdfast.tiers.base import Get, Put
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier

CYCLES = 12
PAYLOADS = [4 * KIB - 144, 60 * KIB, 200 * KIB]


def world_for(number):
    return world_of(PAYLOADS[number % len(PAYLOADS)])


def open_tier(folder):
    return DiskTier(DiskConfig(path=folder, capacity_bytes=16 * MIB, snapshot_s=0.02))


def write_for_ever(folder, number):
    """Write blocks in order; say each number once its write is OK."""
    tier = open_tier(folder)
    for _ in tier.survivors():
        pass
    print("ready", flush=True)  # noqa: T201 - the parent reads it
    while True:
        numbers = range(number, number + 4)
        places = tier.reserve([world_for(n).record_bytes for n in numbers]).places
        puts = [
            Put(place, record_of(world_for(n), key_of(n)))
            for n, place in zip(numbers, places, strict=True)
        ]
        assert tier.write(puts) == ["ok"] * 4
        print(number + 3, flush=True)  # noqa: T201 - as above
        number += 4


def kill_after(folder, number, lines):
    """Let a child write from `number` on, kill it after some lines; the last block it had saved."""
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
    # The last line may be cut short by the kill.
    whole = rest[: rest.rfind("\n") + 1].split()
    return int(whole[-1]) if whole else number + 4 * lines - 1


def test_kill_9_at_any_moment_loses_nothing_that_was_saved(tmp_path):
    chosen = random.Random(1)
    folder, number, start = str(tmp_path), 0, time.monotonic()
    for _ in range(CYCLES):
        saved = kill_after(folder, number, chosen.randrange(1, 60))
        tier = open_tier(folder)
        numbers = {key_of(n): n for n in range(saved + 5)}
        found = set()
        for survivor in tier.survivors():
            at = numbers[survivor.header.key]
            into = memoryview(bytearray(world_for(at).record_bytes))
            assert tier.read([Get(survivor.place, survivor.header.key, into)]) == ["ok"]
            assert is_right(into, world_for(at), survivor.header.key)
            found.add(at)
        # The oldest go, a region at a time; from the oldest that is left, all that was saved is.
        assert set(range(min(found), saved + 1)) <= found
        assert saved > 60 or min(found) == 0
        number = saved + 5
        for gap in range(saved + 1, number):
            places = tier.reserve([world_for(gap).record_bytes]).places
            assert tier.write([Put(places[0], record_of(world_for(gap), key_of(gap)))]) == ["ok"]
        tier.close()
    assert number > 200, time.monotonic() - start


if __name__ == "__main__":
    write_for_ever(sys.argv[1], int(sys.argv[2]))
