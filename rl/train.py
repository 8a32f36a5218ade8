"""A training run from recipe to summary; also `python -m rl.train RECIPE [SECTION.KEY=VALUE ...]` for `ray job submit`."""

import asyncio
import shutil
import signal
import time
from pathlib import Path

from rich.console import Console

from configs.load import ConfigError, load_config
from configs.schema import RunConfig
from envs.registry import load_plugins, make_env, split_seeds
from envs.rules import Rule
from model.loading import resolve_path
from rl.actors import LearnerClient
from rl.async_loop import train_async
from rl.checkpoints import list_checkpoints, read_progress, save_checkpoint
from rl.cluster import ray_cluster
from rl.errors import RunError
from rl.evaluate import read_evaluations
from rl.metrics import MetricsWriter, read_metrics
from rl.plots import plot_learning_curve
from rl.run_folder import (
    RunFolder,
    check_room,
    create_run_folder,
    open_run_folder,
    write_json_atomically,
    write_text_atomically,
)
from rl.screen import Screen
from rl.stages import Run, evaluate_now
from rl.summary import RunSummary, build_summary, summary_json, summary_markdown, summary_table
from rl.sync_loop import train_sync
from rollout.actors import RolloutClient
from rollout.pool import TooManyLossesError, WorkerPool
from rollout.tasks import TaskQueue


def train(config: RunConfig, *, console: Console | None = None) -> RunFolder:
    """Train as the config says in a new run folder, which is returned; everything that can be wrong is checked before Ray starts."""
    check_model(config)
    rules = check_environment(config)
    folder = create_run_folder(config)
    run_in_folder(config, folder, rules, console=console)
    return folder


def resume(path: Path, *, console: Console | None = None) -> RunFolder:
    """Go on with a run from its last checkpoint; a run that has none starts again in the same folder."""
    folder = open_run_folder(path)
    config = load_config(folder.config)
    checkpoints = list_checkpoints(folder.checkpoints)
    if checkpoints and read_progress(checkpoints[-1])[0] >= config.learner.num_steps and folder.summary.exists():
        raise RunError(f"only an unfinished run can be resumed, {path} has done all {config.learner.num_steps} steps: start a new run")
    check_model(config)
    rules = check_environment(config)
    check_room(folder.path)
    run_in_folder(config, folder, rules, console=console)
    return folder


def check_model(config: RunConfig) -> None:
    """Raise ConfigError when `model.path` is nowhere."""
    try:
        resolve_path(config.model.path)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def check_environment(config: RunConfig) -> tuple[Rule, ...]:
    """Make the environment once, reset it, and return its process rules.

    Raises ConfigError when the id, an option or the number of tasks does not fit the environment.
    """
    load_plugins()
    try:
        seeds = split_seeds(config.env.id, "train")
        env = make_env(config.env.id, config.env.options)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"[env] does not fit: {error}") from error
    if len(seeds) < config.env.num_train_tasks:
        raise ConfigError(
            f"env.num_train_tasks must be at most {len(seeds)}, the training tasks of {config.env.id}, got {config.env.num_train_tasks}"
        )
    try:
        env.reset(seed=seeds[0])
        return env.rules()
    finally:
        env.close()


def run_in_folder(config: RunConfig, folder: RunFolder, rules: tuple[Rule, ...], *, console: Console | None) -> None:
    """Start Ray, train, and end everything that was started, also after an error, Ctrl-C or SIGTERM; then write the summary."""
    console = console or Console()
    try:
        with ray_cluster(config), Screen(config, folder.path, console) as screen:
            asyncio.run(_run(config, folder, rules, screen))
    except BaseException as error:
        console.print(f"the run has stopped; go on with: cairn train --resume {folder.path}", soft_wrap=True, highlight=False, markup=False)
        if isinstance(error, TooManyLossesError):
            raise RunError(str(error)) from error
        if isinstance(error, asyncio.CancelledError):
            raise KeyboardInterrupt from None  # SIGTERM; Ctrl-C arrives as KeyboardInterrupt already
        raise
    summary = write_summary(config, folder)
    console.print(summary_table(summary))
    console.print(f"run folder: {folder.path}\nnext: {summary.next_command}", soft_wrap=True, highlight=False, markup=False)


def write_summary(config: RunConfig, folder: RunFolder) -> RunSummary:
    """Write summary.md, summary.json and the learning curve from what the run folder holds, and return the summary."""
    records, evaluations = read_metrics(folder.metrics), read_evaluations(folder.evaluations)
    summary = build_summary(config, folder.path, evaluations, records)
    plot_learning_curve(records, evaluations, folder.learning_curve)
    write_json_atomically(folder.summary_json, summary_json(summary))
    write_text_atomically(folder.summary, summary_markdown(summary))
    return summary


async def _run(config: RunConfig, folder: RunFolder, rules: tuple[Rule, ...], screen: Screen) -> None:
    """Run inside an event loop: actors, loop, shutdown."""
    main_task = asyncio.current_task()
    if main_task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main_task.cancel)
    screen.stage("start")
    learner = LearnerClient(config)
    pool = WorkerPool(
        spawn=lambda version, weights: RolloutClient.spawn(config, version, weights),
        kill=RolloutClient.kill,
        num_workers=config.rollout.num_workers,
        deadline_s=config.rollout.group_deadline_s,
    )
    run = Run(
        config=config,
        folder=folder,
        pool=pool,
        learner=learner,
        tasks=TaskQueue(config.env.id, split_seeds(config.env.id, "train")[: config.env.num_train_tasks], config.seed),
        rules=rules,
        metrics=MetricsWriter(folder.path),
        screen=screen,
    )
    try:
        await run_all_steps(run)
    except ExceptionGroup as group:
        raise _first_leaf(group) from None
    finally:
        await pool.shutdown()
        run.metrics.close()


async def run_all_steps(run: Run) -> None:
    """Restore the last checkpoint or make the first, evaluate, and run the loop that the config names."""
    checkpoints = list_checkpoints(run.folder.checkpoints)
    if checkpoints:
        await _restore(run, checkpoints[-1])
    elif run.config.warm_start:
        run.screen.stage("warm start")
        await run.learner.warm_start()
    await run.pool.start(run.step, await run.learner.weights())
    if not checkpoints:
        await save_checkpoint(run.folder.checkpoints, run.learner, run.tasks, run.step, keep=run.config.output.keep_checkpoints)
    if not run.evaluations:
        await evaluate_now(run)
    run.tally.started = time.monotonic()
    await (train_sync if run.config.mode == "sync" else train_async)(run)


async def _restore(run: Run, checkpoint: Path) -> None:
    """Go on from the checkpoint; what the killed run wrote after it is removed, so that no step stands twice."""
    await run.learner.load(str(checkpoint))
    run.step, tasks = read_progress(checkpoint)
    run.tasks.load_state_dict(tasks)
    run.metrics.truncate_after(run.step)
    run.evaluations = [e for e in read_evaluations(run.folder.evaluations) if e.step <= run.step]
    for path in run.folder.trajectories.glob("*.jsonl"):
        if int(path.stem.rsplit("-", 1)[1]) > run.step:
            path.unlink()
    for path in run.folder.checkpoints.glob("*.partial"):
        shutil.rmtree(path)
    run.screen.note(f"resumed from {checkpoint.name}")


def _first_leaf(group: BaseExceptionGroup) -> BaseException:
    """Return the first plain exception of a nest of groups: the cause that a user wants to read."""
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


if __name__ == "__main__":
    from rl.cli import run_train  # the command line imports this module when it trains

    run_train()
