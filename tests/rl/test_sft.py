import copy
import random
import statistics
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import LoraConfig
from envs.registry import make_env
from model.chat import ChatMLRenderer
from model.loading import Policy, trainable_weights
from model.lora import add_lora
from model.tokenizer import train_tokenizer
from rl.sft import SupervisedExample, oracle_conversations, supervised_fine_tune, training_order
from tests import references_model

LEDGER = "cairn/Ledger-v0"
TOKENIZER = train_tokenizer(["system\nuser\nassistant\ntool\n"], 280)
RENDERER = ChatMLRenderer(TOKENIZER, "none")
EXAMPLES = [
    SupervisedExample((5, 9, 31, 7, 2, 11), (False, False, True, True, True, False)),
    SupervisedExample((5, 31, 2), (False, True, True)),
    SupervisedExample((5, 9, 9, 40, 2), (False, False, False, True, True)),
]


def tiny_policy() -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    return Policy(LlamaForCausalLM(config).eval(), TOKENIZER, RENDERER)


def fine_tune(policy: Policy, examples: list[SupervisedExample], **changes) -> list[dict[str, float]]:
    records: list[dict[str, float]] = []
    options = {"learning_rate": 1e-2, "num_epochs": 1, "batch_size": 3, "seed": 0, "schedule": "constant", "log_every_steps": 1}
    supervised_fine_tune(policy, examples, **{**options, **changes}, report=records.append, show_progress=False)
    return records


def test_an_episode_is_rendered_as_a_rollout_would_and_only_the_turns_are_trained() -> None:
    (example,) = oracle_conversations(LEDGER, {"max_calls": 2}, [17], 0.0, 0, RENDERER)
    text = TOKENIZER.decode(example.token_ids_T)
    assert text.startswith("<|im_start|>system\nYou are a bank clerk")
    env = make_env(LEDGER, {"max_calls": 2})
    env.reset(seed=17)
    turns = [turn.text + "<|im_end|>" for turn in env.oracle() or ()]
    env.close()
    trained = TOKENIZER.decode([token for token, is_action in zip(example.token_ids_T, example.action_mask_T, strict=True) if is_action])
    assert trained == "".join(turns)
    assert text.endswith("<|im_start|>assistant\nDone.<|im_end|>")
    assert text.count("<|im_start|>tool\n") == len(turns) - 1


def test_a_flawed_episode_makes_the_flawed_turns_and_shows_what_the_tools_answer_to_them() -> None:
    (right,) = oracle_conversations(LEDGER, {}, [5], 0.0, 0, RENDERER)
    (wrong,) = oracle_conversations(LEDGER, {}, [5], 1.0, 0, RENDERER)
    assert right != wrong
    assert [wrong] == oracle_conversations(LEDGER, {}, [5], 1.0, 0, RENDERER)
    prompt = right.action_mask_T.index(True)
    assert right.token_ids_T[:prompt] == wrong.token_ids_T[:prompt]


def test_each_seed_draws_other_flaws() -> None:
    first = oracle_conversations(LEDGER, {}, range(20), 0.5, 0, RENDERER)
    second = oracle_conversations(LEDGER, {}, range(20), 0.5, 1, RENDERER)
    assert first != second


def test_the_labels_that_reach_the_model_are_the_action_tokens_and_no_others() -> None:
    policy, seen = tiny_policy(), []
    original = policy.model.model.forward

    def forward(*args, **kwargs):
        seen.append((kwargs["input_ids"].clone(), kwargs["attention_mask"].clone()))
        return original(*args, **kwargs)

    policy.model.model.forward = forward
    (record, *_) = fine_tune(policy, EXAMPLES)
    rows = {
        tuple(token for token, is_real in zip(ids_T, mask_T, strict=True) if is_real)
        for ids_BT, mask_BT in seen
        for ids_T, mask_T in zip(ids_BT.tolist(), mask_BT.tolist(), strict=True)
    }
    assert rows == {example.token_ids_T for example in EXAMPLES}
    assert record["loss"] == pytest.approx(slow_loss(tiny_policy()), abs=1e-5)


def slow_loss(policy: Policy) -> float:
    total, count = 0.0, 0
    for example in EXAMPLES:
        ids_BT, mask_BT = torch.tensor([example.token_ids_T]), torch.tensor([example.action_mask_T])
        total -= references_model.action_logprobs(policy.model, ids_BT, mask_BT, 1.0).sum().item()
        count += sum(example.action_mask_T)
    return total / count


