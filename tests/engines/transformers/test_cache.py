"""The cache of a prompt: the model goes on as on its own cache, bit for bit."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from random_models import CONFIGS, answer, model_of, own_cache, prompt_of, tail  # noqa: E402

import holdfast  # noqa: E402
from holdfast.blocks.envelope import HEADER_BYTES  # noqa: E402
from holdfast.errors import BlockError  # noqa: E402
from holdfast.testing.store_view import HOST, StoreView  # noqa: E402

BLOCK, PROMPT, HELD = 32, 170, 160
IDS = prompt_of(1, PROMPT)


def cache_of(model, ids, store, **more):
    return holdfast.transformers.cache(model, ids, store, block_tokens=BLOCK, **more)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_end_of_a_prompt_is_computed_on_a_fetched_cache_as_on_the_models_own(kind, store):
    model = model_of(kind)
    saved = cache_of(model, IDS, store).prefix
    assert (saved.fetched, saved.computed) == (0, HELD)
    assert saved.saved > 0
    fetched = cache_of(model, IDS, store)
    assert (fetched.prefix.fetched, fetched.prefix.computed, fetched.prefix.saved) == (HELD, 0, 0)
    assert fetched.prefix.sources.keys() == {"host"}
    assert torch.equal(tail(model, IDS, fetched), tail(model, IDS, own_cache(model, IDS, HELD)))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_part_that_the_store_lacks_is_computed_after_the_part_that_it_has(kind, store):
    model = model_of(kind)
    cache_of(model, IDS[:, :75], store)
    found = cache_of(model, IDS, store)
    assert (found.prefix.fetched, found.prefix.computed) == (64, HELD - 64)
    own = own_cache(model, IDS, 64)
    with torch.no_grad():
        model(IDS[:, 64:HELD], past_key_values=own)
    right = tail(model, IDS, own)
    assert torch.equal(tail(model, IDS, found), right)
    again = cache_of(model, IDS, store)
    assert again.prefix.fetched == HELD
    assert torch.equal(tail(model, IDS, again), right)


@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_gives_the_same_scores_with_and_without_the_cache(kind, store):
    model = model_of(kind)
    right, right_scores = answer(model, IDS)
    outputs = []
    for fetched in (0, HELD):
        cache = cache_of(model, IDS, store)
        assert cache.prefix.fetched == fetched
        outputs.append(answer(model, IDS, past_key_values=cache))
    (cold, cold_scores), (warm, warm_scores) = outputs
    assert torch.equal(cold_scores, warm_scores)
    assert torch.equal(right, cold)
    assert torch.equal(cold, warm)
    assert (cold_scores - right_scores).abs().max() < 1e-4


@pytest.mark.parametrize("kind", sorted({*CONFIGS} - {"llama4"}))  # transformers 5.19 raises
def test_a_static_cache_goes_on_like_a_dynamic_one(kind, store):
    model = model_of(kind)
    dynamic = answer(model, IDS, past_key_values=cache_of(model, IDS, store))
    cache = cache_of(model, IDS, store, max_cache_len=PROMPT + 4)
    assert cache.prefix.fetched == HELD
    static = answer(model, IDS, past_key_values=cache)
    assert torch.equal(dynamic[0], static[0])
    assert (dynamic[1] - static[1]).abs().max() < 1e-4


def states_of(layer):
    """Yield every state of a layer."""
    if getattr(layer, "keys", None) is not None:
        yield from (layer.keys, layer.values)
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        yield from (state for state in states.values() if state is not None)


def reverse(state):
    state.copy_(state.flip(-1))


def forget(state):
    state.zero_()


@pytest.mark.parametrize("fault", [reverse, forget])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_wrong_state_of_one_layer_is_seen_in_the_log_probabilities(kind, fault, store):
    model = model_of(kind)
    right = tail(model, IDS, cache_of(model, IDS, store)).log_softmax(-1)
    for place in range(4):
        broken = cache_of(model, IDS, store)
        for state in states_of(broken.layers[place]):
            fault(state)
        difference = tail(model, IDS, broken).log_softmax(-1) - right
        assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [1, 32, 33, 64])
def test_a_cache_leaves_at_least_one_token_of_the_prompt_to_compute(tokens, store):
    model, ids = model_of("llama"), IDS[:, :tokens]
    for _ in range(2):
        cache = cache_of(model, ids, store)
        assert cache.get_seq_length() == cache.prefix.tokens == (tokens - 1) // BLOCK * BLOCK
        assert torch.equal(answer(model, ids, past_key_values=cache)[0], answer(model, ids)[0])


def test_the_next_turn_finds_the_answer_that_was_saved(store):
    model = model_of("llama")
    cache = cache_of(model, IDS, store)
    out = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, max_new_tokens=25,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert holdfast.transformers.save(model, out, cache, store, block_tokens=BLOCK) == 1
    turn = torch.cat([out, prompt_of(2, 20)], dim=1)
    cache = cache_of(model, turn, store)
    assert cache.prefix.fetched == 192
    own = answer(model, turn)
    found = answer(model, turn, past_key_values=cache)
    assert torch.equal(own[0], found[0])
    assert (own[1] - found[1]).abs().max() < 1e-4


def test_the_answer_of_a_model_with_windows_is_saved_too(store):
    model = model_of("gemma3")
    cache = cache_of(model, IDS, store)
    out = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, max_new_tokens=25,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert holdfast.transformers.save(model, out, cache, store, block_tokens=BLOCK) > 0
    turn = torch.cat([out, prompt_of(2, 20)], dim=1)
    assert cache_of(model, turn, store).prefix.fetched == 192


def generated(model, ids, cache):
    """Return a prompt and an answer to it, of which a block is full, on a cache of the prompt."""
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=25,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip


def test_an_answer_is_not_saved_from_the_cache_of_several_sequences(store):
    """Rows of a batch have states of their own, and nothing says which row is the answer's."""
    model = model_of("llama")
    cache = cache_of(model, IDS, store)
    cache.batch_repeat_interleave(2)
    out = generated(model, IDS.repeat(2, 1), cache)
    with pytest.raises(BlockError, match="cache: it holds 2 sequences"):
        holdfast.transformers.save(model, out[1:], cache, store, block_tokens=BLOCK)
    turn = torch.cat([out[1:], prompt_of(2, 20)], dim=1)
    assert cache_of(model, turn, store).prefix.fetched == HELD


