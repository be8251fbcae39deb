from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm")

from holdfast.blocks.key import unpack_keys
from holdfast.client.prompt_ledger import PromptLedger
from holdfast.client.request_lookups import NODE_SHARE
from holdfast.engines.vllm.group_tasks import SAVE_BLOCKS
from holdfast.engines.vllm.work import WorkerReport
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.wire.local.messages import Cover, Covered, Observed


@pytest.fixture
def harness(fakes):
    return fakes.SchedulerRig(fakes)


def test_a_lookup_is_sent_when_a_request_arrives(harness):
    harness.request(20)
    (cover,) = harness.client.of(Cover)
    assert unpack_keys(cover.keys) == harness.chain(16).keys


def test_a_lookup_carries_the_trace_of_the_engine(harness):
    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    harness.request(20, trace_headers={"traceparent": trace, "tracestate": "x=y"})
    harness.request(20, request_id="not traced")
    assert [cover.trace for cover in harness.client.of(Cover)] == [trace, ""]


def test_a_long_save_goes_in_parts_that_follow_each_other(harness):
    blocks = 2 * SAVE_BLOCKS + 5
    request = harness.request(blocks * 8)
    assert harness.side.matched_tokens(request, 0) == (0, False)
    pages = list(range(1, blocks + 1))
    saves = harness.run(request, blocks * 8, pages).saves
    assert [save.depth for save in saves] == [0, SAVE_BLOCKS, 2 * SAVE_BLOCKS]
    keys = harness.chain(blocks * 8).keys
    assert [key for save in saves for key in unpack_keys(save.keys[0])] == keys
    assert [page for save in saves for page in save.pages] == pages
    assert [save.parents[0] for save in saves[1:]] == [keys[save.depth - 1] for save in saves[1:]]


def test_saves_name_the_segments_that_the_node_places_by(harness):
    harness.client.welcome = msgspec.structs.replace(harness.client.welcome, segment_blocks=24)
    blocks = SAVE_BLOCKS + 40
    saves = harness.run(harness.request(blocks * 8), blocks * 8, [*range(1, blocks + 1)]).saves
    keys = harness.chain(blocks * 8).keys
    heads = [save.depth - save.depth % 24 for save in saves]
    assert [save.segments[0] for save in saves] == [keys[head][:8] for head in heads]
    assert 0 < heads[-1] < saves[-1].depth


def test_the_match_count_is_unknown_until_the_node_answers(harness):
    harness.answering, harness.held = False, 2
    request = harness.request(20)
    assert harness.side.matched_tokens(request, 0) == (None, False)
    harness.answering = True
    assert harness.side.matched_tokens(request, 0) == (16, True)


def test_a_lookup_after_its_deadline_is_a_miss(harness):
    harness.answering, harness.held = False, 2
    request = harness.request(20)
    harness.now = 0.049
    assert harness.side.matched_tokens(request, 0) == (None, False)
    harness.now = 0.051
    assert harness.side.matched_tokens(request, 0) == (0, False)
    assert harness.client.forgotten == harness.client.of(Cover)
    assert harness.side.counts.data == {"calls/lookup/late": 1}
    harness.answering = True
    assert harness.side.matched_tokens(request, 0) == (0, False)


def test_a_busy_machine_does_not_make_an_answer_late(harness):
    """The wait is measured on a clock that stands still while the engine has no processor."""
    running = [0.0]
    harness.side._lookups._running = lambda: running[0]
    harness.answering, harness.held = False, 2
    request = harness.request(20)
    harness.now, running[0] = 3.0, 0.04
    assert harness.side.matched_tokens(request, 0) == (None, False)
    harness.answering = True
    assert harness.side.matched_tokens(request, 0) == (16, True)
    assert harness.side.counts.data == {"calls/lookup/ok": 1}


