"""Grouped-query attention on a CPU without copying each key-value head for all of its query heads.

transformers repeats the heads whenever there is a mask. For 32 sequences of 500 tokens, 9 heads on 3, that took 35 ms a layer instead of 2.
"""

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from model.lora import base_model

NAME = "cairn_grouped_sdpa"


def group_attention(model: PreTrainedModel) -> None:
    """Let a model that uses `sdpa` share key-value heads; the results are the same. Others, and models on a GPU, are left alone."""
    core = base_model(model)
    if core.config._attn_implementation != "sdpa" or core.device.type != "cpu":
        return
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    core.set_attn_implementation(NAME)


def grouped_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, Tensor | None]:
    """Return what transformers' `sdpa_attention_forward` returns: [B, N, heads, K] and None.

    query: [B, heads, N, K]. key, value: [B, key-value heads, L, K].
    """
    # Without a mask transformers shares the heads itself; a position bias is its own affair.
    if attention_mask is None or query.shape[1] == key.shape[1] or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=kwargs.get("dropout", 0.0), scale=kwargs.get("scaling"), enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
