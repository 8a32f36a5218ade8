"""Kimi Delta Attention token by token, as plain as its definition: what every other implementation is compared with.

N tokens of all sequences, one after the other, H heads, K key width, V value width, S sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def kda_reference(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    g_NHK: Tensor,
    beta_NH: Tensor,
    scale: float,
    initial_state_SHKV: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return o [N, H, V] and the last states [S, H, K, V], both in FP32 (FP64 when q is); lengths: tokens of each sequence."""
    dtype = torch.promote_types(q_NHK.dtype, torch.float32)
    inputs = [x.to(dtype).split(list(lengths)) for x in (q_NHK * scale, k_NHK, v_NHV, g_NHK, beta_NH)]
    outputs, states = [], []
    for *sequence, state_HKV in zip(*inputs, initial_state_SHKV.to(dtype).unbind(0), strict=True):
        # Not x[:, t]: the backward of an index writes zeros for the whole of x at each token.
        for q_HK, k_HK, v_HV, g_HK, beta_H in zip(*(x.unbind(0) for x in sequence), strict=True):
            state_HKV = g_HK.exp()[..., None] * state_HKV
            error_HV = v_HV - (k_HK[..., None] * state_HKV).sum(-2)
            state_HKV = state_HKV + k_HK[..., None] * (beta_H[:, None] * error_HV)[:, None]
            outputs.append((q_HK[..., None] * state_HKV).sum(-2))
        states.append(state_HKV)
    o_NHV = torch.stack(outputs) if outputs else v_NHV.to(dtype)
    return o_NHV, torch.stack(states)
