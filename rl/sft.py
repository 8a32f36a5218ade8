"""Supervised fine-tuning on an oracle's episodes, by TRL's SFTTrainer; the only file that knows of trl.

T tokens of a whole episode, prompt included. Entry t of any `*_T` speaks of token t.
"""

import math
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import datasets
import torch
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.optimization import get_scheduler
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from envs.registry import make_env
from envs.tool_env import ToolEnv
from model.chat import ChatMLRenderer
from model.loading import Policy
from model.lora import base_model

ADAM_BETA2 = 0.95
"""As in most pretraining of language models: a shorter memory of squared gradients than the default, 0.999, has."""
IGNORED = -100
"""The label of a token that is not trained."""
SORTED_BATCHES = 50
"""So many batches are filled from episodes that were sorted by length together: little padding, and still a random choice."""


@dataclass(frozen=True)
class SupervisedExample:
    """An episode to imitate; action_mask_T is true for the tokens that are trained.

    Example (prompt, turn, observation): `SupervisedExample((5, 9, 31, 7, 2, 11), (False, False, True, True, True, False))`.
    """

    token_ids_T: tuple[int, ...]
    action_mask_T: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids_T) != len(self.action_mask_T):
            raise ValueError(
                f"token_ids_T and action_mask_T must have one length, got {len(self.token_ids_T)} and {len(self.action_mask_T)}"
            )


def oracle_conversations(
    env_id: str, env_options: Mapping[str, Any], seeds: Iterable[int], flaw_rate: float, seed: int, renderer: ChatMLRenderer
) -> list[SupervisedExample]:
    """Return an episode of the oracle for each task seed, played in the real environment; the oracle's turns are trained.

    flaw_rate: how often a decision goes wrong; each episode draws its own flaws, from `seed` and the task's seed. Raises ValueError
    when the environment has no oracle, NotImplementedError when it has no flawed one and `flaw_rate` is above 0.
    """
    env = make_env(env_id, env_options)
    try:
        return [_play(env, task_seed, flaw_rate, seed, renderer) for task_seed in seeds]
    finally:
        env.close()


def supervised_fine_tune(
    policy: Policy,
    examples: list[SupervisedExample],
    *,
    learning_rate: float,
    num_epochs: float,
    batch_size: int,
    seed: int,
    schedule: Literal["constant", "linear", "cosine"] = "linear",
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    muon_learning_rate: float | None = None,
    log_every_steps: int = 10,
    report: Callable[[dict[str, float]], None] | None = None,
    show_progress: bool = True,
) -> None:
    """Train `policy.model` in place on the examples, as they are: nothing is tokenised, cut or packed.

    The loss is the mean negative log-prob of the trained tokens of a batch (`batch_size` episodes of like length). muon_learning_rate:
    when given, Muon (Jordan et al. 2024) trains the matrices of the hidden layers, at this rate on the scale of AdamW's (Liu et al.
    2025), and AdamW only the rest: embeddings, norms, heads. report: called
    every `log_every_steps` steps with `step`, `loss`, `mean_token_accuracy` and what else TRL logs. The trainer, its optimiser and
    what it patched into the model are gone afterwards. Raises ValueError when there are no examples.
    """
    if not examples:
        raise ValueError("supervised fine-tuning needs at least one example, got none: raise warm_start.num_episodes")
    order = training_order([len(example.token_ids_T) for example in examples], num_epochs, batch_size, seed)
    dataset = _dataset(examples).select(order)
    model, core = policy.model, base_model(policy.model)
    matrices = _hidden_matrices(model) if muon_learning_rate is not None else []
    was_training, patched_forward, tags = model.training, vars(core).get("forward"), core.model_tags
    with tempfile.TemporaryDirectory(prefix="sft-") as folder:
        arguments = SFTConfig(
            output_dir=folder,
            learning_rate=learning_rate,
            num_train_epochs=1,  # of a dataset that holds all epochs
            per_device_train_batch_size=batch_size,
            lr_scheduler_type=schedule,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            adam_beta2=ADAM_BETA2,
            seed=seed,
            logging_steps=log_every_steps,
            disable_tqdm=not show_progress,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=None,
            gradient_checkpointing=core.is_gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=False,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
        )
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=dataset, processing_class=policy.tokenizer)
        if muon_learning_rate is not None:
            _leave_out(trainer.create_optimizer(), matrices)
            trainer.add_callback(_MuonStep(matrices, muon_learning_rate, weight_decay))
        trainer.remove_callback(PrinterCallback)
        if report is not None:
            trainer.add_callback(_Report(report))
        trainer.train()
    # TRL leaves its own forward on the instance, and a tag for model cards.
    vars(core).pop("forward", None)
    if patched_forward is not None:
        vars(core)["forward"] = patched_forward
    core.model_tags = tags
    model.train(was_training)
    model.zero_grad(set_to_none=True)


