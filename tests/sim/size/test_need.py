"""The closed formulas, by hand."""

import msgspec
import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.sim.codec import RAW
from holdfast.sim.profile import ProfileRange
from holdfast.sim.size.demand import of_users
from holdfast.sim.size.need import BUSY, GPU_BUSY, CandidateTier, need
from holdfast.sim.size.proposal import assumptions, million_tokens_dollars
from holdfast.sim.size.question import SizingGoal
from holdfast.sim.size.search import answer

WITH_PARITY = 9 / 8
"""A pool of nine targets or more stores a parity record for each eight blocks."""


def test_capacity_is_what_the_claim_says(worked_out, asked):
    question = asked(of_users(10_000, 97_656, 1000, 3600.0))
    [tier] = worked_out(question, CandidateTier("pool-flash", question.demand.unique_tokens)).tiers
    assert tier.capacity_bytes / 1e12 == pytest.approx(320 * WITH_PARITY, abs=0.01)


def test_wear_sets_the_number_of_drives_under_heavy_writes(worked_out, asked):
    """10,000 new tokens a second of a dense 70B are 283 TB a day, with parity 319: 11 drives."""
    question = asked(of_users(50, 4000, 2000, 10.0), nodes=1)
    [tier] = worked_out(question, CandidateTier("pool-flash", question.demand.unique_tokens)).tiers
    assert tier.written_bytes_per_s == pytest.approx(3.2768e9 * WITH_PARITY)
    assert (tier.units, tier.bound) == (11, "wear")
    assert tier.writes_per_day == pytest.approx(318.5 / 337.9, abs=0.001)


def test_a_read_gets_the_bandwidth_that_other_reads_leave_free(worked_out, asked):
    question = asked(of_users(1000, 50_000, 1000, 100.0), goal=SizingGoal(1.0))
    found = worked_out(question, CandidateTier("pool-flash", question.demand.unique_tokens))
    [tier] = found.tiers
    nbytes = 49_000 * 327_680
    traffic = 10 * nbytes
    assert tier.traffic_bytes_per_s == pytest.approx(traffic)
    flop = question.shape.prefill_flop(1000, 49_000)
    compute_s = flop / (8 * 989e12 * 0.5)
    left_s = 1.0 - 0.04 - compute_s - 1.2e-4
    assert tier.request_bytes_per_s == pytest.approx(nbytes / left_s, rel=1e-4)
    assert tier.bytes_per_s >= max(traffic + nbytes / left_s, traffic / BUSY)
    assert tier.bytes_per_s < max(traffic + nbytes / left_s, traffic / BUSY) + 14e9
    load_s = 1.2e-4 + nbytes / min(tier.bytes_per_s - traffic, 400e9)
    assert found.ttft_s[1] == pytest.approx(0.04 + compute_s + load_s, rel=1e-3)


def networked(question, bytes_per_s):
    """The same question with another network card for each GPU."""
    card = ProfileRange(low=bytes_per_s, mid=bytes_per_s, high=bytes_per_s, source="test")
    gpu = msgspec.structs.replace(question.gpu, network_bytes_per_s=card)
    return msgspec.structs.replace(question, gpu=gpu)


def test_reads_from_a_pool_are_limited_by_the_network(worked_out, asked):
    """16 GB over 25 GB/s take .64 s, however fast the pool is."""
    question = networked(asked(of_users(8000, 50_000, 1000, 600.0), nodes=40), 25e9 / 8)
    whole, load_s = question.demand.unique_tokens, 49_000 * 327_680 / 25e9
    compute_s = question.shape.prefill_flop(1000, 49_000) / (8 * 989e12 * 0.5)
    found = worked_out(question, CandidateTier("pool-flash", whole))
    assert found.ttft_s[1] == pytest.approx(0.04 + compute_s + load_s, rel=1e-3)
    assert 0.75 < 0.04 + compute_s + load_s < 0.76
    hurried = msgspec.structs.replace(question, goal=SizingGoal(0.7), media=("pool-flash",))
    assert worked_out(hurried, CandidateTier("pool-flash", whole)) is None
    with pytest.raises(ConfigError, match=r"0\.76 s: .* over the engine's network \(25 GB/s\)"):
        answer(hurried)


def test_more_machines_are_needed_if_the_network_of_few_is_too_slow(worked_out, asked):
    question = networked(asked(of_users(8000, 50_000, 1000, 600.0)), 25e9 / 8)
    assert (
        worked_out(question, CandidateTier("pool-flash", question.demand.unique_tokens)) is not None
    )
    few = msgspec.structs.replace(question, nodes=2)  # 214 GB/s are read, 50 come in
    assert worked_out(few, CandidateTier("pool-flash", question.demand.unique_tokens)) is None


