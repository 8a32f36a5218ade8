import math

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.image import imread

from rl.evaluate import Evaluation
from rl.plots import plot_learning_curve, smooth


def evaluation(step: int, num_successes: int, n: int = 20) -> Evaluation:
    outcomes = (True,) * num_successes + (False,) * (n - num_successes)
    return Evaluation(step, outcomes, outcomes, 50.0, 5.0, 1.0)


def test_the_picture_is_wide_and_not_empty(tmp_path):
    records = [
        {"step": step, "time": 0.0, "rollout/success/mean": step / 10, "rollout/compliance/mean": 0.9, "rollout/reward/mean": None}
        for step in range(1, 10)
    ]

    plot_learning_curve(records, [evaluation(0, 2), evaluation(9, 18)], tmp_path / "curve.png")

    picture = imread(tmp_path / "curve.png")
    assert picture.shape[:2] == (600, 1440)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100


@pytest.mark.parametrize(
    ("records", "evaluations"),
    [
        ([], []),
        ([{"step": 1, "time": 0.0, "rollout/success/mean": None}], [Evaluation(0, (None,), (None,), math.nan, 0.0, 1.0)]),
        ([{"step": 1, "time": 0.0, "rollout/success/mean": 0.5}], [evaluation(0, 0), evaluation(1, 20)]),
    ],
)
def test_a_run_with_little_to_show_still_gets_a_picture(records, evaluations, tmp_path):
    plot_learning_curve(records, evaluations, tmp_path / "curve.png")

    assert (tmp_path / "curve.png").stat().st_size > 0


def test_drawing_leaves_no_figure_in_the_state_of_pyplot(tmp_path):
    plot_learning_curve([], [], tmp_path / "curve.png")

    assert pyplot.get_fignums() == []


def test_smoothing_is_a_centred_mean_that_keeps_the_length():
    values_T = np.arange(32.0) ** 2

    smoothed_T = smooth(values_T)

    assert len(smoothed_T) == 32
    assert smoothed_T[10] == np.mean(values_T[8:13])
    assert smoothed_T[0] == np.mean(values_T[:3])
    assert smooth(np.array([0.25])).tolist() == [0.25]
