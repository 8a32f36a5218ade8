import pytest

from configs.load import ConfigError, load_config
from rl.evaluate_command import evaluation_config
from rl.run_folder import create_run_folder


def make_config(checkpoint, **changes):
    arguments = {"env_id": None, "episodes": 10, "split": "test", "temperature": 1.0, "options": [], "seed": 0}
    return evaluation_config(str(checkpoint), **{**arguments, **changes})


def make_run(tmp_path):
    folder = create_run_folder(load_config("smoke", [f"output.folder={tmp_path}", "env.options.max_calls=3"]))
    for step in (0, 2):
        (folder.checkpoints / f"step-{step:06d}").mkdir()
    return folder


def test_a_run_is_evaluated_at_its_last_checkpoint_with_its_own_environment(tmp_path):
    folder = make_run(tmp_path)
    config = make_config(folder.path)
    assert config.model.path == str(folder.checkpoints / "step-000002")
    assert (config.env.id, config.env.options, config.rollout.max_turns) == ("cairn/Ledger-v0", {"max_calls": 3}, 8)
    assert config.model.tools_prompt == "none"


def test_a_checkpoint_inside_a_run_takes_the_settings_of_the_run(tmp_path):
    folder = make_run(tmp_path)
    config = make_config(folder.checkpoints / "step-000000", options=["max_calls=5"])
    assert config.model.path.endswith("step-000000")
    assert config.env.options == {"max_calls": 5}


def test_a_shipped_policy_needs_an_environment():
    with pytest.raises(ConfigError, match="--env ID is needed"):
        make_config("builtin:ledger-start")
    assert make_config("builtin:ledger-start", env_id="cairn/Ledger-v0").env.id == "cairn/Ledger-v0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"checkpoint": "nowhere"}, "which does not exist"), ({"split": "train", "checkpoint": "builtin:ledger-start"}, "--split must be")],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(changes.pop("checkpoint"), **changes)


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    folder = create_run_folder(load_config("smoke", [f"output.folder={tmp_path}"]))
    with pytest.raises(ConfigError, match="must have a checkpoint"):
        make_config(folder.path)
