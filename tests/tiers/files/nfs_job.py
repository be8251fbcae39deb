"""A program in the guest of `test_nfs.py`: two clients of an NFS server use one folder.

    nfs_job.py MOUNT_A MOUNT_B

It prints one result in JSON a line: its name, and what was found.
"""

import json
import os
import subprocess
import sys
import time

from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.tiers.files.medium import FilesMedium
from holdfast.wire.remote.stream import Deadline

OBJECTS = 20
EXPORT = "/run/export"
BYTES = os.urandom(MIB)
writer, reader = (FilesMedium(f"{mount}/shared") for mount in sys.argv[1:3])


def within(seconds=30.0):
    return Deadline.within(seconds)


def put(medium, name, within_s=30.0):
    return medium.put(name, [memoryview(BYTES)], within(within_s)).outcome


def read(medium, name, within_s=30.0):
    """Return the outcome of a read; "wrong" if it is OK with other bytes than were written."""
    into = memoryview(bytearray(len(BYTES)))
    answer = medium.read(name, 0, [into], within(within_s))
    if answer.outcome is Outcome.OK and bytes(into) != BYTES[: answer.nbytes]:
        return "wrong"
    return answer.outcome


def tell(name, found):
    sys.stdout.write(json.dumps([name, found]) + "\n")
    sys.stdout.flush()


def until(outcome, call, within_s=90.0):
    """Call until the outcome; return whether it came in time."""
    end_s = time.monotonic() + within_s
    while call() != outcome:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.2)
    return True


def shell(command):
    subprocess.run(command, shell=True, check=True)


tell("both can use it", until("ok", lambda: writer.probe(within()).outcome))
tell("refusal", reader.probe(within()).refusal)
found = set()
for number in range(OBJECTS):
    found.add(put(writer, f"a/{number}"))
    found.add(read(reader, f"a/{number}"))
tell("published and read elsewhere at once", sorted(found))
names = reader.list("index", within()).names
put(writer, "index/ab/1")
found_at_once = list(reader.list("index", within()).names)
tell("listed elsewhere, though it was looked for before", [list(names), found_at_once])

begun_s = time.monotonic()
shell("ip link set v1 down")
calls = (
    lambda: read(writer, "a/0", 1.0),
    lambda: put(writer, "a/hung", 1.0),
    lambda: writer.list("", within(1.0)).outcome,
)
tell("while the server hangs", sorted({call() for call in calls}))
tell("returned in time", time.monotonic() - begun_s < 20)
shell("ip link set v1 up")
tell("used again when it is back", until("ok", lambda: read(writer, "a/0", 2.0)))
tell("written again when it is back", until("ok", lambda: put(writer, "a/back", 5.0)))

outcomes = []
while not outcomes or (outcomes[-1] == "ok" and len(outcomes) < 1000):
    outcomes.append(put(writer, f"b/{len(outcomes)}"))
tell("when it is full", outcomes[-1])
tell("read when it is full", read(reader, "a/0"))
writer.delete([f"b/{number}" for number in range(len(outcomes))], within(60.0))
tell("written after deletions", until("ok", lambda: put(writer, "a/after")))

# `exportfs` fails after its work, because the guest has no /etc/exports.
shell(f"exportfs -u '*:{EXPORT}'; exportfs -f; umount -l {EXPORT}; mount -t tmpfs t {EXPORT}")
shell(f"exportfs -o rw,no_root_squash,async,fsid=0,no_subtree_check '*:{EXPORT}' || true")
shell("echo 3 > /proc/sys/vm/drop_caches")
found = {read(medium, f"a/{n}", 5.0) for n in range(3) for medium in (writer, reader)}
found |= {put(writer, "a/new", 5.0)}
tell("after the export was replaced", sorted(found))
writer.close()
reader.close()