def test_two_remote_tiers_share_the_network(asked):
    question = networked(asked(of_users(100, 50_000, 1000, 600.0), nodes=4), 25e9 / 8)
    whole = question.demand.unique_tokens
    candidate = (CandidateTier("pool-flash", whole / 2), CandidateTier("s3-express", whole))
    each = np.full(100, 49_000.0)
    held = {0.0: 0 * each, whole / 2: each / 2, whole: each}
    for ttft_s, reached in ((0.6, False), (0.8, True)):  # either half alone would take .32 s
        assert (need(question, SizingGoal(ttft_s), candidate, held) is not None) == reached


def test_money_and_power_add_up(worked_out, asked):
    question = asked(of_users(100, 10_000, 1000, 100.0), nodes=1)
    found = worked_out(question, CandidateTier("ddr5", question.demand.unique_tokens))
    [tier] = found.tiers
    hardware = tier.units * 64 * 10.9 / 4 / 8760
    assert tier.units == int(np.ceil(100 * 10_000 * 327_680 / 64e9))
    assert tier.dollars_per_h == pytest.approx(hardware + tier.watts / 1000 * 0.10)
    busy = 10_000 * 327_680 / (tier.units * 51.2e9)  # a second reads 9,000 tokens, writes 1,000
    assert tier.watts == pytest.approx(tier.units * (4 + (8 - 4) * busy) * 1.3)
    compute_s = question.shape.prefill_flop(1000, 9000) / (8 * 989e12 * 0.5)
    assert found.busy_engines == pytest.approx(compute_s, rel=1e-3)  # one request a second
    assert found.gpu_dollars_per_h == pytest.approx(compute_s / GPU_BUSY * 8 * 3.5, rel=1e-3)
    a_million = million_tokens_dollars(question, found)
    assert a_million == pytest.approx(found.dollars_per_h / 36)  # 36 million tokens an hour


def test_a_medium_without_idle_power_draws_power_only_while_it_moves_bytes(worked_out, asked):
    question = asked(of_users(100, 10_000, 1000, 100.0), nodes=1)
    whole = question.demand.unique_tokens
    medium = question.profile.medium("ddr5")
    media = question.profile.media | {"ddr5": msgspec.structs.replace(medium, idle_watts=None)}
    without = msgspec.structs.replace(
        question, profile=msgspec.structs.replace(question.profile, media=media)
    )
    [tier] = worked_out(question, CandidateTier("ddr5", whole)).tiers
    [less] = worked_out(without, CandidateTier("ddr5", whole)).tiers
    idle, active = medium.idle_watts.mid, medium.active_watts.mid
    busy = (tier.watts / (tier.units * 1.3) - idle) / (active - idle)
    assert less.watts == pytest.approx(tier.units * 1.3 * active * busy)
    assert less.watts > 0


def test_an_object_store_is_paid_by_the_month_and_the_call(worked_out, asked):
    question = asked(of_users(100, 10_000, 1000, 100.0), media=("s3-standard",))
    [tier] = worked_out(question, CandidateTier("s3-standard", question.demand.unique_tokens)).tiers
    read, written = 9000 * 327_680 * 3600, 1000 * 327_680 * 3600
    stored = 100 * 10_000 * 327_680 / 1e9 * 0.023 / (8760 / 12)
    puts = 2 * written / (64 << 20) + 60  # one machine lists once a minute
    calls = (read / (8 << 20) * 0.4 + puts * 5) / 1e6
    assert tier.dollars_per_h == pytest.approx(stored + calls)
    assert tier.request_dollars_per_h == pytest.approx(calls)
    assert tier.requests_per_h.gets == pytest.approx(read / (8 << 20))
    assert tier.watts == 0


def test_a_shared_file_system_may_be_paid_by_the_month_and_the_bytes_moved(worked_out, asked):
    question = asked(of_users(100, 10_000, 1000, 100.0), media=("efs-elastic",))
    [tier] = worked_out(question, CandidateTier("efs-elastic", question.demand.unique_tokens)).tiers
    read, written = 9000 * 327_680 * 3600, 1000 * 327_680 * 3600
    stored = 100 * 10_000 * 327_680 / 1e9 * 0.30 / (8760 / 12)
    assert tier.dollars_per_h == pytest.approx(stored + (read * 0.03 + written * 0.06) / 1e9)
    assert tier.request_dollars_per_h == 0
    assert tier.is_rented


