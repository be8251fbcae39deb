"""Two engine hosts over one pool of real targets: what one saved, the other serves."""

import contextlib
import json
import re
import subprocess
import sys
import time

import pytest

from holdfast.errors import RefusedError
from holdfast.probe import free_port
from holdfast.wire.local import messages as m
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.harness.pause import pause, resume

TARGET_TIERS = [{"kind": "host", "capacity": "32 MiB"}]
PATIENT_S = 60.0


@pytest.fixture
def pool(tmp_path, start_node):
    """A pool of two targets, and engine hosts that use it."""
    return Pool(tmp_path, start_node)


class Pool:
    def __init__(self, folder, start_node):
        self.folder, self.start_node = folder, start_node
        self.members = folder / "members.yaml"
        self.key = folder / "domain.key"
        self.key.write_bytes(bytes(range(32)))
        self.key.chmod(0o600)
        self.targets = {}
        for name in ("t0", "t1"):
            self.start_target(name)
        self.announce()

    def start_target(self, name):
        address = f"tcp://127.0.0.1:{free_port()}"
        node = self.start_node(self.folder / name, listen=address, tiers=TARGET_TIERS)
        self.targets[name] = node

    def announce(self):
        members = [{"id": name, "address": node.address} for name, node in self.targets.items()]
        fresh = self.members.with_suffix(".new")
        fresh.write_text(json.dumps({"members": members}))
        fresh.rename(self.members)

    def start_host(self, name, deadline_s=PATIENT_S, ask_s=PATIENT_S, **more):
        """Start a host; as a rule it is so patient that a busy machine makes no target dead."""
        times = {"deadline_s": deadline_s, "ask_s": ask_s}
        return self.start_node(
            self.folder / name,
            tiers=[
                {"kind": "host", "capacity": "64 MiB"},
                {"kind": "pool", "members": str(self.members), **times},
            ],
            domains={"default": {"key_file": str(self.key)}},
            **more,
        )


def written(engine):
    engine.until(lambda status: status["waiting_to_write"] == 0)


def held_by(address):
    """How many blocks a target holds."""
    with contextlib.closing(TargetClient(address)) as target:
        return target.stats(60)[0].blocks


def hand_over(a, b, keys):
    """Save a chain on one host; another one reads all of it from the pool."""
    assert a.save(keys) == len(keys)
    written(a)
    assert until_covered(b, keys) == len(keys)
    assert b.read(keys) == (len(keys), {"pool": len(keys)})


def until_covered(engine, keys, within_s=120):
    """Ask until the pool's members are known and hold the chain."""
    end = time.monotonic() + within_s
    while (blocks := engine.cover(keys)) < len(keys) and time.monotonic() < end:
        time.sleep(0.05)
    return blocks


def test_a_context_saved_on_one_host_is_served_on_another(pool, engine, names):
    a, b = engine(pool.start_host("a").address), engine(pool.start_host("b").address)
    until_members(a, 2)

    def share(attempt):
        keys = names(f"shared {attempt}", 24)
        hand_over(a, b, keys)
        assert b.read(keys) == (24, {"host": 24})

    undisturbed(share, a, b)


def test_a_context_saved_in_steps_is_placed_on_one_target(pool, engine, names):
    a, b = engine(pool.start_host("a").address), engine(pool.start_host("b").address)
    until_members(a, 2)

    def save_in_steps(attempt):
        for number in range(8):  # zeros for a segment would send all but one to the wrong target
            keys = names(f"context {attempt} {number}", 6)
            for depth in range(6):
                parent = keys[depth - 1] if depth else a.fingerprint
                reserved = a.call(m.Reserve(keys[depth], parent, depth, keys[0][:8]))
                a.fill(keys[depth : depth + 1], reserved)
                assert a.call(m.Commit(reserved.ticket)).blocks == 1
            written(a)
            assert until_covered(b, keys) == 6
            assert b.read(keys) == (6, {"pool": 6})

    undisturbed(save_in_steps, a, b)


