import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import holdfast
from holdfast.blocks.payload_part import packed_part
from holdfast.client.rank_transfers import RankTransfers
from holdfast.engines.vllm import HoldfastConnector
from holdfast.engines.vllm.counters import ConnectorCounts
from holdfast.engines.vllm.kv_groups import PagedGroup
from holdfast.engines.vllm.weight_updates import WorkerUpdates
from holdfast.engines.vllm.work import GroupHandshake, Handshake, StepWork, WorkerReport
from holdfast.engines.vllm.worker_rank import WorkerRank
from holdfast.errors import ConfigError
from holdfast.wire.local.messages import Cover


def connector(role, policy="recompute", groups=1, kv_role="kv_both", cache=None, **extra):
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra,
        kv_load_failure_policy=policy,
        kv_role=kv_role,
        engine_id="e",
    )
    steps = SimpleNamespace(max_num_batched_tokens=192)
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=steps,
        cache_config=cache,
        model_config=SimpleNamespace(max_model_len=64),
    )
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=object())
    pages = SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=4)
    return HoldfastConnector(config, role, pages)


def fail_without_space(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture
def scheduler():
    return connector(KVConnectorRole.SCHEDULER)


def test_the_connector_supports_hybrid_memory_and_requires_no_kv_delivery(scheduler):
    assert isinstance(scheduler, SupportsHMA)
    assert scheduler.requires_kv_delivery is False


def test_an_unknown_option_stops_the_engine_at_start():
    with pytest.raises(ConfigError, match=r"extra_config\.adress is unknown"):
        connector(KVConnectorRole.WORKER, adress="unix:///x")


def test_an_option_that_contradicts_the_model_stops_the_engine_at_start(monkeypatch):
    group = PagedGroup(("layer",), 32, None)
    monkeypatch.setattr("holdfast.engines.vllm.block_forms.paged_groups", lambda *_: [group])
    monkeypatch.setattr("holdfast.engines.vllm.block_forms.geometry_of", lambda *_: None)
    monkeypatch.setattr("holdfast.engines.vllm.connector.rank_of", lambda _: WorkerRank())
    worker = connector(KVConnectorRole.WORKER, block_tokens=100)
    worker._vllm_config.model_config = None
    with pytest.raises(ConfigError, match=r"extra_config\.block_tokens: 100 .* write 128"):
        worker.register_kv_caches({"layer": torch.zeros(4)})
    with pytest.raises(ConfigError, match="kv_role: 'kv_sender' is unknown"):
        connector(KVConnectorRole.WORKER, kv_role="kv_sender")


def test_records_of_the_engine_client_are_in_vllms_log():
    # vLLM configures its own logger only: records of others have neither time nor level.
    connector(KVConnectorRole.WORKER)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    theirs = logging.getLogger("vllm.holdfast")
    theirs.addHandler(handler)
    try:
        logging.getLogger("holdfast.client.loader").warning("load given up: %s", "gone")
    finally:
        theirs.removeHandler(handler)
    assert [record.getMessage() for record in records] == ["load given up: gone"]


def test_code_below_the_engines_says_nothing_to_one_of_them():
    folders = [
        Path(holdfast.__file__).parent / each for each in ("client", "devices", "wire/local")
    ]
    named = [
        path.name
        for folder in folders
        for path in folder.rglob("*.py")
        if re.search(r"getLogger\((?!__name__\))", path.read_text())
    ]
    assert named == []


def test_a_load_failure_policy_of_fail_is_warned_about_once(caplog):
    connector(KVConnectorRole.WORKER, policy="fail")
    assert "kv_load_failure_policy" not in caplog.text
    connector(KVConnectorRole.SCHEDULER, policy="fail")
    (record,) = [r for r in caplog.records if "kv_load_failure_policy" in r.message]
    assert "recompute" in record.message


def test_an_os_error_at_start_disables_the_cache_but_not_the_engine(caplog, monkeypatch):
    worker = connector(KVConnectorRole.WORKER)
    monkeypatch.setattr("holdfast.engines.vllm.connector.rank_of", fail_without_space)
    worker.register_kv_caches({"layer": torch.zeros(4)})
    assert "Holdfast is off for this engine: [Errno 28] No space left" in caplog.text
    assert worker.get_handshake_metadata().refusal


def replace_parts(monkeypatch, part=b""):
    """Replace what looks at vLLM's pages; return the list of devices that were closed."""
    closed = []
    layout = SimpleNamespace(raw_bytes=64, block_tokens=8, element_bytes=4)
    fingerprint = SimpleNamespace(representation=layout, digest=lambda: b"f" * 16)
    parts = {
        "block_forms": lambda *_: [
            SimpleNamespace(
                group=PagedGroup(("layer",), 8, None),
                pages=None,
                held=("layer",),
                fingerprint=fingerprint,
                portable=None,
                part=part,
                writes=True,
            )
        ],
        "step_blocks_of": lambda *_: 4,
        "open_device": lambda name, *_: SimpleNamespace(close=lambda: closed.append(name)),
    }
    for name, replaced in parts.items():
        monkeypatch.setattr(f"holdfast.engines.vllm.connector.{name}", replaced)
    monkeypatch.setattr("holdfast.engines.vllm.connector.rank_of", lambda _: WorkerRank())
    return closed


def test_a_rank_tells_the_node_which_part_of_each_block_it_writes(monkeypatch):
    hellos = []

    def connect(_address, hello, _answer_s):
        hellos.append(hello)
        return SimpleNamespace(
            address="a", failure="", wait=lambda _: True, close=lambda: None, client=lambda: None
        )

    replace_parts(monkeypatch, part=packed_part([(0, 32)]))
    monkeypatch.setattr("holdfast.engines.vllm.connector.ReconnectingClient", connect)
    monkeypatch.setattr("msgspec.json.encode", lambda _: b"{}")
    worker = connector(KVConnectorRole.WORKER, holdfast="unix:///run/h.sock")
    worker.register_kv_caches({"layer": torch.zeros(4)})
    worker.shutdown()
    assert [hello.part for hello in hellos] == [packed_part([(0, 32)])]


def test_a_node_that_cannot_be_started_leaves_no_device_open(monkeypatch):
    closed = replace_parts(monkeypatch)
    monkeypatch.setattr(
        "holdfast.engines.vllm.connector.HoldfastConnector._connect", fail_without_space
    )
    worker = connector(KVConnectorRole.WORKER)
    worker.register_kv_caches({"layer": torch.zeros(4)})
    assert closed == ["cpu"]
    assert "No space left" in worker.get_handshake_metadata().refusal


def test_an_unsupported_model_runs_without_the_cache_and_with_one_warning(
    caplog, scheduler, fakes, monkeypatch
):
    monkeypatch.setattr("holdfast.engines.vllm.connector.rank_of", lambda _: WorkerRank())
    worker = connector(KVConnectorRole.WORKER, groups=2)
    worker.register_kv_caches({"layer": torch.zeros(4)})
    [warning] = [r.message for r in caplog.records if "is off" in r.message]
    assert warning.startswith(
        "Holdfast is off for this engine: the model has layers of another kind"
    )
    assert "(2 KV cache groups; layers: 2 of object)" in warning
    described = worker.get_handshake_metadata()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): described, (1, 0): described})

    request = fakes.Request(tokens=range(300))
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    assert scheduler.get_external_cache_hit_sources(request, 5) == {}
    work = scheduler.build_connector_meta(fakes.step({}, r=300))
    worker.handle_preemptions(work)
    worker.bind_connector_metadata(work)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("layer")
    worker.save_kv_layer("layer", None, None)
    worker.wait_for_save()
    results = worker.get_transfer_results({"r"})
    assert (results.finished_sending, results.finished_recving) == (set(), set())
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.get_kv_connector_stats() is None
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()
    scheduler.update_connector_output(KVConnectorOutput())
    assert scheduler.request_finished_all_groups(request, ([1],)) == (False, None)
    assert scheduler.request_finished(request, [1]) == (False, None)
    assert scheduler.reset_cache() is True
    for each in (worker, scheduler):
        each.shutdown()
        each.shutdown()


