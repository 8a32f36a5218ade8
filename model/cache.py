"""A key-value cache of slots for any transformers model with ordinary attention: sequences of different lengths in one forward call.

R rows of a call, S slots, H key-value heads, N new tokens of a row (right-aligned), L cached length that a call reads, T slot size, K head width.
"""

import torch
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [S, H, T, K]; where a call writes and reads is set by `SlotCache.plan`."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__()
        self._num_slots, self._max_tokens = num_slots, max_tokens
        self.rows: torch.Tensor | slice = slice(0, 0)
        self.read_length = 0
        self.write_index: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate on the first call, in the dtype and on the device of the model."""
        shape = (self._num_slots, key_states.shape[1], self._max_tokens)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [R, H, N, K] where the plan says and return [R, H, L, K] of the planned rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.write_index is None or self.keys is None or self.values is None:
            raise RuntimeError("a slot cache must be planned before a forward call: call SlotCache.plan first")
        row, column, slot, position = self.write_index
        self.keys[slot, :, position] = key_states[row, :, column]
        self.values[slot, :, position] = value_states[row, :, column]
        return self.keys[self.rows, :, : self.read_length], self.values[self.rows, :, : self.read_length]

    def get_seq_length(self) -> int:
        """Return the length that the planned call reads."""
        return self.read_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask; unused, since the mask is given explicitly."""
        return self.read_length, 0

    def get_max_length(self) -> int:
        """Return the size of a slot."""
        return self._max_tokens


class SlotCache(Cache):
    """All layers of a slot cache. It holds no lengths: the caller knows what each slot contains and says it with every call."""

    def __init__(self, config: PretrainedConfig, num_slots: int, max_tokens: int) -> None:
        layers = [SlotLayer(num_slots, max_tokens) for _ in range(config.get_text_config().num_hidden_layers)]
        super().__init__(layers=layers)
        self._num_slots = num_slots

    def plan(
        self, slots: list[int | None], starts: list[int], num_new: list[int], width: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Say what the next forward call is; returns position ids [R, N] and the additive attention mask [R, 1, N, L].

        slots: slot of each row; None for a row that is carried along, neither written nor meant to be read.
        starts: tokens that the slot holds before the call. num_new: new tokens of a row, at the right end of its `width` columns.
        Rows whose slots are 0, 1, 2, .. in order are read without a copy.
        """
        num_rows = len(slots)
        starts_R1, num_new_R1 = torch.tensor(starts)[:, None], torch.tensor(num_new)[:, None]
        columns_1N = torch.arange(width)[None]
        offset_RN = columns_1N - (width - num_new_R1)
        is_new_RN = (offset_RN >= 0) & torch.tensor([slot is not None for slot in slots])[:, None]
        position_RN = (starts_R1 + offset_RN).clamp(min=0)
        read_length = int((starts_R1 + num_new_R1).max())
        slot_R = torch.tensor([row if slot is None else slot for row, slot in enumerate(slots)])
        is_prefix = all(slot is None or slot == row for row, slot in enumerate(slots))
        row, column = is_new_RN.nonzero(as_tuple=True)
        index = (row, column, slot_R[row], position_RN[row, column])
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.rows = slice(0, num_rows) if is_prefix else slot_R
                layer.read_length, layer.write_index = read_length, index
        # Padding columns and carried rows look at position 0 only: their result is never used, but it must not be NaN.
        is_seen_RNL = torch.arange(read_length) <= torch.where(is_new_RN, position_RN, torch.zeros_like(position_RN))[:, :, None]
        mask_RNL = torch.zeros(is_seen_RNL.shape, dtype=dtype).masked_fill_(~is_seen_RNL, torch.finfo(dtype).min)
        return torch.where(is_new_RN, position_RN, torch.zeros_like(position_RN)), mask_RNL[:, None]
