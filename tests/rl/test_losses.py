import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.losses import MAX_LOG_RATIO, clipped_policy_loss
from tests import references

NAN = math.nan
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def loss_and_gradient(logprobs, sampler_logprobs, advantages, mask, *, count=None):
    """Return the record and the gradient of the loss to the log-probs, as a list."""
    logprob_BT = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.tensor(mask)
    policy = clipped_policy_loss(
        logprob_BT,
        torch.tensor(sampler_logprobs, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        mask_BT,
        num_action_tokens=int(mask_BT.sum()) if count is None else count,
        **CLIP,
    )
    policy.loss.backward()
    assert logprob_BT.grad is not None
    return policy, logprob_BT.grad.tolist()


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient():
    policy, gradient = loss_and_gradient([[-0.3, -1.7]], [[-0.3, -1.7]], [[1.0, -0.5]], [[True, True]])
    assert policy.loss.item() == -0.25
    assert policy.ratio_sum.item() == 2.0
    assert gradient == [[-0.5, 0.25]]
    assert (policy.num_tokens, policy.num_clipped, policy.num_missing, policy.k1_sum, policy.k3_sum) == (2, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "is_clipped"),
    [
        (1.5, 1.0, 1.28, True),
        (1.5, -1.0, -1.5, False),
        (0.5, 1.0, 0.5, False),
        (0.5, -1.0, -0.8, True),
        (1.25, 1.0, 1.25, False),
        (0.85, -1.0, -0.85, False),
    ],
)
def test_only_a_ratio_that_went_too_far_in_the_wanted_direction_is_clipped(ratio, advantage, surrogate, is_clipped):
    policy, gradient = loss_and_gradient([[math.log(ratio) - 1]], [[-1.0]], [[advantage]], [[True]])
    assert policy.loss.item() == pytest.approx(-surrogate)
    assert policy.num_clipped.item() == is_clipped
    assert gradient == [[0.0 if is_clipped else pytest.approx(-ratio * advantage)]]


def test_the_kl_estimates_are_those_of_the_samplers_tokens():
    policy, _ = loss_and_gradient([[-1.5, -1.0, 0.0]], [[-1.0, -1.0, NAN]], [[1.0, 1.0, 1.0]], [[True, True, True]])
    assert policy.k1_sum.item() == pytest.approx(0.5)
    assert policy.k3_sum.item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_the_token_mean_is_over_the_whole_step_however_it_is_split():
    whole, gradient = loss_and_gradient(
        [[-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]],
        [[-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]],
        [[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[True, False, False], [True, True, True]],
    )
    first, first_gradient = loss_and_gradient([[-1.0]], [[-1.0]], [[-1.0]], [[True]], count=4)
    second, second_gradient = loss_and_gradient([[-1.0] * 3], [[-1.0] * 3], [[0.0] * 3], [[True] * 3], count=4)
    assert whole.loss.item() == 0.25
    assert (first.loss + second.loss).item() == 0.25
    assert gradient == [[first_gradient[0][0], 0.0, 0.0], second_gradient[0]]


def test_a_missing_sampler_logprob_means_no_correction_and_is_counted():
    policy, gradient = loss_and_gradient([[-0.3, -1.7]], [[NAN, -1.7]], [[1.0, 1.0]], [[True, True]])
    assert policy.loss.item() == -1.0
    assert gradient == [[-0.5, -0.5]]
    assert (policy.num_missing, policy.ratio_sum) == (1, 2.0)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_nothing_behind_the_mask_reaches_loss_or_gradient(bad):
    policy, gradient = loss_and_gradient([[-0.3, bad, -0.5]], [[-0.3, bad, bad]], [[1.0, bad, bad]], [[True, False, False]])
    assert policy.loss.item() == -1.0
    assert gradient == [[-1.0, 0.0, 0.0]]
    assert (policy.num_missing, policy.k1_sum, policy.k3_sum) == (0, 0, 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("logprob", "sampler_logprob"), [(0.0, -1000.0), (-1000.0, 0.0), (-100.0, 0.0)])
def test_an_extreme_ratio_stays_finite_in_loss_and_gradient(advantage, logprob, sampler_logprob):
    logprob_BT = torch.tensor([[logprob]], requires_grad=True)
    arguments = torch.tensor([[sampler_logprob]]), torch.tensor([[advantage]]), torch.tensor([[True]])
    policy = clipped_policy_loss(logprob_BT, *arguments, num_action_tokens=1, **CLIP)
    policy.loss.backward()
    assert logprob_BT.grad is not None
    for value in (policy.loss, logprob_BT.grad, policy.ratio_sum, policy.k1_sum, policy.k3_sum):
        assert value.isfinite().all()


def test_the_bound_of_the_exponent_leaves_smaller_ratios_their_gradient():
    log_ratio = MAX_LOG_RATIO - 1
    _, gradient = loss_and_gradient([[0.0]], [[-log_ratio]], [[-1.0]], [[True]])
    assert gradient == [[pytest.approx(math.exp(log_ratio))]]


def test_a_part_without_action_tokens_adds_nothing():
    policy, gradient = loss_and_gradient([[-1.0]], [[NAN]], [[1.0]], [[False]], count=3)
    assert (policy.loss.item(), gradient, policy.num_tokens) == (0.0, [[0.0]], 0)


def test_wrong_arguments_are_refused():
    row, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="one shape"):
        clipped_policy_loss(row, row, torch.zeros(1, 1), mask, num_action_tokens=2, **CLIP)
    with pytest.raises(TypeError, match="must be bool"):
        clipped_policy_loss(row, row, row, row, num_action_tokens=2, **CLIP)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        clipped_policy_loss(row, row, row, mask, num_action_tokens=0, **CLIP)