def test_a_node_that_does_not_answer_is_late_on_a_busy_machine_too(harness, caplog):
    running = [0.0]
    harness.side._lookups._running = lambda: running[0]
    harness.answering = False
    request = harness.request(20)
    running[0] = 0.051
    with caplog.at_level("INFO", "vllm.holdfast"):
        assert harness.side.matched_tokens(request, 0) == (0, False)
    assert harness.side.counts.data == {"calls/lookup/late": 1}


def test_a_lookup_carries_the_deadline_for_shared_tiers(harness):
    harness.answering = False
    for limit_s in (0.05, 0.025):
        request = harness.request(20, request_id=f"r{limit_s}")
        assert harness.client.of(Cover)[-1].deadline_s == pytest.approx(NODE_SHARE * limit_s)
        harness.now += limit_s
        assert harness.side.matched_tokens(request, 0) == (0, False)


def test_the_wait_for_a_silent_node_is_halved_each_time(harness):
    harness.answering = False
    for waits_s in (0.05, 0.025, 0.0125):
        request = harness.request(20, request_id=f"r{waits_s}")
        harness.now += waits_s - 0.001
        assert harness.side.matched_tokens(request, 0) == (None, False)
        harness.now += 0.002
        assert harness.side.matched_tokens(request, 0) == (0, False)
    harness.answering = True
    harness.side.matched_tokens(harness.request(20, request_id="answered"), 0)
    harness.answering = False
    request = harness.request(20, request_id="again")
    harness.now += 0.049
    assert harness.side.matched_tokens(request, 0) == (None, False)


def test_repeated_match_queries_give_the_same_count_and_send_no_lookup(harness):
    harness.held = 2
    request = harness.request(20)
    for _ in range(3):
        assert harness.side.matched_tokens(request, 0) == (16, True)
    assert len(harness.client.sent) == 1


def test_one_token_at_least_is_left_to_compute(harness):
    harness.held = 2
    assert harness.side.matched_tokens(harness.request(16), 0) == (8, True)
    assert harness.side.matched_tokens(harness.request(17), 0) == (16, True)


def test_local_hits_are_not_loaded_again(harness):
    harness.held = 3
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 16) == (8, True)
    assert harness.side.matched_tokens(request, 24) == (0, False)


@pytest.mark.parametrize(
    ("failure", "outcome"), [(NodeGoneError("gone"), "gone"), (RefusedError("no"), "refused")]
)
def test_a_node_that_fails_is_a_miss(harness, failure, outcome):
    request = harness.request(20)
    harness.client.answer = lambda _: failure
    assert harness.side.matched_tokens(request, 0) == (0, False)
    assert harness.side.counts.data == {f"calls/lookup/{outcome}": 1}


@pytest.mark.parametrize(("refused", "outcome"), [(False, "gone"), (True, "refused")])
def test_prompts_without_a_node_are_counted_but_not_loaded_or_saved(harness, refused, outcome):
    harness.links[0].current, harness.links[0].refused = None, refused
    request = harness.request(20)
    assert harness.side.matched_tokens(request, 0) == (0, False)
    harness.side.allocated(request, ([1, 2, 3],), 0)
    assert harness.run(request, 20, [1, 2, 3]).saves == []
    harness.side.on_finished(request)
    assert harness.side.counts.data == {
        f"calls/lookup/{outcome}": 1,
        "prompts": 1,
        "prompt_tokens": 20,
        "prompt_tokens_by_source/computed": 20,
    }


def test_the_load_fills_the_pages_behind_the_local_ones(harness):
    harness.held = 4
    request = harness.request(36)
    assert harness.side.matched_tokens(request, 8) == (24, True)
    harness.side.allocated(request, ([50, 61, 72, 83, 94],), 24)
    work = harness.side.build_work(harness.fakes.step({}))
    (load,) = work.loads
    (blocks,) = load.groups
    assert (load.request, blocks.pages, blocks.first, load.tokens) == ("r", [61, 72, 83], 0, 24)
    assert unpack_keys(blocks.keys[0]) == harness.chain(32).keys[1:]
    harness.side.allocated(request, ([50, 61, 72, 83, 94],), 0)
    assert harness.side.build_work(harness.fakes.step({})).loads == []


