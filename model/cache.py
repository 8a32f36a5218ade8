"""A key-value cache of slots for any transformers model with ordinary attention: ragged sequences in one forward call.

S slots, T tokens that a slot can hold, H key-value heads, K head width; of one call: R rows, N new tokens of a row (padded on the
right), L cached tokens that it reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

MAX_ROWS_PER_SLOT = 2
"""One new token for a row that nobody asked for costs less than copying the cached tokens of another row, about two to one."""


@dataclass(frozen=True)
class SlotCall:
    """The inputs of one forward call: `model(call.input_ids_RN, position_ids=..., attention_mask=..., past_key_values=cache)`.

    input_ids_RN, position_ids_RN: int64, 0 where padded. mask_R1NL: added to the attention scores, in the model's dtype.
    rows: for each slot that was asked for, in that order, its row; None when they are all rows in order.
    Example, slot 0 holding two tokens and slot 1 none, after `plan([0, 1], [[7], [8, 9]])`:
        input_ids_RN=[[7, 0], [8, 9]], position_ids_RN=[[2, 0], [0, 1]], rows=None,
        mask_R1NL seeing tokens 0-2 and 0 in row 0, tokens 0 and 0-1 in row 1
    """

    input_ids_RN: Tensor
    position_ids_RN: Tensor
    mask_R1NL: Tensor
    rows: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """Where a call writes and reads; new token i is at [row_n[i], column_n[i]] and goes to [slot_n[i], position_n[i]]."""

    row_n: Tensor
    column_n: Tensor
    slot_n: Tensor
    position_n: Tensor
    read_slots: slice | Tensor
    read_length: int
    is_fresh: bool
    """No row has earlier tokens, so that the new keys and values are all that is to be read."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [S, H, T, K] each."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__()
        self._num_slots, self._max_tokens = num_slots, max_tokens
        self.plan: _Plan | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate, in the dtype and on the device of the states. Zeros are not touched, so unused slots cost no memory."""
        shape = (self._num_slots, key_states.shape[1], self._max_tokens)
        # Tensors made in inference mode could not be copied or erased outside of it.
        with torch.inference_mode(False):
            self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
            self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new [R, H, N, K] and return what the rows hold, [R, H, L, K]; raises RuntimeError without a plan."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan, keys, values = self.plan, self.keys, self.values
        if plan is None or keys is None or values is None:
            raise RuntimeError("a forward call with a slot cache must be planned, this one was not: call SlotCache.plan first")
        keys[plan.slot_n, :, plan.position_n] = key_states[plan.row_n, :, plan.column_n]
        values[plan.slot_n, :, plan.position_n] = value_states[plan.row_n, :, plan.column_n]
        if plan.is_fresh:
            return key_states, value_states
        return keys[plan.read_slots, :, : plan.read_length], values[plan.read_slots, :, : plan.read_length]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for states in (self.keys, self.values):
            if states is not None:
                states[target, :, :num_tokens] = states[source, :, :num_tokens]

    def erase(self, slot: int) -> None:
        """Set a slot to zero."""
        for states in (self.keys, self.values):
            if states is not None:
                states[slot] = 0

    def get_seq_length(self) -> int:
        """Return 0: rows have different lengths, and positions are always given."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset that a mask must cover; masks are always given."""
        return (query_length if self.plan is None else self.plan.read_length), 0

    def get_max_length(self) -> int:
        """Return how many tokens a slot can hold."""
        return self._max_tokens


