"""The trajectory: one frozen record of an episode, the single source of truth for everything after it.

Ids, masks, log-probs and versions are written once, as sampled; nothing downstream re-tokenises or recomputes them.
T tokens of the whole episode, prompt included. Entry t of any `*_T` speaks of token t.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from envs.messages import Json, Verification

NOT_SAMPLED = -1


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    """The agent gave a turn without calls, or the environment terminated."""
    TRUNCATED = "truncated"
    """The environment cut the episode."""
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    PARSE_ERROR = "parse_error"
    """Too many turns in a row held no valid call."""
    FAILED = "failed"
    """See `Trajectory.failure`."""


class FailureKind(StrEnum):
    """What broke; none of these says anything about the policy, so a failed trajectory is never graded."""

    ENVIRONMENT = "environment"
    VERIFIER = "verifier"
    TIMEOUT = "timeout"
    ENGINE = "engine"
    PROMPT = "prompt"
    """The first prompt leaves no room to sample."""


@dataclass(frozen=True)
class Failure:
    """Example: `Failure(FailureKind.TIMEOUT, "step took longer than 5 s")`."""

    kind: FailureKind
    text: str


@dataclass(frozen=True)
class CallRecord:
    """One call, as parsed, with its answer and its place among the tokens.

    arguments: None when the call was malformed. is_invalid: it never reached the tool. is_error: the tool refused.
    token_start, token_end: the span [start, end) of the turn that holds the call.
    Example: `CallRecord("call_0", "freeze_account", {"account_id": "A204"}, '{"ok":true}', False, False, 41, 63)`.
    """

    call_id: str
    name: str
    arguments: dict[str, Json] | None
    result: str
    is_error: bool
    is_invalid: bool
    token_start: int
    token_end: int


@dataclass(frozen=True)
class TurnRecord:
    """One turn: the sampled span [action_start, action_end), its text and calls, and the reward of the step after it.

    Example: `TurnRecord(40, 63, "<tool_call>...", (CallRecord(...),), 0.0)`.
    """

    action_start: int
    action_end: int
    text: str
    calls: tuple[CallRecord, ...] = ()
    reward: float = 0.0


@dataclass(frozen=True)
class Task:
    """One task of an environment: `Task("cairn/Ledger-v0", 17)`. `index` counts tasks over the whole run, epochs included."""

    env_id: str
    seed: int
    index: int = 0


@dataclass(frozen=True)
class Violation:
    """One breach of a process rule, with its place.

    Example: `Violation("identity before money moves", 2, "call_0", 88, 112, "transfer before any verify_identity")`.
    """

    rule: str
    turn: int
    call_id: str
    token_start: int
    token_end: int
    evidence: str


@dataclass(frozen=True)
class Trajectory:
    """An episode as it was sampled.

    token_ids_T, action_mask_T (true where the policy sampled the token), sampler_logprob_T (natural log at the sampling
    temperature; 0 where not sampled; None where the sampler lost it), policy_version_T (-1 where not sampled): equal lengths.
    facts: what the task allows, as declared by the environment (read by process rules).
    rewards: by component, filled by the reward module; empty until graded and for ever when `failure` is set.

    Example (two prompt tokens, three sampled, one observation):
        token_ids_T=(5, 9, 31, 7, 2, 11), action_mask_T=(False, False, True, True, True, False),
        sampler_logprob_T=(0.0, 0.0, -0.1, -1.2, -0.3, 0.0), policy_version_T=(-1, -1, 4, 4, 5, -1)
    """

    trajectory_id: str
    task: Task
    member: int
    attempt: int
    temperature: float
    token_ids_T: tuple[int, ...]
    action_mask_T: tuple[bool, ...]
    sampler_logprob_T: tuple[float | None, ...]
    policy_version_T: tuple[int, ...]
    turns: tuple[TurnRecord, ...]
    stop_reason: StopReason
    failure: Failure | None = None
    verification: Verification | None = None
    facts: dict[str, Json] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        lengths = {
            "token_ids_T": len(self.token_ids_T),
            "action_mask_T": len(self.action_mask_T),
            "sampler_logprob_T": len(self.sampler_logprob_T),
            "policy_version_T": len(self.policy_version_T),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all per-token arrays of a trajectory must have one length, got {lengths}")

    @property
    def num_action_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(self.action_mask_T)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of it, or None when nothing was sampled."""
        sampled = [version for version in self.policy_version_T if version != NOT_SAMPLED]
        return min(sampled, default=None)

    @property
    def is_graded(self) -> bool:
        """Whether it has a reward that learning may use."""
        return self.failure is None and bool(self.rewards)


@dataclass(frozen=True)
class Group:
    """All members of one task, in member order, and the failed attempts that were made again.

    Example: `Group(Task("cairn/Ledger-v0", 17), (Trajectory(...), Trajectory(...)), ())`.
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    failed_attempts: tuple[Trajectory, ...] = ()

    def staleness(self, version: int) -> int:
        """Return how many versions before `version` the oldest token of the group was sampled; 0 when none was."""
        oldest = [trajectory.oldest_version for trajectory in self.trajectories]
        return version - min((v for v in oldest if v is not None), default=version)


_ADAPTER = TypeAdapter(Trajectory)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Append trajectories to a JSON-lines file, one a line."""
    with path.open("ab") as file:
        for trajectory in trajectories:
            file.write(_ADAPTER.dump_json(trajectory) + b"\n")


def read_trajectories(path: Path) -> list[Trajectory]:
    """Return the trajectories of a JSON-lines file; raises ValueError naming the file and line that does not fit."""
    trajectories = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            trajectories.append(_ADAPTER.validate_json(line))
        except ValueError as error:
            raise ValueError(f"every line of {path} must be a trajectory, line {number} is not: {error}") from error
    return trajectories
