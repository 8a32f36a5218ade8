import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AdvantageConfig
from rl.batch import MicroBatch, TrainingSample, build_samples, micro_batches, minibatches
from rollout.trajectory import Failure, FailureKind, Group, StopReason, Task, Trajectory, TurnRecord

TASK = Task("cairn/Ledger-v0", 17)


def make_trajectory(total: float | None, *, num_turns: int = 1, failure: Failure | None = None) -> Trajectory:
    """Return an episode of `num_turns` turns with one sampled token each; total None: not graded."""
    return Trajectory(
        trajectory_id="t",
        task=TASK,
        member=0,
        attempt=0,
        temperature=1.0,
        token_ids_T=(5, 9, *(31, 11) * num_turns),
        action_mask_T=(False, False, *(True, False) * num_turns),
        sampler_logprob_T=(0.0, 0.0, *(-0.5, 0.0) * num_turns),
        policy_version_T=(-1, -1, *(4, -1) * num_turns),
        turns=(TurnRecord(2, 3, "x"),) * num_turns,
        stop_reason=StopReason.FAILED if failure else StopReason.ANSWERED,
        failure=failure,
        rewards={} if total is None else {"total": total},
    )


def make_sample(length: int, mark: int = 1, advantage: float = 0.5) -> TrainingSample:
    return TrainingSample((mark,) * length, (False,) + (True,) * (length - 1), (-0.5,) * length, advantage)


def advantages(*rewards_by_group, **config):
    groups = [Group(TASK, tuple(make_trajectory(total) for total in rewards)) for rewards in rewards_by_group]
    samples, metrics = build_samples(groups, advantage=AdvantageConfig(**config))
    return [sample.advantage for sample in samples], metrics


def test_a_sample_is_what_was_sampled():
    trajectory = make_trajectory(1.0, num_turns=2)
    samples, _ = build_samples([Group(TASK, (trajectory, make_trajectory(0.0)))], advantage=AdvantageConfig())
    assert samples[0] == TrainingSample(trajectory.token_ids_T, trajectory.action_mask_T, trajectory.sampler_logprob_T, 0.5)


def test_an_episode_of_four_turns_weighs_as_much_in_the_baseline_as_one_of_one_turn():
    group = Group(TASK, (make_trajectory(1.0, num_turns=4), make_trajectory(0.0)))
    samples, _ = build_samples([group], advantage=AdvantageConfig())
    assert [sample.advantage for sample in samples] == [0.5, -0.5]


def test_failed_members_are_in_no_baseline_and_no_sample_and_are_counted():
    members = (
        make_trajectory(1.0),
        make_trajectory(0.0),
        make_trajectory(None, failure=Failure(FailureKind.VERIFIER, "crashed")),
        make_trajectory(0.0, failure=Failure(FailureKind.ENVIRONMENT, "sandbox lost")),
    )
    samples, metrics = build_samples([Group(TASK, members)], advantage=AdvantageConfig())
    assert [sample.advantage for sample in samples] == [0.5, -0.5]
    assert metrics == {"advantage/constant_groups/count": 0, "advantage/ungraded/count": 2}


def test_a_reward_that_is_not_finite_is_masked_and_counted():
    values, metrics = advantages([1.0, 0.0, math.nan, 1.0])
    assert values == [pytest.approx(1 / 3), pytest.approx(-2 / 3), pytest.approx(1 / 3)]
    assert metrics["advantage/ungraded/count"] == 1


def test_a_constant_group_is_counted_and_keeps_its_tokens_in_the_mean():
    values, metrics = advantages([1.0, 1.0, 1.0, 1.0], [1.0, 0.0], scale="std")
    assert values == [0.0] * 4 + [pytest.approx(1 / math.sqrt(2)), pytest.approx(-1 / math.sqrt(2))]
    assert metrics["advantage/constant_groups/count"] == 1


