"""The ledger of prompt tokens against an oracle that notes the first source of every token."""

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.prompt_ledger import CountedPrompt, PromptLedger, by_tier, ledger_of


class Play:
    """An engine with two connectors, played at random. `present` has the sources of KV by token.

    The oracle keeps `first`: by request, the source that each token of its prompt had first.
    """

    def __init__(self, draw):
        self.draw = draw
        self.ledger = PromptLedger()
        self.members = [self.ledger.join(), self.ledger.join()]
        self.requests = []
        self.first = {}
        self.landed = Counter()
        self.arrived = 0

    def pick(self, low, high):
        return self.draw(st.integers(low, high))

    def arrive(self):
        name, tokens = f"r{self.arrived}", self.pick(1, 20)
        self.arrived += 1
        for member in self.members:
            self.ledger.arrived(name)
            self.ledger.opened(member, name, tokens, connected=bool(self.pick(0, 1)))
        self.first[name] = {}
        self.requests.append(SimpleNamespace(name=name, tokens=tokens, present=None, load=None))

    def admit(self, request):
        """Find tokens in the engine's own cache, and perhaps begin a load behind them."""
        for _ in self.members:
            self.ledger.restarted(request.name)
        local = self.pick(0, request.tokens - 1)
        request.present = ["engine"] * local
        planned = self.pick(0, request.tokens - 1 - local)
        if planned:
            member = self.draw(st.sampled_from(self.members))
            self.ledger.loading(member, request.name, local)
            request.load = planned

    def end_load(self, request):
        """End a load of which all, a part or nothing landed, as two ranks report it."""
        tiers = self.draw(
            st.lists(st.sampled_from(["disk", "host"]), max_size=request.load).map(sorted)
        )
        more = Counter(tiers) + Counter(host=self.pick(0, 3))
        for landed in self.draw(st.permutations([Counter(tiers), more])):
            self.ledger.landed(request.name, landed)
        self.landed.update(tiers)
        request.present += tiers
        request.load = None
        if not request.present and self.pick(0, 1):
            request.present = None  # vLLM frees the pages and admits the request again

    def compute(self, request):
        new, context = self.pick(1, 8), len(request.present)
        for _ in self.members:
            self.ledger.scheduled(request.name, context, new)
        request.present += ["computed"] * new
        for at, source in enumerate(request.present[: request.tokens]):
            self.first[request.name].setdefault(at, source)

    def preempt(self, request):
        request.present = None

    def finish(self, request):
        for _ in self.members:
            self.ledger.finished(request.name)
        self.requests.remove(request)

    def act(self):
        if not self.requests or not self.pick(0, 3):
            return self.arrive()
        request = self.draw(st.sampled_from(self.requests))
        if not self.pick(0, 5):
            return self.finish(request)  # perhaps an abort, also in a load
        if request.load:
            return self.end_load(request)
        if request.present is None:
            return self.admit(request)
        return self.compute(request) if self.pick(0, 4) else self.preempt(request)


@given(st.data())
def test_every_token_counts_once_by_its_first_source(data):
    play = Play(data.draw)
    for _ in range(data.draw(st.integers(1, 40))):
        play.act()
    while play.requests:
        play.finish(play.requests[0])
    counted, prompts = Counter(), 0
    for member in play.members:
        for prompt in play.ledger.take(member):
            prompts += 1
            counted += Counter(
                engine=prompt.engine, computed=prompt.computed, total=prompt.tokens, **prompt.loaded
            )
    first = Counter(source for tokens in play.first.values() for source in tokens.values())
    assert prompts == sum(map(bool, play.first.values()))
    assert counted.pop("total", 0) == counted.total() == first.total()
    assert (counted["engine"], counted["computed"]) == (first["engine"], first["computed"])
    assert all(counted[tier] <= play.landed[tier] for tier in ("host", "disk"))


def counted(ledger, *steps, tokens=30):
    """Return the counts of one request after these steps, each a method and its arguments."""
    member = ledger.join()
    ledger.opened(member, "r", tokens, connected=True)
    for name, *arguments in steps:
        getattr(ledger, name)(*arguments)
    return ledger.take(member)


def test_a_load_counts_landed_tokens_by_source_tier():
    steps = [("loading", 0, "r", 8), ("landed", "r", {"disk": 8}), ("scheduled", "r", 16, 14)]
    assert counted(PromptLedger(), *steps) == [CountedPrompt(30, 8, {"disk": 8})]


def test_an_aborted_prompt_counts_what_was_computed():
    steps = [("scheduled", "r", 0, 10), ("finished", "r")]
    assert counted(PromptLedger(), *steps) == [CountedPrompt(10, 0, {})]
    assert counted(PromptLedger(), ("loading", 0, "r", 0), ("finished", "r")) == []


def test_a_prompt_that_is_computed_again_after_a_preemption_counts_once():
    again = [("scheduled", "r", 0, 20), ("restarted", "r"), ("scheduled", "r", 0, 30)]
    assert counted(PromptLedger(), *again) == [CountedPrompt(30, 0, {})]


def test_tokens_loaded_by_another_connector_count_as_the_engines_own():
    assert counted(PromptLedger(), ("scheduled", "r", 20, 10)) == [CountedPrompt(30, 20, {})]


def test_a_prompt_is_reported_by_the_loading_connector_or_the_first_with_a_node():
    ledger = PromptLedger()
    away, near, loads = (ledger.join() for _ in range(3))
    for name in ("loaded", "computed"):
        for member in (away, near, loads):
            ledger.opened(member, name, 10, connected=member != away)
    ledger.loading(loads, "loaded", 0)
    ledger.landed("loaded", {"host": 8})
    ledger.scheduled("loaded", 8, 2)
    ledger.scheduled("computed", 0, 10)
    assert ledger.take(loads) == [CountedPrompt(10, 0, {"host": 8})]
    assert ledger.take(near) == [CountedPrompt(10, 0, {})]
    assert ledger.take(away) == []


def test_connectors_of_one_engine_share_a_ledger():
    ledger = ledger_of("engine-1")
    assert ledger_of("engine-1") is ledger
    assert ledger_of("engine-2") is not ledger
    assert (ledger.arrived("r"), ledger.arrived("r")) == (True, False)


def test_loaded_tokens_are_split_by_tier_and_the_largest_takes_the_rest():
    assert by_tier(40, {"host": 16, "disk": 24}) == {"host": 16, "disk": 24}
    assert by_tier(24, {"host": 16, "disk": 24}) == {"host": 16, "disk": 8}
    assert by_tier(50, {"host": 16, "disk": 24}) == {"host": 16, "disk": 34}
    assert by_tier(40, {}) == {"other": 40}