def test_a_shared_file_system_may_be_rented_by_whole_units(worked_out, asked):
    question = asked(of_users(100, 10_000, 1000, 100.0), media=("fsx-lustre",))
    [tier] = worked_out(question, CandidateTier("fsx-lustre", question.demand.unique_tokens)).tiers
    assert tier.bound == "bandwidth"
    assert tier.units > tier.units_for_capacity
    assert tier.dollars_per_h == pytest.approx(tier.units * 1_200 * 0.145 / (8760 / 12))
    assert tier.purchase_dollars == 0
    assert tier.is_rented


def test_the_number_of_memory_channels_per_node_is_limited(worked_out, asked):
    question = asked(of_users(300, 40_000, 1000, 60.0), media=("ddr5",), nodes=1)
    tier = CandidateTier("ddr5", question.demand.unique_tokens)  # 3.9 TB: 62 channels
    assert worked_out(question, tier) is None
    assert worked_out(msgspec.structs.replace(question, nodes=3), tier) is not None


def test_a_recurrent_model_loads_its_checkpoint_once(worked_out, asked):
    question = asked(of_users(100, 10_000, 1000, 100.0), "Qwen3.5")
    [tier] = worked_out(question, CandidateTier("pool-flash", question.demand.unique_tokens)).tiers
    each = 9000 * 30_720 + question.shape.state_bytes()
    assert tier.traffic_bytes_per_s == pytest.approx(each)
    stored = 10_000 * 30_720 + question.shape.state_bytes()
    assert tier.capacity_bytes == pytest.approx(100 * stored * WITH_PARITY)
    written = 1000 * 30_720 + question.shape.state_bytes()  # a new checkpoint at each end
    assert tier.written_bytes_per_s == pytest.approx(written * WITH_PARITY)
    assert any("checkpoint of 192 MB" in line for line in assumptions(question))


def test_checkpoints_wear_drives(worked_out, asked):
    """2,000 users of Nemotron-3 every 300 s: 8.2 MB of tokens each time, and 170 MB of state."""
    question = asked(of_users(2000, 50_000, 1000, 300.0), "Nemotron-3")
    [tier] = worked_out(question, CandidateTier("nvme-tlc", question.demand.unique_tokens)).tiers
    each = 1000 * 8192 + 170.2e6
    assert tier.written_bytes_per_s == pytest.approx(2000 / 300 * each, rel=0.001)
    assert (tier.units, tier.bound) == (4, "wear")
    assert tier.writes_per_day == pytest.approx(3.35 / 4, abs=0.002)


@pytest.mark.parametrize(("context", "new"), [(1000, 100), (20_000, 12_000)])
def test_a_window_takes_no_more_than_the_tokens_there_are(worked_out, asked, context, new):
    """Of Llama 4, 12 layers keep 4,096 bytes a token, and 36 those of a chunk of 8,192 tokens."""
    question = asked(of_users(1000, context, new, 100.0), "llama-4-maverick")
    found = worked_out(question, CandidateTier("ddr5", question.demand.unique_tokens))

    def kept(tokens):
        return 4096 * (12 * tokens + 36 * min(tokens, 8192))

    [tier] = found.tiers
    assert tier.capacity_bytes == pytest.approx(1000 * kept(context))
    assert tier.traffic_bytes_per_s == pytest.approx(10 * kept(context - new), rel=0.01)
    assert tier.written_bytes_per_s == pytest.approx(10 * kept(new), rel=0.01)
    fixed = 36 * 4096 * min(context, 8192) / 1e6
    assert any(f"{fixed:,.1f} MB per context" in s for s in assumptions(question))


def test_the_links_carry_all_tiers_together(asked, worked_out):
    """561 GB/s are read; an engine takes in 432, 346 of them planned for: two engines, not one."""
    load = of_users(100, 30_000, 10, 0.7)
    question = asked(load, "Llama-3.1-8B", nodes=1, media=("ddr5", "pool-flash"))
    candidate = (
        CandidateTier("ddr5", load.unique_tokens * 0.45),
        CandidateTier("pool-flash", load.unique_tokens),
    )
    for nodes, carried in ((1, False), (2, True)):
        found = worked_out(msgspec.structs.replace(question, nodes=nodes), *candidate)
        assert (found is not None) == carried
    for tier in found.tiers:  # either alone would fit one
        assert tier.traffic_bytes_per_s < question.ingest_bytes_per_s(tier.medium, RAW) * BUSY
    assert sum(tier.traffic_bytes_per_s for tier in found.tiers) == pytest.approx(561.5e9, rel=1e-3)