def test_a_chain_is_placed_in_segments_of_the_configured_length(pool, engine, names):
    a = engine(pool.start_host("a", segment_blocks=2).address)
    b = engine(pool.start_host("b", segment_blocks=2).address)
    assert a.client.welcome.segment_blocks == 2
    size = a.client.welcome.segment_blocks
    until_members(a, 2)

    def held():
        return [held_by(node.address) for node in pool.targets.values()]

    def save_and_read(attempt):
        keys, before = names(f"long {attempt}", 40), held()
        for first in range(0, 40, 5):  # in parts that segments do not end with
            parent = keys[first - 1] if first else a.fingerprint
            head = keys[first - first % size][:8]
            reserved = a.call(m.Reserve(b"".join(keys[first : first + 5]), parent, first, head))
            a.fill(keys[first : first + 5], reserved)
            assert a.call(m.Commit(reserved.ticket)).blocks == 5
        written(a)
        more = [after - known for after, known in zip(held(), before, strict=True)]
        assert sum(more) == 40
        assert min(more) > 0  # of one segment, all 40 would lie on one target
        assert until_covered(b, keys) == 40
        assert b.read(keys) == (40, {"pool": 40})

    undisturbed(save_and_read, a, b)


def test_a_dead_target_loses_only_the_blocks_it_held(pool, engine, names):
    a = engine(pool.start_host("a").address)
    b = engine(pool.start_host("b", deadline_s=1.0, ask_s=1.0).address)
    until_members(a, 2)

    def save(attempt):
        before = held_by(pool.targets["t1"].address)
        contexts = [names(f"context {attempt} {i}", 3) for i in range(16)]
        for keys in contexts:
            a.save(keys)
        written(a)
        assert all(until_covered(b, keys) == 3 for keys in contexts)
        return contexts, held_by(pool.targets["t1"].address) - before

    contexts, left = undisturbed(save, a, b)
    assert 0 < left < 48
    pool.targets["t0"].kill()
    end = time.monotonic() + 120
    while (landed := sum(b.read(keys)[0] for keys in contexts)) < left:
        assert time.monotonic() < end  # the other target may be late on a busy machine
    assert landed == left
    again = [a.read(keys)[0] for keys in contexts]
    assert again == [3] * 16, "the host that saved them still has them"


def members(engine):
    """What a host knows of its pool, by target."""
    [known] = engine.call(m.Members()).data["shared"]
    return {member["id"]: member for member in known["members"]}


def until_members(engine, count):
    end = time.monotonic() + 120
    while len(members(engine)) < count:
        assert time.monotonic() < end
        time.sleep(0.05)


def until_used(hosts):
    """Wait until hosts use every target; return how often each has stopped using one so far."""
    end, often = time.monotonic() + 120, []
    for host in hosts:
        while any(m["phase"] != "closed" or m["ejected"] for m in members(host).values()):
            assert time.monotonic() < end
            time.sleep(0.05)
        often.append(sum(m["breaker_opened"] + m["ejections"] for m in members(host).values()))
    return often


def undisturbed(scenario, *hosts):
    """Run a scenario while hosts use every target: until none stopped using one meanwhile.

    A target that gets no processor time for 1.5 s is left out, as it should be: another one gets
    its blocks, or they are computed. `scenario` gets the number of the attempt, to name its blocks.
    """
    for attempt in range(5):
        before = until_used(hosts)
        try:
            result = scenario(attempt)
        except AssertionError:
            if until_used(hosts) == before:
                raise
            continue
        if until_used(hosts) == before:
            return result
    return pytest.fail("each time a host stopped using a target")


def test_blocks_written_to_a_joining_target_are_found_by_other_hosts(pool, engine, names):
    """Whom it knows as warming up, another host sees as warm: what that writes is found."""
    a = engine(pool.start_host("a").address)
    until_members(a, 2)
    pool.start_target("t2")
    pool.announce()
    b = engine(pool.start_host("b").address)
    for host in (a, b):
        until_members(host, 3)
    assert members(a)["t2"]["share"] < members(b)["t2"]["share"] == pytest.approx(1 / 3)

    def save_and_read(attempt):
        contexts = [names(f"late {attempt} {i}", 2) for i in range(64)]
        for keys in contexts:
            b.save(keys)
        written(b)
        assert all(until_covered(a, keys) == 2 for keys in contexts)
        assert all(a.read(keys)[0] == 2 for keys in contexts)

    undisturbed(save_and_read, a, b)