def test_a_load_may_begin_and_end_inside_a_block(fakes):
    harness = fakes.SchedulerRig(fakes, page=2)
    harness.held = 4
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 12) == (12, True)
    pages = list(range(100, 115))
    harness.side.allocated(request, (pages,), 12)
    (load,) = harness.side.build_work(fakes.step({})).loads
    (blocks,) = load.groups
    assert blocks.pages == pages[6:12]
    assert blocks.first == 2
    assert unpack_keys(blocks.keys[0]) == harness.chain(24).keys[1:]


def test_blocks_are_saved_in_the_step_that_fills_them(harness):
    request = harness.request(30)
    harness.side.matched_tokens(request, 0)
    (save,) = harness.run(request, 12, [5, 6]).saves
    assert (save.depth, save.pages) == (0, [5])
    assert save.parents[0] == harness.chain(30).fingerprint
    assert harness.run(request, 3, [5, 6]).saves == []
    (save,) = harness.run(request, 15, [5, 6, 7, 8]).saves
    assert (save.depth, save.pages) == (1, [6, 7])
    assert unpack_keys(save.keys[0]) == harness.chain(30).keys[1:]
    assert save.parents[0] == harness.chain(30).keys[0]
    request.all_token_ids += [30, 31, 32]
    (save,) = harness.run(request, 2, [5, 6, 7, 8, 9]).saves
    assert (save.depth, save.pages) == (3, [8])


def test_local_hits_that_the_node_does_not_hold_are_saved_too(harness):
    harness.held = 1
    request = harness.request(30)
    harness.side.matched_tokens(request, 16)
    request.num_computed_tokens = 16
    (save,) = harness.run(request, 8, [5, 6, 7]).saves
    assert (save.depth, save.pages) == (1, [6, 7])


@pytest.mark.parametrize("resumed", [False, True])
def test_pages_that_another_connector_loads_during_a_step_are_not_saved(harness, resumed):
    """It says after the step that it could not load them, and vLLM computes them again."""
    request, other = harness.request(40), harness.request(40, request_id="other")
    for each in (request, other):
        assert harness.side.matched_tokens(each, 0) == (0, False)
    request.num_computed_tokens = 16  # those of the other connector
    pages = {"r": [5, 6, 7, 8, 9], "other": [15, 16, 17, 18, 19]}
    step = harness.fakes.step(pages, r=8, other=16)
    step.has_sync_kv_loads = True
    step.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in ("r", "other")[resumed:]]
    step.scheduled_cached_reqs = SimpleNamespace(resumed_req_ids={"r"} if resumed else set())
    assert {save.request for save in harness.side.build_work(step).saves} == {"other"}
    request.num_computed_tokens, other.num_computed_tokens = 24, 16
    saves = harness.side.build_work(harness.fakes.step(pages, r=16, other=8)).saves
    assert {save.request for save in saves} == {"other"}


def test_a_block_is_saved_only_when_its_tokens_are_known(harness):
    request = harness.request(15)
    harness.side.matched_tokens(request, 0)
    harness.run(request, 15, [5, 6])
    assert harness.run(request, 4, [5, 6, 7]).saves == []  # drafts, or steps ahead of their tokens
    request.all_token_ids += [15]
    request.num_computed_tokens = 15
    (save,) = harness.run(request, 1, [5, 6, 7]).saves
    assert (save.depth, save.pages) == (1, [6])


