"""The project's own sampler: continuous batching over a slot cache, for any transformers causal model with ordinary attention.

One thread owns the model. Between two decode steps requests join and leave, and new weights are taken. R rows, V vocabulary.
"""

import asyncio
import random
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from model.cache import SlotCache
from model.loading import load_weights
from rollout.sampler import Sample, SampleStop, SamplingParams


@dataclass(frozen=True)
class EngineStats:
    """Counts since the start: prompt tokens computed and reused, tokens sampled, decode steps, seconds of computing."""

    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    sampled_tokens: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0


@dataclass
class _Slot:
    """A place in the cache: the tokens whose state it holds, and the weights that computed all of them."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    version: int = 0
    is_busy: bool = False


@dataclass
class _Request:
    prompt_ids: list[int]
    sampling: SamplingParams
    session: str
    future: "Future[Sample]"
    rng: random.Random
    slot: _Slot | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Engine:
    """Implements `Sampler`. The thread starts with the first request and ends with `stop`.

    A session keeps its slot between turns, so that the next turn computes its new tokens only; a slot whose state was computed with
    other weights is computed again. With more sessions than slots the least recently used idle one is evicted.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_context_tokens: int, version: int = 0) -> None:
        """num_slots: sequences that are decoded at once. max_context_tokens: prompt and sample of a request, at most."""
        self._model = model.eval()
        self._max_context_tokens = max_context_tokens
        self._cache = SlotCache(model.config, num_slots, max_context_tokens)
        self._free = [_Slot(index) for index in reversed(range(num_slots))]
        self._sessions: OrderedDict[str, _Slot] = OrderedDict()
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._version = version
        self._updates: deque[tuple[int, dict[str, torch.Tensor], Future[None]]] = deque()
        self._ended: deque[str] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._stats = EngineStats()

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._version

    def stats(self) -> EngineStats:
        """Return the counts so far."""
        return self._stats

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Return one sample; see `Sampler.generate`. Cancelling it takes the request out of the batch.

        Raises ValueError when the prompt is empty or leaves no room, FloatingPointError when the model's logits are not finite.
        """
        if not 0 < len(prompt_ids) < self._max_context_tokens:
            raise ValueError(
                f"a prompt must have 1 to {self._max_context_tokens - 1} tokens, got {len(prompt_ids)}: raise rollout.max_context_tokens"
            )
        request = _Request(list(prompt_ids), sampling, session, Future(), random.Random(sampling.seed))
        self._submit(lambda: self._waiting.append(request))
        return await asyncio.wrap_future(request.future)

    def end_session(self, session: str) -> None:
        """Release the session's slot."""
        with self._wake:
            self._ended.append(session)
            self._wake.notify()

    def set_weights(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Take new weights between two decode steps and return when they are in use; see `Sampler.set_weights`."""
        future: Future[None] = Future()
        self._submit(lambda: self._updates.append((version, weights, future)))
        future.result()

    def stop(self) -> None:
        """End the thread; requests that still wait or run get a RuntimeError."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        self._fail_all(RuntimeError("the engine must run to sample, it was stopped"))

    def _submit(self, add) -> None:  # noqa: ANN001
        with self._wake:
            if self._is_stopped:
                raise RuntimeError("the engine must run to take requests, it was stopped")
            add()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                started = time.monotonic()
                with torch.inference_mode():
                    self._step()
                self._count(busy_s=time.monotonic() - started)
        except Exception as error:
            with self._wake:
                self._is_stopped = True
            self._fail_all(RuntimeError(f"the engine's thread died: {type(error).__name__}: {error}"))
            raise

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False after `stop`."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_stopped or self._waiting or self._running or self._updates or self._ended)
            return not self._is_stopped

    def _step(self) -> None:
        """Take what came in, prefill what can start, and decode one token of everything that runs."""
        for request in [request for request in self._running if request.future.cancelled()]:
            self._leave(request)
        self._take_messages()
        starting = self._admit()
        if starting:
            self._prefill(starting)
        if self._running:
            self._decode()

    def _take_messages(self) -> None:
        with self._wake:
            ended, self._ended = self._ended, deque()
            updates, self._updates = self._updates, deque()
        for session in ended:
            slot = self._sessions.get(session)
            if slot is not None and not slot.is_busy:
                del self._sessions[session]
                self._release(slot)
        for version, weights, future in updates:
            try:
                if version < self._version:
                    raise ValueError(f"the version of the weights must not go back, got {version} after {self._version}")
                load_weights(self._model, weights)
                self._version = version
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _release(self, slot: _Slot) -> None:
        slot.token_ids, slot.is_busy = [], False
        self._free.append(slot)
        # Low slots first, so that the running rows stay a prefix of the cache and are read without a copy.
        self._free.sort(key=lambda free: -free.index)

    def _admit(self) -> list[_Request]:
        """Give slots to waiting requests, first come, first served; returns those that got one."""
        admitted: list[_Request] = []
        while True:
            with self._wake:
                if not self._waiting:
                    return admitted
                request = self._waiting[0]
            if request.future.cancelled():
                with self._wake:
                    self._waiting.popleft()
                continue
            slot = self._find_slot(request.session)
            if slot is None:
                return admitted
            with self._wake:
                self._waiting.popleft()
            slot.is_busy, request.slot = True, slot
            admitted.append(request)

    def _find_slot(self, session: str) -> _Slot | None:
        """Return the session's own slot, a free one, or that of the least recently used idle session; None when all are busy."""
        if session in self._sessions:
            self._sessions.move_to_end(session)
            slot = self._sessions[session]
            return None if slot.is_busy else slot
        if not self._free:
            idle = next((name for name, slot in self._sessions.items() if not slot.is_busy), None)
            if idle is None:
                return None
            self._release(self._sessions.pop(idle))
        self._sessions[session] = self._free.pop()
        return self._sessions[session]

    def _prefill(self, requests: list[_Request]) -> None:
        """Compute the prompts, except for what their slots hold already, and sample the first tokens."""
        starts, new_ids = [], []
        for request in requests:
            slot = _slot_of(request)
            start = _common_length(slot.token_ids, request.prompt_ids) if slot.version == self._version else 0
            start = min(start, len(request.prompt_ids) - 1)  # the last token's logits are needed
            starts.append(start)
            new_ids.append(request.prompt_ids[start:])
            slot.token_ids, slot.version = list(request.prompt_ids), self._version
        self._count(prompt_tokens_computed=sum(map(len, new_ids)), prompt_tokens_reused=sum(starts))
        logits_RV = self._forward([_slot_of(request).index for request in requests], starts, new_ids)
        self._running += requests
        self._append_tokens(requests, logits_RV)

    def _decode(self) -> None:
        """Compute the last sampled token of all running requests, and sample the next."""
        by_slot = {_slot_of(request).index: request for request in self._running}
        num_rows = max(by_slot) + 1
        # Carrying idle slots along costs less than copying the cache, unless they are the most.
        is_dense = len(by_slot) * 2 >= num_rows
        rows: list[_Request | None] = [by_slot.get(index) for index in range(num_rows)] if is_dense else list(self._running)
        slots = [None if request is None else _slot_of(request).index for request in rows]
        starts = [0 if request is None else len(_slot_of(request).token_ids) for request in rows]
        new_ids = [[0] if request is None else request.token_ids[-1:] for request in rows]
        logits_RV = self._forward(slots, starts, new_ids)
        requests = [request for request in rows if request is not None]
        for request in requests:
            _slot_of(request).token_ids.append(request.token_ids[-1])
        if is_dense:
            logits_RV = logits_RV[[row for row, request in enumerate(rows) if request is not None]]
        self._count(decode_steps=1)
        self._append_tokens(requests, logits_RV)

    def _forward(self, slots: list[int | None] | list[int], starts: list[int], new_ids: list[list[int]]) -> torch.Tensor:
        """Return the logits [R, V] after the last token of each row."""
        width = max(map(len, new_ids))
        device, dtype = self._model.device, self._model.dtype
        position_ids, mask = self._cache.plan(list(slots), starts, [len(ids) for ids in new_ids], width, dtype)
        input_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in new_ids])
        output = self._model(
            input_ids=input_ids.to(device),
            position_ids=position_ids.to(device),
            attention_mask=mask.to(device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _append_tokens(self, requests: list[_Request], logits_RV: torch.Tensor) -> None:
        """Sample a token for each request, and let those leave that are done."""
        token_ids, logprobs = sample_tokens(logits_RV, [r.sampling.temperature for r in requests], [r.rng.random() for r in requests])
        self._count(sampled_tokens=len(requests))
        for request, token_id, logprob in zip(requests, token_ids, logprobs, strict=True):
            if logprob != logprob:
                self._leave(request)
                error = FloatingPointError("the model's logits must be finite to sample, got NaN or infinity: the weights have diverged")
                _answer(request.future, error=error)
                continue
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            stop = self._stop_of(request)
            if stop is not None:
                self._leave(request)
                sample = Sample(tuple(request.token_ids), tuple(request.logprobs), tuple(request.versions), stop)
                _answer(request.future, sample=sample)

    def _stop_of(self, request: _Request) -> SampleStop | None:
        if request.token_ids[-1] in request.sampling.stop_token_ids:
            return SampleStop.STOP_TOKEN
        num_tokens = len(request.token_ids)
        is_full = len(request.prompt_ids) + num_tokens >= self._max_context_tokens
        return SampleStop.LENGTH if num_tokens >= request.sampling.max_tokens or is_full else None

    def _leave(self, request: _Request) -> None:
        """Take the request out of the batch; its session keeps the slot."""
        self._running = [running for running in self._running if running is not request]
        _slot_of(request).is_busy = False

    def _count(self, **changes: float) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + change for name, change in changes.items()})

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            requests, self._waiting = [*self._running, *self._waiting], deque()
            updates, self._updates = self._updates, deque()
        self._running = []
        for request in requests:
            _answer(request.future, error=error)
        for _, _, future in updates:
            future.set_exception(error)