def test_a_failed_load_of_several_groups_fails_as_a_whole(worker):
    named = [GroupHandshake(bytes([n]) * 16, 64, 8, 8, tables=(n,)) for n in range(2)]
    worker._worker.ended = lambda: {"whole", "half"}
    worker._worker.failed_requests = lambda: {"half"}
    worker._worker.failed_pages = lambda: {3}
    for groups, failed, pages in ((named, {"half"}, set()), (named[:1], set(), {3})):
        worker._handshake = Handshake(tuple(groups))
        results = worker.get_transfer_results(set())
        assert (results.finished_recving, results.failed_recving) == ({"whole", "half"}, failed)
        assert worker.get_block_ids_with_load_errors() == pages


def test_stages_with_different_kv_groups_are_refused(caplog, scheduler):
    one, other = (GroupHandshake(b"f" * 16, 64, size, 8) for size in (8, 16))
    scheduler.set_xfer_handshake_metadata({0: Handshake((one,)), 1: Handshake((other,))})
    assert "pipeline stages have different KV groups" in caplog.text
    assert scheduler._scheduler is None


def test_the_scheduler_side_gets_the_size_of_vllms_steps(monkeypatch, scheduler):
    settings, module = [], "holdfast.engines.vllm.connector"
    monkeypatch.setattr(f"{module}.HoldfastConnector._connect", lambda *_: None)
    monkeypatch.setattr(f"{module}.TimingReporter", lambda *_: None)
    monkeypatch.setattr(f"{module}.SchedulerSide", lambda *given: settings.append(given[2]))
    scheduler.set_xfer_handshake_metadata({0: Handshake((GroupHandshake(b"f" * 16, 64, 8, 8),))})
    assert [setting.step_tokens_max for setting in settings] == [192]


