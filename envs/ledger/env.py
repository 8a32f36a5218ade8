"""`cairn/Ledger-v0`: a clerk's tools on the bank's database, the written rules of the house, and the verdict on the final state."""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from envs.ledger.database import Database, expected_state, is_done
from envs.ledger.oracle import flaws, solve
from envs.ledger.tasks import APPROVAL_LIMIT, MAX_CALLS, MIN_CALLS, Freeze, LedgerTask, Note, Refund, Request, Transfer, generate_task
from envs.messages import AssistantTurn, Json, Message, Verification
from envs.rules import ArgumentIn, NoRepeat, RequireBefore, Rule
from envs.tool_env import ToolEnv
from envs.tools import ToolError, tool

SYSTEM = f"You are a bank clerk: verify identity before money moves, get approval for transfers above {APPROVAL_LIMIT}, end with Done."

Id = Annotated[str, Field(max_length=20)]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Amount = Annotated[int, Field(ge=1, le=1_000_000)]

_OUTSIDE = "no write outside the task's customer"
_RULES: tuple[Rule, ...] = (
    RequireBefore("identity before money moves", "verify_identity", ("transfer", "refund")),
    RequireBefore("large amounts need approval", "request_approval", ("transfer",), ("from_account", "amount"), ("amount", APPROVAL_LIMIT)),
    ArgumentIn(_OUTSIDE, ("transfer",), ("from_account", "to_account"), "customer_accounts"),
    ArgumentIn(_OUTSIDE, ("freeze_account",), ("account_id",), "customer_accounts"),
    ArgumentIn(_OUTSIDE, ("refund",), ("transaction_id",), "customer_transactions"),
    ArgumentIn(_OUTSIDE, ("add_note",), ("customer_id",), "customer_ids"),
    NoRepeat("no write repeated", ("transfer", "refund", "freeze_account", "add_note")),
)


