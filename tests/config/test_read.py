"""A configuration is read from its file, the environment and flags; errors name what is wrong."""

from typing import Literal

import pytest

from holdfast.config import load, parse, read
from holdfast.errors import ConfigError
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.kind import TierKind, TierSection

TIERS = [{"kind": "host", "capacity": "64 MiB"}]


class Modes(TierSection, frozen=True):
    mode: Literal["a", "b"] = "a"
    admit: Literal["few", "all"] = "few"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "z"}, r"tiers\.1\.mode: 'z': .*; use one of: a, b$"),
        ({"admit": "always"}, r"tiers\.1\.admit: 'always': .*; use one of: few, all$"),
        ({"x": 1}, r"tiers\.1: .* 'x'; remove it; known here: kind, mode, admit$"),
    ],
)
def test_an_error_in_a_tier_of_another_package_names_its_own_words(monkeypatch, options, said):
    mine = TierKind(Modes, lambda *_: MemoryTier(1))
    monkeypatch.setattr(read, "find_kind", {"mine": mine}.get)
    with pytest.raises(ConfigError, match=f"^{said}"):
        parse({"listen": "/run/a.sock", "tiers": [*TIERS, {"kind": "mine", **options}]})


def test_a_flag_changes_one_of_two_sections_that_share_an_alias(tmp_path):
    file = tmp_path / "node.yaml"
    file.write_text(
        "listen: /run/a.sock\ntiers: [{kind: host, capacity: 64 MiB}]\n"
        "domains: {a: &own {key_file: k, share: 2, users: [root]}, b: *own}\n"
    )
    config = load(str(file), {"domains.a.share": "7", "domains.b.users.1": "0"}, {})
    assert (config.domains["a"].share, config.domains["b"].share) == (7, 2)
    assert (config.domains["a"].users, config.domains["b"].users) == (["root"], ["root", "0"])
