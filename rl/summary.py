"""What a run amounts to: a verdict, a table for the terminal, a page in Markdown, and numbers in JSON."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from configs.schema import RunConfig
from rl.evaluate import Evaluation
from rl.metrics import Record
from rl.statistics import Difference, paired_difference, proportion_interval

WINDOW_SHARE = 5
"""The training curve is read through a moving mean over one fifth of its steps."""
MIN_CURVE_STEPS = 10
"""A shorter training curve is too noisy to be judged."""
COLLAPSE_SHARE = 0.5
MIN_PEAK = 0.1
RISE_POINTS = 0.02
NEAR_TOP = 0.95
NEXT_EPISODES = 500


class VerdictKind(StrEnum):
    """See `judge` for the rule."""

    IMPROVEMENT = "improvement"
    PLATEAU = "plateau"
    COLLAPSE = "collapse"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """Example: `Verdict(VerdictKind.IMPROVEMENT, "held-out success rose by 35.0 points [27.1, 42.4].")`."""

    kind: VerdictKind
    text: str


@dataclass(frozen=True)
class RunSummary:
    """The end of a run.

    before, after: the first and the last held-out evaluation. wall_s: steps and evaluations, without start-up.
    num_sampled_tokens: in training. num_trained, num_failed, num_stale: trajectories that were learned from, that failed,
    that were dropped as too old.
    Example: `RunSummary("quickstart", "runs/quickstart-20260102-030405", "cairn/Ledger-v0", "async", Evaluation(0, ...),
    Evaluation(30, ...), 30, 241.5, 518_000, 3840, 0, 64, Verdict(VerdictKind.IMPROVEMENT, "..."))`.
    """

    name: str
    run_path: str
    env_id: str
    mode: str
    before: Evaluation
    after: Evaluation
    num_steps: int
    wall_s: float
    num_sampled_tokens: int
    num_trained: int
    num_failed: int
    num_stale: int
    verdict: Verdict

    @property
    def success_difference(self) -> Difference | None:
        """Change of held-out success by task; None when no task was graded both times."""
        return _difference(self.before.success, self.after.success)

    @property
    def compliance_difference(self) -> Difference | None:
        """Change of held-out compliance by task; None when no task was graded both times."""
        return _difference(self.before.compliance, self.after.compliance)

    @property
    def next_command(self) -> str:
        """The command to try next: a larger evaluation of what was trained."""
        return f"cairn eval {shlex.quote(self.run_path)} --env {self.env_id} --episodes {NEXT_EPISODES}"


def build_summary(config: RunConfig, run_path: Path, evaluations: Sequence[Evaluation], records: Sequence[Record]) -> RunSummary:
    """Return the summary of a finished run.

    evaluations: by step. records: as `read_metrics` returns them. Raises ValueError without any evaluation.
    """
    if not evaluations:
        raise ValueError(f"a summary needs the evaluations before and after training, got none in {run_path}")
    before, after = evaluations[0], evaluations[-1]

    def total(name: str) -> float:
        return sum(record.get(name) or 0.0 for record in records)

    return RunSummary(
        name=config.name,
        run_path=str(run_path),
        env_id=config.env.id,
        mode=config.mode,
        before=before,
        after=after,
        num_steps=int(max((record["step"] or 0 for record in records), default=0)),
        wall_s=total("time/step_s/sum") + sum(evaluation.wall_s for evaluation in evaluations),
        num_sampled_tokens=int(total("rollout/tokens/sum")),
        num_trained=int(total("rollout/trajectories/count")),
        num_failed=int(total("rollout/failed/count")),
        num_stale=int(total("rollout/dropped_stale/count")),
        verdict=judge(before, after, [value for record in records if (value := record.get("rollout/success/mean")) is not None]),
    )


def judge(before: Evaluation, after: Evaluation, train_success: Sequence[float]) -> Verdict:
    """Return what the held-out numbers and the training curve say together.

    train_success: share of solved tasks by step. The first rule that holds decides:
    unknown: no held-out task was graded both before and after.
    collapse: held-out success fell beyond its 95 % interval; or training success, as a moving mean over a fifth of the steps,
    once reached 10 % or more and ended below half of its peak (not read in runs of fewer than 10 steps).
    improvement: held-out success rose beyond its 95 % interval.
    plateau: neither; the change may be chance.
    Whatever the verdict, compliance that fell beyond its interval is said.
    """
    success = _difference(before.success, after.success)
    if success is None:
        return Verdict(VerdictKind.UNKNOWN, "no held-out task was graded both before and after training: look at the failures first.")
    curve = _moving_mean(train_success) if len(train_success) >= MIN_CURVE_STEPS else []
    warning = _compliance_warning(before, after)
    change = f"{_points(success)} points"
    if success.high < 0:
        return Verdict(
            VerdictKind.COLLAPSE, f"held-out success fell ({change}): try a lower learner.learning_rate or an earlier checkpoint.{warning}"
        )
    if curve and max(curve) >= MIN_PEAK and curve[-1] < COLLAPSE_SHARE * max(curve):
        text = f"training success peaked at {max(curve):.0%} and ended at {curve[-1]:.0%} (held-out success changed by {change})"
        return Verdict(VerdictKind.COLLAPSE, f"{text}: try a lower learner.learning_rate or an earlier checkpoint.{warning}")
    if success.low > 0:
        trend = "; training success was still rising, more steps may help" if _still_rises(curve) else ""
        return Verdict(VerdictKind.IMPROVEMENT, f"held-out success rose by {change}{trend}.{warning}")
    if before.num_successes >= NEAR_TOP * before.num_graded:
        return Verdict(VerdictKind.PLATEAU, f"held-out success was near the top from the start and changed by {change}.{warning}")
    return Verdict(VerdictKind.PLATEAU, f"held-out success changed by {change}, which may be chance.{warning}")


def summary_table(summary: RunSummary) -> Table:
    """Return held-out success and compliance before and after, with 95 % intervals, for the terminal."""
    colour = {VerdictKind.IMPROVEMENT: "green", VerdictKind.COLLAPSE: "red"}.get(summary.verdict.kind, "yellow")
    caption = Text.assemble((summary.verdict.kind.value, f"bold {colour}"), f": {summary.verdict.text}")
    table = Table(title="held-out tasks, with 95 % intervals", caption=caption, caption_justify="left", title_justify="left")
    table.add_column("", style="bold")
    table.add_column(f"before (step {summary.before.step})", justify="right")
    table.add_column(f"after (step {summary.after.step})", justify="right")
    table.add_column("difference, points", justify="right")
    for row in _rows(summary):
        table.add_row(*row)
    return table


def summary_markdown(summary: RunSummary) -> str:
    """Return the summary as a page of Markdown that lies in the run folder, beside its picture."""
    header = ("", f"before (step {summary.before.step})", f"after (step {summary.after.step})", "difference, points")
    rows = [header, ("---", "---:", "---:", "---:"), *_rows(summary)]
    held_out = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""# {summary.name}

**{summary.verdict.kind.value.capitalize()}**: {summary.verdict.text}

## Held-out tasks

{held_out}

Shares of graded episodes on `{summary.env_id}`, with 95 % intervals (Wilson; for the difference Newcombe's paired interval).
Success: the final state is right. Compliance: no process rule was broken.

![Learning curve](learning_curve.png)

## Cost

| | |
| --- | ---: |
| mode | {summary.mode} |
| optimiser steps | {summary.num_steps:,} |
| wall clock | {_duration(summary.wall_s)} |
| tokens sampled in training | {summary.num_sampled_tokens:,} |
| trajectories learned from | {summary.num_trained:,} |
| trajectories that failed | {summary.num_failed:,} |
| trajectories dropped as too old | {summary.num_stale:,} |

## Next

```
{summary.next_command}
```
"""


