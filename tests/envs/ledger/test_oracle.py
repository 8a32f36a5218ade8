"""The oracle solves every task; the flawed one goes wrong one decision at a time."""

from collections import Counter

import pytest

from envs.ledger.env import LedgerEnv
from envs.ledger.oracle import solve
from envs.ledger.tasks import Account, Customer, Freeze, LedgerTask, Note, Purchase, Refund, Request, Transfer
from envs.messages import AssistantTurn, Message, ToolCall
from envs.registry import split_seeds


def play(env: LedgerEnv, turns: tuple[AssistantTurn, ...]) -> list[Message]:
    """Take the turns; returns all tool messages."""
    return [message for turn in turns for message in env.step(turn)[0].messages]


EPISODE = [
    "You are a bank clerk: verify identity before money moves, get approval for transfers above 500, end with Done.",
    "Help Finn Tran, born 1959-02-04: move 398 from checking to savings.",
    '<tool_call>{"name":"find_customer","arguments":{"name":"Finn Tran"}}</tool_call>',
    '{"customer_id":"C111"}',
    '<tool_call>{"name":"verify_identity","arguments":{"customer_id":"C111","birth_date":"1959-02-04"}}</tool_call>',
    '{"verified":true}',
    '<tool_call>{"name":"list_accounts","arguments":{"customer_id":"C111"}}</tool_call>',
    '[{"kind":"checking","account_id":"A633"},{"kind":"savings","account_id":"A117"},{"kind":"travel","account_id":"A250"},{"kind":"business","account_id":"A345"}]',
    '<tool_call>{"name":"transfer","arguments":{"from_account":"A633","to_account":"A117","amount":398}}</tool_call>',
    '{"ok":true}',
    "Done.",
]


@pytest.mark.parametrize(("min_calls", "max_calls"), [(2, 6), (2, 2), (3, 3), (4, 4), (7, 12), (20, 20)])
def test_the_oracle_solves_every_task_within_its_horizon(min_calls: int, max_calls: int):
    env = LedgerEnv(min_calls=min_calls, max_calls=max_calls)
    lengths = Counter()
    for seed in range(300):
        env.reset(seed=seed)
        turns = env.oracle()
        messages = play(env, turns)
        assert not any(message.is_error for message in messages)
        assert env.verify().success
        assert turns[-1] == AssistantTurn("Done.")
        assert all(len(turn.calls) == 1 for turn in turns[:-1])
        lengths[len(messages)] += 1
    assert sorted(lengths) == list(range(min_calls, max_calls + 1))
    env.close()


def test_held_out_tasks_are_solved_too():
    env = LedgerEnv()
    for seed in [*split_seeds("cairn/Ledger-v0", "validation")[:50], *split_seeds("cairn/Ledger-v0", "test")[-50:]]:
        env.reset(seed=seed)
        play(env, env.oracle())
        assert env.verify().success
    env.close()


def test_the_oracle_only_copies_what_it_has_read():
    env = LedgerEnv(max_calls=20)
    for seed in range(100):
        read = "\n".join(message.content for message in env.reset(seed=seed)[0].messages)
        for turn in env.oracle()[:-1]:
            for value in turn.calls[0].arguments.values():  # pyright: ignore - well-formed
                assert str(value) in read
            read += env.step(turn)[0].messages[0].content
    env.close()


def test_the_oracle_keeps_the_rules_of_the_house():
    env = LedgerEnv(max_calls=20)
    for seed in range(100):
        env.reset(seed=seed)
        facts, seen = env.facts(), []
        for turn in env.oracle()[:-1]:
            (made,) = turn.calls
            assert isinstance(made, ToolCall)
            if made.name in ("transfer", "refund"):
                assert any(earlier.name == "verify_identity" for earlier in seen)
            if made.name == "transfer":
                approval = {key: made.arguments[key] for key in ("from_account", "amount")}
                is_large = made.arguments["amount"] > 500
                assert is_large == any(earlier.name == "request_approval" and earlier.arguments == approval for earlier in seen)
                assert {made.arguments["from_account"], made.arguments["to_account"]} <= set(facts["customer_accounts"])
            assert (made.name, made.arguments) not in [(earlier.name, earlier.arguments) for earlier in seen] or "list" in made.name
            seen.append(made)
    env.close()


def test_an_episode_in_full():
    env = LedgerEnv(min_calls=4, max_calls=4, quotes_ids=False)
    lines = [message.content for message in env.reset(seed=15)[0].messages]
    for turn in env.oracle():
        lines += [turn.text, *(message.content for message in env.step(turn)[0].messages)]
    assert lines == EPISODE
    assert sum(map(len, lines)) < 1100
    env.close()


