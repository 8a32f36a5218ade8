"""Train `model/checkpoints/ledger-start`, the policy that the quick start begins with: from nothing, by imitation of an oracle.

    python -m scripts.train_ledger_start train --folder model/checkpoints/ledger-start
    python -m scripts.train_ledger_start evaluate --folder model/checkpoints/ledger-start

The aim is a policy that copies ids, amounts and dates without fault and is wrong only in its decisions: reinforcement learning can
mend decisions in minutes, and cannot teach copying in any time that a quick start has. So it first imitates an oracle that is always
right, from which a small model learns to copy soonest, and then, for a short while, one that takes wrong decisions.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from configs.schema import ModelConfig
from envs.messages import Message, ToolCall, parse_turn
from envs.registry import make_env, split_seeds
from envs.tool_env import ToolEnv
from model.chat import ChatMLRenderer
from model.loading import CHECKPOINTS, Policy, load_policy, num_parameters, save_checkpoint
from model.runtime import set_up_torch
from model.tokenizer import END_OF_TURN, PADDING, START_OF_TURN, train_tokenizer
from rl.sft import SupervisedExample, oracle_conversations, supervised_fine_tune

ENV_ID = "cairn/Ledger-v0"


@dataclass(frozen=True)
class Stage:
    """One training: an oracle's episodes, and the rates of Muon and of AdamW, which fall to zero.

    episodes: options of the environment, and how many episodes under them. Short ones teach the form of a call soon; money moves in
    the long ones. flaw_rate: how often a decision of the oracle is wrong.
    """

    episodes: tuple[tuple[dict[str, Any], int], ...]
    flaw_rate: float
    num_epochs: int
    muon_learning_rate: float
    learning_rate: float

    @property
    def num_episodes(self) -> int:
        """Different episodes in all."""
        return sum(count for _, count in self.episodes)


SHORT, LONG = {"max_calls": 4}, {"min_calls": 4, "max_calls": 6}
EXPERT = Stage(((SHORT, 30_000), (LONG, 60_000)), flaw_rate=0.0, num_epochs=2, muon_learning_rate=1e-2, learning_rate=8e-3)
CLERK = Stage(((SHORT, 5_000), (LONG, 12_000)), flaw_rate=0.3, num_epochs=1, muon_learning_rate=1e-3, learning_rate=5e-4)
VOCAB_SIZE = 2304
"""Room for each number of three digits, so that an id is two tokens: its letter and its number."""
MAX_EPISODE_TOKENS = 1024
"""A sampled episode ends here."""
NUM_TOKENIZER_EPISODES = 3_000
FIRST_TRAIN_SEED = 2**30
"""Far from the first seeds of the split, which are those that a run of reinforcement learning takes."""
CHUNK = 1000
"""Episodes that a process plays before it hands them over."""
WEIGHT_DECAY, WARMUP_STEPS = 0.01, 50
INITIALIZER_RANGE = 0.06
"""Standard deviation of the first weights, near the inverse root of the width.

