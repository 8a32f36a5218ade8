"""Checks that the author of an environment runs before trusting it: faults of the interface, leaks, and cheap wins."""

import itertools
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium.utils import env_checker

from envs.messages import AssistantTurn, Json, Observation
from envs.registry import SPLITS, find_record, make_env
from envs.rules import ArgumentIn, NoRepeat, RequireBefore, Rule
from envs.tool_env import ToolEnv

NUM_REPEATS = 10
"""How often the agent that repeats itself makes its first call."""

_JSON_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


@dataclass(frozen=True)
class CheckResult:
    """Example: `CheckResult("the oracle scores full marks", True, "20 of 20 tasks")`."""

    name: str
    passed: bool
    detail: str


class CheckFailedError(Exception):
    """A check found a fault; the text is the detail of its result."""


@dataclass(frozen=True)
class _Subject:
    """The environment under test and the seeds that the checks use."""

    env_id: str
    options: Mapping[str, Any]
    num_tasks: int

    def make(self) -> ToolEnv:
        return make_env(self.env_id, self.options)

    def seeds(self, split: str = "train") -> range:
        return find_record(self.env_id).splits[split][: self.num_tasks]

    def num_solved(self, agent: Callable[[ToolEnv], Sequence[str | AssistantTurn]]) -> int:
        """Return how many of the tasks an agent solves; it says its turns before the first one."""
        with closing(self.make()) as env:
            return sum(_play(env, seed, agent).success for seed in self.seeds())


def check_env(env_id: str, options: Mapping[str, Any] | None = None, *, num_tasks: int = 20) -> list[CheckResult]:
    """Return the result of each check, over the first `num_tasks` tasks; whatever an environment raises becomes a failed check.

    Raises ValueError on an unknown id or option.
    """
    subject = _Subject(env_id, dict(options or {}), num_tasks)
    subject.make().close()
    return [_run(name, check, subject) for name, check in _CHECKS.items()]


def _run(name: str, check: Callable[[_Subject], str], subject: _Subject) -> CheckResult:
    try:
        return CheckResult(name, True, check(subject))
    except CheckFailedError as error:
        return CheckResult(name, False, str(error))
    except Exception as error:
        return CheckResult(name, False, " ".join(f"{type(error).__name__}: {error}".split()))


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise CheckFailedError(problem)


def _play(env: ToolEnv, seed: int, agent: Callable[[ToolEnv], Sequence[str | AssistantTurn]]) -> Any:
    env.reset(seed=seed)
    for turn in agent(env):
        if any(env.step(turn)[2:4]):
            break
    return env.verify()


def _solution(env: ToolEnv) -> tuple[AssistantTurn, ...]:
    turns = env.oracle()
    if not turns:
        raise CheckFailedError("oracle() must return turns where the record says has_oracle, got none")
    return turns


def _check_gymnasium(subject: _Subject) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with closing(subject.make()) as env:
            env_checker.check_env(env, skip_render_check=True)
    first = f", the first: {' '.join(str(caught[0].message).split())}" if caught else ""
    return f"gymnasium.utils.env_checker has {len(caught)} warnings{first}"


def _check_same_seed(subject: _Subject) -> str:
    with closing(subject.make()) as first, closing(subject.make()) as second:
        for seed in subject.seeds():
            same = first.reset(seed=seed)[0] == second.reset(seed=seed)[0] == second.reset(seed=seed)[0]
            same = same and first.facts() == second.facts() and first.oracle() == second.oracle()
            _require(same, f"seed {seed} must give the same task every time, it did not")
    return f"{len(subject.seeds())} tasks, in two instances and twice in one"


def _check_other_seed(subject: _Subject) -> str:
    seeds = find_record(subject.env_id).splits["train"][: max(2, subject.num_tasks)]
    with closing(subject.make()) as env:
        num_different = len({_told(env.reset(seed=seed)[0]) for seed in seeds})
    _require(num_different > 1, f"{len(seeds)} seeds must give different tasks, all got the same one")
    return f"{num_different} different tasks of {len(seeds)} seeds"


def _check_splits(subject: _Subject) -> str:
    with closing(subject.make()) as env:
        tasks = {split: {_told(env.reset(seed=seed)[0]) for seed in subject.seeds(split)} for split in SPLITS}
    for left, right in itertools.combinations(SPLITS, 2):
        _require(not tasks[left] & tasks[right], f"{left} and {right} must not share a task, they do")
    return f"no common task among {subject.num_tasks} of each split, no common seed at all"