@pytest.mark.parametrize(("algorithm", "is_safe"), [("sha256", True), ("xxhash_cbor", False)])
def test_no_save_waits_if_hashes_of_pages_may_collide(monkeypatch, caplog, algorithm, is_safe):
    """A deferred save knows by the hash whether its pages are still those of its block."""
    module, watched, settings = "holdfast.engines.vllm.connector", [], []

    def side(*given):
        settings.append(given[2])
        return SimpleNamespace(watch_pages=lambda *pages: watched.append(pages))

    monkeypatch.setattr(f"{module}.HoldfastConnector._connect", lambda *_: None)
    monkeypatch.setattr(f"{module}.TimingReporter", lambda *_: None)
    monkeypatch.setattr(f"{module}.SchedulerSide", side)
    cache = SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo=algorithm)
    one = connector(KVConnectorRole.SCHEDULER, cache=cache, save="before_eviction")
    one.set_xfer_handshake_metadata({0: Handshake((GroupHandshake(b"f" * 16, 64, 8, 8),))})
    one.bind_gpu_block_pool(object())
    assert [setting.trusts_pages for setting in settings] == [is_safe]
    assert bool(watched) is is_safe
    assert ("--prefix-caching-hash-algo xxhash_cbor may collide" in caplog.text) is not is_safe


def test_a_handshake_of_another_connector_disables_the_cache(caplog, scheduler, fakes):
    scheduler.set_xfer_handshake_metadata({0: object()})
    assert "name HoldfastConnector first" in caplog.text
    request = fakes.Request(tokens=range(300))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.fixture
def worker():
    """A worker of which only the word at the end of a step is real."""
    worker = connector(KVConnectorRole.WORKER)
    side = worker._worker = SimpleNamespace(
        begin=lambda _: None,
        start_loads=lambda _: None,
        save=lambda _: None,
        ended=set,
        failed_pages=set,
        failed_requests=set,
        counts=ConnectorCounts(),
    )
    side._saves, side._moving, side._landed = SimpleNamespace(busy=False), False, {}
    side._passive = False
    side.report = partial(RankTransfers.report, side)
    return worker


def first_runner(worker, step, monkeypatch):
    module = "vllm.v1.worker.kv_connector_model_runner_mixin"
    monkeypatch.setattr(f"{module}.get_kv_transfer_group", lambda: worker)
    monkeypatch.setattr(f"{module}.get_forward_context", lambda: None)
    with KVConnectorModelRunnerMixin._get_kv_connector_output(step) as output:
        pass
    return output


def second_runner(worker, step, monkeypatch):
    monkeypatch.setattr("vllm.v1.worker.gpu.kv_connector.get_forward_context", lambda: None)
    monkeypatch.setattr(
        "vllm.v1.worker.gpu.kv_connector.is_forward_context_available", lambda: True
    )
    runner = object.__new__(ActiveKVConnector)
    runner.kv_connector, runner._disabled = worker, False
    runner.pre_forward(step)
    return runner.post_forward(set())


@pytest.mark.parametrize("runner", [first_runner, second_runner])
def test_a_worker_reports_at_the_end_of_a_step_if_it_ran_a_forward(worker, runner, monkeypatch):
    for tokens, said in ((0, None), (5, WorkerReport(computed=True))):
        step = SimpleNamespace(
            kv_connector_metadata=StepWork(tokens=tokens),
            has_sync_kv_loads=False,
            finished_req_ids=set(),
        )
        assert runner(worker, step, monkeypatch).kv_connector_worker_meta == said


