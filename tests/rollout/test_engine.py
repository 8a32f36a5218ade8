import asyncio
import copy
import math
import random
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from configs.schema import LoraConfig
from model.loading import trainable_weights
from model.lora import add_lora
from rollout.engine import Engine
from rollout.sampler import SampleStop, SamplingParams

V = 48


def make_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@contextmanager
def engine_of(model, num_slots=4, max_context_tokens=64, **options):
    engine = Engine(model, num_slots=num_slots, max_context_tokens=max_context_tokens, **options)
    try:
        yield engine
    finally:
        engine.stop()


def params(max_tokens=8, temperature=1.0, stop=(), seed=0):
    return SamplingParams(max_tokens, temperature, stop, seed)


def run(*coroutines):
    async def together():
        return await asyncio.gather(*coroutines)

    return asyncio.run(together())


def generate(engine, prompt_ids, sampling=None, session="a"):
    return run(engine.generate(prompt_ids, sampling or params(), session))[0]


def random_ids(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(V) for _ in range(length)]


@torch.no_grad()
def full_pass_logprobs(model, prompt_ids, sample, temperature=1.0):
    """Return the log-prob of each sampled token from one forward pass without a cache."""
    logits_TV = model(torch.tensor([[*prompt_ids, *sample.token_ids_S]])).logits[0, len(prompt_ids) - 1 : -1]
    logprob_SV = torch.log_softmax(logits_TV / temperature, dim=-1)
    return [row[token].item() for row, token in zip(logprob_SV, sample.token_ids_S, strict=True)]


@torch.no_grad()
def slow_sample(model, prompt_ids, sampling, max_context_tokens):
    """Sample one token after the other, each from a full forward pass, with plain loops."""
    rng, token_ids = random.Random(sampling.seed), []
    while len(token_ids) < sampling.max_tokens and len(prompt_ids) + len(token_ids) < max_context_tokens:
        logits_V = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, -1]
        uniform = rng.random()
        if sampling.temperature == 0:
            token_ids.append(int(logits_V.argmax()))
        else:
            probabilities = torch.softmax(logits_V.double() / sampling.temperature, dim=-1).tolist()
            cumulative = 0.0
            for token, probability in enumerate(probabilities):
                cumulative += probability
                if cumulative > uniform:
                    token_ids.append(token)
                    break
        if token_ids[-1] in sampling.stop_token_ids:
            break
    return tuple(token_ids)


def slow_down(model, seconds=0.005):
    """Make every forward pass take time, and return an event that is set when the first few are done."""
    num_calls, is_under_way = 0, threading.Event()

    def wait(*_):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            is_under_way.set()
        time.sleep(seconds)

    model.register_forward_hook(wait)
    return is_under_way