def test_a_preempted_request_asks_again_and_saves_from_its_new_pages(harness):
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (0, False)
    harness.run(request, 20, [5, 6, 7])
    request.num_preemptions, request.num_computed_tokens = 1, 0
    request.all_token_ids += [30, 31, 32]
    harness.held = 1
    assert harness.side.matched_tokens(request, 0) == (8, True)
    assert len(unpack_keys(harness.client.of(Cover)[-1].keys)) == 4
    harness.side.allocated(request, ([15, 16],), 8)
    request.num_computed_tokens = 8
    work = harness.run(request, 16, [15, 16, 17])
    assert work.loads[0].groups[0].pages == [15]
    assert (work.saves[0].depth, work.saves[0].pages) == (1, [16, 17])


def test_a_request_with_a_failed_load_computes_and_saves_its_blocks(harness):
    harness.held = 3
    request = harness.request(30)
    harness.side.matched_tokens(request, 0)
    harness.side.allocated(request, ([5, 6, 7, 8],), 24)
    harness.side.build_work(harness.fakes.step({}))
    harness.side.on_worker_output(harness.fakes.outcome(invalid=[6, 7]))
    harness.side.on_worker_output(harness.fakes.outcome(ended=["r"]))
    request.num_computed_tokens = 8
    (save,) = harness.run(request, 22, [5, 6, 7, 8]).saves
    assert (save.depth, save.pages) == (1, [6, 7])
    assert harness.side.matched_tokens(request, 0) == (0, False)


def test_a_load_that_failed_completely_is_not_retried(harness):
    harness.held = 3
    request = harness.request(30)
    harness.side.matched_tokens(request, 0)
    harness.side.allocated(request, ([5, 6, 7, 8],), 24)
    harness.side.on_worker_output(harness.fakes.outcome(ended=["r"], invalid=[5, 6, 7]))
    assert harness.side.matched_tokens(request, 0) == (0, False)
    assert harness.side.matched_tokens(request, 8) == (0, False)


@pytest.mark.parametrize("landed", [0, 1, 2, 3])
def test_a_request_with_a_failed_load_is_counted_once_by_loaded_blocks(harness, landed):
    harness.held = 3
    request = harness.request(30)
    harness.side.matched_tokens(request, 0)
    harness.side.allocated(request, ([5, 6, 7, 8],), 24)
    blocks = {"disk": landed} if landed else {}
    said = WorkerReport(landed={"r": blocks})
    failed = [5, 6, 7][landed:]
    harness.side.on_worker_output(harness.fakes.outcome(["r"], failed, said))
    local = 0
    if not landed:  # vLLM admits it again, and finds a page that another request left
        local = 8
        assert harness.side.matched_tokens(request, local) == (0, False)
        harness.side.allocated(request, ([5, 6, 7, 8],), 0)
    request.num_computed_tokens = local + 8 * landed
    harness.run(request, 30 - request.num_computed_tokens, [5, 6, 7, 8])
    harness.side.on_finished(request)
    prompts = [prompt for report in harness.client.of(Observed) for prompt in report.prompts]
    loaded = {"disk": 8 * landed} if landed else {}
    assert prompts == [(30, local, loaded)]
    assert harness.side.counts.data["prompt_tokens_by_source/computed"] == 22 - 8 * landed + (
        0 if local else 8
    )


def test_an_aborted_request_counts_its_computed_tokens(harness):
    requests = [harness.request(30, request_id=name) for name in ("computed", "waiting")]
    for request in requests:
        harness.side.matched_tokens(request, 0)
        harness.side.allocated(request, ([5, 6, 7, 8],), 0)
    harness.run(requests[0], 12, [5, 6, 7, 8])
    for request in requests:
        harness.side.on_finished(request)
    counted = {name: n for name, n in harness.side.counts.data.items() if "prompt" in name}
    assert counted == {
        "prompts": 1,
        "prompt_tokens": 12,
        "prompt_tokens_by_source/computed": 12,
    }


