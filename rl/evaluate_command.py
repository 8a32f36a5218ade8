"""`cairn eval`: one checkpoint, one environment, one table."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from configs.load import ConfigError, load_config, parse_overrides
from configs.schema import EnvConfig, EvaluationConfig, LearnerConfig, ModelConfig, RolloutConfig, RunConfig
from rl.checkpoints import list_checkpoints
from rl.evaluate import Evaluation, evaluate
from rl.statistics import proportion_interval
from rl.train import check_environment, check_model
from rollout.pool import WorkerPool
from rollout.trajectory import write_trajectories
from rollout.worker import RolloutWorker, Weights, Worker


def evaluate_checkpoint(
    checkpoint: str,
    *,
    env_id: str | None,
    episodes: int,
    split: str,
    temperature: float,
    options: Sequence[str],
    seed: int,
    output: Path | None,
    console: Console,
) -> Evaluation:
    """Evaluate a checkpoint folder, a run folder's last checkpoint, or `builtin:NAME`; print a table and return the evaluation.

    Raises ConfigError when the checkpoint or the environment cannot be told from the arguments.
    """
    config = evaluation_config(
        checkpoint, env_id=env_id, episodes=episodes, split=split, temperature=temperature, options=options, seed=seed
    )
    check_model(config)
    rules = check_environment(config)

    async def run() -> tuple[Evaluation, list]:
        async def spawn(version: int, weights: Weights | None) -> Worker:
            return RolloutWorker(config, version, weights)

        async def kill(worker: Worker) -> None:
            await worker.shutdown()

        pool = WorkerPool(spawn, kill, num_workers=1, deadline_s=config.rollout.group_deadline_s)
        await pool.start(0, None)
        columns = (TextColumn("evaluate"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        try:
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
                bar = progress.add_task("evaluate", total=episodes)
                return await evaluate(
                    pool, config, rules, step=0, progress=lambda _, done, total: progress.update(bar, completed=done, total=total)
                )
        finally:
            await pool.shutdown()

    evaluation, trajectories = asyncio.run(run())
    console.print(_table(checkpoint, config, evaluation))
    if output is not None:
        output.unlink(missing_ok=True)
        write_trajectories(output, trajectories)
        console.print(f"trajectories: {output}", soft_wrap=True, highlight=False)
    return evaluation


def evaluation_config(
    checkpoint: str, *, env_id: str | None, episodes: int, split: str, temperature: float, options: Sequence[str], seed: int
) -> RunConfig:
    """Return the config of the evaluation: that of the checkpoint's run where there is one, with the command's values over it."""
    if split not in ("validation", "test"):
        raise ConfigError(f"--split must be validation or test, got {split}")
    path, run_config = _find_run(checkpoint)
    env_options = parse_overrides(options)
    if run_config is None and env_id is None:
        raise ConfigError(f"{checkpoint} does not belong to a run, so --env ID is needed: `cairn envs list` shows the ids")
    if run_config is None:
        model = ModelConfig(path=path)
        rollout, env = RolloutConfig(), EnvConfig(id=env_id or "", options=env_options)
    else:
        model = run_config.model.model_copy(update={"path": path, "lora": None})
        same_env = env_id in (None, run_config.env.id)
        env = EnvConfig(
            id=env_id or run_config.env.id,
            options={**(run_config.env.options if same_env else {}), **env_options},
            step_deadline_s=run_config.env.step_deadline_s,
        )
        rollout = run_config.rollout
    return RunConfig(
        name="evaluation",
        seed=seed,
        model=model,
        env=env,
        rollout=rollout,
        learner=LearnerConfig(num_steps=1),
        evaluation=EvaluationConfig(
            num_episodes=episodes, split="validation" if split == "validation" else "test", temperature=temperature
        ),
    )


def _find_run(checkpoint: str) -> tuple[str, RunConfig | None]:
    """Return the model's path and the config of the run that it belongs to, if any."""
    if ":" in checkpoint:
        return checkpoint, None
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise ConfigError(f"a checkpoint must be a folder or builtin:NAME, got {checkpoint}, which does not exist")
    if (folder / "config.toml").exists():
        checkpoints = list_checkpoints(folder / "checkpoints")
        if not checkpoints:
            raise ConfigError(f"the run {folder} must have a checkpoint to be evaluated, it has none yet")
        return str(checkpoints[-1]), load_config(folder / "config.toml")
    run = folder.resolve().parent.parent
    return str(folder), load_config(run / "config.toml") if (run / "config.toml").exists() else None


def _table(checkpoint: str, config: RunConfig, evaluation: Evaluation) -> Table:
    title = f"{checkpoint} on {config.env.id}, {config.evaluation.split} split, temperature {config.evaluation.temperature:g}"
    table = Table("", "share", "95 % interval", "episodes", title=title)
    for name, count in (("success", evaluation.num_successes), ("compliance", evaluation.num_compliant)):
        if evaluation.num_graded:
            low, high = proportion_interval(count, evaluation.num_graded)
            table.add_row(name, f"{count / evaluation.num_graded:.1%}", f"{low:.1%} to {high:.1%}", f"{count} of {evaluation.num_graded}")
    table.add_row("failed, not counted", "", "", f"{evaluation.num_failed} of {len(evaluation.success)}")
    table.add_row("tokens per episode", f"{evaluation.response_tokens_mean:.1f}", "", "")
    table.add_row("turns per episode", f"{evaluation.turns_mean:.1f}", "", "")
    table.add_row("seconds", f"{evaluation.wall_s:.1f}", "", "")
    return table
