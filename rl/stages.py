"""The stages of a training step. The sync and the async loop call the same ones, in another order."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from configs.schema import RunConfig
from envs.rules import Rule
from reward.score import score_trajectory, shuffle_rewards
from rl.checkpoints import save_checkpoint
from rl.errors import RunError
from rl.evaluate import Evaluation, append_evaluation, evaluate
from rl.learner_worker import PolicyLearner
from rl.metrics import MetricsWriter
from rl.run_folder import RunFolder
from rl.screen import Screen
from rollout.pool import WorkerPool
from rollout.tasks import TaskQueue
from rollout.trajectory import Group, StopReason, Trajectory, write_trajectories

MIN_GRADED = 2
"""A group needs two graded members: with one there is nothing to compare."""


class AllFailedError(RunError):
    """As many groups in a row as a step needs came back without enough graded members."""


@dataclass
class StepTally:
    """What happened since the last step."""

    started: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    dropped_stale: int = 0
    dropped_failed: int = 0
    sampled_tokens: int = 0
    failed: list[Trajectory] = field(default_factory=list)


@dataclass
class Run:
    """Everything that a loop needs; `step` counts finished optimiser steps and equals the policy version."""

    config: RunConfig
    folder: RunFolder
    pool: WorkerPool
    learner: PolicyLearner
    tasks: TaskQueue
    rules: tuple[Rule, ...]
    metrics: MetricsWriter
    screen: Screen
    step: int = 0
    num_failed_in_row: int = 0
    tally: StepTally = field(default_factory=StepTally)
    evaluations: list[Evaluation] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Show the stage on the screen and add its time to `time/<stage>_s/sum`."""
        self.screen.stage(stage)
        started = time.monotonic()
        try:
            yield
        finally:
            self.tally.seconds[stage] = self.tally.seconds.get(stage, 0.0) + time.monotonic() - started


async def generate_group(run: Run) -> Group:
    """Take the next task and return its scored group."""
    task = run.tasks.take()
    group = await run.pool.run_group(task, run.config.learner.group_size, run.config.rollout.temperature)
    trajectories = tuple(score_trajectory(trajectory, run.rules, run.config.reward) for trajectory in group.trajectories)
    return Group(task, trajectories, group.failed_attempts)


def admit(run: Run, group: Group) -> bool:
    """Return whether the group may be learned from; if not, it is counted, and its task put back (stale) or given up (failed).

    Raises AllFailedError when as many groups in a row as a step needs had too few graded members.
    """
    tally, learner = run.tally, run.config.learner
    tally.sampled_tokens += sum(t.num_action_tokens for t in (*group.trajectories, *group.failed_attempts))
    tally.failed += [t for t in (*group.trajectories, *group.failed_attempts) if t.failure]
    if run.config.asynchrony and group.staleness(run.step) > run.config.asynchrony.max_staleness:
        tally.dropped_stale += len(group.trajectories)
        run.tasks.put_back(group.task)
        return False
    if sum(t.is_graded for t in group.trajectories) < MIN_GRADED:
        tally.dropped_failed += len(group.trajectories)
        run.tasks.finish(group.task)
        run.num_failed_in_row += 1
        if run.num_failed_in_row >= learner.groups_per_step:
            failure = next(t.failure for t in group.trajectories if t.failure)
            raise AllFailedError(
                f"at least {MIN_GRADED} members of a group must end without a failure, {run.num_failed_in_row} groups in a row "
                f"had fewer; the last failure was {failure.kind}: {failure.text}. Mend the environment ({run.config.env.id}) first"
            )
        return False
    run.num_failed_in_row = 0
    return True


async def learn(run: Run, groups: list[Group]) -> dict[str, float]:
    """Update the policy on the groups; returns the learner's metrics."""
    if run.config.reward.shuffle:
        groups = shuffle_rewards(groups, np.random.default_rng((run.config.seed, run.step)))
    with run.timed("learn"):
        return await run.learner.update(groups)


async def publish(run: Run) -> None:
    """Count the step and give its weights to the workers, while they generate."""
    run.step += 1
    with run.timed("sync"):
        await run.pool.set_weights(run.step, await run.learner.weights())


async def finish_step(run: Run, groups: list[Group], learner_metrics: dict[str, float]) -> None:
    """Write down the step: trajectories, metrics, screen; evaluate and save where the recipe says so."""
    for group in groups:
        run.tasks.finish(group.task)
    trained = [trajectory for group in groups for trajectory in group.trajectories]
    write_trajectories(
        run.folder.trajectories / f"step-{run.step:06d}.jsonl", [*trained, *(t for t in run.tally.failed if t not in trained)]
    )
    metrics = {**_rollout_metrics(run, groups), **learner_metrics}
    run.metrics.write(run.step, metrics)
    run.screen.step(run.step, metrics)
    run.tally = StepTally()
    output, evaluation = run.config.output, run.config.evaluation
    is_last = run.step == run.config.learner.num_steps
    if is_last or (evaluation.every_steps and run.step % evaluation.every_steps == 0):
        await evaluate_now(run)
    if is_last or run.step % output.checkpoint_every_steps == 0:
        await save_checkpoint(run.folder.checkpoints, run.learner, run.tasks, run.step, keep=output.keep_checkpoints)


async def evaluate_now(run: Run) -> None:
    """Evaluate the current policy on the held-out split and write the result down."""
    run.screen.stage("evaluate")
    evaluation, trajectories = await evaluate(run.pool, run.config, run.rules, step=run.step, progress=run.screen.evaluation)
    run.evaluations.append(evaluation)
    append_evaluation(run.folder.evaluations, evaluation)
    path = run.folder.trajectories / f"eval-{run.step:06d}.jsonl"
    path.unlink(missing_ok=True)
    write_trajectories(path, trajectories)
    run.metrics.write(run.step, evaluation.metrics())
    run.screen.evaluated(run.step, evaluation.metrics())


def _rollout_metrics(run: Run, groups: list[Group]) -> dict[str, float]:
    tally = run.tally
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    graded = [trajectory for trajectory in trajectories if trajectory.is_graded]
    version = run.step - 1  # the version that these groups trained
    staleness = [version - t.oldest_version for t in trajectories if t.oldest_version is not None]
    elapsed_s = time.monotonic() - tally.started

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else float("nan")

    return {
        "rollout/reward/mean": mean([t.rewards["total"] for t in graded]),
        "rollout/success/mean": mean([t.rewards["success"] for t in graded]),
        "rollout/compliance/mean": mean([t.rewards["compliance"] for t in graded]),
        "rollout/response_tokens/mean": mean([t.num_action_tokens for t in trajectories]),
        "rollout/turns/mean": mean([len(t.turns) for t in trajectories]),
        "rollout/staleness_versions/mean": mean(staleness),
        "rollout/staleness_versions/max": max(staleness, default=0),
        "rollout/trajectories/count": len(trajectories),
        "rollout/failed/count": len(tally.failed),
        "rollout/dropped_failed/count": tally.dropped_failed,
        "rollout/dropped_stale/count": tally.dropped_stale,
        "rollout/parse_errors/count": sum(t.stop_reason is StopReason.PARSE_ERROR for t in trajectories),
        "rollout/truncated/count": sum(t.stop_reason in (StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT) for t in trajectories),
        "rollout/tokens/sum": tally.sampled_tokens,
        "rollout/tokens_per_s/mean": tally.sampled_tokens / elapsed_s,
        "rollout/workers_replaced/count": run.pool.num_replaced,
        "time/step_s/sum": elapsed_s,
        **{f"time/{stage}_s/sum": seconds for stage, seconds in tally.seconds.items()},
    }
