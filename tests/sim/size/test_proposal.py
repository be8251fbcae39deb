"""What a proposal advises to buy, and the alternatives beside it."""

import msgspec
import pytest

from holdfast.sim.size.demand import of_trace, of_users
from holdfast.sim.size.need import CandidateTier
from holdfast.sim.size.proposal import advice, assumptions, proposal_lines
from holdfast.sim.size.question import SizingGoal
from holdfast.sim.size.search import answer

LOAD = of_users(300, 40_000, 1000, 300.0)
ALL_KINDS = ("ddr5", "nvme-tlc", "pool-flash", "s3-express")


def priced(question, medium, dollars_per_gb):
    """The question, with another price of one medium."""
    media = dict(question.profile.media)
    price = msgspec.structs.replace(
        media[medium].dollars_per_gb, low=0.0, mid=dollars_per_gb, high=1e9
    )
    media[medium] = msgspec.structs.replace(media[medium], dollars_per_gb=price)
    profile = msgspec.structs.replace(question.profile, media=media)
    return msgspec.structs.replace(question, profile=profile)


def test_the_purchase_is_whole_units_at_their_price(worked_out, asked):
    question = asked(LOAD, nodes=2)
    unique = question.demand.unique_tokens
    candidate = CandidateTier("ddr5", unique / 8), CandidateTier("nvme-tlc", unique)
    found = worked_out(question, *candidate)
    host, disk = found.tiers
    assert host.purchase_dollars == pytest.approx(host.units * 64 * 10.9)
    assert disk.purchase_dollars == pytest.approx(disk.units * 30_720 * 0.365)
    assert found.purchase_dollars == host.purchase_dollars + disk.purchase_dollars
    assert disk.bought_bytes == disk.units * 30.72e12 >= disk.capacity_bytes
    assert found.machines == 2
    assert (host.servers, disk.servers) == (0, 0)


def test_the_drives_of_a_pool_are_counted_in_whole_servers(worked_out, asked):
    question = asked(of_users(20_000, 50_000, 1000, 300.0))
    [pool] = worked_out(question, CandidateTier("pool-flash", question.demand.unique_tokens)).tiers
    assert pool.servers == -(-pool.units // 8) > 1
    assert pool.units_for_capacity == -(-pool.capacity_bytes // 30.72e12) < pool.units


@pytest.mark.parametrize("level", ["low", "mid", "high"])
def test_the_price_of_power_has_the_requested_price_level(asked, level):
    question = asked(LOAD, price_level=level)
    price = getattr(question.profile.site.dollars_per_kwh, level)
    [line] = [line for line in assumptions(question) if line.startswith(f"prices: {level} of")]
    assert f"power costs ${price:g} per kWh" in line


def test_an_object_store_is_rented_not_bought(worked_out, asked):
    question = asked(LOAD, media=ALL_KINDS)
    [store] = worked_out(question, CandidateTier("s3-express", question.demand.unique_tokens)).tiers
    assert store.purchase_dollars == 0
    assert store.bought_bytes == store.capacity_bytes


def test_units_that_are_rented_are_not_to_be_bought(asked):
    question = asked(LOAD, goal=SizingGoal(1.0), media=("fsx-lustre",))
    lines = list(proposal_lines(question, answer(question)))
    [sentence] = [line for line in lines if line.startswith("Rent ")]
    assert "units of 1.2 TB (fsx-lustre)" in sentence
    assert not any(line.startswith("to buy") for line in lines)


def test_each_kind_of_lowest_tier_is_compared(asked):
    question = asked(LOAD, goal=SizingGoal(1.0), media=ALL_KINDS)
    found = answer(question)
    assert list(found.by_lowest_tier) == ["host", "disk", "pool", "object"]
    met = {kind: need for kind, need in found.by_lowest_tier.items() if need is not None}
    assert found.best in met.values()
    for kind, need in met.items():
        assert need.tiers[-1].tier == kind
        assert need.ttft_s[1] <= 1.0
        assert need.dollars_per_h >= found.best.dollars_per_h
    lines = list(proposal_lines(question, found))
    [everything] = [line for line in lines if line.startswith("  compute everything")]
    assert everything.endswith("misses the goal") == (found.without.ttft_s[1] > 1.0)


def test_a_kind_that_cannot_meet_the_goal_is_named(asked):
    question = asked(of_users(2000, 50_000, 1000, 600.0), goal=SizingGoal(1.0))
    found = answer(question)
    assert found.by_lowest_tier["host"] is None
    lines = list(proposal_lines(question, found))
    assert any("host only" in line and "none meets the goal" in line for line in lines)


def test_the_advice_says_when_the_purchase_has_paid_for_itself(asked):
    question = asked(LOAD, media=("nvme-tlc",))
    found = answer(question)
    [disk] = found.best.tiers
    hours = disk.purchase_dollars / (
        found.without.gpu_dollars_per_h
        - found.best.gpu_dollars_per_h
        - disk.watts / 1000 * question.profile.site.dollars_per_kwh.mid
    )
    text = advice(question, found)
    assert text.startswith(f"Buy {disk.units} drives of 30.7 TB (nvme-tlc) for $")
    assert f"pays for itself in {hours / 24:.0f} days" in text


def test_a_much_cheaper_purchase_of_nearly_the_same_cost_is_named(asked, shipped):
    question = asked(of_trace(shipped("conversation")), media=("ddr5", "nvme-qlc"))
    found = answer(question)
    host, disk = found.by_lowest_tier["host"], found.by_lowest_tier["disk"]
    assert found.best is disk
    assert host.purchase_dollars < disk.purchase_dollars / 2
    assert f"For ${host.purchase_dollars:,.0f}, " in advice(question, found)


def test_the_advice_does_not_compare_a_rented_ladder_with_itself(asked):
    question = asked(LOAD, media=("s3-express",))
    found = answer(question)
    assert found.best.tiers
    assert found.best.purchase_dollars == 0
    text = advice(question, found)
    assert text.startswith("Rent ")
    assert "is enough" not in text


def test_the_advice_is_to_buy_nothing_if_no_tier_saves_its_cost(asked):
    question = priced(asked(LOAD, media=("ddr5",)), "ddr5", 1e6)
    assert advice(question, answer(question)).startswith("Buy nothing")


def test_the_advice_states_the_extra_cost_of_a_goal_over_full_recompute(asked):
    question = priced(asked(LOAD, media=("nvme-tlc",), goal=SizingGoal(1.0)), "nvme-tlc", 1e4)
    found = answer(question)
    assert found.without.ttft_s[1] > 1.0
    assert "more than computing every token" in advice(question, found)


def test_the_assumptions_state_how_many_tokens_fit_in_gpu_memory(asked):
    question = asked(of_users(10, 1000, 10, 60.0))
    room = 8 * 141e9 * 0.9 - question.shape.weights_bytes
    assert question.device_tokens == pytest.approx(room / 327_680)
    assert any(f"{question.device_tokens:,.0f} tokens fit" in s for s in assumptions(question))


def test_fetching_a_windowed_model_has_a_break_even_too(asked):
    windowed = asked(of_users(100, 4000, 100, 60.0), "gpt-oss-20b")
    layers = tuple(p for p in windowed.shape.attention if p.kind == "window")
    shape = msgspec.structs.replace(windowed.shape, attention=layers)
    lines = assumptions(msgspec.structs.replace(windowed, shape=shape))
    seconds = shape.prefill_flop(4000) / windowed.flop_per_s
    even = shape.window_bytes() / seconds / 1e9
    assert any(f"above {even:.3g} GB/s" in line for line in lines)
