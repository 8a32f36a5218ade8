"""Real learning in small: the shipped policy on the Ledger, with true and with shuffled rewards. No Ray; about two minutes."""

import asyncio

import pytest

from configs.load import load_config
from rl.evaluate import Evaluation
from rl.learner_worker import LearnerWorker
from rl.metrics import MetricsWriter
from rl.run_folder import create_run_folder
from rl.screen import Screen
from rl.stages import Run
from rl.statistics import paired_difference
from rl.train import check_environment, run_all_steps
from rollout.pool import WorkerPool
from rollout.tasks import TaskQueue
from rollout.worker import RolloutWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def learn(folder, *overrides: str) -> list[Evaluation]:
    """Train in this process for a few steps and return the evaluations before and after."""
    small = (
        "learner.num_steps=25",
        "evaluation.num_episodes=150",
        "learner.torch_threads=2",
        "rollout.torch_threads=2",
    )
    config = load_config("quickstart_sync", [f"output.folder={folder}", *small, *overrides])
    run_folder = create_run_folder(config)

    async def spawn(version, weights):
        return RolloutWorker(config, version, weights)

    async def kill(worker):
        await worker.shutdown()

    async def train() -> list[Evaluation]:
        with Screen(config, run_folder.path) as screen:
            run = Run(
                config=config,
                folder=run_folder,
                pool=WorkerPool(spawn, kill, num_workers=1, deadline_s=300),
                learner=LearnerWorker(config),
                tasks=TaskQueue(config.env.id, range(config.env.num_train_tasks), config.seed),
                rules=check_environment(config),
                metrics=MetricsWriter(run_folder.path),
                screen=screen,
            )
            try:
                await run_all_steps(run)
                assert await run.pool.live_environments() == 0
                return run.evaluations
            finally:
                await run.pool.shutdown()
                run.metrics.close()

    return asyncio.run(train())


def test_success_rises_with_true_rewards_and_not_with_shuffled_ones(tmp_path):
    before, after = learn(tmp_path)
    assert paired_difference(before.success, after.success).low > 0.05

    shuffled_before, shuffled_after = learn(tmp_path, "reward.shuffle=true")
    assert shuffled_before.success == before.success, "the control starts from the same policy on the same tasks"
    assert paired_difference(shuffled_before.success, shuffled_after.success).low <= 0
    assert shuffled_after.num_successes < after.num_successes - 0.1 * after.num_graded