class SlotCache(Cache):
    """All layers, and the token ids whose keys and values each slot holds.

    A call is planned first and then made; `plan` counts its tokens as held. Nothing behind a slot's last token is ever seen, so
    forgetting tokens costs nothing.
    """

    def __init__(self, config: PretrainedConfig, num_slots: int, max_tokens: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ValueError when a layer is not ordinary attention, or `max_tokens` exceeds the positions of the model."""
        text_config = config.get_text_config()
        check_ordinary_attention(text_config, max_tokens)
        self._layers = [SlotLayer(num_slots, max_tokens) for _ in range(text_config.num_hidden_layers)]
        super().__init__(layers=list(self._layers))
        self._max_tokens, self._dtype, self._device = max_tokens, dtype, device
        self._token_ids: list[list[int]] = [[] for _ in range(num_slots)]
        self._arange = torch.arange(max_tokens, device=device)

    def length(self, slot: int) -> int:
        """Return how many tokens the slot holds."""
        return len(self._token_ids[slot])

    def token_ids(self, slot: int) -> tuple[int, ...]:
        """Return the tokens that the slot holds."""
        return tuple(self._token_ids[slot])

    def common_length(self, slot: int, token_ids: Sequence[int]) -> int:
        """Return how many first tokens of the slot are those of `token_ids`."""
        return common_length(self._token_ids[slot], token_ids)

    def truncate(self, slot: int, length: int) -> None:
        """Forget the tokens of a slot from `length` on."""
        del self._token_ids[slot][length:]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Make slot `target` hold the first tokens of slot `source`."""
        if source == target:
            self.truncate(target, num_tokens)
            return
        self._token_ids[target] = self._token_ids[source][:num_tokens]
        for layer in self._layers:
            layer.copy(source, target, num_tokens)

    def erase(self, slot: int) -> None:
        """Forget a slot and overwrite it: a NaN left behind would be read by the next sequence, since 0 * NaN is NaN."""
        self._token_ids[slot] = []
        for layer in self._layers:
            layer.erase(slot)

    def plan(self, slots: Sequence[int], new_ids: Sequence[Sequence[int]]) -> SlotCall:
        """Prepare the layers for one forward call and return its inputs; from here on the slots hold the new tokens too.

        slots: different ones, ascending. new_ids: one or more tokens for each. Rows that nobody asked for are put between when that
        saves copying: they are computed, not written, and must not be read.
        Raises ValueError when slots are not ascending, a slot gets no token, or more than it can hold.
        """
        self._check_plan(slots, new_ids)
        row_slots, read_slots = self._choose_rows(slots, is_decoding=all(len(ids) == 1 for ids in new_ids))
        new_ids_of = dict(zip(slots, new_ids, strict=True))
        width = max(map(len, new_ids))
        padded_ids = [[*new_ids_of.get(slot, ()), *[0] * (width - len(new_ids_of.get(slot, ())))] for slot in row_slots]
        starts = [self.length(slot) if slot in new_ids_of else 0 for slot in row_slots]
        start_R1 = self._tensor(starts)[:, None]
        num_new_R1 = self._tensor([len(new_ids_of.get(slot, ())) for slot in row_slots])[:, None]
        is_new_RN = self._arange[:width] < num_new_R1
        # What is padded looks at the first token only: its result is never used, but a row that sees nothing would be NaN.
        position_RN = (start_R1 + self._arange[:width]).masked_fill_(~is_new_RN, 0)
        read_length = max(start + len(new_ids_of.get(slot, ())) for start, slot in zip(starts, row_slots, strict=True))
        is_hidden_RNL = self._arange[:read_length] > position_RN[:, :, None]
        mask_RNL = torch.zeros(is_hidden_RNL.shape, dtype=self._dtype, device=self._device)
        mask_RNL.masked_fill_(is_hidden_RNL, torch.finfo(self._dtype).min)
        row_n, column_n = is_new_RN.nonzero(as_tuple=True)
        plan = _Plan(
            row_n=row_n,
            column_n=column_n,
            slot_n=self._tensor(row_slots)[row_n],
            position_n=position_RN[row_n, column_n],
            read_slots=self._tensor(row_slots) if read_slots is None else read_slots,
            read_length=read_length,
            is_fresh=not any(starts),
        )
        for layer in self._layers:
            layer.plan = plan
        for slot, ids in zip(slots, new_ids, strict=True):
            self._token_ids[slot].extend(ids)
        rows = None if len(row_slots) == len(slots) else self._tensor([slot - row_slots[0] for slot in slots])
        return SlotCall(self._tensor(padded_ids), position_RN, mask_RNL[:, None], rows)

    def _choose_rows(self, slots: Sequence[int], *, is_decoding: bool) -> tuple[list[int], slice | None]:
        """Return the slot of each row, and the range to read without a copy, or None."""
        first, end = slots[0], slots[-1] + 1
        if end - first == len(slots) or (is_decoding and end - first <= MAX_ROWS_PER_SLOT * len(slots)):
            return list(range(first, end)), slice(first, end)
        return list(slots), None

    def _check_plan(self, slots: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
        if not slots or any(left >= right for left, right in pairwise(slots)):
            raise ValueError(f"the slots of a call must be ascending and at least one, got {list(slots)}")
        for slot, ids in zip(slots, new_ids, strict=True):
            if not 0 < len(ids) <= self._max_tokens - self.length(slot):
                raise ValueError(
                    f"slot {slot} must get 1 to {self._max_tokens - self.length(slot)} more tokens, got {len(ids)}: it holds "
                    f"{self.length(slot)} of {self._max_tokens}"
                )

    def _tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, device=self._device)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many first tokens two sequences share."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def check_ordinary_attention(config: PretrainedConfig, max_tokens: int) -> None:
    """Raise ValueError unless every layer attends to all earlier tokens, over at least `max_tokens` positions."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds == {"full_attention"} and getattr(config, "layer_types", None) is None and window is not None:
        kinds = {"sliding_attention"}
    if window is not None and window >= max_tokens:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        raise ValueError(
            f"each layer must attend to all of {max_tokens} tokens to be cached in slots, got {', '.join(sorted(kinds))} (window {window})"
        )
    num_positions = getattr(config, "max_position_embeddings", None)
    if num_positions is not None and num_positions < max_tokens:
        raise ValueError(f"a slot must hold at most the model's {num_positions} positions, got {max_tokens}: lower max_context_tokens")