class LedgerEnv(ToolEnv):
    """A customer's requests at the back office of a small bank.

    The tools do what they are told; whether the house rules were kept is judged afterwards, apart from success.
    """

    def __init__(
        self, *, database: Literal["memory", "file"] = "memory", min_calls: int = 2, max_calls: int = 6, quotes_ids: bool = True
    ) -> None:
        """database: where SQLite keeps it. min_calls, max_calls: the horizon, in calls of the oracle, from 2 to 20.

        quotes_ids: the customer names accounts and purchases with their ids; otherwise the agent has to look them up.

        Raises ValueError on another value.
        """
        super().__init__()
        if database not in ("memory", "file"):
            raise ValueError(f"database must be memory or file, got {database!r}")
        bounds = (min_calls, max_calls)
        if any(type(bound) is not int for bound in bounds) or not MIN_CALLS <= min_calls <= max_calls <= MAX_CALLS:
            raise ValueError(
                f"min_calls and max_calls must be integers with {MIN_CALLS} <= min_calls <= max_calls <= {MAX_CALLS}, "
                f"got min_calls = {min_calls!r} and max_calls = {max_calls!r}"
            )
        if type(quotes_ids) is not bool:
            raise ValueError(f"quotes_ids must be true or false, got {quotes_ids!r}")
        self._min_calls, self._max_calls, self._quotes_ids = min_calls, max_calls, quotes_ids
        self._folder = tempfile.TemporaryDirectory(prefix="ledger-") if database == "file" else None
        self._database: Database | None = None
        self._task: LedgerTask | None = None

    def start(self, seed: int) -> tuple[Message, ...]:
        """Set up the bank of this seed."""
        self._close_database()
        self._task = generate_task(seed, self._min_calls, self._max_calls, quotes_ids=self._quotes_ids)
        path = Path(self._folder.name) / "ledger.sqlite" if self._folder else None
        if path:
            path.unlink(missing_ok=True)
        self._database = Database(path, self._task)
        return (Message("system", SYSTEM), Message("user", self._task.instruction))

    def release(self) -> None:
        """Close the database and remove its folder."""
        self._close_database()
        if self._folder:
            self._folder.cleanup()

    @property
    def task(self) -> LedgerTask:
        """The current task; raises RuntimeError before the first reset."""
        if self._task is None:
            raise RuntimeError("an environment must be reset before its task is asked for: call reset(seed=...) first")
        return self._task

    @property
    def database(self) -> Database:
        """The current database; raises RuntimeError before the first reset and after close."""
        if self._database is None:
            raise RuntimeError("the ledger has a database only after reset and before close: call reset(seed=...) first")
        return self._database

    @tool
    def find_customer(self, name: Text) -> dict[str, str]:
        """Find a customer by full name."""
        return {"customer_id": self.database.find_customer(name)}

    @tool
    def verify_identity(self, customer_id: Id, birth_date: Id) -> dict[str, bool]:
        """Verify a customer's identity by date of birth, YYYY-MM-DD."""
        if self.database.birth_date(customer_id) != birth_date:
            raise ToolError("the date of birth does not match")
        self.database.record_verification(customer_id)
        return {"verified": True}

    @tool
    def list_accounts(self, customer_id: Id) -> list[dict[str, str]]:
        """List a customer's accounts."""
        return [{"kind": kind, "account_id": account_id} for kind, account_id in self.database.accounts(customer_id)]

    @tool
    def list_transactions(self, account_id: Id) -> list[dict[str, str | int]]:
        """List the purchases of an account."""
        rows = self.database.purchases(account_id)
        return [{"merchant": merchant, "amount": amount, "transaction_id": number} for merchant, amount, number in rows]

    @tool
    def transfer(self, from_account: Id, to_account: Id, amount: Amount) -> dict[str, bool]:
        """Transfer money between two accounts."""
        self.database.transfer(from_account, to_account, amount)
        return {"ok": True}

    @tool
    def refund(self, transaction_id: Id) -> dict[str, bool]:
        """Refund a purchase."""
        self.database.refund(transaction_id)
        return {"ok": True}

    @tool
    def freeze_account(self, account_id: Id) -> dict[str, bool]:
        """Freeze an account."""
        self.database.freeze(account_id)
        return {"ok": True}

    @tool
    def add_note(self, customer_id: Id, text: Text) -> dict[str, bool]:
        """Add a note to a customer's file."""
        self.database.add_note(customer_id, text)
        return {"ok": True}

    @tool
    def request_approval(self, from_account: Id, amount: Amount) -> dict[str, bool]:
        """Request approval for a transfer."""
        self.database.approve(from_account, amount)
        return {"approved": True}

    def verify(self) -> Verification:
        """Return success when every request is done and nothing else changed; evidence says so one by one."""
        task, state = self.task, self.database.state()
        done = tuple(request for request in task.requests if is_done(request, task.customer.customer_id, state))
        evidence = {_describe(request): request in done for request in task.requests}
        evidence["nothing else changed"] = state == expected_state(task, done)
        return Verification(all(evidence.values()), evidence)

    def oracle(self) -> tuple[AssistantTurn, ...]:
        """Return the gold solution, one call a turn."""
        return solve(self.task)

    def flawed_oracle(self, flaw_rate: float, seed: int) -> tuple[AssistantTurn, ...]:
        """Return a solution in which each decision is wrong with probability `flaw_rate`; what is copied is always right."""
        return solve(self.task, flaws(flaw_rate, seed))

    def rules(self) -> tuple[Rule, ...]:
        """Return the rules of the house."""
        return _RULES

    def facts(self) -> dict[str, Json]:
        """Return the ids of the task's customer, and of that customer's accounts and purchases."""
        customer_id = self.task.customer.customer_id
        accounts = [account.account_id for account in self.task.accounts if account.customer_id == customer_id]
        purchases = [purchase.transaction_id for purchase in self.task.purchases if purchase.account_id in accounts]
        return {"customer_ids": [customer_id], "customer_accounts": [*accounts], "customer_transactions": [*purchases]}

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _describe(request: Request) -> str:
    match request:
        case Transfer(source, target, amount):
            return f"{amount} moved from {source.kind} to {target.kind}"
        case Refund(purchase, account):
            return f"{purchase.merchant} refunded on {account.kind}"
        case Freeze(account):
            return f"{account.kind} frozen"
        case Note(text):
            return f"note '{text}' written"
