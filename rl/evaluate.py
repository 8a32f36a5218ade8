"""Held-out evaluation: the same episodes, sampling and grading as in training, on tasks that training never sees."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from configs.schema import RunConfig
from envs.registry import split_seeds
from envs.rules import Rule
from reward.score import score_trajectory
from rl.statistics import proportion_interval
from rollout.pool import WorkerPool
from rollout.trajectory import Task, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. Failed episodes say nothing about the policy: they are counted, and left out of both shares.

    success, compliance: by task, in task order, None for a failed episode.
    Example: `Evaluation(0, (True, False, None), (True, True, None), 57.5, 31.0, 9.1)`.
    """

    step: int
    success: tuple[bool | None, ...]
    compliance: tuple[bool | None, ...]
    response_tokens_mean: float
    turns_mean: float
    wall_s: float

    @property
    def num_graded(self) -> int:
        """Episodes that ended without a failure."""
        return sum(outcome is not None for outcome in self.success)

    @property
    def num_failed(self) -> int:
        """Episodes that failed for reasons outside the policy."""
        return len(self.success) - self.num_graded

    @property
    def num_successes(self) -> int:
        """Graded episodes that solved their task."""
        return sum(outcome is True for outcome in self.success)

    @property
    def num_compliant(self) -> int:
        """Graded episodes that broke no rule."""
        return sum(outcome is True for outcome in self.compliance)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of `eval/`."""
        graded = self.num_graded or float("nan")
        return {
            "eval/success/mean": self.num_successes / graded,
            "eval/compliance/mean": self.num_compliant / graded,
            "eval/response_tokens/mean": self.response_tokens_mean,
            "eval/episodes/count": len(self.success),
            "eval/failed/count": self.num_failed,
        }

    def describe(self) -> str:
        """Return one line with both shares and their 95 % intervals."""
        if not self.num_graded:
            return f"no episode of {len(self.success)} ended without a failure"
        parts = []
        for name, count in (("success", self.num_successes), ("compliance", self.num_compliant)):
            low, high = proportion_interval(count, self.num_graded)
            parts.append(f"{name} {count / self.num_graded:.1%} [{low:.1%}, {high:.1%}]")
        return f"{', '.join(parts)}, {self.num_graded} episodes, {self.num_failed} failed"


async def evaluate(
    pool: WorkerPool, config: RunConfig, rules: tuple[Rule, ...], *, step: int, progress: Callable[[int, int, int], None]
) -> tuple[Evaluation, list[Trajectory]]:
    """Return the evaluation of the pool's current weights on `config.evaluation`, and its trajectories in task order.

    progress: called with (step, done, total) after each episode.
    """
    started = time.monotonic()
    settings = config.evaluation
    seeds = split_seeds(config.env.id, settings.split)[: settings.num_episodes]
    num_done = 0

    async def run_one(index: int, seed: int) -> Trajectory:
        nonlocal num_done
        group = await pool.run_group(Task(config.env.id, seed, index), 1, settings.temperature)
        num_done += 1
        progress(step, num_done, len(seeds))
        return score_trajectory(group.trajectories[0], rules, config.reward)

    trajectories = await asyncio.gather(*(run_one(index, seed) for index, seed in enumerate(seeds)))
    return summarize(trajectories, step=step, wall_s=time.monotonic() - started), list(trajectories)


def summarize(trajectories: Iterable[Trajectory], *, step: int, wall_s: float) -> Evaluation:
    """Return the evaluation that these scored trajectories amount to."""
    scored = list(trajectories)
    return Evaluation(
        step=step,
        success=tuple(t.rewards["success"] == 1 if t.is_graded else None for t in scored),
        compliance=tuple(t.rewards["compliance"] == 1 if t.is_graded else None for t in scored),
        response_tokens_mean=sum(t.num_action_tokens for t in scored) / max(len(scored), 1),
        turns_mean=sum(len(t.turns) for t in scored) / max(len(scored), 1),
        wall_s=wall_s,
    )


_ADAPTER = TypeAdapter(Evaluation)


def append_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Add one line to the run's `evaluations.jsonl`; an earlier evaluation of the same step gives way."""
    kept = [old for old in read_evaluations(path) if old.step < evaluation.step]
    path.write_bytes(b"".join(_ADAPTER.dump_json(record) + b"\n" for record in [*kept, evaluation]))


def read_evaluations(path: Path) -> list[Evaluation]:
    """Return the evaluations of a run in the order of their steps; none when the file does not exist."""
    if not path.exists():
        return []
    return [_ADAPTER.validate_json(line) for line in path.read_bytes().splitlines()]
