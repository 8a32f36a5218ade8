import io
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import LearnerConfig
from model.logprobs import action_logprobs
from rl.batch import TrainingSample, micro_batches
from rl.learner import Learner, NonFiniteGradientError, learning_rate_factor

NAN = math.nan
TEMPERATURE = 0.5


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64
    )
    return LlamaForCausalLM(config).eval()


def make_config(**changes) -> LearnerConfig:
    return LearnerConfig(**{"num_steps": 10, "learning_rate": 1e-3, **changes})


def make_learner(model: LlamaForCausalLM, **changes) -> Learner:
    config = make_config(**changes)
    return Learner(model, config, temperature=TEMPERATURE, total_steps=config.num_steps, seed=3)


def logprobs(model: LlamaForCausalLM, sample: TrainingSample) -> list[float]:
    (batch,) = micro_batches([sample], 1)
    with torch.no_grad():
        arguments = batch.token_ids_BT, batch.attention_mask_BT, batch.action_mask_BT
        return action_logprobs(model, *arguments, temperature=TEMPERATURE)[0].tolist()


def on_policy(model: LlamaForCausalLM, token_ids, action_mask, advantage) -> TrainingSample:
    """Return a sample whose log-probs are those of the model as it is now."""
    bare = TrainingSample(token_ids, action_mask, (0.0,) * len(token_ids), advantage)
    return TrainingSample(token_ids, action_mask, tuple(logprobs(model, bare)), advantage)


def make_samples(model: LlamaForCausalLM) -> list[TrainingSample]:
    return [
        on_policy(model, (1, 2, 3, 4), (False, True, True, False), 1.0),
        on_policy(model, (5, 6, 7), (False, False, True), -0.5),
        on_policy(model, (1, 9, 8, 7, 6, 5), (False, True, False, True, True, True), 0.25),
        on_policy(model, (2, 2), (False, True), 0.0),
    ]


def weights(model: LlamaForCausalLM) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_positive_advantage_raises_the_logprobs_and_a_negative_one_lowers_them():
    for advantage in (1.0, -1.0):
        model = make_model()
        sample = on_policy(model, (1, 2, 3, 4), (False, True, True, False), advantage)
        make_learner(model).update([sample])
        assert (sum(logprobs(model, sample)) - sum(sample.sampler_logprob_T)) * advantage > 0


def test_on_policy_ratio_is_exactly_one_and_the_gap_zero():
    model = make_model()
    (sample, *_) = make_samples(model)
    metrics = make_learner(model, micro_batch_tokens=1).update([sample])
    assert metrics["loss/ratio/mean"] == 1.0
    assert metrics["loss/clipped_fraction/mean"] == 0.0
    assert metrics["correction/logprob_gap/mean"] == metrics["correction/logprob_gap/p99"] == 0.0
    assert metrics["loss/policy/mean"] == -1.0


def test_the_metrics_say_what_was_learned_from():
    model = make_model()
    metrics = make_learner(model).update(make_samples(model))
    # Eight tokens in the mean, one of them of a sample without advantage: -(2 * 1 - 1 * 0.5 + 4 * 0.25) / 8
    assert metrics["loss/policy/mean"] == pytest.approx(-2.5 / 8)
    assert metrics["learner/tokens/sum"] == 7
    assert metrics["learner/skipped_updates/count"] == 0
    assert metrics["learner/learning_rate/last"] == 1e-3
    assert metrics["loss/grad_norm/max"] > 0


def test_the_gradient_is_the_same_for_every_split_over_micro_batches():
    norms, results = [], []
    for micro_batch_tokens in (1, 8, 100):
        model = make_model()
        learner = make_learner(model, micro_batch_tokens=micro_batch_tokens, max_grad_norm=1e6)
        norms.append(learner.update(make_samples(model))["loss/grad_norm/max"])
        # The first moment after one step is 0.1 * gradient.
        moments = learner.state_dict()["optimizer"]["state"]
        results.append(torch.cat([10 * moments[index]["exp_avg"].flatten() for index in moments]))
    assert norms == [pytest.approx(norms[0], rel=1e-6)] * 3
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-6)


def test_a_sample_without_advantage_dilutes_the_mean_and_is_not_run():
    model = make_model()
    positive = on_policy(model, (1, 2), (False, True), 1.0)
    constant = on_policy(model, (1, 3, 4, 5), (False, True, True, True), 0.0)
    alone = make_learner(make_model(), max_grad_norm=1e6).update([positive])
    diluted = make_learner(make_model(), max_grad_norm=1e6).update([positive, constant])
    assert diluted["loss/grad_norm/max"] == pytest.approx(alone["loss/grad_norm/max"] / 4)
    assert diluted["learner/tokens/sum"] == 1


def test_the_norm_is_reported_before_it_is_clipped():
    model = make_model()
    free = make_learner(make_model(), max_grad_norm=1e6).update(make_samples(model))
    clipped = make_learner(make_model(), max_grad_norm=1e-4).update(make_samples(model))
    assert clipped["loss/grad_norm/max"] == free["loss/grad_norm/max"] > 1e-4


