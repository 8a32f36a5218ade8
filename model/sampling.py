"""From logits to a sampled token and the log-prob that it was sampled with. R rows, V vocabulary."""

import math

import torch
from torch import Tensor


def sample_tokens(logits_RV: Tensor, temperatures: list[float], uniforms: list[float]) -> tuple[list[int], list[float]]:
    """Return for each row the token at the quantile `uniforms` (in [0, 1)) of softmax(logits / temperature), and its log-prob.

    A token is a function of its own row, whatever the batch, and never one of probability zero. Temperature 0 takes the most likely
    token, with its log-prob at temperature 1. The log-prob is NaN where the logits of the row are not finite.
    """
    temperature_R1 = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits_RV.device)[:, None]
    logprob_RV = torch.log_softmax(logits_RV.float() / temperature_R1, dim=-1)
    # Summed in double precision, so that the tail of a large vocabulary is not rounded away.
    cumulative_RV = logprob_RV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_R1 = cumulative_RV[:, -1:].contiguous()
    target_R1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device)[:, None] * total_R1
    target_R1 = torch.minimum(target_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    # The first token whose cumulative probability exceeds the target: its own is above zero.
    token_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True).clamp_(max=logits_RV.shape[-1] - 1)
    if 0 in temperatures:
        is_greedy_R1 = torch.tensor([temperature == 0 for temperature in temperatures], device=logits_RV.device)[:, None]
        token_R1 = torch.where(is_greedy_R1, logits_RV.argmax(dim=-1, keepdim=True), token_R1)
    # A sum is finite only if all that it adds is; in float32 it has room for any logits that make sense.
    is_finite_R1 = logits_RV.sum(dim=-1, keepdim=True, dtype=torch.float32).isfinite()
    chosen_logprob_R1 = logprob_RV.gather(1, token_R1).masked_fill_(~is_finite_R1, math.nan)
    return token_R1[:, 0].tolist(), chosen_logprob_R1[:, 0].tolist()
