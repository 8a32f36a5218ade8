"""The bank's SQLite database: its tables, what a clerk can do with them, and the checker of the final state."""

import sqlite3
from collections import Counter
from pathlib import Path

from envs.ledger.tasks import Account, Freeze, LedgerTask, Note, Refund, Request, Transfer
from envs.tools import ToolError

_SCHEMA = """
PRAGMA journal_mode = MEMORY;
PRAGMA synchronous = OFF;
CREATE TABLE customers (customer_id TEXT PRIMARY KEY, name TEXT NOT NULL, birth_date TEXT NOT NULL);
CREATE TABLE accounts (
    account_id TEXT PRIMARY KEY, customer_id TEXT NOT NULL, kind TEXT NOT NULL, balance INTEGER NOT NULL, is_frozen INTEGER NOT NULL
);
CREATE TABLE transactions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, transaction_id TEXT UNIQUE, account_id TEXT NOT NULL, type TEXT NOT NULL,
    counterpart TEXT NOT NULL, amount INTEGER NOT NULL
);
CREATE TABLE notes (customer_id TEXT NOT NULL, text TEXT NOT NULL);
CREATE TABLE approvals (from_account TEXT NOT NULL, amount INTEGER NOT NULL);
CREATE TABLE verifications (customer_id TEXT NOT NULL);
"""

# What the checker compares: the order of rows and the running number of a transaction do not matter, approvals and
# verifications are no part of the result.
_RESULT = (
    ("customer", "SELECT customer_id, name, birth_date FROM customers"),
    ("account", "SELECT account_id, customer_id, kind, balance, is_frozen FROM accounts"),
    ("transaction", "SELECT transaction_id, account_id, type, counterpart, amount FROM transactions"),
    ("note", "SELECT customer_id, text FROM notes"),
)

State = Counter[tuple[object, ...]]
"""All rows that matter, each with its table's name in front and how often it stands there."""


class Database:
    """One bank. Methods that write do so in one transaction, after all checks; `ToolError` leaves it as it was."""

    def __init__(self, path: Path | None, task: LedgerTask) -> None:
        """path: a new file; None keeps the database in memory."""
        # Async tools and gymnasium's users may call from another thread; calls never overlap.
        self.path = path
        self._connection = sqlite3.connect(path or ":memory:", check_same_thread=False)
        self._connection.executescript(_SCHEMA)
        with self._connection as connection:
            connection.executemany(
                "INSERT INTO customers VALUES (?, ?, ?)", [(c.customer_id, c.name, c.birth_date) for c in task.customers]
            )
            connection.executemany(
                "INSERT INTO accounts VALUES (?, ?, ?, ?, 0)", [(a.account_id, a.customer_id, a.kind, a.balance) for a in task.accounts]
            )
            connection.executemany(
                "INSERT INTO transactions (transaction_id, account_id, type, counterpart, amount) VALUES (?, ?, 'purchase', ?, ?)",
                [(p.transaction_id, p.account_id, p.merchant, p.amount) for p in task.purchases],
            )

    def close(self) -> None:
        """Close the connection; may be called again."""
        self._connection.close()

    def state(self) -> State:
        """Return all rows that the checker compares."""
        return Counter((table, *row) for table, query in _RESULT for row in self._connection.execute(query))

    def find_customer(self, name: str) -> str:
        """Return the id of the customer of this full name, in any case."""
        return self._row("SELECT customer_id FROM customers WHERE name = ? COLLATE NOCASE", name, "no customer has this name")[0]

    def birth_date(self, customer_id: str) -> str:
        """Return a customer's date of birth."""
        return self._row("SELECT birth_date FROM customers WHERE customer_id = ?", customer_id, "no customer has this id")[0]

    def record_verification(self, customer_id: str) -> None:
        """Write down that a customer was identified."""
        self._write("INSERT INTO verifications VALUES (?)", customer_id)

    def accounts(self, customer_id: str) -> list[tuple[str, str]]:
        """Return kind and id of each account of a customer."""
        self.birth_date(customer_id)
        return self._connection.execute("SELECT kind, account_id FROM accounts WHERE customer_id = ?", (customer_id,)).fetchall()

    def purchases(self, account_id: str) -> list[tuple[str, int, str]]:
        """Return merchant, amount and id of each purchase of an account, oldest first."""
        self._account(account_id)
        query = "SELECT counterpart, amount, transaction_id FROM transactions WHERE account_id = ? AND type = 'purchase' ORDER BY number"
        return self._connection.execute(query, (account_id,)).fetchall()

    def transfer(self, from_account: str, to_account: str, amount: int) -> None:
        """Move an amount from one account to another."""
        balance, is_frozen = self._account(from_account)
        _, is_target_frozen = self._account(to_account)
        if from_account == to_account:
            raise ToolError("from_account and to_account must differ")
        if is_frozen or is_target_frozen:
            raise ToolError("the account is frozen")
        if balance < amount:
            raise ToolError("the balance is too low")
        with self._connection:
            self._pay(from_account, -amount)
            self._pay(to_account, amount)
            self._book(from_account, "transfer", to_account, amount)

    def refund(self, transaction_id: str) -> None:
        """Pay the amount of a purchase back to its account."""
        query = "SELECT account_id, amount FROM transactions WHERE transaction_id = ?"
        account_id, amount = self._row(query, transaction_id, "no transaction has this id")
        with self._connection:
            self._pay(account_id, amount)
            self._book(account_id, "refund", transaction_id, amount)

    def freeze(self, account_id: str) -> None:
        """Freeze an account; a frozen one stays frozen."""
        self._account(account_id)
        self._write("UPDATE accounts SET is_frozen = 1 WHERE account_id = ?", account_id)

    def add_note(self, customer_id: str, text: str) -> None:
        """Write a note into a customer's file."""
        self.birth_date(customer_id)
        self._write("INSERT INTO notes VALUES (?, ?)", customer_id, text)

    def approve(self, from_account: str, amount: int) -> None:
        """Write down that a transfer was approved."""
        self._account(from_account)
        self._write("INSERT INTO approvals VALUES (?, ?)", from_account, amount)

    def _account(self, account_id: str) -> tuple[int, int]:
        return self._row("SELECT balance, is_frozen FROM accounts WHERE account_id = ?", account_id, "no account has this id")

    def _row(self, query: str, key: str, problem: str) -> tuple:
        row = self._connection.execute(query, (key,)).fetchone()
        if row is None:
            raise ToolError(problem)
        return row

    def _write(self, statement: str, *values: str | int) -> None:
        with self._connection as connection:
            connection.execute(statement, values)

    def _pay(self, account_id: str, amount: int) -> None:
        self._connection.execute("UPDATE accounts SET balance = balance + ? WHERE account_id = ?", (amount, account_id))

    def _book(self, account_id: str, kind: str, counterpart: str, amount: int) -> None:
        self._connection.execute(
            "INSERT INTO transactions (account_id, type, counterpart, amount) VALUES (?, ?, ?, ?)", (account_id, kind, counterpart, amount)
        )