def test_the_network_carries_all_remote_tiers_together(asked, worked_out):
    """160 GB/s come in by network, half of it from each: two machines take 95 each, 80 % busy."""
    load = of_users(1000, 50_000, 1000, 100.0)
    candidate = (
        CandidateTier("pool-flash", load.unique_tokens / 2),
        CandidateTier("s3-express", load.unique_tokens),
    )
    slow = networked(asked(load, nodes=2, gpu="B200x8"), 95e9 / 8)
    for nodes, carried in ((2, False), (3, True)):
        found = worked_out(msgspec.structs.replace(slow, nodes=nodes), *candidate)
        assert (found is not None) == carried
    for tier in found.tiers:
        assert tier.traffic_bytes_per_s < 2 * 95e9 * BUSY


def bursts(load, peak):
    """The same load with a busiest minute of so many times the average."""
    return load._replace(peak=peak)


def test_engines_keep_up_with_the_busiest_minute(asked, worked_out):
    load = of_users(1000, 50_000, 1000, 100.0)
    tier = CandidateTier("pool-flash", load.unique_tokens)
    calm = worked_out(asked(load), tier)
    assert calm.engines == pytest.approx(calm.busy_engines / GPU_BUSY)
    assert worked_out(asked(bursts(load, 1.4)), tier).engines == calm.engines
    bursty = worked_out(asked(bursts(load, 5.0)), tier)
    assert bursty.engines == pytest.approx(5 * calm.busy_engines)
    assert bursty.busy_engines == calm.busy_engines
    assert bursty.gpu_dollars_per_h == pytest.approx(3.5 * calm.gpu_dollars_per_h)
    assert bursty.gpu_watts == calm.gpu_watts  # energy is counted by the day
    machines = int(np.ceil(bursty.engines))
    few = asked(bursts(load, 5.0), nodes=machines - 1)
    assert worked_out(few, tier) is None
    with pytest.raises(ConfigError, match=f"takes {machines} of them, .* in the busiest minute"):
        answer(few)


def test_energy_is_that_of_the_average_not_of_the_busiest_minute(asked, worked_out):
    load = of_users(1000, 50_000, 1000, 100.0)
    tier = CandidateTier(
        "ddr5", load.unique_tokens
    )  # bought for its capacity, whatever the traffic
    found = [worked_out(asked(bursts(load, peak), nodes=20), tier) for peak in (1.0, 5.0)]
    [calm], [bursty] = (one.tiers for one in found)
    assert bursty.units == calm.units
    assert bursty.traffic_bytes_per_s == 5 * calm.traffic_bytes_per_s
    assert bursty.watts == pytest.approx(calm.watts)


def test_an_encoding_tier_needs_fewer_bytes_and_writes_less(worked_out, asked):
    """Sizes and rates of a tier count stored bytes."""
    load = of_users(200, 32_000, 1000, 300.0)
    question = asked(load, "Llama-3.1-8B", gpu="H200x1", media=("nvme-qlc",))
    question = msgspec.structs.replace(question, codec="planes")
    tier = CandidateTier("nvme-qlc", load.unique_tokens)
    [encoded] = worked_out(question, tier).tiers
    [raw] = worked_out(msgspec.structs.replace(question, codec="off"), tier).tiers
    ratio = question.profile.codec.ratio.mid
    assert (encoded.codec_ratio, raw.codec_ratio) == (ratio, 1.0)
    assert encoded.capacity_bytes == pytest.approx(raw.capacity_bytes / ratio)
    assert encoded.written_bytes_per_s == pytest.approx(raw.written_bytes_per_s / ratio)
    assert encoded.traffic_bytes_per_s == pytest.approx(raw.traffic_bytes_per_s / ratio)
    assert any("--codec off" in line for line in assumptions(question))


def test_a_request_that_needs_more_than_the_decoders_deliver_gets_raw_records(worked_out, asked):
    load = of_users(200, 32_000, 1000, 300.0)
    question = asked(load, media=("nvme-qlc",))
    [tier] = worked_out(question, CandidateTier("nvme-qlc", load.unique_tokens)).tiers
    assert tier.codec_ratio == 1.0


def test_narrow_types_count_raw(worked_out, asked):
    load = of_users(200, 32_000, 1000, 300.0)
    question = asked(load, "Llama-3.1-8B", gpu="H200x1", media=("nvme-qlc",), dtype="fp8")
    [tier] = worked_out(question, CandidateTier("nvme-qlc", load.unique_tokens)).tiers
    assert tier.codec_ratio == 1.0
    assert not any("--codec off" in line for line in assumptions(question))
