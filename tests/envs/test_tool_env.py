"""The base of environments, on a counter with a few odd tools."""

import asyncio
import datetime
import json
import threading
from typing import Annotated, Literal

import pytest
from pydantic import Field

from envs import ToolEnv, ToolError, call_text, tool
from envs.messages import AssistantTurn, Message, Observation, ToolCall, Verification


class CounterEnv(ToolEnv):
    """Count up to three."""

    def __init__(self) -> None:
        super().__init__()
        self.num_releases = 0

    def start(self, seed: int) -> tuple[Message, ...]:
        self.seed, self.value, self.calls = seed, 0, []
        return (Message("system", "Count."), Message("user", "Count to three."))

    def verify(self) -> Verification:
        return Verification(self.value == 3, {"the counter is at three": self.value == 3})

    def release(self) -> None:
        self.num_releases += 1

    @tool
    def add(self, amount: int, times: Annotated[int, Field(ge=1, le=9, description="How often.")] = 1) -> dict[str, int]:
        """Add to the counter,
        once or several times.

        amount: What to add.
        """
        self.value += amount * times
        return {"value": self.value}

    @tool
    async def add_later(self, amount: int) -> str:
        """Add after a moment."""
        await asyncio.sleep(0)
        self.value += amount
        return f"now {self.value}"

    @tool
    def refuse(self) -> str:
        """Never do anything."""
        raise ToolError("not today")

    @tool
    def crash(self) -> str:
        """Break."""
        raise ZeroDivisionError("broken")

    @tool
    def take(self, kind: Literal["a", "b"], day: datetime.date, ratio: float, flags: tuple[bool, ...] = ()) -> str:
        """Take values of several types."""
        self.calls.append((kind, day, ratio, flags))
        return "ok"


@pytest.fixture
def env():
    env = CounterEnv()
    env.reset(seed=1)
    yield env
    env.close()


def step(env: ToolEnv, name: str, **arguments) -> Message:
    observation, reward, terminated, truncated, info = env.step(call_text(name, arguments))
    assert (reward, terminated, truncated, info) == (0.0, False, False, {})
    (message,) = observation.messages
    return message


def test_schemas_come_from_signature_and_docstring(env: CounterEnv):
    schema = env.tools()[0]
    assert schema.name == "add"
    assert schema.description == "Add to the counter, once or several times."
    assert schema.parameters == {
        "type": "object",
        "properties": {
            "amount": {"type": "integer", "description": "What to add."},
            "times": {"type": "integer", "minimum": 1, "maximum": 9, "description": "How often.", "default": 1},
        },
        "required": ["amount"],
        "additionalProperties": False,
    }


def test_the_task_is_told_by_reset():
    observation, info = CounterEnv().reset(seed=5)
    assert observation.messages == (Message("system", "Count."), Message("user", "Count to three."))
    assert [schema.name for schema in observation.tools] == ["add", "add_later", "refuse", "crash", "take"]
    assert info == {}


def test_a_result_is_compact_json_with_its_call_id(env: CounterEnv):
    assert step(env, "add", amount=2) == Message("tool", '{"value":2}', call_id="call_0", tool_name="add")


def test_a_string_result_stays_as_it_is(env: CounterEnv):
    assert step(env, "add_later", amount=2).content == "now 2"


def test_async_tools_run_under_a_running_loop_too():
    async def play() -> str:
        env = CounterEnv()
        env.reset(seed=1)
        try:
            return step(env, "add_later", amount=3).content
        finally:
            env.close()

    assert asyncio.run(play()) == "now 3"


def test_calls_of_one_turn_run_in_order_and_a_bad_one_stops_nothing(env: CounterEnv):
    text = call_text("add", {"amount": 1}) + call_text("ad", {}) + call_text("refuse", {}) + call_text("add", {"amount": 2})
    messages = env.step(text)[0].messages
    assert [(m.call_id, m.tool_name, m.is_error, m.is_invalid_call) for m in messages] == [
        ("call_0", "add", False, False),
        ("call_1", None, True, True),
        ("call_2", "refuse", True, False),
        ("call_3", "add", False, False),
    ]
    assert messages[3].content == '{"value":3}'


def test_a_refusal_is_an_error_and_no_invalid_call(env: CounterEnv):
    expected = Message("tool", '{"error":"not today"}', call_id="call_0", tool_name="refuse", is_error=True)
    assert step(env, "refuse") == expected


