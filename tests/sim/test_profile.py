"""The hardware profile: what is shipped is whole, and what a user lays over it is checked."""

import re
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.sim.profile import (
    CodecFigures,
    Gpu,
    Medium,
    ProfileRange,
    Site,
    load_profile,
    shipped,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def laid_over(tmp_path):
    """Write a user's file and load it over the shipped one."""

    def load(text):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        return load_profile(str(file))

    return load


def figures(section):
    values = (getattr(section, name) for name in section.__struct_fields__)
    return [value for value in values if isinstance(value, ProfileRange)]


def test_the_shipped_profile_has_every_tier_and_a_source_for_each_figure():
    profile = shipped()
    assert {m.tier for m in profile.media.values()} == {
        *("device", "host", "disk", "pool", "files", "object")
    }
    assert profile.date.year == 2026
    for section in (profile.site, *profile.media.values(), *profile.gpus.values()):
        assert figures(section)
        for figure in figures(section):
            assert 0 <= figure.low <= figure.mid <= figure.high
            assert len(figure.source) > 3


def test_some_command_reads_each_figure():
    code = "".join(file.read_text() for file in (ROOT / "src" / "holdfast").rglob("*.py"))
    read = set(re.findall(r"\.(\w+)\b", code))
    for section in (Site, CodecFigures, Medium, Gpu):
        assert not set(section.__struct_fields__) - read, section.__name__


def test_the_shipped_profile_is_loaded_if_no_file_is_given():
    assert load_profile() is shipped()


def test_a_gpu_name_may_end_with_a_count():
    gpu, number = shipped().gpu("h200x8")
    assert (gpu.about, number) == ("H200 SXM, 141 GB", 8)
    assert shipped().gpu("B200")[1] == 1
    for text in ("H200x", "H900x8", "", "x8"):
        with pytest.raises(ConfigError, match=r"gpu.*known: A100"):
            shipped().gpu(text)
    with pytest.raises(ConfigError, match=r"tape.*one of.*ddr5"):
        shipped().medium("tape")


GPUS = {"B300": 270, "GB300": 279, "MI300X": 192, "MI325X": 256, "MI350X": 288, "MI355X": 288}


@pytest.mark.parametrize("name", GPUS)
def test_recent_gpus_are_in_the_profile_and_on_its_page(name):
    gpu, number = shipped().gpu(f"{name.lower()}x8")
    assert (gpu.memory_bytes.mid / 1e9, number) == (GPUS[name], 8)
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "profile.md").read_text()


@pytest.mark.parametrize("number", ["0", "00", "100000", "9" * 400, "9" * 9_000])
def test_a_number_of_gpus_that_no_engine_has_is_refused(number):
    assert shipped().gpu("H200x99999")[1] == 99_999
    assert shipped().gpu("H200x008")[1] == 8
    with pytest.raises(ConfigError, match=r"^gpu 'H200x\d+.*': an engine has 1 to 99,999"):
        shipped().gpu(f"H200x{number}")


@pytest.mark.parametrize("name", ["H200x8", "My card 3", "RTX-5.1"])
def test_a_user_defined_gpu_is_found_by_its_whole_name(laid_over, name):
    figures = "flop_per_s memory_bytes host_bytes_per_s network_bytes_per_s"
    lines = ", ".join(f"{figure}: 1e12" for figure in figures.split())
    profile = laid_over(
        f'gpus: {{"{name}": {{about: mine, {lines}, dollars_per_hour: 9, watts: 9}}}}'
    )
    gpu, number = profile.gpu(name.lower())
    assert (gpu.about, number) == ("mine", 1)
    assert profile.gpu("H200x4")[1] == 4


def test_a_plain_number_is_a_range_without_width(laid_over):
    profile = laid_over("media: {ddr5: {dollars_per_gb: 7}}")
    price = profile.media["ddr5"].dollars_per_gb
    assert (price.low, price.mid, price.high) == (7, 7, 7)
    assert price.source.endswith("mine.yaml")
    before = shipped().media["ddr5"]
    assert profile.media["ddr5"].read_bytes_per_s == before.read_bytes_per_s
    assert profile.gpus == shipped().gpus


def test_a_new_middle_stretches_the_range(laid_over):
    price = laid_over("media: {ddr5: {dollars_per_gb: {mid: 30}}}").media["ddr5"].dollars_per_gb
    assert (price.low, price.mid, price.high) == (4.0, 30, 30)
    assert price.source.endswith("mine.yaml")


