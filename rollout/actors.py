"""Ray shells of the rollout layer: an actor around `RolloutWorker`, and a client with the same async methods."""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.schema import RunConfig
from rollout.trajectory import Group, Task
from rollout.worker import RolloutWorker, Weights, WorkerLostError

_Actor = ray.remote(RolloutWorker)
_MAX_CALLS_AT_ONCE = 10_000


class RolloutClient:
    """A worker in a process of its own; every method raises WorkerLostError when that process is gone."""

    def __init__(self, actor: Any) -> None:
        """actor: a handle of Ray's."""
        self._actor = actor

    @classmethod
    async def spawn(cls, config: RunConfig, version: int, weights: Weights | None) -> "RolloutClient":
        """Start the actor and wait until it holds the weights."""
        # Environments and plugins decide what the process imports; Ray's own restarts would come back with old weights.
        options = _Actor.options(num_cpus=config.rollout.torch_threads, max_restarts=0, max_concurrency=_MAX_CALLS_AT_ONCE)
        client = cls(options.remote(config, version, weights))
        await client.live_environments()
        return client

    async def run_group(self, task: Task, size: int, temperature: float) -> Group:
        """Return `size` episodes of the task."""
        return await self._call("run_group", task, size, temperature)

    async def set_weights(self, version: int, weights: Weights) -> None:
        """Take new weights while episodes run."""
        await self._call("set_weights", version, weights)

    async def live_environments(self) -> int:
        """Return how many environments are open."""
        return await self._call("live_environments")

    async def shutdown(self) -> None:
        """Cancel all episodes, close their environments and stop the engine."""
        await self._call("shutdown")

    async def kill(self) -> None:
        """End the process now."""
        ray.kill(self._actor)

    async def _call(self, method: str, *args: object) -> Any:
        reference = getattr(self._actor, method).remote(*args)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)  # what nobody waits for must not keep the worker busy
            raise
        except RayTaskError as error:
            # The worker's own exception says what is wrong; Ray's wrapper would hide its type.
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayActorError as error:
            raise WorkerLostError(str(error).splitlines()[0]) from error