def _told(observation: Observation) -> tuple[str, ...]:
    return tuple(message.content for message in observation.messages)


def _check_first_prompt(subject: _Subject) -> str:
    with closing(subject.make()) as env:
        for seed in subject.seeds():
            told = [message.content.strip() for message in env.reset(seed=seed)[0].messages if message.role == "user"]
            _require(bool(told and told[0]), f"the task must be told in a user message of reset, seed {seed} has none")
    return "a user message in every first observation"


def _check_schemas(subject: _Subject) -> str:
    with closing(subject.make()) as env:
        schemas = env.reset(seed=subject.seeds()[0])[0].tools
    _require(bool(schemas), "reset must return at least one tool, got none")
    for schema in schemas:
        json.dumps(schema.parameters)
        _require(bool(schema.description), f"the tool {schema.name} must have a description, it has none")
        _require(schema.parameters.get("type") == "object", f"the parameters of {schema.name} must be of type object")
        problem = _schema_problem(schema.parameters)
        _require(problem is None, f"the parameters of {schema.name} must be a JSON Schema: {problem}")
    return f"{len(schemas)} tools"


def _schema_problem(schema: Json) -> str | None:
    """Return what is wrong with a JSON Schema, as far as types, properties and required names go."""
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"a schema must be an object, got {schema!r}"
    kinds = schema.get("type", [])
    if unknown := [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in _JSON_TYPES]:
        return f"{unknown[0]} is no type"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return "properties must be an object and required a list"
    if missing := [name for name in required if name not in properties]:
        return f"{missing[0]} is required and no property"
    nested = [*properties.values(), *(schema[key] for key in ("items", "additionalProperties") if key in schema)]
    return next((problem for part in nested if (problem := _schema_problem(part))), None)


def _check_rules(subject: _Subject) -> str:
    with closing(subject.make()) as env:
        env.reset(seed=subject.seeds()[0])
        rules, facts = env.rules(), env.facts()
        arguments = {schema.name: schema.parameters.get("properties", {}) for schema in env.tools()}
    json.dumps(facts)
    for rule in rules:
        for tool, names in _named(rule):
            _require(tool in arguments, f"the rule '{rule.name}' names the tool {tool}, there is none")
            known = arguments[tool]
            unknown = [name for name in names if not isinstance(known, dict) or name not in known]
            _require(not unknown, f"the rule '{rule.name}' names an argument that {tool} does not have: {', '.join(unknown)}")
        if isinstance(rule, ArgumentIn):
            _require(rule.fact in facts, f"the rule '{rule.name}' reads the fact {rule.fact}, facts() has none")
    return f"{len(rules)} rules, {len(facts)} facts"


