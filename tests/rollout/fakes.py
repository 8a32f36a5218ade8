"""Fakes that implement the rollout's protocols: a renderer whose ids are characters, a sampler that reads from a script."""

import asyncio

from envs.messages import AssistantTurn, Message, Observation, Verification
from rollout.env_host import LiveCount
from rollout.episode import EpisodeContext, EpisodeLimits
from rollout.sampler import Sample, SampleStop

STOP = ord("$")


class CharRenderer:
    """Ids are code points; `$` ends a turn, `|` stands between turns."""

    stop_token_ids = (STOP,)

    def prompt_ids(self, messages, tools):
        return [ord(c) for c in "|".join(message.content for message in messages) + "|"]

    def closing_ids(self, sampled_ids):
        return [] if sampled_ids and sampled_ids[-1] == STOP else [STOP]

    def observation_ids(self, messages):
        return [ord(c) for c in "".join(f"<{message.content}>" for message in messages) + "|"]

    def text(self, sampled_ids):
        return "".join(map(chr, sampled_ids)).removesuffix("$")


class ScriptedSampler:
    """Gives the turns of a script one after the other, per session; log-prob -0.5 and the given version for each token."""

    def __init__(self, *turns: str, version: int = 4):
        self.turns, self.version = turns, version
        self.calls, self.open_sessions = [], {}

    async def generate(self, prompt_ids, sampling, session):
        await asyncio.sleep(0)
        index = self.open_sessions.get(session, 0)
        self.open_sessions[session] = index + 1
        self.calls.append((list(prompt_ids), sampling))
        ids = [ord(c) for c in self.turns[min(index, len(self.turns) - 1)] + "$"][: sampling.max_tokens]
        stop = SampleStop.STOP_TOKEN if ids[-1] == STOP else SampleStop.LENGTH
        return Sample(tuple(ids), (-0.5,) * len(ids), (self.version,) * len(ids), stop)

    def end_session(self, session):
        self.open_sessions.pop(session, None)

    def set_weights(self, version, weights):
        self.version = version


class FakeEnv:
    """Answers `ok` to every call, ends on a turn without calls; `faults` maps a method to an exception or to a function to run."""

    def __init__(self, faults=None, closes=None):
        self.faults, self.closes, self.num_steps = faults or {}, closes if closes is not None else [], 0

    def _maybe_fail(self, method):
        fault = self.faults.get(method)
        if isinstance(fault, Exception):
            raise fault
        if fault:
            fault()

    def reset(self, *, seed=None, options=None):
        self._maybe_fail("reset")
        return Observation((Message("system", "sys"), Message("user", f"task {seed}")), ()), {}

    def step(self, turn: AssistantTurn):
        self._maybe_fail("step")
        self.num_steps += 1
        messages = tuple(
            Message(
                "tool",
                getattr(call, "problem", "ok"),
                call_id=call.call_id,
                is_error=hasattr(call, "problem"),
                is_invalid_call=hasattr(call, "problem"),
            )
            for call in turn.calls
        )
        return Observation(messages), 0.0, not turn.calls, False, {}

    def facts(self):
        return {"customer": "C1"}

    def verify(self):
        self._maybe_fail("verify")
        return Verification(True, {"done": True})

    def close(self):
        self.closes.append(id(self))
        self._maybe_fail("close")


def make_context(sampler, make_env=FakeEnv, **limits) -> EpisodeContext:
    defaults = {
        "max_context_tokens": 500,
        "max_turns": 8,
        "max_tokens_per_turn": 100,
        "max_parse_errors_in_row": 3,
        "step_deadline_s": 5.0,
        "episode_deadline_s": 20.0,
    }
    return EpisodeContext(sampler, CharRenderer(), make_env, EpisodeLimits(**{**defaults, **limits}), LiveCount(), run_seed=0)
