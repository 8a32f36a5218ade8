import asyncio
import time

import pytest

from rollout.episode import run_episode, run_group, sample_seed
from rollout.trajectory import FailureKind, StopReason, Task
from tests.rollout.fakes import STOP, FakeEnv, ScriptedSampler, make_context

CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
CUT_CALL = '<tool_call>{"name":"f","argu'
TASK = Task("e", 17, 3)


def run(context, **kwargs):
    return asyncio.run(run_episode(context, TASK, **{"member": 0, "attempt": 0, "temperature": 1.0, **kwargs}))


def text(trajectory, start=0, end=None):
    return "".join(map(chr, trajectory.token_ids_T[start:end]))


def test_ids_masks_logprobs_and_versions_stand_as_sampled():
    trajectory = run(make_context(ScriptedSampler(CALL, "bye")))
    assert text(trajectory) == f"sys|task 17|{CALL}$<ok>|bye$"
    sampled = "".join(chr(i) for i, mask in zip(trajectory.token_ids_T, trajectory.action_mask_T, strict=True) if mask)
    assert sampled == f"{CALL}$bye$"
    for logprob, version, mask in zip(trajectory.sampler_logprob_T, trajectory.policy_version_T, trajectory.action_mask_T, strict=True):
        assert (logprob, version) == ((-0.5, 4) if mask else (0.0, -1))
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.verification.success
    assert trajectory.facts == {"customer": "C1"}


def test_the_spans_of_turns_and_calls_point_at_the_sampled_tokens():
    trajectory = run(make_context(ScriptedSampler(CALL, "bye")))
    first, second = trajectory.turns
    assert text(trajectory, first.action_start, first.action_end) == f"{CALL}$"
    assert text(trajectory, second.action_start, second.action_end) == "bye$"
    call = first.calls[0]
    assert (call.name, call.arguments, call.result, call.is_error, call.is_invalid) == ("f", {"a": 1}, "ok", False, False)
    assert (call.token_start, call.token_end) == (first.action_start, first.action_end)


def test_the_task_that_only_reset_tells_is_in_the_first_prompt():
    sampler = ScriptedSampler("bye")
    run(make_context(sampler))
    assert "task 17" in "".join(map(chr, sampler.calls[0][0]))


def test_each_prompt_extends_the_recorded_tokens():
    sampler = ScriptedSampler(CALL, CALL, "bye")
    trajectory = run(make_context(sampler))
    for prompt, _ in sampler.calls:
        assert tuple(prompt) == trajectory.token_ids_T[: len(prompt)]


def test_a_turn_cut_at_its_limit_is_closed_by_tokens_with_mask_zero():
    trajectory = run(make_context(ScriptedSampler(CALL + "x" * 20, "bye"), max_tokens_per_turn=len(CALL) + 5))
    end = trajectory.turns[0].action_end
    assert trajectory.token_ids_T[end] == STOP
    assert not trajectory.action_mask_T[end]


def test_a_cut_call_is_answered_and_the_episode_goes_on():
    trajectory = run(make_context(ScriptedSampler(CUT_CALL, "bye")))
    assert trajectory.turns[0].calls[0].is_invalid
    assert "cut off" in trajectory.turns[0].calls[0].result
    assert len(trajectory.turns) == 2
    assert trajectory.stop_reason is StopReason.ANSWERED


def test_three_turns_in_a_row_without_a_valid_call_end_the_episode():
    trajectory = run(make_context(ScriptedSampler(CUT_CALL)))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.PARSE_ERROR, 3)
    assert trajectory.failure is None
    mixed = run(make_context(ScriptedSampler(CUT_CALL, CUT_CALL, CALL, CUT_CALL, CUT_CALL, "bye")))
    assert mixed.stop_reason is StopReason.ANSWERED


def test_the_turn_limit_has_its_own_stop_reason():
    trajectory = run(make_context(ScriptedSampler(CALL), max_turns=2))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TURN_LIMIT, 2)


@pytest.mark.parametrize("max_context_tokens", [5, 12])
def test_a_prompt_without_room_is_a_failure_that_names_the_limit(max_context_tokens):
    trajectory = run(make_context(ScriptedSampler(CALL), max_context_tokens=max_context_tokens))
    assert trajectory.failure.kind is FailureKind.PROMPT
    assert f"rollout.max_context_tokens ({max_context_tokens}), got 12 tokens" in trajectory.failure.text


@pytest.mark.parametrize("max_context_tokens", [13, 14, 40, 70, 100, 130])
def test_an_episode_never_grows_beyond_the_context_and_its_arrays_stay_equal(max_context_tokens):
    sampler = ScriptedSampler(CALL)
    trajectory = run(make_context(sampler, max_context_tokens=max_context_tokens))
    sampled_end = max((turn.action_end for turn in trajectory.turns), default=0)
    assert sampled_end <= max_context_tokens
    assert trajectory.stop_reason is StopReason.TOKEN_LIMIT
    assert all(sampling.max_tokens <= max_context_tokens - len(prompt) for prompt, sampling in sampler.calls)


