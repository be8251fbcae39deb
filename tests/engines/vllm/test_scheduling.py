"""vLLM's scheduling, played at random: blocks must be what their names say, and counts vLLM's."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from holdfast.blocks.key import Chain, unpack_keys
from holdfast.client.timeouts import EngineClocks
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.scheduler import SchedulerSide
from holdfast.engines.vllm.work import GroupHandshake, Handshake, WorkerReport
from holdfast.wire.local.messages import Covered, Observed

PAGE, PER_BLOCK = 2, 2
BLOCK = PAGE * PER_BLOCK
FINGERPRINT = b"f" * 16
SETTING = ConnectorSettings("", "default", 0, "", 0.05, 5.0, saves=True)


class Engine:
    """A scheduler with pages; a page's content is the tuple of tokens up to its end.

    The node is a dict from key to the contents of a block's pages.
    """

    def __init__(self, fakes, draw):
        self.fakes = fakes
        self.draw = draw
        self.node = {}
        self.pages = {}
        self.cached = {}
        self.next_page = 1  # vLLM's page 0 is of no request
        self.waiting, self.loading, self.running = [], [], []
        self.page_ids = {}
        self.loads, self.left = [], False
        # The sources of the KV that a request has, and the first source of each prompt token.
        self.sources, self.first = {}, {}
        self.client = client = fakes.Client(self.cover)
        namespace = Handshake((GroupHandshake(FINGERPRINT, 64, BLOCK, PAGE),))
        self.links = links = [fakes.Link(client)]
        reporter = fakes.Teller(links)
        self.side = SchedulerSide(
            links, [namespace], SETTING, reporter, EngineClocks(*[lambda: 0.0] * 2)
        )
        self.arrived = 0

    def pick(self, low, high):
        return self.draw(st.integers(low, high))

    def cover(self, message):
        keys = unpack_keys(message.keys)
        held = next((i for i, key in enumerate(keys) if key not in self.node), len(keys))
        return Covered(held, held, {"host": held})

    def name(self, tokens):
        chain = Chain(self.fakes.domain_key, FINGERPRINT, BLOCK, {0: []})
        chain.extend(tokens)
        return chain.keys

    def allocate(self, request, tokens):
        ids = self.page_ids[request.request_id]
        while len(ids) * PAGE < tokens:
            ids.append(self.next_page)
            self.next_page += 1

    def compute(self, request, start, stop):
        """Write pages; only their full content has a meaning."""
        ids = self.page_ids[request.request_id]
        tokens = request.all_token_ids
        for at in range(start // PAGE, stop // PAGE):
            prefix = tuple(tokens[: (at + 1) * PAGE])
            assert self.pages.setdefault(ids[at], prefix) == prefix
            self.cached.setdefault(prefix, ids[at])

    def arrive(self):
        # Three documents that share beginnings.
        kind, length = self.pick(0, 2), self.pick(1, 30)
        tokens = [1000 + i if i < 10 else 1000 * (kind + 1) + i for i in range(length)]
        request = self.fakes.Request(f"r{self.arrived}", tokens)
        self.arrived += 1
        self.page_ids[request.request_id] = []
        self.first[request.request_id] = [None] * length
        self.side.on_new_request(request)
        self.waiting.append(request)

    def lose(self):
        """The node evicts a block."""
        if self.node:
            del self.node[sorted(self.node)[self.pick(0, len(self.node) - 1)]]

    def preempt(self):
        if self.running:
            request = self.running.pop(self.pick(0, len(self.running) - 1))
            request.num_preemptions += 1
            request.num_computed_tokens = 0
            self.page_ids[request.request_id] = []
            self.waiting.append(request)

    def finish(self):
        if self.running:
            self.side.on_finished(self.running.pop())

    def abort(self):
        """End a request that waits or loads; the load goes on, and ends with the next step."""
        if self.waiting or self.loading:
            waits = self.waiting or [request for request, _ in self.loading]
            request = waits[self.pick(0, len(waits) - 1)]
            self.waiting = [each for each in self.waiting if each is not request]
            self.loading = [pair for pair in self.loading if pair[0] is not request]
            self.side.on_finished(request)

    def leave(self):
        """The node goes away, or comes back."""
        (link,) = self.links
        link.current = None if link.current else self.client
        self.left = True

    def evict(self):
        """The engine's own prefix cache keeps only beginnings."""
        kept = self.pick(0, 12)
        self.cached = {prefix: page for prefix, page in self.cached.items() if len(prefix) <= kept}

    def step(self):
        scheduled = {}
        for request in self.running:
            done = request.num_computed_tokens
            if done >= request.num_tokens:
                request.all_token_ids.append(self.pick(1, 3))
            scheduled[request.request_id] = self.pick(1, request.num_tokens - done)
        for request in list(self.waiting):
            if self.admit(request):
                left = request.num_tokens - request.num_computed_tokens
                scheduled[request.request_id] = self.pick(1, left)
        requests = {request.request_id: request for request in self.running}
        for name, count in scheduled.items():
            self.allocate(requests[name], requests[name].num_computed_tokens + count)
        work = self.side.build_work(self.fakes.step(self.page_ids, **scheduled))
        for name, count in scheduled.items():
            start = requests[name].num_computed_tokens
            self.compute(requests[name], start, start + count)
        for save in work.saves:
            self.check_save(save, requests[save.request])
        for name, count in scheduled.items():
            requests[name].num_computed_tokens += count
            self.note_sources(name, count)
        self.load(self.loads)
        self.loads = self.load(work.loads) if self.pick(0, 1) else work.loads

    def admit(self, request):
        """Schedule a waiting request, as vLLM does; True if it runs in this step."""
        if not request.num_computed_tokens:
            local = 0
            ids = []
            while (local + 1) * PAGE < request.num_tokens:
                page = self.cached.get(tuple(request.all_token_ids[: (local + 1) * PAGE]))
                if page is None:
                    break
                ids.append(page)
                local += 1
            external, later = self.side.matched_tokens(request, local * PAGE)
            if external is None:  # another request loads the same blocks
                assert self.loading
                return False
            assert later == (external > 0)
            assert external % PAGE == 0
            assert local * PAGE + external < request.num_tokens
            self.page_ids[request.request_id] = ids
            self.sources[request.request_id] = ["engine"] * (local * PAGE)
            request.num_computed_tokens = local * PAGE + external
            self.allocate(request, request.num_computed_tokens)
            self.side.allocated(request, (self.page_ids[request.request_id],), external)
            if external:
                self.waiting.remove(request)
                self.loading.append((request, local * PAGE))
                return False
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def note_sources(self, name, count):
        sources, first = self.sources[name], self.first[name]
        sources += ["computed"] * count
        first[:] = [
            was or (sources[at] if at < len(sources) else None) for at, was in enumerate(first)
        ]

    def check_save(self, save, request):
        names = self.name(request.all_token_ids)
        keys = unpack_keys(save.keys[0])
        assert keys == names[save.depth : save.depth + len(keys)]
        assert save.parents[0] == (names[save.depth - 1] if save.depth else FINGERPRINT)
        for at, key in enumerate(keys):
            content = [
                self.pages[page] for page in save.pages[at * PER_BLOCK : (at + 1) * PER_BLOCK]
            ]
            end = (save.depth + at + 1) * BLOCK
            assert content == [
                tuple(request.all_token_ids[: end - PAGE]),
                tuple(request.all_token_ids[:end]),
            ]
            if self.links[0].current:
                self.node[key] = content

    def load(self, loads):
        """Carry out every load; what the node lost meanwhile fails. Return that none is left."""
        for load in loads:
            loading = [pair for pair in self.loading if pair[0].request_id == load.request]
            if not loading:  # it was aborted
                said = WorkerReport(landed={load.request: {"host": 1}})
                self.side.on_worker_output(self.fakes.outcome([load.request], said=said))
                continue
            ((request, local),) = loading
            (task,) = load.groups
            contents, blocks = [], 0
            for key in unpack_keys(task.keys[0]):
                if key not in self.node or not self.links[0].current:
                    break
                contents += self.node[key]
                blocks += 1
            contents = contents[task.first :][: len(task.pages)]
            for at, (page, content) in enumerate(zip(task.pages, contents, strict=False)):
                assert content == tuple(request.all_token_ids[: local + (at + 1) * PAGE])
                assert self.pages.setdefault(page, content) == content
                self.cached.setdefault(content, page)
            failed = task.pages[len(contents) :]
            self.sources[load.request] += ["host"] * (len(contents) * PAGE)
            said = WorkerReport(landed={load.request: {"host": blocks} if blocks else {}})
            self.side.on_worker_output(self.fakes.outcome([load.request], failed, said))
            self.loading.remove((request, local))
            if failed:
                request.num_computed_tokens = local + len(contents) * PAGE
                if not request.num_computed_tokens:
                    self.page_ids[load.request] = []
            self.waiting.insert(0, request)
        return []