def test_worker_reports_reach_the_scheduler_through_a_multi_connector(worker, scheduler):
    heard = []
    scheduler._scheduler = SimpleNamespace(
        on_worker_output=lambda output: heard.append(output.kv_connector_worker_meta)
    )
    both = object.__new__(MultiConnector)
    for tokens in (0, 5):
        worker.bind_connector_metadata(StepWork(tokens=tokens))
        both._connectors = [connector(KVConnectorRole.WORKER), worker]
        said = both.build_connector_worker_meta()
        both._connectors = [connector(KVConnectorRole.SCHEDULER), scheduler]
        both.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=said and said.aggregate(said))
        )
    assert heard == [None, WorkerReport(computed=True)]


def test_an_idle_engine_continues_to_step_while_blocks_are_being_copied(fakes, scheduler):
    assert not scheduler.has_pending_push_work()
    scheduler._scheduler = fakes.SchedulerRig(fakes).side
    said = [
        None,
        WorkerReport(computed=True),
        WorkerReport().aggregate(WorkerReport(moving=True)),
        WorkerReport(moving=True).aggregate(WorkerReport(computed=True)),
        WorkerReport(),
        WorkerReport(moving=True),
        None,
    ]
    heard = []
    for each in said:
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=each))
        heard.append(scheduler.has_pending_push_work())
    assert heard == [False, False, True, True, False, True, False]


class SavesOfSteps:
    """The transfers of a worker, which note what becomes of the saves of each step."""

    def __init__(self):
        self.ended = []
        self.counts = SimpleNamespace(take=lambda: None)

    def begin(self, work):
        pass

    def save(self, work):
        self.ended.append("saved")

    def abandon_saves(self):
        self.ended.append("abandoned")

    def start_loads(self, work):
        pass

    def failed_pages(self):
        return set()

    def report(self, work):
        return None


def run_step(worker, monkeypatch, forward):
    """Run a step as vLLM does, with this forward."""
    path = "vllm.v1.worker.kv_connector_model_runner_mixin"
    monkeypatch.setattr(f"{path}.get_kv_transfer_group", lambda: worker)
    monkeypatch.setattr(f"{path}.get_forward_context", lambda: None)
    output = SimpleNamespace(
        kv_connector_metadata=StepWork(tokens=64), has_sync_kv_loads=False, finished_req_ids=set()
    )
    with KVConnectorModelRunnerMixin._get_kv_connector_output(output):
        forward()


def test_the_blocks_of_a_step_whose_forward_failed_are_not_saved(worker, monkeypatch, caplog):
    saves = worker._worker = SavesOfSteps()
    monkeypatch.setattr(HoldfastConnector, "get_transfer_results", lambda *_: KVConnectorOutput())

    def fails():
        raise RuntimeError("out of memory")

    run_step(worker, monkeypatch, lambda: None)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_step(worker, monkeypatch, fails)
    assert saves.ended == ["saved", "abandoned"]
    assert "not saved, because it failed: RuntimeError('out of memory')" in caplog.text


def test_a_step_that_is_run_while_an_exception_is_handled_saves_its_blocks(worker, monkeypatch):
    saves = worker._worker = SavesOfSteps()
    monkeypatch.setattr(HoldfastConnector, "get_transfer_results", lambda *_: KVConnectorOutput())
    try:
        raise ValueError("a request of the user's program")
    except ValueError:
        run_step(worker, monkeypatch, lambda: None)
    assert saves.ended == ["saved"]


class RefittedWorker:
    """A worker of vLLM's whose weights can be replaced."""

    def reload_weights(self, path, *, checked=True):
        return path, checked


def test_after_new_weights_a_worker_moves_no_block_until_the_scheduler_knows_of_them(worker):
    moved, save, side = [], object(), worker._worker
    side.begin = lambda work: moved.append(work.saves)
    side.start_loads = lambda _: moved.append("loads")
    side.refuse_loads = lambda _: moved.append("refused")
    worker._updates = WorkerUpdates()
    for _ in range(2):
        worker._updates.watch(RefittedWorker)

    def step(updates):
        work = StepWork(saves=[save], tokens=5, updates=updates)
        worker.bind_connector_metadata(work)
        worker.start_load_kv(None)
        return worker.build_connector_worker_meta()

    assert step(0) == WorkerReport(computed=True)
    assert RefittedWorker().reload_weights("folder", checked=False) == ("folder", False)
    assert [step(known) for known in (0, 0, 1)] == [
        WorkerReport(computed=True, updates=1),
        WorkerReport(computed=True, updates=1),
        WorkerReport(computed=True),
    ]
    assert moved == [[save], "loads", [], "refused", [], "refused", [save], "loads"]