def test_the_states_of_one_prompt_are_not_saved_as_those_of_another(store):
    model, other = model_of("llama"), prompt_of(3, PROMPT)
    cache_of(model, other, store)
    cache = cache_of(model, IDS, store)
    out = generated(model, IDS, cache)
    mixed = torch.cat([other, out[:, PROMPT:]], dim=1)
    with pytest.raises(BlockError, match="ids: token 0 is not that of the prompt"):
        holdfast.transformers.save(model, mixed, cache, store, block_tokens=BLOCK)
    turn = torch.cat([mixed, prompt_of(2, 20)], dim=1)
    assert cache_of(model, turn, store).prefix.fetched == HELD


def test_the_answer_behind_a_part_of_the_prompt_is_not_saved(store):
    """As after a second use of the cache, for a prompt that differs only at its end."""
    model = model_of("llama")
    cache = cache_of(model, IDS, store)
    out = generated(model, IDS, cache)
    out[0, PROMPT - 1] += 1
    with pytest.raises(BlockError, match=f"ids: token {PROMPT - 1} is not that of the prompt"):
        holdfast.transformers.save(model, out, cache, store, block_tokens=BLOCK)


def test_states_of_earlier_weights_are_not_saved_as_those_of_the_weights_now(store):
    model = model_of("llama")
    cache = cache_of(model, IDS, store)
    out = generated(model, IDS, cache)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.5)
    with pytest.raises(BlockError, match=r"weights or settings.* changed since it was made"):
        holdfast.transformers.save(model, out, cache, store, block_tokens=BLOCK)
    turn = torch.cat([out, prompt_of(2, 20)], dim=1)
    assert cache_of(model, turn, store).prefix.fetched == 0


def test_a_copy_of_a_cache_goes_on_like_the_cache(store):
    model = model_of("llama")
    cache = cache_of(model, IDS, store)
    copied = copy.deepcopy(cache)
    assert torch.equal(tail(model, IDS, cache), tail(model, IDS, copied))


def test_a_node_serves_the_cache_that_another_store_object_saved(node):
    model = model_of("llama")
    with holdfast.open(node.address) as one:
        assert cache_of(model, IDS, one).prefix.saved == HELD // BLOCK
    with holdfast.open(node.address) as other:
        found = cache_of(model, IDS, other)
    assert found.prefix.fetched == HELD
    assert torch.equal(tail(model, IDS, found), tail(model, IDS, own_cache(model, IDS, HELD)))


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_a_recurrent_layer_that_does_not_know_of_its_state_is_seen(kind, store):
    model = model_of(kind)
    right = tail(model, IDS, cache_of(model, IDS, store)).log_softmax(-1)
    broken = cache_of(model, IDS, store)
    broken.layers[0].has_previous_state[0] = False
    assert (tail(model, IDS, broken).log_softmax(-1) - right).abs().max() > 1e-3


def test_a_recurrent_model_resumes_at_the_states_that_were_saved_on_the_way(store):
    model = model_of("lfm2")
    ids = prompt_of(4, 1200)
    assert cache_of(model, ids, store).prefix.tokens == 1184
    branch = torch.cat([ids[:, :1100], prompt_of(5, 50)], dim=1)
    found = cache_of(model, branch, store)
    assert (found.prefix.fetched, found.prefix.computed) == (1024, 96)
    own = own_cache(model, branch, 1024)
    with torch.no_grad():
        model(branch[:, 1024:1120], past_key_values=own)
    assert torch.equal(tail(model, branch, found), tail(model, branch, own))


def test_a_window_model_loads_only_the_blocks_of_its_window(store):
    model = model_of("gemma3")
    cache_of(model, IDS, store)
    found = cache_of(model, IDS, store).prefix
    # All five blocks of the full layer; of the window of 50, the tokens from 111 to 160.
    assert found.sources == {"host": 5 + 2}


def test_a_window_of_which_one_block_is_damaged_is_computed(store):
    """The other blocks of the window do not serve a shorter prefix: it needs an earlier one."""
    model = model_of("mistral")
    cache_of(model, IDS, store)
    view = StoreView(store)
    last = view.copies(HOST)[-1]
    view.record(last.namespace, last.key)[HEADER_BYTES] ^= 1
    cache = cache_of(model, IDS, store)
    assert cache.prefix.fetched == 0
    assert torch.equal(tail(model, IDS, cache), tail(model, IDS, own_cache(model, IDS, HELD)))