def test_greedy_samples_of_ragged_prompts_equal_those_of_transformers():
    model = make_model()
    prompts = [random_ids(seed, length) for seed, length in enumerate([1, 2, 5, 11, 17, 30])]
    with engine_of(model, num_slots=4) as engine:
        samples = run(*(engine.generate(ids, params(12, 0.0), f"s{i}") for i, ids in enumerate(prompts)))
    for prompt_ids, sample in zip(prompts, samples, strict=True):
        inputs = torch.tensor([prompt_ids])
        expected = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert list(sample.token_ids_S) == expected[0, len(prompt_ids) :].tolist()
        assert sample.logprob_S == pytest.approx(full_pass_logprobs(model, prompt_ids, sample), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_at_the_sampling_temperature(temperature):
    model = make_model()
    with engine_of(model) as engine:
        sample = generate(engine, [1, 2, 3], params(20, temperature))
    assert sample.logprob_S == pytest.approx(full_pass_logprobs(model, [1, 2, 3], sample, temperature), abs=1e-5)


def test_ids_logprobs_and_versions_have_one_length():
    with engine_of(make_model(), version=4) as engine:
        sample = generate(engine, [1, 2, 3], params(5))
    assert (len(sample.token_ids_S), len(sample.logprob_S), sample.policy_version_S) == (5, 5, (4, 4, 4, 4, 4))
    assert sample.stop == SampleStop.LENGTH


def test_later_turns_compute_only_what_is_new():
    model = make_model()
    with engine_of(model) as engine:
        ids = random_ids(1, 9)
        for turn, (reused, computed) in enumerate([(0, 9), (13, 5), (22, 5)]):
            before = engine.stats()
            sample = generate(engine, ids, params(5, seed=turn))
            after = engine.stats()
            assert sample.logprob_S == pytest.approx(full_pass_logprobs(model, ids, sample), abs=1e-5)
            assert after.prompt_tokens_reused - before.prompt_tokens_reused == reused
            assert after.prompt_tokens_computed - before.prompt_tokens_computed == computed
            ids = [*ids, *sample.token_ids_S, *random_ids(turn, 4)]
        assert (engine.stats().tokens_sampled, engine.stats().decode_steps) == (15, 15)


def test_a_prompt_that_departs_from_the_session_reuses_their_common_prefix():
    model = make_model()
    with engine_of(model) as engine:
        generate(engine, [1, 2, 3, 4, 5, 6])
        prompt_ids = [1, 2, 3, 40, 41]
        sample = generate(engine, prompt_ids)
        assert engine.stats().prompt_tokens_reused == 3
    assert sample.logprob_S == pytest.approx(full_pass_logprobs(model, prompt_ids, sample), abs=1e-5)


def test_the_same_prompt_again_computes_only_its_last_token():
    with engine_of(make_model()) as engine:
        assert generate(engine, [1, 2, 3]) == generate(engine, [1, 2, 3])
        assert engine.stats().prompt_tokens_reused == 2


def test_a_group_computes_its_common_prompt_once():
    model, prompt_ids = make_model(), random_ids(5, 20)
    with engine_of(model, num_slots=8) as engine:
        samples = run(*(engine.generate(prompt_ids, params(8, seed=i), f"s{i}") for i in range(8)))
        assert engine.stats().prompt_tokens_computed == 20 + 7
        assert engine.stats().prompt_tokens_reused == 7 * 19
    assert len({sample.token_ids_S for sample in samples}) > 1
    for sample in samples:
        assert sample.logprob_S == pytest.approx(full_pass_logprobs(model, prompt_ids, sample), abs=1e-5)


def test_the_same_seed_gives_the_same_sample_alone_and_in_a_batch():
    model = make_model()
    with engine_of(model, num_slots=8) as engine:
        alone = generate(engine, [1, 2, 3], params(20, seed=7))
        others = [engine.generate(random_ids(i, 3 + 2 * i), params(10 + i, seed=i), f"s{i}") for i in range(7)]
        together = run(*others, engine.generate([1, 2, 3], params(20, seed=7), "b"))[-1]
        other_seed = generate(engine, [1, 2, 3], params(20, seed=8))
    assert alone.token_ids_S == together.token_ids_S
    assert alone.logprob_S == pytest.approx(together.logprob_S, abs=1e-5)
    assert alone.token_ids_S != other_seed.token_ids_S


def test_new_weights_between_turns_make_old_state_unused():
    old, new = make_model(0), make_model(1)
    with engine_of(copy.deepcopy(old), version=3) as engine, engine_of(new, version=4) as cold_engine:
        ids = random_ids(2, 12)
        first = generate(engine, ids)
        engine.set_weights(4, trainable_weights(new))
        ids = [*ids, *first.token_ids_S, 1, 2]
        assert generate(engine, ids) == generate(cold_engine, ids)
        other_session = generate(engine, ids, session="b")
        assert other_session.policy_version_S == (4,) * 8
        # Only what the new weights computed was reused, for the third request.
        assert engine.stats().prompt_tokens_reused == len(ids) - 1
        assert other_session.logprob_S == pytest.approx(full_pass_logprobs(new, ids, other_session), abs=1e-5)


def test_weights_of_the_same_version_also_make_old_state_unused():
    new = make_model(1)
    with engine_of(make_model(0), version=3) as engine:
        generate(engine, [1, 2, 3, 4])
        engine.set_weights(3, trainable_weights(new))
        sample = generate(engine, [1, 2, 3, 4])
        assert engine.stats().prompt_tokens_reused == 0
    assert sample.logprob_S == pytest.approx(full_pass_logprobs(new, [1, 2, 3, 4], sample), abs=1e-5)


@torch.no_grad()
def test_new_weights_in_the_middle_of_a_sample_go_on_with_its_state():
    old, new = make_model(0), make_model(1)
    model = copy.deepcopy(old)
    is_under_way = slow_down(model)
    with engine_of(model, version=3) as engine:

        async def update_meanwhile():
            running = asyncio.create_task(engine.generate([1, 2, 3], params(40), "a"))
            await asyncio.to_thread(is_under_way.wait)
            await asyncio.to_thread(engine.set_weights, 4, trainable_weights(new))
            return await running

        sample = asyncio.run(update_meanwhile())
        num_old = sample.policy_version_S.count(3)
        assert 0 < num_old < 40
        assert sample.policy_version_S == (3,) * num_old + (4,) * (40 - num_old)
        generate(engine, [1, 2, 3, *sample.token_ids_S, 5])
        assert engine.stats().prompt_tokens_reused == 0
    cache, inputs, expected = DynamicCache(), [1, 2, 3], []
    for index, token in enumerate(sample.token_ids_S):
        weights = old if index < num_old else new
        logits_V = weights(torch.tensor([inputs]), past_key_values=cache).logits[0, -1]
        expected.append(torch.log_softmax(logits_V, dim=-1)[token].item())
        inputs = [token]
    assert sample.logprob_S == pytest.approx(expected, abs=1e-5)


def test_adapters_are_taken_and_sampled_from():
    model = add_lora(make_model(), LoraConfig(rank=2))
    adapters = {name: torch.full_like(weight, 0.3) for name, weight in trainable_weights(model).items()}
    with engine_of(model) as engine:
        before = generate(engine, [1, 2, 3])
        engine.set_weights(1, adapters)
        after = generate(engine, [1, 2, 3])
    assert before.logprob_S == pytest.approx(full_pass_logprobs(make_model(), [1, 2, 3], before), abs=1e-5)
    assert after.logprob_S == pytest.approx(full_pass_logprobs(model.eval(), [1, 2, 3], after), abs=1e-5)
    assert after.logprob_S != pytest.approx(before.logprob_S, abs=1e-2)


@pytest.mark.parametrize(
    ("version", "weights", "error", "message"),
    [
        (4, {"model.nowhere": torch.zeros(1)}, KeyError, "model.nowhere"),
        (4, {"model.norm.weight": torch.zeros(3)}, ValueError, "model.norm.weight must have the shape"),
        (2, {}, ValueError, "must not go backwards, got 2 after 3"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on(version, weights, error, message):
    with engine_of(make_model(), version=3) as engine:
        before = generate(engine, [1, 2, 3])
        with pytest.raises(error, match=message):
            engine.set_weights(version, weights)
        assert engine.version == 3
        assert generate(engine, [1, 2, 3]) == before
        assert engine.stats().prompt_tokens_reused == 2


def test_more_sessions_than_slots_evict_the_one_idle_for_longest():
    model = make_model()
    with engine_of(model, num_slots=2) as engine:
        prompts = {session: random_ids(ord(session), 10) for session in "abc"}
        for session in "abc":
            generate(engine, prompts[session], session=session)
        for session in "bac":
            sample = generate(engine, prompts[session], session=session)
            assert sample.logprob_S == pytest.approx(full_pass_logprobs(model, prompts[session], sample), abs=1e-5)
        # b was still there; a came back in the place of c, and c in that of b.
        assert engine.stats().prompt_tokens_reused == 9


def test_more_requests_than_slots_wait_for_their_turn():
    model = make_model()
    with engine_of(model, num_slots=2) as engine:
        prompts = [random_ids(i, 4 + i) for i in range(9)]
        samples = run(*(engine.generate(ids, params(6, seed=i), f"s{i}") for i, ids in enumerate(prompts)))
    assert [sample.token_ids_S for sample in samples] == [slow_sample(model, ids, params(6, seed=i), 64) for i, ids in enumerate(prompts)]


def test_an_ended_session_is_forgotten_and_unknown_ones_are_ignored():
    with engine_of(make_model(), num_slots=1) as engine:
        engine.end_session("nobody")
        generate(engine, [1, 2, 3])
        engine.end_session("a")
        generate(engine, [7, 8, 9], session="b")
        assert engine.stats().prompt_tokens_reused == 0


def test_a_sample_ends_after_a_stop_token_which_is_part_of_it():
    with engine_of(make_model()) as engine:
        token_ids = generate(engine, [1, 2, 3], params(20)).token_ids_S
        sample = generate(engine, [1, 2, 3], params(20, stop=(token_ids[6],)))
    assert sample.stop == SampleStop.STOP_TOKEN
    assert sample.token_ids_S == token_ids[: token_ids.index(token_ids[6]) + 1]


def test_a_sample_is_cut_where_the_context_is_full():
    with engine_of(make_model(), max_context_tokens=16) as engine:
        sample = generate(engine, random_ids(0, 12), params(20))
        assert (len(sample.token_ids_S), sample.stop) == (4, SampleStop.LENGTH)
        assert len(generate(engine, random_ids(0, 15), params(20)).token_ids_S) == 1


@pytest.mark.parametrize(
    ("prompt_ids", "sampling", "message"),
    [
        ([], params(), "a prompt must have 1 to 15 tokens, got 0"),
        ([1] * 16, params(), "a prompt must have 1 to 15 tokens, got 16: raise rollout.max_context_tokens"),
        ([1, V], params(), "token ids must be 0 to 47, got 1 to 48"),
        ([-1], params(), "token ids must be 0 to 47, got -1 to -1"),
        ([1], params(max_tokens=0), "max_tokens must be at least 1"),
        ([1], params(temperature=-1.0), "temperature finite and at least 0"),
        ([1], params(temperature=math.nan), "temperature finite and at least 0"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(prompt_ids, sampling, message):
    with engine_of(make_model(), max_context_tokens=16) as engine, pytest.raises(ValueError, match=message):
        generate(engine, prompt_ids, sampling)


def test_a_long_prompt_is_computed_in_parts_while_others_decode():
    model = make_model()
    prompts = [random_ids(0, 50), [1, 2, 3], random_ids(2, 9), random_ids(3, 33)]
    with engine_of(model, prefill_tokens_per_step=8) as engine:
        samples = run(*(engine.generate(ids, params(10, seed=i), f"s{i}") for i, ids in enumerate(prompts)))
    assert [sample.token_ids_S for sample in samples] == [slow_sample(model, ids, params(10, seed=i), 64) for i, ids in enumerate(prompts)]


def test_a_cancelled_request_leaves_its_slot_to_others():
    model = make_model()
    is_under_way = slow_down(model, 0.01)
    with engine_of(model, num_slots=1, max_context_tokens=120) as engine:

        async def cancel_two():
            running = asyncio.create_task(engine.generate([1, 2, 3], params(100), "running"))
            await asyncio.to_thread(is_under_way.wait)
            waiting = asyncio.create_task(engine.generate([1, 2, 3], params(100), "waiting"))
            await asyncio.sleep(0)
            for task in (running, waiting):
                task.cancel()
            cancelled = await asyncio.gather(running, waiting, return_exceptions=True)
            sample = await engine.generate([4, 5, 6], params(2), "running")
            return cancelled, sample

        cancelled, sample = asyncio.run(cancel_two())
        assert [type(outcome) for outcome in cancelled] == [asyncio.CancelledError] * 2
        assert engine.stats().tokens_sampled < 100
    assert sample.token_ids_S == slow_sample(model, [4, 5, 6], params(2), 64)


def test_two_requests_of_one_session_run_one_after_the_other():
    model = make_model()
    with engine_of(model) as engine:
        samples = run(*(engine.generate([i, 2, 3], params(6, seed=i), "a") for i in range(3)))
    assert [sample.token_ids_S for sample in samples] == [slow_sample(model, [i, 2, 3], params(6, seed=i), 64) for i in range(3)]


def test_logits_that_are_not_finite_fail_their_request_only():
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[40] = math.nan
    with engine_of(model, num_slots=2) as engine:

        async def both():
            return await asyncio.gather(
                engine.generate([1, 40, 3], params(6), "bad"), engine.generate([1, 2, 3], params(6), "good"), return_exceptions=True
            )

        bad, good = asyncio.run(both())
        assert isinstance(bad, FloatingPointError)
        assert "logits must be finite" in str(bad)
        assert good.token_ids_S == slow_sample(model, [1, 2, 3], params(6), 64)
        # The slot of the failed request serves others as if nothing had been.
        samples = run(*(engine.generate([4, 5, i], params(6), f"s{i}") for i in range(2)))
    assert [sample.token_ids_S for sample in samples] == [slow_sample(model, [4, 5, i], params(6), 64) for i in range(2)]


def test_a_failing_step_fails_all_requests_and_the_engine_goes_on():
    model, is_broken = make_model(), True

    def break_once(*_):
        nonlocal is_broken
        if is_broken:
            is_broken = False
            raise MemoryError("no room")

    with engine_of(model, num_slots=2) as engine:
        model.register_forward_hook(break_once)

        async def three():
            return await asyncio.gather(*(engine.generate([1, 2], params(4), f"s{i}") for i in range(3)), return_exceptions=True)

        outcomes = asyncio.run(three())
        failures = [outcome for outcome in outcomes if isinstance(outcome, RuntimeError)]
        assert failures
        assert all("got MemoryError: no room" in str(failure) for failure in failures)
        assert generate(engine, [1, 2], params(4), "s0").token_ids_S == slow_sample(model, [1, 2], params(4), 64)


def test_stopping_fails_what_runs_and_what_comes_later():
    model = make_model()
    is_under_way = slow_down(model, 0.01)
    with engine_of(model, num_slots=1, max_context_tokens=120) as engine:

        async def stop_meanwhile():
            tasks = [asyncio.create_task(engine.generate([1, 2], params(100), f"s{i}")) for i in range(2)]
            await asyncio.to_thread(is_under_way.wait)
            await asyncio.to_thread(engine.stop)
            return await asyncio.gather(*tasks, return_exceptions=True)

        outcomes = asyncio.run(stop_meanwhile())
        assert [type(outcome) for outcome in outcomes] == [RuntimeError] * 2
        assert "it was stopped" in str(outcomes[0])
        with pytest.raises(RuntimeError, match="it was stopped: make a new one"):
            generate(engine, [1, 2])
        with pytest.raises(RuntimeError, match="it was stopped"):
            engine.set_weights(1, {})
        engine.end_session("s0")
        engine.stop()
    assert not any(thread.name == "engine" for thread in threading.enumerate())


@pytest.mark.parametrize("seed", range(3))
def test_random_conversations_equal_a_slow_sampler(seed):
    model, rng = make_model(), random.Random(seed)
    system_ids = random_ids(99, 10)
    with engine_of(model, num_slots=5, max_context_tokens=64, prefill_tokens_per_step=24) as engine:

        async def converse(index):
            own = random.Random(1000 * seed + index)
            ids = system_ids[: own.choice([0, 10])] + random_ids(own.randrange(4), own.randint(1, 14))
            for turn in range(own.randint(1, 3)):
                await asyncio.sleep(own.random() * 0.01)
                if len(ids) >= 64:
                    break
                sampling = params(own.randint(1, 12), own.choice([0.0, 0.7, 1.0]), (3,), seed=own.randrange(1000))
                call = engine.generate(ids, sampling, f"s{index}")
                if own.random() < 0.15:
                    with pytest.raises((asyncio.TimeoutError, TimeoutError)):
                        await asyncio.wait_for(call, timeout=0.0)
                    continue
                sample = await call
                assert sample.token_ids_S == slow_sample(model, ids, sampling, 64), f"conversation {index}, turn {turn}"
                ids = [*ids, *sample.token_ids_S, *random_ids(own.randrange(1000), own.randint(0, 6))]
            if own.random() < 0.7:
                engine.end_session(f"s{index}")

        run(*(converse(index) for index in rng.sample(range(100), 20)))
        assert engine.stats().prompt_tokens_reused > 0
