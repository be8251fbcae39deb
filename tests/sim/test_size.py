"""Sizing: the closed formulas by hand, the hits of a trace against its curve, what can not be."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.sim.curve import curve
from holdfast.sim.model import load_model
from holdfast.sim.profile import Range, shipped
from holdfast.sim.size import Question, Wish, answer, of_trace, of_users
from holdfast.sim.size.need import BUSY, GPU_BUSY, Rung, need
from holdfast.sim.size.search import reachable
from holdfast.sim.size.tell import assumptions, million_tokens_dollars, size_text

MEDIA = ("ddr5", "nvme-tlc", "pool-flash")


def asked(demand, model="Llama-3.1-70B", *, gpu="H200x8", wish=None, **more):
    profile = shipped()
    kind, number = profile.gpu(gpu)
    question = {"media": MEDIA, "dtype": "bf16", **more}
    return Question(
        shape=load_model(model),
        demand=demand,
        gpu=kind,
        gpus=number,
        profile=profile,
        wish=wish or Wish(),
        **question,
    )


def priced(question, medium, dollars_per_gb):
    """The same question with another price of one medium."""
    price = Range(low=dollars_per_gb, mid=dollars_per_gb, high=dollars_per_gb, source="test")
    media = dict(question.profile.media)
    media[medium] = msgspec.structs.replace(media[medium], dollars_per_gb=price)
    profile = msgspec.structs.replace(question.profile, media=media)
    return msgspec.structs.replace(question, profile=profile)


def worked_out(question, *rungs):
    held = {tokens: question.demand.held(tokens) for tokens in (0.0, *(r.tokens for r in rungs))}
    return need(question, rungs, held)


def test_users_who_are_alike_hit_in_proportion_to_the_space():
    demand = of_users(1000, 10_000, 500, 60.0)
    assert demand.unique_tokens == 1000 * 10_000
    for share in (0.0, 0.25, 0.5, 1.0):
        hit = demand.held(share * demand.unique_tokens).sum() / demand.input_tokens.sum()
        assert hit == pytest.approx(share * 0.95, abs=0.002)


@given(st.data())
def test_a_traces_hits_are_those_of_its_curve(any_trace, data):
    trace = data.draw(any_trace)
    if not trace.blocks:
        return
    exact, demand = curve(trace), of_trace(trace)
    for blocks in range(trace.unique + 1):
        held = demand.held(blocks * trace.block_tokens).sum()
        # At least one token of a request is computed, which the curve does not ask for.
        assert exact.hit_tokens[blocks] - trace.requests <= held <= exact.hit_tokens[blocks]


def test_some_requests_stand_for_all_of_a_real_trace(shipped):
    demand = of_trace(shipped("conversation"))
    some = demand.thinned()
    assert len(some.input_tokens) == 2000
    for blocks, hit in ((10_000, 0.216), (50_000, 0.362)):
        for load in (demand, some):
            held = load.held(blocks * 512.0).sum() / load.input_tokens.sum()
            assert held == pytest.approx(hit, abs=0.03 if load is some else 0.002)
    assert demand.peak == pytest.approx(1.2, abs=0.05)
    assert some.thinned() is some


def test_capacity_is_what_the_claim_says():
    question = asked(of_users(10_000, 97_656, 1000, 3600.0))
    [tier] = worked_out(question, Rung("pool-flash", question.demand.unique_tokens)).tiers
    assert tier.capacity_bytes / 1e12 == pytest.approx(320, abs=0.01)


def test_wear_decides_where_much_is_written():
    """10,000 new tokens a second of a dense 70B are 283 TB a day: ten drives of 30.72 TB."""
    question = asked(of_users(50, 4000, 2000, 10.0), nodes=1)
    [tier] = worked_out(question, Rung("pool-flash", question.demand.unique_tokens)).tiers
    assert tier.written_bytes_per_s == pytest.approx(3.2768e9)
    assert (tier.units, tier.bound) == (10, "wear")
    assert tier.writes_per_day == pytest.approx(283.1 / 307.2, abs=0.001)


def test_bandwidth_is_what_readers_leave_of_it():
    question = asked(of_users(1000, 50_000, 1000, 100.0), wish=Wish(1.0))
    found = worked_out(question, Rung("pool-flash", question.demand.unique_tokens))
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
    card = Range(low=bytes_per_s, mid=bytes_per_s, high=bytes_per_s, source="test")
    gpu = msgspec.structs.replace(question.gpu, network_bytes_per_s=card)
    return msgspec.structs.replace(question, gpu=gpu)


def test_what_comes_from_a_pool_comes_by_network():
    """16 GB over 25 GB/s take .64 s, however fast the pool is."""
    question = networked(asked(of_users(8000, 50_000, 1000, 600.0), nodes=40), 25e9 / 8)
    whole, load_s = question.demand.unique_tokens, 49_000 * 327_680 / 25e9
    compute_s = question.shape.prefill_flop(1000, 49_000) / (8 * 989e12 * 0.5)
    found = worked_out(question, Rung("pool-flash", whole))
    assert found.ttft_s[1] == pytest.approx(0.04 + compute_s + load_s, rel=1e-3)
    assert f"{0.04 + compute_s + load_s:.2f}" == "0.75"
    hurried = msgspec.structs.replace(question, wish=Wish(0.7), media=("pool-flash",))
    assert worked_out(hurried, Rung("pool-flash", whole)) is None
    with pytest.raises(ConfigError, match=r"0\.75 s: .* over the engine's network \(25 GB/s\)"):
        answer(hurried)


def test_the_network_of_more_machines_is_taken_where_one_is_too_slow():
    question = networked(asked(of_users(8000, 50_000, 1000, 600.0)), 25e9 / 8)
    assert worked_out(question, Rung("pool-flash", question.demand.unique_tokens)) is not None
    few = msgspec.structs.replace(question, nodes=2)  # 214 GB/s are read, 50 come in
    assert worked_out(few, Rung("pool-flash", question.demand.unique_tokens)) is None


def test_two_remote_tiers_share_the_network():
    question = networked(asked(of_users(100, 50_000, 1000, 600.0), nodes=4), 25e9 / 8)
    whole = question.demand.unique_tokens
    rungs = (Rung("pool-flash", whole / 2), Rung("s3-express", whole))
    each = np.full(100, 49_000.0)
    held = {0.0: 0 * each, whole / 2: each / 2, whole: each}
    for ttft_s, reached in ((0.6, False), (0.8, True)):  # either half alone would take .32 s
        wishing = msgspec.structs.replace(question, wish=Wish(ttft_s))
        assert (need(wishing, rungs, held) is not None) == reached


def test_money_and_power_add_up():
    question = asked(of_users(100, 10_000, 1000, 100.0), nodes=1)
    found = worked_out(question, Rung("ddr5", question.demand.unique_tokens))
    [tier] = found.tiers
    hardware = tier.units * 64 * 10.9 / 4 / 8766
    assert tier.units == int(np.ceil(100 * 10_000 * 327_680 / 64e9))
    assert tier.dollars_per_h == pytest.approx(hardware + tier.watts / 1000 * 0.10)
    assert tier.units * 4 * 1.3 <= tier.watts <= tier.units * 8 * 1.3
    compute_s = question.shape.prefill_flop(1000, 9000) / (8 * 989e12 * 0.5)
    assert found.prefill_gpu_s_per_s == pytest.approx(compute_s, rel=1e-3)  # one request a second
    assert found.gpu_dollars_per_h == pytest.approx(compute_s / GPU_BUSY * 8 * 3.5, rel=1e-3)
    a_million = million_tokens_dollars(question, found)
    assert a_million == pytest.approx(found.dollars_per_h / 36)  # 36 million tokens an hour


def test_an_object_store_is_paid_by_the_month_and_the_call():
    question = asked(of_users(100, 10_000, 1000, 100.0), media=("s3-standard",))
    [tier] = worked_out(question, Rung("s3-standard", question.demand.unique_tokens)).tiers
    read, written = 9000 * 327_680 * 3600, 1000 * 327_680 * 3600
    stored = 100 * 10_000 * 327_680 / 1e9 * 0.023 / (8766 / 12)
    calls = (read * 0.4 + written * 5) / 8e6 / 1e6
    assert tier.dollars_per_h == pytest.approx(stored + calls)
    assert tier.watts == 0


def test_the_proposal_is_the_cheapest_that_is_in_time():
    question = asked(of_users(300, 40_000, 1000, 60.0), wish=Wish(0.5), nodes=2)
    found = answer(question)
    assert found.best.ttft_s[1] <= 0.5
    assert found.best.within >= 0.95
    assert found.best.dollars_per_h < found.without.dollars_per_h
    front = found.frontier
    assert [n.ttft_s[1] for n in front] == sorted(n.ttft_s[1] for n in front)
    assert [n.dollars_per_h for n in front] == sorted(
        (n.dollars_per_h for n in front), reverse=True
    )
    hits = [n.hit for n in found.by_hits]
    assert hits == sorted(hits)
    assert found.by_hits[0].hit > 0.9  # with fewer hits two machines do not keep up
    assert answer(msgspec.structs.replace(question, nodes=0)).by_hits[0].hit == 0


def test_prices_choose_the_medium():
    question = asked(of_users(300, 40_000, 1000, 60.0), nodes=4)
    assert {t.medium for t in answer(priced(question, "ddr5", 0.001)).best.tiers} == {"ddr5"}
    dear = priced(priced(question, "ddr5", 1e4), "nvme-tlc", 1e4)
    assert {t.medium for t in answer(dear).best.tiers} == {"pool-flash"}
    dearest = msgspec.structs.replace(priced(dear, "pool-flash", 1e5), nodes=0)
    assert answer(dearest).best.tiers == ()  # computing is cheaper


def test_what_the_gpus_hold_themselves_is_told():
    question = asked(of_users(10, 1000, 10, 60.0))
    room = 8 * 141e9 * 0.9 - question.shape.weights_bytes
    assert question.device_tokens == pytest.approx(room / 327_680)
    assert any(f"{question.device_tokens:,.0f} tokens fit" in s for s in assumptions(question))


def test_a_node_has_room_for_so_many_channels():
    question = asked(of_users(300, 40_000, 1000, 60.0), media=("ddr5",), nodes=1)
    rung = Rung("ddr5", question.demand.unique_tokens)  # 3.9 TB: 62 channels
    assert worked_out(question, rung) is None
    assert worked_out(msgspec.structs.replace(question, nodes=3), rung) is not None


def test_machines_that_can_not_compute_the_load_are_refused():
    """Of 8,000 users every 600 s, 13.3 thousand tokens a second are new: 1.3 engines, 70 % busy."""
    question = asked(of_users(8000, 50_000, 1000, 600.0), nodes=1)
    assert worked_out(question, Rung("pool-flash", question.demand.unique_tokens)) is None
    with pytest.raises(ConfigError, match=r"--nodes: 1: .* takes 2 of them .*; give 2 or more"):
        answer(question)
    found = answer(msgspec.structs.replace(question, nodes=2))
    for one in (found.best, *found.frontier, *found.by_hits):
        assert one.prefill_gpu_s_per_s <= 2 * GPU_BUSY
    assert found.without.prefill_gpu_s_per_s > 30  # what it is compared with takes more of them
    lines = assumptions(msgspec.structs.replace(question, nodes=2))
    assert "without memory the load would take 50 machines, not the 2 of --nodes" in lines
    small = msgspec.structs.replace(question, nodes=2, media=("ddr5",))
    with pytest.raises(ConfigError, match=r"--nodes: 2: too few .* ladder of ddr5.*; give more"):
        answer(small)


def test_a_recurrent_model_loads_its_checkpoint_once():
    question = asked(of_users(100, 10_000, 1000, 100.0), "Qwen3.5")
    [tier] = worked_out(question, Rung("pool-flash", question.demand.unique_tokens)).tiers
    each = 9000 * 30_720 + question.shape.state_bytes()
    assert tier.traffic_bytes_per_s == pytest.approx(each)
    stored = 10_000 * 30_720 + question.shape.state_bytes()
    assert tier.capacity_bytes == pytest.approx(100 * stored)
    written = 1000 * 30_720 + question.shape.state_bytes()  # a new checkpoint at each end
    assert tier.written_bytes_per_s == pytest.approx(written)
    assert any("checkpoint of 192 MB" in line for line in assumptions(question))


def test_checkpoints_wear_drives():
    """2,000 users of Nemotron-3 every 300 s: 8.2 MB of tokens each time, and 170 MB of state."""
    question = asked(of_users(2000, 50_000, 1000, 300.0), "Nemotron-3")
    [tier] = worked_out(question, Rung("nvme-tlc", question.demand.unique_tokens)).tiers
    each = 1000 * 8192 + 170.2e6
    assert tier.written_bytes_per_s == pytest.approx(2000 / 300 * each, rel=0.001)
    assert (tier.units, tier.bound) == (4, "wear")
    assert tier.writes_per_day == pytest.approx(3.35 / 4, abs=0.002)


@pytest.mark.parametrize(("context", "new"), [(1000, 100), (20_000, 12_000)])
def test_a_window_takes_no_more_than_the_tokens_there_are(context, new):
    """Of Llama 4, 12 layers keep 4,096 bytes a token, and 36 those of a chunk of 8,192 tokens."""
    question = asked(of_users(1000, context, new, 100.0), "llama-4-maverick")
    found = worked_out(question, Rung("ddr5", question.demand.unique_tokens))

    def kept(tokens):
        return 4096 * (12 * tokens + 36 * min(tokens, 8192))

    [tier] = found.tiers
    assert tier.capacity_bytes == pytest.approx(1000 * kept(context))
    assert tier.traffic_bytes_per_s == pytest.approx(10 * kept(context - new), rel=0.01)
    assert tier.written_bytes_per_s == pytest.approx(10 * kept(new), rel=0.01)
    fixed = 36 * 4096 * min(context, 8192) / 1e6
    assert any(f"{fixed:,.1f} MB a context beside it" in s for s in assumptions(question))


def test_a_window_that_is_not_full_is_not_brought_whole():
    question = asked(of_users(100, 2000, 10, 60.0), "llama-4-maverick")
    soonest_s, _ = reachable(question, {1.0: question.demand.held(question.demand.unique_tokens)})
    load_s = 1990 * 48 * 4096 / question.link_bytes_per_s
    compute_s = question.prefill_s(np.array([1990.0]), np.array([2000.0]))[0]
    assert soonest_s == pytest.approx(0.04 + compute_s + load_s, rel=1e-6)


def test_fetching_a_windowed_model_has_a_break_even_too():
    windowed = asked(of_users(100, 4000, 100, 60.0), "gpt-oss-20b")
    layers = tuple(p for p in windowed.shape.attention if p.kind == "window")
    shape = msgspec.structs.replace(windowed.shape, attention=layers)
    lines = assumptions(msgspec.structs.replace(windowed, shape=shape))
    seconds = shape.prefill_flop(4000) / windowed.flop_per_s
    even = shape.window_bytes() / seconds / 1e9
    assert any(f"above {even:.3g} GB/s" in line for line in lines)


UNREACHABLE = [
    (0.05, 1000, "soonest is .* computing 1,000 tokens that no store can hold"),
    (0.09, 10, r"soonest is .* bringing 32\.\d GB of context over the GPUs' links \(432 GB/s\)"),
]


@pytest.mark.parametrize(("ttft_s", "new", "message"), UNREACHABLE)
def test_a_wish_that_can_not_be_met_says_what_can_and_why(ttft_s, new, message):
    question = asked(of_users(100, 100_000, new, 60.0), wish=Wish(ttft_s))
    with pytest.raises(ConfigError, match=f"slo-ttft {ttft_s} s: not reachable for 95%.*{message}"):
        answer(question)


def test_an_engine_that_is_slow_itself_is_named():
    question = asked(of_users(10, 200, 10, 60.0), wish=Wish(0.03))
    with pytest.raises(ConfigError, match=r"the engine itself takes 0\.04 s"):
        answer(question)


def test_media_that_are_too_slow_are_named():
    question = asked(of_users(100, 3000, 1500, 60.0), wish=Wish(0.12), media=("s3-standard",))
    with pytest.raises(ConfigError, match="none of s3-standard brings context in less than half"):
        answer(question)


def test_a_question_without_an_answer_is_refused():
    with pytest.raises(ConfigError, match=r"200,000 tokens.*at most 131,072"):
        answer(asked(of_users(10, 200_000, 10, 60.0)))
    with pytest.raises(ConfigError, match=r"weights .* take 141 GB; use more GPUs"):
        answer(asked(of_users(10, 2000, 10, 60.0), gpu="H100x1"))
    with pytest.raises(ConfigError, match=r"medium 'tape'.*ddr5"):
        answer(asked(of_users(10, 2000, 10, 60.0), media=("tape",)))
    with pytest.raises(ConfigError, match=r"medium 'hbm': device memory"):
        answer(asked(of_users(10, 2000, 10, 60.0), media=("hbm",)))
    for wish in (Wish(-1.0), Wish(float("nan"))):
        with pytest.raises(ConfigError, match="--slo-ttft"):
            answer(asked(of_users(10, 2000, 10, 60.0), wish=wish))
    with pytest.raises(ConfigError, match="--slo-share"):
        answer(asked(of_users(10, 2000, 10, 60.0), wish=Wish(1.0, 95)))
    with pytest.raises(ConfigError, match="--nodes"):
        answer(asked(of_users(10, 2000, 10, 60.0), nodes=-1))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ((0, 10, 1, 1.0), "--users: 0"),
        ((1, 10, 11, 1.0), "--new: 11: give 1 to the context of 10"),
        ((1, 10, 0, 1.0), "--new: 0"),
        ((1, 0, 1, 1.0), "--context: 0: give 1 to 2,147,483,648 tokens"),
        ((1, 10, 1, 0.0), "--every: 0"),
        ((1, 10, 1, 1e-300), "--every: 1e-300: give 0.001 to"),
        ((1, 10, 1, float("nan")), "--every: nan"),
        ((1, 10, 1, float("inf")), "--every: inf"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(load, message):
    with pytest.raises(ConfigError, match=message):
        of_users(*load)


def test_a_trace_can_come_at_another_rate(made):
    trace = made([[1, 2], [1, 2], [1, 3]], [0, 0, 0], [0, 1, 1])
    assert of_trace(trace).requests_per_s == pytest.approx(1.5)
    faster = of_trace(trace, 20.0)
    assert (faster.requests_per_s, faster.peak) == (20.0, of_trace(trace).peak)
    for rate in (0.0, 1e300, float("nan")):
        with pytest.raises(ConfigError, match=r"--rate: .*: give 1e-09 to 1e\+09 requests"):
            of_trace(trace, rate)


def test_a_trace_may_be_as_long_as_its_times(made):
    trace = made([[1, 2], [1, 2]], [0, 0], [0, 10**12])
    assert of_trace(trace).requests_per_s == pytest.approx(2e-12)


def test_a_trace_without_ids_can_not_be_sized(made):
    trace = made([[], []], [0, 0], [0, 1])
    with pytest.raises(ConfigError, match="no block ids"):
        of_trace(trace)


def test_sizes_are_written_with_three_digits():
    assert [size_text(n) for n in (3.2e14, 6.55e11, 2.5e7, 4.6e18)] == [
        "320 TB",
        "655 GB",
        "25 MB",
        "4,600 PB",
    ]
