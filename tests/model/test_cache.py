import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM

from model.cache import SlotCache, common_length

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(attention="sdpa", family=(LlamaConfig, LlamaForCausalLM)):
    torch.manual_seed(0)
    config, model = family
    return model(config(**SMALL, max_position_embeddings=64, initializer_range=0.5, attn_implementation=attention)).eval()


def make_cache(num_slots=4, max_tokens=32):
    return SlotCache(LlamaConfig(**SMALL, max_position_embeddings=64), num_slots, max_tokens, dtype=torch.float32, device=CPU)


def forward(model, cache, slots, new_ids):
    """Return the logits of all columns, one row for each slot."""
    call = cache.plan(slots, new_ids)
    logits_RNV = model(
        input_ids=call.input_ids_RN, position_ids=call.position_ids_RN, attention_mask=call.mask_R1NL, past_key_values=cache, use_cache=True
    ).logits
    return logits_RNV if call.rows is None else logits_RNV[call.rows]


def assert_same_as_full_pass(model, cache, slots, new_ids):
    held_ids = {slot: list(cache.token_ids(slot)) for slot in slots}
    logits_RNV = forward(model, cache, slots, new_ids)
    for logits_NV, slot, ids in zip(logits_RNV, slots, new_ids, strict=True):
        expected_TV = model(torch.tensor([held_ids[slot] + list(ids)])).logits[0]
        torch.testing.assert_close(logits_NV[: len(ids)], expected_TV[-len(ids) :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
@torch.no_grad()
def test_rows_of_different_lengths_and_starts_equal_full_passes(attention, family):
    model, cache = make_model(attention, family), make_cache()
    assert_same_as_full_pass(model, cache, [0, 1, 2], [[1, 2, 3, 4, 5], [6], [7, 8, 9]])
    assert_same_as_full_pass(model, cache, [0, 1, 2], [[10], [11], [12]])
    assert_same_as_full_pass(model, cache, [0, 2, 3], [[13], [14, 15, 16, 17], [18, 19]])
    assert_same_as_full_pass(model, cache, [1, 3], [[20], [21]])
    assert_same_as_full_pass(model, cache, [0, 3], [[22], [23]])
    assert_same_as_full_pass(model, cache, [3], [[24]])


def test_a_plan_says_what_each_row_computes_and_sees():
    cache = make_cache()
    cache.plan([0], [[5, 6]])
    call = cache.plan([0, 1], [[7], [8, 9]])
    assert call.input_ids_RN.tolist() == [[7, 0], [8, 9]]
    assert call.position_ids_RN.tolist() == [[2, 0], [0, 1]]
    assert (call.mask_R1NL[:, 0] == 0).tolist() == [[[True, True, True], [True, False, False]], [[True, False, False], [True, True, False]]]
    assert call.rows is None


def test_decoding_reads_a_range_of_slots_and_says_which_rows_were_asked_for():
    cache = make_cache(num_slots=8)
    call = cache.plan([1, 2, 4], [[7], [8], [9]])
    assert call.input_ids_RN.tolist() == [[7], [8], [0], [9]]
    assert call.rows is not None
    assert call.rows.tolist() == [0, 1, 3]
    assert cache.length(3) == 0


def test_decoding_few_slots_far_apart_computes_only_these():
    cache = make_cache(num_slots=8)
    assert cache.plan([0, 7], [[7], [8]]).input_ids_RN.tolist() == [[7], [8]]


@torch.no_grad()
def test_a_row_carried_along_is_not_written():
    model, cache = make_model(), make_cache()
    forward(model, cache, [0, 1, 2], [[1, 2], [3, 4], [5, 6]])
    forward(model, cache, [0, 2], [[7], [8]])
    assert_same_as_full_pass(model, cache, [1], [[9, 10]])


@torch.no_grad()
def test_a_copied_slot_goes_on_as_its_source_and_they_part():
    model, cache = make_model(), make_cache()
    forward(model, cache, [0], [[1, 2, 3, 4]])
    cache.copy(0, 2, 3)
    assert cache.token_ids(2) == (1, 2, 3)
    assert_same_as_full_pass(model, cache, [0, 2], [[5], [6]])
    assert_same_as_full_pass(model, cache, [0, 2], [[7, 8], [9]])


@torch.no_grad()
def test_a_truncated_slot_never_sees_what_it_forgot():
    model, cache = make_model(), make_cache()
    forward(model, cache, [0], [[1, 2, 3, 4, 5, 6]])
    cache.truncate(0, 2)
    assert_same_as_full_pass(model, cache, [0], [[7]])
    cache.copy(0, 0, 1)
    assert cache.token_ids(0) == (1,)
    assert_same_as_full_pass(model, cache, [0], [[8, 9]])


@torch.no_grad()
def test_an_erased_slot_leaves_no_nan_to_the_next_sequence():
    model, cache = make_model(), make_cache()
    good = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.model.embed_tokens.weight.fill_(float("nan"))
    forward(model, cache, [0], [[1, 2, 3]])
    model.load_state_dict(good, strict=False)
    cache.erase(0)
    forward(model, cache, [1], [[1, 2, 3]])
    assert_same_as_full_pass(model, cache, [0, 1], [[4], [5]])


@torch.no_grad()
def test_random_calls_equal_full_passes():
    model, cache, rng = make_model(), make_cache(num_slots=5, max_tokens=24), random.Random(0)
    for _ in range(60):
        slots = sorted(rng.sample(range(5), rng.randint(1, 5)))
        num_new = 1 if rng.random() < 0.5 else 5
        for slot in slots:
            if cache.length(slot) + num_new > 24 or rng.random() < 0.1:
                cache.truncate(slot, rng.randint(0, 4))
        assert_same_as_full_pass(model, cache, slots, [[rng.randrange(48) for _ in range(rng.randint(1, num_new))] for _ in slots])


@pytest.mark.parametrize(
    ("slots", "new_ids", "message"),
    [
        ([1, 0], [[1], [2]], r"must be ascending and at least one, got \[1, 0\]"),
        ([0, 0], [[1], [2]], r"must be ascending and at least one, got \[0, 0\]"),
        ([], [], r"must be ascending and at least one, got \[\]"),
        ([0], [[]], "slot 0 must get 1 to 32 more tokens, got 0: it holds 0 of 32"),
        ([0], [[1] * 33], "slot 0 must get 1 to 32 more tokens, got 33: it holds 0 of 32"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(slots, new_ids, message):
    with pytest.raises(ValueError, match=message):
        make_cache().plan(slots, new_ids)


def test_an_unplanned_call_is_refused():
    with pytest.raises(RuntimeError, match=r"call SlotCache\.plan first"):
        make_model()(
            torch.tensor([[1]]), past_key_values=make_cache(), position_ids=torch.tensor([[0]]), attention_mask=torch.zeros(1, 1, 1, 1)
        )


def make_cache_for(config):
    return SlotCache(config, 2, 32, dtype=torch.float32, device=CPU)


def test_a_window_shorter_than_a_slot_is_refused_and_a_longer_one_is_not():
    with pytest.raises(ValueError, match=r"must attend to all of 32 tokens to be cached in slots, got sliding_attention \(window 16\)"):
        make_cache_for(MistralConfig(**SMALL, sliding_window=16, max_position_embeddings=64))
    make_cache_for(MistralConfig(**SMALL, sliding_window=32, max_position_embeddings=64))


def test_a_slot_longer_than_the_positions_of_the_model_is_refused():
    with pytest.raises(ValueError, match="at most the model's 16 positions, got 32"):
        make_cache_for(LlamaConfig(**SMALL, max_position_embeddings=16))


def test_common_length_counts_the_first_tokens_that_are_the_same():
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2
    assert common_length([3], [1]) == 0
    assert common_length([], [1]) == 0