def test_no_groups_and_groups_without_members_give_no_samples():
    expected = [], {"advantage/constant_groups/count": 0, "advantage/ungraded/count": 0}
    assert build_samples([], advantage=AdvantageConfig()) == expected
    assert build_samples([Group(TASK, ())], advantage=AdvantageConfig()) == expected


def test_a_lost_logprob_becomes_nan():
    trajectory = make_trajectory(1.0)
    lost = Trajectory(**{**vars(trajectory), "sampler_logprob_T": (0.0, 0.0, None, 0.0)})
    samples, _ = build_samples([Group(TASK, (lost, make_trajectory(0.0)))], advantage=AdvantageConfig())
    assert math.isnan(samples[0].sampler_logprob_T[2])


def test_rewards_without_a_total_are_refused():
    group = Group(TASK, (Trajectory(**{**vars(make_trajectory(1.0)), "rewards": {"success": 1.0}}),))
    with pytest.raises(ValueError, match="must hold total"):
        build_samples([group], advantage=AdvantageConfig())


def test_a_sample_of_unequal_arrays_or_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="one length"):
        TrainingSample((1, 2), (False, True), (0.0,), 1.0)
    with pytest.raises(ValueError, match="must not be an action"):
        TrainingSample((1, 2), (True, True), (0.0, 0.0), 1.0)


def test_a_sample_has_a_gradient_only_with_an_advantage_and_a_sampled_token():
    assert make_sample(2).has_gradient
    assert not make_sample(2, advantage=0.0).has_gradient
    assert not make_sample(1).has_gradient


def test_samples_are_padded_on_the_right():
    (batch,) = micro_batches([make_sample(2, 7), TrainingSample((8, 9, 9), (False, True, False), (0.0, math.nan, 0.0), -1.0)], 6)
    expected = MicroBatch(
        token_ids_BT=torch.tensor([[8, 9, 9], [7, 7, 0]]),
        attention_mask_BT=torch.tensor([[True, True, True], [True, True, False]]),
        action_mask_BT=torch.tensor([[False, True, False], [False, True, False]]),
        sampler_logprob_BT=torch.tensor([[0.0, math.nan, 0.0], [-0.5, -0.5, 0.0]]),
        advantage_BT=torch.tensor([[-1.0, -1.0, -1.0], [0.5, 0.5, 0.0]]),
    )
    for name, value in vars(expected).items():
        torch.testing.assert_close(getattr(batch, name), value, rtol=0, atol=0, equal_nan=True)


def test_a_sample_beyond_the_bound_is_a_batch_of_its_own():
    batches = micro_batches([make_sample(2), make_sample(9), make_sample(3), make_sample(3)], 6)
    assert [tuple(batch.token_ids_BT.shape) for batch in batches] == [(1, 9), (2, 3), (1, 2)]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=20), max_tokens=st.integers(1, 40))
def test_every_sample_is_in_exactly_one_micro_batch_within_the_bound(lengths, max_tokens):
    samples = [make_sample(length, mark) for mark, length in enumerate(lengths, start=1)]
    batches = micro_batches(samples, max_tokens)
    rows = [
        row for batch in batches for row in zip(batch.token_ids_BT[:, 0].tolist(), batch.attention_mask_BT.sum(1).tolist(), strict=True)
    ]
    assert sorted(rows) == list(enumerate(lengths, start=1))
    assert all(batch.token_ids_BT.numel() <= max_tokens or len(batch.token_ids_BT) == 1 for batch in batches)


@settings(deadline=None)
@given(num_samples=st.integers(0, 20), num_minibatches=st.integers(1, 7), seed=st.integers(0, 1000))
def test_every_sample_is_in_exactly_one_minibatch_of_fair_size(num_samples, num_minibatches, seed):
    samples = [make_sample(2, mark) for mark in range(num_samples)]
    parts = minibatches(samples, num_minibatches, torch.Generator().manual_seed(seed))
    assert sorted(sample.token_ids_T[0] for part in parts for sample in part) == list(range(num_samples))
    assert len(parts) == num_minibatches
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == minibatches(samples, num_minibatches, torch.Generator().manual_seed(seed))
