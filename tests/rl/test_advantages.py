import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.advantages import GroupCounts, count_groups, group_advantage
from tests import references

NAN = math.nan


def advantages(rewards, graded=None, *, baseline="mean", scale="none", dtype=torch.float64):
    reward_PG = torch.tensor(rewards, dtype=dtype)
    graded_PG = torch.ones_like(reward_PG, dtype=torch.bool) if graded is None else torch.tensor(graded)
    return group_advantage(reward_PG, graded_PG, baseline=baseline, scale=scale).tolist()


def test_the_mean_of_the_group_is_subtracted():
    assert advantages([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]) == [[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]]


def test_leave_one_out_subtracts_the_mean_of_the_others():
    assert advantages([[1.0, 0.0, 0.5]], baseline="leave_one_out") == [[0.75, -0.75, 0.0]]


def test_without_baseline_and_scale_the_advantage_is_the_reward():
    assert advantages([[1.0, 0.25]], baseline="none") == [[1.0, 0.25]]


def test_std_divides_by_the_sample_standard_deviation():
    assert advantages([[3.0, 1.0]], scale="std") == [[pytest.approx(1 / math.sqrt(2)), pytest.approx(-1 / math.sqrt(2))]]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("reward", [1.0, 0.1, 1e6 + 0.1, -1e30])
def test_equal_rewards_have_exactly_zero_advantage(baseline, scale, reward):
    assert advantages([[reward] * 3], baseline=baseline, scale=scale) == [[0.0] * 3]
    assert advantages([[reward] * 3], baseline=baseline, scale=scale, dtype=torch.float32) == [[0.0] * 3]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_of_one_has_zero_advantage(baseline):
    assert advantages([[1.0]], baseline=baseline, scale="std") == [[0.0]]
    assert advantages([[1.0, 0.0]], [[True, False]], baseline=baseline, scale="std") == [[0.0, 0.0]]


def test_a_difference_that_is_rounding_is_not_blown_up():
    assert advantages([[0.3, 0.1 + 0.2]], scale="std") == [[pytest.approx(0, abs=1e-15)] * 2]
    near = [[1e6, 1e6 + 0.0625]]
    assert advantages(near, scale="std", dtype=torch.float32) == [[-0.03125, 0.03125]]


def test_the_variance_survives_a_large_offset():
    expected = 1 / math.sqrt(2)
    assert advantages([[1e9, 1e9 + 1]], scale="std") == [[pytest.approx(-expected), pytest.approx(expected)]]


def test_a_reward_that_is_nan_is_left_out_of_the_statistics():
    assert advantages([[1.0, 0.0, NAN, 1.0]]) == [[pytest.approx(1 / 3), pytest.approx(-2 / 3), 0.0, pytest.approx(1 / 3)]]
    std = math.sqrt(1 / 3)
    expected = [pytest.approx(1 / 3 / std), pytest.approx(-2 / 3 / std), 0.0, pytest.approx(1 / 3 / std)]
    assert advantages([[1.0, 0.0, NAN, 1.0]], scale="std") == [expected]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_failed_member_is_in_no_baseline_whatever_its_reward_holds(bad):
    graded = [[True, True, False, False]]
    assert advantages([[1.0, 0.0, bad, 7.0]], graded) == [[0.5, -0.5, 0.0, 0.0]]
    assert advantages([[1.0, 0.0, bad, 7.0]], graded, baseline="none") == [[1.0, 0.0, 0.0, 0.0]]


def test_a_group_without_a_graded_member_is_all_zero():
    assert advantages([[1.0, NAN]], [[False, True]], scale="std") == [[0.0, 0.0]]


def test_the_type_of_the_rewards_is_kept():
    graded_PG = torch.ones(1, 2, dtype=torch.bool)
    assert group_advantage(torch.tensor([[1.0, 0.0]]), graded_PG, baseline="mean", scale="std").dtype == torch.float32
    assert group_advantage(torch.tensor([[1.0, 0.0]]).double(), graded_PG, baseline="mean", scale="std").dtype == torch.float64


def test_constant_groups_and_ungraded_members_are_counted():
    reward_PG = torch.tensor([[1.0, 1.0, 1.0], [0.0, NAN, 5.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    graded_PG = torch.tensor([[True, True, True], [True, True, False], [True, True, True], [False, False, False]])
    assert count_groups(reward_PG, graded_PG) == GroupCounts(constant_groups=2, ungraded=5)


@pytest.mark.parametrize(
    ("reward_PG", "graded_PG", "error"),
    [
        (torch.zeros(2), torch.ones(2, dtype=torch.bool), ValueError),
        (torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool), ValueError),
        (torch.zeros(2, 0), torch.ones(2, 0, dtype=torch.bool), ValueError),
        (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.bool), TypeError),
        (torch.zeros(1, 2), torch.ones(1, 2), TypeError),
    ],
)
def test_other_shapes_and_types_are_refused(reward_PG, graded_PG, error):
    with pytest.raises(error, match="reward_PG"):
        group_advantage(reward_PG, graded_PG, baseline="mean", scale="none")


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ValueError, match="baseline must be mean"):
        advantages([[1.0, 0.0]], baseline="median")


REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.1, NAN, math.inf]), st.floats(-100, 100))


@settings(deadline=None)
@given(
    groups=st.integers(1, 5).flatmap(
        lambda size: st.lists(st.lists(st.tuples(REWARD, st.booleans()), min_size=size, max_size=size), min_size=1, max_size=4)
    ),
    baseline=st.sampled_from(["mean", "leave_one_out", "none"]),
    scale=st.sampled_from(["std", "none"]),
)
def test_it_agrees_with_the_plain_loop(groups, baseline, scale):
    rewards = [[reward for reward, _ in group] for group in groups]
    graded = [[is_graded for _, is_graded in group] for group in groups]
    expected = references.group_advantage(rewards, graded, baseline=baseline, scale=scale, rounding=torch.finfo(torch.float64).eps)
    torch.testing.assert_close(advantages(rewards, graded, baseline=baseline, scale=scale), expected, rtol=1e-6, atol=1e-8)
