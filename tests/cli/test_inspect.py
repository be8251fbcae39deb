"""`holdfast inspect`: list and drop what a running node stores."""

import json
import re

import pytest

from holdfast.cli.inspect import _pools_text, _status_lines, plans_text
from holdfast.shared_report import SegmentMediumReport, SharedTierReport
from holdfast.status import (
    AdmissionStatus,
    CodecStatus,
    DomainStatus,
    DurableStatus,
    EngineLockStatus,
    MemberStatus,
    NodeStatus,
    PageLockStatus,
    SharedTierStatus,
    TierStatus,
    read_plans,
)
from holdfast.tier_totals import tier_totals
from holdfast.wire.local import messages as m
from holdfast.wire.local.client import Client

FINGERPRINT = b"fingerprint-16-b".hex()


def inspected(holdfast, node, *arguments):
    done = holdfast("inspect", *arguments, "--node", node, "--json", "-")
    return done.returncode, json.loads(done.stdout)


def test_list_shows_namespaces_and_tiers(holdfast, node, save):
    save(node, 5).close()
    code, answer = inspected(holdfast, node)
    assert code == 0
    (namespace,) = answer["blocks"]
    assert namespace["fingerprint"] == FINGERPRINT
    assert (namespace["domain"], namespace["blocks"]) == ("default", 5)
    assert namespace["tiers"]["host"]["blocks"] == 5
    assert answer["status"]["blocks"] == 5
    text = holdfast("inspect", "--node", node).stdout
    assert f"{FINGERPRINT}  domain default: 5 blocks of 16 tokens, 4 KiB" in text
    assert re.search(r"domain  default: host \d+ KiB, .*share 1\n", text)


def test_inspect_reports_that_an_empty_node_stores_nothing(holdfast, node):
    assert "nothing is stored" in holdfast("inspect", "--node", node).stdout


def test_drop_forgets_one_fingerprint_or_everything(holdfast, node, save):
    save(node, 4).close()
    assert inspected(holdfast, node, "drop", "0" * 32)[1]["dropped"] == 0
    assert inspected(holdfast, node, "drop", FINGERPRINT, "--yes")[1]["dropped"] == 4
    save(node, 2).close()
    done = holdfast("inspect", "drop", "--all", "--node", node)
    assert done.returncode == 4
    assert (
        f"{FINGERPRINT}, domain default: 2 blocks would be dropped: 2 blocks on host" in done.stderr
    )
    assert "nothing was changed; there is no terminal to ask on: add --yes" in done.stderr
    assert inspected(holdfast, node)[1]["status"]["blocks"] == 2
    done = holdfast("inspect", "drop", "--all", "--yes", "--node", node)
    assert "dropped 2 blocks" in done.stdout
    assert inspected(holdfast, node)[1]["blocks"] == []


def test_ambiguous_arguments_are_wrong_usage(holdfast, node):
    for arguments, words in (
        (["drop"], "drop: name one fingerprint, or add --all"),
        (["drop", FINGERPRINT, "--all"], "drop: name one fingerprint, or add --all"),
        (["drop", "xyz"], "'xyz' is not 32 hex digits"),
        (["list", FINGERPRINT], "list: shows all fingerprints"),
        (["--all"], "list: drops no blocks; remove --all"),
        (["audit", "--all"], "audit: drops no blocks; remove --all"),
        (["plans", "/var/log/audit.jsonl"], "'/var/log/audit.jsonl' is not 32 hex digits"),
    ):
        done = holdfast("inspect", *arguments, "--node", node)
        assert done.returncode == 2
        assert words in done.stderr