@pytest.mark.parametrize(
    ("loads", "counted"),
    [(True, {"host": 24, "computed": 6}), (False, {"computed": 30})],
)
def test_two_nodes_of_one_engine_count_a_prompt_once(fakes, loads, counted):
    """With MultiConnector vLLM tells both sides of each request, and one of them loads."""
    ledger = PromptLedger()
    near, far = (fakes.SchedulerRig(fakes, ledger=ledger) for _ in range(2))
    near.links[0].current = None
    far.held = 3 if loads else 0
    request = fakes.Request(tokens=range(30), kv_transfer_params={"holdfast": {"chat": 1}})
    both = near, far
    for rig in both:
        rig.side.on_new_request(request)
    external = [rig.side.matched_tokens(request, 0)[0] for rig in both]
    assert external == [0, 24 if loads else 0]
    for rig, tokens in zip(both, external, strict=True):
        rig.side.allocated(request, ([5, 6, 7, 8],), tokens)
    if loads:
        request.num_computed_tokens = 24
        for rig, said in zip(both, (None, WorkerReport(landed={"r": {"host": 3}})), strict=True):
            rig.side.on_worker_output(fakes.outcome(["r"], said=said))
    step = fakes.step({"r": [5, 6, 7, 8]}, r=30 - request.num_computed_tokens)
    for rig in both:
        rig.side.build_work(step)
    for rig in both:
        rig.side.on_finished(request)
    total = Counter()
    for rig in both:
        total.update(rig.side.counts.data)
    by_source = {f"prompt_tokens_by_source/{name}": n for name, n in counted.items()}
    assert total == by_source | {
        "prompts": 1,
        "prompt_tokens": 30,
        "bad_hints": 1,
        "calls/lookup/ok": 1,
        "calls/lookup/gone": 1,
    }
    told = [prompt for report in far.client.of(Observed) for prompt in report.prompts]
    assert told == [(30, 0, {"host": 24} if loads else {})]


def test_failures_of_other_pages_do_not_touch_a_load(harness):
    harness.held = 3
    request = harness.request(30)
    harness.side.matched_tokens(request, 0)
    harness.side.allocated(request, ([5, 6, 7, 8],), 24)
    harness.side.on_worker_output(harness.fakes.outcome(ended=["r"], invalid=[9]))
    assert harness.side.matched_tokens(request, 0) == (24, True)


def test_a_finished_request_is_forgotten(harness):
    harness.answering = False
    request = harness.request(20)
    harness.side.on_finished(request)
    assert harness.client.forgotten == harness.client.of(Cover)
    assert harness.side.matched_tokens(request, 0) == (0, False)
    harness.side.on_worker_output(harness.fakes.outcome(ended=["r"], invalid=[1]))
    harness.side.on_finished(request)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("prompt_embeds", object(), "embeds"),
        ("prompt_token_ids", None, "embeds"),
        (
            "mm_features",
            [SimpleNamespace(identifier="chosen", modality="image", mm_position=None, data=None)],
            "multimodal",
        ),
        (
            "lora_request",
            SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="/nowhere"),
            "lora",
        ),
        ("resumable", True, "streaming_input"),
    ],
)
def test_requests_whose_kv_depends_on_more_than_tokens_are_declined(harness, field, value, kind):
    request = harness.request(20, **{field: value})
    assert harness.side.matched_tokens(request, 0) == (0, False)
    assert harness.run(request, 20, [1, 2, 3]).saves == []
    assert harness.side.counts.data == {f"declined_requests/{kind}": 1}
    assert harness.client.sent == []


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SimpleNamespace(prompt_logprobs=1), "prompt_logprobs"),
        (SimpleNamespace(prompt_logprobs=None), "skip_reading_prefix_cache"),
        (None, "skip_reading_prefix_cache"),
    ],
)
def test_a_request_that_skips_reading_still_saves_and_does_not_count_as_computed(
    harness, sampling, reason
):
    harness.held = 2
    request = harness.request(20, skip_reading_prefix_cache=True, sampling_params=sampling)
    assert harness.side.matched_tokens(request, 0) == (0, False)
    assert harness.client.sent == []
    (save,) = harness.run(request, 20, [1, 2, 3]).saves
    assert (save.depth, save.pages) == (0, [1, 2])
    harness.side.on_finished(request)
    assert harness.side.counts.data == {f"declined_requests/{reason}": 1}
    assert harness.client.of(Observed) == []


