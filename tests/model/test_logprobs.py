import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from model.logprobs import action_logprobs, check_head
from tests import references_model

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def tiny_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 11, "initializer_range": 0.3, **SMALL, **changes})).eval()


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)).eval()


def lora_llama() -> PreTrainedModel:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model.eval()


def two_token_model() -> LlamaForCausalLM:
    """A model whose logits are [2, 0] after whatever it reads: its last norm gives a constant, and its head reads that."""
    model = tiny_llama(vocab_size=2, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.model.norm.weight[0] = 1
        model.lm_head.weight[0, 0] = 2
    return model


def logprobs(model, token_ids, action_mask, *, attention_mask=None, temperature=1.0, **options) -> torch.Tensor:
    token_ids_BT = torch.tensor(token_ids)
    attention_mask_BT = torch.ones_like(token_ids_BT, dtype=torch.bool) if attention_mask is None else torch.tensor(attention_mask).bool()
    return action_logprobs(model, token_ids_BT, attention_mask_BT, torch.tensor(action_mask).bool(), temperature=temperature, **options)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.126928), (0.5, -0.018150)])
def test_logits_are_divided_by_the_temperature_before_the_softmax(temperature: float, expected: float) -> None:
    logprob_BT = logprobs(two_token_model(), [[1, 0]], [[0, 1]], temperature=temperature)
    assert logprob_BT.tolist() == [[0.0, pytest.approx(expected, abs=1e-5)]]
    assert expected == pytest.approx(2 / temperature - math.log(math.exp(2 / temperature) + 1), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_equals_the_full_logits_reference_in_value_and_gradient(data: st.DataObject) -> None:
    num_rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 9))
    rows = st.lists(st.lists(st.integers(0, 10), min_size=length, max_size=length), min_size=num_rows, max_size=num_rows)
    masks = st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=num_rows, max_size=num_rows)
    token_ids_BT = torch.tensor(data.draw(rows))
    action_mask_BT = torch.tensor(data.draw(masks))
    action_mask_BT[:, 0] = False
    temperature = data.draw(st.sampled_from([0.5, 1.0, 1.7]))
    weight_BT = torch.randn(token_ids_BT.shape, generator=torch.Generator().manual_seed(0))

    fast, slow = tiny_llama(), tiny_llama()
    attention_mask_BT = torch.ones_like(action_mask_BT)
    fast_BT = action_logprobs(fast, token_ids_BT, attention_mask_BT, action_mask_BT, temperature=temperature, chunk_size=2)
    slow_BT = references_model.action_logprobs(slow, token_ids_BT, action_mask_BT, temperature)
    torch.testing.assert_close(fast_BT, slow_BT, atol=1e-5, rtol=1e-5)
    assert fast_BT.dtype == torch.float32
    if not action_mask_BT.any():
        return
    (fast_BT * weight_BT).sum().backward()
    (slow_BT * weight_BT).sum().backward()
    for (name, ours), theirs in zip(fast.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gpt2, lora_llama])
def test_any_causal_model_and_any_chunk_size_give_the_same(make_model) -> None:
    token_ids, action_mask = [[3, 1, 4, 1, 5, 9, 2, 6]], [[0, 0, 1, 1, 0, 1, 1, 1]]
    expected_BT = references_model.action_logprobs(make_model(), torch.tensor(token_ids), torch.tensor(action_mask), 1.3)
    for chunk_size in (1, 3, 5, 64):
        logprob_BT = logprobs(make_model(), token_ids, action_mask, temperature=1.3, chunk_size=chunk_size)
        torch.testing.assert_close(logprob_BT, expected_BT, atol=1e-5, rtol=1e-5)


def test_under_lora_the_gradient_reaches_the_adapters_only() -> None:
    model = lora_llama()
    logprobs(model, [[3, 1, 4]], [[0, 1, 1]]).sum().backward()
    assert all((parameter.grad is not None) == ("lora_" in name) for name, parameter in model.named_parameters())


def test_a_padded_batch_equals_its_rows_one_by_one() -> None:
    model = tiny_llama()
    long, short = [3, 1, 4, 1, 5, 9], [2, 6, 5]
    batch_BT = logprobs(
        model,
        [long, [*short, 0, 0, 0]],
        [[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]],
        attention_mask=[[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
    )
    torch.testing.assert_close(batch_BT[:1], logprobs(model, [long], [[0, 0, 1, 1, 0, 1]]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch_BT[1:, :3], logprobs(model, [short], [[0, 1, 1]]), atol=1e-5, rtol=1e-5)
    assert batch_BT[1, 3:].tolist() == [0, 0, 0]


def test_the_head_sees_positions_before_action_tokens_only_and_never_more_than_a_chunk() -> None:
    model = tiny_llama()
    num_rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: num_rows.append(len(inputs[0])))
    with torch.no_grad():
        logprobs(model, [[3, 1, 4, 1, 5, 9, 2, 6]], [[0, 0, 1, 1, 0, 1, 1, 1]], chunk_size=2)
    assert num_rows == [2, 2, 1]


def test_a_batch_without_action_tokens_is_zero() -> None:
    assert logprobs(tiny_llama(), [[3, 1]], [[0, 0]]).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": math.nan}, "temperature must be above 0"),
        ({"action_mask": [[1, 1, 0]]}, "first token of a sequence cannot be an action token"),
        ({"action_mask": [[0, 1]]}, "must have one shape"),
        ({"attention_mask": [[0, 1, 1]]}, "padded on the right"),
        ({"attention_mask": [[1, 0, 1]]}, "padded on the right"),
        ({"attention_mask": [[1, 0, 0]]}, "got one in the padding"),
    ],
)
def test_what_has_no_log_prob_is_refused(change: dict, message: str) -> None:
    arguments = {"token_ids": [[3, 1, 4]], "action_mask": [[0, 1, 0]], **change}
    with pytest.raises(ValueError, match=message):
        logprobs(tiny_llama(), **arguments)


def test_a_model_whose_logits_are_its_head_on_its_last_state_passes_the_check() -> None:
    for model in (tiny_llama(), tiny_gpt2(), lora_llama(), tiny_llama(tie_word_embeddings=True).bfloat16()):
        check_head(model)


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(vocab_size=11, head_dim=8, final_logit_softcapping=0.01, initializer_range=0.3, **SMALL)),
        GraniteForCausalLM(GraniteConfig(vocab_size=11, logits_scaling=8.0, initializer_range=0.3, **SMALL)),
    ],
    ids=["softcapping", "scaling"],
)
def test_a_model_that_changes_its_logits_afterwards_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="it scales or caps them, which is not supported"):
        check_head(model)