Runs at 0.02 did not learn to copy, though other settings differed too.
"""

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def train(
    folder: Annotated[Path, typer.Option(help="Where the checkpoint is written.")] = CHECKPOINTS / "ledger-start",
    expert: Annotated[
        Path | None, typer.Option(help="Keep the policy of the first stage here; where it is already there, only the second is trained.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Part of the episodes to train on; 0.01 for a trial.")] = 1.0,
    batch_size: Annotated[int, typer.Option(help="Episodes per optimiser step.")] = 32,
    seed: Annotated[int, typer.Option(help="Fixes weights, flaws and order.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Train the tokenizer and the model, write the checkpoint, and evaluate it."""
    set_up_torch(threads)
    torch.manual_seed(seed)
    started = time.monotonic()
    imitate = partial(_imitate, scale=scale, batch_size=batch_size, seed=seed, threads=threads, started=started)
    if expert is not None and expert.is_dir():
        policy = _load(expert)
    else:
        policy = _new_policy()
        print(f"{len(policy.tokenizer)} tokens, {num_parameters(policy.model):,} parameters", flush=True)
        imitate(policy, EXPERT, FIRST_TRAIN_SEED)
        if expert is not None:
            expert.mkdir(parents=True)
            save_checkpoint(policy, expert)
    expert_result = sample_episodes(policy, split_seeds(ENV_ID, "validation")[:400], temperature=0.0, seed=seed)
    print(f"expert, greedy: {expert_result.text()}", flush=True)
    imitate(policy, CLERK, FIRST_TRAIN_SEED + EXPERT.num_episodes)
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(policy, folder)
    result = sample_episodes(policy, split_seeds(ENV_ID, "validation")[:400], temperature=1.0, seed=seed)
    print(f"clerk, temperature 1: {result.text()}", flush=True)
    (folder / "README.md").write_text(_model_card(policy, expert_result, result))


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Option(help="The checkpoint.")] = CHECKPOINTS / "ledger-start",
    num_episodes: Annotated[int, typer.Option(help="Held-out tasks (validation split), one episode each.")] = 200,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Fixes the samples.")] = 0,
    show: Annotated[int, typer.Option(help="Print so many failed episodes.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Sample held-out episodes with plain `generate` and print success and the faults of copying."""
    set_up_torch(threads)
    policy = _load(folder)
    result = sample_episodes(policy, split_seeds(ENV_ID, "validation")[:num_episodes], temperature=temperature, seed=seed)
    print(result.text())
    for transcript in result.failed_transcripts[:show]:
        print(f"\n{transcript}")


@dataclass(frozen=True)
class SampledResult:
    """How sampled episodes went.

    num_miscopied: calls with an argument that stands nowhere in the conversation before it. num_refused: well-formed calls that a
    tool refused. num_invalid: calls that never reached a tool.
    Example: `SampledResult(200, 94, 1100, 2, 1, 0, ("user: ...",))`.
    """

    num_episodes: int
    num_solved: int
    num_calls: int
    num_miscopied: int
    num_refused: int
    num_invalid: int
    failed_transcripts: tuple[str, ...]

    def text(self) -> str:
        """Return it in one line."""
        return (
            f"success {self.num_solved / self.num_episodes:.1%} of {self.num_episodes} episodes; of {self.num_calls} calls "
            f"{self.num_miscopied} miscopied, {self.num_refused} refused, {self.num_invalid} invalid"
        )


def sample_episodes(
    policy: Policy, seeds: Iterable[int], *, temperature: float, seed: int, max_turns: int = 16, batch_size: int = 100
) -> SampledResult:
    """Return how the policy does on tasks, each tried once; a batch of episodes is sampled turn by turn, side by side."""
    torch.manual_seed(seed)
    seeds = list(seeds)
    episodes = [_Episode(task_seed, policy.renderer) for task_seed in seeds]
    for start in range(0, len(episodes), batch_size):
        batch = episodes[start : start + batch_size]
        for _ in range(max_turns):
            running = [episode for episode in batch if not episode.is_over]
            if not running:
                break
            turns = _sample_turns(policy, [episode.token_ids for episode in running], temperature)
            for episode, sampled_ids in zip(running, turns, strict=True):
                episode.take(sampled_ids)
    solved = [episode.finish() for episode in episodes]
    return SampledResult(
        num_episodes=len(episodes),
        num_solved=sum(solved),
        num_calls=sum(episode.num_calls for episode in episodes),
        num_miscopied=sum(episode.num_miscopied for episode in episodes),
        num_refused=sum(episode.num_refused for episode in episodes),
        num_invalid=sum(episode.num_invalid for episode in episodes),
        failed_transcripts=tuple(episode.transcript for episode, is_solved in zip(episodes, solved, strict=True) if not is_solved),
    )


class _Episode:
    """One episode that is being sampled."""

    def __init__(self, seed: int, renderer: ChatMLRenderer) -> None:
        self._env: ToolEnv = make_env(ENV_ID)
        self._renderer = renderer
        observation, _ = self._env.reset(seed=seed)
        self.token_ids = renderer.prompt_ids(observation.messages, observation.tools)
        self.transcript = "\n".join(f"{message.role}: {message.content}" for message in observation.messages)
        self.is_over = False
        self.num_calls = self.num_miscopied = self.num_refused = self.num_invalid = 0

    def take(self, sampled_ids: list[int]) -> None:
        """Act, and append what the environment says."""
        turn = parse_turn(self._renderer.text(sampled_ids))
        for call in turn.calls:
            values = call.arguments.values() if isinstance(call, ToolCall) else ()
            self.num_miscopied += any(str(value) not in self.transcript for value in values)
        observation, _, self.is_over, _, _ = self._env.step(turn)
        self._count(observation.messages)
        self.transcript += "".join(f"\n{role}: {text}" for role, text in [("assistant", turn.text), *_said(observation.messages)])
        self.token_ids += sampled_ids
        self.token_ids += self._renderer.closing_ids(sampled_ids) + self._renderer.observation_ids(observation.messages)
        self.is_over = self.is_over or len(self.token_ids) >= MAX_EPISODE_TOKENS

    def finish(self) -> bool:
        """Return whether the task is solved; the environment is closed."""
        is_solved = self._env.verify().success
        self._env.close()
        return is_solved

    def _count(self, messages: tuple[Message, ...]) -> None:
        self.num_calls += len(messages)
        self.num_invalid += sum(message.is_invalid_call for message in messages)
        self.num_refused += sum(message.is_error and not message.is_invalid_call for message in messages)


def _said(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


@torch.inference_mode()
def _sample_turns(policy: Policy, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    """Return one sampled turn after each prompt; `generate` wants the padding on the left."""
    stop_id = policy.renderer.stop_token_ids[0]
    length = max(map(len, prompts))
    input_ids_BT = torch.tensor([[stop_id] * (length - len(prompt)) + prompt for prompt in prompts])
    attention_mask_BT = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {"do_sample": False}
    output_BT = policy.model.generate(  # type: ignore[operator]
        input_ids=input_ids_BT, attention_mask=attention_mask_BT, max_new_tokens=96, eos_token_id=stop_id, pad_token_id=stop_id, **how
    )
    turns = output_BT[:, length:].tolist()
    return [turn[: turn.index(stop_id) + 1] if stop_id in turn else turn for turn in turns]


def _texts(num_episodes: int) -> Iterable[str]:
    """Yield what is said in episodes of the oracle, and what the format adds."""
    env = make_env(ENV_ID)
    for task_seed in range(FIRST_TRAIN_SEED, FIRST_TRAIN_SEED + num_episodes):
        observation, _ = env.reset(seed=task_seed)
        yield from (message.content for message in observation.messages)
        for turn in env.oracle() or ():
            observation, *_ = env.step(turn)
            yield turn.text
            yield from (message.content for message in observation.messages)
        yield from ("system\n", "user\n", "assistant\n", "tool\n")
    env.close()


def _imitate(
    policy: Policy, stage: Stage, first_task_seed: int, *, scale: float, batch_size: int, seed: int, threads: int, started: float
) -> None:
    """Train the policy by one stage, on tasks from `first_task_seed` on."""
    examples = _examples(policy.renderer, stage, first_task_seed, scale, seed, threads)
    print(f"{time.monotonic() - started:6.0f} s  {len(examples):,} episodes", flush=True)
    supervised_fine_tune(
        policy,
        examples,
        learning_rate=stage.learning_rate,
        muon_learning_rate=stage.muon_learning_rate,
        num_epochs=stage.num_epochs,
        batch_size=batch_size,
        seed=seed,
        schedule="linear",
        warmup_steps=WARMUP_STEPS,
        weight_decay=WEIGHT_DECAY,
        log_every_steps=50,
        report=_print_progress(started),
        show_progress=False,
    )


def _examples(
    renderer: ChatMLRenderer, stage: Stage, first_task_seed: int, scale: float, seed: int, num_processes: int
) -> list[SupervisedExample]:
    """Return the episodes to imitate, played in so many processes."""
    examples: list[SupervisedExample] = []
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as executor:
        for options, num_episodes in stage.episodes:
            seeds = range(first_task_seed, first_task_seed + max(1, int(num_episodes * scale)))
            first_task_seed += num_episodes
            chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
            play = partial(oracle_conversations, ENV_ID, options, flaw_rate=stage.flaw_rate, seed=seed, renderer=renderer)
            examples += chain.from_iterable(executor.map(play, chunks))
    return examples


def _load(folder: Path) -> Policy:
    return load_policy(ModelConfig(path=str(folder), tools_prompt="none"))


def _new_policy() -> Policy:
    tokenizer = train_tokenizer(_texts(NUM_TOKENIZER_EPISODES), VOCAB_SIZE)
    return Policy(_new_model(tokenizer), tokenizer, ChatMLRenderer(tokenizer, "none"))


def _new_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    vocabulary = tokenizer.get_vocab()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=INITIALIZER_RANGE,
            bos_token_id=vocabulary[START_OF_TURN],
            eos_token_id=vocabulary[END_OF_TURN],
            pad_token_id=vocabulary[PADDING],
        )
    )


def _print_progress(started: float) -> Callable[[dict[str, float]], None]:
    def report(record: dict[str, float]) -> None:
        print(
            f"{time.monotonic() - started:6.0f} s  step {record['step']:.0f}/{record['num_steps']:.0f}  loss {record['loss']:.4f}  "
            f"right {record['mean_token_accuracy']:.2%}  tokens {record['num_tokens']:,.0f}",
            flush=True,
        )

    return report


def _model_card(policy: Policy, expert_result: SampledResult, result: SampledResult) -> str:
    config = json.loads(policy.model.config.to_json_string())
    return f"""---
license: apache-2.0
library_name: transformers
---
# ledger-start

The policy that Cairn's quick start begins with: a Llama of {num_parameters(policy.model):,} parameters
({config["num_hidden_layers"]} layers, width {config["hidden_size"]}) with a byte-level BPE vocabulary of {len(policy.tokenizer)} tokens.
It acts as a clerk in `{ENV_ID}`, and knows nothing else.

Made by `python -m scripts.train_ledger_start train` from nothing but episodes of that environment's oracle, tasks of the training
split, loss on the agent's turns:

1. {EXPERT.num_episodes:,} episodes without a flaw, each seen {EXPERT.num_epochs} times. After it, greedy, on the validation split:
   {expert_result.text()}.
2. {CLERK.num_episodes:,} episodes in which each decision was wrong with probability {CLERK.flaw_rate}, each seen once. After it,
   sampled at temperature 1: {result.text()}.

It is flawed on purpose: its mistakes are what reinforcement learning is there to mend.
"""


if __name__ == "__main__":
    app()