def test_a_node_whose_pool_is_dead_serves_from_its_own_tiers(pool, engine, names):
    host = pool.start_host("a")
    for target in pool.targets.values():
        target.kill()
    a = engine(host.address)
    keys = names("alone", 5)
    assert a.save(keys) == 5
    assert a.read(keys) == (5, {"host": 5})
    assert a.cover(names("unknown", 5)) == 0


def test_a_domain_erased_by_one_host_is_erased_on_all_hosts_and_targets(pool, engine, names):
    ring = str(pool.folder / "keyring.json")
    hosts = [pool.start_host(name, keyring=ring) for name in ("a", "b")]
    a, b = (engine(host.address) for host in hosts)
    until_members(a, 2)

    def erase(attempt):
        keys = names(f"erased {attempt}", 12)
        hand_over(a, b, keys)
        assert a.call(m.Domains("erase", "default")).data["everywhere"]
        assert a.read(keys) == (0, {})
        b.until(lambda status: status["blocks"] == 0)
        assert b.read(keys) == (0, {})
        hand_over(a, b, keys)  # the targets forget what nobody can read, and take it anew

    undisturbed(erase, a, b)


def test_a_lookup_ends_at_its_deadline_with_local_hits_if_the_pool_is_silent(pool, engine, names):
    """Asked for longer than this test's client waits for anything: only the deadline ends it."""
    a = engine(pool.start_host("a", deadline_s=60.0, ask_s=60.0).address)
    until_members(a, 2)
    keys = names("half here", 8)
    a.save(keys[:3])
    written(a)
    for target in pool.targets.values():
        pause(target.process.pid)
    try:
        told = a.call(m.Cover(b"".join(keys), deadline_s=0.2))
        assert (told.blocks, told.worth) == (3, 3)
        assert a.read(keys[:3]) == (3, {"host": 3})
    finally:
        for target in pool.targets.values():
            resume(target.process.pid)


def test_a_deadline_out_of_bounds_is_refused(pool, engine, names):
    a = engine(pool.start_host("a").address)
    with pytest.raises(RefusedError, match=r"cover\.deadline_s: -1 is not from 0"):
        a.call(m.Cover(names("x", 1)[0], deadline_s=-1.0))


def test_a_host_with_another_key_ring_deletes_and_replaces_nothing_on_the_targets(
    pool, engine, names
):
    ours, other = (str(pool.folder / f"{name}.json") for name in ("ours", "other"))
    a, c = (engine(pool.start_host(name, keyring=ours).address) for name in ("a", "c"))
    wrong = pool.start_host("b", keyring=other)
    b = engine(wrong.address)
    until_members(a, 2)

    def counts():
        [domain] = [entry for entry in b.status()["domains"] if entry["domain"] == "default"]
        return domain["unreadable"], sum(held_by(node.address) for node in pool.targets.values())

    def save_on_both(attempt):
        keys, (unreadable, held) = names(f"shared {attempt}", 20), counts()
        assert a.save(keys) == 20
        written(a)
        assert until_covered(b, keys) == 20
        assert b.read(keys) == (0, {}), "it has no key for them"
        assert b.cover(keys) == 0, "it does not plan with them again"
        assert b.save(keys) == 20
        written(b)
        assert counts() == (unreadable + 20, held + 20)
        assert until_covered(c, keys) == 20
        assert c.read(keys) == (20, {"pool": 20})

    undisturbed(save_on_both, a, b, c)
    line, *_ = [line for line in wrong.said().splitlines() if "are misses here" in line]
    assert "is not on this host's key ring" in line
    assert "the same `keyring` file" in line