def test_missing_logprobs_are_counted_and_harmless():
    model = make_model()
    sample = on_policy(model, (1, 2, 3), (False, True, True), 1.0)
    lost = TrainingSample(sample.token_ids_T, sample.action_mask_T, (0.0, NAN, sample.sampler_logprob_T[2]), 1.0)
    metrics = make_learner(model, micro_batch_tokens=1).update([lost])
    assert metrics["correction/missing_logprobs/count"] == 1
    assert metrics["loss/ratio/mean"] == 1.0
    assert metrics["learner/skipped_updates/count"] == 0


def test_the_gap_is_over_the_tokens_that_have_both_logprobs():
    model = make_model()
    sample = on_policy(model, (1, 2, 3, 4), (False, True, True, True), 1.0)
    _, first, _, third = sample.sampler_logprob_T
    shifted = TrainingSample(sample.token_ids_T, sample.action_mask_T, (0.0, first - 0.1, NAN, third + 0.3), 1.0)
    metrics = make_learner(model).update([shifted])
    assert metrics["correction/logprob_gap/mean"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["correction/logprob_gap/p99"] == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("num_samples", [0, 1])
def test_without_anything_to_learn_the_policy_stays_and_the_version_grows(num_samples):
    model = make_model()
    learner = make_learner(model, weight_decay=0.1)
    learner.update(make_samples(model))  # leaves momentum behind
    before = weights(model)
    metrics = learner.update([on_policy(model, (2, 2), (False, True), 0.0)] * num_samples)
    assert are_equal(weights(model), before)
    assert learner.version == 2
    assert metrics["learner/tokens/sum"] == 0
    assert math.isnan(metrics["loss/ratio/mean"])
    assert math.isnan(metrics["loss/grad_norm/max"])


def test_each_minibatch_is_an_update_of_its_own():
    model = make_model()
    samples = [sample for sample in make_samples(model) if sample.has_gradient]
    learner = make_learner(model, num_minibatches=3)
    learner.update(samples)
    (step,) = {int(state["step"]) for state in learner.state_dict()["optimizer"]["state"].values()}
    assert (step, learner.version) == (3, 1)


def test_only_parameters_that_require_a_gradient_change():
    model = make_model()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    before = weights(model)
    make_learner(model).update(make_samples(model))
    changed = [not torch.equal(a, b) for a, b in zip(weights(model), before, strict=True)]
    assert changed == [parameter is model.lm_head.weight for parameter in model.parameters()]


def test_a_resumed_learner_makes_bitwise_the_same_update():
    model = make_model()
    samples = make_samples(model)
    learner = make_learner(model, num_minibatches=2, warmup_steps=3, decay="linear")
    learner.update(samples)
    file = io.BytesIO()
    torch.save({"learner": learner.state_dict(), "model": model.state_dict()}, file)
    expected = [learner.update(samples) for _ in range(3)]

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = make_model(seed=1)
    other.load_state_dict(saved["model"])
    resumed = make_learner(other, num_minibatches=2, warmup_steps=3, decay="linear")
    resumed.load_state_dict(saved["learner"])
    assert resumed.version == 1
    assert [resumed.update(samples) for _ in range(3)] == expected
    assert are_equal(weights(other), weights(model))


def test_a_gradient_that_is_not_finite_skips_the_update_and_three_in_a_row_stop():
    model, is_spoiled = make_model(), False
    model.lm_head.weight.register_hook(lambda gradient: gradient * NAN if is_spoiled else gradient)
    learner = make_learner(model)
    samples = make_samples(model)
    learner.update(samples)
    before = weights(model)
    is_spoiled = True
    for _ in range(2):
        metrics = learner.update(samples)
        assert metrics["learner/skipped_updates/count"] == 1
        assert math.isnan(metrics["loss/grad_norm/max"])
    assert are_equal(weights(model), before)

    is_spoiled = False
    assert learner.update(samples)["learner/skipped_updates/count"] == 0
    before = weights(model)
    is_spoiled = True
    learner.update(samples)
    learner.update(samples)
    with pytest.raises(NonFiniteGradientError, match="3 updates in a row"):
        learner.update(samples)
    assert are_equal(weights(model), before)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        Learner(make_model(), make_config(), temperature=temperature, total_steps=10, seed=0)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="requires a gradient"):
        make_learner(make_model().requires_grad_(False))


def test_the_schedule_warms_up_and_then_decays():
    config = make_config(num_steps=7, warmup_steps=3, decay="linear")
    assert [learning_rate_factor(step, 7, config) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    constant = make_config(num_steps=7, warmup_steps=1)
    assert [learning_rate_factor(step, 7, constant) for step in range(3)] == [0.5, 1.0, 1.0]
    assert learning_rate_factor(20, 7, config) == 0.0
    assert learning_rate_factor(3, 3, make_config(num_steps=3, warmup_steps=3, decay="linear")) == 0.0
