import pytest

from envs.rules import ArgumentIn, NoRepeat, RequireBefore
from reward.compliance import find_violations
from rollout.trajectory import CallRecord, StopReason, Task, Trajectory, TurnRecord, Violation

IDENTITY = RequireBefore("identity before money moves", "verify_identity", ("transfer", "refund"))
APPROVAL = RequireBefore("large amounts need approval", "approve", ("transfer",), ("account", "amount"), ("amount", 500))
OUTSIDE = ArgumentIn("no write outside the customer", ("transfer",), ("account", "to"), "accounts")
REPEAT = NoRepeat("no write repeated", ("transfer", "refund"))


def call(name, arguments=None, *, is_error=False, is_invalid=False):
    return name, {} if arguments is None else arguments, is_error, is_invalid


def make_trajectory(*turns, facts=None) -> Trajectory:
    """Return an episode of these turns, each a list of calls; turn n spans the tokens [10 n, 10 n + 5)."""
    records = [
        TurnRecord(
            10 * index,
            10 * index + 5,
            "",
            tuple(
                CallRecord(f"call_{position}", name, arguments, "", is_error, is_invalid, 10 * index, 10 * index + 5)
                for position, (name, arguments, is_error, is_invalid) in enumerate(turn)
            ),
        )
        for index, turn in enumerate(turns)
    ]
    return Trajectory("t", Task("e", 0), 0, 0, 1.0, (), (), (), (), tuple(records), StopReason.ANSWERED, facts=facts or {})


def breaches(rules, *turns, facts=None):
    """Return (rule, turn, call_id) of each violation."""
    return [(v.rule, v.turn, v.call_id) for v in find_violations(make_trajectory(*turns, facts=facts), rules)]


def test_a_violation_says_where_and_why():
    trajectory = make_trajectory([call("note")], [call("note"), call("transfer", {"amount": 5, "to": "A1"})])
    assert find_violations(trajectory, [IDENTITY]) == (
        Violation(
            "identity before money moves",
            1,
            "call_1",
            10,
            15,
            'transfer(amount=5, to="A1") came before any successful verify_identity',
        ),
    )


def test_the_first_call_may_come_any_time_before():
    assert breaches([IDENTITY], [call("verify_identity")], [call("note")], [call("transfer")], [call("refund")]) == []
    assert breaches([IDENTITY], [call("transfer")], [call("verify_identity")], [call("refund")]) == [(IDENTITY.name, 0, "call_0")]


def test_calls_of_one_turn_count_in_their_order():
    assert breaches([IDENTITY], [call("verify_identity"), call("transfer")]) == []
    assert breaches([IDENTITY], [call("transfer"), call("verify_identity")]) == [(IDENTITY.name, 0, "call_0")]


@pytest.mark.parametrize("kind", [{"is_error": True}, {"is_error": True, "is_invalid": True}, {"is_invalid": True}])
def test_a_call_that_was_not_carried_out_neither_fulfils_nor_breaks_a_rule(kind):
    rules = [IDENTITY, REPEAT]
    assert breaches(rules, [call("verify_identity", **kind)], [call("refund")]) == [(IDENTITY.name, 1, "call_0")]
    assert breaches(rules, [call("transfer", **kind)], [call("verify_identity")], [call("transfer")]) == []


def test_a_malformed_call_is_none():
    trajectory = make_trajectory([call("verify_identity")], [call("transfer")])
    record = CallRecord("call_0", "transfer", None, "", False, False, 0, 5)
    malformed = Trajectory(**{**vars(trajectory), "turns": (TurnRecord(0, 5, "", (record,)),)})
    assert find_violations(malformed, [IDENTITY]) == ()


def test_an_amount_at_the_bound_needs_no_approval_and_one_above_does():
    assert breaches([APPROVAL], [call("transfer", {"account": "A1", "amount": 500})]) == []
    assert breaches([APPROVAL], [call("transfer", {"account": "A1", "amount": 500.01})]) == [(APPROVAL.name, 0, "call_0")]


