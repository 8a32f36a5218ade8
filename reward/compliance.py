"""Whether an agent kept the process rules of its environment, read from the recorded calls and never from text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from envs.messages import Json
from envs.rules import ArgumentIn, NoRepeat, RequireBefore, Rule
from rollout.trajectory import CallRecord, Trajectory, Violation


@dataclass(frozen=True)
class _DoneCall:
    """A call that the tool carried out, with the index of its turn."""

    turn: int
    call: CallRecord

    @property
    def arguments(self) -> dict[str, Json]:
        return self.call.arguments or {}


def find_violations(trajectory: Trajectory, rules: Sequence[Rule]) -> tuple[Violation, ...]:
    """Return every breach of the rules, in the order of the calls, and of the rules within one call.

    A call counts only when it was carried out: a malformed, refused or failed one neither fulfils nor breaks a rule. Calls of one
    turn count in their order. A call has one violation per rule at most.
    Raises KeyError when a rule names a fact that the environment did not declare.
    """
    done = [
        _DoneCall(index, call)
        for index, turn in enumerate(trajectory.turns)
        for call in turn.calls
        if not (call.is_error or call.is_invalid or call.arguments is None)
    ]
    violations = []
    for position, current in enumerate(done):
        for rule in rules:
            evidence = _breach(rule, current, done[:position], trajectory.facts)
            if evidence:
                call = current.call
                violations.append(Violation(rule.name, current.turn, call.call_id, call.token_start, call.token_end, evidence))
    return tuple(violations)


def _breach(rule: Rule, current: _DoneCall, earlier: list[_DoneCall], facts: dict[str, Json]) -> str | None:
    """Return how the call breaks the rule after the earlier calls, as a sentence, or None."""
    match rule:
        case RequireBefore():
            return _without_first(rule, current, earlier)
        case ArgumentIn():
            return _outside(rule, current, facts)
        case NoRepeat():
            return _repeated(rule, current, earlier)


def _without_first(rule: RequireBefore, current: _DoneCall, earlier: list[_DoneCall]) -> str | None:
    if current.call.name not in rule.then or not _is_above(rule, current):
        return None
    wanted = _selected(current, rule.same_arguments)
    if any(done.call.name == rule.first and _selected(done, rule.same_arguments) == wanted for done in earlier):
        return None
    same = f" with the same {' and '.join(rule.same_arguments)}" if rule.same_arguments else ""
    return f"{_show(current)} came before any successful {rule.first}{same}"


def _is_above(rule: RequireBefore, current: _DoneCall) -> bool:
    if rule.above is None:
        return True
    name, bound = rule.above
    value = current.arguments.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool) and value > bound


def _outside(rule: ArgumentIn, current: _DoneCall, facts: dict[str, Json]) -> str | None:
    if current.call.name not in rule.tools:
        return None
    if rule.fact not in facts:
        raise KeyError(f"the rule {rule.name!r} needs the fact {rule.fact}, the environment declared {sorted(facts)}: add it to facts()")
    fact = facts[rule.fact]
    allowed = {_key(value) for value in (fact if isinstance(fact, list) else [fact])}
    # An argument that the call left to its default names nothing outside.
    outside = [name for name in rule.arguments if name in current.arguments and _key(current.arguments[name]) not in allowed]
    return f"{_show(current)} has {' and '.join(outside)} outside {rule.fact}" if outside else None


def _repeated(rule: NoRepeat, current: _DoneCall, earlier: list[_DoneCall]) -> str | None:
    if current.call.name not in rule.tools:
        return None
    for done in earlier:
        if done.call.name == current.call.name and _key(done.arguments) == _key(current.arguments):
            return f"{_show(current)} repeats {done.call.call_id} of turn {done.turn}"
    return None


def _selected(done: _DoneCall, names: tuple[str, ...]) -> str:
    """Return the named arguments as a key; one that is absent equals only one that is absent too."""
    return _key({name: done.arguments[name] for name in names if name in done.arguments})


def _key(value: Json) -> str:
    """Return a text that is equal for equal JSON: 500 and 500.0 are one number, true and 1 are not, the order of keys is free."""
    return json.dumps(_with_plain_numbers(value), sort_keys=True)


def _with_plain_numbers(value: Json) -> Json:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_plain_numbers(item) for item in value]
        case dict():
            return {key: _with_plain_numbers(item) for key, item in value.items()}
    return value


def _show(done: _DoneCall) -> str:
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in done.arguments.items())
    return f"{done.call.name}({arguments})"
