"""The checks find the faults that they are for."""

import sys
import tempfile
import threading
import types
from itertools import count
from typing import ClassVar

import pytest

from envs import EnvRecord, ToolEnv, call_text, register_env, tool
from envs.checks import CheckResult, check_env
from envs.messages import AssistantTurn, Message, Verification, parse_turn
from envs.rules import ArgumentIn, Rule

NUMBERS = count()


class SwitchEnv(ToolEnv):
    """A right environment: press the button that is named, twice."""

    def start(self, seed: int) -> tuple[Message, ...]:
        self.button, self.pressed = f"b{seed}", []
        return (Message("user", f"Press {self.button}, then ok."),)

    @tool
    def press(self, button: str) -> str:
        """Press a button."""
        self.pressed.append(button)
        return "pressed"

    def verify(self) -> Verification:
        return Verification(self.pressed == [self.button, "ok"], {})

    def oracle(self) -> tuple[AssistantTurn, ...] | None:
        presses = [parse_turn(call_text("press", {"button": button})) for button in (self.button, "ok")]
        return (*presses, AssistantTurn("Done."))


class UnseededEnv(SwitchEnv):
    def start(self, seed: int) -> tuple[Message, ...]:
        return super().start(next(NUMBERS))


class ConstantEnv(SwitchEnv):
    def start(self, seed: int) -> tuple[Message, ...]:
        return super().start(1)


class SilentEnv(SwitchEnv):
    def start(self, seed: int) -> tuple[Message, ...]:
        return (Message("system", super().start(seed)[0].content),)


class GenerousEnv(SwitchEnv):
    def verify(self) -> Verification:
        return Verification(True, {})


class BadOracleEnv(SwitchEnv):
    def oracle(self) -> tuple[AssistantTurn, ...] | None:
        return (AssistantTurn("Done."),)


class SharedEnv(SwitchEnv):
    everything: ClassVar[list[str]] = []

    def start(self, seed: int) -> tuple[Message, ...]:
        messages = super().start(seed)
        self.everything.clear()
        self.pressed = self.everything
        return messages


class ThreadEnv(SwitchEnv):
    stop = threading.Event()

    def start(self, seed: int) -> tuple[Message, ...]:
        threading.Thread(target=self.stop.wait, name="forgotten", daemon=True).start()
        return super().start(seed)


class FileEnv(SwitchEnv):
    def start(self, seed: int) -> tuple[Message, ...]:
        tempfile.mkdtemp(prefix="forgotten-")
        return super().start(seed)


class RuleEnv(SwitchEnv):
    def rules(self) -> tuple[Rule, ...]:
        return (ArgumentIn("only one's own", ("press",), ("knob",), "knobs"),)


class DoubleCloseEnv(SwitchEnv):
    def close(self) -> None:
        if self._phase.name == "CLOSED":
            raise OSError("closed already")
        super().close()


def results(env: type[ToolEnv], num_tasks: int = 3) -> dict[str, CheckResult]:
    name = f"checks/{env.__name__}-v0"
    splits = {"train": range(0, 100), "validation": range(100, 200), "test": range(200, 300)}
    # A test's own module is not importable by its name.
    register_env(EnvRecord(name, f"{register_module(env)}:{env.__name__}", "tests", "MIT", "d", splits, has_oracle=True))
    return {result.name: result for result in check_env(name, num_tasks=num_tasks)}


def register_module(env: type[ToolEnv]) -> str:
    """Return the name of an importable module that holds the class."""
    module = sys.modules.setdefault("envs_under_check", types.ModuleType("envs_under_check"))
    setattr(module, env.__name__, env)
    return module.__name__


def test_a_right_environment_passes_every_check():
    assert [result for result in results(SwitchEnv).values() if not result.passed] == []


@pytest.mark.parametrize(
    ("env", "name", "detail"),
    [
        (UnseededEnv, "the same seed gives the same task", "seed 0 must give the same task every time, it did not"),
        (ConstantEnv, "different seeds give different tasks", "3 seeds must give different tasks, all got the same one"),
        (ConstantEnv, "the splits never meet", "train and validation must not share a task, they do"),
        (SilentEnv, "the task is told by reset", "the task must be told in a user message of reset, seed 0 has none"),
        (GenerousEnv, "doing nothing earns nothing", "it must solve no task, it solved 3 of 3"),
        (GenerousEnv, "claiming success earns nothing", "it must solve no task, it solved 3 of 3"),
        (GenerousEnv, "repeating one call earns nothing", "it must solve no task, it solved 3 of 3"),
        (BadOracleEnv, "the oracle scores full marks", "the oracle must solve every task, it solved 0 of 3"),
        (SharedEnv, "instances share no state", "two instances played in turns must both be solved by the oracle, they were not"),
        (ThreadEnv, "nothing is left behind", "close must end every thread, left is forgotten, forgotten, forgotten"),
        (FileEnv, "nothing is left behind", "close must remove temporary files, left is forgotten-"),
        (RuleEnv, "rules name what exists", "the rule 'only one's own' names an argument that press does not have: knob"),
        (DoubleCloseEnv, "close may be called twice", "OSError: closed already"),
    ],
)
def test_a_fault_is_found_and_named(env: type[ToolEnv], name: str, detail: str):
    result = results(env)[name]
    assert not result.passed
    assert result.detail.startswith(detail)
    assert "\n" not in result.detail
    if env is ThreadEnv:
        ThreadEnv.stop.set()


@pytest.mark.parametrize("options", [{}, {"database": "file", "min_calls": 2, "max_calls": 20}])
def test_the_ledger_passes_every_check(options: dict):
    assert [result for result in check_env("cairn/Ledger-v0", options, num_tasks=10) if not result.passed] == []


def test_an_unknown_id_is_no_failed_check():
    with pytest.raises(ValueError, match=r"did you mean cairn/Ledger-v0\?"):
        check_env("cairn/Ledger-v1")