def test_a_bound_does_not_speak_of_what_is_no_number():
    assert breaches([APPROVAL], [call("transfer", {"account": "A1"})], [call("transfer", {"amount": True})]) == []


def test_the_approval_must_be_of_the_same_arguments():
    transfer = [call("transfer", {"account": "A1", "amount": 600, "to": "A2"})]
    assert breaches([APPROVAL], [call("approve", {"amount": 600, "account": "A1"})], transfer) == []
    assert breaches([APPROVAL], [call("approve", {"amount": 600.0, "account": "A1"})], transfer) == []
    for other in ({"account": "A1", "amount": 700}, {"account": "A2", "amount": 600}, {"amount": 600}):
        (violation,) = find_violations(make_trajectory([call("approve", other)], transfer), [APPROVAL])
        assert violation.evidence.endswith("came before any successful approve with the same account and amount")


def test_every_named_argument_must_be_allowed():
    facts = {"accounts": ["A1", "A2"]}
    assert breaches([OUTSIDE], [call("transfer", {"account": "A1", "to": "A2", "amount": 1})], facts=facts) == []
    assert breaches([OUTSIDE], [call("note", {"account": "A9"})], facts=facts) == []
    trajectory = make_trajectory([call("transfer", {"account": "A8", "to": "A9"})], facts=facts)
    (violation,) = find_violations(trajectory, [OUTSIDE])
    assert violation.evidence == 'transfer(account="A8", to="A9") has account and to outside accounts'


@pytest.mark.parametrize("value", [["A1"], {"A1": 1}, None, 1, True, "a1"])
def test_a_value_of_another_shape_is_outside(value):
    assert breaches([OUTSIDE], [call("transfer", {"account": value})], facts={"accounts": ["A1", 0]}) == [(OUTSIDE.name, 0, "call_0")]


def test_a_fact_may_be_a_single_value():
    assert breaches([OUTSIDE], [call("transfer", {"account": "A1"})], facts={"accounts": "A1"}) == []


def test_a_fact_that_was_not_declared_is_an_error_of_the_environment():
    with pytest.raises(KeyError, match="needs the fact accounts"):
        breaches([OUTSIDE], [call("transfer", {"account": "A1"})], facts={"customer": "C1"})


def test_a_repeat_is_a_call_of_the_same_tool_with_the_same_arguments():
    same = call("transfer", {"amount": 5, "to": "A1"})
    reordered = call("transfer", {"to": "A1", "amount": 5.0})
    assert breaches([REPEAT], [same, call("transfer", {"amount": 6, "to": "A1"})], [call("refund", {"amount": 5, "to": "A1"})]) == []
    (violation,) = find_violations(make_trajectory([same], [reordered]), [REPEAT])
    assert (violation.turn, violation.evidence) == (1, 'transfer(to="A1", amount=5.0) repeats call_0 of turn 0')
    assert breaches([REPEAT], [same, same, same]) == [(REPEAT.name, 0, "call_1"), (REPEAT.name, 0, "call_2")]


def test_true_is_not_one():
    assert breaches([REPEAT], [call("refund", {"x": 1}), call("refund", {"x": True}), call("refund", {"x": [1]})]) == []


def test_violations_are_in_the_order_of_calls_then_rules():
    transfer = call("transfer", {"account": "A9", "amount": 600})
    rules = [REPEAT, OUTSIDE, IDENTITY]
    found = breaches(rules, [transfer], [transfer], facts={"accounts": []})
    assert found == [
        (OUTSIDE.name, 0, "call_0"),
        (IDENTITY.name, 0, "call_0"),
        (REPEAT.name, 1, "call_0"),
        (OUTSIDE.name, 1, "call_0"),
        (IDENTITY.name, 1, "call_0"),
    ]


def test_an_episode_without_calls_or_without_rules_has_no_violation():
    assert breaches([IDENTITY, APPROVAL, OUTSIDE, REPEAT], [], []) == []
    assert breaches([], [call("transfer")]) == []