def test_an_engine_with_saving_off_loads_but_saves_nothing(fakes):
    harness = fakes.SchedulerRig(fakes, setting=fakes.setting(saves=False))
    harness.held = 1
    request = harness.request(20)
    assert harness.side.matched_tokens(request, 0) == (8, True)
    request.num_computed_tokens = 8
    assert harness.run(request, 12, [1, 2, 3]).saves == []


def test_a_producer_saves_and_sends_no_lookup(fakes):
    harness = fakes.SchedulerRig(fakes, setting=fakes.setting(loads=False))
    harness.held = 1
    request = harness.request(20)
    assert harness.side.matched_tokens(request, 8) == (0, False)
    harness.side.allocated(request, ([1, 2, 3],), 0)
    request.num_computed_tokens = 8
    assert len(harness.run(request, 12, [1, 2, 3]).saves[0].pages) == 2
    assert harness.client.of(Cover) == []
    assert harness.side.counts.data["prompt_tokens_by_source/computed"] == 12


def test_a_salt_gives_a_request_its_own_keys(harness):
    for salt in ("a", "b", "a", None):
        harness.request(20, cache_salt=salt)
    a, b, again, none = [cover.keys for cover in harness.client.of(Cover)]
    assert a == again
    assert len({a, b, none}) == 3
    assert unpack_keys(a) == harness.chain(16, [b"salt:a"]).keys


def test_a_reset_changes_the_keys_of_all_later_requests(harness):
    harness.held = 2
    before = harness.request(20, request_id="before")
    harness.side.matched_tokens(before, 0)
    harness.side.reset()
    assert harness.side.matched_tokens(before, 0) == (0, False)
    assert harness.run(before, 20, [1, 2, 3]).saves == []
    harness.request(20, request_id="after")
    harness.request(20, request_id="later")
    first, after, later = [cover.keys for cover in harness.client.of(Cover)]
    assert after == later != first


def test_after_an_update_of_weights_the_names_of_blocks_change_once(harness):
    harness.held = 2
    before = harness.request(20, request_id="before")
    harness.side.matched_tokens(before, 0)
    report = WorkerReport(computed=True).aggregate(WorkerReport(computed=True, updates=1))
    harness.side.on_worker_output(harness.fakes.outcome(said=report))
    assert harness.side.matched_tokens(before, 0) == (0, False)
    work = harness.run(before, 20, [1, 2, 3])
    assert (work.saves, work.updates) == ([], 1)
    harness.request(20, request_id="after")
    harness.side.on_worker_output(harness.fakes.outcome(said=report))
    harness.request(20, request_id="later")
    first, after, later = [cover.keys for cover in harness.client.of(Cover)]
    assert after == later != first


def test_sources_add_up_to_the_tokens_loaded(harness):
    request = harness.request(50)
    harness.client.answer = lambda _: Covered(5, 5, {"host": 2, "disk": 3})
    harness.side.matched_tokens(request, 0)
    assert harness.side.sources(request, 40) == {"host": 16, "disk": 24}
    assert harness.side.sources(request, 24) == {"host": 16, "disk": 8}
    harness.client.answer = lambda _: Covered(5, 5, {})
    other = harness.request(50, request_id="other")
    harness.side.matched_tokens(other, 0)
    assert harness.side.sources(other, 40) == {"other": 40}


