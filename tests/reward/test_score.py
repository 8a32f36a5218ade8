import dataclasses

import numpy as np
import pytest

from configs.schema import RewardConfig
from envs.messages import Verification
from envs.rules import RequireBefore
from reward.score import score_trajectory, shuffle_rewards
from rollout.trajectory import CallRecord, Failure, FailureKind, Group, StopReason, Task, Trajectory, TurnRecord

RULES = [RequireBefore("identity first", "verify_identity", ("transfer",))]
CONFIG = RewardConfig(success_weight=1.0, compliance_weight=0.5)


def make_trajectory(*names: str, success: bool | None = True) -> Trajectory:
    calls = tuple(CallRecord(f"call_{i}", name, {}, "", False, False, 0, 0) for i, name in enumerate(names))
    verification = None if success is None else Verification(success)
    turns = (TurnRecord(0, 0, "", calls),)
    return Trajectory("t", Task("e", 0), 0, 0, 1.0, (), (), (), (), turns, StopReason.ANSWERED, verification=verification)


@pytest.mark.parametrize(
    ("names", "success", "rewards"),
    [
        (("verify_identity", "transfer"), True, {"success": 1.0, "compliance": 1.0, "total": 1.5}),
        (("transfer",), True, {"success": 1.0, "compliance": 0.0, "total": 1.0}),
        (("verify_identity",), False, {"success": 0.0, "compliance": 1.0, "total": 0.5}),
        (("transfer",), False, {"success": 0.0, "compliance": 0.0, "total": 0.0}),
    ],
)
def test_the_total_weighs_success_and_compliance(names, success, rewards):
    scored = score_trajectory(make_trajectory(*names, success=success), RULES, CONFIG)
    assert scored.rewards == rewards
    assert [violation.rule for violation in scored.violations] == ([] if rewards["compliance"] else ["identity first"])
    assert scored.is_graded


@pytest.mark.parametrize("kind", list(FailureKind))
def test_a_failed_trajectory_is_never_graded(kind):
    trajectory = dataclasses.replace(make_trajectory("transfer"), failure=Failure(kind, "broke"), rewards={"total": 0.0})
    scored = score_trajectory(trajectory, RULES, CONFIG)
    assert (scored.rewards, scored.violations, scored.is_graded) == ({}, (), False)


def test_a_trajectory_that_was_not_verified_is_not_graded():
    assert score_trajectory(make_trajectory("transfer", success=None), RULES, CONFIG).rewards == {}


def test_the_trajectory_itself_is_left_as_it_was():
    trajectory = make_trajectory("transfer")
    score_trajectory(trajectory, RULES, CONFIG)
    assert (trajectory.rewards, trajectory.violations) == ({}, ())


def test_shuffled_rewards_are_the_same_ones_on_other_trajectories_and_failures_stay_ungraded():
    def graded(total):
        return dataclasses.replace(make_trajectory(), trajectory_id=f"t{total}", rewards={"total": float(total)})

    failed = dataclasses.replace(make_trajectory(success=None), failure=Failure(FailureKind.TIMEOUT, "step"))
    groups = [
        Group(Task("e", 0), (*map(graded, range(5)), failed), (failed,)),
        Group(Task("e", 1), tuple(map(graded, range(5, 10)))),
    ]
    shuffled = shuffle_rewards(groups, np.random.default_rng(0))
    before = [trajectory.rewards for group in groups for trajectory in group.trajectories]
    after = [trajectory.rewards for group in shuffled for trajectory in group.trajectories]
    assert after != before
    assert sorted(rewards["total"] for rewards in after if rewards) == list(range(10))
    assert after[5] == {}
    # The rewards cross the border between groups, and nothing but them changes.
    assert {rewards["total"] for rewards in after[:5]} != set(range(5))
    stripped = [[dataclasses.replace(t, rewards={}) for t in group.trajectories] for group in shuffled]
    assert stripped == [[dataclasses.replace(t, rewards={}) for t in group.trajectories] for group in groups]
    assert [(group.task, group.failed_attempts) for group in shuffled] == [(group.task, group.failed_attempts) for group in groups]


def test_the_same_generator_shuffles_the_same_way():
    group = Group(Task("e", 0), tuple(dataclasses.replace(make_trajectory(), rewards={"total": float(i)}) for i in range(8)))
    assert shuffle_rewards([group], np.random.default_rng(3)) == shuffle_rewards([group], np.random.default_rng(3))


def test_without_graded_trajectories_there_is_nothing_to_shuffle():
    group = Group(Task("e", 0), (make_trajectory(),))
    assert shuffle_rewards([group], np.random.default_rng(0)) == [group]
