"""Tasks of the Ledger: a small bank, a customer's requests of a given horizon, and the instruction in plain words.

A pure function of seed and options. Whatever an agent has to write can be copied from the instruction or from a tool's result.
"""

import random
from dataclasses import dataclass

APPROVAL_LIMIT = 500
"""A transfer of more than this needs an approval."""

MIN_CALLS, MAX_CALLS = 2, 20
"""Shortest and longest task, in calls of the oracle."""


@dataclass(frozen=True)
class Customer:
    """Example: `Customer("C412", "Ada Kim", "1984-03-12")`."""

    customer_id: str
    name: str
    birth_date: str


@dataclass(frozen=True)
class Account:
    """Example: `Account("A207", "C412", "savings", 8150)`; the balance is in whole euros."""

    account_id: str
    customer_id: str
    kind: str
    balance: int


@dataclass(frozen=True)
class Purchase:
    """Example: `Purchase("T913", "A207", "Acme", 37)`."""

    transaction_id: str
    account_id: str
    merchant: str
    amount: int


@dataclass(frozen=True)
class Transfer:
    """Move an amount between two accounts of the customer."""

    source: Account
    target: Account
    amount: int


@dataclass(frozen=True)
class Refund:
    """Pay a purchase back to the account that paid it."""

    purchase: Purchase
    account: Account


@dataclass(frozen=True)
class Freeze:
    """Freeze an account."""

    account: Account


@dataclass(frozen=True)
class Note:
    """Write a note into the customer's file."""

    text: str


Request = Transfer | Refund | Freeze | Note


@dataclass(frozen=True)
class LedgerTask:
    """The bank at the start, whose requests they are, what is to be done in which order, and how the agent is told."""

    customers: tuple[Customer, ...]
    accounts: tuple[Account, ...]
    purchases: tuple[Purchase, ...]
    customer: Customer
    requests: tuple[Request, ...]
    instruction: str

    @property
    def moves_money(self) -> bool:
        """Whether the customer's identity must be verified."""
        return any(isinstance(request, Transfer | Refund) for request in self.requests)

    @property
    def needs_accounts(self) -> bool:
        """Whether the accounts must be listed."""
        return any(not isinstance(request, Note) for request in self.requests)


# fmt: off
_FIRST_NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon", "Kira", "Leo", "Mara", "Nils", "Olga", "Paul",
    "Rosa", "Sami", "Tara", "Uma", "Vera", "Will", "Yara", "Zoe",
)
_LAST_NAMES = (
    "Adler", "Brown", "Costa", "Diaz", "Evans", "Fox", "Gray", "Hall", "Ito", "Jones", "Kim", "Lopez", "Moss", "Nash", "Okoro",
    "Park", "Reed", "Silva", "Tran", "Vega", "Wolf", "Young",
)
_KINDS = (
    "checking", "savings", "travel", "business",
)
_MERCHANTS = (
    "Acme", "Bistro", "Cinema", "Deli", "Energo", "Florist", "Garage", "Hotel", "Inkwell", "Juicery", "Kiosk", "Library", "Market",
    "Nordic", "Optica", "Pharma", "Quickmart", "Railway", "Studio", "Taxi", "Unitel", "Vino", "Webshop", "Zoo",
)
# fmt: on
_NOTES = (
    "lost card",
    "new address",
    "fee question",
    "moving abroad",
    "called twice",
    "prefers email",
    "wants a loan",
    "new phone",
    "asked for callback",
    "travel plans",
    "name change",
    "card declined",
)

_OPENINGS = (
    "{name}, born {born}: ",
    "{name} (born {born}) asks: ",
    "Customer {name}, born {born}, wants this: ",
    "Help {name}, born {born}: ",
)
_LINKS = (", then ", " and ", "; next ", ", after that ")
_TRANSFER = (
    "move {amount} from {source} to {target}",
    "transfer {amount} from {source} to {target}",
    "send {amount} from {source} to {target}",
)
_REFUND = ("refund {merchant} on {kind}", "refund the {merchant} purchase on {kind}", "pay back {merchant} on {kind}")
_FREEZE = ("freeze {kind}", "freeze the {kind} account", "block the {kind} account")
_NOTE = ("note '{text}'", "add the note '{text}'", "write the note '{text}'")


def generate_task(seed: int, min_calls: int, max_calls: int, *, quotes_ids: bool = True) -> LedgerTask:
    """Return the task of a seed; the oracle solves it in at least `min_calls` and at most `max_calls` calls, evenly spread.

    quotes_ids: the instruction names accounts and purchases with their ids, so that nothing has to be looked up to act on it.
    """
    rng = random.Random(seed)
    num_calls = rng.randint(min_calls, max_calls)
    bank = _Bank(rng)
    requests = _choose_requests(rng, bank, num_calls)
    return LedgerTask(
        tuple(bank.customers),
        tuple(bank.accounts),
        tuple(bank.purchases),
        bank.customers[0],
        requests,
        _write_instruction(rng, bank.customers[0], requests, quotes_ids=quotes_ids),
    )


