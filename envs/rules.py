"""Process rules that an environment declares as data; the reward module evaluates them on the recorded calls.

Every rule reads parsed calls and their results, never raw text.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RequireBefore:
    """A successful call of `first` must precede each successful call of a tool in `then`.

    same_arguments: names of arguments that must be equal in both calls.
    above: (argument, bound): the rule binds only calls whose argument is greater than the bound.
    Example: `RequireBefore("large amounts need approval", "request_approval", ("transfer",), ("amount",), ("amount", 500))`.
    """

    name: str
    first: str
    then: tuple[str, ...]
    same_arguments: tuple[str, ...] = ()
    above: tuple[str, float] | None = None


@dataclass(frozen=True)
class ArgumentIn:
    """In each successful call of `tools`, every argument named in `arguments` must be among the values of the task fact `fact`.

    Example: `ArgumentIn("no write outside the task's customer", ("freeze_account",), ("account_id",), "customer_accounts")`.
    """

    name: str
    tools: tuple[str, ...]
    arguments: tuple[str, ...]
    fact: str


@dataclass(frozen=True)
class NoRepeat:
    """No two successful calls of a tool in `tools` may have the same arguments.

    Example: `NoRepeat("no write repeated", ("transfer", "refund"))`.
    """

    name: str
    tools: tuple[str, ...]


Rule = RequireBefore | ArgumentIn | NoRepeat
