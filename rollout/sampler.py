"""The sampler's contract: ids in, ids out. Nothing here knows of text, environments or Ray."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch


class SampleStop(StrEnum):
    """Why a sample ended."""

    STOP_TOKEN = "stop_token"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How one turn is sampled.

    max_tokens: at most this many are sampled. temperature: 0 means greedy (evaluation only).
    stop_token_ids: sampling ends after one of these, which is part of the sample. seed: fixes the sample's randomness.
    Example: `SamplingParams(max_tokens=64, temperature=1.0, stop_token_ids=(2,), seed=17)`.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sample:
    """The sampled tokens, S of them, with their log-prob at the sampling temperature and the policy version of each.

    At temperature 0 the log-probs are those at temperature 1.
    Example: `Sample((31, 7, 2), (-0.1, -1.2, -0.3), (4, 4, 5), SampleStop.STOP_TOKEN)`.
    """

    token_ids_S: tuple[int, ...]
    logprob_S: tuple[float, ...]
    policy_version_S: tuple[int, ...]
    stop: SampleStop


class Sampler(Protocol):
    """What an episode needs of a sampler; `rollout/engine.py` has the project's own."""

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Return one sample after `prompt_ids`.

        session: names the conversation; a later call of the same session whose prompt extends the earlier tokens may
        reuse their state, but only when that state was computed with the current weights.
        """
        ...

    def end_session(self, session: str) -> None:
        """Release what is kept for the session; unknown sessions are ignored."""
        ...

    def set_weights(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Take new weights between two decode steps, aborting nothing.

        Raises KeyError naming the tensors that match no parameter of the model, ValueError on a shape that differs.
        """
        ...
