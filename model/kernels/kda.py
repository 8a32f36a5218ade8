"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692, section 3): the one interface to all implementations.

B rows, T tokens of a row, H heads, K key width, V value width, N sequences: the rows, or what `cu_seqlens` cuts one row into.
"""

import itertools
from typing import Literal, get_args

import torch
from torch import Tensor

from model.kernels.chunk import kda_chunk
from model.kernels.reference import kda_reference

Implementation = Literal["auto", "reference", "chunk"]
MIN_LOG_DECAY = -5.0
"""The lowest log decay of a step for which sixteen steps stay within the range of FP32 and BF16: exp(80) is finite."""

_FUNCTIONS = {"reference": kda_reference, "chunk": kda_chunk}


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return o [B, T, H, V] in v's dtype, and the states after the last token [N, H, K, V] in FP32 when asked for.

    Per head: `S_t = (I - beta k k^T) diag(exp g_t) S_{t-1} + beta k v^T` and `o_t = scale * S_t^T q_t`.

    q, k: [B, T, H, K], of unit length. v: [B, T, H, V]. g: [B, T, H, K], log decay, from MIN_LOG_DECAY to 0 (`bounded_log_decay`
    makes it). beta: [B, T, H], from 0 to 1. scale: K^-0.5 unless given. initial_state: [N, H, K, V] in FP32, zero unless given.
    cu_seqlens: [N + 1] integers, 0 first and T last, which cut the one row (B = 1) into sequences that never see each other.
    Raises ValueError and TypeError for shapes, dtypes and boundaries that do not fit, naming what was got.
    """
    _check(q, k, v, g, beta, initial_state)
    lengths = _lengths(q, cu_seqlens)
    num_heads, key_width, value_width = q.shape[2], q.shape[3], v.shape[3]
    state_shape = (len(lengths), num_heads, key_width, value_width)
    if initial_state is None:
        initial_state = torch.zeros(state_shape, dtype=torch.float32, device=q.device)
    elif initial_state.shape != state_shape:
        raise ValueError(f"initial_state must have the shape [N, H, K, V] = {list(state_shape)}, got {list(initial_state.shape)}")
    function = _FUNCTIONS[choose_implementation(implementation, q.device)]
    q_NHK, k_NHK, v_NHV, g_NHK, beta_NH = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    query_scale = key_width**-0.5 if scale is None else scale
    o_NHV, state_NHKV = function(q_NHK, k_NHK, v_NHV, g_NHK, beta_NH, query_scale, initial_state, lengths)
    return o_NHV.view(v.shape).to(v.dtype), state_NHKV if output_final_state else None


def choose_implementation(implementation: Implementation, device: torch.device) -> Literal["reference", "chunk"]:
    """Return the name of what `auto` stands for on the device, and any other name as it is. Raises ValueError for an unknown one."""
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {', '.join(get_args(Implementation))}, got {implementation!r}")
    return "chunk" if implementation == "auto" else implementation


def bounded_log_decay(z: Tensor, A_log: Tensor, dt_bias: Tensor, g_min: float = MIN_LOG_DECAY) -> Tensor:
    """Return g = g_min * sigmoid(exp(A_log) * (z + dt_bias)) [..., H, K] in FP32: a log decay that lies strictly between g_min and 0.

    z: [..., H, K]. A_log: [H]. dt_bias: [H, K] or [H * K]. Raises ValueError when g_min is not in [MIN_LOG_DECAY, 0). Source: Kimi K3,
    arXiv 2607.24653.
    """
    if not MIN_LOG_DECAY <= g_min < 0:
        raise ValueError(
            f"g_min must be at least {MIN_LOG_DECAY:g} and below 0, got {g_min:g}: sixteen steps of a lower one leave the range of FP32"
        )
    num_heads, key_width = z.shape[-2:]
    return g_min * torch.sigmoid(A_log.float().exp()[:, None] * (z.float() + dt_bias.float().view(num_heads, key_width)))


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None) -> None:
    if q.ndim != 4:
        raise ValueError(f"q must have the shape [B, T, H, K], got {list(q.shape)}")
    expected = {"k": (k, tuple(q.shape)), "g": (g, tuple(q.shape)), "beta": (beta, tuple(q.shape[:3]))}
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must have the shape {list(shape)} to fit q {list(q.shape)}, got {list(tensor.shape)}")
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v must have the shape {[*q.shape[:3], 'V']} to fit q {list(q.shape)}, got {list(v.shape)}")
    for name, tensor in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise TypeError(f"{name} must be float32 or bfloat16, got {tensor.dtype}: the factors of a chunk reach 5.5e34, beyond FP16")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise TypeError(f"initial_state must be float32, got {initial_state.dtype}")


def _lengths(q: Tensor, cu_seqlens: Tensor | None) -> list[int]:
    """Return the number of tokens of each sequence."""
    num_rows, num_tokens = q.shape[:2]
    if cu_seqlens is None:
        return [num_tokens] * num_rows
    if num_rows != 1:
        raise ValueError(f"cu_seqlens cuts one row into sequences, got {num_rows} rows: pack them into one")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1:
        raise TypeError(f"cu_seqlens must be one row of integers, got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}")
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must rise from 0 to the {num_tokens} tokens of the row, got {bounds}")
    return [end - start for start, end in itertools.pairwise(bounds)]
