"""The command line in processes of its own: what it says and how it exits."""

import subprocess
import sys

import pytest


def cairn(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "rl.cli", *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_help_names_the_commands():
    result = cairn("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("train", "eval", "envs"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train"], "needs a recipe or --resume RUN"),
        (["train", "quickstrat"], "did you mean quickstart"),
        (["train", "smoke", "learner.learning_rat=1"], "did you mean learner.learning_rate"),
        (["train", "smoke", "rollout.temperature=0"], "greedy samples are all alike"),
        (["train", "smoke", "env.id=cairn/Leger-v0"], "cairn/Ledger-v0"),
        (["train", "smoke", "env.options.max_cals=3"], "max_calls"),
        (["train", "smoke", "model.path=builtin:ledgerstart"], "ledger-start"),
        (["eval", "nowhere"], "which does not exist"),
        (["envs", "check", "cairn/Leger-v0"], "cairn/Ledger-v0"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, sentence):
    result = cairn(*arguments)
    assert result.returncode == 2, result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unwritable_folder_stops_the_run_before_it_starts():
    result = cairn("train", "smoke", "output.folder=/proc/runs")
    assert result.returncode == 1
    assert "must be writable" in result.stderr
    assert "Traceback" not in result.stderr


def test_check_prints_what_would_run_and_starts_nothing(tmp_path):
    result = cairn("train", "--check", "smoke", f"output.folder={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert "parameters" in result.stdout
    assert "GiB" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_envs_are_listed_and_checked():
    listed = cairn("envs", "list")
    assert "cairn/Ledger-v0" in listed.stdout.replace("\n", "")
    checked = cairn("envs", "check", "cairn/Ledger-v0", "--tasks", "5")
    assert checked.returncode == 0, checked.stdout
    assert "FAIL" not in checked.stdout
