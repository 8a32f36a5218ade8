"""The learner's side of a run: the trained policy, its optimiser, and their checkpoints. A plain class; Ray wraps it elsewhere."""

import asyncio
from pathlib import Path
from typing import Protocol

import torch

from configs.schema import RunConfig
from envs.registry import load_plugins, split_seeds
from model.loading import load_policy, load_weights, save_checkpoint, trainable_weights
from model.runtime import set_up_torch
from rl.batch import build_samples
from rl.errors import RunError
from rl.learner import Learner
from rollout.trajectory import Group
from rollout.worker import Weights

TRAINER_STATE = "trainer_state.pt"


class LearnerLostError(RunError):
    """The learner's process died."""


class PolicyLearner(Protocol):
    """What the loop knows of the learner, whether it is the plain object or a client of an actor."""

    async def warm_start(self) -> None:
        """Fine-tune on oracle episodes as `config.warm_start` says."""
        ...

    async def update(self, groups: list[Group]) -> dict[str, float]:
        """Learn from scored groups; returns metrics. The version grows by one."""
        ...

    async def weights(self) -> Weights:
        """Return the trained weights (adapters only under LoRA)."""
        ...

    async def save(self, folder: str) -> None:
        """Write the policy in Hugging Face format, and the trainer's state, into an existing folder."""
        ...

    async def load(self, folder: str) -> None:
        """Go on from what `save` wrote."""
        ...


class LearnerWorker:
    """Holds the policy that is trained."""

    def __init__(self, config: RunConfig) -> None:
        set_up_torch(config.learner.torch_threads)
        torch.manual_seed(config.seed)
        load_plugins()
        self._config = config
        self._policy = load_policy(config.model)
        # transformers recomputes activations only in training mode; the policies here have no dropout that it would switch on.
        self._policy.model.train(config.model.gradient_checkpointing)
        self._learner = Learner(
            self._policy.model,
            config.learner,
            temperature=config.rollout.temperature,
            total_steps=config.learner.num_steps,
            seed=config.seed,
        )

    async def warm_start(self) -> None:
        """Fine-tune on oracle episodes of the training split; their seeds are those that the run starts with."""
        from rl.sft import oracle_conversations, supervised_fine_tune

        config, warm = self._config, self._config.warm_start
        if warm is None:
            return
        seeds = split_seeds(config.env.id, "train")[: warm.num_episodes]
        examples = await asyncio.to_thread(
            oracle_conversations, config.env.id, dict(config.env.options), seeds, warm.flaw_rate, config.seed, self._policy.renderer
        )
        await asyncio.to_thread(
            supervised_fine_tune,
            self._policy,
            examples,
            learning_rate=warm.learning_rate,
            num_epochs=warm.num_epochs,
            batch_size=warm.batch_size,
            seed=config.seed,
        )

    async def update(self, groups: list[Group]) -> dict[str, float]:
        """Learn from scored groups; returns the metrics of `loss/`, `correction/`, `advantage/` and `learner/`."""
        samples, batch_metrics = build_samples(groups, advantage=self._config.learner.advantage)
        metrics = await asyncio.to_thread(self._learner.update, samples)
        return {**batch_metrics, **metrics}

    async def weights(self) -> Weights:
        """Return a copy of the trained weights."""
        return {name: tensor.clone() for name, tensor in trainable_weights(self._policy.model).items()}

    async def save(self, folder: str) -> None:
        """Write the policy and `trainer_state.pt` into an existing folder."""
        save_checkpoint(self._policy, Path(folder))
        # The trained weights stand here too: a LoRA checkpoint holds the merged model, from which adapters cannot be read back.
        torch.save({"learner": self._learner.state_dict(), "weights": trainable_weights(self._policy.model)}, Path(folder) / TRAINER_STATE)

    async def load(self, folder: str) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(Path(folder) / TRAINER_STATE, weights_only=True)
        load_weights(self._policy.model, state["weights"])
        self._learner.load_state_dict(state["learner"])