def training_order(lengths: Sequence[int], num_epochs: float, batch_size: int, seed: int) -> list[int]:
    """Return the rows in the order of training: `num_epochs` shuffled passes, cut into batches of like length that come in any order.

    The trainer's own grouping by length takes the batches from long to short, again and again, and a small model learns markedly worse
    from that: its optimiser's averages follow the length.
    """
    rng = random.Random(seed)
    num_rows = max(1, round(num_epochs * len(lengths)))
    passes = [rng.sample(range(len(lengths)), len(lengths)) for _ in range(math.ceil(num_epochs))]
    rows = list(chain.from_iterable(passes))[:num_rows]
    order: list[int] = []
    for pool in _batched(rows, SORTED_BATCHES * batch_size):
        batches = _batched(sorted(pool, key=lambda row: lengths[row]), batch_size)
        # Only the last batch of all may be short: one before it would shift all that follow.
        last = [batches.pop()] if len(batches[-1]) < batch_size else []
        rng.shuffle(batches)
        order += chain.from_iterable(batches + last)
    return order


def _batched(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained matrices that are neither embedding nor output head."""
    outer = {id(parameter) for module in model.modules() if isinstance(module, torch.nn.Embedding) for parameter in module.parameters()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim == 2 and id(parameter) not in outer]


def _leave_out(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Take the parameters from an optimiser that has not stepped yet."""
    ids = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]


class _MuonStep(TrainerCallback):
    """Steps Muon beside the trainer's optimiser, by the same schedule: torch's Muon takes matrices only, and the trainer one optimiser."""

    def __init__(self, matrices: list[torch.nn.Parameter], learning_rate: float, weight_decay: float) -> None:
        self._optimizer = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._schedule: torch.optim.lr_scheduler.LRScheduler | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._schedule = get_scheduler(
            args.lr_scheduler_type, self._optimizer, args.get_warmup_steps(state.max_steps), num_training_steps=state.max_steps
        )

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self._schedule is not None
        self._optimizer.step()
        self._schedule.step()


class _Report(TrainerCallback):
    """Hands each record of the trainer's log to a function."""

    def __init__(self, report: Callable[[dict[str, float]], None]) -> None:
        self._report = report

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        if logs and "loss" in logs:
            self._report({"step": state.global_step, "num_steps": state.max_steps, **{name: float(value) for name, value in logs.items()}})


def _play(env: ToolEnv, task_seed: int, flaw_rate: float, seed: int, renderer: ChatMLRenderer) -> SupervisedExample:
    observation, _ = env.reset(seed=task_seed)
    # The sum may not grow with both seeds alike: neighbouring tasks would share their flaws.
    turns = env.flawed_oracle(flaw_rate, seed * 1_000_003 + task_seed) if flaw_rate > 0 else env.oracle()
    if turns is None:
        raise ValueError(f"a warm start needs an environment with an oracle, {type(env).__name__} has none: remove [warm_start]")
    token_ids = renderer.prompt_ids(observation.messages, observation.tools)
    action_mask = [False] * len(token_ids)
    for turn in turns:
        turn_ids = renderer.turn_ids(turn.text)
        token_ids += turn_ids
        action_mask += [True] * len(turn_ids)
        observation, _, terminated, truncated, _ = env.step(turn)
        if terminated or truncated:
            break
        observed_ids = renderer.closing_ids(turn_ids) + renderer.observation_ids(observation.messages)
        token_ids += observed_ids
        action_mask += [False] * len(observed_ids)
    return SupervisedExample(tuple(token_ids), tuple(action_mask))


def _dataset(examples: list[SupervisedExample]) -> datasets.Dataset:
    """Return the examples as TRL's trainer takes them: ids, and labels that stand at their own token (the shift is TRL's)."""
    rows = {
        "input_ids": [list(example.token_ids_T) for example in examples],
        "labels": [
            [token if is_action else IGNORED for token, is_action in zip(example.token_ids_T, example.action_mask_T, strict=True)]
            for example in examples
        ],
    }
    return datasets.Dataset.from_dict(rows)
