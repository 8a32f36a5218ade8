"""Log-probs of chosen tokens under the trained policy; the one place where logits and tokens are shifted against each other.

B sequences, T tokens, V vocabulary, D hidden, N action tokens of all sequences. Entry t of any `*_BT` speaks of token t.
"""

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from model.lora import base_model

PROBE_TOLERANCE = 1e-4
LOGPROB_CHUNK = 4096
"""Tokens whose logits exist at the same time, unless the caller says otherwise."""


def action_logprobs(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    attention_mask_BT: torch.Tensor,
    action_mask_BT: torch.Tensor,
    *,
    temperature: float,
    chunk_size: int = LOGPROB_CHUNK,
) -> torch.Tensor:
    """Return float32 [B, T]: log_softmax(logits / temperature) of each action token, 0 elsewhere.

    token_ids_BT: int64, padded on the right. attention_mask_BT: bool, false at padding. action_mask_BT: bool.
    The head is applied at the positions before action tokens only, `chunk_size` of them at a time, and its logits are computed again
    in the backward pass: no tensor [T, V] of all positions ever exists.
    Raises ValueError at temperature 0, on shapes that differ, on padding before a token, on an action token that is padding and on one
    with nothing before it.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 to train, got {temperature}: greedy samples carry no signal")
    shapes = [list(tensor.shape) for tensor in (token_ids_BT, attention_mask_BT, action_mask_BT)]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"token ids, attention mask and action mask must have one shape [B, T], got {shapes}")
    if action_mask_BT[:, 0].any():
        raise ValueError("the first token of a sequence cannot be an action token: no logits speak of it")
    if not attention_mask_BT[:, 0].all() or (~attention_mask_BT[:, :-1].bool() & attention_mask_BT[:, 1:].bool()).any():
        raise ValueError("sequences must be padded on the right, got padding before a token")
    if (action_mask_BT & ~attention_mask_BT.bool()).any():
        raise ValueError("an action token must be a token of its sequence, got one in the padding: cut both masks at the same place")
    core = base_model(model)
    hidden_BTD = core.get_decoder()(input_ids=token_ids_BT, attention_mask=attention_mask_BT.long(), use_cache=False).last_hidden_state
    is_action_BT = action_mask_BT[:, 1:]
    hidden_ND = hidden_BTD[:, :-1][is_action_BT]
    token_N = token_ids_BT[:, 1:][is_action_BT]
    head = _head(core)
    chunks = [
        checkpoint(_chosen_logprobs, head, hidden_nD, token_n, temperature, use_reentrant=False)
        for hidden_nD, token_n in zip(hidden_ND.split(chunk_size), token_N.split(chunk_size), strict=True)
    ]
    logprob_BT = hidden_BTD.new_zeros(token_ids_BT.shape, dtype=torch.float32)
    return logprob_BT.masked_scatter(action_mask_BT, torch.cat(chunks)) if chunks else logprob_BT


def check_head(model: PreTrainedModel) -> None:
    """Raise ValueError when the model's logits are not its output embeddings applied to its last hidden state.

    Some models scale or cap their logits afterwards; their log-probs would silently be others than those that the sampler records.
    """
    core = base_model(model)
    token_ids_BT = torch.tensor([[0, 1, 2]], device=core.device)
    with torch.no_grad():
        expected = core(input_ids=token_ids_BT, use_cache=False).logits
        computed = _head(core)(core.get_decoder()(input_ids=token_ids_BT, use_cache=False).last_hidden_state)
    gap = (expected - computed).abs().max().item()
    if not gap <= PROBE_TOLERANCE * (1 + expected.abs().max().item()):
        raise ValueError(
            f"a model's logits must be its output embeddings applied to its last hidden state, those of {type(core).__name__} differ by "
            f"{gap:.2g}: it scales or caps them, which is not supported"
        )


def _head(core: PreTrainedModel) -> torch.nn.Module:
    head = core.get_output_embeddings()
    if head is None:
        raise ValueError(f"a policy must be a causal language model with output embeddings, {type(core).__name__} has none")
    return head


def _chosen_logprobs(head: torch.nn.Module, hidden_nD: torch.Tensor, token_n: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_nV = head(hidden_nD).float() / temperature
    return logits_nV.gather(1, token_n[:, None])[:, 0] - logits_nV.logsumexp(dim=-1)
