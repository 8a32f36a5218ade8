"""Low-rank adapters (arXiv 2106.09685); the only file that knows of peft."""

import copy
import difflib

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from configs.schema import LoraConfig


def add_lora(model: PreTrainedModel, config: LoraConfig) -> PreTrainedModel:
    """Return the model with a fresh adapter on each of its target modules; only the adapters are trained.

    The outputs are unchanged at first: one factor of each adapter is zero. There is no dropout, which would make the log-probs of
    training and sampling differ. Raises ValueError when a target matches no linear layer, or is the head.
    """
    linears = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), "")
    linears.discard(head)
    for target in config.target_modules:
        if target not in linears:
            nearest = difflib.get_close_matches(target, linears, n=1, cutoff=0.0)
            raise ValueError(
                f"each of model.lora.target_modules must name linear layers of the model below its head, {target} names none: "
                f"nearest is {nearest[0] if nearest else 'none'}, there are {', '.join(sorted(linears)) or 'none'}"
            )
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type] - peft takes any number
        lora_dropout=0.0,
        target_modules=list(config.target_modules),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, peft_config)  # type: ignore[return-value] - a PeftModel passes on what a PreTrainedModel has


def is_lora(model: torch.nn.Module) -> bool:
    """Return whether the model has adapters."""
    return isinstance(model, PeftModel)


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the causal language model itself, whose layers hold the adapters if there are any."""
    return model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[return-value]


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with its adapters added into its weights; the model itself is left alone."""
    return copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