def is_done(request: Request, customer_id: str, state: State) -> bool:
    """Return whether a request left its mark on the state; balances are looked at by `expected_state` alone."""
    match request:
        case Freeze(account):
            return any(row[:2] == ("account", account.account_id) and row[5] == 1 for row in state)
        case _:
            return _booking(request, customer_id) in state


def expected_state(task: LedgerTask, done: tuple[Request, ...]) -> State:
    """Return the rows of the bank after exactly these requests, worked out without a database."""
    balances = {account.account_id: account.balance for account in task.accounts}
    frozen: set[str] = set()
    state: State = Counter()
    for request in done:
        match request:
            case Transfer(source, target, amount):
                balances[source.account_id] -= amount
                balances[target.account_id] += amount
            case Refund(purchase, account):
                balances[account.account_id] += purchase.amount
            case Freeze(account):
                frozen.add(account.account_id)
        if not isinstance(request, Freeze):
            state[_booking(request, task.customer.customer_id)] += 1
    state.update(("customer", c.customer_id, c.name, c.birth_date) for c in task.customers)
    state.update(("transaction", p.transaction_id, p.account_id, "purchase", p.merchant, p.amount) for p in task.purchases)
    state.update(_account_row(a, balances[a.account_id], a.account_id in frozen) for a in task.accounts)
    return state


def _account_row(account: Account, balance: int, is_frozen: bool) -> tuple[object, ...]:
    return ("account", account.account_id, account.customer_id, account.kind, balance, int(is_frozen))


def _booking(request: Transfer | Refund | Note, customer_id: str) -> tuple[object, ...]:
    """Return the row that a request adds."""
    match request:
        case Transfer(source, target, amount):
            return ("transaction", None, source.account_id, "transfer", target.account_id, amount)
        case Refund(purchase, account):
            return ("transaction", None, account.account_id, "refund", purchase.transaction_id, purchase.amount)
        case Note(text):
            return ("note", customer_id, text)