@given(st.data())
def test_no_block_is_saved_or_loaded_under_a_wrong_key(fakes, data):
    engine = Engine(fakes, data.draw)
    actions = [engine.arrive, engine.step, engine.step, engine.step, engine.lose,
               engine.preempt, engine.finish, engine.evict, engine.abort,
               engine.leave]  # fmt: skip
    engine.arrive()
    for _ in range(data.draw(st.integers(5, 40))):
        data.draw(st.sampled_from(actions))()
    while engine.waiting or engine.running or engine.loading:
        engine.step()
        engine.finish()
    check_counts(engine)


def check_counts(engine):
    """Every prompt token is counted once, by its first source; the node hears the same."""
    first = Counter(source for sources in engine.first.values() for source in sources if source)
    counts = engine.side.counts.data
    by_source = "prompt_tokens_by_source/"
    counted = {
        name.removeprefix(by_source): number
        for name, number in counts.items()
        if name.startswith(by_source)
    }
    assert counted == first
    assert counts.get("prompt_tokens", 0) == first.total()
    assert counts.get("prompts", 0) == sum(any(each) for each in engine.first.values())
    prompts = [prompt for report in engine.client.of(Observed) for prompt in report.prompts]
    if not engine.left:
        assert sum(tokens for tokens, _, _ in prompts) == first.total()
        assert sum(local for _, local, _ in prompts) == first["engine"]
        assert sum(loaded.get("host", 0) for _, _, loaded in prompts) == first["host"]


def test_a_context_computed_once_is_loaded_by_the_next_request(fakes):
    # The game above would pass if nothing were ever saved: here something is.
    engine = Engine(fakes, lambda _: 30)
    engine.pick = lambda low, high: high
    engine.arrive()
    engine.step()
    assert len(engine.node) == 30 // BLOCK
    engine.cached.clear()
    engine.arrive()
    engine.step()
    assert engine.waiting[0].num_computed_tokens == 28
