"""`holdfast stats`: a node's savings in three lines."""

import contextlib
import json
import re

import msgspec
import pytest

from holdfast.cli.stats import codec_line, summary
from holdfast.errors import RefusedError
from holdfast.status import (
    ActivityStatus,
    CodecStatus,
    CredentialState,
    DomainTraffic,
    FailedChecks,
    NodeStatus,
    TargetStatus,
)
from holdfast.wire.local import messages as m

STATUS = NodeStatus(
    uptime_s=7_300.0,
    failed_checks=[FailedChecks("disk", "corrupt", 2), FailedChecks("pool", "unreadable", 5)],
    activity=ActivityStatus(
        prompts=1_000,
        tokens=200_000,
        engine_tokens=10_000,
        loaded_tokens={"host": 120_000, "disk": 18_000, "pool": 4_000},
        computed_tokens=48_000,
        calls={"lookup": {"ok": 1_200, "miss": 4}, "fetch": {"ok": 900, "late": 3}},
        saved_s=2_280.0,
    ),
)


def test_the_summary_shows_token_sources_and_saved_time():
    first, shares, last = summary(STATUS)
    assert first == "since start, 2 hours ago: 1,204 lookups, 1,000 prompts of 200,000 tokens"
    assert shares == (
        "71 % of prompt tokens from Holdfast (host 60 %, disk 9 %, pool 2 %), 5 % from the "
        "engines' own caches, 24 % computed"
    )
    assert last == (
        "38.0 engine-minutes saved (estimated time of computing less the measured time); "
        "2 corrupt, 3 late"
    )


TARGET = TargetStatus(
    requests=5_310,
    refused=3,
    received_bytes=946_176,
    received_blocks=14,
    sent_bytes=2 << 20,
    sent_blocks=28,
    connections=2,
    domains=[
        DomainTraffic("acme", configured=True, received_bytes=946_176),
        DomainTraffic("ab" * 16, sent_bytes=2 << 20),
    ],
)
FOR_OTHER_NODES = [
    (
        "5,310 requests of other nodes (3 refused): received 14 blocks (924 KiB), sent 28 blocks "
        "(2 MiB); 2 connections, 7 blocks held"
    ),
    "  acme: received 924 KiB, sent 0 B",
    f"  {'ab' * 16}: received 0 B, sent 2 MiB",
]


def test_the_summary_of_a_target_shows_its_work_for_other_nodes():
    status = NodeStatus(uptime_s=90.0, role="node and target", blocks=7, target=TARGET)
    first, *rest = summary(status)
    assert first == f"since start, 1 minute ago: {FOR_OTHER_NODES[0]}"
    assert rest == FOR_OTHER_NODES[1:]
    both = summary(msgspec.structs.replace(STATUS, blocks=7, target=TARGET))
    assert both == [*summary(STATUS), *FOR_OTHER_NODES]
    full = NodeStatus(role="target", target=TargetStatus(connections=1_024, turned_away=1_300))
    assert "; 1,024 connections (1,300 turned away), " in summary(full)[0]
    idle = NodeStatus(role="target", target=TargetStatus())
    assert summary(idle)[0].startswith("since start, 0 seconds ago: 0 requests of other nodes: ")
    assert "0 prompts" in summary(NodeStatus(role="node", target=TargetStatus()))[0]


def test_credentials_that_expire_soon_or_cannot_be_used_have_a_line():
    status = NodeStatus(
        credentials=[
            CredentialState("tls.cert", "/etc/a.crt", period="expires on D, in 9 days", soon=True),
            CredentialState("tls.ca", "/etc/ca.pem", period="expires on D, in 90 days"),
            CredentialState("tokens.file", "/run/token", trouble="the token expired"),
        ]
    )
    assert summary(status)[-2:] == [
        "tls.cert /etc/a.crt: expires on D, in 9 days",
        "tokens.file /run/token: the token expired",
    ]