def test_a_new_middle_may_be_a_number_that_yaml_reads_as_text(laid_over):
    before = shipped().media["nvme-tlc"].read_bytes_per_s
    text = "media: {nvme-tlc: {read_bytes_per_s: {mid: 4e8}}}"
    speed = laid_over(text).media["nvme-tlc"].read_bytes_per_s
    assert (speed.low, speed.mid, speed.high) == (4e8, 4e8, before.high)


@pytest.mark.parametrize(
    ("moved", "watts"),
    [(0.0, 3 * 2.0), (6e9, 3 * 5.0), (12e9, 3 * 8.0), (99e9, 3 * 8.0)],
    ids=["idle", "half busy", "busy", "overloaded"],
)
def test_power_follows_the_time_in_which_units_move_bytes(laid_over, moved, watts):
    medium = laid_over("""
media: {ddr5: {read_bytes_per_s: 4e9, active_watts: 8, idle_watts: 2}}
""").media["ddr5"]
    assert medium.watts(3, moved) == watts
    assert medium.watts(0, moved) == 0
    assert shipped().media["s3-standard"].watts(3, moved) == 0


def test_media_and_gpus_can_be_added(laid_over):
    added = laid_over("""
media:
  tape: {tier: object, about: slow, unit: drive, latency_s: 60, read_bytes_per_s: 4e8,
         write_bytes_per_s: 4e+8, dollars_per_gb: {low: 1, mid: 2, high: 3, source: me}}
  lto.9: {tier: object, about: slow, unit: drive, latency_s: 60, read_bytes_per_s: 4e8,
          write_bytes_per_s: 4e8}
date: 2026-11-01
""")
    assert added.media["tape"].dollars_per_gb == ProfileRange(low=1, mid=2, high=3, source="me")
    assert added.media["lto.9"].latency_s.mid == 60
    assert added.date.month == 11


BAD = [
    (
        "media: {ddr5: {dollars_per_gb: -7}}",
        r"media\.ddr5\.dollars_per_gb\.low: -7: .*; give a number >= 0.0$",
    ),
    ("media: {ddr5: {read_bytes_per_s: 0}}", r"media\.ddr5\.read_bytes_per_s: 0: must be above 0"),
    ("media: {ddr5: {read_bytes_per_s: 1e-300}}", r"media.*: 1e-300: not within 1e-06 and 1e\+24"),
    ("media: {ddr5: {dollars_per_gb: 1e300}}", r"media.*_per_gb: 1e\+300: not within 1e-06 and"),
    ("gpus: {H100: {flop_per_s: 0}}", r"gpus\.H100\.flop_per_s: 0: must be above 0"),
    ("media: {ddr5: {price: 3}}", r"media\.ddr5: .*'price'; remove it; known here: tier, about"),
    ("media: {mine: {tier: host}}", r"media\.mine: missing required field 'about'; add it"),
    ("media: {mine: {tier: moon, about: x}}", r"media\.mine\.tier: 'moon': .*; use one of: device"),
    ("gpus: {H100: {watts: {lo: 3}}}", r"gpus\.H100\.watts: .*'lo'; .*: low, mid, high, source"),
    ("gpus: {H100: {watts: high}}", r"gpus\.H100\.watts: 'high'"),
    ("gpus: {H100: {watts: .inf}}", r"gpus\.H100\.watts: .* not in order"),
    ("site: {dollars_per_kwh: .nan}", r"site\.dollars_per_kwh\.low: nan"),
    ("site: {dollars_per_kwh: {low: 3}}", r"site\.dollars_per_kwh: low 3, .* not in order"),
    ("sites: {x: 3}", r"contains .*'sites'; remove it; known here: date, site, codec, media, gpus"),
    ("site: {prefill_utilisation: 50}", r"site\.prefill_utilisation: 50: a share .* at most 1"),
    ("site: {prefill_utilisation: {high: 1.2}}", r"site\.prefill_utilisation: 1\.2: a share"),
    ("site: {prefill_utilisation: 0}", r"site\.prefill_utilisation: 0: must be above 0"),
    (
        "site: {power_overhead: 0.3}",
        r"site\.power_overhead: 0\.3: the overhead includes the machines",
    ),
    ("media: 3", "media: 3: Expected 'object', got 'int'; correct it"),
    ("gpus: {4090: {watts: 9}}", "gpus: 4090 is not text, as a name must be; put it in quotes"),
    ("media: {ddr5: 3}", r"media\.ddr5: 3"),
    ("date: yesterday", "date: 'yesterday'"),
    ("- 3", "holds a list"),
    ("{", "cannot be read as YAML"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_bad_file_is_refused_with_the_path_of_the_key(laid_over, text, message):
    with pytest.raises(ConfigError, match=rf"mine\.yaml: {message}"):
        laid_over(text)


def test_a_missing_profile_file_is_refused():
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_profile("none.yaml")