def test_a_turn_without_calls_ends_the_episode(env: CounterEnv):
    assert env.step("Done.") == (Observation(()), 0.0, True, False, {})
    with pytest.raises(RuntimeError, match="its episode is over"):
        env.step("Done.")


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("ad", {"amount": 1}, "there is no tool ad, did you mean add?"),
        ("zzzzzz", {}, "there is no tool zzzzzz"),
        ("add", {}, "add needs the argument amount"),
        ("add", {"amount": 1, "time": 2}, "add has no argument time, did you mean times?"),
        ("add", {"amount": "12"}, "add got a wrong amount: input should be a valid integer"),
        ("add", {"amount": True}, "add got a wrong amount: input should be a valid integer"),
        ("add", {"amount": 1.0}, "add got a wrong amount: input should be a valid integer"),
        ("add", {"amount": None}, "add got a wrong amount: input should be a valid integer"),
        ("add", {"amount": 1, "times": 10}, "add got a wrong times: input should be less than or equal to 9"),
        ("take", {"kind": "a", "day": "2024-02-30", "ratio": 1}, "take got a wrong day: input should be a valid date"),
        ("take", {"kind": "c", "day": "2024-02-03", "ratio": 1}, "take got a wrong kind: input should be 'a' or 'b'"),
    ],
)
def test_an_invalid_call_is_told_what_was_wrong(env: CounterEnv, name: str, arguments: dict, error: str):
    message = step(env, name, **arguments)
    assert message.is_error
    assert message.is_invalid_call
    assert json.loads(message.content)["error"].startswith(error)
    assert env.value == 0
    assert env.calls == []


@pytest.mark.parametrize("value", [2**63, -(2**70), float("nan"), float("inf"), "\ud800", {1: 2}, {"a": object()}, [set()]])
def test_a_structured_call_may_not_carry_what_json_cannot(env: CounterEnv, value: object):
    turn = AssistantTurn("", (ToolCall("add", {"amount": value}, "x"),))  # pyright: ignore - wrong on purpose
    (message,) = env.step(turn)[0].messages
    assert message.is_invalid_call
    assert message.call_id == "x"
    message.content.encode()
    assert env.value == 0


def test_a_nested_beyond_reason_value_is_refused(env: CounterEnv):
    value: list = []
    value.append(value)
    (message,) = env.step(AssistantTurn("", (ToolCall("add", {"amount": value}, "x"),)))[0].messages
    assert message.content == '{"error":"add: a call must be nested at most 32 deep"}'


def test_values_arrive_in_the_types_of_the_signature(env: CounterEnv):
    assert step(env, "take", kind="b", day="2024-02-29", ratio=2, flags=[True, False]).content == "ok"
    assert env.calls == [("b", datetime.date(2024, 2, 29), 2.0, (True, False))]


def test_long_garbage_is_not_repeated_in_full(env: CounterEnv):
    for text in (call_text("x" * 5000, {}), '<tool_call>{"' + "k" * 5000 + '":1}</tool_call>', call_text("add", {"y" * 5000: 1})):
        (message,) = env.step(text)[0].messages
        assert message.is_invalid_call
        assert len(message.content) < 400


def test_any_other_exception_of_a_tool_propagates_and_ends_the_episode(env: CounterEnv):
    with pytest.raises(ZeroDivisionError):
        env.step(call_text("crash", {}))
    with pytest.raises(RuntimeError, match="a tool raised in its last step"):
        env.step("Done.")
    env.reset(seed=2)
    assert env.step("Done.")[2]


def test_a_step_before_reset_is_refused():
    with pytest.raises(RuntimeError, match="it was not reset yet"):
        CounterEnv().step("Done.")


def test_an_action_must_be_text_or_a_turn(env: CounterEnv):
    with pytest.raises(TypeError, match="an action must be a str or an AssistantTurn, got int"):
        env.step(3)  # pyright: ignore - wrong on purpose
    assert step(env, "add", amount=3).content == '{"value":3}'


def test_close_releases_once_and_ends_the_thread_of_async_tools():
    env = CounterEnv()
    env.reset(seed=1)
    before = threading.active_count()
    step(env, "add_later", amount=1)
    env.close()
    env.close()
    assert env.num_releases == 1
    assert threading.active_count() <= before
    with pytest.raises(RuntimeError, match="it was closed"):
        env.reset(seed=1)


def test_reset_refuses_options():
    with pytest.raises(ValueError, match="reset takes no options, got size"):
        CounterEnv().reset(options={"size": 3})


def test_reset_without_a_seed_is_fixed_by_the_seed_before_it():
    seeds = []
    for _ in range(2):
        env = CounterEnv()
        env.reset(seed=7)
        env.reset()
        seeds.append(env.seed)
    assert seeds[0] == seeds[1]
    assert 0 <= seeds[0] < 2**31


def test_a_tool_must_be_typed_and_described():
    with pytest.raises(TypeError, match="every parameter of a tool must have a type"):

        class Untyped(ToolEnv):
            @tool
            def act(self, x):
                """Act."""

    with pytest.raises(TypeError, match="a tool must have a docstring"):

        class Undescribed(ToolEnv):
            @tool
            def act(self, x: int): ...

    with pytest.raises(TypeError, match="a tool takes named parameters only"):

        class Variadic(ToolEnv):
            @tool
            def act(self, *x: int):
                """Act."""


def test_the_defaults_of_an_environment_without_extras():
    env = CounterEnv()
    assert (env.oracle(), env.rules(), env.facts()) == (None, (), {})
    with pytest.raises(NotImplementedError, match="flaw_rate needs an environment with a flawed oracle, CounterEnv has none"):
        env.flawed_oracle(0.1, 0)
