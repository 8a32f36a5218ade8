"""Slow twins of the functions of `model`: as plain as the definition, for comparison in value and gradient."""

import torch
from transformers import PreTrainedModel


def action_logprobs(model: PreTrainedModel, token_ids_BT: torch.Tensor, action_mask_BT: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probs of the action tokens, row by row and token by token, from the model's own full logits; no padding."""
    rows = []
    for token_ids_T, action_mask_T in zip(token_ids_BT, action_mask_BT, strict=True):
        logits_TV = model(input_ids=token_ids_T[None]).logits[0].float()
        row = [torch.tensor(0.0)]
        for t in range(1, len(token_ids_T)):
            logprob_V = torch.log_softmax(logits_TV[t - 1] / temperature, dim=-1)
            row.append(logprob_V[token_ids_T[t]] if action_mask_T[t] else torch.tensor(0.0))
        rows.append(torch.stack(row))
    return torch.stack(rows)