def test_the_gradient_of_a_token_that_is_not_trained_is_zero() -> None:
    one, other = tiny_policy(), tiny_policy()
    fine_tune(one, [SupervisedExample((5, 9, 31, 7), (False, True, False, False))])
    fine_tune(other, [SupervisedExample((5, 9, 40, 8), (False, True, False, False))])
    for (name, left), right in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, msg=name)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=300),
    num_epochs=st.floats(0.01, 4),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 3),
)
def test_each_pass_takes_every_episode_once(lengths: list[int], num_epochs: float, batch_size: int, seed: int) -> None:
    order = training_order(lengths, num_epochs, batch_size, seed)
    counts = Counter(order)
    assert len(order) == max(1, round(num_epochs * len(lengths)))
    assert set(order) <= set(range(len(lengths)))
    assert max(counts.values()) - min(counts[row] for row in range(len(lengths))) <= 1


def test_batches_are_of_like_length_and_come_in_no_order_of_length() -> None:
    rng, batch_size = random.Random(0), 16
    lengths = [rng.randint(1, 500) for _ in range(200 * batch_size)]
    order = training_order(lengths, 1, batch_size, 0)
    batches = [[lengths[row] for row in order[start : start + batch_size]] for start in range(0, len(order), batch_size)]
    assert statistics.fmean(max(batch) - min(batch) for batch in batches) < 20
    means = [statistics.fmean(batch) for batch in batches]
    assert abs(statistics.correlation(means[:-1], means[1:])) < 0.25


def test_the_loss_falls_and_each_record_says_how_far_it_is() -> None:
    records = fine_tune(tiny_policy(), EXAMPLES, num_epochs=20)
    assert (records[0]["step"], records[-1]["step"], records[-1]["num_steps"]) == (1, 20, 20)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert "mean_token_accuracy" in records[0]


def test_the_model_is_left_as_it_was_found_but_for_its_weights() -> None:
    policy = tiny_policy()
    before = copy.deepcopy(policy.model.state_dict())
    fine_tune(policy, EXAMPLES)
    assert "forward" not in vars(policy.model)
    assert not policy.model.training
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert any(not torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())
    assert policy.model(input_ids=torch.tensor([[5, 9]])).logits.shape == (1, 2, len(TOKENIZER))


def test_under_lora_only_the_adapters_move() -> None:
    plain = tiny_policy()
    policy = Policy(add_lora(plain.model, LoraConfig(rank=2)), TOKENIZER, RENDERER)
    before = copy.deepcopy(policy.model.state_dict())
    fine_tune(policy, EXAMPLES, num_epochs=2)
    moved = {name for name, weight in policy.model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == set(trainable_weights(policy.model))


def moved_weights(**changes) -> set[str]:
    policy = tiny_policy()
    before = copy.deepcopy(policy.model.state_dict())
    fine_tune(policy, EXAMPLES, **changes)
    return {name for name, weight in policy.model.state_dict().items() if not torch.equal(weight, before[name])}


HIDDEN_MATRICES = {
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
}


def test_muon_moves_the_hidden_matrices_and_adamw_the_rest() -> None:
    everything = set(tiny_policy().model.state_dict())
    embeddings = {"model.embed_tokens.weight", "lm_head.weight"}
    norms = everything - HIDDEN_MATRICES - embeddings
    assert len(norms) == 3
    assert moved_weights(muon_learning_rate=1e-2, learning_rate=0.0) == HIDDEN_MATRICES
    assert moved_weights(muon_learning_rate=0.0) == embeddings | norms
    assert moved_weights(muon_learning_rate=1e-2) == everything == moved_weights()


def test_the_loss_falls_with_muon_and_its_rate_follows_the_schedule() -> None:
    records = fine_tune(tiny_policy(), EXAMPLES, num_epochs=20, muon_learning_rate=1e-2)
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    # The first step of a warm-up is of rate zero.
    assert moved_weights(muon_learning_rate=1e-2, warmup_steps=1, schedule="linear") == set()


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = tiny_policy(), tiny_policy()
    for policy in (first, second):
        fine_tune(policy, EXAMPLES, batch_size=2, num_epochs=2)
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_no_examples_and_masks_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one example, got none"):
        fine_tune(tiny_policy(), [])
    with pytest.raises(ValueError, match="must have one length, got 2 and 1"):
        SupervisedExample((5, 9), (True,))
