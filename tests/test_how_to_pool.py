"""What the page about pools shows is what the configuration accepts."""

import re
from pathlib import Path

import pytest
import yaml

from holdfast.config import PoolOptions, check, parse
from holdfast.limits import BLOCK_TOKENS, GIB, SEGMENT_BLOCKS
from holdfast.membership.member_list import read_members
from holdfast.probe import MemoryInfo

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "pool.md"


def shown(kind):
    """The page's YAML blocks whose first line names this kind."""
    blocks = re.findall(rf"```yaml\n# {kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [yaml.safe_load(block) for block in blocks]


@pytest.fixture(autouse=True)
def _large_machine(monkeypatch):
    monkeypatch.setattr(check, "memory", lambda: MemoryInfo(1024 * GIB, "this test"))


def test_every_block_of_the_page_is_looked_at():
    assert len(re.findall(r"```yaml", PAGE.read_text())) == 4
    assert (len(shown("target")), len(shown("host")), len(shown("members"))) == (2, 1, 1)


def test_targets_can_be_configured_as_shown():
    plain, registering = map(parse, shown("target"))
    assert plain.target_addresses == ["tcp://10.0.0.1:7441"]
    assert plain.tokens.key_file
    assert registering.register.address == "tcp://flash-1:7441"


def test_a_host_can_be_configured_as_shown():
    [host] = map(parse, shown("host"))
    [pool] = [tier for tier in host.tiers if isinstance(tier, PoolOptions)]
    assert (pool.members, host.tokens.file) == ("/etc/holdfast/members.yaml", "/run/holdfast/token")


def test_members_can_be_listed_as_shown():
    [listed] = shown("members")
    assert [member.weight for member in read_members(listed, "page")] == [4.0, 4.0, 2.0]


def test_the_figures_of_the_page_follow_from_their_formulas():
    page = PAGE.read_text()
    segments = 4
    for targets, percent in re.findall(r"^\| (\d+) \| (\d+) %", page, re.MULTILINE):
        kept = 1 - 1 / int(targets)
        usable = sum(kept**each for each in range(1, segments + 1)) / segments
        assert round(100 * usable) == int(percent)
    token = 2 * 32 * 8 * 128 * 2
    assert token == 128 << 10
    assert f"{segments * SEGMENT_BLOCKS * BLOCK_TOKENS:,} tokens" in page
    assert SEGMENT_BLOCKS * BLOCK_TOKENS * token == 8 << 30
    for gbit, tokens in ((10, "9,500"), (25, "23,800"), (100, "95,000")):
        assert gbit * 1e9 / 8 / token == pytest.approx(int(tokens.replace(",", "")), rel=0.01)
        assert tokens in page
    assert f"a million tokens {token * 1e6 / (1 << 30):.0f} GiB" in page