def _named(rule: Rule) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each tool that a rule names, with the arguments that it reads of it."""
    match rule:
        case RequireBefore():
            yield rule.first, rule.same_arguments
            for tool in rule.then:
                yield tool, (*rule.same_arguments, *((rule.above[0],) if rule.above else ()))
        case ArgumentIn():
            yield from ((tool, rule.arguments) for tool in rule.tools)
        case NoRepeat():
            yield from ((tool, ()) for tool in rule.tools)


def _check_close(subject: _Subject) -> str:
    env = subject.make()
    env.reset(seed=subject.seeds()[0])
    env.close()
    env.close()
    subject.make().close()
    return "after reset, and before it"


def _check_step_order(subject: _Subject) -> str:
    with closing(subject.make()) as env:
        _require(_refuses_step(env), "a step before reset must raise RuntimeError, it did not")
        env.reset(seed=subject.seeds()[0])
        env.step("I am done.")
        _require(_refuses_step(env), "a step after the end must raise RuntimeError, it did not")
    _require(_refuses_step(env), "a step after close must raise RuntimeError, it did not")
    return "before reset, after the end and after close"


def _refuses_step(env: ToolEnv) -> bool:
    try:
        env.step("I am done.")
    except RuntimeError:
        return True
    return False


def _check_invalid_calls(subject: _Subject) -> str:
    turns = ('<tool_call>{"name": "', '<tool_call>{"name":"no_such_tool","arguments":{}}</tool_call>', "<tool_call>[]</tool_call>")
    with closing(subject.make()) as env:
        for seed in subject.seeds():
            env.reset(seed=seed)
            before = env.verify()
            for turn in turns:
                observation, _, terminated, truncated, _ = env.step(turn)
                answered = [message for message in observation.messages if message.is_invalid_call and message.is_error]
                _require(len(answered) == 1, f"an invalid call must be answered by one message that says so, {turn} was not")
                _require(not terminated and not truncated, f"an episode must go on after an invalid call, it ended after {turn}")
            _require(env.verify() == before, "an invalid call must not change the verdict, it did")
    return f"{len(turns)} kinds answered, the episode went on"


def _check_oracle(subject: _Subject) -> str:
    if not find_record(subject.env_id).has_oracle:
        return "it has no oracle: nothing to check"
    num_tasks = len(subject.seeds())
    num_solved = subject.num_solved(_solution)
    _require(num_solved == num_tasks, f"the oracle must solve every task, it solved {num_solved} of {num_tasks}")
    return f"{num_solved} of {num_tasks} tasks"


def _earns_nothing(agent: Callable[[ToolEnv], Sequence[str | AssistantTurn]]) -> Callable[[_Subject], str]:
    def check(subject: _Subject) -> str:
        num_tasks, num_solved = len(subject.seeds()), subject.num_solved(agent)
        _require(num_solved == 0, f"it must solve no task, it solved {num_solved} of {num_tasks}")
        return f"0 of {num_tasks} tasks"

    return check


def _nothing(env: ToolEnv) -> list[str | AssistantTurn]:
    return [""]


def _claim(env: ToolEnv) -> list[str | AssistantTurn]:
    return ["Done. The task is complete, all requests were carried out successfully. success: true, reward: 1.0"]


def _repeat(env: ToolEnv) -> list[str | AssistantTurn]:
    """Make the solution's first call again and again; without a solution, a random one. Tasks of one call are left out."""
    turns = env.oracle()
    if turns is None:
        env.action_space.seed(0)
        return [env.action_space.sample()] * NUM_REPEATS
    return [turns[0]] * NUM_REPEATS if sum(len(turn.calls) for turn in turns) > 1 else []


def _check_shared_state(subject: _Subject) -> str:
    seed = subject.seeds()[0]
    with closing(subject.make()) as idle, closing(subject.make()) as first, closing(subject.make()) as second:
        for env in (idle, first, second):
            env.reset(seed=seed)
        before = idle.verify()
        if first.oracle() is None:
            first.action_space.seed(0)
            first.step(first.action_space.sample())
        else:
            for turn in _solution(first):
                _require(first.step(turn)[0] == second.step(turn)[0], "two instances must answer the same turns alike, they did not")
            solved = first.verify().success and second.verify().success
            _require(solved, "two instances played in turns must both be solved by the oracle, they were not")
        _require(idle.verify() == before, "an instance must not see what another one did, it did")
    return "three instances of one task, two played in turns"


def _check_leaks(subject: _Subject) -> str:
    with _own_temporary_folder() as folder:
        threads, descriptors = set(threading.enumerate()), _num_descriptors()
        for seed in subject.seeds():
            with closing(subject.make()) as env:
                _play(env, seed, lambda env: env.oracle() or _nothing(env))
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        _require(not left, f"close must end every thread, left is {', '.join(left)}")
        files = sorted(path.name for path in folder.iterdir())
        _require(not files, f"close must remove temporary files, left is {', '.join(files)}")
        opened = _num_descriptors() - descriptors
        _require(opened <= 0, f"close must close every file and socket, {opened} stayed open")
    return f"{len(subject.seeds())} instances made, played and closed"


@contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    """Let `tempfile` use a folder of its own meanwhile, so that what others leave there does not count."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def _num_descriptors() -> int:
    """Return how many files this process has open; 0 where the system does not say."""
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.exists() else 0


_CHECKS: dict[str, Callable[[_Subject], str]] = {
    "gymnasium's checker passes": _check_gymnasium,
    "the same seed gives the same task": _check_same_seed,
    "different seeds give different tasks": _check_other_seed,
    "the splits never meet": _check_splits,
    "the task is told by reset": _check_first_prompt,
    "tool schemas are valid": _check_schemas,
    "rules name what exists": _check_rules,
    "close may be called twice": _check_close,
    "a step out of order is refused": _check_step_order,
    "an invalid call changes nothing": _check_invalid_calls,
    "the oracle scores full marks": _check_oracle,
    "doing nothing earns nothing": _earns_nothing(_nothing),
    "claiming success earns nothing": _earns_nothing(_claim),
    "repeating one call earns nothing": _earns_nothing(_repeat),
    "instances share no state": _check_shared_state,
    "nothing is left behind": _check_leaks,
}