def test_what_an_episode_shows_stays_short():
    env = LedgerEnv()
    for seed in range(200):
        total = sum(len(message.content) for message in env.reset(seed=seed)[0].messages)
        turns = env.oracle()
        total += sum(len(turn.text) for turn in turns) + sum(len(message.content) for message in play(env, turns))
        assert total < 200 + 230 * len(turns)
    env.close()


ADA = Customer("C412", "Ada Kim", "1984-03-12")
TRAVEL, SAVINGS, CHECKING = (
    Account("A330", "C412", "travel", 900),
    Account("A207", "C412", "savings", 900),
    Account("A118", "C412", "checking", 900),
)
DELI, ACME = Purchase("T225", "A118", "Deli", 12), Purchase("T913", "A118", "Acme", 37)


def calls_when_wrong(requests: tuple[Request, ...], decision: int | None) -> list[str]:
    """Return the calls, in short, of an oracle that takes this one decision wrong."""
    task = LedgerTask((ADA,), (TRAVEL, SAVINGS, CHECKING), (DELI, ACME), ADA, requests, "")
    asked = iter(range(100))
    turns = solve(task, lambda: next(asked) == decision)
    assert turns[-1] == AssistantTurn("Done.")
    return [" ".join([made.name, *map(str, made.arguments.values())]) for turn in turns for made in turn.calls]  # pyright: ignore


FIND, VERIFY, LIST = "find_customer Ada Kim", "verify_identity C412 1984-03-12", "list_accounts C412"
APPROVE, PAY, NOTE = "request_approval A207 620", "transfer A207 A118 620", "add_note C412 lost card"


@pytest.mark.parametrize(
    ("decision", "calls"),
    [
        (None, [FIND, VERIFY, LIST, APPROVE, PAY, NOTE]),
        (0, [FIND, LIST, APPROVE, PAY, NOTE]),
        (1, [FIND, VERIFY, LIST, APPROVE, PAY]),
        (2, [FIND, VERIFY, LIST, APPROVE, PAY, PAY, NOTE]),
        (3, [FIND, VERIFY, LIST, "request_approval A330 620", "transfer A330 A118 620", NOTE]),
        (4, [FIND, VERIFY, LIST, PAY, NOTE]),
        (5, [FIND, VERIFY, LIST, APPROVE, PAY]),
    ],
)
def test_each_decision_of_a_transfer_and_a_note_can_go_wrong_alone(decision: int | None, calls: list[str]):
    assert calls_when_wrong((Transfer(SAVINGS, CHECKING, 620), Note("lost card")), decision) == calls


@pytest.mark.parametrize(
    ("decision", "calls"),
    [
        (None, [FIND, VERIFY, LIST, "list_transactions A118", "refund T913"]),
        (1, [FIND, VERIFY, LIST, "list_transactions A118", "refund T913", "refund T913"]),
        (2, [FIND, VERIFY, LIST, "list_transactions A118", "refund T225"]),
    ],
)
def test_each_decision_of_a_refund_can_go_wrong_alone(decision: int | None, calls: list[str]):
    assert calls_when_wrong((Refund(ACME, CHECKING),), decision) == calls


def test_the_wrong_account_may_be_frozen():
    assert calls_when_wrong((Freeze(CHECKING),), None) == [FIND, LIST, "freeze_account A118"]
    assert calls_when_wrong((Freeze(CHECKING),), 1) == [FIND, LIST, "freeze_account A330"]


def test_the_oracle_approves_only_above_the_limit():
    assert calls_when_wrong((Transfer(SAVINGS, CHECKING, 500),), None) == [FIND, VERIFY, LIST, "transfer A207 A118 500"]


def test_the_flawed_oracle_without_flaws_is_the_oracle():
    env = LedgerEnv()
    for seed in range(50):
        env.reset(seed=seed)
        assert env.flawed_oracle(0.0, seed) == env.oracle()
    env.close()


def test_the_flawed_oracle_follows_its_seed_and_is_bounded():
    env = LedgerEnv()
    env.reset(seed=1)
    assert env.flawed_oracle(0.5, 3) == env.flawed_oracle(0.5, 3)
    assert len({str(env.flawed_oracle(0.5, seed)) for seed in range(50)}) > 3
    with pytest.raises(ValueError, match=r"flaw_rate must be from 0 to 1, got 1\.5"):
        env.flawed_oracle(1.5, 0)
    env.close()


def test_the_flawed_oracle_succeeds_about_as_often_as_meant_and_never_writes_a_bad_call():
    env = LedgerEnv()
    num_solved = 0
    for seed in range(600):
        env.reset(seed=seed)
        messages = play(env, env.flawed_oracle(0.25, seed))
        assert not any(message.is_invalid_call for message in messages)
        num_solved += env.verify().success
    assert 0.38 < num_solved / 600 < 0.5
    env.close()
