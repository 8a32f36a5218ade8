"""How much better an action was than expected: estimators of advantages as pure functions.

P prompts (groups), G samples per prompt.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MIN_STD = 1e-6
"""Groups whose standard deviation is not above this are not divided by it: what is left there is rounding."""


@dataclass(frozen=True)
class GroupCounts:
    """What a batch of groups holds that nothing can be learned from.

    constant_groups: groups with a usable reward whose usable rewards are all equal. ungraded: members without a usable reward.
    Example: rewards [[1, 1], [0, NaN], [1, 0]], all graded, give `GroupCounts(constant_groups=2, ungraded=1)`.
    """

    constant_groups: int
    ungraded: int


def group_advantage(
    reward_PG: Tensor, graded_PG: Tensor, *, baseline: Literal["mean", "leave_one_out", "none"], scale: Literal["std", "none"]
) -> Tensor:
    """Return the group-relative advantages [P, G] in the type of the rewards, 0 where a member has no usable reward.

    reward_PG: [P, G] floating point, one reward per trajectory. graded_PG: [P, G] bool. A member that is not graded, or whose
    reward is not finite, is in no statistic of its group.
    baseline: subtract the mean of the group, the mean of its other members, or nothing. A group whose rewards are all equal,
    and so a group of one, has advantage exactly 0 under both means.
    scale: divide by the sample standard deviation (n - 1) of the group, unless that is below a floor: `MIN_STD`, or the rounding
    of the rewards themselves where they are large.
    Raises ValueError on other shapes and on an unknown baseline or scale, TypeError on other types.

    Source: GRPO, arXiv 2402.03300, section 4.1; leave-one-out: RLOO, arXiv 2402.14740; without scale: Dr. GRPO, arXiv 2503.20783.
    """
    if baseline not in ("mean", "leave_one_out", "none") or scale not in ("std", "none"):
        raise ValueError(f"baseline must be mean, leave_one_out or none and scale std or none, got {baseline!r} and {scale!r}")
    usable_PG = _usable(reward_PG, graded_PG)
    # In float64 and in two passes: rewards such as 1e6 + 0.1 would lose their variance in a difference of squares.
    value_PG = torch.where(usable_PG, reward_PG, 0).double()
    count_P1 = usable_PG.sum(1, keepdim=True)
    mean_P1 = value_PG.sum(1, keepdim=True) / count_P1.clamp(min=1)
    centered_PG = torch.where(usable_PG & ~_is_constant(value_PG, usable_PG)[:, None], value_PG - mean_P1, 0)
    if baseline == "none":
        advantage_PG = value_PG
    elif baseline == "mean":
        advantage_PG = centered_PG
    else:
        # r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean) * n / (n - 1)
        advantage_PG = centered_PG * count_P1 / (count_P1 - 1).clamp(min=1)
    if scale == "std":
        std_P1 = (centered_PG.square().sum(1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()
        rounding_P1 = 8 * torch.finfo(reward_PG.dtype).eps * value_PG.abs().amax(1, keepdim=True)
        is_divided_P1 = std_P1 > rounding_P1.clamp(min=MIN_STD)
        advantage_PG = advantage_PG / torch.where(is_divided_P1, std_P1, 1)
    return advantage_PG.to(reward_PG.dtype)


def count_groups(reward_PG: Tensor, graded_PG: Tensor) -> GroupCounts:
    """Return how many groups are constant and how many members have no usable reward; arguments as in `group_advantage`."""
    usable_PG = _usable(reward_PG, graded_PG)
    is_constant_P = _is_constant(torch.where(usable_PG, reward_PG, 0), usable_PG) & usable_PG.any(1)
    return GroupCounts(int(is_constant_P.sum()), int((~usable_PG).sum()))


def _usable(reward_PG: Tensor, graded_PG: Tensor) -> Tensor:
    if reward_PG.ndim != 2 or reward_PG.shape != graded_PG.shape or reward_PG.shape[1] == 0:
        raise ValueError(
            f"reward_PG and graded_PG must have one shape [P, G] with G of at least 1, got {list(reward_PG.shape)} and "
            f"{list(graded_PG.shape)}: give one row per group"
        )
    if not reward_PG.is_floating_point() or graded_PG.dtype != torch.bool:
        raise TypeError(f"reward_PG must be floating point and graded_PG bool, got {reward_PG.dtype} and {graded_PG.dtype}: convert them")
    return graded_PG & reward_PG.isfinite()


def _is_constant(value_PG: Tensor, usable_PG: Tensor) -> Tensor:
    """Return [P]: whether no two usable values of a group differ (compared exactly, as 0.1 + 0.1 + 0.1 is not 3 * 0.1)."""
    lowest_P = torch.where(usable_PG, value_PG, torch.inf).amin(1)
    highest_P = torch.where(usable_PG, value_PG, -torch.inf).amax(1)
    return lowest_P >= highest_P
