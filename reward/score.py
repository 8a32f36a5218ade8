"""How good a finished trajectory is: its reward by component."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from configs.schema import RewardConfig
from envs.rules import Rule
from reward.compliance import find_violations
from rollout.trajectory import Group, Trajectory


def score_trajectory(trajectory: Trajectory, rules: Sequence[Rule], config: RewardConfig) -> Trajectory:
    """Return the trajectory with its violations and its rewards, such as `{"success": 1.0, "compliance": 0.0, "total": 1.0}`.

    success: 1 when the environment's verifier said so, else 0. compliance: 1 when no rule was broken, else 0. total: their sum,
    weighed by `config`. A failed trajectory, or one that was not verified, says nothing about the policy: it stays without rewards.
    Raises KeyError when a rule names a fact that the environment did not declare.
    """
    if trajectory.failure is not None or trajectory.verification is None:
        return dataclasses.replace(trajectory, rewards={}, violations=())
    violations = find_violations(trajectory, rules)
    success = float(trajectory.verification.success)
    compliance = float(not violations)
    total = config.success_weight * success + config.compliance_weight * compliance
    return dataclasses.replace(trajectory, rewards={"success": success, "compliance": compliance, "total": total}, violations=violations)


def shuffle_rewards(groups: Sequence[Group], generator: np.random.Generator) -> list[Group]:
    """Return the groups with the rewards of their graded trajectories dealt out anew at random, across all groups.

    A control experiment: the rewards of a step keep their distribution and lose their meaning, so that nothing can be learned.
    Trajectories that are not graded stay as they are.
    """
    rewards = [trajectory.rewards for group in groups for trajectory in group.trajectories if trajectory.is_graded]
    shuffled = (rewards[index] for index in generator.permutation(len(rewards)))
    return [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(trajectory, rewards=next(shuffled)) if trajectory.is_graded else trajectory
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]