def summary_json(summary: RunSummary) -> dict[str, Any]:
    """Return the numbers of the summary for programs; shares carry their counts and intervals."""
    return {
        "name": summary.name,
        "env_id": summary.env_id,
        "mode": summary.mode,
        "verdict": {"kind": summary.verdict.kind.value, "text": summary.verdict.text},
        "before": _evaluation_json(summary.before),
        "after": _evaluation_json(summary.after),
        "num_steps": summary.num_steps,
        "wall_s": summary.wall_s,
        "num_sampled_tokens": summary.num_sampled_tokens,
        "num_trained": summary.num_trained,
        "num_failed": summary.num_failed,
        "num_stale": summary.num_stale,
    }


def _evaluation_json(evaluation: Evaluation) -> dict[str, Any]:
    shares: dict[str, Any] = {"step": evaluation.step, "num_graded": evaluation.num_graded, "num_failed": evaluation.num_failed}
    for name, count in (("success", evaluation.num_successes), ("compliance", evaluation.num_compliant)):
        interval = proportion_interval(count, evaluation.num_graded) if evaluation.num_graded else None
        shares[name] = {"count": count, "interval_95": interval}
    return shares


def _rows(summary: RunSummary) -> list[tuple[str, str, str, str]]:
    before, after = summary.before, summary.after
    rows = [
        ("success", _share(before.num_successes, before), _share(after.num_successes, after), _points(summary.success_difference)),
        ("compliance", _share(before.num_compliant, before), _share(after.num_compliant, after), _points(summary.compliance_difference)),
        ("response tokens", f"{before.response_tokens_mean:.0f}", f"{after.response_tokens_mean:.0f}", ""),
        ("graded episodes", f"{before.num_graded:,}", f"{after.num_graded:,}", ""),
    ]
    if before.num_failed or after.num_failed:
        rows.append(("failed episodes", f"{before.num_failed:,}", f"{after.num_failed:,}", ""))
    return rows


def _share(count: int, evaluation: Evaluation) -> str:
    if not evaluation.num_graded:
        return "nothing graded"
    low, high = proportion_interval(count, evaluation.num_graded)
    return f"{count / evaluation.num_graded:.1%} [{100 * low:.1f}, {100 * high:.1f}]"


def _points(difference: Difference | None) -> str:
    if difference is None:
        return "unknown"
    return f"{100 * difference.value:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"


def _difference(before: Sequence[bool | None], after: Sequence[bool | None]) -> Difference | None:
    is_graded_twice = any(old is not None and new is not None for old, new in zip(before, after, strict=False))
    return paired_difference(before, after) if is_graded_twice else None


def _compliance_warning(before: Evaluation, after: Evaluation) -> str:
    compliance = _difference(before.compliance, after.compliance)
    if compliance is None or compliance.high >= 0:
        return ""
    return f" Compliance fell ({_points(compliance)} points): raise reward.compliance_weight."


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Return the means of all full windows of a fifth of the values (at least one value)."""
    size = max(1, len(values) // WINDOW_SHARE)
    return [sum(values[start : start + size]) / size for start in range(len(values) - size + 1)]


def _still_rises(curve: Sequence[float]) -> bool:
    """Whether the last window is above the one that ended before it, by more than noise usually is."""
    size = max(1, len(curve) // WINDOW_SHARE)
    return len(curve) > size and curve[-1] > curve[-1 - size] + RISE_POINTS


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
