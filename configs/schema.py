"""What can be tuned: one frozen pydantic model per section of a recipe.

Imports nothing heavy, so that recipes can be checked in milliseconds. Each default is written here and nowhere else.
Cross-field checks stand in `RunConfig.check`; they name both fields and change nothing.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scalar = bool | int | float | str
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LoraConfig(Section):
    """Low-rank adapters (peft); only the adapters are trained and sent to the samplers."""

    rank: Count = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of an adapter's output is alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""


class ModelConfig(Section):
    """The policy: any causal language model of transformers."""

    path: str
    """A folder with a Hugging Face checkpoint, `builtin:NAME` for one that ships with Cairn, or `package:NAME/FILE.gguf`.

    The last is a GGUF file inside an installed package.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights while training and sampling."""
    tools_prompt: Literal["none", "json"] | None = None
    """How the tools are written into the system message: not at all (a model that was trained on them), or as JSON schemas.

    Left out: as the checkpoint's `cairn.json` says, or `json` where there is none.
    """
    lora: LoraConfig | None = None
    """Train adapters only; without this section all weights are trained."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


class EnvConfig(Section):
    """The environment and its tasks."""

    id: str
    """Registered id, such as `cairn/Ledger-v0`; `package.module:Name-v0` imports the module first."""
    options: dict[str, Scalar] = Field(default_factory=dict)
    """Keyword arguments of the environment; it refuses those that it does not know."""
    num_train_tasks: Count = 4096
    """Number of different training tasks; one pass over them is an epoch."""
    step_deadline_s: Seconds = 30.0
    """An environment call (reset, step, verify, close) that takes longer fails its trajectory."""


class RolloutConfig(Section):
    """How the policy acts in the environment."""

    num_workers: Count = 1
    """Rollout actors; each holds a copy of the policy."""
    torch_threads: Count = 1
    """CPU threads of each rollout actor."""
    max_concurrent_episodes: Count = 64
    """Episodes that one worker runs at once."""
    max_context_tokens: Count = 1024
    """Longest episode, prompt included; also the size of a slot of the sampler's cache."""
    max_turns: Count = 16
    """An episode ends after this many turns of the agent."""
    max_tokens_per_turn: Count = 128
    """Tokens sampled in one turn, at most."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the learner divides its logits by the same number. Zero is refused: greedy samples carry no signal."""
    max_parse_errors_in_row: Count = 3
    """An episode ends with stop reason `parse_error` after this many turns in a row without a valid call."""
    episode_deadline_s: Seconds = 600.0
    """Wall clock of a whole episode."""
    max_attempts: Count = 3
    """How often a member of a group is tried before it is left out."""
    group_deadline_s: Seconds = 900.0
    """A group that is not back after this long is given up: its worker is replaced and the task is started again."""


class AsynchronyConfig(Section):
    """Only with `mode = "async"`: how far generation may run ahead of learning."""

    max_staleness: Annotated[int, Field(ge=0)] = 2
    """A trajectory is trained at most this many policy versions after its oldest token was sampled.

    It also bounds the buffer: (max_staleness + 1) * learner.groups_per_step groups are in flight or waiting, at most.
    """


class RewardConfig(Section):
    """How the components of a reward are weighed."""

    success_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of task success (1 or 0, from the environment's verifier)."""
    compliance_weight: Annotated[float, Field(ge=0)] = 0.5
    """Weight of process compliance (1 when no rule was broken, else 0)."""
    shuffle: bool = False
    """Control experiment: hand the rewards of a step to its trajectories in random order. Nothing can be learned then."""


class AdvantageConfig(Section):
    """Group-relative advantages (GRPO, arXiv 2402.03300)."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted from a reward: its group's mean, the mean of the other members, or nothing."""
    scale: Literal["std", "none"] = "none"
    """Divide by the group's standard deviation, or not (Dr. GRPO, arXiv 2503.20783)."""


class LearnerConfig(Section):
    """The optimiser steps."""

    num_steps: Count
    """Optimiser stages of the run; the policy version grows by one each."""
    groups_per_step: Count = 16
    """Groups (tasks) that one step learns from."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Trajectories sampled for each task."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear"] = "constant"
    """Schedule after the warm-up; linear reaches zero after the last step."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    num_minibatches: Count = 1
    """Updates per step, each on a part of the step's trajectories."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The probability ratio is clipped above 1 + clip_high (DAPO's clip-higher, arXiv 2503.14476)."""
    micro_batch_tokens: Count = 16384
    """Padded tokens of one forward and backward pass; does not change the result."""
    torch_threads: Count = 1
    """CPU threads of the learner."""
    advantage: AdvantageConfig = AdvantageConfig()
    """The estimator of advantages."""


class EvaluationConfig(Section):
    """Held-out evaluation before and after training."""

    num_episodes: Count = 200
    """Held-out tasks, one episode each."""
    split: Literal["validation", "test"] = "test"
    """Which held-out split of the environment."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 is greedy."""
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Also evaluate every so many steps; 0: only at the start and the end."""


class WarmStartConfig(Section):
    """Supervised fine-tuning on oracle episodes before reinforcement learning (TRL's SFTTrainer)."""

    num_episodes: Count = 512
    """Oracle episodes from the training split."""
    flaw_rate: Fraction = 0.0
    """How often the oracle takes a wrong decision where it has one to take; needs an environment with a flawed oracle."""
    num_epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over those episodes."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    batch_size: Count = 8
    """Episodes per optimiser step."""


class OutputConfig(Section):
    """The run folder."""

    folder: str = "runs"
    """Run folders are made in here."""
    checkpoint_every_steps: Count = 10
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: Count = 2
    """Older checkpoints are removed."""


class RunConfig(Section):
    """A whole recipe."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """Start of the run folder's name."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Fixes tasks, sampling and shuffling."""
    mode: Literal["sync", "async"] = "sync"
    """`sync`: generate, then learn, one after the other. `async`: both at once, with bounded staleness."""
    model: ModelConfig
    env: EnvConfig
    rollout: RolloutConfig = RolloutConfig()
    asynchrony: AsynchronyConfig | None = None
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    warm_start: WarmStartConfig | None = None
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def check(self) -> Self:
        """Raise ValueError where two fields contradict each other."""
        if self.mode == "sync" and self.asynchrony is not None:
            raise ValueError('[asynchrony] is only read with mode = "async", got mode = "sync": remove the section or change mode')
        if self.mode == "async" and self.asynchrony is None:
            raise ValueError('mode = "async" needs the section [asynchrony], got none: add it, its keys have defaults')
        if self.reward.success_weight == 0 and self.reward.compliance_weight == 0:
            raise ValueError("reward.success_weight and reward.compliance_weight must not both be 0: nothing would be learned")
        if self.learner.num_minibatches > self.learner.groups_per_step:
            raise ValueError(
                f"learner.num_minibatches must be at most learner.groups_per_step, "
                f"got {self.learner.num_minibatches} and {self.learner.groups_per_step}"
            )
        if self.learner.groups_per_step > self.env.num_train_tasks:
            raise ValueError(
                f"learner.groups_per_step must be at most env.num_train_tasks, "
                f"got {self.learner.groups_per_step} and {self.env.num_train_tasks}"
            )
        if self.rollout.max_tokens_per_turn >= self.rollout.max_context_tokens:
            raise ValueError(
                f"rollout.max_tokens_per_turn must be below rollout.max_context_tokens, "
                f"got {self.rollout.max_tokens_per_turn} and {self.rollout.max_context_tokens}"
            )
        return self
