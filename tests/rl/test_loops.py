"""The loops over fakes: what is generated, trained, dropped, put back and resumed. No Ray, no model."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from configs.schema import RunConfig
from envs.messages import Verification
from envs.registry import split_seeds
from rl.async_loop import train_async
from rl.checkpoints import list_checkpoints, read_progress
from rl.evaluate import read_evaluations
from rl.stages import AllFailedError, Run
from rl.sync_loop import train_sync
from rl.train import run_all_steps
from rollout.pool import WorkerPool
from rollout.tasks import TaskQueue
from rollout.trajectory import Failure, FailureKind, Group, StopReason, Trajectory, TurnRecord, read_trajectories

FIRST_HELD_OUT_SEED = split_seeds("cairn/Ledger-v0", "validation").start


def make_config(mode="sync", **learner) -> RunConfig:
    settings = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, **learner}
    return RunConfig.model_validate(
        {
            "name": "loops",
            "mode": mode,
            "model": {"path": "fake"},
            "env": {"id": "cairn/Ledger-v0", "num_train_tasks": 8},
            "learner": settings,
            "evaluation": {"num_episodes": 4},
            "output": {"checkpoint_every_steps": 1, "keep_checkpoints": 100},
            **({"asynchrony": {"max_staleness": 1}} if mode == "async" else {}),
        }
    )


class FakeWorker:
    """Returns groups of its current version; `fails` says how many members of the group with the given task index fail.

    delay: seconds that a task takes. first_held_until: the version that must be reached before the first training task comes back.
    """

    def __init__(self, version, fails, delay=lambda task: 0.0, first_held_until=0):
        self.version, self.fails, self.delay, self.first_held_until = version, fails, delay, first_held_until
        self.released = asyncio.Event()

    async def run_group(self, task, size, temperature):
        version = self.version
        await asyncio.sleep(self.delay(task))
        is_first = task.index == 0 and task.seed < FIRST_HELD_OUT_SEED
        if is_first and self.version < self.first_held_until:
            await self.released.wait()
        return Group(task, tuple(self.trajectory(task, member, version, member < self.fails(task)) for member in range(size)))

    def trajectory(self, task, member, version, is_failed):
        return Trajectory(
            trajectory_id=f"{task.index}-{member}",
            task=task,
            member=member,
            attempt=0,
            temperature=1.0,
            token_ids_T=(1, 2, 3),
            action_mask_T=(False, True, True),
            sampler_logprob_T=(0.0, -0.1, -0.1),
            policy_version_T=(-1, version, version),
            turns=(TurnRecord(1, 3, "x"),),
            stop_reason=StopReason.FAILED if is_failed else StopReason.ANSWERED,
            failure=Failure(FailureKind.ENVIRONMENT, "sandbox lost") if is_failed else None,
            verification=None if is_failed else Verification(member % 2 == 0),
        )

    async def set_weights(self, version, weights):
        self.version = version
        if version >= self.first_held_until:
            self.released.set()

    async def live_environments(self):
        return 0

    async def shutdown(self):
        pass


class FakeLearner:
    def __init__(self, seconds=0.0, dies_at=None):
        self.seconds, self.dies_at, self.trained, self.loaded = seconds, dies_at, [], None

    async def update(self, groups):
        await asyncio.sleep(self.seconds)
        if len(self.trained) == self.dies_at:
            raise KeyboardInterrupt
        self.trained.append(groups)
        return {"loss/policy/mean": 0.0}

    async def weights(self):
        return {}

    async def warm_start(self):
        raise AssertionError("no warm start was asked for")

    async def save(self, folder):
        (Path(folder) / "weights").write_text(str(len(self.trained)))

    async def load(self, folder):
        self.loaded = (Path(folder) / "weights").read_text()


class FakeScreen:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class FakeMetrics:
    def __init__(self):
        self.records = []

    def write(self, step, metrics):
        self.records.append((step, metrics))

    def truncate_after(self, step):
        self.records = [record for record in self.records if record[0] <= step]


class FakeFolder:
    def __init__(self, path):
        self.path = path
        self.trajectories, self.checkpoints, self.evaluations = path / "trajectories", path / "checkpoints", path / "evaluations.jsonl"
        self.trajectories.mkdir(exist_ok=True)


def make_run(path, config, *, fails=lambda task: 0, delay=lambda task: 0.0, first_held_until=0, learner=None) -> Run:
    async def spawn(version, weights):
        return FakeWorker(version, fails, delay, first_held_until)

    async def kill(worker):
        pass

    return Run(
        config=config,
        folder=FakeFolder(path),
        pool=WorkerPool(spawn, kill, num_workers=1, deadline_s=10),
        learner=learner or FakeLearner(),
        tasks=TaskQueue(config.env.id, range(config.env.num_train_tasks), config.seed),
        rules=(),
        metrics=FakeMetrics(),
        screen=FakeScreen(),
    )


def run_to_end(run):
    asyncio.run(run_all_steps(run))


def trained_seeds(run):
    return [group.task.seed for groups in run.learner.trained for group in groups]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_epoch_trains_each_task_once(tmp_path, mode):
    run = make_run(tmp_path, make_config(mode))
    run_to_end(run)
    assert sorted(trained_seeds(run)) == list(range(8))
    assert run.step == 4
    assert [evaluation.step for evaluation in run.evaluations] == [0, 4]
    assert len(list_checkpoints(run.folder.checkpoints)) == 5


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_killed_between_checkpoint_and_next_step_loses_and_repeats_nothing(tmp_path, mode):
    killed = make_run(tmp_path, make_config(mode), learner=FakeLearner(dies_at=1))
    with contextlib.suppress(KeyboardInterrupt, BaseExceptionGroup):
        run_to_end(killed)
    assert read_progress(list_checkpoints(killed.folder.checkpoints)[-1])[0] == 1

    resumed = make_run(tmp_path, make_config(mode))
    run_to_end(resumed)
    assert resumed.learner.loaded == "1"
    assert sorted(trained_seeds(killed) + trained_seeds(resumed)) == list(range(8))
    assert [evaluation.step for evaluation in read_evaluations(tmp_path / "evaluations.jsonl")] == [0, 4]
    written = [t.task.seed for step in range(1, 5) for t in read_trajectories(tmp_path / f"trajectories/step-{step:06d}.jsonl")]
    assert sorted(written) == sorted(2 * list(range(8)))


def test_no_trajectory_is_trained_staler_than_the_bound_and_stale_tasks_come_again(tmp_path):
    # The first task takes several steps: when it comes back it is too stale, and its task must be run again.
    config = make_config("async", num_steps=12)
    run = make_run(tmp_path, config, first_held_until=3)
    run_to_end(run)
    for step, groups in enumerate(run.learner.trained):
        assert all(group.staleness(step) <= 1 for group in groups)
    indices = [group.task.index for groups in run.learner.trained for group in groups]
    assert len(set(indices)) == len(indices) == 24
    assert sum(metrics.get("rollout/dropped_stale/count", 0) for _, metrics in run.metrics.records) == 2


def test_generation_goes_on_while_the_learner_learns(tmp_path):
    started = []

    def delay(task):
        started.append(task.index)
        return 0.01

    run = make_run(tmp_path, make_config("async", num_steps=2), delay=delay, learner=FakeLearner(seconds=0.1))
    run_to_end(run)
    # Before, during and after the two updates: two groups a step, and at most (1 + 1) * 2 ahead.
    assert 6 <= len([index for index in started]) - 2 * 4 <= 8


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_group_with_one_survivor_is_dropped_and_made_up_for(tmp_path, mode):
    run = make_run(tmp_path, make_config(mode, num_steps=2), fails=lambda task: 1 if task.index == 1 else 0)
    run_to_end(run)
    assert all(len(groups) == 2 for groups in run.learner.trained)
    assert 1 not in [group.task.index for groups in run.learner.trained for group in groups]
    assert sum(metrics.get("rollout/dropped_failed/count", 0) for _, metrics in run.metrics.records) == 2
    assert run.pool.num_in_flight == 0


def test_failed_members_are_written_down_and_ungraded(tmp_path):
    config = make_config(num_steps=1, group_size=4)
    run = make_run(tmp_path, config, fails=lambda task: 2)
    run_to_end(run)
    written = read_trajectories(tmp_path / "trajectories/step-000001.jsonl")
    assert [t.rewards == {} for t in written] == [True, True, False, False] * 2
    assert run.metrics.records[1][1]["rollout/failed/count"] == 4


@pytest.mark.parametrize("loop", [train_sync, train_async])
def test_when_everything_fails_the_run_stops_with_the_failures_text(tmp_path, loop):
    run = make_run(tmp_path, make_config("sync" if loop is train_sync else "async"), fails=lambda task: 2)
    with pytest.raises((AllFailedError, ExceptionGroup)) as caught:
        run_to_end(run)
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, AllFailedError)
    assert "sandbox lost" in str(error)


def test_sync_mode_trains_only_on_the_current_version(tmp_path):
    run = make_run(tmp_path, make_config())
    run_to_end(run)
    for step, groups in enumerate(run.learner.trained):
        assert {v for group in groups for t in group.trajectories for v in t.policy_version_T} == {-1, step}


def test_evaluations_are_ungraded_where_an_episode_failed(tmp_path):
    run = make_run(tmp_path, make_config(num_steps=1), fails=lambda task: 1 if task.seed >= 10**6 and task.index == 2 else 0)
    run_to_end(run)
    evaluation = run.evaluations[0]
    assert (evaluation.num_graded, evaluation.num_failed, evaluation.success[2]) == (3, 1, None)
    assert evaluation.metrics()["eval/success/mean"] == 1.0
