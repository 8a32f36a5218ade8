"""What crosses the border between an agent and an environment: messages, calls, tool schemas, verdicts.

Text in, text out: nothing here knows of tokens.
"""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import JsonValue as Json

Role = Literal["system", "user", "assistant", "tool"]

MAX_INTEGER = 2**63 - 1
"""Larger integers do not fit a database column."""
MAX_DEPTH = 32
"""A call may be nested this deep."""


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call: `ToolCall("get_account", {"account_id": "A204"}, "call_0")`."""

    name: str
    arguments: dict[str, Json]
    call_id: str


@dataclass(frozen=True)
class MalformedCall:
    """Text that was meant as a call and cannot be read as one; `problem` is a sentence for the agent.

    Example: `MalformedCall('{"name": "ge', "the call is not valid JSON: ...", "call_0")`.
    """

    text: str
    problem: str
    call_id: str


@dataclass(frozen=True)
class AssistantTurn:
    """One turn of the agent: its whole text, and the calls that were read from it, in order.

    A turn without calls is the agent's final answer.
    Example: `AssistantTurn('<tool_call>{"name": "f", "arguments": {}}</tool_call>', (ToolCall("f", {}, "call_0"),))`.
    """

    text: str
    calls: tuple[ToolCall | MalformedCall, ...] = ()


@dataclass(frozen=True)
class Message:
    """One message of the conversation.

    A tool's message says which call it answers (`call_id`), whether the tool refused or failed (`is_error`),
    and whether the call never reached the tool because it was malformed or did not fit the schema (`is_invalid_call`).
    Example: `Message("tool", '{"balance": 120}', call_id="call_0", tool_name="get_account")`.
    """

    role: Role
    content: str
    call_id: str | None = None
    tool_name: str | None = None
    is_error: bool = False
    is_invalid_call: bool = False


@dataclass(frozen=True)
class ToolSchema:
    """A tool as the agent sees it; `parameters` is a JSON Schema object.

    Example: `ToolSchema("freeze", "Freeze an account.", {"type": "object", "properties": {...}, "required": [...]})`.
    """

    name: str
    description: str
    parameters: dict[str, Json]


@dataclass(frozen=True)
class Observation:
    """What an environment shows: new messages and, from `reset` only, the tools."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()


@dataclass(frozen=True)
class Verification:
    """The verifier's reading of the final state: success, and which conditions hold.

    Example: `Verification(False, {"transfer was made": True, "note was written": False})`.
    """

    success: bool
    evidence: dict[str, bool] = field(default_factory=dict)


_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse_turn(text: str) -> AssistantTurn:
    """Return the turn that `text` spells: every `<tool_call>` block is a call, well-formed or malformed; never raises.

    A block is JSON with a string `name` and an object `arguments` (the Hermes and Qwen convention).
    """
    calls: list[ToolCall | MalformedCall] = []
    for index, match in enumerate(_CALL.finditer(text)):
        call_id = f"call_{index}"
        body, is_closed = match.group(1).strip(), match.group(2) == "</tool_call>"
        calls.append(_parse_call(body, call_id, is_closed))
    if not calls and "</tool_call>" in text:
        calls.append(MalformedCall(text, "a call must start with <tool_call>, got only </tool_call>", "call_0"))
    return AssistantTurn(text, tuple(calls))


def call_text(name: str, arguments: dict[str, Json]) -> str:
    """Return a call as an agent writes it, in compact JSON; `parse_turn` reads it back, whatever the strings hold.

    Example: `call_text("freeze", {"account_id": "A204"})` is `<tool_call>{"name":"freeze","arguments":{"account_id":"A204"}}</tool_call>`.
    """
    body = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"), ensure_ascii=False)
    # In JSON "<" stands in strings only; escaped, no string can look like the end of the call.
    return "<tool_call>" + body.replace("<", "\\u003c") + "</tool_call>"


def json_problem(value: Any) -> str | None:
    """Return why a value cannot travel as JSON, or None.

    Python's JSON lets through what breaks databases, encoders or files later: 1e999 (infinity), integers beyond 64 bits,
    lone surrogates, any depth. A structured call may hold any Python object.
    """
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            return f"a call must be nested at most {MAX_DEPTH} deep"
        if isinstance(item, dict):
            stack += [(part, depth + 1) for pair in item.items() for part in pair]
            if not all(isinstance(key, str) for key in item):
                return "the keys of an object must be strings"
        elif isinstance(item, list):
            stack += [(part, depth + 1) for part in item]
        elif problem := _scalar_problem(item):
            return problem
    return None


def _scalar_problem(item: Any) -> str | None:
    if item is None or isinstance(item, bool):
        return None
    if isinstance(item, int):
        return None if abs(item) <= MAX_INTEGER else "an integer must fit 64 bits"
    if isinstance(item, float):
        return None if math.isfinite(item) else "a number must be finite"
    if isinstance(item, str):
        return "a string must be valid Unicode, without lone surrogates" if printable(item) != item else None
    return f"a call must hold JSON values only, got {type(item).__name__}"


def printable(text: str) -> str:
    """Return the text with lone surrogates written out: they are legal in JSON and break every encoder."""
    return text.encode("utf-8", "backslashreplace").decode()


def _parse_call(body: str, call_id: str, is_closed: bool) -> ToolCall | MalformedCall:
    if not is_closed:
        return MalformedCall(body, "the call is cut off: it must end with </tool_call>", call_id)
    try:
        value = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated_keys)
    except (ValueError, RecursionError) as error:
        return MalformedCall(body, f"the call must be one JSON object, got invalid JSON: {error}", call_id)
    if not isinstance(value, dict):
        return MalformedCall(body, f"the call must be a JSON object, got {type(value).__name__}", call_id)
    unknown = sorted(set(value) - {"name", "arguments"})
    if unknown:
        return MalformedCall(body, f"a call has the keys name and arguments only, got also {', '.join(unknown)}", call_id)
    if not isinstance(value.get("name"), str):
        return MalformedCall(body, "the call must have a string under the key name", call_id)
    if not isinstance(value.get("arguments"), dict):
        return MalformedCall(body, "the call must have an object under the key arguments", call_id)
    problem = json_problem(value)
    if problem:
        return MalformedCall(body, problem, call_id)
    return ToolCall(value["name"], value["arguments"], call_id)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _refuse_repeated_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"the key {max(keys, key=keys.count)} stands twice")
    return dict(pairs)
