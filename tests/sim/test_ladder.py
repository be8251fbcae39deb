"""A ladder file is refused with the path of the key, the value and a remedy."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from holdfast.cli.sim import add_arguments
from holdfast.errors import ConfigError
from holdfast.sim.formats.load import load
from holdfast.sim.hardware import UNBOUNDED, check_contexts, resolve
from holdfast.sim.ladder import parse_ladder, read_ladder
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS
from holdfast.sim.shipped import find_ladder, find_trace

ROOT = Path(__file__).resolve().parents[2]
HOST = {"kind": "host", "capacity": "1 GiB"}


def test_a_ladder_takes_its_figures_from_the_profile():
    ladder = parse_ladder(
        {
            "engine": {"gpu": "H100x8"},
            "tiers": [
                {"kind": "host", "medium": "ddr5", "units": 16},
                {"kind": "disk", "medium": "nvme-tlc", "units": 2, "latency_s": 0.001},
                {"kind": "object", "medium": "s3-express", "units": 100},
            ],
        }
    )
    found = resolve(ladder, shipped(), 64, load_model("Llama-3.1-70B"))
    host, disk, cloud = found.tier_specs
    assert host.read_bytes_per_s == 8 * 54e9  # the GPUs' own links are slower than 16 channels
    assert host.blocks == int(16 * 64e9) // found.namespace.slot_bytes
    assert (disk.read_bytes_per_s, disk.latency_s) == (28e9, 0.001)
    assert cloud.blocks == UNBOUNDED
    assert found.namespace.raw_bytes == 327_680 * 64
    # a 70B model at half of the peak of eight H100: 2 * 70.6e9 FLOP a token, and attention
    assert found.prefill.seconds(2_048) == pytest.approx(0.02 + 2_048 * 141e9 / 3.956e15, rel=0.02)


def test_a_ladder_file_overrides_the_profile():
    tier = {"kind": "disk", "medium": "nvme-tlc", "read_bytes_per_s": "1e9", "capacity_tokens": 640}
    found = resolve(
        parse_ladder({"engine": {"prefill": {"b": 1e-4}}, "tiers": [tier]}), shipped(), 64
    )
    assert found.tier_specs[0].read_bytes_per_s == 1e9
    assert found.tier_specs[0].blocks == 10


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "holds list, not key: value lines"),
        ({"tiers": []}, "tiers: is empty; name at least one of device, host"),
        ({"tiers": [{"kind": "tape"}]}, r"tiers.0.kind: 'tape': .*; use one of: device, host"),
        ({"tiers": [{**HOST, "colour": 1}]}, r"tiers.0: .*'colour'; remove it; known here: kind"),
        ({"tiers": [{**HOST, "capacity": "big"}]}, r"tiers.0.capacity: 'big': not a size"),
        (
            {"tiers": [{**HOST, "read_bytes_per_s": 0}]},
            "tiers.0.read_bytes_per_s: 0: .* > 0.0; give a number > 0.0, or remove it",
        ),
        (
            {"tiers": [{**HOST, "write_bytes_per_s": -1}]},
            "tiers.0.write_bytes_per_s: -1: Expected 'float' > 0.0;",
        ),
        (
            {"tiers": [{**HOST, "latency_s": -1}]},
            "tiers.0.latency_s: -1: .* >= 0.0; give a",
        ),
        ({"tiers": [{**HOST, "units": 0}]}, "tiers.0.units: 0: Expected 'int' >= 1;"),
        ({"tiers": [{**HOST, "capacity_tokens": 9}]}, "tiers.0.capacity: 1 GiB, and capacity_tok"),
        ({"tiers": [{**HOST, "worker_bytes_per_s": 9}]}, "worker_bytes_per_s: a host belongs to"),
        (
            {"tiers": [{**HOST, "kind": "disk"}, HOST]},
            "tiers.1.kind: 'host' is after 'disk'; put the fastest first",
        ),
        (
            {"tiers": [{**HOST, "kind": "pool"}, {**HOST, "kind": "pool"}]},
            "tiers.0.kind: a second 'pool'; a ladder has one",
        ),
        (
            {"tiers": [HOST], "engine": {"prefill": {"b": -1}}},
            "prefill.b: -1: .* >= 0.0; give a",
        ),
        (
            {"tiers": [HOST], "engine": {"decode_tokens_per_s": 0}},
            "engine.decode_tokens_per_s: 0: .* > 0",
        ),
        ({"tiers": [HOST], "engine": {"utilisation": 2}}, "engine.utilisation: 2: .* <= 1.0;"),
        ({"tiers": [HOST], "token_bytes": 0}, "token_bytes: 0: .* > 0.0;"),
        (
            {"tiers": [HOST], "token_bytes": float("inf")},
            "token_bytes: inf: .* <= 1000000000000.0;",
        ),
        (
            {"tiers": [{"kind": "host", "capacity_tokens": float("inf")}]},
            "_tokens: inf is not a num",
        ),
        (
            {"tiers": [{"kind": "host", "capacity_tokens": float("nan")}]},
            "_tokens: nan is not a num",
        ),
        ({"tiers": [{**HOST, "latency_s": 1e300}]}, r"latency_s: 1e\+300: .* <= 1000000\.0;"),
        (
            {"tiers": [HOST], "engine": {"prefill": {"c": 1e300}}},
            r"prefill.c: 1e\+300: .* <= 1000000",
        ),
        ({"tiers": [HOST], "engine": {"step_s": 1e300}}, r"engine.step_s: 1e\+300: .* <= 1000000"),
        (
            {"tiers": [{**HOST, "admit": "never"}]},
            "admit: 'never': .*; use one of: always, second_touch, reuse, reuse_interval$",
        ),
        ({"tiers": [{**HOST, "write": "now"}]}, "write: 'now': .*; use one of: behind, on_evict"),
        ({}, "tiers.*; add it"),
    ],
)
def test_a_wrong_ladder_is_refused(data, says):
    with pytest.raises(ConfigError, match=rf"^ladder: .*{says}|^ladder: {says}"):
        parse_ladder(data)


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        (
            {"kind": "host", "capacity": 10_000},
            "tiers.0.capacity: 9.766 KiB is less than one block of 64 tokens, 64 KiB; raise it",
        ),
        ({"kind": "host", "capacity_tokens": 63}, "tiers.0.capacity_tokens: 63 is less than one"),
        ({"kind": "host"}, "tiers.0.capacity: is missing; add it"),
        ({"kind": "host", "medium": "granite"}, "tiers.0.medium 'granite': not known; one of hbm"),
        (
            {"kind": "host", "medium": "nvme-tlc"},
            "tiers.0.medium: 'nvme-tlc' is for a disk tier, not for host; use one of: ddr5, cxl",
        ),
    ],
)
def test_an_impossible_tier_is_refused(tier, says):
    ladder = parse_ladder({"tiers": [tier], "token_bytes": 1_000, "engine": {"prefill": {}}})
    with pytest.raises(ConfigError, match=says):
        resolve(ladder, shipped(), 64)


def test_a_missing_token_size_prefill_cost_or_gpu_is_refused_with_a_remedy():
    bare = parse_ladder({"tiers": [HOST]})
    with pytest.raises(ConfigError, match="token_bytes: is missing; add it, or name a model"):
        resolve(bare, shipped(), 64)
    with pytest.raises(ConfigError, match=r"engine\.prefill: is missing; add its a, b and c, or"):
        resolve(bare, shipped(), 64, load_model("Qwen3-8B"))
    wrong = parse_ladder({"tiers": [HOST], "engine": {"gpu": "Z80"}})
    with pytest.raises(ConfigError, match=r"engine\.gpu: gpu 'Z80': not a known GPU"):
        resolve(wrong, shipped(), 64, load_model("Qwen3-8B"))


def test_a_missing_or_malformed_ladder_file_is_refused_by_name(tmp_path):
    file = tmp_path / "ladder.yaml"
    with pytest.raises(ConfigError, match=r"ladder\.yaml: cannot be read: No such"):
        read_ladder(str(file))
    file.write_text("tiers: [")
    with pytest.raises(ConfigError, match=r"ladder\.yaml: cannot be read as YAML"):
        read_ladder(str(file))
    file.write_text("tiers:\n  - {kind: host, capacity: 1 GiB}\n")
    assert read_ladder(str(file)).name == "ladder"


def test_a_model_that_does_not_fit_into_the_gpus_is_refused():
    seventy = load_model("Llama-3.1-70B")
    tight = parse_ladder({"tiers": [HOST], "engine": {"gpu": "H200"}})
    says = (
        r"^ladder: engine\.gpu: H200: 141\.0 GB, but the weights of .*70B take 141\.1 GB; use more"
    )
    with pytest.raises(ConfigError, match=says):
        resolve(tight, shipped(), 64, seventy)
    tight = parse_ladder({"tiers": [HOST], "engine": {"gpu": "H200x2"}})
    assert resolve(tight, shipped(), 64, seventy).gpus == 2


@pytest.mark.parametrize(
    ("capacity", "model", "says"),
    [
        ("300 GB", None, r"300\.0 GB: engine\.gpu has 282\.0 GB; lower the capacity, or use more"),
        ("150 GB", "Llama-3.1-70B", r"150\.0 GB: engine\.gpu has 282\.0 GB, 141\.1 GB of them for"),
    ],
)
def test_a_device_tier_that_does_not_fit_beside_the_model_is_refused(capacity, model, says):
    named, size = load_model(model) if model else None, None if model else 64 * 1024
    tiers = [{"kind": "device", "capacity": capacity}, HOST]
    rest = {"engine": {"gpu": "H200x2", "prefill": {"a": 0, "b": 1e-5, "c": 0}}}
    full = parse_ladder({"tiers": tiers, "token_bytes": size, **rest})
    with pytest.raises(ConfigError, match=rf"^ladder: tiers\.0\.capacity: {says}"):
        resolve(full, shipped(), 64, named)
    fits = parse_ladder(
        {"tiers": [{"kind": "device", "capacity": "140 GB"}, HOST], "token_bytes": size, **rest}
    )
    assert resolve(fits, shipped(), 64, named).tier_specs[0].nbytes <= 140e9


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "ladders").glob("*.yaml")))
def test_the_examples_are_ladders(file):
    model = "Llama-3.1-8B" if file.stem == "many-workers" else "Llama-3.1-70B"
    found = resolve(read_ladder(str(file)), shipped(), 512, load_model(model))
    assert all(tier_spec.blocks > 900 for tier_spec in found.tier_specs)


@pytest.mark.parametrize("page", ["docs/how-to/simulate.md", "docs/reference/sim.md"])
def test_the_commands_of_the_pages_can_be_typed(page):
    commands = re.findall(r"^holdfast sim (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert commands
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for command in commands:
        args = parser.parse_args(shlex.split(command))
        assert args.router in ROUTERS
        trace, model = load(find_trace(args.trace)), load_model(args.model)
        check_contexts(trace, model)
        resolve(read_ladder(str(find_ladder(args.ladder))), shipped(), trace.block_tokens, model)


def test_an_unknown_ladder_is_refused_with_the_shipped_ladder_names():
    with pytest.raises(
        ConfigError, match=r"^--ladder: tall: neither .* cxl, four-tiers, host-and-"
    ):
        find_ladder("tall")
