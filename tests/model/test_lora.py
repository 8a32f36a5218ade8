import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import LoraConfig
from model.lora import add_lora, base_model, is_lora, merged


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(config).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 1, 4]])).logits


def test_fresh_adapters_change_no_output_and_are_all_that_is_trained() -> None:
    before = logits(tiny_llama())
    model = add_lora(tiny_llama(), LoraConfig(rank=2, target_modules=("q_proj", "up_proj")))
    assert torch.equal(logits(model.eval()), before)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 8
    assert all(".q_proj.lora_" in name or ".up_proj.lora_" in name for name in trained)


def test_adapters_have_no_dropout() -> None:
    model = add_lora(tiny_llama(), LoraConfig(rank=2))
    assert torch.equal(logits(model.train()), logits(model.eval()))


def test_the_base_model_is_the_causal_model_itself() -> None:
    plain = tiny_llama()
    assert base_model(plain) is plain
    assert not is_lora(plain)
    adapted = add_lora(plain, LoraConfig(rank=2))
    assert is_lora(adapted)
    assert base_model(adapted) is plain


def test_merging_makes_a_plain_copy_that_answers_alike() -> None:
    model = add_lora(tiny_llama(), LoraConfig(rank=2)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    copy = merged(model)
    assert type(copy) is LlamaForCausalLM
    torch.testing.assert_close(logits(copy), logits(model), atol=1e-5, rtol=1e-5)
    assert is_lora(model)


def test_a_target_that_names_no_layer_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"query_proj names none: nearest is .*_proj, there are down_proj, gate_proj, k_proj"):
        add_lora(tiny_llama(), LoraConfig(target_modules=("q_proj", "query_proj")))


def test_the_head_gets_no_adapter_because_log_probs_are_read_from_its_weights() -> None:
    with pytest.raises(ValueError, match=r"below its head, lm_head names none"):
        add_lora(tiny_llama(), LoraConfig(target_modules=("lm_head",)))
