from math import sqrt

import numpy as np
import pytest

from rl.statistics import paired_difference, proportion_interval


def outcomes(both: int, lost: int, gained: int, neither: int) -> tuple[list[bool], list[bool]]:
    before = [True] * both + [True] * lost + [False] * gained + [False] * neither
    after = [True] * both + [False] * lost + [True] * gained + [False] * neither
    return before, after


def test_the_interval_of_a_proportion_is_wilsons_formula():
    z, n, p = 1.959963984540054, 200, 0.9
    centre, spread = (p + z**2 / (2 * n)) / (1 + z**2 / n), z / (1 + z**2 / n) * sqrt(p * (1 - p) / n + z**2 / (4 * n**2))

    assert proportion_interval(180, 200) == pytest.approx((centre - spread, centre + spread), abs=1e-12)


def test_the_interval_stays_inside_zero_and_one():
    assert proportion_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert proportion_interval(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def test_the_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one episode, got 0"):
        proportion_interval(0, 0)


def test_more_successes_than_episodes_are_refused():
    with pytest.raises(ValueError, match="between 0 and 3, got 4"):
        proportion_interval(4, 3)


def test_the_paired_interval_is_that_of_newcombes_paper():
    difference = paired_difference(*outcomes(36, 2, 12, 0))

    assert (difference.value, difference.low, difference.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)


def test_no_change_is_an_interval_around_zero():
    difference = paired_difference(*outcomes(30, 0, 0, 10))

    assert difference.low < 0 == difference.value < difference.high
    assert difference.p_value == 1.0


def test_the_paired_interval_is_close_to_a_bootstrap():
    before, after = outcomes(90, 10, 60, 40)
    difference = paired_difference(before, after)
    change_B = np.array(after, dtype=float) - np.array(before, dtype=float)
    resampled = np.random.default_rng(0).choice(change_B, (4000, len(change_B))).mean(axis=1)

    assert difference.value == pytest.approx(0.25)
    assert (difference.low, difference.high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.015)


def test_the_p_value_counts_only_tasks_that_changed():
    assert paired_difference(*outcomes(5, 0, 10, 5)).p_value == pytest.approx(2 / 2**10)


def test_a_failed_episode_leaves_its_task_out_on_both_sides():
    assert paired_difference([False, None, True, False], [True, True, None, False]) == paired_difference([False, False], [True, False])


def test_pairs_must_be_of_the_same_tasks():
    with pytest.raises(ValueError, match="1 before and 2 after"):
        paired_difference([True], [True, False])
    with pytest.raises(ValueError, match="graded before and after, got none"):
        paired_difference([None], [True])