def pool_of(host):
    """What `inspect pool --json` says of each member, and its text."""
    command = [sys.executable, "-m", "holdfast", "inspect", "pool", "--node", host.address]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True)
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    members = json.loads(done.stdout)["shared"][0]["members"]
    return {member["id"]: member for member in members}, text


def until_condition(host, condition, name="t0"):
    end = time.monotonic() + 60
    while (members := pool_of(host)[0])[name]["condition"] != condition:
        assert time.monotonic() < end, members
    return members[name]


def test_a_killed_target_is_unreachable_in_inspect_and_its_return_is_logged(pool, engine):
    host = pool.start_host("a", ask_s=0.25)
    until_members(engine(host.address), 2)
    assert until_condition(host, "fine")["why"] == ""
    victim = pool.targets["t0"]
    victim.kill()
    member = until_condition(host, "unreachable")
    assert "refused" in member["why"].lower(), "the system's word for a closed port"
    assert "t0" in pool_of(host)[1]
    assert "unreachable: " in pool_of(host)[1]
    assert pool_of(host)[0]["t1"]["condition"] == "fine"
    until_logged(host, "pool member t0 at .* is gone: ")
    until_phase(host, "t0", {"open", "half open"})
    victim.start()
    until_logged(host, "pool member t0 at .* answers again")
    assert len(re.findall("pool member t0 at .* is gone", host.said())) == 1


def test_a_stopped_target_is_unreachable_until_it_resumes(pool, engine):
    host = pool.start_host("a", ask_s=0.25)
    until_members(engine(host.address), 2)
    pause(pool.targets["t0"].process.pid)
    try:
        assert until_condition(host, "unreachable")["why"] == "no answer within 2 s"
        until_phase(host, "t0", {"open", "half open"})
    finally:
        resume(pool.targets["t0"].process.pid)
    until_condition(host, "fine")


def until_logged(host, pattern):
    end = time.monotonic() + 60
    while not re.search(pattern, host.said()):
        assert time.monotonic() < end, host.said()
        time.sleep(0.1)


def until_phase(host, name, phases):
    end = time.monotonic() + 60
    while pool_of(host)[0][name]["phase"] not in phases:
        assert time.monotonic() < end


def test_inspect_and_doctor_show_why_a_target_refuses_a_token(tmp_path, start_node, engine):
    keys = [tmp_path / name for name in ("right.key", "wrong.key")]
    for number, key in enumerate(keys):
        key.write_bytes(bytes([number]) * 32)
        key.chmod(0o600)
    token = tmp_path / "token"
    make = ["token", "--key-file", str(keys[1]), "--out", str(token)]
    subprocess.run([sys.executable, "-m", "holdfast", *make], check=True)
    address = f"tcp://127.0.0.1:{free_port()}"
    tokens = {"key_file": str(keys[0])}
    start_node(tmp_path / "t0", listen=address, tiers=TARGET_TIERS, tokens=tokens)
    members = tmp_path / "members.yaml"
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    listed = [{"id": "t0", "address": address}, {"id": "t1", "address": nowhere}]
    members.write_text(json.dumps({"members": listed}))
    host = start_node(
        tmp_path / "host",
        tiers=[{"kind": "host", "capacity": "64 MiB"}, {"kind": "pool", "members": str(members)}],
        tokens={"file": str(token)},
        domains={"default": {"key_file": str(keys[0])}},
    )
    until_members(engine(host.address), 2)
    assert "not made with this target's key" in until_condition(host, "refused")["why"]
    assert pool_of(host)[0]["t1"]["condition"] == "unreachable"
    until_logged(host, "pool member t0 at .* is gone: refused: .*not made with this target's key")
    command = [sys.executable, "-m", "holdfast", "doctor"]
    config = ["--config", str(host.folder / "node.yaml"), "--json", "-"]
    done = subprocess.run([*command, *config], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    checks = {check["found"].split(" ")[0]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["t0"]["ok"] is False
    assert "refused: " in checks["t0"]["why"]
    assert "not made with this target's key" in checks["t0"]["why"]
    assert "unreachable: " in checks["t1"]["why"]
