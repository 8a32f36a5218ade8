"""From groups of trajectories to what one optimiser step computes: samples, minibatches, padded micro-batches.

B sequences, T tokens, P prompts, G samples per prompt. Entry t of any `*_T` or `*_BT` speaks of token t.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import AdvantageConfig
from rl.advantages import count_groups, group_advantage
from rollout.trajectory import Group, Trajectory


@dataclass(frozen=True)
class TrainingSample:
    """One graded trajectory as the learner sees it: every sampled token has the trajectory's advantage.

    sampler_logprob_T: NaN where the sampler lost it. All `*_T` have one length.

    Example (two prompt tokens, three sampled, one observation):
        TrainingSample((5, 9, 31, 7, 2, 11), (False, False, True, True, True, False), (0.0, 0.0, -0.1, nan, -0.3, 0.0), 0.5)
    """

    token_ids_T: tuple[int, ...]
    action_mask_T: tuple[bool, ...]
    sampler_logprob_T: tuple[float, ...]
    advantage: float

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids_T), len(self.action_mask_T), len(self.sampler_logprob_T))
        if len(set(lengths)) != 1:
            raise ValueError(f"token_ids_T, action_mask_T and sampler_logprob_T must have one length, got {lengths}")
        if any(self.action_mask_T[:1]):
            raise ValueError("the first token of a sample must not be an action, got one: no token before it can predict it, add a prompt")

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.action_mask_T)

    @property
    def has_gradient(self) -> bool:
        """Whether the policy loss of this sample can have a gradient; without one it needs no forward pass."""
        return self.advantage != 0 and any(self.action_mask_T)


@dataclass(frozen=True)
class MicroBatch:
    """Samples side by side, padded on the right with id 0, which no mask includes.

    token_ids_BT int64; attention_mask_BT and action_mask_BT bool; sampler_logprob_BT float32, NaN where missing; advantage_BT float32.
    Example: two samples of 3 and 2 tokens give five tensors of shape [2, 3].
    """

    token_ids_BT: Tensor
    attention_mask_BT: Tensor
    action_mask_BT: Tensor
    sampler_logprob_BT: Tensor
    advantage_BT: Tensor


def build_samples(groups: Sequence[Group], *, advantage: AdvantageConfig) -> tuple[list[TrainingSample], dict[str, float]]:
    """Return a sample for every member with a usable reward (`rewards["total"]`, finite), in order, and the metrics of `advantage/`.

    Failed members are in no baseline and in no sample; they are counted. Members whose advantage is 0 stay among the samples:
    their tokens belong to the token mean of the step, although the learner need not run them through the model.
    Raises ValueError when a graded trajectory has no total reward.
    """
    samples: list[TrainingSample] = []
    num_constant = num_ungraded = 0
    for group in groups:
        if not group.trajectories:
            continue
        reward_PG = torch.tensor([[_total_reward(trajectory) for trajectory in group.trajectories]], dtype=torch.float64)
        graded_PG = reward_PG.isfinite()
        advantage_PG = group_advantage(reward_PG, graded_PG, baseline=advantage.baseline, scale=advantage.scale)
        counts = count_groups(reward_PG, graded_PG)
        num_constant += counts.constant_groups
        num_ungraded += counts.ungraded
        samples += [
            _sample(trajectory, value)
            for trajectory, value, is_graded in zip(group.trajectories, advantage_PG[0].tolist(), graded_PG[0].tolist(), strict=True)
            if is_graded
        ]
    return samples, {"advantage/constant_groups/count": num_constant, "advantage/ungraded/count": num_ungraded}


def minibatches(samples: Sequence[TrainingSample], num_minibatches: int, generator: torch.Generator) -> list[list[TrainingSample]]:
    """Return the samples in random order, cut into `num_minibatches` parts whose sizes differ by one at most.

    Every sample is in exactly one part; with fewer samples than parts some are empty. Raises ValueError on a count below 1.
    """
    if num_minibatches < 1:
        raise ValueError(f"num_minibatches must be at least 1, got {num_minibatches}")
    order = torch.randperm(len(samples), generator=generator).tolist()
    bounds = [math.ceil(part * len(samples) / num_minibatches) for part in range(num_minibatches + 1)]
    return [[samples[index] for index in order[start:end]] for start, end in itertools.pairwise(bounds)]


def micro_batches(samples: Sequence[TrainingSample], max_tokens: int) -> list[MicroBatch]:
    """Return the samples as padded micro-batches, the longest first, each of at most `max_tokens` tokens, padding included.

    Every sample is in exactly one; samples of equal length keep their order. A sample longer than `max_tokens` is a batch of its
    own: it cannot be cut without changing the result.
    """
    batches: list[list[TrainingSample]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.token_ids_T)):
        # The first of a batch is its longest: all of them are padded to its length.
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].token_ids_T) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return [_pad(batch) for batch in batches]


def _total_reward(trajectory: Trajectory) -> float:
    if not trajectory.is_graded:
        return math.nan
    if "total" not in trajectory.rewards:
        raise ValueError(f"the rewards of a graded trajectory must hold total, got {sorted(trajectory.rewards)}: use score_trajectory")
    return trajectory.rewards["total"]


def _sample(trajectory: Trajectory, advantage: float) -> TrainingSample:
    sampler_logprob_T = tuple(math.nan if logprob is None else logprob for logprob in trajectory.sampler_logprob_T)
    return TrainingSample(trajectory.token_ids_T, trajectory.action_mask_T, sampler_logprob_T, advantage)


def _pad(samples: list[TrainingSample]) -> MicroBatch:
    shape = len(samples), len(samples[0].token_ids_T)
    batch = MicroBatch(
        token_ids_BT=torch.zeros(shape, dtype=torch.int64),
        attention_mask_BT=torch.zeros(shape, dtype=torch.bool),
        action_mask_BT=torch.zeros(shape, dtype=torch.bool),
        sampler_logprob_BT=torch.zeros(shape),
        advantage_BT=torch.zeros(shape),
    )
    for row, sample in enumerate(samples):
        length = len(sample.token_ids_T)
        batch.token_ids_BT[row, :length] = torch.tensor(sample.token_ids_T)
        batch.attention_mask_BT[row, :length] = True
        batch.action_mask_BT[row, :length] = torch.tensor(sample.action_mask_T)
        batch.sampler_logprob_BT[row, :length] = torch.tensor(sample.sampler_logprob_T)
        batch.advantage_BT[row, :length] = sample.advantage
    return batch
