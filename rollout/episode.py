"""How a policy acts in a world: one episode, and a group of them. Plain async functions, no Ray.

The policy's tokens are recorded as the sampler returned them; only what the environment says is tokenised, and appended.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from envs.messages import AssistantTurn, Message, Observation, ToolCall, Verification, parse_turn
from envs.tool_env import ToolEnv
from rollout.env_host import EnvHost, EnvTimeoutError, LiveCount
from rollout.sampler import Sample, Sampler, SampleStop, SamplingParams
from rollout.trajectory import (
    NOT_SAMPLED,
    CallRecord,
    Failure,
    FailureKind,
    Group,
    StopReason,
    Task,
    Trajectory,
    TurnRecord,
)


class Renderer(Protocol):
    """How messages become ids, by appending only; `model/chat.py` has the implementations."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        ...

    def prompt_ids(self, messages: tuple[Message, ...], tools: tuple) -> list[int]:
        """Return the ids of the first prompt."""
        ...

    def closing_ids(self, sampled_ids: list[int]) -> list[int]:
        """Return the ids that close a sampled turn without having been sampled."""
        ...

    def observation_ids(self, messages: tuple[Message, ...]) -> list[int]:
        """Return the ids of tool messages and the start of the next turn."""
        ...

    def text(self, sampled_ids: list[int]) -> str:
        """Return the text of a sampled turn."""
        ...


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of an episode; each has a stop reason or failure of its own.

    Example: `EpisodeLimits(1024, 16, 128, 3, 30.0, 600.0)`.
    """

    max_context_tokens: int
    max_turns: int
    max_tokens_per_turn: int
    max_parse_errors_in_row: int
    step_deadline_s: float
    episode_deadline_s: float


@dataclass(frozen=True)
class EpisodeContext:
    """What every episode of a worker shares: the sampler, the renderer, how to make an environment, limits, run seed."""

    sampler: Sampler
    renderer: Renderer
    make_env: Callable[[], ToolEnv]
    limits: EpisodeLimits
    live: LiveCount
    run_seed: int


def sample_seed(run_seed: int, task: Task, member: int, attempt: int, turn: int) -> int:
    """Return a 63-bit seed that depends on the run, the task and the member, and on no worker."""
    text = f"{run_seed}:{task.seed}:{task.index}:{member}:{attempt}:{turn}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


async def run_group(
    context: EpisodeContext, task: Task, *, size: int, temperature: float, max_attempts: int, slots: asyncio.Semaphore
) -> Group:
    """Return `size` episodes of one task, run side by side, each in one of the `slots`.

    A member that fails is tried again alone, `max_attempts` times in all.
    """

    async def run_member(member: int) -> list[Trajectory]:
        attempts: list[Trajectory] = []
        while len(attempts) < max_attempts and (not attempts or attempts[-1].failure):
            async with slots:
                attempts.append(await run_episode(context, task, member=member, attempt=len(attempts), temperature=temperature))
        return attempts

    async with asyncio.TaskGroup() as tasks:
        members = [tasks.create_task(run_member(member)) for member in range(size)]
    attempts_by_member = [member.result() for member in members]
    return Group(
        task,
        tuple(attempts[-1] for attempts in attempts_by_member),
        tuple(trajectory for attempts in attempts_by_member for trajectory in attempts[:-1]),
    )


async def run_episode(context: EpisodeContext, task: Task, *, member: int, attempt: int, temperature: float) -> Trajectory:
    """Return one episode; whatever breaks in the environment, the verifier or the sampler becomes `Trajectory.failure`.

    Only cancellation propagates; the environment is closed then too.
    """
    started = time.monotonic()
    episode = _Episode(context, task, member, attempt, temperature)
    host = EnvHost(context.make_env, context.limits.step_deadline_s, context.live)
    try:
        async with asyncio.timeout(context.limits.episode_deadline_s):
            await episode.run(host)
    except TimeoutError:
        episode.fail(FailureKind.TIMEOUT, f"an episode must end within {context.limits.episode_deadline_s:g} s, it did not")
    finally:
        context.sampler.end_session(episode.session)
        await host.close()
    return episode.trajectory(time.monotonic() - started)


class _Episode:
    """The growing record of one episode."""

    def __init__(self, context: EpisodeContext, task: Task, member: int, attempt: int, temperature: float) -> None:
        self._context, self._limits = context, context.limits
        self._task, self._member, self._attempt, self._temperature = task, member, attempt, temperature
        self.session = uuid.uuid4().hex
        self._token_ids_T: list[int] = []
        self._action_mask_T: list[bool] = []
        self._sampler_logprob_T: list[float | None] = []
        self._policy_version_T: list[int] = []
        self._turns: list[TurnRecord] = []
        self._stop: StopReason | None = None
        self._failure: Failure | None = None
        self._verification: Verification | None = None
        self._facts: dict = {}
        self._num_parse_errors = 0

    async def run(self, host: EnvHost) -> None:
        """Act until something ends the episode, then verify the final state."""
        observation = await self._guard(FailureKind.ENVIRONMENT, host.call(lambda env: env.reset(seed=self._task.seed)[0]))
        facts = await self._guard(FailureKind.ENVIRONMENT, host.call(lambda env: env.facts())) if observation else None
        if observation is None or facts is None:
            return
        self._facts = facts
        prompt_ids = self._context.renderer.prompt_ids(observation.messages, observation.tools)
        if len(prompt_ids) >= self._limits.max_context_tokens:
            limit = self._limits.max_context_tokens
            self.fail(
                FailureKind.PROMPT,
                f"a first prompt must be shorter than rollout.max_context_tokens ({limit}), got {len(prompt_ids)} tokens",
            )
            return
        self._append(prompt_ids)
        while self._stop is None:
            await self._take_turn(host)
        if self._failure is None:
            self._verification = await self._guard(FailureKind.VERIFIER, host.call(lambda env: env.verify()))

    def fail(self, kind: FailureKind, text: str) -> None:
        """End the episode as failed; the first failure is kept."""
        self._failure = self._failure or Failure(kind, text)
        self._stop = StopReason.FAILED

    def trajectory(self, wall_s: float) -> Trajectory:
        """Return the frozen record."""
        return Trajectory(
            trajectory_id=self.session,
            task=self._task,
            member=self._member,
            attempt=self._attempt,
            temperature=self._temperature,
            token_ids_T=tuple(self._token_ids_T),
            action_mask_T=tuple(self._action_mask_T),
            sampler_logprob_T=tuple(self._sampler_logprob_T),
            policy_version_T=tuple(self._policy_version_T),
            turns=tuple(self._turns),
            stop_reason=self._stop or StopReason.FAILED,
            failure=self._failure,
            verification=None if self._failure else self._verification,
            facts=self._facts,
            wall_s=wall_s,
        )

    async def _take_turn(self, host: EnvHost) -> None:
        sample = await self._sample()
        if sample is None:
            return
        start = len(self._token_ids_T)
        self._append_sample(sample)
        turn = parse_turn(self._context.renderer.text(list(sample.token_ids_S)))
        is_cut = sample.stop is SampleStop.LENGTH
        if is_cut and not turn.calls:
            # The agent was still talking: what it would have said is unknown, so this is no answer.
            self._record_turn(start, turn, (), 0.0)
            self._stop = StopReason.TOKEN_LIMIT
            return
        step = await self._guard(FailureKind.ENVIRONMENT, host.call(lambda env: env.step(turn)))
        if step is None:
            self._record_turn(start, turn, (), 0.0)
            return
        observation, reward, terminated, truncated, _ = step
        self._record_turn(start, turn, observation.messages, float(reward))
        self._stop = self._stop_after(turn, observation, terminated, truncated)
        if self._stop is None:
            self._observe(sample, observation)

    async def _sample(self) -> Sample | None:
        room = self._limits.max_context_tokens - len(self._token_ids_T)
        if room <= 0:
            self._stop = StopReason.TOKEN_LIMIT
            return None
        sampling = SamplingParams(
            max_tokens=min(self._limits.max_tokens_per_turn, room),
            temperature=self._temperature,
            stop_token_ids=tuple(self._context.renderer.stop_token_ids),
            seed=sample_seed(self._context.run_seed, self._task, self._member, self._attempt, len(self._turns)),
        )
        # The sampler gets a copy: the record may not be changed through it.
        return await self._guard(FailureKind.ENGINE, self._context.sampler.generate(list(self._token_ids_T), sampling, self.session))

    def _stop_after(self, turn: AssistantTurn, observation: Observation, terminated: bool, truncated: bool) -> StopReason | None:
        is_parse_error = bool(turn.calls) and all(message.is_invalid_call for message in observation.messages if message.call_id)
        self._num_parse_errors = self._num_parse_errors + 1 if is_parse_error else 0
        if terminated:
            return StopReason.ANSWERED
        if truncated:
            return StopReason.TRUNCATED
        if self._num_parse_errors >= self._limits.max_parse_errors_in_row:
            return StopReason.PARSE_ERROR
        if len(self._turns) >= self._limits.max_turns:
            return StopReason.TURN_LIMIT
        return None

    def _observe(self, sample: Sample, observation: Observation) -> None:
        renderer = self._context.renderer
        ids = renderer.closing_ids(list(sample.token_ids_S)) + renderer.observation_ids(observation.messages)
        if len(self._token_ids_T) + len(ids) >= self._limits.max_context_tokens:
            self._stop = StopReason.TOKEN_LIMIT
            return
        self._append(ids)

    def _append(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        self._token_ids_T += ids
        self._action_mask_T += [False] * len(ids)
        self._sampler_logprob_T += [0.0] * len(ids)
        self._policy_version_T += [NOT_SAMPLED] * len(ids)

    def _append_sample(self, sample: Sample) -> None:
        self._token_ids_T += sample.token_ids_S
        self._action_mask_T += [True] * len(sample.token_ids_S)
        self._sampler_logprob_T += sample.logprob_S
        self._policy_version_T += sample.policy_version_S

    def _record_turn(self, start: int, turn: AssistantTurn, messages: tuple[Message, ...], reward: float) -> None:
        end = len(self._token_ids_T)
        answers = {message.call_id: message for message in messages if message.call_id}
        calls = []
        for call in turn.calls:
            answer = answers.get(call.call_id)
            calls.append(
                CallRecord(
                    call_id=call.call_id,
                    name=call.name if isinstance(call, ToolCall) else "",
                    arguments=call.arguments if isinstance(call, ToolCall) else None,
                    result=answer.content if answer else "",
                    is_error=answer.is_error if answer else True,
                    is_invalid=answer.is_invalid_call if answer else not isinstance(call, ToolCall),
                    token_start=start,
                    token_end=end,
                )
            )
        self._turns.append(TurnRecord(start, end, turn.text, tuple(calls), reward))

    async def _guard(self, kind: FailureKind, awaitable):
        """Return what the awaitable returns; None, and the episode failed, when it raises. The one place where failures become data."""
        try:
            return await awaitable
        except EnvTimeoutError as error:
            self.fail(FailureKind.TIMEOUT, str(error))
        except Exception as error:
            self.fail(kind, f"{type(error).__name__}: {error}")
        return None