@pytest.mark.parametrize(
    ("method", "kind"), [("reset", FailureKind.ENVIRONMENT), ("step", FailureKind.ENVIRONMENT), ("verify", FailureKind.VERIFIER)]
)
def test_an_environment_that_raises_is_data_and_is_closed_once(method, kind):
    closes = []
    context = make_context(ScriptedSampler(CALL, "bye"), lambda: FakeEnv({method: OSError("disk on fire")}, closes))
    trajectory = run(context)
    assert trajectory.failure.kind is kind
    assert "disk on fire" in trajectory.failure.text
    assert trajectory.verification is None
    assert trajectory.stop_reason is StopReason.FAILED
    assert len(closes) == 1
    assert context.live.value == 0


def test_an_environment_that_cannot_be_made_is_data():
    def broken():
        raise RuntimeError("no licence")

    trajectory = run(make_context(ScriptedSampler("bye"), broken))
    assert (trajectory.failure.kind, trajectory.token_ids_T) == (FailureKind.ENVIRONMENT, ())


def test_a_close_that_raises_hides_nothing():
    closes = []
    context = make_context(ScriptedSampler("bye"), lambda: FakeEnv({"close": ValueError("again")}, closes))
    assert run(context).failure is None
    assert (len(closes), context.live.value) == (1, 0)


@pytest.mark.parametrize("method", ["reset", "step", "verify"])
def test_an_environment_that_hangs_fails_after_its_deadline_and_is_closed_when_it_returns(method):
    closes = []
    context = make_context(ScriptedSampler(CALL), lambda: FakeEnv({method: lambda: time.sleep(0.5)}, closes), step_deadline_s=0.1)
    trajectory = run(context)
    assert trajectory.failure.kind is FailureKind.TIMEOUT
    assert trajectory.wall_s < 0.4
    deadline = time.monotonic() + 5
    while context.live.value and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (len(closes), context.live.value) == (1, 0)


def test_an_episode_that_takes_too_long_is_a_timeout():
    class Slow(ScriptedSampler):
        async def generate(self, prompt_ids, sampling, session):
            await asyncio.sleep(60)

    context = make_context(Slow("bye"), episode_deadline_s=0.1)
    assert run(context).failure.kind is FailureKind.TIMEOUT
    assert context.live.value == 0


def test_a_sampler_that_raises_is_data():
    class Broken(ScriptedSampler):
        async def generate(self, prompt_ids, sampling, session):
            raise RuntimeError("NaN logits")

    trajectory = run(make_context(Broken("bye")))
    assert trajectory.failure.kind is FailureKind.ENGINE
    assert "NaN logits" in trajectory.failure.text


def test_a_cancelled_episode_closes_its_environment_and_ends_its_session():
    closes = []

    class Endless(ScriptedSampler):
        async def generate(self, prompt_ids, sampling, session):
            self.open_sessions[session] = 1
            await asyncio.Event().wait()

    sampler = Endless("bye")
    context = make_context(sampler, lambda: FakeEnv({}, closes))

    async def cancel():
        task = asyncio.create_task(run_group(context, TASK, size=3, temperature=1.0, max_attempts=1, slots=asyncio.Semaphore(3)))
        await asyncio.sleep(0.1)
        assert context.live.value == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert (len(closes), context.live.value, sampler.open_sessions) == (3, 0, {})


def test_failed_members_of_a_group_are_tried_again_one_by_one():
    num_made = 0

    def make_env():
        nonlocal num_made
        num_made += 1
        return FakeEnv({"step": OSError("lost")} if num_made in (1, 3) else {})

    async def group():
        context = make_context(ScriptedSampler("bye"), make_env)
        return await run_group(context, TASK, size=4, temperature=1.0, max_attempts=2, slots=asyncio.Semaphore(1))

    group = asyncio.run(group())
    assert [trajectory.member for trajectory in group.trajectories] == [0, 1, 2, 3]
    assert all(trajectory.failure is None for trajectory in group.trajectories)
    assert len(group.failed_attempts) == 2
    assert {trajectory.attempt for trajectory in group.failed_attempts} == {0}


def test_a_member_that_always_fails_stays_failed_after_the_last_attempt():
    async def group():
        context = make_context(ScriptedSampler("bye"), lambda: FakeEnv({"step": OSError("lost")}))
        return await run_group(context, TASK, size=2, temperature=1.0, max_attempts=3, slots=asyncio.Semaphore(2))

    group = asyncio.run(group())
    assert [trajectory.attempt for trajectory in group.trajectories] == [2, 2]
    assert all(trajectory.failure for trajectory in group.trajectories)
    assert len(group.failed_attempts) == 4


def test_sampling_seeds_differ_by_everything_but_the_worker():
    seeds = {
        sample_seed(*key)
        for key in [
            (0, TASK, 0, 0, 0),
            (1, TASK, 0, 0, 0),
            (0, Task("e", 18, 3), 0, 0, 0),
            (0, Task("e", 17, 4), 0, 0, 0),
            (0, TASK, 1, 0, 0),
        ]
    } | {sample_seed(0, TASK, 0, 1, 0), sample_seed(0, TASK, 0, 0, 1)}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
