"""The learner: optimiser updates of a policy on training samples. It is blind to how advantages were estimated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.schema import LearnerConfig
from model.logprobs import action_logprobs
from rl.batch import MicroBatch, TrainingSample, micro_batches, minibatches
from rl.errors import RunError
from rl.losses import PolicyLoss, clipped_policy_loss

MAX_NONFINITE_IN_ROW = 3
"""One bad batch can happen; this many in a row are a policy that is lost."""


class NonFiniteGradientError(RunError, FloatingPointError):
    """The gradient was NaN or infinite in several updates in a row."""


class Learner:
    """Trains the parameters of a model that require a gradient.

    version: calls of `update` so far; it grows by one with each, also when nothing could be learned.
    """

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, *, temperature: float, total_steps: int, seed: int) -> None:
        """model: a causal language model; its mode is left as it is, and dropout should be off, or no token is on policy.

        temperature: at which the samples were sampled. total_steps: calls of `update` in the whole run, for the schedule.
        seed: of the order of samples in minibatches.
        Raises ValueError on a temperature that is not above 0 and on a model without trainable parameters.
        """
        if not temperature > 0:
            raise ValueError(f"the temperature must be above 0 for training, got {temperature}: greedy samples carry no signal")
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("the model must have a parameter that requires a gradient, got none: add adapters or unfreeze it")
        self._model, self._config, self._temperature, self._total_steps = model, config, temperature, total_steps
        self._optimizer = torch.optim.AdamW(self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        self._generator = torch.Generator().manual_seed(seed)
        self._num_nonfinite_in_row = 0
        self.version = 0

    def update(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Run `num_minibatches` optimiser updates on the samples; returns the metrics of `loss/`, `correction/` and `learner/`.

        Each update minimises the mean over the action tokens of all samples of its minibatch, those with advantage 0 included,
        but only samples with a gradient go through the model; ratios, gaps and token counts speak of these. A minibatch without
        such a sample is no update: the optimiser's momentum alone would move the policy.
        A metric of nothing is NaN: without samples all but the counts are.
        Raises NonFiniteGradientError when the gradient of three updates in a row was not finite; the policy is as before them.
        """
        learning_rate = self._config.learning_rate * learning_rate_factor(self.version, self._total_steps, self._config)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = learning_rate
        tally = _Tally()
        for part in minibatches(samples, self._config.num_minibatches, self._generator):
            self._update_once(part, tally)
        self.version += 1
        return {**tally.metrics(), "learner/learning_rate/last": learning_rate}

    def state_dict(self) -> dict[str, Any]:
        """Return all that `update` depends on beside the model's weights: optimiser, version, generator.

        As in torch, the tensors are the live ones: save or copy them before the next update.
        """
        return {
            "optimizer": self._optimizer.state_dict(),
            "version": self.version,
            "generator": self._generator.get_state(),
            "num_nonfinite_in_row": self._num_nonfinite_in_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a learner of the same model; with the same weights the next update is bitwise the same."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._num_nonfinite_in_row = state["num_nonfinite_in_row"]
        self.version = state["version"]

    def _update_once(self, samples: list[TrainingSample], tally: "_Tally") -> None:
        """Run one optimiser update, or none when no sample has a gradient."""
        num_action_tokens = sum(sample.num_action_tokens for sample in samples)
        tally.num_action_tokens += num_action_tokens
        trained = [sample for sample in samples if sample.has_gradient]
        if not trained:
            return
        self._optimizer.zero_grad()
        for batch in micro_batches(trained, self._config.micro_batch_tokens):
            self._backward(batch, num_action_tokens, tally)
        grad_norm = float(nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if math.isfinite(grad_norm):
            self._optimizer.step()
            self._num_nonfinite_in_row = 0
            tally.grad_norms.append(grad_norm)
        else:
            self._num_nonfinite_in_row += 1
            tally.num_skipped += 1
        self._optimizer.zero_grad()
        if self._num_nonfinite_in_row >= MAX_NONFINITE_IN_ROW:
            raise NonFiniteGradientError(
                f"the gradient must be finite, it was not in {self._num_nonfinite_in_row} updates in a row (version {self.version}): "
                f"lower learner.learning_rate, now {self._config.learning_rate:g}, or go on from an earlier checkpoint"
            )

    def _backward(self, batch: MicroBatch, num_action_tokens: int, tally: "_Tally") -> None:
        """Add the gradient of one micro-batch."""
        device = self._parameters[0].device
        action_mask_BT, sampler_logprob_BT = batch.action_mask_BT.to(device), batch.sampler_logprob_BT.to(device)
        logprob_BT = action_logprobs(
            self._model,
            batch.token_ids_BT.to(device),
            batch.attention_mask_BT.to(device),
            action_mask_BT,
            temperature=self._temperature,
        )
        policy = clipped_policy_loss(
            logprob_BT,
            sampler_logprob_BT,
            batch.advantage_BT.to(device),
            action_mask_BT,
            num_action_tokens=num_action_tokens,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
        )
        policy.loss.backward()
        gap_BT = (logprob_BT.detach() - sampler_logprob_BT).abs()
        tally.add(policy, gap_BT[action_mask_BT & sampler_logprob_BT.isfinite()], num_action_tokens)


def learning_rate_factor(step: int, total_steps: int, config: LearnerConfig) -> float:
    """Return what the peak learning rate is multiplied by in step `step`, counted from 0.

    The warm-up rises through 1/(w+1), .., w/(w+1) and reaches 1 after its w steps; the linear decay falls from there by equal
    amounts, so that it would reach 0 in the step after the last: a last step at 0 would be wasted.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.decay == "constant":
        return 1.0
    return max(0.0, (total_steps - step) / max(1, total_steps - config.warmup_steps))


@dataclass
class _Tally:
    """Sums over all parts of a step."""

    num_action_tokens: int = 0
    num_tokens: int = 0
    num_clipped: int = 0
    num_missing: int = 0
    num_skipped: int = 0
    loss_sum: float = 0.0
    ratio_sum: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)

    def add(self, policy: PolicyLoss, gap_N: Tensor, num_action_tokens: int) -> None:
        """Add one micro-batch; gap_N: |learner's log-prob - sampler's| of the tokens that have both."""
        self.num_tokens += int(policy.num_tokens)
        self.num_clipped += int(policy.num_clipped)
        self.num_missing += int(policy.num_missing)
        self.loss_sum += float(policy.loss.detach()) * num_action_tokens
        self.ratio_sum += float(policy.ratio_sum)
        self.gaps.append(gap_N.cpu())

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, learning rate left out."""
        gap_N = torch.cat(self.gaps).double().sort().values if self.gaps else torch.empty(0)
        return {
            "loss/policy/mean": _ratio(self.loss_sum, self.num_action_tokens),
            "loss/clipped_fraction/mean": _ratio(self.num_clipped, self.num_tokens),
            "loss/ratio/mean": _ratio(self.ratio_sum, self.num_tokens),
            "loss/grad_norm/max": max(self.grad_norms, default=math.nan),
            "correction/logprob_gap/mean": float(gap_N.mean()),
            # The smallest gap that at least 99 % of the tokens do not exceed; torch.quantile refuses more than 16 million values.
            "correction/logprob_gap/p99": float(gap_N[math.ceil(0.99 * len(gap_N)) - 1]) if len(gap_N) else math.nan,
            "correction/missing_logprobs/count": self.num_missing,
            "learner/tokens/sum": self.num_tokens,
            "learner/skipped_updates/count": self.num_skipped,
        }


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan
