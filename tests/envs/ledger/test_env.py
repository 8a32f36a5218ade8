"""Tools, checker, files, and turns of all kinds."""

import json
import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.ledger.env import LedgerEnv
from envs.ledger.tasks import Account, Purchase
from envs.messages import AssistantTurn, Message, ToolCall, call_text

TOOLS = [
    "find_customer",
    "verify_identity",
    "list_accounts",
    "list_transactions",
    "transfer",
    "refund",
    "freeze_account",
    "add_note",
    "request_approval",
]


def play(env: LedgerEnv, turns: tuple[AssistantTurn, ...]) -> list[Message]:
    """Take the turns; returns all tool messages."""
    return [message for turn in turns for message in env.step(turn)[0].messages]


def call(env: LedgerEnv, tool_name: str, /, **arguments) -> Message:
    (message,) = env.step(call_text(tool_name, arguments))[0].messages
    return message


def own(env: LedgerEnv) -> tuple[list[Account], list[Purchase]]:
    accounts = [account for account in env.task.accounts if account.customer_id == env.task.customer.customer_id]
    ids = [account.account_id for account in accounts]
    return accounts, [purchase for purchase in env.task.purchases if purchase.account_id in ids]


@pytest.fixture
def env():
    env = LedgerEnv()
    env.reset(seed=7)
    yield env
    env.close()


def test_the_nine_tools_have_schemas(env: LedgerEnv):
    jsonschema = pytest.importorskip("jsonschema")
    assert [schema.name for schema in env.tools()] == TOOLS
    for schema in env.tools():
        jsonschema.Draft202012Validator.check_schema(schema.parameters)


def test_doing_nothing_and_claiming_success_fail():
    env = LedgerEnv()
    for seed in range(100):
        env.reset(seed=seed)
        env.step("Done. All requests were carried out.")
        verdict = env.verify()
        assert not verdict.success
        assert verdict.evidence.pop("nothing else changed")
        assert not any(verdict.evidence.values())
    env.close()


def test_the_verdict_names_what_is_missing():
    env = LedgerEnv(min_calls=6, max_calls=6)
    for seed in range(50):
        env.reset(seed=seed)
        if len(env.task.requests) == 2:
            break
    play(env, env.oracle()[:-2])
    assert list(env.verify().evidence.values()) == [True, False, True]
    assert not env.verify().success
    env.close()


def test_a_repeated_write_is_seen(env: LedgerEnv):
    play(env, env.oracle()[:-1])
    assert env.verify().success
    call(env, "add_note", customer_id=env.task.customer.customer_id, text="extra")
    assert env.verify().evidence["nothing else changed"] is False


def test_a_second_refund_of_one_purchase_is_made_and_fails_the_task(env: LedgerEnv):
    purchase = own(env)[1][0]
    before = env.database.state()
    assert call(env, "refund", transaction_id=purchase.transaction_id).content == '{"ok":true}'
    assert call(env, "refund", transaction_id=purchase.transaction_id).content == '{"ok":true}'
    account = next(account for account in env.task.accounts if account.account_id == purchase.account_id)
    added = env.database.state() - before
    assert added == Counter(
        {
            ("transaction", None, account.account_id, "refund", purchase.transaction_id, purchase.amount): 2,
            ("account", account.account_id, account.customer_id, account.kind, account.balance + 2 * purchase.amount, 0): 1,
        }
    )


def test_a_write_for_another_customer_is_outside_the_facts_and_fails_the_task(env: LedgerEnv):
    other = next(account for account in env.task.accounts if account.customer_id != env.task.customer.customer_id)
    assert call(env, "freeze_account", account_id=other.account_id).content == '{"ok":true}'
    assert other.account_id not in env.facts()["customer_accounts"]
    play(env, env.oracle())
    assert env.verify().evidence["nothing else changed"] is False
    assert not env.verify().success


def test_money_moves_without_verification_and_without_approval(env: LedgerEnv):
    source, target, *_ = own(env)[0]
    message = call(env, "transfer", from_account=source.account_id, to_account=target.account_id, amount=900)
    assert not message.is_error


def test_approvals_and_verifications_are_no_part_of_the_result(env: LedgerEnv):
    customer = env.task.customer
    before = env.database.state()
    assert call(env, "verify_identity", customer_id=customer.customer_id, birth_date=customer.birth_date).content == '{"verified":true}'
    assert call(env, "request_approval", from_account=own(env)[0][0].account_id, amount=700).content == '{"approved":true}'
    assert env.database.state() == before


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("find_customer", {"name": "Nobody Here"}, "no customer has this name"),
        ("verify_identity", {"customer_id": "OWN", "birth_date": "1900-01-01"}, "the date of birth does not match"),
        ("list_accounts", {"customer_id": "C000"}, "no customer has this id"),
        ("list_transactions", {"account_id": "A000"}, "no account has this id"),
        ("transfer", {"from_account": "A000", "to_account": "FIRST", "amount": 1}, "no account has this id"),
        ("transfer", {"from_account": "FIRST", "to_account": "FIRST", "amount": 1}, "from_account and to_account must differ"),
        ("transfer", {"from_account": "FIRST", "to_account": "SECOND", "amount": 1_000_000}, "the balance is too low"),
        ("refund", {"transaction_id": "T000"}, "no transaction has this id"),
        ("freeze_account", {"account_id": "A000"}, "no account has this id"),
        ("add_note", {"customer_id": "C000", "text": "x"}, "no customer has this id"),
        ("request_approval", {"from_account": "A000", "amount": 600}, "no account has this id"),
    ],
)
def test_a_refused_call_changes_nothing(env: LedgerEnv, name: str, arguments: dict, problem: str):
    accounts = own(env)[0]
    names = {"OWN": env.task.customer.customer_id, "FIRST": accounts[0].account_id, "SECOND": accounts[1].account_id}
    before = env.database.state()
    message = call(env, name, **{key: names.get(value, value) for key, value in arguments.items()})
    assert json.loads(message.content) == {"error": problem}
    assert message.is_error
    assert not message.is_invalid_call
    assert env.database.state() == before


