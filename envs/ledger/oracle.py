"""The Ledger's oracle: the gold solution of a task, and one that takes wrong decisions now and then."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from envs.ledger.tasks import APPROVAL_LIMIT, Account, Freeze, LedgerTask, Note, Purchase, Refund, Request, Transfer
from envs.messages import AssistantTurn, Json, call_text, parse_turn

Item = TypeVar("Item")


def never() -> bool:
    """Return False: every decision is right."""
    return False


def flaws(flaw_rate: float, seed: int) -> Callable[[], bool]:
    """Return a function that says for each decision whether it goes wrong: independently, with probability `flaw_rate`.

    Raises ValueError when the rate is not in [0, 1].
    """
    if not 0 <= flaw_rate <= 1:
        raise ValueError(f"flaw_rate must be from 0 to 1, got {flaw_rate}")
    # Not Random(seed): that is where the task comes from, and a caller may pass the same seed.
    rng = random.Random(f"flaws:{seed}")
    return lambda: rng.random() < flaw_rate


def solve(task: LedgerTask, goes_wrong: Callable[[], bool] = never) -> tuple[AssistantTurn, ...]:
    """Return one turn per call and the final answer.

    Decisions that can go wrong, asked one by one: to verify the identity; to do the last of several requests; not to write the
    first one twice; to request an approval; to write a note; which account; which purchase. What is copied is always right.
    """
    customer = task.customer
    calls = [_call("find_customer", name=customer.name)]
    if task.moves_money and not goes_wrong():
        calls.append(_call("verify_identity", customer_id=customer.customer_id, birth_date=customer.birth_date))
    if task.needs_accounts:
        calls.append(_call("list_accounts", customer_id=customer.customer_id))
    stops_early = len(task.requests) > 1 and goes_wrong()
    repeats = goes_wrong()
    for request in task.requests[:-1] if stops_early else task.requests:
        steps = _steps(task, request, goes_wrong)
        calls += steps
        if steps and repeats:
            calls.append(steps[-1])
            repeats = False
    return (*calls, AssistantTurn("Done."))


def _steps(task: LedgerTask, request: Request, goes_wrong: Callable[[], bool]) -> list[AssistantTurn]:
    """Return the calls of one request; the last one writes."""
    match request:
        case Transfer(source, target, amount):
            if goes_wrong():
                source = _first_other(_accounts(task), source, target)
            transfer = _call("transfer", from_account=source.account_id, to_account=target.account_id, amount=amount)
            if amount <= APPROVAL_LIMIT or goes_wrong():
                return [transfer]
            return [_call("request_approval", from_account=source.account_id, amount=amount), transfer]
        case Refund(purchase, account):
            listing = _call("list_transactions", account_id=account.account_id)
            if goes_wrong():
                purchase = _first_other(_purchases(task, account), purchase)
            return [listing, _call("refund", transaction_id=purchase.transaction_id)]
        case Freeze(account):
            if goes_wrong():
                account = _first_other(_accounts(task), account)
            return [_call("freeze_account", account_id=account.account_id)]
        case Note(text):
            return [] if goes_wrong() else [_call("add_note", customer_id=task.customer.customer_id, text=text)]


def _accounts(task: LedgerTask) -> list[Account]:
    return [account for account in task.accounts if account.customer_id == task.customer.customer_id]


def _purchases(task: LedgerTask, account: Account) -> list[Purchase]:
    return [purchase for purchase in task.purchases if purchase.account_id == account.account_id]


def _first_other(items: Sequence[Item], *taken: Item) -> Item:
    """Return the first item that is none of the taken ones."""
    return next(item for item in items if item not in taken)


def _call(tool_name: str, /, **arguments: Json) -> AssistantTurn:
    return parse_turn(call_text(tool_name, arguments))
