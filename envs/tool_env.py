"""The base of every environment: a gymnasium.Env whose actions are turns of an agent and whose tools are typed methods."""

import copy
import inspect
from enum import Enum
from typing import Any, ClassVar

import gymnasium

from envs.messages import AssistantTurn, Json, MalformedCall, Message, Observation, ToolCall, ToolSchema, Verification, parse_turn
from envs.rules import Rule
from envs.spaces import ObservationSpace, TurnSpace
from envs.tools import CoroutineThread, InvalidArgumentsError, Tool, ToolError, collect_tools, did_you_mean, error_text, quote, result_text

MAX_UNSEEDED = 2**31
"""A reset without a seed draws its task from the seeds below this one."""


MAX_PROBLEM_CHARS = 200
"""The description of a malformed call, which may quote it, is cut here."""


class _Phase(Enum):
    """What an environment that may not be stepped is waiting for."""

    NEW = "it was not reset yet: call reset(seed=...) first"
    RUNNING = "it runs"
    ENDED = "its episode is over: call reset(seed=...) for another one"
    BROKEN = "a tool raised in its last step: call reset(seed=...) for another episode"
    CLOSED = "it was closed: make a new one"


class ToolEnv(gymnasium.Env["Observation", "str | AssistantTurn"]):
    """An environment of tools. A subclass writes `start`, `verify` and methods marked with `@tool`; the rest has defaults.

    Rewards of `step` are 0.0: how good an episode was is read from its final state, by `verify`. `info` is always empty.
    Calls of one turn run in order and are answered by one message each. A call that is malformed or does not fit the schema
    is answered with what was wrong and changes nothing. A tool refuses with `ToolError`; any other exception of a tool is a
    fault of the environment and propagates. Example:

        class Lamp(ToolEnv):
            def start(self, seed: int) -> tuple[Message, ...]:
                self.is_on = False
                return (Message("user", "Switch the lamp on."),)

            @tool
            def switch(self, on: bool) -> str:
                "Switch the lamp."
                self.is_on = on
                return "ok"

            def verify(self) -> Verification:
                return Verification(self.is_on, {"the lamp is on": self.is_on})
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it without ClassVar
    _tools: ClassVar[dict[str, Tool]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tools = collect_tools(cls)

    def __init__(self) -> None:
        self.observation_space = ObservationSpace()
        self.action_space = TurnSpace(self.tools())
        self._phase = _Phase.NEW
        self._coroutines = CoroutineThread()

    def start(self, seed: int) -> tuple[Message, ...]:
        """Set up the task of this seed and return the first messages; the task is told in the first user message."""
        raise NotImplementedError("an environment must write start(seed), which returns the first messages")

    def verify(self) -> Verification:
        """Return how the current state compares with the task's goal."""
        raise NotImplementedError("an environment must write verify(), which reads the final state")

    def oracle(self) -> tuple[AssistantTurn, ...] | None:
        """Return turns that solve the current task from its start, final answer included; None where no solution is known."""
        return None

    def flawed_oracle(self, flaw_rate: float, seed: int) -> tuple[AssistantTurn, ...]:
        """Return the oracle's turns with each decision wrong with probability `flaw_rate`, fixed by `seed`."""
        raise NotImplementedError(f"flaw_rate needs an environment with a flawed oracle, {type(self).__name__} has none: set it to 0")

    def rules(self) -> tuple[Rule, ...]:
        """Return the process rules of every task."""
        return ()

    def facts(self) -> dict[str, Json]:
        """Return what the current task allows, as the process rules read it."""
        return {}

    def release(self) -> None:
        """Give back what the environment holds; called once, by the first close."""

    def tools(self) -> tuple[ToolSchema, ...]:
        """Return the schemas of the tools."""
        return tuple(copy.deepcopy(tool.schema) for tool in self._tools.values())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Start the task of a seed, or of a random one below 2**31, and return its first messages and the tools.

        Raises ValueError when options are given: they belong to the constructor. Raises RuntimeError after close.
        """
        if self._phase is _Phase.CLOSED:
            raise RuntimeError(f"an environment must be open to be reset, {_Phase.CLOSED.value}")
        if options:
            raise ValueError(f"reset takes no options, got {', '.join(options)}: pass them when the environment is made")
        super().reset(seed=seed)
        task_seed = int(self.np_random.integers(MAX_UNSEEDED)) if seed is None else seed
        self._phase = _Phase.NEW
        messages = self.start(task_seed)
        self._phase = _Phase.RUNNING
        return Observation(messages, self.tools()), {}

    def step(self, action: str | AssistantTurn) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take a turn of the agent; returns (observation, 0.0, terminated, False, {}), terminated by a turn without calls.

        Raises RuntimeError before reset and after the end, TypeError when the action is neither text nor a turn.
        """
        if self._phase is not _Phase.RUNNING:
            raise RuntimeError(f"an environment must have a running episode to be stepped, {self._phase.value}")
        turn = parse_turn(action) if isinstance(action, str) else action
        if not isinstance(turn, AssistantTurn):
            raise TypeError(f"an action must be a str or an AssistantTurn, got {type(action).__name__}")
        self._phase = _Phase.BROKEN  # until every call came back
        messages = tuple([self._answer(call) for call in turn.calls])
        is_answer = not turn.calls
        self._phase = _Phase.ENDED if is_answer else _Phase.RUNNING
        return Observation(messages), 0.0, is_answer, False, {}

    def close(self) -> None:
        """Release everything; may be called again."""
        if self._phase is _Phase.CLOSED:
            return
        self._phase = _Phase.CLOSED
        try:
            self._coroutines.close()
        finally:
            self.release()

    def _answer(self, call: ToolCall | MalformedCall) -> Message:
        if isinstance(call, MalformedCall):
            return _refusal(call, None, quote(call.problem, MAX_PROBLEM_CHARS), is_invalid_call=True)
        tool = self._tools.get(call.name)
        if tool is None:
            problem = f"there is no tool {quote(call.name)}{did_you_mean(call.name, self._tools)}"
            return _refusal(call, None, problem, is_invalid_call=True)
        try:
            arguments = tool.read(call.arguments)
        except InvalidArgumentsError as error:
            return _refusal(call, call.name, str(error), is_invalid_call=True)
        try:
            result = tool.function(self, **arguments)
            if inspect.isawaitable(result):
                result = self._coroutines.run(_await(result))
        except ToolError as error:
            return _refusal(call, call.name, str(error), is_invalid_call=False)
        return Message("tool", result_text(result), call_id=call.call_id, tool_name=call.name)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _refusal(call: ToolCall | MalformedCall, tool_name: str | None, problem: str, *, is_invalid_call: bool) -> Message:
    content = error_text(problem)
    return Message("tool", content, call_id=call.call_id, tool_name=tool_name, is_error=True, is_invalid_call=is_invalid_call)
