"""The project's own sampler: continuous batching over a slot cache, for any transformers causal model with ordinary attention.

One thread owns the model. Between two decode steps requests join and leave, and new weights are taken. R rows, V vocabulary.
"""

import asyncio
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.attention import group_attention
from model.cache import SlotCache, common_length
from model.loading import load_weights
from model.sampling import sample_tokens
from rollout.sampler import Sample, SampleStop, SamplingParams
from rollout.slots import Slot, SlotTable

MIN_SHARED_TOKENS = 8
"""Shorter common prefixes are computed again: copying them saves nothing."""

PADDING_WORTH_A_CALL = 64
"""Columns of padding that cost about as much as a forward call of their own."""


@dataclass
class EngineStats:
    """Counts since the start; prompt tokens count when their request samples its first token.

    prompt_tokens_reused: found in the cache, in the session's own slot or that of another with the same prefix.
    busy_s: seconds in which the thread was computing. Example: `EngineStats(60, 180, 80, 23, 0.05)`.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    tokens_sampled: int = 0
    decode_steps: int = 0
    busy_s: float = 0.0


@dataclass(eq=False)
class _Request:
    token_ids: list[int]
    """Prompt, then what was sampled."""
    num_prompt_tokens: int
    sampling: SamplingParams
    session: str
    future: "Future[Sample]"
    rng: random.Random
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_reused: int = 0
    may_share: bool = False
    """Nothing of it was computed by itself yet, so that it may begin with a copy of another slot."""
    leader: Slot | None = None
    """The slot that is computing a prefix of this prompt right now."""


class Engine:
    """Implements `Sampler`. The thread starts with the first request and ends with `stop`.

    A session keeps its slot between turns, so that the next turn computes its new tokens only, and prompts that begin alike are
    computed once; both only as long as the weights are the same. With more sessions than slots the one idle for longest loses its
    slot; when all are busy, requests wait. A sample depends on its logits and seed, not on what else is in the batch.
    When a step fails, all requests fail with it, the cache is emptied, and the engine goes on.
    """

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_context_tokens: int, version: int = 0, prefill_tokens_per_step: int = 2048
    ) -> None:
        """num_slots: sequences that are decoded at once. max_context_tokens: prompt and sample of a request, at most.

        version: of the weights that the model has. prefill_tokens_per_step: prompt tokens, padded, computed between two decode steps.
        Raises ValueError when the model cannot be cached in slots of that size.
        """
        self._model = model.eval()
        group_attention(model)
        self._max_context_tokens = max_context_tokens
        self._prefill_tokens_per_step = prefill_tokens_per_step
        self._cache = SlotCache(model.config, num_slots, max_context_tokens, dtype=model.dtype, device=model.device)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._slots = SlotTable(num_slots)
        self._waiting: list[_Request] = []
        self._running: dict[_Request, Slot] = {}
        self._version = version
        self._stats = EngineStats()
        # Shared between threads, under the lock of `_wake`; everything above belongs to the engine's thread.
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._unanswered: set[Future] = set()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._version

    def stats(self) -> EngineStats:
        """Return a copy of the counts so far."""
        return replace(self._stats)

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, session: str) -> Sample:
        """Return one sample; see `Sampler.generate`. Requests of one session run one after the other.

        Cancelling takes the request out of the batch and ends its session. A sample is cut where the context is full.
        Raises ValueError when prompt or parameters make no sense, FloatingPointError when the model's logits are not finite,
        RuntimeError when the engine was stopped or failed.
        """
        self._check(prompt_ids, sampling)
        future: Future[Sample] = Future()
        request = _Request(list(prompt_ids), len(prompt_ids), sampling, session, future, random.Random(sampling.seed))
        self._submit(lambda: self._waiting.append(request), future)
        try:
            return await asyncio.wrap_future(future)
        finally:
            if future.cancel():
                self._post(lambda: self._abandon(request))

    def end_session(self, session: str) -> None:
        """Release the session's slot, once its running request is done; unknown sessions are ignored."""
        self._post(lambda: self._slots.end(session))

    def set_weights(self, version: int, weights: dict[str, Tensor]) -> None:
        """Take new weights between two decode steps and return when they are in use; see `Sampler.set_weights`.

        Running requests go on with the state that they have; a prompt that has sampled nothing yet is computed again.
        Raises also ValueError when the version goes backwards, RuntimeError when the engine was stopped.
        """
        future: Future[None] = Future()
        self._submit(lambda: self._take_weights(version, weights, future), future)
        future.result()

    def stop(self) -> None:
        """End the thread; requests that still wait or run get a RuntimeError. Stopping twice is harmless."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _check(self, prompt_ids: list[int], sampling: SamplingParams) -> None:
        if not 0 < len(prompt_ids) < self._max_context_tokens:
            raise ValueError(
                f"a prompt must have 1 to {self._max_context_tokens - 1} tokens, got {len(prompt_ids)}: raise rollout.max_context_tokens"
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab_size:
            raise ValueError(
                f"token ids must be 0 to {self._vocab_size - 1}, got {min(prompt_ids)} to {max(prompt_ids)}: check the tokenizer"
            )
        if sampling.max_tokens < 1 or not 0 <= sampling.temperature < math.inf:
            raise ValueError(f"max_tokens must be at least 1 and temperature finite and at least 0, got {sampling}")

    def _submit(self, command: Callable[[], None], future: Future) -> None:
        """Hand a command to the thread, which answers the future sooner or later, whatever happens."""
        with self._wake:
            if self._is_stopped:
                raise RuntimeError("the engine must be running to take requests, it was stopped: make a new one")
            self._unanswered.add(future)
            self._inbox.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
                self._thread.start()
            self._wake.notify()
        future.add_done_callback(self._unanswered.discard)

    def _post(self, command: Callable[[], None]) -> None:
        """Hand over a command that nobody waits for."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                started = time.perf_counter()
                try:
                    self._step()
                except Exception as error:
                    self._recover(error)
                self._stats.busy_s += time.perf_counter() - started
        finally:
            with self._wake:
                self._is_stopped = True
            self._fail_all(lambda: RuntimeError("the engine must be running to sample, it was stopped"))

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False after `stop`."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_stopped or self._inbox or self._waiting or self._running)
            return not self._is_stopped

    def _recover(self, error: Exception) -> None:
        """Fail all requests, since what the cache holds is unknown, and begin anew."""
        self._waiting, self._running = [], {}
        for slot in self._slots:
            self._cache.erase(slot.index)
        self._slots = SlotTable(len(self._slots))

        def failure() -> RuntimeError:
            failed = RuntimeError(f"the engine must compute its steps without an error to sample, got {type(error).__name__}: {error}")
            failed.__cause__ = error
            return failed

        self._fail_all(failure)

    def _fail_all(self, failure: Callable[[], RuntimeError]) -> None:
        with self._wake:
            self._inbox.clear()
            unanswered = list(self._unanswered)
        for future in unanswered:
            _answer(future, failure())

    def _step(self) -> None:
        """Take what came in, compute some of the prompts, and decode one token of everything that is ready."""
        with self._wake:
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            command()
        self._admit()
        with torch.inference_mode():
            self._prefill()
            self._decode([request for request in self._running if self._num_uncomputed(request) == 1])

    def _take_weights(self, version: int, weights: dict[str, Tensor], future: "Future[None]") -> None:
        try:
            if version < self._version:
                raise ValueError(f"the version of the weights must not go backwards, got {version} after {self._version}")
            load_weights(self._model, weights)
        except Exception as error:
            _answer(future, error)
            return
        self._version = version
        self._slots.outdate()
        for request, slot in self._running.items():
            if not request.versions:
                self._cache.truncate(slot.index, 0)
                slot.is_current, request.num_reused, request.may_share = True, 0, True
        _answer(future, None)

    def _admit(self) -> None:
        """Give slots to waiting requests, first come, first served."""
        still_waiting = []
        for request in self._waiting:
            slot = self._slots.take(request.session)
            if slot is None:
                still_waiting.append(request)
                continue
            num_held = self._cache.common_length(slot.index, request.token_ids) if slot.is_current else 0
            # The last token is always computed: its logits are needed.
            num_held = min(num_held, len(request.token_ids) - 1)
            self._cache.truncate(slot.index, num_held)
            slot.is_current, request.num_reused = True, num_held
            self._running[request] = slot
            if slot.is_new:
                request.may_share = True
                self._share(request, self._slots)
        self._waiting = still_waiting

    def _share(self, request: _Request, sources: Iterable[Slot]) -> None:
        """Copy the longest prefix of the prompt that one of the slots holds, if it is longer than what its own slot holds."""
        slot = self._running[request]
        length, source = max(
            ((self._cache.common_length(source.index, request.token_ids), source.index) for source in sources if source.is_current),
            default=(0, slot.index),
        )
        length = min(length, len(request.token_ids) - 1)
        if length >= self._cache.length(slot.index) + MIN_SHARED_TOKENS:
            self._cache.copy(source, slot.index, length)
            request.num_reused = length

    def _prefill(self) -> None:
        """Compute prompts, oldest first, all but their last tokens; as many as the budget of a step allows."""
        budget = self._prefill_tokens_per_step
        while budget > 0 and (batch := self._next_batch(budget)):
            budget -= len(batch) * max(map(len, batch.values()))
            by_slot = sorted((self._running[request].index, ids) for request, ids in batch.items())
            self._forward([index for index, _ in by_slot], [ids for _, ids in by_slot])

    def _next_batch(self, budget: int) -> dict[_Request, list[int]]:
        """Return requests of similar length with the tokens to compute; a prompt that begins as one of them does is left for later."""
        batch: dict[_Request, list[int]] = {}
        width = 0
        for request, slot in self._running.items():
            if request.leader is not None:
                self._share(request, [request.leader])
                request.leader = None
            num_held = self._cache.length(slot.index)
            ids = request.token_ids[num_held:-1][:budget]
            longer, shorter = max(width, len(ids)), min(width or len(ids), len(ids))
            if not ids or longer * (len(batch) + 1) > budget or longer > max(2 * shorter, PADDING_WORTH_A_CALL):
                continue
            if request.may_share:
                request.leader = self._find_leader(request, batch, num_held + MIN_SHARED_TOKENS)
                if request.leader is not None:
                    continue
            batch[request], width, request.may_share = ids, longer, False
        return batch

    def _find_leader(self, request: _Request, batch: Iterable[_Request], min_tokens: int) -> Slot | None:
        return next((self._running[other] for other in batch if common_length(other.token_ids, request.token_ids) >= min_tokens), None)

    def _decode(self, requests: list[_Request]) -> None:
        """Compute the last token of each request, and sample the next."""
        if not requests:
            return
        requests.sort(key=lambda request: self._running[request].index)
        logits_RV = self._forward([self._running[request].index for request in requests], [request.token_ids[-1:] for request in requests])
        token_ids, logprobs = sample_tokens(
            logits_RV, [request.sampling.temperature for request in requests], [request.rng.random() for request in requests]
        )
        self._stats.decode_steps += 1
        for request, token_id, logprob in zip(requests, token_ids, logprobs, strict=True):
            if math.isnan(logprob):
                self._cache.erase(self._running[request].index)
                self._leave(request)
                _answer(
                    request.future,
                    FloatingPointError("the model's logits must be finite to sample, got NaN or infinity: the weights diverged"),
                )
                continue
            if not request.versions:
                self._stats.prompt_tokens_reused += request.num_reused
                self._stats.prompt_tokens_computed += request.num_prompt_tokens - request.num_reused
            self._stats.tokens_sampled += 1
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            self._finish_if_done(request)

    def _forward(self, slots: list[int], new_ids: list[list[int]]) -> Tensor:
        """Return the logits [R, V] in the last column of each slot's row."""
        call = self._cache.plan(slots, new_ids)
        logits_RV = self._model(
            input_ids=call.input_ids_RN,
            position_ids=call.position_ids_RN,
            attention_mask=call.mask_R1NL,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits_RV if call.rows is None else logits_RV[call.rows]

    def _finish_if_done(self, request: _Request) -> None:
        num_sampled = len(request.versions)
        if request.token_ids[-1] in request.sampling.stop_token_ids:
            stop = SampleStop.STOP_TOKEN
        elif num_sampled >= request.sampling.max_tokens or len(request.token_ids) >= self._max_context_tokens:
            stop = SampleStop.LENGTH
        else:
            return
        self._leave(request)
        sampled_ids = request.token_ids[request.num_prompt_tokens :]
        _answer(request.future, Sample(tuple(sampled_ids), tuple(request.logprobs), tuple(request.versions), stop))

    def _leave(self, request: _Request) -> None:
        """Take the request out of the batch; its session keeps the slot."""
        self._slots.put_back(self._running.pop(request))

    def _abandon(self, request: _Request) -> None:
        """Take a cancelled request out, and its session with it."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._slots.end(request.session)
            self._leave(request)

    def _num_uncomputed(self, request: _Request) -> int:
        return len(request.token_ids) - self._cache.length(self._running[request].index)


def _answer(future: Future, answer: object) -> None:
    """Give the result or the error, unless the caller has given up."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
