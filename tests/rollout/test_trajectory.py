import dataclasses

import pytest

from envs.messages import Verification
from rollout.trajectory import (
    CallRecord,
    Failure,
    FailureKind,
    Group,
    StopReason,
    Task,
    Trajectory,
    TurnRecord,
    Violation,
    read_trajectories,
    write_trajectories,
)


def make_trajectory(**changes) -> Trajectory:
    trajectory = Trajectory(
        trajectory_id="t1",
        task=Task("cairn/Ledger-v0", 17, 3),
        member=0,
        attempt=0,
        temperature=1.0,
        token_ids_T=(5, 9, 31, 7, 2, 11),
        action_mask_T=(False, False, True, True, True, False),
        sampler_logprob_T=(0.0, 0.0, -0.1, None, -0.3, 0.0),
        policy_version_T=(-1, -1, 4, 4, 5, -1),
        turns=(TurnRecord(2, 5, "hi", (CallRecord("call_0", "f", {"a": [1, None]}, "ok", False, False, 2, 5),)),),
        stop_reason=StopReason.ANSWERED,
        verification=Verification(True, {"done": True}),
        facts={"customer_id": "C412"},
        rewards={"success": 1.0, "total": 1.0},
        violations=(Violation("rule", 0, "call_0", 2, 5, "because"),),
    )
    return dataclasses.replace(trajectory, **changes)


def test_a_trajectory_survives_the_file(tmp_path):
    failed = make_trajectory(failure=Failure(FailureKind.TIMEOUT, "step"), stop_reason=StopReason.FAILED, verification=None, rewards={})
    write_trajectories(tmp_path / "a.jsonl", [make_trajectory()])
    write_trajectories(tmp_path / "a.jsonl", [failed])
    assert read_trajectories(tmp_path / "a.jsonl") == [make_trajectory(), failed]


def test_a_broken_line_is_named(tmp_path):
    write_trajectories(tmp_path / "a.jsonl", [make_trajectory()])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"trajectory_id": "t2"\n')
    with pytest.raises(ValueError, match="line 2 is not"):
        read_trajectories(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["token_ids_T", "action_mask_T", "sampler_logprob_T", "policy_version_T"])
def test_per_token_arrays_of_different_lengths_are_refused(name):
    with pytest.raises(ValueError, match="one length"):
        make_trajectory(**{name: getattr(make_trajectory(), name)[:-1]})


def test_versions_speak_of_sampled_tokens_only():
    assert make_trajectory().oldest_version == 4
    assert make_trajectory().num_action_tokens == 3
    assert make_trajectory(action_mask_T=(False,) * 6, policy_version_T=(-1,) * 6).oldest_version is None


def test_a_groups_staleness_counts_from_its_oldest_token():
    group = Group(Task("e", 1), (make_trajectory(policy_version_T=(-1, -1, 6, 6, 6, -1)), make_trajectory()))
    assert group.staleness(version=7) == 3


def test_a_failed_trajectory_is_never_graded():
    assert make_trajectory().is_graded
    assert not make_trajectory(rewards={}).is_graded
    assert not make_trajectory(failure=Failure(FailureKind.VERIFIER, "x")).is_graded
