import pytest

from configs.load import load_config
from rl.memory import GIB, PROCESS_GIB, plan_memory

QUICKSTART = "quickstart"
NUM_PARAMETERS, VOCABULARY, LAYERS, HIDDEN, FEED_FORWARD = 1_090_432, 2238, 4, 128, 352


def learner_bytes(*overrides: str) -> float:
    return (plan_memory(load_config(QUICKSTART, list(overrides))).learner_gib - PROCESS_GIB) * GIB


def test_the_plan_counts_weights_optimiser_activations_and_logits() -> None:
    plan = plan_memory(load_config(QUICKSTART, ["learner.micro_batch_tokens=8192"]))
    assert plan.num_parameters == plan.num_trained == NUM_PARAMETERS
    weights_gradients_moments = 16 * NUM_PARAMETERS
    activations = 4 * 8192 * LAYERS * (17 * HIDDEN + 4 * FEED_FORWARD)
    logits = 3 * 4 * 4096 * VOCABULARY
    assert (plan.learner_gib - PROCESS_GIB) * GIB == pytest.approx(weights_gradients_moments + activations + logits)


def test_a_warm_start_holds_the_logits_of_a_whole_batch() -> None:
    warm_start = ("warm_start.num_episodes=64", "warm_start.learning_rate=1e-3", "rollout.max_context_tokens=1024")
    small, large = (learner_bytes(*warm_start, f"warm_start.batch_size={size}") for size in (8, 16))
    assert large - small == pytest.approx(8 * 1024 * VOCABULARY * 3 * 4)


def test_adapters_train_little_and_checkpointing_keeps_one_layer() -> None:
    plan = plan_memory(load_config(QUICKSTART, ["model.lora.rank=4"]))
    assert plan.num_trained < plan.num_parameters / 5
    assert learner_bytes("model.gradient_checkpointing=true") < learner_bytes() / 2


def test_the_workers_cache_grows_with_episodes_and_context() -> None:
    def cache_gib(*overrides: str) -> float:
        return plan_memory(load_config(QUICKSTART, list(overrides))).worker_gib - PROCESS_GIB - 4 * NUM_PARAMETERS / GIB

    assert cache_gib("rollout.max_concurrent_episodes=200") == pytest.approx(2 * cache_gib("rollout.max_concurrent_episodes=100"))
    assert cache_gib("rollout.max_context_tokens=1024") == pytest.approx(2 * cache_gib("rollout.max_context_tokens=512"))
