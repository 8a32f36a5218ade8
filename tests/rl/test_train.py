"""Whole runs in real processes: the command line, Ray, the shipped policy, the Ledger; and what happens when parts are killed."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.checkpoints import list_checkpoints
from rl.evaluate import read_evaluations
from rl.metrics import read_metrics
from rollout.trajectory import read_trajectories

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
# Long enough to be killed in the middle, short enough for a test.
NUM_STEPS = 14
LONG = (
    f"learner.num_steps={NUM_STEPS}",
    "learner.groups_per_step=4",
    "learner.group_size=4",
    "env.num_train_tasks=64",
    "evaluation.num_episodes=8",
)


def start(*arguments, folder: Path, module="rl.cli") -> subprocess.Popen:
    """Start a command in a session of its own, output to a file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=(folder / "output.txt").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def start_run(folder: Path, *overrides: str) -> subprocess.Popen:
    return start("train", "smoke", f"output.folder={folder}", *overrides, folder=folder)


def wait(process: subprocess.Popen, folder: Path, code: int = 0) -> str:
    process.wait(timeout=240)
    output = (folder / "output.txt").read_text()
    assert process.returncode == code, output
    return output


def run_folder(folder: Path) -> Path:
    (path,) = (child for child in folder.iterdir() if child.name.startswith("smoke-"))
    return path


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        paths = list(folder.glob("smoke-*/metrics.jsonl"))
        if paths and any(record["step"] >= step and "loss/policy/mean" in record for record in read_metrics(paths[0])):
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within two minutes: {(folder / 'output.txt').read_text()}")


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """All processes that the run started, taken while it runs."""
    return psutil.Process(process.pid).children(recursive=True)


def actor(process: subprocess.Popen, name: str) -> psutil.Process:
    for child in family(process):
        try:
            if child.cmdline() and child.cmdline()[0].startswith(f"ray::{name}"):
                return child
        except psutil.Error:
            continue
    raise AssertionError(f"no actor {name} runs")


def assert_all_gone(processes: list[psutil.Process]) -> None:
    # Ray's own agents notice that their node is gone at their next look, which may be a minute away.
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def assert_complete(path: Path, num_steps: int) -> None:
    """Every step stands once in the metrics, and every task of an epoch was trained once."""
    steps = [record["step"] for record in read_metrics(path / "metrics.jsonl") if "loss/policy/mean" in record]
    assert steps == list(range(1, num_steps + 1))
    assert [evaluation.step for evaluation in read_evaluations(path / "evaluations.jsonl")] == [0, num_steps]
    indices = [
        t.task.index for s in steps for t in read_trajectories(path / f"trajectories/step-{s:06d}.jsonl") if t.member == 0 and t.is_graded
    ]
    assert len(set(indices)) == len(indices)
    assert (path / "summary.md").exists()


def test_a_run_leaves_all_that_the_readme_promises(tmp_path):
    output = wait(start_run(tmp_path), tmp_path)
    path = run_folder(tmp_path)
    assert str(path) in output
    assert re.search(r"cairn eval .*smoke-", output)
    assert_complete(path, 2)
    environment = json.loads((path / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert list((path / "tensorboard").iterdir())
    assert (path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = list_checkpoints(path / "checkpoints")[-1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("Done.", return_tensors="pt").input_ids
    assert model(ids).logits.shape[:2] == ids.shape

    for target in (path, checkpoint):
        evaluation = wait(start("eval", str(target), "--env", "cairn/Ledger-v0", "--episodes", "8", folder=tmp_path), tmp_path)
        assert "success" in evaluation

    refused = wait(start("train", "--resume", str(path), folder=tmp_path), tmp_path, code=1)
    assert "only an unfinished run can be resumed" in refused
    assert "Traceback" not in refused


@pytest.mark.parametrize("mode", [("mode=sync",), ("mode=async", "asynchrony.max_staleness=2")])
def test_a_killed_rollout_worker_costs_time_only(tmp_path, mode):
    process = start_run(tmp_path, *LONG, *mode)
    wait_for_step(tmp_path, 3)
    processes = family(process)
    actor(process, "RolloutWorker").kill()
    output = wait(process, tmp_path)
    assert "replaced" in output
    assert_complete(run_folder(tmp_path), NUM_STEPS)
    assert_all_gone(processes)


def test_a_killed_driver_leaves_no_process_and_the_run_resumes(tmp_path):
    process = start_run(tmp_path, *LONG)
    wait_for_step(tmp_path, 3)
    processes = family(process)
    process.kill()
    process.wait()
    assert_all_gone(processes)
    wait(start("train", "--resume", str(run_folder(tmp_path)), folder=tmp_path), tmp_path)
    assert_complete(run_folder(tmp_path), NUM_STEPS)


def test_a_killed_learner_ends_the_run_in_one_sentence_and_the_run_resumes(tmp_path):
    process = start_run(tmp_path, *LONG, "mode=async", "asynchrony.max_staleness=1")
    wait_for_step(tmp_path, 3)
    processes = family(process)
    actor(process, "LearnerWorker").kill()
    output = wait(process, tmp_path, code=1)
    assert "the learner's process must live through the run" in output
    assert "--resume" in output
    assert_all_gone(processes)
    wait(start("train", "--resume", str(run_folder(tmp_path)), folder=tmp_path), tmp_path)
    assert_complete(run_folder(tmp_path), NUM_STEPS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_closes_everything_and_says_how_to_resume(tmp_path, number):
    process = start_run(tmp_path, *LONG)
    wait_for_step(tmp_path, 3)
    processes = family(process)
    process.send_signal(number)
    output = wait(process, tmp_path, code=130)
    assert "--resume" in output
    assert "Traceback" not in output
    assert_all_gone(processes)
    if number == signal.SIGINT:
        wait(start("train", "--resume", str(run_folder(tmp_path)), folder=tmp_path), tmp_path)
        assert_complete(run_folder(tmp_path), NUM_STEPS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ray_job_submit_runs_the_same_job(tmp_path):
    port, dashboard = free_port(), free_port()
    ray = str(Path(sys.executable).parent / "ray")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # the job's `python` is the first on the cluster's path
    environment["RAY_AUTH_MODE"] = "disabled"  # a token would have to be made in the user's home
    head = subprocess.Popen(
        [ray, "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2", "--disable-usage-stats"],
        env=environment,
        stdout=(tmp_path / "head.txt").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", dashboard)) == 0:
                    break
            time.sleep(0.2)
        submit = [ray, "job", "submit", "--address", f"http://127.0.0.1:{dashboard}", "--working-dir", "."]
        job = ["python", "-m", "rl.train", "configs/recipes/smoke.toml", f"output.folder={tmp_path}"]
        result = subprocess.run([*submit, "--", *job], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "succeeded" in result.stdout
        assert_complete(run_folder(tmp_path), 2)

        too_much = subprocess.run(
            [*submit, "--", *job, "rollout.num_workers=9"], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240
        )
        assert too_much.returncode != 0
        assert "the cluster must have 10 CPUs" in too_much.stdout
    finally:
        processes = psutil.Process(head.pid).children(recursive=True)
        os.killpg(head.pid, signal.SIGKILL)
        head.wait(timeout=30)
        for child in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