class _Bank:
    """The task's customer, first, and two others; all ids of an episode differ in their digits."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._numbers = iter(rng.sample(range(100, 1000), 64))
        self.customers: list[Customer] = []
        self.accounts: list[Account] = []
        self.purchases: list[Purchase] = []
        names = zip(rng.sample(_FIRST_NAMES, 3), rng.choices(_LAST_NAMES, k=3), strict=True)
        for index, (first, last) in enumerate(names):
            born = f"{rng.randint(1940, 2005)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
            self._add_customer(Customer(self._next_id("C"), f"{first} {last}", born), num_accounts=rng.randint(3, 4) if index == 0 else 2)

    def _next_id(self, letter: str) -> str:
        return f"{letter}{next(self._numbers)}"

    def _add_customer(self, customer: Customer, num_accounts: int) -> None:
        rng = self._rng
        self.customers.append(customer)
        merchants = iter(rng.sample(_MERCHANTS, len(_MERCHANTS)))
        for kind in rng.sample(_KINDS, num_accounts):
            # High enough for every transfer of the longest task.
            account = Account(self._next_id("A"), customer.customer_id, kind, rng.randint(20_000, 90_000))
            self.accounts.append(account)
            self.purchases += [
                Purchase(self._next_id("T"), account.account_id, next(merchants), rng.randint(10, 499)) for _ in range(rng.randint(3, 4))
            ]


def _choose_requests(rng: random.Random, bank: _Bank, num_calls: int) -> tuple[Request, ...]:
    """Return requests that cost exactly `num_calls` calls, the look-up of the customer included."""
    draft = _Draft(rng, bank)
    while (left := num_calls - draft.cost()) > 0:
        affordable = {kind: weight for kind, weight in draft.possible().items() if draft.price(kind) <= left}
        kind = rng.choices(list(affordable), list(affordable.values()))[0] if affordable else "note"
        draft.add(kind)
    return tuple(draft.requests)


class _Draft:
    """Requests chosen so far, and what may still come: nothing twice, and no money through a frozen account."""

    def __init__(self, rng: random.Random, bank: _Bank) -> None:
        self._rng = rng
        self.requests: list[Request] = []
        customer = bank.customers[0]
        self._open = [account for account in bank.accounts if account.customer_id == customer.customer_id]
        ids = {account.account_id for account in self._open}
        self._purchases = [purchase for purchase in bank.purchases if purchase.account_id in ids]
        self._notes = rng.sample(_NOTES, len(_NOTES))
        self._small = rng.sample(range(100, APPROVAL_LIMIT), MAX_CALLS)
        self._large = rng.sample(range(APPROVAL_LIMIT + 1, 1000), MAX_CALLS)

    def cost(self) -> int:
        """Return the number of calls that the requests take."""
        moves_money = any(isinstance(request, Transfer | Refund) for request in self.requests)
        needs_accounts = any(not isinstance(request, Note) for request in self.requests)
        return 1 + moves_money + needs_accounts + sum(_own_cost(request) for request in self.requests)

    def possible(self) -> dict[str, float]:
        """Return the kinds of request that may be added, with their weights."""
        weights = {"transfer": 2.0, "large transfer": 2.0} if len(self._open) >= 2 else {}
        if any(purchase.account_id == account.account_id for purchase in self._purchases for account in self._open):
            weights["refund"] = 4.0
        if len(self._open) >= 3:
            weights["freeze"] = 1.0
        if sum(isinstance(request, Note) for request in self.requests) < 2:
            weights["note"] = 2.0
        return weights

    def price(self, kind: str) -> int:
        """Return how many calls a request of this kind would add."""
        moves_money = any(isinstance(request, Transfer | Refund) for request in self.requests)
        needs_accounts = any(not isinstance(request, Note) for request in self.requests)
        own = {"transfer": 1, "large transfer": 2, "refund": 2, "freeze": 1, "note": 1}[kind]
        verify = kind in ("transfer", "large transfer", "refund") and not moves_money
        return own + verify + (kind != "note" and not needs_accounts)

    def add(self, kind: str) -> None:
        """Add a random request of this kind."""
        rng = self._rng
        match kind:
            case "transfer" | "large transfer":
                source, target = rng.sample(self._open, 2)
                self.requests.append(Transfer(source, target, (self._small if kind == "transfer" else self._large).pop()))
            case "refund":
                accounts = {account.account_id: account for account in self._open}
                purchase = rng.choice([purchase for purchase in self._purchases if purchase.account_id in accounts])
                self._purchases.remove(purchase)
                self.requests.append(Refund(purchase, accounts[purchase.account_id]))
            case "freeze":
                account = rng.choice(self._open)
                self._open.remove(account)
                self.requests.append(Freeze(account))
            case _:
                self.requests.append(Note(self._notes.pop()))


def _own_cost(request: Request) -> int:
    """Return the calls of one request alone: a refund needs the list of transactions, a large transfer its approval."""
    is_large = isinstance(request, Transfer) and request.amount > APPROVAL_LIMIT
    return 2 if is_large or isinstance(request, Refund) else 1


def _write_instruction(rng: random.Random, customer: Customer, requests: tuple[Request, ...], *, quotes_ids: bool) -> str:
    text = rng.choice(_OPENINGS).format(name=customer.name, born=customer.birth_date)
    for index, request in enumerate(requests):
        text += (rng.choice(_LINKS) if index else "") + _write_request(rng, request, quotes_ids=quotes_ids)
    return text + "."


def _write_request(rng: random.Random, request: Request, *, quotes_ids: bool) -> str:
    def name(account: Account) -> str:
        return f"{account.kind} {account.account_id}" if quotes_ids else account.kind

    match request:
        case Transfer(source, target, amount):
            return rng.choice(_TRANSFER).format(amount=amount, source=name(source), target=name(target))
        case Refund(purchase, account):
            merchant = f"{purchase.merchant} {purchase.transaction_id}" if quotes_ids else purchase.merchant
            return rng.choice(_REFUND).format(merchant=merchant, kind=name(account))
        case Freeze(account):
            return rng.choice(_FREEZE).format(kind=name(account))
        case Note(text):
            return rng.choice(_NOTE).format(text=text)
