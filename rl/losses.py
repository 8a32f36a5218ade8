"""What the optimiser minimises: losses over tokens as pure functions.

B sequences, T tokens. Entry t of any `*_BT` speaks of token t.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Probability ratios are bounded by exp(20), about 5e8, so that nothing overflows; beyond it a token has no gradient."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss to call `backward` on, and sums over the action tokens for metrics (scalar tensors without gradient).

    loss: sum of the token losses / num_action_tokens of the whole optimiser step: add up the parts of a step, never average them.
    num_tokens: action tokens in this part. num_clipped: those whose ratio was clipped, so that they have no gradient.
    num_missing: those without a sampler log-prob, taken as on-policy: their ratio is 1.
    ratio_sum: sum of the probability ratios, learner / sampler. k1_sum, k3_sum: sums of two estimates of KL(sampler || learner)
    from the sampler's tokens, -log(ratio) and ratio - 1 - log(ratio) (http://joschu.net/blog/kl-approx.html).

    Example (two tokens, on policy, advantages 1 and -0.5):
        PolicyLoss(loss=-0.25, num_tokens=2, num_clipped=0, num_missing=0, ratio_sum=2.0, k1_sum=0.0, k3_sum=0.0)
    """

    loss: Tensor
    num_tokens: Tensor
    num_clipped: Tensor
    num_missing: Tensor
    ratio_sum: Tensor
    k1_sum: Tensor
    k3_sum: Tensor


def clipped_policy_loss(
    logprob_BT: Tensor,
    sampler_logprob_BT: Tensor,
    advantage_BT: Tensor,
    action_mask_BT: Tensor,
    *,
    num_action_tokens: int,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Return the clipped surrogate loss, -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) by token, in one part of a step.

    logprob_BT: [B, T] float, being trained. sampler_logprob_BT: [B, T] float, recorded when sampled, without gradient; where it
    is not finite at an action token it is missing, and the token is taken as on-policy (ratio 1, policy gradient without correction).
    advantage_BT: [B, T] float. action_mask_BT: [B, T] bool; whatever stands behind the mask reaches neither loss nor gradient.
    num_action_tokens: action tokens of the whole optimiser step, so that splits over micro-batches and ranks change nothing.
    Raises ValueError on shapes that differ and on a count below 1, TypeError on a mask that is not bool.

    Source: PPO, arXiv 1707.06347, equation 7; two bounds: DAPO, arXiv 2503.14476, equation 10.
    """
    _check_shapes(logprob_BT, sampler_logprob_BT, advantage_BT, action_mask_BT)
    if num_action_tokens < 1:
        raise ValueError(f"num_action_tokens must be at least 1, got {num_action_tokens}: leave out a step without action tokens")
    # Everything behind the mask is replaced before any arithmetic: 0 * NaN is NaN, in the loss and in the gradient.
    logprob_BT = torch.where(action_mask_BT, logprob_BT, 0)
    advantage_BT = torch.where(action_mask_BT, advantage_BT, 0)
    is_known_BT = action_mask_BT & sampler_logprob_BT.isfinite()
    sampler_logprob_BT = torch.where(is_known_BT, sampler_logprob_BT, logprob_BT).detach()

    log_ratio_BT = (logprob_BT - sampler_logprob_BT).clamp(max=MAX_LOG_RATIO)
    ratio_BT = log_ratio_BT.exp()
    is_clipped_BT = ((ratio_BT > 1 + clip_high) & (advantage_BT > 0)) | ((ratio_BT < 1 - clip_low) & (advantage_BT < 0))
    bounded_BT = ratio_BT.detach().clamp(1 - clip_low, 1 + clip_high)
    surrogate_BT = torch.where(is_clipped_BT, bounded_BT, ratio_BT) * advantage_BT
    loss = -surrogate_BT.sum() / num_action_tokens

    with torch.no_grad():
        k3_BT = log_ratio_BT.expm1() - log_ratio_BT
        return PolicyLoss(
            loss=loss,
            num_tokens=action_mask_BT.sum(),
            num_clipped=is_clipped_BT.sum(),
            num_missing=(action_mask_BT & ~is_known_BT).sum(),
            ratio_sum=torch.where(action_mask_BT, ratio_BT, 0).sum(),
            # Behind the mask and where a log-prob is missing, the log-ratio is 0, and so are both estimates.
            k1_sum=-log_ratio_BT.sum(),
            k3_sum=k3_BT.sum(),
        )


def _check_shapes(logprob_BT: Tensor, sampler_logprob_BT: Tensor, advantage_BT: Tensor, action_mask_BT: Tensor) -> None:
    shapes = {
        "logprob_BT": list(logprob_BT.shape),
        "sampler_logprob_BT": list(sampler_logprob_BT.shape),
        "advantage_BT": list(advantage_BT.shape),
        "action_mask_BT": list(action_mask_BT.shape),
    }
    if any(shape != shapes["logprob_BT"] for shape in shapes.values()):
        raise ValueError(f"all arguments of a token loss must have one shape [B, T], got {shapes}")
    if action_mask_BT.dtype != torch.bool:
        raise TypeError(f"action_mask_BT must be bool, got {action_mask_BT.dtype}: compare it with 0 first")
