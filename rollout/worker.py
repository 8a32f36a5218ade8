"""A rollout worker: a copy of the policy in an engine, and many episodes at once around it. A plain class; Ray wraps it elsewhere."""

import asyncio
from typing import Protocol

import torch

from configs.schema import RunConfig
from envs.registry import load_plugins, make_env
from model.loading import load_policy
from model.runtime import set_up_torch
from rollout.engine import Engine
from rollout.env_host import LiveCount
from rollout.episode import EpisodeContext, EpisodeLimits, run_group
from rollout.trajectory import Group, Task

Weights = dict[str, torch.Tensor]


class WorkerLostError(Exception):
    """A worker died or gave no answer; its work must be done elsewhere."""


class Worker(Protocol):
    """What the loop knows of a worker, whether it is the plain object or a client of an actor."""

    async def run_group(self, task: Task, size: int, temperature: float) -> Group:
        """Return `size` episodes of the task; raises WorkerLostError when the worker died."""
        ...

    async def set_weights(self, version: int, weights: Weights) -> None:
        """Take new weights while episodes run."""
        ...

    async def live_environments(self) -> int:
        """Return how many environments are open."""
        ...

    async def shutdown(self) -> None:
        """Cancel all episodes, close their environments and stop the engine."""
        ...


class RolloutWorker:
    """Runs groups of episodes, at most `rollout.max_concurrent_episodes` episodes at once."""

    def __init__(self, config: RunConfig, version: int, weights: Weights | None) -> None:
        """weights: of this version; None takes those of `config.model`."""
        set_up_torch(config.rollout.torch_threads)
        load_plugins()
        policy = load_policy(config.model)
        self._config = config
        self._engine = Engine(
            policy.model,
            num_slots=config.rollout.max_concurrent_episodes,
            max_context_tokens=config.rollout.max_context_tokens,
            version=version if weights is None else -1,
        )
        if weights is not None:
            self._engine.set_weights(version, weights)
        self._live = LiveCount()
        self._slots = asyncio.Semaphore(config.rollout.max_concurrent_episodes)
        self._running: set[asyncio.Task[Group]] = set()
        self._context = EpisodeContext(
            sampler=self._engine,
            renderer=policy.renderer,
            make_env=lambda: make_env(config.env.id, dict(config.env.options)),
            limits=EpisodeLimits(
                max_context_tokens=config.rollout.max_context_tokens,
                max_turns=config.rollout.max_turns,
                max_tokens_per_turn=config.rollout.max_tokens_per_turn,
                max_parse_errors_in_row=config.rollout.max_parse_errors_in_row,
                step_deadline_s=config.env.step_deadline_s,
                episode_deadline_s=config.rollout.episode_deadline_s,
            ),
            live=self._live,
            run_seed=config.seed,
        )

    async def run_group(self, task: Task, size: int, temperature: float) -> Group:
        """Return `size` episodes of the task, failed members tried again up to `rollout.max_attempts` times."""
        max_attempts = self._config.rollout.max_attempts
        running = asyncio.create_task(
            run_group(self._context, task, size=size, temperature=temperature, max_attempts=max_attempts, slots=self._slots)
        )
        self._running.add(running)
        try:
            return await running
        finally:
            self._running.discard(running)

    async def set_weights(self, version: int, weights: Weights) -> None:
        """Take new weights between two decode steps; running episodes go on and record which version sampled what."""
        await asyncio.to_thread(self._engine.set_weights, version, weights)

    async def live_environments(self) -> int:
        """Return how many environments are open."""
        return self._live.value

    async def shutdown(self) -> None:
        """Cancel all episodes, wait until their environments are closed, stop the engine."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._engine.stop)