def test_stats_shows_the_prompt_counts_that_engines_report(holdfast, node, save):
    prompts = [(64, 16, {"host": 32, "a tier of a newer engine": 8})]
    with contextlib.closing(save(node, 2)) as client:
        client.call(m.Observed([], prompts=prompts), m.Done, 60)
    done = holdfast("stats", "--node", node)
    assert "1 prompt of 64 tokens" in done.stdout
    assert "62 % of prompt tokens from Holdfast (host 50 %, other 12 %), 25 % from" in done.stdout
    told = json.loads(holdfast("stats", "--node", node, "--json", "-").stdout)
    assert told["activity"]["computed_tokens"] == 8
    assert holdfast("inspect", "--node", node).stdout.startswith("since start, ")


def test_the_curve_shows_hits_at_other_capacities(holdfast, node, save):
    done = holdfast("stats", "--curve", "--node", node)
    assert done.stdout.startswith("no request since the start of the node")
    keys = [number.to_bytes(16, "little") for number in range(6_000)]
    with contextlib.closing(save(node, 1)) as client:  # 16 MiB hold fewer than 6,000 blocks
        for chain in (keys, keys[:100], keys[:50]):
            client.call(m.Cover(b"".join(chain), tokens=16 * len(chain)), m.Covered, 60)
        client.call(m.Cover(b"".join(keys[:50]), tokens=0), m.Covered, 60)  # no prompt
    done = holdfast("stats", "--curve", "--node", node)
    assert done.returncode == 0, done.stderr
    first, heads, host, unlimited, *notes = done.stdout.splitlines()
    assert re.match(r"hits of the last 3 requests, in \d+ \w+: 98,400 tokens, 6,000 dist", first)
    assert heads.split() == ["capacity", "half", "present", "twice", "ten", "times"]
    assert host.split() == ["host", "16", "MiB", *["2.4", "%"] * 4]
    assert unlimited.split() == ["unlimited", "2.4", "%"]
    assert notes == [
        "exact LRU, each tier as the only store; blocks that engines have in their own caches count"
    ]
    told = json.loads(holdfast("stats", "--curve", "--node", node, "--json", "-").stdout)
    assert (told["node"], told["requests"], told["unique_blocks"]) == (node, 3, 6_000)
    assert [*told["tiers"][0]["hits"]] == ["0.5", "1", "2", "10"]
    assert told["tiers"][0]["capacity_bytes"] == 16 << 20


def test_impossible_prompt_counts_are_refused(holdfast, node, save):
    for prompt in ((10, 11, {}), (10, 0, {"host": 11}), (-1, 0, {}), (10, -5, {"host": 5})):
        with (
            contextlib.closing(save(node, 1)) as client,
            pytest.raises(RefusedError, match=r"observed\.prompts"),
        ):
            client.call(m.Observed([], prompts=[prompt]), m.Done, 60)
    assert "0 prompts of 0 tokens" in holdfast("stats", "--node", node).stdout


def test_stats_without_a_node_exits_with_code_4(holdfast, tmp_path):
    done = holdfast("stats", "--node", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 4


CODEC = CodecStatus(
    tier="disk",
    mode="auto",
    encodes=True,
    encoded=900,
    decoded=1_200,
    kept_raw=3,
    held_raw_bytes=int(13.8 * (1 << 30)),
    held_bytes=10 << 30,
)


def test_a_codec_has_a_line_with_what_it_saves_and_did():
    assert codec_line(CODEC) == (
        "disk encodes (auto), 13.8 GiB of blocks in 10 GiB (1.38), 900 encoded, 3 kept raw, "
        "1,200 decoded"
    )
    quantised = msgspec.structs.replace(CODEC, quantised=120)
    assert "900 encoded (120 by int8), 3 kept raw" in codec_line(quantised)
    failed = msgspec.structs.replace(CODEC, encodes=False, mismatches=2, undecodable=1)
    assert codec_line(failed).startswith("disk keeps raw records (auto)")
    assert "2 decoded to other bytes and were stored raw, 1 could not be decoded" in codec_line(
        failed
    )
    assert not CodecStatus(tier="cxl").used
