"""Slow twins of the pure functions: plain loops that a reader can check by eye. Tests compare values and gradients with them."""

import math

import torch
from torch import Tensor


def group_advantage(
    reward_PG: list[list[float]], graded_PG: list[list[bool]], *, baseline: str, scale: str, rounding: float
) -> list[list[float]]:
    """Return group-relative advantages; rounding: relative rounding of the rewards, 8 times which a standard deviation must exceed."""
    advantage_PG = []
    for reward_G, graded_G in zip(reward_PG, graded_PG, strict=True):
        usable = [g for g in range(len(reward_G)) if graded_G[g] and math.isfinite(reward_G[g])]
        rewards = [reward_G[g] for g in usable]
        advantage_G = [0.0] * len(reward_G)
        for g in usable:
            others = [reward_G[other] for other in usable if other != g]
            if baseline == "none":
                value = reward_G[g]
            elif len(set(rewards)) == 1:
                value = 0.0
            elif baseline == "mean":
                value = reward_G[g] - sum(rewards) / len(rewards)
            else:
                value = reward_G[g] - sum(others) / len(others)
            if scale == "std" and len(set(rewards)) > 1:
                mean = sum(rewards) / len(rewards)
                std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
                if std > max(1e-6, 8 * rounding * max(abs(reward) for reward in rewards)):
                    value /= std
            advantage_G[g] = value
        advantage_PG.append(advantage_G)
    return advantage_PG


def clipped_policy_loss(
    logprob_BT: Tensor,
    sampler_logprob_BT: Tensor,
    advantage_BT: Tensor,
    action_mask_BT: Tensor,
    *,
    num_action_tokens: int,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return the clipped surrogate loss as a scalar, one action token after the other."""
    loss = torch.zeros((), dtype=logprob_BT.dtype)
    for b in range(logprob_BT.shape[0]):
        for t in range(logprob_BT.shape[1]):
            if not action_mask_BT[b, t]:
                continue
            sampler_logprob = sampler_logprob_BT[b, t] if math.isfinite(sampler_logprob_BT[b, t]) else logprob_BT[b, t].detach()
            ratio = torch.exp(logprob_BT[b, t] - sampler_logprob)
            advantage = advantage_BT[b, t]
            clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
            loss = loss - torch.minimum(ratio * advantage, clipped * advantage) / num_action_tokens
    return loss