def test_a_missing_node_gives_exit_code_4(holdfast, tmp_path):
    done = holdfast("inspect", "--node", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 4
    assert "No such file" in done.stderr


def test_json_that_can_not_be_written_is_named(holdfast, node):
    done = holdfast("inspect", "--node", node, "--json", "/none/file.json")
    assert done.returncode == 2
    assert "--json: cannot write '/none/file.json': No such file or directory" in done.stderr


def test_inspect_plans_shows_the_reason_and_the_result_of_each_plan(holdfast, node):
    hello = m.Hello(m.PROTOCOL, "test engine", bytes.fromhex(FINGERPRINT), 4096, 16)
    client, keys = Client(node, hello, 60), bytes(range(48))
    assert "nothing was planned yet" in holdfast("inspect", "plans", "--node", node).stdout
    reserved = client.call(m.Reserve(keys, hello.fingerprint, 0), m.Reserved, 60)
    client.call(m.Commit(reserved.ticket), m.Committed, 60)
    client.call(m.Observed([(new, 0, 0.001 * new) for new in (64, 128, 512, 1024)]), m.Done, 60)
    covered = client.call(m.Cover(keys, 100, 0, 1.0), m.Covered, 60)
    assert (covered.blocks, covered.worth) == (3, 3)
    assert 0 < covered.expected_s < covered.recompute_s == pytest.approx(0.1, rel=0.05)
    fetched = client.call(m.Fetch(keys, covered.deadline_s, covered.plan), m.Fetched, 60)
    client.call(m.Release(fetched.lease), m.Released, 60)
    client.call(m.Observed([], [(covered.plan, 0.01, 0.06)]), m.Done, 60)
    code, answer = inspected(holdfast, node, "plans")
    assert code == 0
    (plan,) = answer["plans"]
    assert plan["actual"]["first_token_s"] == 0.06
    assert plan["landed_blocks"] == 3
    text = holdfast("inspect", "plans", "--node", node).stdout
    assert "test, 100 tokens: fetch 3 of 3 blocks from host: " in text
    assert "first token after 60 ms (expected " in text
    assert "1 ms a token" in text
    client.close()


def test_times_are_rounded_before_their_unit_is_chosen():
    tier = {"tier": "pool", "bytes_per_s": 1e9, "latency_s": 0.0999, "queued_bytes": 0, "reads": 1}
    answer = {"tiers": [tier], "engines": [], "right": {"ended": 0}, "plans": []}
    assert "after 0.10 s (1 read)" in plans_text(read_plans(answer))


@pytest.mark.parametrize("verb", [["inspect"], ["verify"], ["domain"]])
def test_a_node_without_a_unix_socket_is_refused_with_its_address(holdfast, verb, tmp_path):
    config = tmp_path / "target.yaml"
    config.write_text("listen: tcp://127.0.0.1:7441\ntiers: [{kind: host, capacity: 16 MiB}]\n")
    done = holdfast(*verb, "--config", str(config))
    assert done.returncode == 2
    assert "listen: the node is at tcp://127.0.0.1:7441 for other nodes only; add" in done.stderr


def test_tier_totals_merge_the_host_tiers_of_all_domains():
    host = TierStatus("host", capacity_bytes=9, used_bytes=5, records=1)
    disk = TierStatus("disk", capacity_bytes=9, used_bytes=5, records=1, failures=2)
    both = TierStatus("host", capacity_bytes=9, used_bytes=10, records=2)
    assert tier_totals([host, host, disk]) == {"host": both, "disk": disk}


def test_a_tier_without_a_capacity_of_its_own_is_not_called_empty():
    tiers = [
        TierStatus("host", capacity_bytes=4096, records=1),
        TierStatus("pool", failures=1),
        TierStatus(
            *("disk", 4096),
            writes_stopped="9 s ago: No space",
            unlisted_records=2,
            unlisted_bytes=2048,
        ),
        TierStatus("object", used_bytes=4096, records=2, requests={"get": 1_200, "put": 3}),
        TierStatus("odd", trouble="usage() is of type str, not TierUsage"),
    ]
    shared = {"pool": SharedTierStatus(trouble="OSError: no answer")}
    lines = _status_lines(NodeStatus(tiers=tiers, shared=shared))
    assert "  pool     reports no members: OSError: no answer" in lines
    assert "  host     0 B of 4 KiB used, 1 record, 0 failures" in lines
    assert "  pool     shared: `holdfast inspect pool` shows its members; 1 failure" in lines
    assert "  object   4 KiB used, 2 records, 0 failures" in lines
    assert "  calls   object: 1,200 GET, 3 PUT; $0.0000 at list price" in lines
    assert "  disk     writes stopped 9 s ago: No space" in lines
    assert "  disk     cannot be opened or read, and kept: 2 records, 2 KiB" in lines
    assert "  odd      reports no usage: usage() is of type str, not TierUsage" in lines


def test_counts_of_an_admission_rule_are_shown_as_integers():
    rule = AdmissionStatus("disk", {"share": 0.123456, "over_budget": 1_234_567.0})
    lines = _status_lines(NodeStatus(admission=[rule]))
    assert "  admit   disk: share 0.1235, over_budget 1,234,567" in lines


def test_page_locked_memory_is_listed_by_domain_and_engine_with_the_reason_for_none():
    locks = PageLockStatus(
        [
            EngineLockStatus("vllm", "acme", 64 << 20),
            EngineLockStatus("other", "acme", failure="ENOMEM; raise the limit"),
        ],
        {"returned": 1_200, "missed": 1},
    )
    domains = [DomainStatus("acme", locked_bytes=64 << 20, kept_bytes=1 << 20)]
    lines = _status_lines(NodeStatus(domains=domains, page_locks=locks))
    assert "  domain  acme: , 64 MiB page-locked (1 MiB without blocks), share 1" in lines
    assert "  locks   vllm: 64 MiB of domain acme" in lines
    assert "  locks   other: 0 B of domain acme; no more: ENOMEM; raise the limit" in lines
    assert "  recalls 1,200 returned, 1 missed" in lines


def test_raw_and_stored_bytes_are_shown_by_tier_and_by_domain():
    gib = 1 << 30
    codec = CodecStatus(tier="disk", mode="auto", held_raw_bytes=3 * gib, held_bytes=2 * gib)
    domain = DomainStatus(
        domain="team", used_bytes={"host": gib, "disk": 2 * gib}, raw_bytes={"disk": 3 * gib}
    )
    lines = _status_lines(NodeStatus(codecs=[codec], domains=[domain]))
    assert any(
        "codec   disk" in line and "3 GiB of blocks in 2 GiB (1.50)" in line for line in lines
    )
    assert any("host 1 GiB, disk 2 GiB (raw 3 GiB)" in line for line in lines)


def test_durable_blocks_that_are_not_safe_yet_have_count_age_and_deadline():
    durable = DurableStatus("disk", 9, 4, 4 << 20, oldest_s=12.4, syncs=2, deadline_s=47.6, lost=1)
    [line] = [line for line in _status_lines(NodeStatus(durable=durable)) if "durable" in line]
    assert line == (
        "  durable 9 blocks to keep on disk; 4 (4 MiB) not there yet, the oldest for 12 s; "
        "2 syncs waiting, the first for 48 s more; 1 lost before they were written"
    )


def test_a_shared_tier_that_cannot_be_reached_says_why():
    shared = {
        "files": SharedTierStatus(False, [MemberStatus("/mnt/kv", trouble="ENODEV")]),
        "object": SharedTierStatus(True, [MemberStatus("s3://b")]),
    }
    lines = _status_lines(NodeStatus(shared=shared))
    assert "  files    out of reach: /mnt/kv: ENODEV" in lines
    assert not any("object" in line for line in lines)


def test_a_bucket_is_shown_with_its_segments_and_whether_it_can_be_read_and_written():
    medium = SegmentMediumReport("s3://b/p", writes="QuotaExceeded", segments=2, blocks=9)
    assert _pools_text([SharedTierReport("object", medium=medium)]).splitlines() == [
        "object: s3://b/p, 2 segments of 0 B with 9 blocks of all nodes",
        "  reads  work",
        "  writes fail: QuotaExceeded",
    ]