@st.composite
def batches(draw):
    """Draw log-probs, sampler log-probs (some missing), advantages and a mask, with garbage behind it."""
    num_rows, num_columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = num_rows, num_columns
    action_mask_BT = torch.rand(shape, generator=generator) < draw(st.floats(0, 1))
    logprob_BT = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    sampler_logprob_BT = logprob_BT + torch.randn(shape, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.0, 0.3, 2.0]))
    advantage_BT = torch.randn(shape, generator=generator, dtype=torch.float64)
    sampler_logprob_BT[torch.rand(shape, generator=generator) < 0.2] = NAN
    for value_BT in (logprob_BT, sampler_logprob_BT, advantage_BT):
        value_BT[~action_mask_BT & (torch.rand(shape, generator=generator) < 0.5)] = NAN
    return logprob_BT, sampler_logprob_BT, advantage_BT, action_mask_BT


@settings(deadline=None)
@given(batch=batches(), num_parts=st.integers(1, 4))
def test_value_and_gradient_agree_with_the_plain_loop_for_every_split(batch, num_parts):
    logprob_BT, *others = batch
    count = max(1, int(others[-1].sum()))
    expected_BT = logprob_BT.clone().requires_grad_()
    expected = references.clipped_policy_loss(expected_BT, *others, num_action_tokens=count, **CLIP)
    actual_BT = logprob_BT.clone().requires_grad_()
    parts = zip(*(tensor_BT.tensor_split(num_parts) for tensor_BT in (actual_BT, *others)), strict=True)
    actual = sum(clipped_policy_loss(*part, num_action_tokens=count, **CLIP).loss for part in parts)
    assert isinstance(actual, torch.Tensor)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    (actual_grad_BT,) = torch.autograd.grad(actual, actual_BT)
    expected_grad_BT = torch.zeros_like(actual_grad_BT)
    if expected.requires_grad:
        (expected_grad_BT,) = torch.autograd.grad(expected, expected_BT)
    torch.testing.assert_close(actual_grad_BT, expected_grad_BT, rtol=1e-9, atol=1e-12)