@pytest.mark.parametrize("ended", [True, False])
def test_before_vllm_sleeps_copies_end_or_the_log_says_that_they_go_on(worker, ended, caplog):
    worker._worker.finish_copies = lambda: ended
    worker.unregister_kv_caches()
    assert ("still being copied" in caplog.text) is not ended


def test_tiers_are_mapped_to_the_cache_hit_sources_of_vllm(scheduler):
    scheduler._scheduler = SimpleNamespace(
        sources=lambda _request, _tokens: {"host": 1, "disk": 2, "pool": 3, "object": 4, "": 5}
    )
    assert scheduler.get_external_cache_hit_sources(None, 15) == {
        CacheHitSource.HOST: 1,
        CacheHitSource.DISK: 2,
        CacheHitSource.P2P: 3,
        CacheHitSource.EXTERNAL_UNSPECIFIED: 9,
    }


def test_an_unreachable_node_delays_only_the_start_of_the_engine(
    monkeypatch, caplog, tmp_path, scheduler
):
    monkeypatch.setattr("holdfast.engines.vllm.connector.START_S", 0.05)
    scheduler._setting = scheduler._setting._replace(address=f"unix://{tmp_path}/none.sock")
    scheduler.set_xfer_handshake_metadata(
        {0: Handshake((GroupHandshake(b"f" * 16, 64, 128, 128),))}
    )
    assert "requests are computed until it answers" in caplog.text
    request = SimpleNamespace(request_id="r", skip_reading_prefix_cache=False)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.shutdown()


def test_a_wake_up_keeps_sessions_and_the_names_that_a_reset_changed(monkeypatch, scheduler, fakes):
    """vLLM 0.33 hands over the handshakes of its workers again when it wakes up."""
    nodes = []

    def connect(*_):
        nodes.append(fakes.Client())
        return fakes.Link(nodes[-1])

    monkeypatch.setattr(HoldfastConnector, "_connect", connect)

    def hand_over():
        given = Handshake((GroupHandshake(b"f" * 16, 64, 8, 8),))
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): given})

    def asked(name):
        scheduler.on_new_request(fakes.Request(name, tokens=range(30)))
        return nodes[-1].of(Cover)[-1].keys

    hand_over()
    first = asked("before")
    scheduler.reset_cache()
    changed = asked("reset")
    hand_over()
    assert asked("awake") == changed != first
    assert len(nodes) == 1
    scheduler.shutdown()


def test_a_connector_that_is_off_stays_off_at_a_wake_up(monkeypatch, scheduler, fakes):
    """It may have missed a reset."""
    opened = []
    monkeypatch.setattr(HoldfastConnector, "_connect", fail_without_space)
    given = {0: Handshake((GroupHandshake(b"f" * 16, 64, 8, 8),))}
    scheduler.set_xfer_handshake_metadata(given)
    monkeypatch.setattr(HoldfastConnector, "_connect", lambda *_: opened.append(1))
    scheduler.set_xfer_handshake_metadata(given)
    scheduler.on_new_request(fakes.Request(tokens=range(30)))
    assert opened == []


def test_vllm_may_sleep_with_the_connector(scheduler):
    assert HoldfastConnector.supports_sleep_mode(scheduler._vllm_config.kv_transfer_config)


def test_connectors_of_one_engine_count_a_prompt_once(monkeypatch, tmp_path, fakes):
    """They are what MultiConnector makes of two nodes; here neither node is there."""
    monkeypatch.setattr("holdfast.engines.vllm.connector.START_S", 0.05)
    both = [
        connector(KVConnectorRole.SCHEDULER, holdfast=f"unix://{tmp_path}/{name}.sock")
        for name in ("near", "far")
    ]
    request = fakes.Request(tokens=range(30))
    for each in both:
        each.set_xfer_handshake_metadata({0: Handshake((GroupHandshake(b"f" * 16, 64, 8, 8),))})
        each.on_new_request(request)
    for each in both:
        assert each.get_num_new_matched_tokens(request, 0) == (0, False)
    step = fakes.step({}, r=30)
    for each in both:
        each.build_connector_meta(step)
        each.request_finished(request, [])
    one, other = (each.get_kv_connector_stats() for each in both)
    assert one.aggregate(other).data == {
        "calls/lookup/gone": 2,
        "prompts": 1,
        "prompt_tokens": 30,
        "prompt_tokens_by_source/computed": 30,
    }
    for each in both:
        each.shutdown()
