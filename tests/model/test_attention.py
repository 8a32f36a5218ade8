import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model.attention import group_attention

CONFIG = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_model(num_key_value_heads, attention="sdpa"):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, num_key_value_heads=num_key_value_heads, attn_implementation=attention)).eval()


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_grouped_attention_equals_that_of_transformers_with_and_without_a_mask(num_key_value_heads):
    model, expected = make_model(num_key_value_heads), make_model(num_key_value_heads)
    group_attention(model)
    token_ids_BT = torch.arange(14).reshape(2, 7)
    padded_BT = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    see_all_B1TT = torch.zeros(2, 1, 7, 7)
    for mask in (None, padded_BT, see_all_B1TT):
        torch.testing.assert_close(model(token_ids_BT, attention_mask=mask).logits, expected(token_ids_BT, attention_mask=mask).logits)


def test_gradients_pass_through_grouped_attention():
    model, expected = make_model(2), make_model(2)
    group_attention(model)
    for candidate in (model, expected):
        candidate(torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor([[1, 1, 0]])).logits[:, :2].sum().backward()
    torch.testing.assert_close(model.model.layers[0].self_attn.k_proj.weight.grad, expected.model.layers[0].self_attn.k_proj.weight.grad)


def test_a_model_with_eager_attention_is_left_alone():
    model = make_model(2, attention="eager")
    group_attention(model)
    assert model.config._attn_implementation == "eager"
