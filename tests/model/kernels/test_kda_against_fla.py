"""Kimi Delta Attention against flash-linear-attention's plain torch functions."""

import pytest
import torch
import torch.nn.functional as F
from fla.ops.kda.gate import naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda
from torch import Tensor

from model.kernels.kda import bounded_log_decay, kda

B, H, K, V = 2, 2, 32, 32
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def make_leaves(num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = (F.normalize(normal(B, num_tokens, H, K), dim=-1) for _ in range(2))
    g = bounded_log_decay(normal(B, num_tokens, H, K), torch.zeros(H), torch.full((H, K), -3.0))
    leaves = [q, k, normal(B, num_tokens, H, V), g, normal(B, num_tokens, H).sigmoid(), normal(B, H, K, V)]
    return [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("implementation", ["reference", "chunk"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 257])
def test_output_state_and_every_gradient_are_those_of_the_plain_recurrence(implementation: str, num_tokens: int) -> None:
    theirs, ours = make_leaves(num_tokens), make_leaves(num_tokens)
    o_theirs, state_theirs = naive_recurrent_kda(*theirs[:-1], initial_state=theirs[-1], output_final_state=True)
    o_ours, state_ours = kda(*ours[:-1], initial_state=ours[-1], output_final_state=True, implementation=implementation)
    torch.testing.assert_close(o_ours, o_theirs, atol=7e-7, rtol=0)
    torch.testing.assert_close(state_ours, state_theirs, atol=2e-6, rtol=0)
    weight_o, weight_state = torch.randn(o_ours.shape), torch.randn(state_ours.shape)
    gradients = [
        torch.autograd.grad((o * weight_o).sum() + (state * weight_state).sum(), leaves)
        for o, state, leaves in ((o_theirs, state_theirs, theirs), (o_ours, state_ours, ours))
    ]
    for name, expected, got in zip(NAMES, *gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=5e-6, rtol=5e-6, msg=lambda text, name=name: f"d{name}: {text}")


def test_the_bounded_gate_is_theirs() -> None:
    z, A_log, dt_bias = torch.randn(2, 7, H, K), torch.randn(H), torch.randn(H * K)
    assert torch.equal(bounded_log_decay(z, A_log, dt_bias, -5.0), naive_kda_lowerbound_gate(z, A_log, dt_bias, -5.0))
