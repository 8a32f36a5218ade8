"""Ray shell of the learner: an actor around `LearnerWorker`, and a client with the same async methods."""

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from configs.schema import RunConfig
from rl.learner_worker import LearnerLostError, LearnerWorker
from rollout.trajectory import Group
from rollout.worker import Weights

_Actor = ray.remote(LearnerWorker)


class LearnerClient:
    """A learner in a process of its own; every method raises LearnerLostError when that process is gone."""

    def __init__(self, config: RunConfig) -> None:
        self._actor: Any = _Actor.options(num_cpus=config.learner.torch_threads, max_restarts=0).remote(config)

    async def warm_start(self) -> None:
        """Fine-tune on oracle episodes as `config.warm_start` says."""
        await self._call("warm_start")

    async def update(self, groups: list[Group]) -> dict[str, float]:
        """Learn from scored groups; returns metrics."""
        return await self._call("update", groups)

    async def weights(self) -> Weights:
        """Return a reference to the trained weights: they go from the learner to the workers, never through the driver."""
        return self._actor.weights.remote()

    async def save(self, folder: str) -> None:
        """Write the policy and the trainer's state into an existing folder."""
        await self._call("save", folder)

    async def load(self, folder: str) -> None:
        """Go on from what `save` wrote."""
        await self._call("load", folder)

    async def _call(self, method: str, *args: object) -> Any:
        try:
            return await getattr(self._actor, method).remote(*args)
        except RayTaskError as error:
            # The learner's own exception says what is wrong; Ray's wrapper would hide its type.
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except RayActorError as error:
            raise LearnerLostError(f"the learner's process must live through the run, it died: {str(error).splitlines()[0]}") from error
