"""The learning curve as a picture: training by step, and the held-out evaluations with their intervals."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rl.evaluate import Evaluation
from rl.metrics import Record
from rl.statistics import proportion_interval

# Okabe and Ito's colours, which colour-blind readers can tell apart.
SUCCESS, COMPLIANCE, REWARD, INK = "#0072B2", "#D55E00", "#009E73", "#444444"
SMOOTHING_SHARE = 8
"""The smooth line is a moving mean over one eighth of the steps."""
HELD_OUT_SHIFT = 0.01
"""Held-out success and compliance stand this share of the axis left and right of their step, so that neither hides the other."""


def plot_learning_curve(records: Sequence[Record], evaluations: Sequence[Evaluation], path: Path) -> None:
    """Write a PNG: success and compliance in training (raw and smoothed) with held-out points and 95 % intervals, and the reward.

    records: as `read_metrics` returns them; steps without a number are left out. evaluations: by step; ungraded ones are left out.
    """
    # The object interface: no global state of pyplot, safe in any thread.
    figure = Figure(figsize=(9.6, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    shares, reward = figure.subplots(1, 2, width_ratios=(1.75, 1))
    _draw_curve(shares, records, "rollout/success/mean", SUCCESS)
    _draw_curve(shares, records, "rollout/compliance/mean", COMPLIANCE)
    graded = [evaluation for evaluation in evaluations if evaluation.num_graded]
    span = max([record["step"] or 0 for record in records] + [evaluation.step for evaluation in graded], default=0)
    _draw_held_out(shares, graded, [e.num_successes for e in graded], SUCCESS, "o", -HELD_OUT_SHIFT * span)
    _draw_held_out(shares, graded, [e.num_compliant for e in graded], COMPLIANCE, "s", HELD_OUT_SHIFT * span)
    _draw_curve(reward, records, "rollout/reward/mean", REWARD)
    _finish(shares, "Success and compliance")
    shares.set_ylim(-0.02, 1.04)
    shares.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    _finish(reward, "Mean reward of an episode")
    _draw_legend(figure, shares)
    figure.savefig(path)


def _draw_curve(axes: Axes, records: Sequence[Record], name: str, colour: str) -> None:
    points = [(record["step"], value) for record in records if (value := record.get(name)) is not None]
    if not points:
        return
    steps_T, values_T = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    axes.plot(steps_T, values_T, color=colour, alpha=0.28, linewidth=1.0)
    axes.plot(steps_T, smooth(values_T), color=colour, linewidth=2.2, solid_capstyle="round")


def smooth(values_T: np.ndarray) -> np.ndarray:
    """Return the centred moving mean of T values, over fewer of them near both ends; the result has the same length."""
    half = max(1, len(values_T) // SMOOTHING_SHARE) // 2
    windows = (values_T[max(0, t - half) : t + half + 1] for t in range(len(values_T)))
    return np.array([window.mean() for window in windows])


def _draw_held_out(axes: Axes, evaluations: Sequence[Evaluation], counts: Sequence[int], colour: str, marker: str, shift: float) -> None:
    """Draw the shares with their intervals; `shift` keeps the two quantities of one step apart."""
    for evaluation, count in zip(evaluations, counts, strict=True):
        share = count / evaluation.num_graded
        low, high = proportion_interval(count, evaluation.num_graded)
        axes.errorbar(
            evaluation.step + shift,
            share,
            yerr=[[share - low], [high - share]],
            fmt=marker,
            markersize=7,
            color=colour,
            markerfacecolor="white",
            markeredgewidth=1.8,
            elinewidth=1.6,
            capsize=4,
            zorder=5,
        )


def _draw_legend(figure: Figure, axes: Axes) -> None:
    """Explain colours and kinds of marks apart, with marks of their own."""
    for label, style in {
        "success": {"color": SUCCESS, "linewidth": 2.2},
        "compliance": {"color": COMPLIANCE, "linewidth": 2.2},
        "training, mean of a step": {"color": INK, "linewidth": 1.0, "alpha": 0.4},
    }.items():
        axes.plot([], [], label=label, **style)
    axes.errorbar(
        [],
        [],
        yerr=[],
        fmt="o",
        markersize=6,
        color=INK,
        markerfacecolor="white",
        markeredgewidth=1.5,
        elinewidth=1.4,
        capsize=3,
        label="held-out tasks, 95 % interval",
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9, labelcolor=INK)


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel("optimiser step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AAAAAA")
