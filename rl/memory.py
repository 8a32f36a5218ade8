"""What a recipe would run and how much memory each process needs, estimated without loading a weight."""

from dataclasses import dataclass

import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from configs.schema import RunConfig
from model.loading import resolve_path
from model.logprobs import LOGPROB_CHUNK

PROCESS_GIB = 0.45
"""A process with torch and transformers imported, measured."""
GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Estimates in GiB: `MemoryPlan(num_parameters=979_000, num_trained=979_000, learner_gib=0.7, worker_gib=0.9)`."""

    num_parameters: int
    num_trained: int
    learner_gib: float
    worker_gib: float


def plan_memory(config: RunConfig) -> MemoryPlan:
    """Return the estimate for one learner and one rollout worker.

    Learner: weights, gradients, two AdamW moments, the activations of one micro-batch (about 16 hidden and 4 feed-forward widths
    per token and layer; one layer's worth with gradient checkpointing), and logits, three times over (their log-softmax and their
    gradient beside them), of one chunk of the log-probs or of one batch of the warm start, whichever is larger. Worker: weights and
    the whole slot cache.
    """
    shape = _load_shape(config)
    width = 2 if config.model.dtype == "bfloat16" else 4
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trained = _num_lora_parameters(config, model) if config.model.lora else num_parameters
    layers, hidden = shape.num_hidden_layers, shape.hidden_size
    layer_activations = 16 * hidden + 4 * shape.intermediate_size
    kept_layers = 1 if config.model.gradient_checkpointing else layers
    activations = max(config.learner.micro_batch_tokens, config.rollout.max_context_tokens) * (
        layer_activations * kept_layers + layers * hidden
    )
    logit_tokens = min(LOGPROB_CHUNK, config.learner.micro_batch_tokens)
    if config.warm_start is not None:
        logit_tokens = max(logit_tokens, config.warm_start.batch_size * config.rollout.max_context_tokens)
    logits = 3 * 4 * logit_tokens * shape.vocab_size
    learner = num_parameters * width + num_trained * (width + 8) + activations * width + logits
    kv_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_dim = getattr(shape, "head_dim", None) or hidden // shape.num_attention_heads
    cache = config.rollout.max_concurrent_episodes * config.rollout.max_context_tokens * layers * 2 * kv_heads * head_dim * width
    worker = num_parameters * width + cache
    return MemoryPlan(num_parameters, num_trained, PROCESS_GIB + learner / GIB, PROCESS_GIB + worker / GIB)


def plan_table(config: RunConfig) -> Table:
    """Return what would run, as a table."""
    plan = plan_memory(config)
    learner, rollout = config.learner, config.rollout
    per_step = learner.groups_per_step * learner.group_size
    table = Table(title=f"{config.name}, mode {config.mode}, seed {config.seed}", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("policy", f"{config.model.path}, {plan.num_parameters:,} parameters, {plan.num_trained:,} trained")
    table.add_row("environment", f"{config.env.id}, {config.env.num_train_tasks:,} training tasks")
    table.add_row(
        "steps",
        f"{learner.num_steps} of {learner.groups_per_step} groups of {learner.group_size}: {learner.num_steps * per_step:,} trajectories",
    )
    table.add_row("evaluation", f"{config.evaluation.num_episodes} episodes of the {config.evaluation.split} split, before and after")
    table.add_row(
        "processes",
        f"1 learner ({learner.torch_threads} threads), {rollout.num_workers} rollout workers ({rollout.torch_threads} threads each)",
    )
    table.add_row("memory, learner", f"about {plan.learner_gib:.1f} GiB")
    table.add_row("memory, rollout workers", f"about {rollout.num_workers} x {plan.worker_gib:.1f} GiB")
    table.add_row("memory, in all", f"about {plan.learner_gib + rollout.num_workers * plan.worker_gib + 1:.1f} GiB, 1 GiB of it for Ray")
    return table


def _load_shape(config: RunConfig) -> PretrainedConfig:
    path = resolve_path(config.model.path)
    if path.suffix == ".gguf":
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    return AutoConfig.from_pretrained(path)


def _num_lora_parameters(config: RunConfig, model: torch.nn.Module) -> int:
    lora = config.model.lora
    targets = lora.target_modules if lora else ()
    rank = lora.rank if lora else 0
    linears = (m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name.rsplit(".", 1)[-1] in targets)
    return sum(rank * (m.in_features + m.out_features) for m in linears)
