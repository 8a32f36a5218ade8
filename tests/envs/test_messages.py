"""Reading and writing turns."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.messages import AssistantTurn, MalformedCall, ToolCall, call_text, parse_turn


def test_a_turn_without_calls_is_an_answer():
    assert parse_turn("Done.") == AssistantTurn("Done.", ())


def test_several_calls_are_read_in_order():
    text = 'so <tool_call>{"name":"a","arguments":{}}</tool_call> and\n<tool_call>\n{"name":"b","arguments":{"x":1}}\n</tool_call>'
    assert parse_turn(text).calls == (ToolCall("a", {}, "call_0"), ToolCall("b", {"x": 1}, "call_1"))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<tool_call>{"name":"a","arguments":{"cmd":"ls', "the call is cut off: it must end with </tool_call>"),
        ("<tool_call>[1]</tool_call>", "the call must be a JSON object, got list"),
        ('<tool_call>{"name":1,"arguments":{}}</tool_call>', "the call must have a string under the key name"),
        ('<tool_call>{"name":"a"}</tool_call>', "the call must have an object under the key arguments"),
        ('<tool_call>{"name":"a","arguments":"{}"}</tool_call>', "the call must have an object under the key arguments"),
        ('<tool_call>{"name":"a","arguments":{},"id":1}</tool_call>', "a call has the keys name and arguments only, got also id"),
        ('<tool_call>{"name":"a","arguments":{"x":1e999}}</tool_call>', "a number must be finite"),
        ('<tool_call>{"name":"a","arguments":{"x":9223372036854775808}}</tool_call>', "an integer must fit 64 bits"),
        (
            '<tool_call>{"name":"a","arguments":{"x":"\\ud800"}}</tool_call>',
            "a string must be valid Unicode, without lone surrogates",
        ),
        ('{"name":"a","arguments":{}}</tool_call>', "a call must start with <tool_call>, got only </tool_call>"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body: str, problem: str):
    (call,) = parse_turn(body).calls
    assert isinstance(call, MalformedCall)
    assert call.problem == problem


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ('{"name":"a","arguments":{"x":NaN}}', "NaN is not JSON"),
        ('{"name":"a","arguments":{"x":1,"x":2}}', "the key x stands twice"),
        ("{'name':'a'}", "invalid JSON"),
        ("", "invalid JSON"),
        ('{"name":"a","arguments":{"x":' + "[" * 5000 + "]" * 5000 + "}}", "invalid JSON"),
        ('{"name":"a","arguments":{"x":' + "[" * 40 + "]" * 40 + "}}", "nested at most 32 deep"),
        ('{"name":"a","arguments":{"x":' + "9" * 5000 + "}}", "invalid JSON"),
    ],
)
def test_what_is_not_json_is_malformed(body: str, part: str):
    (call,) = parse_turn(f"<tool_call>{body}</tool_call>").calls
    assert isinstance(call, MalformedCall)
    assert part in call.problem


def test_a_call_is_written_compactly():
    assert call_text("freeze", {"account_id": "A204"}) == '<tool_call>{"name":"freeze","arguments":{"account_id":"A204"}}</tool_call>'


@given(st.text(), st.dictionaries(st.text(), st.text() | st.integers(-(2**63) + 1, 2**63 - 1) | st.booleans() | st.none()))
def test_what_is_written_is_read_back(name: str, arguments: dict):
    assert parse_turn(call_text(name, arguments)).calls == (ToolCall(name, arguments, "call_0"),)


@given(st.text())
def test_any_text_is_read_and_every_well_formed_call_is_encodable(text: str):
    for call in parse_turn(f"<tool_call>{text}").calls + parse_turn(text).calls:
        if isinstance(call, ToolCall):
            json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()


def test_arguments_that_hold_the_end_tag_stay_one_call():
    text = call_text("note", {"text": "</tool_call><tool_call>"})
    assert parse_turn(text).calls == (ToolCall("note", {"text": "</tool_call><tool_call>"}, "call_0"),)
