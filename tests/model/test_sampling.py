import math
import random

import pytest
import torch

from model.sampling import sample_tokens


def test_a_sampled_token_is_the_quantile_of_its_own_row():
    logits_RV = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.0, 0.5, 0.5, 0.0]]).log().clamp(min=-1000)
    token_ids, logprobs = sample_tokens(logits_RV, [1.0, 1.0, 1.0], [0.35, 0.35, 0.0])
    assert token_ids == [2, 0, 1]
    assert logprobs == pytest.approx([math.log(0.3), math.log(0.4), math.log(0.5)])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_chosen(uniform):
    logits_RV = torch.tensor([[-1000.0, 1.0, -1000.0, -1000.0, 0.5, -1000.0]])
    token_ids, logprobs = sample_tokens(logits_RV, [1.0], [uniform])
    assert token_ids[0] in (1, 4)
    assert logprobs[0] > -2


def test_temperature_zero_takes_the_most_likely_token_with_its_logprob_at_temperature_one():
    logits_RV = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    token_ids, logprobs = sample_tokens(logits_RV, [0.0, 0.5], [0.999, 0.999])
    assert token_ids == [0, 1]
    assert logprobs == pytest.approx([-0.126928, -4.01815], abs=1e-5)


def test_samples_follow_the_distribution_at_the_temperature():
    probability_V = torch.tensor([0.5, 0.25, 0.125, 0.125])
    num_samples = 4000
    rng = random.Random(0)
    token_ids, _ = sample_tokens(
        (2 * probability_V.log()).expand(num_samples, -1), [2.0] * num_samples, [rng.random() for _ in range(num_samples)]
    )
    assert torch.bincount(torch.tensor(token_ids)).div(num_samples).tolist() == pytest.approx(probability_V.tolist(), abs=0.03)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_the_logprob_nan_and_others_do_not(bad):
    _, logprobs = sample_tokens(torch.tensor([[0.0, bad], [0.0, 0.0]]), [1.0, 1.0], [0.5, 0.6])
    assert math.isnan(logprobs[0])
    assert logprobs[1] == pytest.approx(math.log(0.5))