def sample_tokens(logits_RV: torch.Tensor, temperatures: list[float], uniforms: list[float]) -> tuple[list[int], list[float]]:
    """Return for each row the token at the quantile `uniforms` of softmax(logits / temperature), and its log-prob (NaN: logits not finite).

    A token is a function of its own row only, whatever the batch. Temperature 0 takes the most likely token, with its log-prob at
    temperature 1. A token of probability zero is never taken.
    """
    temperature_R1 = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits_RV.device)[:, None]
    logprob_RV = torch.log_softmax(logits_RV.float() / temperature_R1, dim=-1)
    # In double precision, so that the tail of a large vocabulary is not rounded away.
    cumulative_RV = logprob_RV.double().exp().cumsum(dim=-1)
    target_R1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device)[:, None] * cumulative_RV[:, -1:]
    # The first token whose cumulative probability exceeds the target: it has a probability above zero.
    token_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True).clamp(max=logits_RV.shape[-1] - 1)
    is_greedy_R1 = torch.tensor([temperature == 0 for temperature in temperatures], device=logits_RV.device)[:, None]
    token_R1 = torch.where(is_greedy_R1, logprob_RV.argmax(dim=-1, keepdim=True), token_R1)
    return token_R1[:, 0].tolist(), logprob_RV.gather(1, token_R1)[:, 0].tolist()


def _slot_of(request: _Request) -> _Slot:
    if request.slot is None:
        raise RuntimeError("a request must have a slot to run")
    return request.slot


def _common_length(left: list[int], right: list[int]) -> int:
    """Return how many first tokens are the same."""
    if left == right[: len(left)]:
        return len(left)
    return next(index for index, (a, b) in enumerate(zip([*left, None], [*right, None], strict=False)) if a != b)


def _answer(future: "Future[Sample]", *, sample: Sample | None = None, error: Exception | None = None) -> None:
    """Set the result unless the caller has given up."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    elif sample is not None:
        future.set_result(sample)
