"""A flood waits behind itself, who comes seldom goes first, and nobody waits for ever."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.fairness.fair_queue import (
    IDLE_AGES,
    MIN_SHARE,
    WINDOW_S,
    FairQueue,
    Priority,
    WorkItem,
)


class Device:
    """Does one piece of work after the other, `speed` a second, for domains that ask at times."""

    def __init__(self, speed: float = 1.0) -> None:
        self.queue: FairQueue[None] = FairQueue()
        self.speed = speed
        self.now = 0.0
        self.log: list[tuple[float, str, float]] = []
        """When it was done, whose it was, and how much."""

    def put(self, work_item: WorkItem) -> None:
        self.queue.advance(self.now)
        self.queue.put(work_item, None)

    def step(self) -> bool:
        self.queue.advance(self.now)
        found = self.queue.take()
        if found is None:
            return False
        work_item, _ = found
        self.now += work_item.cost / self.speed
        self.log.append((self.now, work_item.domain, work_item.cost))
        return True

    def flood(self, until: float, *flows: WorkItem) -> None:
        """Work until then, with those flows never short of work."""
        while self.now < until:
            for work_item in flows:
                while len(self.queue._waiting.get(work_item.flow, ())) < 2:
                    self.put(work_item)
            self.step()

    def served(self, since: float = 0.0) -> Counter[str]:
        total: Counter[str] = Counter()
        for at, flow, cost in self.log:
            if at > since:
                total[flow] += cost
        return total


def taken(queue: FairQueue[str]) -> str:
    """Take a turn; return the work."""
    work_item = queue.take()
    assert work_item is not None
    return work_item[1]


# Turns


def test_a_flow_that_may_not_run_does_not_delay_other_flows() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put(WorkItem("full", 1.0), "first")
    queue.put(WorkItem("other", 5.0), "second")
    assert queue.take(lambda flow: flow[0] != "full") == (WorkItem("other", 5.0), "second")
    assert queue.take(lambda flow: flow[0] != "full") is None
    assert len(queue) == 1
    assert queue.earliest() == 0.0
    assert queue.earliest(lambda flow: flow[0] != "full") == float("inf")
    assert queue.take() == (WorkItem("full", 1.0), "first")


def test_a_flood_does_not_delay_a_trickle() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.put(WorkItem("flood", 1.0), "flood")
    queue.put(WorkItem("victim", 1.0), "victim")
    assert "victim" in [taken(queue) for _ in range(2)]


def test_flows_are_served_in_proportion_to_their_shares() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(60):
        queue.put(WorkItem("a", 1.0, 3.0), "a")
        queue.put(WorkItem("b", 1.0, 1.0), "b")
    first = [taken(queue) for _ in range(40)]
    assert 29 <= first.count("a") <= 31


def test_work_items_count_by_their_cost() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.put(WorkItem("large", 8.0), "large")
    for _ in range(160):
        queue.put(WorkItem("small", 1.0), "small")
    first = [taken(queue) for _ in range(45)]
    assert 4 <= first.count("large") <= 6


def test_work_charged_out_of_turn_delays_the_flows_queued_work() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.put(WorkItem("a", 1.0), "a")
        queue.put(WorkItem("b", 1.0), "b")
    for _ in range(6):
        queue.charge(WorkItem("a", 1.0))
    order = [taken(queue) for _ in range(16)]
    assert order[:6] == ["b"] * 6
    assert 4 <= order.count("a") <= 6


def test_refunded_work_is_not_counted() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.put(WorkItem("a", 1.0), "a")
        queue.put(WorkItem("b", 1.0), "b")
    order = []
    for _ in range(16):
        work_item = queue.take()
        assert work_item is not None
        order.append(work_item[1])
        if work_item[1] == "a" and order.count("a") <= 6:
            queue.refund(work_item[0], 1.0)
    assert order.count("a") - 6 <= order.count("b") <= order.count("a") - 5


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 100.0)), max_size=60))
def test_every_item_is_served_once_and_in_order_within_its_flow(
    work: list[tuple[int, float]],
) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for number, (flow, cost) in enumerate(work):
        queue.put(WorkItem(flow, cost), (flow, number))
    came = []
    while (work_item := queue.take()) is not None:
        assert work_item[0].domain == work_item[1][0]
        came.append(work_item[1])
    assert sorted(number for _, number in came) == list(range(len(work)))
    for flow in range(6):
        own = [number for of, number in came if of == flow]
        assert own == sorted(own)


def served(queue: FairQueue[str]) -> list[str]:
    """Take everything; return it in order."""
    order = []
    while (taken := queue.take()) is not None:
        order.append(taken[1])
    return order


def test_a_short_request_passes_the_rest_of_a_long_one_of_its_flow() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(10):
        queue.put(WorkItem("a", 8.0, request=80.0), "long")
    assert queue.take() is not None
    for _ in range(2):
        queue.put(WorkItem("a", 8.0, request=16.0), "short")
    assert served(queue) == ["short"] * 2 + ["long"] * 9


def test_a_request_with_more_left_does_not_pass_a_longer_one_that_is_nearly_served() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(10):
        queue.put(WorkItem("a", 8.0, request=80.0), "long")
    for _ in range(9):
        assert queue.take() is not None
    for _ in range(2):
        queue.put(WorkItem("a", 8.0, request=16.0), "short")
    assert served(queue) == ["long", "short", "short"]


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 100))
def test_a_request_is_passed_by_at_most_its_own_cost(later: list[int], cost: int) -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put(WorkItem("a", cost, request=cost), "long")
    passed = 0
    for each in later:
        queue.put(WorkItem("a", each, request=each), "later")
        taken = queue.take()
        assert taken is not None
        if taken[1] == "long":
            break
        passed += int(taken[0].cost)
    assert passed <= cost


def test_flows_that_ended_are_forgotten() -> None:
    device = Device()
    for flow in range(1_000):
        device.put(WorkItem(str(flow), 0.1))
        device.step()
    assert len(device.queue._position) < 200
    assert len(device.queue._last_served) < 200


# Credit


def test_an_infrequent_flow_is_served_first_until_its_credit_is_spent() -> None:
    device = Device()
    device.flood(3 * WINDOW_S, WorkItem("flood", 0.01))
    assert device.queue.credit(WorkItem("victim")) == pytest.approx(WINDOW_S, rel=0.05)
    begun = device.now
    device.flood(begun + 2 * WINDOW_S, WorkItem("flood", 0.01), WorkItem("victim", 0.01))
    spent = [at for at, flow, _ in device.log if flow == "victim"][: round(WINDOW_S / 0.01 * 0.95)]
    assert spent[-1] - begun == pytest.approx(0.95 * WINDOW_S / (1 - MIN_SHARE), rel=0.02)
    device.flood(device.now + 2.0, WorkItem("flood", 0.01), WorkItem("victim", 0.01))
    last = device.served(since=device.now - 2.0)
    assert last["victim"] == pytest.approx(last["flood"], rel=0.03)


def test_prefetch_work_has_no_credit() -> None:
    device = Device()
    device.flood(WINDOW_S, WorkItem("flood", 0.01))
    begun = device.now
    device.flood(
        begun + 1.0, WorkItem("flood", 0.01), WorkItem("ahead", 0.01, 16.0, Priority.PREFETCH)
    )
    late = device.served(since=begun)
    assert late["ahead"] == pytest.approx(late["flood"], rel=0.05)


def test_use_of_an_idle_device_gives_other_flows_no_credit() -> None:
    """A flood that begins beside a moderate load gets no credit for the time before it."""
    device = Device()
    for _ in range(20):
        for _ in range(16):
            device.put(WorkItem("victim", 0.01))
        while device.step():
            pass
        device.now += WINDOW_S / IDLE_AGES
    assert device.queue.credit(WorkItem("flood")) <= 0.17


@given(
    shares=st.lists(st.sampled_from([0.25, 1.0, 2.0, 16.0]), min_size=2, max_size=4),
    costs=st.lists(st.floats(0.005, 0.02), min_size=4, max_size=4),
    head_start_s=st.floats(0.0, 2 * WINDOW_S),
)
@settings(max_examples=60)  # a light flow is served 200 times in each, whatever the others weigh
@example(shares=[16, 16, 0.25, 16], costs=[1 / 128, 1 / 64, 1 / 64, 1 / 64], head_start_s=3.0)
def test_flooding_flows_are_served_by_share_after_credit_is_spent(
    shares: list[float], costs: list[float], head_start_s: float
) -> None:
    device = Device()
    flows = [WorkItem(str(i), costs[i], share) for i, share in enumerate(shares)]
    device.flood(head_start_s, flows[0])
    weights = sum(shares)
    # What the first had alone the others have now in proportion to their own weight.
    spend_s = min(head_start_s, WINDOW_S) * weights / shares[0] / (1 - MIN_SHARE) + 1.0
    device.flood(device.now + spend_s, *flows)
    since = device.now
    seconds = 200 * 0.02 * weights / min(shares)
    device.flood(since + seconds, *flows)
    served = device.served(since)
    total = sum(served.values())
    # What went round meanwhile is nobody's by weight: a light flow may have had more than its own.
    ahead = MIN_SHARE * spend_s / seconds
    for flow in flows:
        wanted = flow.share / weights
        assert wanted * 0.97 - ahead <= served[flow.domain] / total <= wanted * 1.03 + ahead


@given(
    asks=st.lists(
        st.tuples(st.integers(0, 5), st.floats(0.01, 0.3), st.floats(0.0, 1.0)), max_size=60
    ),
    head_start_s=st.floats(0.0, 2 * WINDOW_S),
)
def test_a_flooding_flow_always_gets_its_minimum_share(
    asks: list[tuple[int, float, float]], head_start_s: float
) -> None:
    device = Device()
    flood = WorkItem("flood", 0.05)
    device.flood(head_start_s, flood)
    since, others = device.now, {flow for flow, _, _ in asks} | {0}
    for flow, cost, pause_s in asks:
        device.put(WorkItem(str(flow), cost))
        device.flood(device.now + pause_s, flood)
    for _ in range(100):
        device.flood(device.now + 0.1, flood, WorkItem("0", 0.05))
        passed_s = device.now - since
        least = MIN_SHARE / len(others) * passed_s - 0.7  # of two of the largest pieces
        assert device.served(since)["flood"] >= least


@given(
    pauses=st.lists(st.floats(0.0, 3 * WINDOW_S), min_size=1, max_size=20),
    share=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_credit_is_at_most_the_service_of_other_flows_within_the_window(
    pauses: list[float], share: float
) -> None:
    device = Device()
    flood = WorkItem("flood", 0.02)
    for pause_s in pauses:
        device.flood(device.now + pause_s, flood)
        credit = device.queue.credit(WorkItem("victim", share=share))
        served = device.served(device.now - WINDOW_S)
        assert credit <= share * (served["flood"] + 0.02) + 1e-9
        assert credit <= served.total() + 0.02 + 1e-9
        device.put(WorkItem("victim", 0.1, share))


@given(
    fetch_s=st.floats(0.02, 0.5),
    duty=st.floats(0.05, 0.4),
    tenants=st.integers(1, 3),
)
def test_a_light_tenant_at_an_equal_share_hardly_notices_fifty_times_its_load(
    fetch_s: float, duty: float, tenants: int
) -> None:
    """Several floods, one light tenant: from its first piece to its last, the floor aside."""
    device, piece_s = Device(), fetch_s / 16
    floods = [WorkItem(f"flood{i}", piece_s) for i in range(tenants)]
    device.flood(1.0, *floods)
    think_s = fetch_s * max(tenants, 1 / duty - 1)
    for _ in range(20):
        device.flood(device.now + think_s, *floods)
        begun = device.now
        for _ in range(16):
            device.put(WorkItem("victim", piece_s))
        while WorkItem("victim").flow in device.queue._waiting:
            device.flood(device.now + 1e-9, *floods)
        took_s = device.log[-1][0] - begun
        assert took_s <= fetch_s * (1 / (1 - MIN_SHARE)) + 2 * piece_s