def test_a_frozen_account_neither_pays_nor_is_paid(env: LedgerEnv):
    first, second, *_ = (account.account_id for account in own(env)[0])
    call(env, "freeze_account", account_id=first)
    for source, target in ((first, second), (second, first)):
        assert call(env, "transfer", from_account=source, to_account=target, amount=1).content == '{"error":"the account is frozen"}'


def test_results_put_the_key_before_the_value():
    env = LedgerEnv()
    env.reset(seed=7)
    accounts, purchases = own(env)
    listed = json.loads(call(env, "list_accounts", customer_id=env.task.customer.customer_id).content)
    assert listed == [{"kind": account.kind, "account_id": account.account_id} for account in accounts]
    listed = json.loads(call(env, "list_transactions", account_id=accounts[0].account_id).content)
    assert [list(row) for row in listed] == [["merchant", "amount", "transaction_id"]] * len(listed)
    assert [row["transaction_id"] for row in listed] == [
        purchase.transaction_id for purchase in purchases if purchase.account_id == accounts[0].account_id
    ]
    env.close()


def test_a_file_database_is_a_real_one_and_is_removed_at_close():
    env = LedgerEnv(database="file")
    for seed in (1, 2):
        env.reset(seed=seed)
        play(env, env.oracle())
        assert env.verify().success
    path = env.database.path
    assert isinstance(path, Path)
    other = sqlite3.connect(path)
    assert other.execute("SELECT count(*) FROM customers").fetchone() == (3,)
    other.close()
    env.close()
    env.close()
    assert not path.exists()
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "options",
    [{"min_calls": 1}, {"max_calls": 21}, {"min_calls": 5, "max_calls": 4}, {"min_calls": True}, {"max_calls": 4.0}, {"max_calls": "6"}],
)
def test_a_horizon_out_of_bounds_is_refused(options: dict):
    with pytest.raises(ValueError, match="min_calls and max_calls must be integers with 2 <= min_calls <= max_calls <= 20"):
        LedgerEnv(**options)


def test_an_unknown_kind_of_database_is_refused():
    with pytest.raises(ValueError, match="database must be memory or file, got 'tape'"):
        LedgerEnv(database="tape")  # pyright: ignore - wrong on purpose


def test_what_is_asked_too_early_is_refused():
    with pytest.raises(RuntimeError, match="must be reset before its task is asked for"):
        LedgerEnv().verify()


def dump(env: LedgerEnv) -> list[str]:
    """Return the whole database as text, approvals and verifications included."""
    connection = sqlite3.connect(env.database.path or "")
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=6), parts, max_size=3),
    max_leaves=6,
)
argument_names = st.sampled_from(["customer_id", "account_id", "amount", "text", "name", "from_account", "to_account"]) | st.text(
    max_size=5
)
structured = st.builds(
    lambda calls: AssistantTurn("", tuple(ToolCall(name, arguments, f"call_{i}") for i, (name, arguments) in enumerate(calls))),
    st.lists(
        st.tuples(st.sampled_from(TOOLS) | st.text(max_size=8), st.dictionaries(argument_names, json_values, max_size=4)),
        min_size=1,
        max_size=3,
    ),
)
spliced = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", '{"name":"', 'transfer","arguments":{', '"amount":', "1e999", "}", '"', "NaN"])
    | st.text(),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def file_env():
    env = LedgerEnv(database="file", min_calls=6, max_calls=6)
    yield env
    env.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(action=structured | spliced)
def test_random_turns_never_crash_and_change_nothing_when_refused(file_env: LedgerEnv, action: str | AssistantTurn):
    check_turn(file_env, 3, action)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), num_edits=st.integers(1, 4))
def test_mutated_calls_never_crash_and_change_nothing_when_refused(file_env: LedgerEnv, seed: int, num_edits: int):
    rng = random.Random(seed)
    file_env.reset(seed=seed)
    text = rng.choice(file_env.oracle()[:-1]).text
    for _ in range(num_edits):
        start, length = rng.randrange(len(text) + 1), rng.randrange(6)
        insert = rng.choice(
            ["", '"', "{", "}", ",", "0", "é", "\x00", "\\ud800", "null", "</tool_call>", "<tool_call>", text[start : start + 30]]
        )
        text = text[:start] + insert + text[start + length :]
    check_turn(file_env, seed, text)


def check_turn(env: LedgerEnv, seed: int, action: str | AssistantTurn) -> None:
    env.reset(seed=seed)
    before = dump(env)
    observation, reward, terminated, truncated, info = env.step(action)
    assert (reward, truncated, info) == (0.0, False, {})
    assert observation in env.observation_space
    assert terminated == (not observation.messages)
    for message in observation.messages:
        message.content.encode()
    if all(message.is_error for message in observation.messages):
        assert dump(env) == before
    env.verify()
