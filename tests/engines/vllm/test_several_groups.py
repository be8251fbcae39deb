"""The scheduler side of a model with several KV groups: what it looks up, loads and saves."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from holdfast.blocks.key import Chain
from holdfast.client.durable_requests import AGAIN_S
from holdfast.client.timeouts import EngineClocks
from holdfast.devices.base import NO_PAGE
from holdfast.engines.vllm.scheduler import SchedulerSide
from holdfast.engines.vllm.work import GroupHandshake, Handshake, WorkerReport
from holdfast.wire.local.messages import Cover, Covered, Done, Hinted, Observed, Prestage, Sync

PAGE = 8
GROUPS = (
    GroupHandshake(b"f" * 16, 64, PAGE, PAGE),
    GroupHandshake(b"w" * 16, 64, PAGE, PAGE, attention="window", window=10, tables=(1, 2)),
    GroupHandshake(b"s" * 16, 64, 2 * PAGE, 2 * PAGE, attention="recurrent", tables=(3,)),
)
FULL, WINDOW, STATE = range(3)
LISTS = (
    [10, 11, 12, 13, 14, 15],
    [0, 0, 22, 23, 24, 25],
    [0, 0, 32, 33, 34, 35],
    [0, 41, 0],
)


class Rig:
    """A scheduler side with a node that holds `held` blocks of two pages, in all groups."""

    def __init__(self, fakes, groups=GROUPS, ranks=1):
        self.fakes, self.held, self.tier, self.now = fakes, 0, "host", 0.0
        self.clients = [fakes.Client(self.answer) for _ in range(ranks)]
        self.client = self.clients[0]
        links = [fakes.Link(client) for client in self.clients]
        self.side = SchedulerSide(
            links,
            [Handshake(groups)] * ranks,
            fakes.setting(),
            fakes.Teller(links),
            EngineClocks(*[lambda: self.now] * 2),
        )

    def answer(self, message):
        if isinstance(message, Observed):
            return Done()
        if isinstance(message, Prestage | Sync):
            return Hinted(len(message.keys) // 16)
        return Covered(self.held, self.held, {self.tier: self.held})

    def request(self, tokens, **other):
        request = self.fakes.Request(tokens=range(tokens), **other)
        self.side.on_new_request(request)
        return request

    def run(self, request, scheduled, lists, offered=None):
        output = self.fakes.step({}, **{request.request_id: scheduled})
        output.kv_connector_block_state = SimpleNamespace(
            get_block_ids=lambda _: lists, boundary_state_offloads=offered or {}
        )
        return self.side.build_work(output)

    def chain(self, group, tokens):
        named = GROUPS[group]
        chain = Chain(self.fakes.domain_key, named.fingerprint, named.block_tokens)
        chain.extend(range(tokens))
        return chain


@pytest.fixture
def rig(fakes):
    return Rig(fakes)


def test_a_lookup_names_the_chain_of_each_group(rig):
    rig.request(40)
    (cover,) = rig.client.of(Cover)
    chains = [rig.chain(group, 40).packed() for group in range(3)]
    assert [cover.keys, *cover.more_keys] == chains
    assert [len(chain) // 16 for chain in chains] == [5, 5, 2]


def test_a_load_has_of_each_group_what_a_resume_needs(rig):
    rig.held = 2
    request = rig.request(40)
    assert rig.side.matched_tokens(request, 0) == (32, True)
    rig.side.allocated(request, LISTS, 32)
    (load,) = rig.run(request, 0, LISTS).loads
    assert [task.group for task in load.groups] == [FULL, WINDOW, STATE]
    full, window, state = load.groups
    assert (full.keys[0], full.pages) == (rig.chain(FULL, 32).packed(), [10, 11, 12, 13])
    assert window.keys[0] == rig.chain(WINDOW, 32).packed(2, 4)
    assert window.pages == [22, 32, 23, 33]
    assert (state.keys[0], state.pages) == (rig.chain(STATE, 32).packed(1, 2), [41])
    assert (load.tokens, load.pages) == (32, 9)


def test_a_load_behind_tokens_of_the_engine_leaves_them_out(rig):
    rig.held = 2
    request = rig.request(40)
    assert rig.side.matched_tokens(request, 16) == (16, True)
    rig.side.allocated(request, LISTS, 16)
    (load,) = rig.run(request, 0, LISTS).loads
    full, window, state = load.groups
    assert full.pages == [12, 13]
    assert NO_PAGE not in window.pages
    assert state.pages == [41]


def test_a_load_without_a_page_of_vllm_names_a_block_that_no_store_has(rig, caplog):
    rig.held = 2
    request = rig.request(40)
    rig.side.matched_tokens(request, 0)
    rig.side.allocated(request, (LISTS[0], LISTS[1], [0] * 6, LISTS[3]), 32)
    (load,) = rig.run(request, 0, LISTS).loads
    assert [task.keys for task in load.groups] == [(bytes(16),)]
    assert "vLLM has no page" in caplog.text


def test_a_load_ends_before_the_last_token_at_a_block_of_all_groups(rig):
    rig.held = 2
    assert rig.side.matched_tokens(rig.request(32), 0) == (16, True)


def test_blocks_are_saved_in_each_group_when_they_are_full(rig):
    request = rig.request(48)
    saves = rig.run(request, 48, LISTS).saves
    assert {(save.group, save.depth, tuple(save.pages)) for save in saves} == {
        (FULL, 0, (10, 11, 12, 13, 14, 15)),
        (WINDOW, 2, (22, 32, 23, 33, 24, 34, 25, 35)),  # of the first, vLLM has no pages
    }
    (window,) = [save for save in saves if save.group == WINDOW]
    assert window.keys[0] == rig.chain(WINDOW, 48).packed(2, 6)
    assert window.parents[0] == rig.chain(WINDOW, 48).parent(2)
    assert rig.run(request, 0, LISTS).saves == []


def test_a_state_is_saved_in_the_step_that_offers_it(rig):
    request = rig.request(40)
    offered = {"r": [(3, 41, 32)], "unknown": [(3, 9, 32)]}
    (save,) = [each for each in rig.run(request, 40, LISTS, offered).saves if each.group == STATE]
    assert (save.depth, save.pages) == (1, [41])
    assert save.keys[0] == rig.chain(STATE, 32).packed(1, 2)


def test_a_state_between_two_blocks_or_beyond_the_known_tokens_is_not_saved(rig):
    request = rig.request(40)
    for tokens in (24, 48):
        work = rig.run(request, 0, LISTS, {"r": [(3, 41, tokens)]})
        assert [save for save in work.saves if save.group == STATE] == []


def test_a_failed_load_is_computed_and_all_of_it_is_saved_again(rig):
    rig.held = 2
    request = rig.request(40)
    rig.side.matched_tokens(request, 0)
    rig.side.allocated(request, LISTS, 32)
    rig.run(request, 0, LISTS)
    rig.side.on_worker_output(rig.fakes.outcome(ended=["r"], failed=["r"]))
    assert rig.side.matched_tokens(request, 0) == (0, False)
    saves = rig.run(request, 40, LISTS).saves
    assert {(save.group, save.depth) for save in saves} == {(FULL, 0), (WINDOW, 2)}


def test_tokens_that_landed_count_once_although_every_group_has_blocks_of_them(rig):
    rig.held = 2
    request = rig.request(40)
    rig.side.matched_tokens(request, 0)
    rig.side.allocated(request, LISTS, 32)
    rig.run(request, 0, LISTS)
    said = WorkerReport(landed={"r": {"host": 5, "disk": 2}})
    rig.side.on_worker_output(rig.fakes.outcome(ended=["r"], said=said))
    request.num_computed_tokens = 32
    rig.run(request, 8, LISTS)
    rig.side.on_finished(request)
    counted = {
        name.rpartition("/")[2]: number
        for name, number in rig.side.counts.data.items()
        if name.startswith("prompt_tokens_by_source/")
    }
    assert sum(counted.values()) == 40
    assert counted["host"] + counted["disk"] == 32


def test_a_context_that_waits_is_prestaged_in_every_group(rig):
    rig.held, rig.tier = 2, "disk"
    rig.request(40)
    for _ in range(3):
        rig.now += 1.0
        rig.side.build_work(rig.fakes.step({}))
    sent = {(message.group, message.keys) for message in rig.client.of(Prestage)}
    assert sent == {
        (FULL, rig.chain(FULL, 32).packed()),
        (WINDOW, rig.chain(WINDOW, 32).packed(2, 4)),
        (STATE, rig.chain(STATE, 32).packed(1, 2)),
    }


def resumable_after(*points):
    """Return the answers of a node that can resume after these numbers of blocks."""

    def answer(message):
        if not isinstance(message, Cover):
            return Done()
        asked = len(message.keys) // 16 * PAGE // (2 * PAGE)
        most = max((point for point in points if point <= asked), default=0)
        return Covered(most, most, {"host": most}, plan=len(points))

    return answer


@pytest.mark.parametrize(
    ("points", "tokens"),
    [
        ([(1, 2), (1,)], 16),
        ([(2,), (1,)], 0),
        ([(3, 1), (2, 1)], 0),  # they agree about 1 only, and are asked twice
        ([(2,), ()], 0),
        ([(2,), (2,)], 32),
    ],
)
def test_ranks_load_what_each_of_them_can_resume_after_or_nothing(fakes, points, tokens):
    rig = Rig(fakes, ranks=2)
    for client, held in zip(rig.clients, points, strict=True):
        client.answer = resumable_after(*held)
    request = rig.request(56)
    found = rig.side.matched_tokens(request, 0)
    if found[0] is None:
        first, again = rig.client.of(Cover)
        assert len(again.keys) < len(first.keys)
        assert (first.plan, again.plan) == (0, len(points[0]))
        assert [len(keys) // 16 for keys in again.more_keys] == [
            len(again.keys) // 16,
            len(again.keys) // 32,
        ]
        found = rig.side.matched_tokens(request, 0)
    assert found == (tokens, bool(tokens))
    assert len(rig.client.of(Cover)) <= 2


@pytest.mark.parametrize("order", [(FULL, WINDOW, STATE), (STATE, FULL, WINDOW)])
def test_a_durable_request_is_acknowledged_for_what_a_resume_needs_of_every_group(fakes, order):
    rig = Rig(fakes, tuple(GROUPS[group] for group in order))
    request = rig.request(48, kv_transfer_params={"holdfast": {"retention": "durable"}})
    rig.side.matched_tokens(request, 0)
    rig.run(request, 48, LISTS, {"r": [(3, 41, 32)]})
    request.num_computed_tokens = 48
    rig.now += AGAIN_S
    rig.run(request, 0, LISTS)
    asked = {order[sync.group]: sync.keys for sync in rig.client.of(Sync)}
    assert asked == {
        FULL: rig.chain(FULL, 32).packed(),
        WINDOW: rig.chain(WINDOW, 32).packed(2, 4),
        STATE: rig.chain(STATE, 32).packed(1, 2),
    }
    rig.run(request, 0, LISTS)
    assert rig.side.on_finished(request)["holdfast"]["durable_tokens"] == 32
    assert rig.side.counts.data["durable_blocks/kept"] == 2


DRAFT = GroupHandshake(b"d" * 16, 64, PAGE, PAGE, lookahead=1)


@pytest.fixture
def drafting(fakes):
    """A model whose first group and whose draft have the same page lists."""
    return Rig(fakes, (GROUPS[0], DRAFT))


def test_a_draft_has_a_block_once_the_token_after_it_is_known(drafting):
    request = drafting.request(2 * PAGE)
    (cover,) = drafting.client.of(Cover)
    assert [len(keys) // 16 for keys in (cover.keys, *cover.more_keys)] == [2, 1]
    saves = drafting.run(request, 2 * PAGE, LISTS).saves
    assert [(save.group, save.depth, save.pages) for save in saves] == [
        (0, 0, [10, 11]),
        (1, 0, [10]),
    ]
    request.num_computed_tokens = 2 * PAGE
    request.all_token_ids.append(7)
    (save,) = drafting.run(request, 1, LISTS).saves
    assert (save.group, save.depth, save.pages) == (1, 1, [11])


def test_contexts_that_differ_after_a_block_share_it_in_the_model_and_not_in_its_draft(drafting):
    for name, last in (("one", 7), ("two", 8)):
        request = drafting.fakes.Request(name, tokens=[*range(PAGE), last])
        drafting.side.on_new_request(request)
    one, two = drafting.client.of(Cover)
    assert one.keys == two.keys
    assert one.more_keys != two.more_keys
