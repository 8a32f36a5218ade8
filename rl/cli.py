"""The command line `cairn`. Heavy imports stand inside the commands, so that help and mistakes answer at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from configs.load import ConfigError, load_config
from rl.errors import RunError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Reinforcement-learning post-training for tool-use agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
envs_app = typer.Typer(help="Environments: what is registered, and whether it can be trusted.", no_args_is_help=True)
app.add_typer(envs_app, name="envs")
console = Console()

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, such as `learner.learning_rate=1e-5`.", metavar="KEY=VALUE")
]


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A TOML recipe, or the name of one that ships with Cairn, such as `quickstart`.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder from its last checkpoint.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the recipe, print what would run and how much memory it needs, start nothing.")
    ] = False,
) -> None:
    """Train a policy: `cairn train quickstart`, with changes `cairn train quickstart seed=1`, or `cairn train --resume runs/...`."""
    if resume is not None:
        if recipe or overrides or check:
            raise ConfigError("--resume takes the config of the run folder, got also a recipe, a change or --check: remove them")
        from rl.train import resume as resume_run

        resume_run(resume, console=console)
        return
    if recipe is None:
        raise ConfigError("cairn train needs a recipe or --resume RUN, got neither: try `cairn train quickstart`")
    config = load_config(recipe, overrides or [])
    if check:
        from rl.memory import plan_table

        console.print(plan_table(config))
        console.print("The recipe is valid; nothing was started.")
        return
    from rl.train import train as train_run

    train_run(config, console=console)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, a run folder (its last checkpoint), or `builtin:NAME`.")],
    env: Annotated[str | None, typer.Option(help="Id of the environment; the run's own where CHECKPOINT belongs to a run.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Held-out tasks, one episode each.")] = 200,
    split: Annotated[str, typer.Option(help="`validation` or `test`.")] = "test",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    option: Annotated[list[str] | None, typer.Option(help="Option of the environment, such as `max_calls=8`; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the trajectories to this JSON-lines file.")] = None,
) -> None:
    """Measure a checkpoint on held-out tasks: success and compliance with 95 % intervals."""
    from rl.evaluate_command import evaluate_checkpoint

    evaluate_checkpoint(
        checkpoint,
        env_id=env,
        episodes=episodes,
        split=split,
        temperature=temperature,
        options=option or [],
        seed=seed,
        output=output,
        console=console,
    )


@envs_app.command("list")
def list_command() -> None:
    """List the registered environments, those of installed plugins included."""
    from envs.registry import list_envs, load_plugins

    load_plugins()
    table = Table()
    table.add_column("id", no_wrap=True)  # what is typed elsewhere must be readable in a narrow terminal
    for header in ("package", "licence", "train tasks", "held-out tasks", "oracle", "description"):
        table.add_column(header)
    for spec in list_envs():
        held_out = sum(len(seeds) for name, seeds in spec.splits.items() if name != "train")
        oracle = "yes" if spec.has_oracle else "no"
        table.add_row(spec.id, spec.package, spec.licence, f"{len(spec.splits['train']):,}", f"{held_out:,}", oracle, spec.description)
    console.print(table)


@envs_app.command("check")
def check_command(
    env: Annotated[str, typer.Argument(help="Id of the environment, such as `cairn/Ledger-v0`.")],
    option: Annotated[list[str] | None, typer.Option(help="Option of the environment, such as `max_calls=8`; may be repeated.")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks that each check tries.")] = 20,
) -> None:
    """Try an environment for faults and cheap wins; one line per check, exit code 1 when one fails."""
    from configs.load import parse_overrides
    from envs.checks import check_env
    from envs.registry import load_plugins

    load_plugins()
    try:
        results = check_env(env, parse_overrides(option or []), num_tasks=tasks)
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    for result in results:
        mark = "[green]ok  [/green]" if result.passed else "[red]FAIL[/red]"
        console.print(f"{mark} {result.name}: {result.detail}", highlight=False, soft_wrap=True)
    num_failed = sum(not result.passed for result in results)
    console.print(f"{len(results) - num_failed} of {len(results)} checks passed")
    if num_failed:
        raise typer.Exit(EXIT_ERROR)


def main() -> None:
    """Run the command line."""
    run_command(app)


def run_train() -> None:
    """Run `cairn train` alone, for `python -m rl.train`."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command()(train)
    run_command(alone)


def run_command(command: typer.Typer) -> None:
    """Run a typer app: a mistake of the user's ends in one sentence and exit code 2, what broke a run in one sentence and exit code 1."""
    errors = Console(stderr=True)
    try:
        command()
    except ConfigError as error:
        errors.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(EXIT_USAGE)
    except RunError as error:
        errors.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        errors.print("interrupted: episodes, environments and actors are closed", highlight=False)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