def test_the_least_covered_of_several_ranks_sets_the_match_count(fakes):
    harness = fakes.SchedulerRig(fakes, ranks=2)
    request = harness.request(30)
    harness.clients[0].answer = lambda _: Covered(3, 3, {"host": 3})
    harness.clients[1].answer = lambda _: None
    assert harness.side.matched_tokens(request, 0) == (None, False)
    harness.clients[1].answer = lambda _: Covered(2, 2, {"disk": 2})
    assert harness.side.matched_tokens(request, 0) == (16, True)
    assert harness.side.sources(request, 16) == {"disk": 16}
    harness.side.allocated(request, ([1, 2, 3],), 16)
    request.num_computed_tokens = 16
    work = harness.run(request, 14, [1, 2, 3, 4])
    assert len(set(work.loads[0].groups[0].keys)) == len(set(work.saves[0].keys)) == 2
    assert harness.clients[0].of(Cover)[0].keys != harness.clients[1].of(Cover)[0].keys


def test_a_gone_node_of_one_rank_withdraws_the_lookups_of_other_ranks(fakes):
    harness = fakes.SchedulerRig(fakes, ranks=2)
    harness.held, harness.clients[1].gone = 3, True
    request = harness.request(30)
    assert harness.side.matched_tokens(request, 0) == (0, False)
    assert harness.side.counts.data["calls/lookup/gone"] == 1
    assert harness.clients[0].forgotten == harness.clients[0].of(Cover) != []


def test_coverage_beyond_the_requested_blocks_is_cut_off(harness):
    request = harness.request(20)
    harness.client.answer = lambda _: Covered(9, 9, {"host": 9})
    assert harness.side.matched_tokens(request, 0) == (16, True)


def test_closing_ends_every_session(fakes):
    harness = fakes.SchedulerRig(fakes, ranks=2)
    harness.side.close()
    assert all(link.closed for link in harness.links)


def test_a_lookup_carries_the_public_domain_keys_of_the_same_blocks(harness):
    harness.client.welcome = msgspec.structs.replace(harness.client.welcome, common_key=b"c" * 32)
    harness.request(20, cache_salt="acme")
    (cover,) = harness.client.of(Cover)
    public = harness.chain(16, domain_key=b"c" * 32)
    assert unpack_keys(cover.common) == public.keys
    assert unpack_keys(cover.keys) == harness.chain(16, [b"salt:acme"]).keys


def test_a_lookup_without_a_public_domain_carries_no_public_keys(harness):
    harness.request(20)
    (cover,) = harness.client.of(Cover)
    assert cover.common == b""


def test_after_a_worker_became_passive_every_request_is_computed(fakes):
    harness = fakes.SchedulerRig(fakes, ranks=2)
    harness.held = 2
    loading, waiting = harness.request(40, request_id="l"), harness.request(40, request_id="w")
    assert harness.side.matched_tokens(loading, 0) == (16, True)
    harness.side.allocated(loading, ([1, 2, 3, 4, 5],), 16)
    reports = WorkerReport(computed=True), WorkerReport(passive=True)
    harness.side.on_worker_output(fakes.outcome(said=reports[0].aggregate(reports[1])))
    assert all(link.closed for link in harness.links)
    assert harness.side.matched_tokens(waiting, 0) == (0, False)
    sent = len(harness.client.sent)
    new = harness.request(40, request_id="n")
    assert harness.side.matched_tokens(new, 0) == (0, False)
    assert harness.run(new, 40, [6, 7, 8, 9, 10]).saves == []
    # The load under way fails on the worker, and vLLM computes its pages.
    failed = fakes.outcome(ended=["l"], invalid=[1, 2], said=WorkerReport(passive=True))
    harness.side.on_worker_output(failed)
    assert harness.side.matched_tokens(loading, 0) == (0, False)
    for request in (loading, waiting, new):
        harness.side.on_finished(request)
    assert len(harness.client.sent) == sent
    assert harness.side.counts.data["calls/lookup/gone"] == 1
