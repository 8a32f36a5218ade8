"""Kimi Delta Attention in chunks of sixteen tokens, in dense products (Kimi Linear, arXiv 2510.26692, section 4).

N tokens of all sequences, one after the other, S sequences, H heads, K key width, V value width, C chunks of all sequences, L tokens of
a chunk.
Inside a chunk, with G the running sum of g and Gam = exp(G), the factors Gam * K and K / Gam stay finite because sixteen log decays
of -5 add up to -80. Both are anchored at the chunk's start: no token changes the rounding of an earlier one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 16


def kda_chunk(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    g_NHK: Tensor,
    beta_NH: Tensor,
    scale: float,
    initial_state_SHKV: Tensor,
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return o [N, H, V] and the last states [S, H, K, V], both in FP32 (FP64 when q is); lengths: tokens of each sequence.

    The chunks begin at the start of each sequence, so that a sequence can be cut at any multiple of CHUNK without a change.
    """
    dtype = torch.promote_types(q_NHK.dtype, torch.float32)
    layout = _plan(lengths, q_NHK.device)
    q_CHLK, k_CHLK, v_CHLV, g_CHLK, beta_CHL1 = (layout.chunks(x.to(dtype)) for x in (q_NHK, k_NHK, v_NHV, g_NHK, beta_NH[..., None]))

    decay_CHLK = g_CHLK.cumsum(-2)
    last_CH1K = decay_CHLK[..., -1:, :]
    grown_CHLK = k_CHLK * (-decay_CHLK).exp()
    faded_CHLK = k_CHLK * decay_CHLK.exp()
    query_CHLK = q_CHLK * (decay_CHLK.exp() * scale)
    key_to_end_CHKL = (k_CHLK * (last_CH1K - decay_CHLK).exp()).transpose(-1, -2)
    fade_CHK1 = last_CH1K.exp().transpose(-1, -2)

    inverse_CHLL = _UnitLowerInverse.apply((beta_CHL1 * (faded_CHLK @ grown_CHLK.transpose(-1, -2))).tril(-1))
    correction_CHLK = inverse_CHLL @ (beta_CHL1 * faded_CHLK)
    value_CHLV = inverse_CHLL @ (beta_CHL1 * v_CHLV)
    weight_CHLL = (query_CHLK @ grown_CHLK.transpose(-1, -2)).tril()

    state_SHKV = initial_state_SHKV.to(dtype)[layout.by_length_S]
    finished, carried, news = [], [], []
    steps = zip(*(x.split(layout.num_active) for x in (correction_CHLK, value_CHLV, query_CHLK, key_to_end_CHKL, fade_CHK1)), strict=True)
    for correction, value, query, key_to_end, fade in steps:
        # The sequences come by falling length: those that have ended are the last.
        finished.append(state_SHKV[len(value) :])
        state_SHKV = state_SHKV[: len(value)]
        new = value - correction @ state_SHKV
        carried.append(query @ state_SHKV)
        news.append(new)
        state_SHKV = fade * state_SHKV + key_to_end @ new
    finished.append(state_SHKV)
    last_state_SHKV = torch.cat(finished[::-1])[layout.by_length_S.argsort()]
    if not news:
        return v_NHV.to(dtype), last_state_SHKV
    return layout.tokens(torch.cat(carried) + weight_CHLL @ torch.cat(news)), last_state_SHKV


@dataclass(frozen=True)
class _Layout:
    """Where each token stands: all first chunks of the sequences, from the longest on, then all second chunks, and so on.

    token_CL: the token at each place, N where there is none. place_N: the place of each token in C * L. by_length_S: sequences by falling
    length. num_active: how many sequences have a first chunk, a second, ...
    """

    token_CL: Tensor
    place_N: Tensor
    by_length_S: Tensor
    num_active: list[int]

    def chunks(self, x_NHX: Tensor) -> Tensor:
        """Return [C, H, L, X], zero where there is no token: such a step leaves the state as it is."""
        padded = torch.cat([x_NHX, x_NHX.new_zeros(1, *x_NHX.shape[1:])])
        chunks_CLHX = padded.index_select(0, self.token_CL.flatten()).view(*self.token_CL.shape, *x_NHX.shape[1:])
        return chunks_CLHX.transpose(1, 2).contiguous()

    def tokens(self, x_CHLX: Tensor) -> Tensor:
        """Return [N, H, X]."""
        return x_CHLX.transpose(1, 2).flatten(0, 1).index_select(0, self.place_N)


def _plan(lengths: Sequence[int], device: torch.device) -> _Layout:
    length_S = torch.tensor(lengths)
    start_S = length_S.cumsum(0) - length_S
    by_length_S = length_S.argsort(descending=True, stable=True)
    num_chunks_S = (length_S[by_length_S] + CHUNK - 1) // CHUNK
    max_chunks = int(num_chunks_S.max())
    chunk_C, rank_C = (num_chunks_S > torch.arange(max_chunks)[:, None]).nonzero(as_tuple=True)
    sequence_C = by_length_S[rank_C]
    offset_CL = CHUNK * chunk_C[:, None] + torch.arange(CHUNK)
    is_token_CL = offset_CL < length_S[sequence_C][:, None]
    token_CL = (start_S[sequence_C][:, None] + offset_CL).where(is_token_CL, sum(lengths))
    place_N = torch.empty(sum(lengths), dtype=torch.int64)
    place_N[token_CL[is_token_CL]] = is_token_CL.flatten().nonzero().squeeze(1)
    num_active = torch.bincount(chunk_C, minlength=max_chunks).tolist()
    return _Layout(token_CL.to(device), place_N.to(device), by_length_S.to(device), num_active)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower matrices A [..., L, L], by forward substitution; rows never see later ones."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, lower: Tensor) -> Tensor:  # type: ignore[override]
        inverse = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand(lower.shape).contiguous()
        for i in range(1, lower.shape[-1]):
            inverse[..., i, :i] = -(lower[..., i, :i, None] * inverse[..., :i, :i]).sum(-2)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)
